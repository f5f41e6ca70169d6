"""Ranks killed at any moment and started again by torch's elastic agent: every sample of every epoch, exactly once."""

import json
import os
import random
import runpy
import shlex
import sys
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import elastic
import pytest
import torch
from documented import run_command
from elastic import EXAMPLE, Death, Launch

from ddp_patch import patch_dataloader_to_ddp

# How ranks are killed where their number changes, too. The session soak, which trains on P x K batches, kills more.
HOW = {"shuffled": ["step", "soon", "writing", "written", "replaced"]}
HOW["P x K"] = HOW["shuffled"] * 4
IN_ONE_WORLD = ["step", "written", "soon"]
EXAMPLES = runpy.run_path(str(EXAMPLE))
EPOCHS: int = EXAMPLES["EPOCHS"]


def deaths(rng: random.Random, world: int, how: list[str]) -> list[Death]:
    # Ranks that are killed at a checkpoint are the first ones, which write it.
    return [
        {
            "rank": rng.randrange(world) if name in ("step", "soon") else 0,
            "how": name,
            "at": rng.randint(1, 6 if name in ("step", "soon") else 3),
            "delay": rng.uniform(0, 0.02 if name == "step" else 0.5),
        }
        for name in how
    ]


def plan(kind: str, folder: Path) -> dict[str, list[Launch]]:
    """An uninterrupted run of two ranks, one whose ranks are killed, and one whose number of ranks changes as well."""
    rng = random.Random(kind)
    how = rng.sample(HOW[kind], len(HOW[kind]))
    worlds = [3]
    again = len(how) // 4
    while len(worlds) < len(how) - again:
        worlds.append(rng.choice([world for world in range(1, 5) if world != worlds[-1]]))
    twice = set(rng.sample(range(len(worlds)), again))  # launches in which ranks are started again
    changing = [
        launched(folder / "others", kind, world, deaths(rng, world, [how.pop() for _ in range(1 + (number in twice))]))
        for number, world in enumerate(worlds)
    ]
    last = rng.choice([world for world in range(2, 5) if world != worlds[-1]])
    return {
        "whole": [launched(folder / "whole", kind, 2, [])],
        "one": [launched(folder / "one", kind, 2, deaths(rng, 2, IN_ONE_WORLD)), launched(folder / "one", kind, 2, [])],
        "others": [*changing, launched(folder / "others", kind, last, [])],
    }


def launched(folder: Path, kind: str, world: int, deaths: list[Death]) -> Launch:
    folder.mkdir(parents=True, exist_ok=True)
    return {"folder": str(folder), "kind": kind, "world": world, "deaths": deaths}


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class Step(NamedTuple):
    epoch: int
    world: int
    taken: list[list[int]]  # by rank


def steps_of(folder: Path) -> list[Step]:
    """The steps that count: at each start, those after the checkpoint that it found are cut off."""
    starts = lines(folder / "starts")
    # The last line counts, where a step was done again.
    logs = [{line["steps"]: line for line in lines(folder / f"taken-{rank}")} for rank in range(4)]
    steps = []
    for number in range(max(logs[0]) + 1):
        world = [start["world"] for start in starts if start["steps"] <= number][-1]
        found = [log[number] for log in logs[:world]]
        assert {line["world"] for line in found} == {world}
        assert len({line["epoch"] for line in found}) == 1
        steps.append(Step(found[0]["epoch"], world, [line["indices"] for line in found]))
    return steps


def stream_of(kind: str, steps: list[Step]) -> list[Any]:
    """What was taken, in the order of one process: each rank's samples, or whole batches, in turn."""
    if kind == "P x K":
        return [tuple(batch) for step in steps for batch in step.taken]
    return [index for step in steps for turn in zip(*step.taken, strict=True) for index in turn]


def epochs_alone(kind: str) -> list[list[Any]]:
    """What one process takes in each epoch."""
    alone = patch_dataloader_to_ddp(EXAMPLES["make_loader"](kind), seed=EXAMPLES["SEED"], rank=0, num_replicas=1)
    batches = [[indices.tolist() for _, _, indices in alone] for _ in range(EPOCHS)]
    return [list(map(tuple, epoch)) if kind == "P x K" else list(chain(*epoch)) for epoch in batches]


def assert_each_once(kind: str, folder: Path) -> None:
    """Every epoch is the stream of one process, and after its end what fills up the last round of its last world."""
    steps = steps_of(folder)
    epochs = {epoch: list(group) for epoch, group in groupby(steps, lambda step: step.epoch)}
    assert list(epochs) == list(range(EPOCHS))
    for epoch, stream in enumerate(epochs_alone(kind)):
        samples = chain(*stream) if kind == "P x K" else stream
        assert sorted(samples) == list(range(EXAMPLES["LABELS"] * EXAMPLES["SAMPLES_PER_LABEL"]))
        taken, world = stream_of(kind, epochs[epoch]), epochs[epoch][-1].world
        assert taken[: len(stream)] == stream, epoch
        *_, last = [list(steps) for _, steps in groupby(epochs[epoch], lambda step: step.world)]
        rest = stream[len(taken) - len(stream_of(kind, last)) :]  # which that world began with
        padding = taken[len(stream) :]
        assert len(padding) == -len(rest) % world, epoch
        assert padding == [stream[number % len(stream)] for number in range(len(padding))], epoch


# The demo's test kills ranks that train on P x K batches, too.
@pytest.mark.parametrize("kind", ["shuffled", pytest.param("P x K", marks=pytest.mark.soak)])
def test_killed_at_any_moment_and_started_again(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = plan(kind, tmp_path)
    launches = [launch for planned in runs.values() for launch in planned]
    # torch 2.13 gives ranks that it restarts the store of those before, where they find addresses of the dead.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    status, printed, error = run_command(shlex.join([sys.executable, elastic.__file__, json.dumps(launches)]))
    assert status == 0, error
    # The first to be found may be one that lost its connection to the one that was killed.
    assert list(map(bool, map(json.loads, printed.splitlines()))) == [bool(launch["deaths"]) for launch in launches]
    for planned in runs.values():
        folder = Path(planned[0]["folder"])
        assert lines(folder / "deaths") == [death for launch in planned for death in launch["deaths"]]
        assert_each_once(kind, folder)
    # With the same number of ranks, all is as if nobody had been killed: every rank's every batch, and the weights.
    assert steps_of(tmp_path / "one") == steps_of(tmp_path / "whole")
    trained = [torch.load(tmp_path / name / "trained.pt", weights_only=True) for name in ("one", "whole")]
    torch.testing.assert_close(*trained, rtol=0, atol=0)


def test_the_page_says_how_often(tmp_path: Path) -> None:
    """docs/resume.md says how many ranks are killed here, and how often their number changes."""
    kills = changes = 0
    for kind in HOW:
        for planned in plan(kind, tmp_path).values():
            kills += sum(len(launch["deaths"]) for launch in planned)
            changes += sum(one["world"] != other["world"] for one, other in pairwise(planned))
    page = " ".join((Path(__file__).parents[2] / "docs" / "resume.md").read_text().split())
    assert f"kills {kills} ranks" in page
    assert f"{changes} times with another number of ranks" in page
