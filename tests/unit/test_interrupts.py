"""Ctrl-C at the command line: one word, exit code 130, and no traceback, neither of this process nor of a rank."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

# Says that it is there, and stays: in the process that audits, or in a rank that starts.
WAITING = """
import pathlib, time

def wait():
    pathlib.Path("here").touch()
    time.sleep(300)
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
# Python imports this when it starts: a rank waits before it imports anything else.
STARTING = """
import sys

if "--multiprocessing-fork" in sys.orig_argv:
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
