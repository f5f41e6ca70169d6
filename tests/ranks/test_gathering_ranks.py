"""Real gloo ranks, each seeded differently, that gather their outputs: every rank has what one process would have."""

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gathered import assert_same, outputs_for
from messages import assert_tells, missing
from quick import run_ranks, soaked
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store, _world
from torch.utils.data import DataLoader
from zoo import BY_NAME, N, loader, seed_ambient, units

from ddp_patch import DDPPatchError, gather_in_order, gather_step, patch_dataloader_to_ddp
from ddp_patch.errors import MissingRanksError, RankMismatchError, message_of
from ddp_patch.evaluation import gather
from ddp_patch.positions_and_padding import Plan

SEED = 100
# Those with the length of every epoch known first.
SIZED = ["sequential", "shuffle=True", "sequential, drop_last", "batch_size=None", "aspect-ratio batches"]
SIZED += ["a batch that is used again", "fewer items than ranks", "one item", "no item", "string keys"]
UNSIZED = ["token-budget batches without len", "a sampler without len", "a length that changes", "iterable"]
WORKERS = ["iterable, splits itself, 2 workers", "iterable, empty", "iterable with set_epoch, persistent workers"]


def patched(name: str, nth: int, /, **options: Any) -> DataLoader[Any]:
    seed_ambient(SEED + nth)
    return patch_dataloader_to_ddp(BY_NAME[name].make(), **{"seed": SEED} | options)


@cache
def stream_of(name: str, epochs: int = 1) -> list[Any]:
    """What one process gives in the last of so many epochs: items, or whole batches."""
    kind = BY_NAME[name]
    if kind.make().drop_last:
        return list(range(N))  # a last batch that is left out may be another one on ranks
    alone = patched(name, 0, rank=0, num_replicas=1)
    return [units(kind, alone) for _ in range(epochs)][-1]


def outputs_of(given: Any) -> list[Any]:
    batches = list(given)
    return batches if given.batch_sampler is None else [item for batch in batches for item in batch]


def expected(stream: list[Any], plans: list[Plan], given: DataLoader[Any]) -> list[Any]:
    """What all shares together have of the stream, in its order."""
    size = given.batch_size if given.drop_last and given.batch_size else 1
    shares = [plan.share(len(stream)) for plan in plans]
    taken = {place for share in shares for place in share[: len(share) - len(share) % size]}
    return [item for place, item in enumerate(stream) if place in taken]


def every_kind(rank: int, world_size: int) -> None:
    warnings.simplefilter("ignore")  # a length that changes
    ways = [(name, uneven) for name in SIZED for uneven in ("pad", "drop", "keep")]
    ways += [(name, uneven) for name in UNSIZED for uneven in ("pad", "drop", "keep")]
    # Half of them on 1 and 2 ranks, and half on 3 and 5; the next name has the other half.
    ways = [way for number, way in enumerate(ways) if (number + number // 2) % 2 == (world_size > 2)]
    ways += [(name, "pad") for name in WORKERS if world_size == 3]
    for name, uneven in ways:
        if uneven == "drop" and len(stream_of(name, 1)) < world_size:
            continue  # refused: no rank would make a step
        given = patched(name, rank, uneven=uneven)
        plans = [Plan(each, world_size, uneven) for each in range(world_size)]  # type: ignore[arg-type]  # those above
        for epochs in (1, 2, 3):
            rows = expected(stream_of(name, epochs), plans, given)
            rows = [row for batch in rows for row in batch] if BY_NAME[name].batches else rows
            if epochs < 3:
                assert gather_in_order(outputs_of(given), given) == rows, (name, uneven, epochs)
            elif uneven != "keep" or world_size == 1:
                steps = [gather_step([batch] if given.batch_sampler is None else [*batch], given) for batch in given]
                flat, in_order = [row for step in steps for row in step], name not in WORKERS
                assert (flat if in_order else sorted(flat)) == (rows if in_order else sorted(rows)), (name, uneven)


def every_form(rank: int, world_size: int) -> None:
    ways: list[dict[str, Any]] = [{"uneven": "pad"}, {"uneven": "keep"}]
    for n, way in product((0, 1, N), ways):
        given = patch_dataloader_to_ddp(loader(sampler=list(range(n))), **way)
        items = [item for batch in given for item in batch]
        whole = gather_in_order(outputs_for(items) if items else None, given)
        if n:
            assert_same(whole, outputs_for(list(range(n))))
        else:
            assert whole is None


def nothing_is_left(rank: int, world_size: int) -> None:
    given = patched("shuffle=True", rank)
    counts = []
    for _ in range(5):
        gather_in_order(outputs_of(given), given)
        assert sum(len(gather_step(batch, given)) for batch in given) == N
        for batch in given:  # all leave it
            gather_step(batch, given)
            break
        list(given)
        dist.barrier()
        counts.append((len(_world.pg_map), _get_default_store().num_keys()))
        dist.barrier()
    # Each of four passes a round would leave a key or more. How many of the latest are there is a matter of moments.
    assert counts[4][1] - counts[1][1] < 4
    assert len(_world.pg_map) == 1


def everything(rank: int, world_size: int) -> None:
    every_kind(rank, world_size)
    every_form(rank, world_size)
    nothing_is_left(rank, world_size)


@pytest.mark.parametrize("world_size", [1, soaked(2), 3, soaked(5)])
def test_every_rank_has_what_one_process_has(world_size: int) -> None:
    run_ranks(everything, world_size)


def in_groups(rank: int, world_size: int) -> list[Any]:
    # Ranks 0 and 1 are in a group more than the others: torch names groups by how many there are.
    dist.new_group([0, 1])
    groups = [dist.new_group([0, 2, 3]), dist.new_group([1])]
    mine = groups[int(rank == 1)]
    given = patched("shuffle=True", rank, process_group=mine)
    own = outputs_of(given)
    found = [gather_in_order(torch.tensor(own), given).tolist()]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    stepped = patched("shuffle=True", rank, device_mesh=mesh)
    found.append([row for batch in stepped for row in gather_step(batch, stepped)])
    given = patched("shuffle=True", rank, device_mesh=mesh)
    own = outputs_of(given)
    found.append(gather_in_order(np.array(own), given).tolist())
    assert len(_world.pg_map) == len(set(_world.pg_names.values()))
    return found


def test_some_ranks_and_meshes() -> None:
    """Tensor-parallel peers gather the same."""
    assert run_ranks(in_groups, 4) == [[stream_of("shuffle=True")] * 3] * 4


class Unmeasured(list[Any]):
    def __len__(self) -> int:
        raise RuntimeError("no length")


def in_time(rank: int, world_size: int) -> dict[str, str]:
    """What each rank is told, by what one of them does wrong."""
    given = patched("sequential", rank)
    own = outputs_of(given)
    half = patched("sequential", rank)
    if rank == 1:
        next(iter(half))
    else:
        list(half)
    ahead = patched("sequential", rank)
    for _ in range(1 + (rank == 1)):
        list(ahead)
    other = patched("sequential", rank)
    list(other)
    odd = rank == 1
    in_batches = [own[at : at + 4] for at in range(0, len(own), 4)]

    @dataclass
    class Local:
        """Other ranks cannot find it."""

        rows: list[Any]

    calls: dict[str, Callable[[], Any]] = {
        "in the middle": lambda: gather_in_order(own, half),
        "an epoch ahead": lambda: gather_in_order(own, ahead),
        "too few": lambda: gather_in_order(own[:-1] if odd else own, given),
        "nothing": lambda: gather_in_order(None if odd else own, given),
        "another key": lambda: gather_in_order({"b" if odd else "a": own}, given),
        "another dtype": lambda: gather_in_order(torch.tensor(own).to(torch.int8 if odd else torch.int64), given),
        "another shape": lambda: gather_in_order(torch.zeros(len(own), 2 + odd), given),
        "a list of batches": lambda: gather_in_order(in_batches if odd else own, given),
        "a class of its own": lambda: gather_in_order(Local(own) if odd else own, given),
        "what raises": lambda: gather_in_order(Unmeasured(own) if odd else own, given),
        "another loader": lambda: gather_in_order(own, other if odd else given),
        "another call": lambda: (gather_step if odd else gather_in_order)(own, given),
        "no pickle": lambda: gather_in_order([lambda: 0] * len(own) if odd else own, given),
    }
    said = {}
    for name, call in calls.items():
        with pytest.raises(DDPPatchError) as caught:
            call()
        said[name] = f"{type(caught.value).__name__}: {message_of(caught.value)}"
        assert gather_in_order(own, given) == list(range(N))  # all are still in step
    return said


# What is said of whom, line by line.
SAID: dict[str, list[tuple[str, ...]]] = {
    "in the middle": [("rank 1", "middle of epoch 0")],
    "an epoch ahead": [("ranks 0, 2", "epoch 0", "23 items"), ("rank 1", "epoch 1", "23 items")],
    "too few": [("rank 1 passed 7 rows", "expected 8, one per sample")],
    "nothing": [("rank 1 passed None", "expected 8, one per sample")],
    "another key": [("ranks 0, 2", "passed list at ['a']"), ("rank 1", "passed nothing at ['a']")],
    "another dtype": [("ranks 0, 2", "tensor torch.int64 (n)"), ("rank 1", "tensor torch.int8 (n)")],
    "another shape": [("ranks 0, 2", "tensor torch.float32 (n, 2)"), ("rank 1", "tensor torch.float32 (n, 3)")],
    "a list of batches": [("ranks 0, 2", "passed list"), ("rank 1", "passed a list of batches of list")],
    "no pickle": [("rank 1", "local object")],
    "a class of its own": [("rank 1", "local object")],
    "what raises": [("rank 1", "RuntimeError", "no length")],
    "another call": [("rank 1", "after the loop", "epoch 0 is over")],
    "another loader": [("ranks 0, 2", "patched loader 1 "), ("rank 1", "patched loader 4 ")],
}


def test_what_one_rank_does_wrong_is_told_to_all() -> None:
    ranks = run_ranks(in_time, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[0].keys() == SAID.keys()
    for name, message in ranks[0].items():
        assert_tells(
            message,
            ("OutputsError", "Gathering outputs"),
            "outputs.extend(rows)" if name == "another shape" else "every rank",
        )
        _, *lines, _ = message.split("\n")
        for line, facts in zip(lines, SAID[name], strict=True):
            assert not missing(line, facts), (name, line)


def failing(rank: int, world_size: int) -> tuple[str, str]:
    """Rank 1 fails in the middle of sending; then it does not come at all."""
    given = patched("sequential", rank, timeout=6)
    own = torch.tensor(outputs_of(given))
    if rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gather, "are_alike", None)
            with pytest.raises(TypeError):
                gather_in_order(own, given)
        return "", ""
    with pytest.raises(RankMismatchError) as broken:
        gather_in_order(own, given)
    with pytest.raises(MissingRanksError) as missing:
        gather_in_order(own, given)
    return str(broken.value), str(missing.value)


def leaving(rank: int, world_size: int) -> str:
    """Rank 1 leaves the loop alone."""
    given = patched("sequential", rank, timeout=6)
    seen: list[int] = []
    with pytest.raises(MissingRanksError) if rank != 1 else nullcontext() as missing:
        for step, batch in enumerate(given):
            if rank == 1 and step == 1:
                break
            seen += gather_step(batch, given)
    assert seen == list(range(4 * world_size))
    return "" if missing is None else str(missing.value)


def test_a_rank_that_leaves_the_loop_alone_is_missed_in_the_next_step() -> None:
    first, _, last = run_ranks(leaving, 3)
    for said in (first, last):
        assert_tells(said, ("Gathering outputs", "rank 1 of [0, 1, 2] did not come"), "timeout=")


def late_at_the_second_meeting(rank: int, world_size: int, late: int, by_s: float) -> str:
    """All have gathered once; then one rank takes longer than the others wait for it."""
    given = patched("sequential", rank, timeout=2)
    gather_in_order(outputs_of(given), given)
    own = outputs_of(given)
    time.sleep(by_s if rank == late else 0)
    with pytest.raises(MissingRanksError) as missing:
        gather_in_order(own, given)
    return str(missing.value)


@pytest.mark.parametrize(("world_size", "late"), [soaked(2, 0), (3, 2)])
def test_a_rank_that_comes_late_to_a_second_meeting_is_named_to_all(world_size: int, late: int) -> None:
    who = f"rank {late} of {[*range(world_size)]}"
    for said in run_ranks(late_at_the_second_meeting, world_size, late, 4.0):
        assert_tells(said, ("Gathering outputs", f"{who} came after another rank had waited in vain"), "timeout=")
        assert "remote worker" not in said
    for rank, said in enumerate(run_ranks(late_at_the_second_meeting, world_size, late, 12.0)):
        assert_tells(said, f"{who} {'came after' if rank == late else 'did not come, or ended'}", "timeout=")
        assert "remote worker" not in said


def test_ranks_that_fail_or_do_not_come_are_missed() -> None:
    (broken, missing), _, (also_broken, also_missing) = run_ranks(failing, 3)
    for said in (broken, also_broken):
        assert_tells(said, ("Gathering outputs", "rank 1: TypeError"), "start all ranks again")
    for said in (missing, also_missing):
        assert_tells(said, ("Gathering outputs", "rank 1 of 3", " s; ranks 0, 2 did"), "timeout=")
