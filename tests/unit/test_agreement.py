"""What is told of a sampler before it is shared: nothing is used up, copied in vain or moved."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from messages import missing
from torch.utils.data import RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from zoo import KINDS, Indices, Kind, N, Own, Source, draw_ambient, seed_ambient, seeded_generator, units

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.loaders.facts import StreamFacts
from ddp_patch.loaders.samples import first_order
from ddp_patch.sharding.item_sources import in_pieces
from ddp_patch.sharding.saved_state import States


def sample_order(sampler: Any, dataset: Any = None) -> str | None:
    return first_order(sampler, dataset).fingerprint


def stream_of(kind: Kind) -> Any:
    loader = kind.make()
    return loader.batch_sampler if kind.batches and loader.batch_sampler is not None else loader.sampler


SAMPLED = [kind for kind in KINDS if "iterable" not in kind.name and not isinstance(stream_of(kind), Iterator)]


@pytest.mark.parametrize("kind", SAMPLED, ids=lambda kind: kind.name)
def test_ranks_that_agree_have_one_fingerprint_and_nothing_moves(kind: Kind) -> None:
    orders = set()
    for rank in range(3):
        seed_ambient(rank)
        draw_ambient()
        stream = stream_of(kind)
        expected = draw_ambient(3)
        seed_ambient(rank)
        draw_ambient()
        stream = stream_of(kind)
        orders.add(sample_order(stream))
        assert draw_ambient(3) == expected
    assert len(orders) == 1
    assert None not in orders


@pytest.mark.parametrize("kind", [SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler])
def test_torchs_own_samplers_are_not_drawn(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = kind([1, 2, 3], 2) if kind is WeightedRandomSampler else kind([1, 2, 3])
    monkeypatch.setattr(kind, "__iter__", lambda _: pytest.fail("it was drawn"))
    assert sample_order(sampler) is not None


def test_a_private_generator_seeded_by_rank_shows() -> None:
    orders = {sample_order(Own(lambda rank=rank: np.random.default_rng(rank).permutation(N))) for rank in range(3)}  # type: ignore[misc]
    assert len(orders) == 3


def test_a_torch_generator_seeded_by_rank_does_not_show_for_its_state_is_sent() -> None:
    one = RandomSampler(Indices(), generator=torch.Generator().manual_seed(1))
    other = RandomSampler(Indices(), generator=torch.Generator().manual_seed(2))
    assert sample_order(one) == sample_order(other)


class Counting(Sampler[int]):
    """Holds its dataset, and counts on its own object what is drawn."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.drawn = 0

    def __len__(self) -> int:
        return 10**6

    def __iter__(self) -> Iterator[int]:
        for index in range(10**6):
            self.drawn += 1
            yield index


class Uncopyable(Indices):
    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("a dataset was copied")


def test_no_sampler_is_consumed_and_no_dataset_copied() -> None:
    dataset = Uncopyable()
    sampler = Counting(dataset)
    assert sample_order(sampler, dataset) is not None
    assert sampler.drawn == 0
    assert sampler.dataset is dataset
    assert sample_order(Counting(dataset)) is not None  # found on the sampler itself


class Holding:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def open_forever() -> Iterator[int]:
    while True:
        yield 0


def test_what_cannot_be_copied_is_said_to_be_unchecked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ddp_patch"):
        assert sample_order(Holding(open_forever())) is None
        assert StreamFacts.of(iter(range(3))).order is None
        assert sample_order(Source()) is None
    held, iterator, dataset = (record.getMessage() for record in caplog.records)
    assert not missing(held, ("order of Holding", "not compared", "TypeError: cannot pickle 'generator' object"))
    assert not missing(iterator, ("order of an iterator", "not compared", "use it up"))
    assert not missing(dataset, ("order of an iterable dataset", "not compared", "use it up"))


def test_an_explicit_world_compares_nothing() -> None:
    """And draws nothing ahead of the first pass."""
    generator = seeded_generator()
    before = generator.get_state()
    sampler = RandomSampler(Indices(), generator=generator)
    patched = patch_dataloader_to_ddp(torch.utils.data.DataLoader(Indices(), sampler=sampler), rank=0, num_replicas=2)
    assert torch.equal(generator.get_state(), before)
    assert len(units(KINDS[0], patched)) == 12


class ItsOwnSampler(Indices):
    def __init__(self) -> None:
        super().__init__()
        self.generator = seeded_generator()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(N, generator=self.generator).tolist())


def test_a_dataset_that_is_its_own_sampler_is_not_drawn() -> None:
    both = ItsOwnSampler()
    before = both.generator.get_state()
    assert sample_order(both, both) is None
    assert torch.equal(both.generator.get_state(), before)


def test_a_leader_draws_an_ordinary_epoch_at_once_and_an_endless_one_in_pieces_that_grow_to_a_limit() -> None:
    states = States(), lambda: States((1,))
    ((items, before, after),) = in_pieces(lambda: iter(range(100_000)), nullcontext, states, 2**20, 2**20)
    assert (items, before, after) == ([*range(100_000)], States(), States((1,)))
    endless = in_pieces(count, nullcontext, states, 2**12, 2**20)
    assert [len(items) for items, *_ in islice(endless, 12)] == [min(2 ** (12 + place), 2**20) for place in range(12)]
