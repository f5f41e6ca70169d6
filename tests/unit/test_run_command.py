"""``ddp-patch run`` in one process: the script sees what it sees under python, and what is printed."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import ddp_patch.running.command as command
from ddp_patch.auditing.commands import commands
from ddp_patch.options import Options
from ddp_patch.running import autopatch, one_process
from ddp_patch.running.command import process_group, run

SCRIPT = """
    import json, sys
    import helper
    print(json.dumps([sys.argv, sys.path[0], __name__, __file__, helper.HERE, sys.modules["__main__"].__file__]))
    if "exits" in sys.argv:
        sys.exit(5)
    if "raises" in sys.argv:
        raise LookupError("of the script")
    assert globals() is vars(sys.modules["__main__"])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "helper.py").write_text("HERE = True")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("under_python", "under_run"), [(["script.py"], ["script.py"]), (["-m", "script"],) * 2])
def test_a_script_sees_what_it_sees_under_python(folder: Path, under_python: list[str], under_run: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    seen = [
        subprocess.run(  # noqa: S603 - our own script
            [sys.executable, *start, "--some", "-m"], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for start in (under_python, ["-m", "ddp_patch", "run", "--only", "x.py", *under_run])
    ]
    # python itself may name the script by the path that it was given.
    assert seen[0].replace('"script.py"', f'"{folder}/script.py"') == seen[1].replace(
        '"script.py"', f'"{folder}/script.py"'
    )


def test_a_safe_path_loses_nothing(folder: Path) -> None:
    """Where python was told to put no folder first, the script's is put there, and nothing taken away."""
    (folder / "alone.py").write_text("import json, sys; print(json.dumps(sys.path))")
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    before, after = (
        json.loads(
            subprocess.run(  # noqa: S603 - our own script
                [sys.executable, *start, "alone.py"], env=environment, capture_output=True, text=True, check=True
            ).stdout
        )
        for start in ([], ["-m", "ddp_patch", "run"])
    )
    assert after == [str(folder), *before]


def test_nothing_is_left_of_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("ddp_patch.autopatch")
    before = list(sys.argv), list(sys.path), sys.modules["__main__"], logger.level, list(logger.handlers)
    for arguments, error in ((["exits"], SystemExit), (["raises"], LookupError)):
        with pytest.raises(error) as caught:
            run(["script.py", *arguments])
        assert caught.value.args in {(5,), ("of the script",)}
        assert (sys.argv, sys.path, sys.modules["__main__"], logger.level, logger.handlers) == before
        assert logger.propagate
        assert "--init-process-group" in capsys.readouterr().err  # no group was made
    del sys.modules["helper"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "TARGET"),
        (["--no-such", "script.py"], "TARGET"),
        (["--uneven", "no", "script.py"], "--uneven"),
        (["--share", "within_batches", "--uneven", "drop", "script.py"], "within_batches"),
        (["--only", "", "script.py"], "only="),
        (["--mode", "one", "--whole", "", "script.py"], "names no file"),
        (["--init-process-group", "gloo", "script.py"], "RANK, WORLD_SIZE"),
        (["absent.py"], "absent.py"),
        (["--loss", "sum", "--keep-shadows", "logs", "script.py"], "--loss, --keep-shadows"),
        (["--mode", "ranks", "--whole", "val.py", "script.py"], "--whole"),
        (["--nnodes", "2", "script.py"], "--nnodes"),
    ],
)
def test_wrong_usage_exits_with_2(
    arguments: list[str], told: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as caught:
        run(arguments)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err
    assert not dist.is_initialized()


def test_ranks_start_with_all_that_should_be_equal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def started(*_arguments: Any) -> int:
        assert Path(os.environ["DDP_PATCH_SHADOWS"]).is_dir()
        seen.append(dict(os.environ))
        return 0

    monkeypatch.setattr(command, "_started", started)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    outer = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "-", "MASTER_PORT": "1"}  # as a container's job sets them
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        run(["-n", "2", "script.py"])
    assert caught.value.code == 0
    (environment,) = seen
    assert environment["PYTHONHASHSEED"] == "0"
    assert environment["DDP_PATCH_SEED"].isdecimal()
    assert not outer.keys() & environment.keys()
    assert outer.items() <= os.environ.items()
    assert not Path(environment["DDP_PATCH_SHADOWS"]).exists()


def test_ranks_of_another_launcher_start_none(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "-", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        run(["-n", "2", "script.py"])
    assert caught.value.code == 2
    assert "as rank 1 of 4" in capsys.readouterr().err


def test_nccl_gets_the_ranks_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(device))
    monkeypatch.setattr(one_process, "_init_process_group", lambda backend: done.append(backend))
    for name, value in {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "-",
        "MASTER_PORT": "-",
    }.items():
        monkeypatch.setenv(name, value)
    with process_group("nccl"):
        assert done == [1, "nccl"]  # the device first: the group is made for it


def test_all_generators_are_seeded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(()).item())"
    (folder / "script.py").write_text(code)
    for seed in ("1", "1", "2"):
        run(["--manual-seed", seed, "script.py"])
    first, again, other = capsys.readouterr().out.splitlines()
    assert first == again
    assert not {*first.split()} & {*other.split()}


def test_every_option_that_a_line_can_give_is_one() -> None:
    names = {field.name for field in dataclasses.fields(Options)}
    assert set(command._SWITCHES) == {name for name in names if not name.startswith("cost")}


def summary_of(isatty: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    with autopatch(rank=0, num_replicas=2) as summary:
        from torch.utils.data import DataLoader

        len(DataLoader(range(7)))  # type: ignore[arg-type]  # a range is a dataset
    monkeypatch.setattr(sys.stderr, "isatty", isatty, raising=False)
    command._print(summary)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_summary_is_a_table(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    summary_of(lambda: is_terminal, monkeypatch)
    text = capsys.readouterr().err
    assert ("┃" in text) is is_terminal
    assert "DataLoader, in order, 7 samples" in text
    assert "4 samples, 4 steps" in text
    assert "DistributedDataParallel" in text


def test_other_ranks_print_no_summary(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    summary_of(lambda: False, monkeypatch)
    assert not capsys.readouterr().err


def test_the_command_line_lists_it(folder: Path) -> None:
    assert command.DESCRIPTION[:40] in CliRunner().invoke(commands, ["--help"]).output
    done = CliRunner().invoke(commands, ["run", "--only", "x.py", "script.py", "--some", "raises"])
    assert isinstance(done.exception, LookupError)
    assert '"--some", "raises"' in done.stdout


def test_it_needs_no_package_of_the_audits(folder: Path) -> None:
    code = """
import sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"click", "rich", "matplotlib"}:
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Refusing())
sys.argv = ["ddp-patch", "run", "script.py"]
from _ddp_patch_command import main
main()
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done: Any = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)  # noqa: S603 - our own script
    assert done.returncode == 0, done.stderr
    assert "__main__" in done.stdout
