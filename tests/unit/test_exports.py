"""The public names, their examples, what importing them costs, and who may import or name what."""

import ast
import doctest
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import ddp_patch
from ddp_patch import samplers

ROOT = Path(ddp_patch.__path__[0])
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


@pytest.mark.parametrize("name", ["ddp_patch", "ddp_patch.errors", "ddp_patch.samplers", "ddp_patch.testing"])
def test_every_module_that_users_import_lists_what_it_exports_sorted(name: str) -> None:
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
    for path in ROOT.rglob("*.py"):
        here = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for _, imported, *_ in imports_of(path):
            # Within a room Python itself refuses circles.
            assert FLOORS[imported] < FLOORS[here] or here == imported, f"{path} imports {imported}"


def test_each_integration_imports_its_framework_at_the_top_and_public_names_only() -> None:
    for path in (ROOT / "integrations").glob("[!_]*.py"):
        imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
        framework = [node for node in imports if str(node.module).split(".")[0] == path.stem]
        assert framework, f"{path} does not import {path.stem}"
        assert not any(name.name.startswith("_") for node in framework for name in node.names)


# Private names of torch, and names of other packages, stand in ``ddp_patch/compat`` alone.

FILES = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.rglob("*.py"))]
COMPAT = [name for name in FILES if name.startswith("compat/")]
OTHERS = [name for name in FILES if name not in COMPAT]

# torch has these in no __all__.
UNEXPORTED = {"ProcessGroupGloo", "WorkerInfo"}
# Full names of classes and modules of other packages, in strings.
PACKAGES = (
    *("accelerate", "catalyst", "datasets", "lightning", "oml", "pytorch_metric_learning"),
    *("torch", "torch_geometric", "torchdata", "torchreid", "transformers", "trl"),
)
FULL_NAME = re.compile(rf"({'|'.join(PACKAGES)})(\.\w+)+")


def tree_of(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text())


def docstrings(tree: ast.AST) -> set[int]:
    """The ids of the constants that are docstrings."""
    bodies = (node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    return {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}


def strings(tree: ast.AST) -> Iterator[str]:
    """Strings that a module works with: no docstrings, and no sentences."""
    told = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> Iterator[str]:
    """Every name that a module defines or assigns, as a name or an attribute."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.alias(name=name, asname=asname):
                yield asname or name


@cache
def marks() -> set[str]:
    """The private names of others that stand as strings in compat, also within its functions."""
    told = (text for module in COMPAT for text in strings(tree_of(module)))
    return {text for text in told if text.startswith("_") and not text.endswith("__")}


@cache
def ours() -> set[str]:
    """Every name that another module defines."""
    return {name for module in OTHERS for name in defined(tree_of(module))}


@pytest.mark.parametrize("module", OTHERS)
def test_no_other_module_imports_what_is_private(module: str) -> None:
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith(("ddp_patch", "_ddp_patch_")):
            assert not any(map(is_private, [*str(node.module).split("."), *(alias.name for alias in node.names)]))
            assert not {alias.name for alias in node.names} & UNEXPORTED
        if isinstance(node, ast.Import):
            assert not any(is_private(part) for alias in node.names for part in alias.name.split("."))


@pytest.mark.parametrize("module", OTHERS)
def test_no_other_module_reaches_for_an_attribute_that_nobody_here_defines(module: str) -> None:
    reached = {node.attr for node in ast.walk(tree_of(module)) if isinstance(node, ast.Attribute)}
    assert {name for name in reached if is_private(name)} <= ours() | {
        "_getframe",
        "_current_frames",
        "_exit",
        "_fields",
        "_make",
        "_replace",
    }  # Python's, documented
    assert not reached & UNEXPORTED


@pytest.mark.parametrize("module", OTHERS)
def test_no_other_module_names_a_mark_or_a_class_of_another_package(module: str) -> None:
    for text in strings(tree_of(module)):
        assert text not in marks()
        assert not FULL_NAME.fullmatch(text), text


@pytest.mark.parametrize("module", [module for module in OTHERS if not module.startswith("running/")])
def test_the_core_names_no_accelerator(module: str) -> None:
    names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree_of(module))}
    assert not {"cuda", "xpu", "mps", "npu"} & {*names, *strings(tree_of(module))}


def test_the_checks_above_can_fail() -> None:
    nodes = [node for module in COMPAT for node in ast.walk(tree_of(module))]
    imported = [alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert any(map(is_private, imported))
    assert set(imported) & UNEXPORTED
    assert any(FULL_NAME.fullmatch(text) for module in COMPAT for text in strings(tree_of(module)))
    assert any(getattr(node, "attr", "") == "cuda" for node in ast.walk(tree_of("running/launch.py")))
    assert {"_iterator", "_is_accelerate_prepared", "_distributed", "_drop_last", "__pl_saved_args"} <= marks()
