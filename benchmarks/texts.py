"""Real texts that are everywhere where Python is: the docstrings of its standard library."""

import ast
import sysconfig
from functools import cache
from pathlib import Path

__all__ = ["docstrings"]

LEFT_OUT = {"dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}


@cache
def docstrings() -> tuple[str, ...]:
    """Return each docstring of the standard library once, in alphabetical order; without those of its tests."""
    root, found = Path(sysconfig.get_path("stdlib")), set()
    for file in root.rglob("*.py"):
        if LEFT_OUT.isdisjoint(file.relative_to(root).parts):
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                    found.add(ast.get_docstring(node))
    return tuple(sorted(filter(None, found)))
