"""Ctrl-C at the command line: one word, exit code 130, and no traceback, neither of this process nor of a rank."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Says that it is there, and stays: in the process that audits, or in a rank that imports it.
WAITING = """
import multiprocessing, pathlib, time
from torch.utils.data import DataLoader

def wait():
    pathlib.Path("here").touch()
    time.sleep(300)

if {in_rank} and multiprocessing.parent_process() is not None:
    wait()

def make(rank, world_size):
    if not {in_rank}:
        wait()
    return DataLoader(range(9))
"""
SECONDS = 120  # until it must be there, and then gone


@pytest.mark.parametrize("in_rank", [False, True], ids=["here", "in a rank"])
def test_an_interrupt_is_one_word(tmp_path: Path, in_rank: bool) -> None:
    (tmp_path / "waiting.py").write_text(WAITING.format(in_rank=in_rank))
    command = [sys.executable, "-m", "ddp_patch", "audit", "waiting.py:make", "-w", "2"]
    command += ["--processes"] if in_rank else []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
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
