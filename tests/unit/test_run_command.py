"""``ddp-patch run`` in one process: what the script sees, what is printed, and what Ctrl-C does to any command."""

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from click.testing import CliRunner
from quick import soaked

from ddp_patch.auditing.commands import commands
from ddp_patch.running import command, launch
from ddp_patch.running.command import run

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


@pytest.mark.parametrize(
    ("target", "safe"), [(["script.py"], ""), soaked(["-m", "script"], ""), soaked(["alone.py"], "1")]
)
def test_a_script_sees_what_it_sees_under_python(folder: Path, target: list[str], safe: str) -> None:
    """But that a script's folder is put first in ``sys.path`` where python was told to put none there."""
    (folder / "alone.py").write_text("import json, sys; print(json.dumps(sys.path))")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment |= {"PYTHONSAFEPATH": safe} if safe else {}
    seen = [
        subprocess.run(  # noqa: S603 - our own script
            [sys.executable, *start, *target, "--some", "-m"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for start in ([], ["-m", "ddp_patch", "run", "--only", "x.py"])
    ]
    if safe:
        assert json.loads(seen[1]) == [str(folder), *json.loads(seen[0])]
        return
    # python itself may name the script by the path that it was given.
    of_python, of_run = (each.replace('"script.py"', f'"{folder}/script.py"') for each in seen)
    assert of_python == of_run


def test_nothing_is_left_of_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("ddp_patch.autopatch")
    before = list(sys.argv), list(sys.path), sys.modules["__main__"], logger.level, list(logger.handlers)
    for arguments, error in ((["exits"], SystemExit), (["raises"], LookupError)):
        with pytest.raises(error) as caught:
            run(["script.py", *arguments])
        assert caught.value.args in {(5,), ("of the script",)}
        assert (sys.argv, sys.path, sys.modules["__main__"], logger.level, logger.handlers) == before
        assert logger.propagate
        assert "start it with ddp-patch run -n 8" in " ".join(capsys.readouterr().err.split())  # no group was made
    del sys.modules["helper"]


@pytest.mark.parametrize(
    ("arguments", "told", "of"),
    [
        ([], "training_script", {}),
        (["--no-such", "script.py"], "--no-such", {}),
        (["--seed", "-1", "script.py"], "seed=-1 is not a whole number", {}),
        (["script.py"], "--seed: invalid int value: '1.5'", {"DDP_PATCH_SEED": "1.5"}),
        (["--check", "script.py"], "-n 4", {}),
        (["--check", "--mode", "ranks", "-n", "2", "script.py"], "-n 4", {}),
        (["--check", "-n", "1", "script.py"], "-n 4", {}),
        (["--mode", "ranks", "--only", "", "script.py"], "names no file", {}),
        (["--mode", "one", "--only", "a.py", "script.py"], "--only and --except", {}),
        (["-n", "2", "script.py"], "as rank 1 of 4", {"RANK": "1", "WORLD_SIZE": "4"}),
        (["script.py"], "started 4 ranks. Pass --mode one", {"RANK": "1", "WORLD_SIZE": "4"}),
        (["script.py"], "srun has started 4 tasks", {"SLURM_STEP_NUM_TASKS": "4"}),
    ],
)
def test_wrong_usage_exits_with_2(
    arguments: list[str],
    told: str,
    of: dict[str, str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in {**({"MASTER_ADDR": "-", "MASTER_PORT": "1"} if of else {}), **of}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        run(arguments)
    assert caught.value.code == 2
    seen = capsys.readouterr()
    assert (seen.out, told in " ".join(seen.err.split())) == ("", True)  # the script has not begun
    said = seen.err[seen.err.find("ddp-patch run: error: ") :].splitlines()
    assert sum(len(textwrap.wrap(line, 120)) for line in said) <= 6
    assert not dist.is_initialized()


def test_ranks_start_with_all_that_should_be_equal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def started(given: Any, arguments: list[str]) -> int:
        assert (given.nnodes, arguments[-1]) == ("3", "script.py")  # torchrun reads them
        assert Path(os.environ["DDP_PATCH_SHADOWS"]).is_dir()
        seen.append(dict(os.environ))
        return 0

    monkeypatch.setattr(launch, "started", started)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    outer = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "-", "MASTER_PORT": "1"}  # as a container's job sets them
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    for ranks in (["-n", "2"], []):  # one on each machine
        with pytest.raises(SystemExit) as caught:
            run([*ranks, "--nnodes", "3", "script.py"])
        assert caught.value.code == 0
    environment, _ = seen
    assert environment["PYTHONHASHSEED"] == "0"
    assert not outer.keys() & environment.keys()
    assert outer.items() <= os.environ.items()
    assert not Path(environment["DDP_PATCH_SHADOWS"]).exists()


def test_all_generators_are_seeded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(()).item())"
    (folder / "script.py").write_text(code)
    for seed in ("1", "1", "2"):
        run(["--mode", "one", "--seed", seed, "script.py"])
    first, again, other = capsys.readouterr().out.splitlines()
    assert first == again
    assert not {*first.split()} & {*other.split()}


def test_the_summary_fits_in_100_columns(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "script.py").write_text("from torch.utils.data import DataLoader\nlist(DataLoader(range(7), 2))\n")
    run(["--mode", "one", "script.py"])
    told = capsys.readouterr().err.partition("ddp_patch:\n")[2]
    assert "1 rank trained as one process: 0 optimizer steps." in told
    assert max(map(len, told.splitlines())) <= 100
    monkeypatch.setenv("RANK", "1")
    run(["script.py"])
    assert not capsys.readouterr().err  # the first rank alone tells it


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


def test_a_single_rank_is_the_command_itself_and_hashes_as_several_do(folder: Path) -> None:
    (folder / "script.py").write_text("import os, sys; print(os.getpid(), hash('ddp_patch')); sys.exit(7)")
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONHASHSEED"}
    options = ["-n", "1"]
    command = [sys.executable, "-c", "from _ddp_patch_command import main; main()", "run", *options, "script.py"]
    seeded = {**environment, "DDP_PATCH_SEED": "7"}
    with subprocess.Popen(command, env=seeded, stdout=-1, text=True) as started:  # noqa: S603 - our own command
        out, _ = started.communicate(timeout=SECONDS)
    alike = {**environment, "PYTHONHASHSEED": "0"}
    asked = [sys.executable, "-c", "print(hash('ddp_patch'))"]
    hashed = subprocess.run(asked, env=alike, capture_output=True, text=True, check=True)  # noqa: S603 - this very Python
    assert (started.returncode, out.split()) == (7, [str(started.pid), hashed.stdout.strip()])


# Ctrl-C: one word, exit code 130, and no traceback, neither of this process nor of a rank.


# Says that it is there, and stays: in the process that audits, or in a rank that starts.
WAITING = """
import os
import pathlib, time

def wait():
    parent, end = os.getppid(), time.monotonic() + 300
    pathlib.Path("here").touch()
    while os.getppid() == parent and time.monotonic() < end:  # a server of ranks ends with what has started it
        time.sleep(0.05)
"""
TARGET = """
import operator
from ddp_patch.testing import run_ranks
from waiting import wait

def makes_nothing(rank, world_size):
    wait()

def starts_ranks():
    run_ranks(operator.add, 2)
"""
# Python imports this when it starts: a server of ranks waits before it imports anything else.
STARTING = """
import sys

if any("forkserver" in word for word in sys.orig_argv):
    from waiting import wait

    wait()
"""
SECONDS = 120  # until it must be there, and then gone


@pytest.fixture(autouse=True)
def interrupts_are_heard() -> Iterator[None]:
    """What a shell starts in the background ignores them, and so would what these tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", ["makes_nothing", "starts_ranks"])
def test_an_interrupt_is_one_word(tmp_path: Path, name: str) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    (tmp_path / "target.py").write_text(TARGET)
    (tmp_path / "sitecustomize.py").write_text(STARTING)
    command = [sys.executable, "-m", "ddp_patch", "audit", f"target.py:{name}", "-w", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    # A session of its own: the signal goes to all processes of its group, as a terminal sends it.
    started = subprocess.Popen(  # noqa: S603 - ours
        command, cwd=tmp_path, env=environment, start_new_session=True, stdout=-1, stderr=-1, text=True
    )
    try:
        end = time.monotonic() + SECONDS
        while not (tmp_path / "here").exists():
            assert started.poll() is None, started.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)
        os.killpg(started.pid, signal.SIGINT)
        shown = started.communicate(timeout=SECONDS)
    finally:
        started.kill()
        started.wait()
    assert (started.returncode, [*map(str.strip, shown)]) == (130, ["", "Interrupted"])


# Stands for torch: the interrupt comes while the package imports it, and what imports it may catch that.
INTERRUPTING = """
import os, signal, time

try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(300)
except BaseException:
    raise ImportError("half done")
"""


@pytest.mark.parametrize("command", ["audit", "run"])
def test_an_interrupt_while_the_command_imports_is_one_word(tmp_path: Path, command: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(INTERRUPTING)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["ddp-patch"].partition(":")
    script = (
        f"import sys; sys.argv[1:] = [{command!r}, 'x:y', '-w', '2']; from {module} import {function}; {function}()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(  # noqa: S603 - ours
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "Interrupted")
