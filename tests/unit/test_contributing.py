"""The page for contributors names every nox session, and each that it names exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "contributing.md").read_text()


def sessions() -> list[str]:
    """The functions of the noxfile that ``nox.session`` decorates."""
    return [
        node.name
        for node in ast.parse((ROOT / "noxfile.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and any("session" in ast.unparse(mark) for mark in node.decorator_list)
    ]


def test_the_table_has_every_session_once() -> None:
    assert sorted(re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE)) == sorted(sessions())


def test_the_workflows_run_sessions_that_exist() -> None:
    workflows = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").iterdir())
    named = set(re.findall(r"session: (\w+)", workflows)) | {
        name for command in re.findall(r"nox -s ((?:[a-z]+ ?)+)", workflows) for name in command.split()
    }
    assert {"minimum", "package", "tests"} <= named <= set(sessions())


def test_every_command_names_sessions_that_exist() -> None:
    named = {name for command in re.findall(r"nox -s ((?:[a-z]+ ?)+)", PAGE) for name in command.split()}
    assert {"tests", "minimum"} <= named <= set(sessions())
