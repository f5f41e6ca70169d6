"""The command line: what it prints, and its exit codes."""

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from messages import Words, raises

from ddp_patch import audit, patch_dataloader_to_ddp
from ddp_patch.auditing.commands import commands
from ddp_patch.auditing.finding import find
from ddp_patch.auditing.report import Report
from ddp_patch.errors import InvalidOptionError, NotALoaderError

LOADERS = """
    from torch.utils.data import DataLoader, DistributedSampler

    train = DataLoader(range(103), batch_size=8, shuffle=True)
    loaders = {"train": train, "val": [DataLoader(range(20), batch_size=4)]}
    lengths = [1 + index % 2 for index in range(103)]
    cost = __import__("ddp_patch").Cost(lengths, of="padded", window=4)
    nothing = []
    number = 7

    def build():
        return loaders

    def length(index):
        return lengths[index]

    def make(rank, world_size):
        return DataLoader(range(103), batch_size=4, sampler=DistributedSampler(range(103), world_size, rank))

    def several(rank=0, world_size=1):
        return {"train": make(rank, world_size), "more": [train]}

    def fails():
        raise LookupError("no [data] here")

    def exits():
        import sys
        print("leaving")
        sys.exit(0)

    def other(batch_size, workers):
        return DataLoader(range(9), batch_size, num_workers=workers)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "my_loaders.py"
    file.write_text(textwrap.dedent(LOADERS))
    return str(file)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(commands, arguments)


@pytest.mark.parametrize(
    ("name", "options", "code", "shown"),
    [
        ("train", [], 0, "✓ train  4 ranks x 4 steps, each of 103 samples once, 1 padding\n"),
        ("build", [], 0, "✓ build.train   4 ranks"),
        ("make", [], 1, "✘ same_order"),
        ("make", ["--set-epoch"], 0, "✓ make"),
        ("make", ["--allow", "same_order"], 0, "; allowed: same_order"),
        ("train", ["--no-patch"], 1, "✘ not_sharded"),
        ("train", ["--no-padding", "--uneven", "keep"], 0, "✓ train"),
        ("train", ["--no-patch", "--uneven", "keep"], 2, "Could not run: ddp_patch.errors.InvalidOptionError"),
        ("several", ["--set-epoch"], 1, "✓ several.train    4 ranks"),
        ("several", [], 1, "✘ several.more[0] on 4 ranks"),
        ("number", [], 2, "number is 7 (int)"),
        ("nothing", [], 2, "nothing holds no loader: it is []"),
        ("exits", [], 2, "Could not run: SystemExit: 0"),
        ("other", [], 2, "other(0, 4)"),
        ("absent", [], 2, "has no 'absent'"),
        ("train", ["--epochs", "0"], 2, "0 is not in the range"),
    ],
)
def test_it_prints_what_holds_and_exits_by_it(path: str, name: str, options: list[str], code: int, shown: str) -> None:
    result = run("audit", f"{path}:{name}", "--world-size", "4", *options)
    assert shown in result.output
    assert result.exit_code == code


def test_what_the_target_prints_is_not_the_report(path: str) -> None:
    Path(path).write_text(f"print('importing')\n{Path(path).read_text()}")
    done = run("audit", f"{path}:train", "-w", "2", "--format", "json")
    assert json.loads(done.stdout)["train"]["ok"]
    assert "importing" in done.stderr


def test_json_and_markdown(path: str) -> None:
    told = json.loads(run("audit", f"{path}:loaders", "-w", "4", "--format", "json").stdout)
    assert set(told) == {"loaders.train", "loaders.val[0]"}
    assert all(report["ok"] and report["versions"]["torch"].startswith("2.") for report in told.values())
    markdown = run("audit", f"{path}:make", "-w", "4", "--format", "markdown")
    assert "| epochs differ | no |" in markdown.stdout
    assert markdown.exit_code == 1


@pytest.mark.parametrize("name", ["lengths", "length"])
def test_cost_is_a_target_too(path: str, name: str) -> None:
    done = run(
        "audit", f"{path}:loaders.train", "-w", "2", "--no-patch", "--allow", "not_sharded", "--cost", f"{path}:{name}"
    )
    assert re.search(
        r"✓ loaders.train  .*, of 103 samples, 103 repeated, waiting \d.\d %; allowed: not_sharded", done.output
    )
    assert done.exit_code == 0
    assert "has no 'weights'" in run("audit", f"{path}:train", "-w", "2", "--cost", f"{path}:weights").output


def test_each_loader_may_have_its_own_cost(path: str) -> None:
    Path(path).write_text(f"{Path(path).read_text()}\nshort = [1 + index % 3 for index in range(20)]\n")
    costs = ["--cost", f"train={path}:lengths", "--cost", f"val[0]={path}:short"]
    done = run("audit", f"{path}:loaders", "-w", "2", "-e", "1", *costs)
    assert done.exit_code == 0, done.output
    assert [("waiting" in line) for line in done.output.splitlines()] == [True, True]
    done = run("audit", f"{path}:loaders", "-w", "2", "-e", "1", *costs[:2], "--format", "json")
    told = json.loads(done.stdout)
    assert [report["epochs"][0]["imbalance"] is None for report in told.values()] == [False, True]
    refused = run("audit", f"{path}:loaders", "-w", "2", "--cost", f"test={path}:lengths")
    assert "is for the loader test, of which there is none" in refused.output
    assert "loaders.train, loaders.val[0]" in refused.output


@pytest.mark.parametrize(
    ("name", "options", "line", "title"),
    [
        ("make", [], "def make", "make%3A same_order::2 epochs"),
        ("several", ["--allow", "foreign"], "def several", "several.train%3A same_order::2 epochs"),
        ("loaders", ["--no-patch"], "train = DataLoader", "loaders.train%3A not_sharded::Each of 4 ranks"),
    ],
)
def test_problems_are_annotations_where_loaders_are_made(
    path: str, name: str, options: list[str], line: str, title: str
) -> None:
    done = run("audit", f"{path}:{name}", "-w", "4", *options, "--format", "github")
    assert done.exit_code == 1
    lines = [each.strip() for each in Path(path).read_text().splitlines()]
    number = next(place for place, each in enumerate(lines, 1) if each.startswith(line))
    first = done.output.splitlines()[0]
    assert first.startswith("::error file=")
    assert f"{Path(path).name},line={number},title={title}" in first


# Parameters that have no option, and why.
NO_OPTION = {
    "unknown": "refused",
    "loader": "is the target",
    "options": "are the patch's, which have their own",
    "rank": "the audit gives every rank its own",
    "num_replicas": "is --world-size",
    "process_group": "is made for the audit",
    "fingerprint": "compares the data of real ranks",
    "device_mesh": "is a set-up of groups, which are of real ranks",
    "timeout": "is of real ranks",
}


def test_every_parameter_has_its_option() -> None:
    options = {parameter.name for parameter in commands.commands["audit"].params}
    parameters = {*inspect.signature(audit).parameters, *inspect.signature(patch_dataloader_to_ddp).parameters}
    assert options - {"target", "form", "html", "shows_traceback"} - {"costs"} | {"cost"} == parameters - set(NO_OPTION)
    assert set(NO_OPTION) < parameters


def test_what_is_given_is_passed_on_and_nothing_else_to_the_patch(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def record(loader: Any, world_size: int, **given: Any) -> Report:
        seen.update(given)
        report: Report = audit(loader, world_size)
        return report

    monkeypatch.setattr("ddp_patch.auditing.commands.audit", record)
    assert run("audit", f"{path}:train", "-w", "2").exit_code == 0
    assert not {*seen} & PATCHS
    given: dict[str, Any] = {"layout": "contiguous", "share": "by_worker", "seed": 4, "uneven": "drop"}
    options = {**given, "max_items": 9, "epochs": 3}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert run("audit", f"{path}:train", "-w", "2", *words, "--epochs-differ").exit_code == 0
    assert ({**options, "epochs_differ": True}).items() <= seen.items()
    assert {*seen} & PATCHS == {*given}


PATCHS = {*inspect.signature(patch_dataloader_to_ddp).parameters}


def test_the_installed_script_runs_where_the_target_is(path: str) -> None:
    """It has not the working folder on its path."""
    command = [sys.executable, "-P", "-c", "from _ddp_patch_command import main; main()"]
    arguments = ["audit", "my_loaders:train", "-w", "2"]
    done = subprocess.run([*command, *arguments], cwd=Path(path).parent, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("✓ train")


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_its_libraries_it_says_what_to_install(path: str, missing: str) -> None:
    arguments = ["ddp-patch", "audit", f"{path}:train", "-w", "2", "--html", str(Path(path).with_suffix(".html"))]
    script = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = {arguments}\n"
        "from _ddp_patch_command import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)  # noqa: S603 - ours
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"package {missing}," in done.stderr
    assert done.stderr.endswith("pip install click rich\n")


PLACES = ("package.module:name", "path/to/file.py:name")


@pytest.mark.parametrize(
    ("target", "error", "facts", "remedy"),
    [
        ("torch", InvalidOptionError, "'torch'", PLACES),
        ("no_such.module:x", InvalidOptionError, ("module 'no_such.module'", str(Path.cwd())), PLACES),
        ("no_such.py:x", InvalidOptionError, "file no_such.py", PLACES),
        ("os:nothing_such", InvalidOptionError, ("os", "'nothing_such'", "getcwd"), None),
        ("os:sep", NotALoaderError, ("sep is", "(str)", "make(rank, world_size)"), "loader"),
    ],
)
def test_what_a_target_does_not_name_is_refused(
    target: str, error: type[Exception], facts: Words, remedy: Words | None
) -> None:
    with raises(error, facts, remedy):
        find(target)


RAISING = """
def inner(rank):
    raise LookupError(f"no shard for rank {rank}")

def make(rank, world_size):
    return inner(rank)

def loads():
    import json
    return json.loads("{")
"""


def test_an_error_of_the_users_code_is_shown_with_its_notes_and_its_traceback(tmp_path: Path) -> None:
    file = tmp_path / "raising.py"
    file.write_text(RAISING)
    done = run("audit", f"{file}:make", "-w", "2")
    assert done.exit_code == 2
    assert done.output.splitlines() == [
        "Could not run: LookupError: no shard for rank 0",
        "It was raised by make(0, 2), which audit called as make(rank, world_size).",
        "The loader is make.",
        "Pass --traceback to see where.",
    ]
    whole = run("audit", f"{file}:make", "-w", "2", "--traceback")
    assert f'File "{file}", line 6, in make' in whole.output
    assert whole.output.startswith("Could not run: \nTraceback (most recent call last):\n")
    assert whole.output.count("LookupError: no shard for rank 0") == 1


def test_a_reader_that_goes_away_changes_no_verdict(path: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ddp_patch", "audit", "my_loaders:train", "-w", "2"]
    try:
        done = subprocess.run(command, cwd=Path(path).parent, stdout=writer, stderr=-1, text=True, check=False)  # noqa: S603 - ours
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
