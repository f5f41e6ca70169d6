"""The tests of the pages' code blocks find what is wrong with a block."""

import re
from pathlib import Path

import pytest
from documented import CHECKOUT, nox_sessions, regions_of, run_command

DOCS = CHECKOUT / "docs"
FENCE = "```"


def found(page: str, block: int = -1) -> str | None:
    """Test one block of a page, the last one by default; return what is wrong with it."""
    example = regions_of(page, DOCS / "page.md")[block]
    result: str | None = example.region.evaluator(example)
    return result


def fenced(language: str, *lines: str) -> str:
    return "\n".join([FENCE + language, *lines, FENCE, ""])


PRINTING = fenced("python", "print(1 + 1)")


@pytest.mark.parametrize(
    ("page", "block"),
    [
        (fenced("python", "x = 1") + fenced("python", "assert x == 1"), -1),
        (PRINTING + fenced("text", "2"), 0),
        (PRINTING + "\n" + fenced("text", "2"), 1),
        (fenced("python", "print('took 3 s')") + fenced("text", "took ... s"), 0),
        (fenced("console", "$ echo a; echo b >&2", "a", "$ echo c | \\", "  cat", "c"), 0),
        (fenced("console", "$ echo a; exit 3", "a", "$ echo $?", "3", "$ echo $?", "0"), 0),
        ("<!-- varies: [0-9]+ s -->\n" + fenced("console", "$ echo took 12 s", "took 3 s"), 0),
        (fenced("sh", "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt nox"), 0),
        (fenced("sh", "pip install -e '.[test]'", "pytest -n auto tests/unit"), 0),
        (
            fenced(
                "sh", "nox -r -s tests -- -k shares", ".venv/bin/nox -s tests lint types", "nox -s bench -- --largest 6"
            ),
            0,
        ),
        (fenced("sh", "python3 -m venv .venv && source .venv/bin/activate", "pip install '.[demo,test]'"), 0),
        ("<!-- part: examples/single.py -->\n" + fenced("python", "import torch", "from torch import nn"), 0),
        (
            "<!-- part: examples/single.py -->\n" + fenced("python", "for x, y in train:", "    optimizer.zero_grad()"),
            0,
        ),
        ("<!-- part: ../LICENSE -->\n" + fenced("", *(CHECKOUT / "LICENSE").read_text().splitlines()[:3]), 0),
        (" 1. item\n\n    ```python\n    assert True\n    ```\n", 0),
    ],
)
def test_what_holds(page: str, block: int) -> None:
    assert found(page, block) is None


@pytest.mark.parametrize(
    ("page", "block", "message"),
    [
        (PRINTING, 0, "another output"),
        (PRINTING + fenced("text", "3"), 0, "another output"),
        (PRINTING + "words\n\n" + fenced("text", "2"), 0, "another output"),
        (PRINTING + "words\n\n" + fenced("text", "2"), 1, "there is none"),
        (fenced("text", "2"), 0, "there is none"),
        (fenced("python", "x = 1") + fenced("text", "1"), 0, "another output"),
        (fenced("console", "$ echo a", "b"), 0, "another output"),
        (fenced("console", "$ echo a"), 0, "another output"),
        (fenced("console", "$ echo a; exit 3", "a"), 0, "status 3"),
        (fenced("console", "a", "$ echo a"), 0, "begins with a command"),
        (fenced("console", "echo a"), 0, "begins with a command"),
        (fenced("sh", "torchrun docs/examples/ddp.py"), 0, "is not run"),
        (fenced("sh", "nox -s tests nothing"), 0, "sessions that do not exist: nothing"),
        (fenced("sh", "nox"), 0, "is not run"),
        (fenced("sh", "pytest -n auto tests/nothing"), 0, "names what does not exist: tests/nothing"),
        (fenced("sh", "pip install '.[nothing]'"), 0, "extras that do not exist: nothing"),
        (fenced("sh", "pip install -c other.txt nox"), 0, "other constraints"),
        (fenced("sh", "pip install left-pad"), 0, "what constraints.txt does not: left-pad"),
        (fenced("yaml", "a: 1"), 0, "Nothing tests"),
        (fenced("", "a"), 0, "Nothing tests a block of this kind: no language"),
        (fenced("diff", "+a"), 0, "Nothing tests"),
        ("<!-- whole: examples/single.py -->\n" + fenced("python", "import torch"), 0, "not the whole"),
        ("<!-- part: examples/single.py -->\n" + fenced("python", "import torch", "import os"), 0, "not a piece"),
        ("<!-- part: examples/nothing.py -->\n" + fenced("python", "import torch"), 0, "name one file"),
        ("<!-- part: examples/single.py -->\n" + fenced("diff", "+import torch"), 0, "name two files"),
        (fenced("console", "$ false", "$ echo $?", "0"), 0, "another output"),
        ("<!-- varies: [0-9]+ s -->\n" + fenced("console", "$ echo took 12 m", "took 3 s"), 0, "another output"),
    ],
)
def test_what_does_not_hold(page: str, block: int, message: str) -> None:
    assert message in str(found(page, block))


def test_a_block_that_raises_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        found(fenced("python", "1 / 0"))


def test_blocks_need_not_be_tested_in_order() -> None:
    page = fenced("python", "n = 1") + fenced("python", "n += 1", "print(n)") + fenced("text", "2")
    examples = regions_of(page, DOCS / "page.md")
    assert [example.region.evaluator(example) for example in reversed(examples)] == [None, None, None]


def test_a_command_that_does_not_end_is_ended() -> None:
    status, _, error = run_command("echo begun; sleep 100", limit_s=0.5)
    assert status != 0
    assert "did not end within 0.5 s" in error


def test_the_sessions_are_read() -> None:
    assert {"tests", "lint", "types", "docs", "integrations"} <= nox_sessions()
    assert "install" not in nox_sessions()


@pytest.mark.parametrize("page", [*CHECKOUT.glob("*.md"), *DOCS.glob("*.md")], ids=lambda page: page.name)
def test_pages_name_sessions_that_exist(page: Path) -> None:
    assert set(re.findall(r"nox -s (\w+)", page.read_text())) <= nox_sessions()


def test_ci_runs_the_commands_of_the_readme() -> None:
    """They install from nothing, which takes minutes: here they are only compared."""
    script = (CHECKOUT / ".ci" / "run").read_text()
    prefix = re.search(r'^nox="(.*)"$', script, re.MULTILINE)
    assert prefix is not None
    called = {name.replace("$nox", prefix[1]) for name in re.findall(r'^as_in_readme "(.*?)"', script, re.MULTILINE)}
    blocks = re.findall(r"^```sh\n(.*?)\n```$", (CHECKOUT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert called == set(blocks) - {"pip install ."}


@pytest.mark.parametrize(
    "path",
    sorted(path for folder in ("", "coming_from/", "frameworks/") for path in DOCS.glob(f"examples/{folder}*.py")),
    ids=lambda path: path.name,
)
def test_every_example_is_run_by_something(path: Path) -> None:
    runners = [
        CHECKOUT / "noxfile.py",
        *CHECKOUT.glob("*.md"),
        *DOCS.glob("*.md"),
        *(CHECKOUT / "tests").rglob("test_*.py"),
    ]
    module = rf"from {path.stem} import"
    run = any(path.name in runner.read_text() for runner in runners if runner != Path(__file__))
    imported = any(module in other.read_text() for other in path.parent.glob("*.py"))
    assert run or imported
