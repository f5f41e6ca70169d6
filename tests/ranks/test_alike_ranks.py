"""Scripts that list folders, draw from the system's entropy and read input, on real ranks of one process."""

import os
import random
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from quick import run_ranks, soaked
from torch import nn

from ddp_patch import autopatch
from ddp_patch.errors import RankMismatchError


def listed_by_rank(rank: int) -> Callable[[Any], list[str]]:
    """Return an ``os.listdir`` of a file system that has each rank's own order."""
    listdir = os.listdir

    def lists(path: Any) -> list[str]:
        names = sorted(listdir(path))
        return names[rank:] + names[:rank]

    return lists


def asks_the_world(rank: int, world_size: int, folder: Path) -> Any:
    found = []
    with patch.object(os, "listdir", listed_by_rank(rank)):
        for _ in range(2):  # each session draws anew
            with autopatch(as_one_process=True):
                numbers = np.random.default_rng().random(), random.Random().random(), uuid.uuid4().hex
                found.append((os.listdir(folder), numbers))
    return found


def test_every_rank_sees_the_same_of_the_world(tmp_path: Path) -> None:
    for name in "cab":
        (tmp_path / name).touch()
    first, *others = run_ranks(asks_the_world, 3, tmp_path)
    assert others == [first, first]
    assert [names for names, _ in first] == [["a", "b", "c"]] * 2
    assert first[0][1] != first[1][1]


@autopatch(as_one_process=True)
def draws(times: int) -> None:
    for _ in range(times):
        uuid.uuid4()
    nn.Linear(2, 1)(torch.ones(4, 2))


def draws_once_more(rank: int, world_size: int) -> str:
    with pytest.raises(RankMismatchError) as raised:
        draws(1 + rank)
    return str(raised.value)


def test_a_rank_that_draws_once_more_is_told_when_the_ranks_next_meet() -> None:
    for told in run_ranks(draws_once_more, 2):
        assert "after question 1 to the world" in told
        assert "after question 2 to the world" in told
        assert "for the system's entropy at test_alike_ranks.py" in told


SCRIPT = """
    import os, secrets, sys, tempfile
    import numpy as np, torch
    from torch import nn

    torch.manual_seed(0)
    names = os.listdir("data")
    print(names == NAMES, input("name? "), sys.stdin.read().split())
    width = int(np.random.default_rng().integers(4, 64)) + secrets.randbelow(9)
    with tempfile.TemporaryDirectory() as folder:
        open(f"{folder}/a", "w").close()
        print(os.listdir(folder))
    model = nn.Linear(3, width)
    model(torch.ones(6, 3)).sum().backward()
    print(tuple(model.weight.grad.shape) == (width, 3))
"""


@pytest.mark.parametrize("ranks", [soaked("1"), "2"])
def test_a_script_that_asks_the_world_runs_on_two_ranks_as_on_one(ranks: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(20):
        (tmp_path / "data" / f"{number * 37 % 101}").touch()
    script = textwrap.dedent(SCRIPT).replace("NAMES", repr(sorted(os.listdir(tmp_path / "data"))))
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "ddp_patch", "run", "-n", ranks, "train.py"]
    options: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(command, input="Ann\nb c\n", check=False, **options)  # noqa: S603 - our own
    assert done.stdout == "name? True Ann ['b', 'c']\n['a']\nTrue\n", done.stderr
