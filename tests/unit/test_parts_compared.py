"""What ranks are told of parts of the data that each has: what is certain, what is likely, and what is no fault."""

import random
from typing import Any

import pytest
import torch
from claiming import Connection, connected, new_store
from torch.utils.data import DistributedSampler

from ddp_patch.errors import PartsWarning, RankMismatchError
from ddp_patch.loaders.overlap import Sketch
from ddp_patch.ranks.claims import Claims
from ddp_patch.ranks.parts import Parts

__all__ = ["connected"]

pytestmark = pytest.mark.usefixtures("connected")


DATA: Any = range(9)
SHUFFLING: Any = DistributedSampler(DATA, 3, 0)


class Reader:
    """A rank that reads its part of the data, in batches of four."""

    def __init__(self, store: Any, rank: int, **how: Any) -> None:
        Connection.current = self.connection = Connection(store)
        self.claims = Claims("ranks/loader", rank, range(3))
        self.parts, self.passes = Parts(lambda: "DataLoader", lambda: "Why.", **how), 0

    def reads(self, items: Any, *, ends: bool = True) -> None:
        Connection.current = self.connection
        sketch = Sketch()
        for start in range(0, len(items), 4):
            sketch.add_batch(torch.tensor(items[start : start + 4]))
        self.parts.compare(self.claims, self.passes, sketch, None if ends else len(items) // 4, self.tell)
        self.passes += 1

    def tell(self, text: str) -> None:
        raise RankMismatchError(text)


def readers(**how: Any) -> list[Reader]:
    store = new_store()
    return [Reader(store, rank, **how) for rank in range(3)]


def shuffled(items: Any, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(items, len(items))


def test_the_same_samples_in_one_order_are_certain_also_on_ranks_that_are_no_neighbours() -> None:
    _, one, other = readers()
    one.reads(range(40, 80))
    with pytest.raises(RankMismatchError, match=r"of 40 samples of rank 2 .* 40 are also rank 1's, in the same order"):
        other.reads(range(40, 80))


def test_the_first_samples_in_one_order_are_likely_at_most_as_of_one_shard_that_both_have_drawn() -> None:
    one, other, _ = readers()
    one.reads(range(40, 72), ends=False)
    with pytest.warns(PartsWarning, match="are also rank 0's. That may be on purpose"):
        other.reads(range(40, 72), ends=False)


def test_samples_that_are_all_alike_are_certain_of_nothing() -> None:
    for one in readers():
        one.reads([7] * 40)


def test_samples_that_come_again_in_another_order_are_likely_and_told_once() -> None:
    one, other, _ = readers()
    one.reads(range(40))
    with pytest.warns(PartsWarning, match="are also rank 0's. That may be on purpose, .* Why. If it is on purpose"):
        other.reads(shuffled(range(40)))
    with pytest.warns(PartsWarning, match="are also rank 1's"):
        one.reads(range(40))
    other.reads(shuffled(range(40), 1))  # warnings are errors in tests


def test_the_faster_of_two_ranks_is_told_in_the_next_pass() -> None:
    one, other, _ = readers()
    other.reads([*shuffled(range(16)), *range(40, 64)])
    with pytest.warns(PartsWarning, match="are also rank 1's"):
        one.reads(range(16))  # rank 0 is slower: nothing of it was there to compare
    with pytest.warns(PartsWarning, match="of 36 samples of rank 1 that were looked at, 12 are also rank 0's"):
        other.reads(range(140, 180))


def test_indices_that_torchs_sampler_gave_twice_are_certain_beyond_padding() -> None:
    one, other, _ = readers(sampler=DistributedSampler(DATA, 3, 0, shuffle=False))
    one.reads(range(40))
    other.reads([*range(40, 72), *range(8)])
    one.reads(range(40))
    with pytest.raises(RankMismatchError, match="are also rank 0's, though each rank should have a part of its own"):
        other.reads(shuffled(range(60)))


def test_ranks_that_replicate_each_other_and_few_samples_are_alike() -> None:
    one, other, _ = readers(replicas=(0, 1))
    one.reads(range(40))
    other.reads(range(40))
    for each in readers():
        each.reads(range(9))


def test_workers_that_all_read_the_same_are_told() -> None:
    (one, *_) = readers(workers=2)
    batches = [[*range(start, start + 4)] for start in range(0, 40, 4)]
    with pytest.raises(RankMismatchError, match="those of worker 0 are also worker 1's on rank 0, in the same order"):
        one.reads([item for batch in batches for item in batch * 2])
    (one, *_) = readers(workers=2)
    one.reads(range(40))


def test_one_order_in_two_passes_is_told_where_a_sampler_shuffles() -> None:
    (one, *_) = readers(sampler=SHUFFLING)
    one.reads(shuffled(range(40)))
    with pytest.warns(PartsWarning, match="pass 1 over it has the same order as the one before"):
        one.reads(shuffled(range(40)))
    one.reads(shuffled(range(40)))  # once
    samplers: list[Any] = [None, DistributedSampler(DATA, 3, 0, shuffle=False), SHUFFLING]
    for sampler in samplers:
        (same, *_) = readers(sampler=sampler)
        same.reads(shuffled(range(40), 1))
        same.reads(shuffled(range(40), 2 if sampler is SHUFFLING else 1))


def in_turn(first: Any, second: Any) -> list[int]:
    """What two workers read, in batches of four that come in turn."""
    pairs = zip(range(0, len(first), 4), range(0, len(second), 4), strict=True)
    return [item for at, then in pairs for item in (*first[at : at + 4], *second[then : then + 4])]


def test_samples_that_two_workers_of_one_rank_have_read_are_told_of_when_several_passes_have_them() -> None:
    one, *_ = readers(workers=2)
    one.reads(in_turn(range(20), range(12, 32)))
    with pytest.warns(PartsWarning, match="of 40 samples of rank 0 .* 8 of worker 0 are also another worker's"):
        one.reads(in_turn(range(20), shuffled(range(12, 32))))


def test_workers_that_share_the_samples_in_another_way_in_each_pass_are_told_nothing() -> None:
    one, *_ = readers(workers=2)
    for seed in range(4):
        items = shuffled(range(40), seed)
        one.reads(in_turn(items[:20], items[20:]))
