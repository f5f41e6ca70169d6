"""No test runs the benchmarks; these see that what they import of this package, and where they write, is there."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
PUT = re.compile(r'\b(?:show_and_)?put\(\s*PAGE,\s*"([\w-]+)"')


def imported(script: Path) -> Iterator[tuple[str, str]]:
    """The names that a script imports from this package and from the tests, with their modules."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in {"ddp_patch", "zoo"}:
            yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda script: script.stem)
def test_what_a_benchmark_imports_is_there(script: Path) -> None:
    for module, name in imported(script):
        assert hasattr(import_module(module), name) or find_spec(f"{module}.{name}"), f"{module} has no {name}"


def written(script: Path) -> list[tuple[str, str]]:
    """The pages that a script writes to, with the names of its tables."""
    text = script.read_text()
    page = re.search(r'^PAGE = .*"([\w-]+\.md)"$', text, re.MULTILINE)
    return [(page[1], name) for name in PUT.findall(text)] if page else []


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda script: script.stem)
def test_what_a_benchmark_writes_has_its_place(script: Path) -> None:
    for page, name in written(script):
        text = (FOLDER.parent / "docs" / page).read_text()
        assert [text.count(f"<!-- {name}: {mark} -->") for mark in ("begin", "end")] == [1, 1], f"{page} has no {name}"


def test_the_names_are_found() -> None:
    assert ("ddp_patch", "patch_dataloader_to_ddp") in set(imported(FOLDER / "peers.py"))
    assert ("benchmarks.md", "figures") in written(FOLDER / "balance.py")
