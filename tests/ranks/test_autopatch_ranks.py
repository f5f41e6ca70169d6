"""Autopatch on real ranks that are seeded differently: shares, functions that communicate, and ranks that differ."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import assert_tells
from quick import run_ranks
from repeaters import Infinite
from torch.utils.data import DataLoader, WeightedRandomSampler
from zoo import Indices, PKBatches, Source, seed_ambient

import ddp_patch
from ddp_patch import autopatch, leave_alone, unpatched
from ddp_patch.errors import MissingRanksError, NotPatchedError, RankMismatchError
from ddp_patch.testing.ranks import guarded

N = 23
WAYS = ("ddp_patch.unpatched()", "ddp_patch.leave_alone(loader)", "--except")


def made(**options: Any) -> DataLoader[Any]:
    return DataLoader(Indices(N), **{"batch_size": 4, **options})


def items(loader: Any) -> list[int]:
    return [int(item) for batch in loader for item in batch]


def trained(rank: int, world_size: int) -> dict[str, Any]:
    """What a script does that knows nothing of ranks."""
    seed_ambient(100 + rank)
    loaders = {
        "shuffled": made(shuffle=True),
        "workers": made(shuffle=True, num_workers=2, persistent_workers=True, multiprocessing_context="forkserver"),
        "weighted": made(sampler=WeightedRandomSampler([1.0] * N, N, replacement=False)),
        "batches": DataLoader(Indices(N), batch_sampler=PKBatches()),
        "iterable": DataLoader(Source(), batch_size=4),
    }
    with autopatch():
        if rank == 0:
            assert len(loaders["shuffled"]) == -(-N // (4 * world_size))  # as a progress bar of the first rank does
        return {name: [items(loader), items(loader)] for name, loader in loaders.items()}


def test_each_sample_comes_once_per_epoch() -> None:
    ranks = run_ranks(trained, 3)
    for name in ranks[0]:
        for epoch in range(2):
            found = [item for rank in ranks for item in rank[name][epoch]]
            assert set(found) == set(range(N)) or name == "batches", name
            assert len({len(rank[name][epoch]) for rank in ranks}) == 1 or name == "batches"
            if name != "batches":
                assert len(found) == -(-N // 3) * 3
    first = ranks[0]
    assert first["shuffled"][0] != first["shuffled"][1]


def communicating(rank: int, world_size: int) -> dict[str, Any]:
    seed_ambient(rank)
    with autopatch():
        loader = made(shuffle=True)
        outputs, steps = [], []
        for batch in loader:
            outputs.append(batch.reshape(-1, 1))
            steps += ddp_patch.gather_step(batch, loader).tolist()
        assert sorted(steps) == list(range(N))
        gathered = ddp_patch.gather_in_order(torch.cat(outputs), loader)
        weights = sum(float(weight.sum()) for _, weight in ddp_patch.iter_with_weights(made()))
        with guarded():  # begun later, so asked first
            shared = items(made())
        alone = leave_alone(made())
        with guarded(), pytest.raises(NotPatchedError, match=rf"{Path(__file__).name}:\d+"):
            items(alone)
        with guarded():
            repeated = Infinite(Indices(N), 4)  # its constructor begins an iterator, which is no iteration yet
            with unpatched(), pytest.raises(NotPatchedError):
                iter(repeated)
            assert len(items(repeated)) == -(-N // world_size)
    with guarded(), autopatch():
        assert items(made()) == shared
        with unpatched(), pytest.raises(NotPatchedError):
            items(made())
    return {"gathered": gathered.reshape(-1).tolist(), "weights": weights, "shared": shared}


def test_functions_that_communicate_take_autopatched_loaders() -> None:
    first, second = run_ranks(communicating, 2)
    assert sorted(first["gathered"]) == list(range(N))
    assert first["gathered"] == second["gathered"]
    assert {*first["shared"], *second["shared"]} == set(range(N))


def validates_alone(rank: int, world_size: int) -> str | None:
    with autopatch():
        items(made(shuffle=True))
    with autopatch(timeout=2):
        val = made()
        if rank > 0:
            dist.barrier()  # for which rank 0 is too late
            return None
        with pytest.raises(MissingRanksError) as caught:
            items(val)
        with unpatched():
            assert len(items(val)) == N
        val = leave_alone(made())
        assert len(items(val)) == N
        dist.barrier()
        return str(caught.value)


def test_a_loader_that_only_some_ranks_iterate_is_named() -> None:
    message, *_ = run_ranks(validates_alone, 3)
    assert message is not None
    facts = (f"{Path(__file__).name}:", "DataLoader", "iterated", "ranks 1, 2 of 3", "rank 0")
    assert_tells(message, facts, WAYS)


def uses_in_another_order(rank: int, world_size: int) -> str:
    with autopatch(timeout=20):
        train, val = (made(shuffle=False) for _ in range(2))  # alike, and made by one line
        with pytest.raises(RankMismatchError) as caught:
            len(val) if rank == 0 else len(train)
        return str(caught.value)


def test_loaders_that_look_alike_are_told_apart() -> None:
    for message in run_ranks(uses_in_another_order, 2):
        assert "DataLoader number 1 made at" in message
        assert "DataLoader number 2 made at" in message
        assert all(way in message for way in WAYS)
