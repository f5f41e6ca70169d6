"""Private names of torch, and names of other packages, stand in ``ddp_patch/compat`` alone."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ddp_patch

ROOT = Path(ddp_patch.__path__[0])
MODULES = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.rglob("*.py"))]
COMPAT = [name for name in MODULES if name.startswith("compat/")]
OTHERS = [name for name in MODULES if name not in COMPAT]

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
