"""The public names, and what importing them costs."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

import ddp_patch

FOUND = ["ddp_patch", *(module.name for module in pkgutil.walk_packages(ddp_patch.__path__, "ddp_patch."))]
# What imports a framework is tested where that is installed.
MODULES = [name for name in FOUND if not name.startswith("ddp_patch.integrations.")]

# The rooms, floor by floor: nothing imports upwards.
FLOORS = {
    "errors": 1,
    "validation": 2,
    "walks": 2,
    "compat": 3,
    "costs": 3,
    "options": 4,
    "plan": 5,
    "orders": 6,
    "loaders": 7,
    "samplers": 8,  # a wing of its own: nothing of the core imports it
    "ranks": 8,
    "sharding": 9,
    "streams": 10,
    "wrappers": 11,
    "resume": 11,
    "evaluation": 11,
    "loader": 12,
    "patching": 13,
    "testing": 14,
    "integrations": 15,
    "running": 16,
    "auditing": 17,
    "cli": 18,
    "__main__": 19,
    "__init__": 19,
}


def test_the_public_names_are_these() -> None:
    assert ddp_patch.__all__ == [
        "Cost",
        "DDPBatchSamplerWrapper",
        "DDPPatchError",
        "DDPPatchWarning",
        "DDPSamplerWrapper",
        "PatchedLoader",
        "assert_loaders_patched",
        "audit",
        "autopatch",
        "check_loaders_is_patched",
        "extract_loader_parameters",
        "gather_in_order",
        "gather_step",
        "iter_with_mask",
        "iter_with_weights",
        "leave_alone",
        "loader_state",
        "patch_dataloader_to_ddp",
        "restore_loader",
        "unpatched",
    ]


@pytest.mark.parametrize("name", MODULES)
def test_every_module_lists_what_it_exports_sorted(name: str) -> None:
    module = importlib.import_module(name)
    # As ruff sorts them: constants, classes, functions.
    assert list(module.__all__) == sorted(module.__all__, key=lambda one: (not one.isupper(), one.islower(), one))
    assert all(hasattr(module, public) for public in module.__all__)


# Sees each import that is tried, of what is not installed too.
TRIED = """
import sys
tried = set()
class Noting:
    def find_spec(name, path=None, target=None):
        tried.add(name)
sys.meta_path.insert(0, Noting)
{code}
print(*tried)
"""


@cache
def imported_by(code: str) -> frozenset[str]:
    """The modules that are imported, or tried to be."""
    command = [sys.executable, "-c", TRIED.format(code=code)]
    return frozenset(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())  # noqa: S603 - as above


def packages(modules: Iterable[str]) -> set[str]:
    return {module.split(".")[0] for module in modules} - sys.stdlib_module_names


def added_by(code: str) -> frozenset[str]:
    return imported_by(f"import torch\n{code}") - imported_by("import torch")


def test_importing_it_imports_no_framework_not_even_one_that_is_not_installed() -> None:
    assert packages(added_by("import ddp_patch")) - packages(added_by("import numpy.random")) == {"ddp_patch"}


@pytest.mark.parametrize("other", ["hypothesis", "not_installed"])
def test_the_check_above_can_fail(other: str) -> None:
    code = f"import ddp_patch, contextlib\nwith contextlib.suppress(ImportError): import {other}"
    assert packages(added_by(code)) >= {"ddp_patch", other}


def test_importing_it_adds_few_modules_to_those_of_torch() -> None:
    """How long that takes is in docs/benchmarks.md."""
    others = {name for name in added_by("import ddp_patch") if name.split(".")[0] != "ddp_patch"}
    assert len(others) <= 25  # numpy.random, numpy.typing, and decimal and fractions


def test_the_audit_is_imported_where_it_is_used() -> None:
    script = (
        "import sys, ddp_patch; print('ddp_patch.auditing' in sys.modules, 'audit' in dir(ddp_patch)); "
        "print(ddp_patch.audit.__module__, 'ddp_patch.auditing' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)  # noqa: S603 - our own script
    assert done.stdout.split() == ["False", "True", "ddp_patch.auditing.auditing", "True"]
    with pytest.raises(AttributeError, match="module 'ddp_patch' has no attribute 'no_such'"):
        ddp_patch.no_such  # type: ignore[attr-defined]  # noqa: B018 - it is the access that raises


def test_the_samplers_are_imported_where_they_are_used() -> None:
    script = (
        "import sys, ddp_patch; print('ddp_patch.samplers' in sys.modules); "
        "print(ddp_patch.samplers.PKBatchSampler.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)  # noqa: S603 - our own script
    assert done.stdout.split() == ["False", "PKBatchSampler"]


def test_nothing_imports_upwards() -> None:
    root = Path(ddp_patch.__path__[0])
    for path in root.rglob("*.py"):
        here = path.relative_to(root).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddp_patch."):
                imported = str(node.module).split(".")[1]
                below = FLOORS[imported] < FLOORS[here]
                # Within a room Python itself refuses circles.
                assert below or here == imported, f"{path} imports {imported}"


# The audit's own floors; its other modules stand on top of all of these.
AUDIT_FLOORS = {
    "draw_records": 0,
    "draw_loaders": 1,
    "draw_ranks": 2,
    "draw_world": 3,
    "judge_coverage": 4,
    "judge_problems": 5,
    "judge_causes": 6,
    "show_maps": 7,
    "show_svg": 7,
    "show_figures": 8,
    "show_report": 9,
}


def test_nothing_in_the_audit_imports_upwards() -> None:
    root = Path(ddp_patch.__path__[0]) / "auditing"
    assert all((root / name).is_dir() or (root / f"{name}.py").is_file() for name in AUDIT_FLOORS)
    for path in root.rglob("*.py"):
        here = path.relative_to(root).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddp_patch.auditing."):
                imported = str(node.module).split(".")[2]
                below = AUDIT_FLOORS.get(imported, 10) < AUDIT_FLOORS.get(here, 10)
                both_on_top = {here, imported}.isdisjoint(AUDIT_FLOORS)
                assert below or here == imported or both_on_top, f"{path} imports {imported}"


def test_each_integration_imports_its_framework_at_the_top_and_public_names_only() -> None:
    for path in (Path(ddp_patch.__path__[0]) / "integrations").glob("[!_]*.py"):
        imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
        framework = [node for node in imports if str(node.module).split(".")[0] == path.stem]
        assert framework, f"{path} does not import {path.stem}"
        assert not any(name.name.startswith("_") for node in framework for name in node.names)


def test_the_samplers_know_nothing_of_ranks() -> None:
    for path in (Path(ddp_patch.__path__[0]) / "samplers").glob("*.py"):
        imported = {
            str(node.module).split(".")[1]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddp_patch.")
        }
        assert imported <= {"errors", "loaders", "orders", "plan", "samplers", "validation"}
