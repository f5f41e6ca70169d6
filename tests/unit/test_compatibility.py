"""The page of versions says what the project says, and what was tried."""

import re
import tomllib
from pathlib import Path

import pytest
from compatibility import PAGE, row, with_row

import ddp_patch

ROOT = Path(__file__).parents[2]
TEXT = PAGE.read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Which session ran with which Python, torch and numpy.
TRIED = {name: versions for name, *versions in re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \| (\S+) \|", TEXT, re.M)}


def test_minimum_ran_with_the_lowest_versions_that_the_project_claims() -> None:
    lowest = dict(
        requirement.split(">=") for requirement in ["python" + PROJECT["requires-python"], *PROJECT["dependencies"]]
    )
    for (name, version), tried in zip(lowest.items(), TRIED["minimum"], strict=True):
        assert f"{tried}.".startswith(f"{version}."), name
        assert name in {"python", "torch", "numpy"}
        assert f"{name.capitalize() if name == 'python' else name} {version}" in TEXT
    assert TRIED["minimum"][1:] == [f"{lowest['torch']}.0", f"{lowest['numpy']}.0"]


def test_every_python_that_is_claimed_was_tried() -> None:
    claimed = {name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Python :: 3" in name}
    assert claimed == {python.rpartition(".")[0] for python, *_ in TRIED.values()}


def test_ci_runs_what_the_page_says() -> None:
    for name in ("torch", "numpy"):
        (version,) = re.findall(rf"^{name}==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
        assert f"{name} {version}" in TEXT


def test_every_private_name_of_torch_has_its_line() -> None:
    code = (Path(ddp_patch.__path__[0]) / "compat" / "private_torch.py").read_text()
    found = set(re.findall(r'(?:private\(\s*|name = )"torch\.[\w.]+\.(\w+)"', code))
    assert found >= {"_get_default_store", "_reset"}
    assert [name for name in sorted(found) if not re.search(rf"^\|.*\b{name}\b", TEXT, re.M)] == []


def test_a_session_writes_its_own_line() -> None:
    page = "| session |\n| `minimum` | 3 |\n| `newest` | 4 |\n"
    line = row("newest", 1234, 5)
    assert with_row(page, line) == f"| session |\n| `minimum` | 3 |\n{line}\n"
    assert line.endswith(" | 1,234 | 5 |")
    with pytest.raises(ValueError, match="0 lines"):
        with_row(page, row("other", 1, 0))
