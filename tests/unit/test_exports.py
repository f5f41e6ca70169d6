"""The public names, their examples, and what importing them costs."""

import ast
import doctest
import importlib
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import ddp_patch
from ddp_patch import samplers

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
    "positions_and_padding": 5,
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
    "elastic": 14,
    "testing": 14,
    "integrations": 15,
    "running": 16,
    "auditing": 17,
    "__main__": 18,
    "__init__": 18,
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


@pytest.mark.parametrize("name", MODULES)
def test_every_example_runs(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch}).failed == 0


def test_every_public_call_and_sampler_has_an_example() -> None:
    calls = [name for name in ddp_patch.__all__ if name[0].islower() or "Wrapper" in name]
    described = [getattr(ddp_patch, name) for name in calls] + [getattr(samplers, name) for name in samplers.__all__]
    assert [one.__name__ for one in described if ">>> " not in (one.__doc__ or "")] == []


# Imports one after the other, and prints after each which modules were imported, or tried to be: those too of what is
# not installed. At last, uses what is imported where it is used.
STAGES = """
import contextlib, json, sys
tried = set()
class Noting:
    def find_spec(name, path=None, target=None):
        tried.add(name)
sys.meta_path.insert(0, Noting)
for name in ("torch", "numpy.random", "ddp_patch", "hypothesis", "not_installed"):
    with contextlib.suppress(ImportError):
        __import__(name)
    print(json.dumps(sorted(tried)))
    tried.clear()
import ddp_patch
loaded = [name in sys.modules for name in ("ddp_patch.auditing", "ddp_patch.samplers")]
used = ddp_patch.audit.__module__, ddp_patch.samplers.PKBatchSampler.__name__
print(json.dumps([loaded, "audit" in dir(ddp_patch), used]))
"""


@cache
def stages() -> tuple[list[set[str]], list[object]]:
    """What each stage imports, and what the last line says."""
    command = [sys.executable, "-c", STAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - as above
    *lines, last = map(json.loads, done.stdout.splitlines())
    return [set(line) for line in lines], last


def packages(modules: Iterable[str]) -> set[str]:
    return {module.split(".")[0] for module in modules} - sys.stdlib_module_names


def test_importing_it_imports_no_framework_and_few_modules_more_than_torch() -> None:
    """Not even a framework that is not installed. How long it takes is in docs/benchmarks.md."""
    _, numpys, ours, *others = stages()[0]
    assert packages(ours) == {"ddp_patch"}
    modules = {name for name in numpys | ours if name.split(".")[0] != "ddp_patch"}
    assert len(modules) <= 25  # numpy.random, numpy.typing, and decimal and fractions
    # The checks above can fail.
    assert [name in packages(found) for name, found in zip(("hypothesis", "not_installed"), others, strict=True)] == [
        True,
        True,
    ]


def test_the_audit_and_the_samplers_are_imported_where_they_are_used() -> None:
    assert stages()[1] == [[False, False], True, ["ddp_patch.auditing.auditing", "PKBatchSampler"]]
    with pytest.raises(AttributeError, match="module 'ddp_patch' has no attribute 'no_such'"):
        ddp_patch.no_such  # type: ignore[attr-defined]  # noqa: B018 - it is the access that raises


def imports_of(path: Path) -> Iterator[list[str]]:
    """The parts of the names of the modules of this package that a file imports from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddp_patch."):
            yield str(node.module).split(".")


def test_nothing_imports_upwards() -> None:
    root = Path(ddp_patch.__path__[0])
    for path in root.rglob("*.py"):
        here = path.relative_to(root).parts[0].removesuffix(".py")
        for _, imported, *_ in imports_of(path):
            # Within a room Python itself refuses circles.
            assert FLOORS[imported] < FLOORS[here] or here == imported, f"{path} imports {imported}"


# The audit's own floors; its other modules stand on top of all of these.
AUDIT_FLOORS = {"problems": 0, "ranks": 0, "world": 1, "picture": 2, "report": 3, "judge": 4}


def test_nothing_in_the_audit_imports_upwards() -> None:
    root = Path(ddp_patch.__path__[0]) / "auditing"
    assert all((root / name).is_dir() or (root / f"{name}.py").is_file() for name in AUDIT_FLOORS)
    for path in root.rglob("*.py"):
        here = path.relative_to(root).parts[0].removesuffix(".py")
        for imported in [parts[2] for parts in imports_of(path) if parts[1] == "auditing" and len(parts) > 2]:
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
        assert {room for _, room, *_ in imports_of(path)} <= {
            "errors",
            "loaders",
            "orders",
            "positions_and_padding",
            "samplers",
            "validation",
        }
