"""Whether ranks' streams are parts, or the same samples in other orders: only sound evidence counts."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from messages import assert_tells, raises
from torch.utils.data import SubsetRandomSampler
from zoo import Indices, Own

from ddp_patch.errors import RankMismatchError
from ddp_patch.loaders.overlap import first_samples, relation_of
from ddp_patch.ranks.agreement import require_all_shares, why_orders_differ


class Drawing:
    def __init__(self, draw: Callable[[], Iterable[Any]]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[Any]:
        return iter(self.draw())


def relation(make: Callable[[int], Any], n: int, ranks: int) -> str:
    seen = [first_samples(make(rank), None, n, ranks) for rank in range(ranks)]
    return "unclear" if None in seen else relation_of([one for one in seen if one is not None], n, ranks)


# How a sampler shards n samples by itself.
SHARDS: dict[str, Callable[[int, int, int], Any]] = {
    "interleaved, padded": lambda n, w, r: Drawing(lambda: (i % n for i in range(r, -(-n // w) * w, w))),
    "interleaved, dropped": lambda n, w, r: Drawing(lambda: range(r, n // w * w, w)),
    "runs": lambda n, w, r: Drawing(lambda: range(r * n // w, (r + 1) * n // w)),
    "shuffled alike": lambda n, w, r: Drawing(lambda: np.random.default_rng(0).permutation(n)[r::w].tolist()),
    "a subset's indices": lambda n, w, r: SubsetRandomSampler(range(r, n, w)),
    "batches": lambda n, w, r: Drawing(lambda: [[*range(b, min(b + 4, n))] for b in range(4 * r, n, 4 * w)]),
    "batches in tensors": lambda n, w, r: Drawing(
        lambda: [torch.tensor([*range(b, min(b + 4, n))]) for b in range(4 * r, n, 4 * w)]
    ),
    "names": lambda n, w, r: [f"{i}.jpg" for i in range(r, n, w)],
}


@pytest.mark.parametrize("kind", SHARDS)
@pytest.mark.parametrize(("n", "ranks"), [(8, 2), (21, 2), (21, 4), (23, 3), (1000, 8), (5000, 2)])
def test_shards_of_a_sampler_are_parts(kind: str, n: int, ranks: int) -> None:
    assert relation(lambda rank: SHARDS[kind](n, ranks, rank), n, ranks) == "parts"


# Private generators, seeded by rank.
PRIVATE: dict[str, Callable[[int, int], Any]] = {
    "a permutation": lambda n, r: Own(lambda: np.random.default_rng(r).permutation(n)),
    "half of one": lambda n, r: Own(lambda: np.random.default_rng(r).permutation(n)[: n // 2]),
    "with replacement": lambda n, r: Own(lambda: np.random.default_rng(r).integers(n, size=n)),
    "batches": lambda n, r: Drawing(lambda: np.random.default_rng(r).permutation(n // 4 * 4).reshape(-1, 4).tolist()),
}


@pytest.mark.parametrize("kind", PRIVATE)
@pytest.mark.parametrize(("n", "ranks"), [(24, 2), (100, 4), (1000, 8), (5000, 2)])
def test_private_generators_are_no_parts(kind: str, n: int, ranks: int) -> None:
    assert relation(lambda rank: PRIVATE[kind](n, rank), n, ranks) == "overlapping"


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("n", [400, 5000])
def test_large_batches_of_private_generators_are_no_parts(n: int, share: float) -> None:
    """Although a batch has as many samples as they have in common."""

    def draw(rank: int) -> list[Any]:
        drawn = np.random.default_rng(rank).permutation(n)[: int(share * n)]
        return np.array_split(drawn, [n // 4, n // 2 - 1, 3 * n // 4])

    assert relation(lambda rank: Drawing(lambda: draw(rank)), n, 2) == "overlapping"


@pytest.mark.parametrize("n", [8, 12, 16])
@pytest.mark.parametrize("seed", range(20))
def test_few_batches_of_private_generators_are_no_parts(n: int, seed: int) -> None:
    """Although their first ones may have nothing in common."""
    assert relation(lambda rank: PRIVATE["batches"](n, 2 * seed + rank), n, 2) != "parts"


def test_a_million_samples_are_told_apart_by_few_hashes() -> None:
    """Although two private generators give each rank other samples among its first hundred."""
    n = 10**6
    assert relation(lambda rank: PRIVATE["a permutation"](n, rank), n, 2) == "overlapping"


UNCLEAR: dict[str, tuple[Callable[[int], Any], int]] = {
    "few of many, drawn by rank": (lambda r: np.random.default_rng(r).permutation(100_000)[:50].tolist(), 100_000),
    "few samples in all": (lambda r: np.random.default_rng(r).permutation(3).tolist(), 3),
    "endless over few": (lambda r: Drawing(lambda: (i % 20 for i in range(r, 10**9, 2))), 20),
    "numbers that are no indices": (lambda r: range(1000 + 1000 * r, 2000 + 1000 * r), 1000),
    "pairs": (lambda r: [(i, 224) for i in range(r, 100, 2)], 100),
    "no length": (lambda r: range(r, 100, 2), 0),
}


@pytest.mark.parametrize("kind", UNCLEAR)
def test_what_proves_nothing_is_unclear(kind: str) -> None:
    make, n = UNCLEAR[kind]
    assert relation(make, n, 2) == "unclear"


def test_so_many_samples_are_drawn_at_most() -> None:
    drawn: list[int] = []

    def noting(rank: int) -> Iterator[int]:
        for index in range(rank, 10**7, 2):
            drawn.append(index)
            yield index

    assert relation(lambda rank: Drawing(lambda: noting(rank)), 10**7, 2) == "unclear"
    assert len(drawn) == 2 * (2**16 + 1)


def test_batches_without_a_sample_have_an_end() -> None:
    found = first_samples(Drawing(lambda: iter(list, None)), None, 10, 2)
    assert found is not None
    assert (found.drawn, found.rest) == (0, None)


def test_what_a_rank_sends_is_bounded() -> None:
    found = first_samples(range(10**6), None, 10**6, 2)
    assert found is not None
    assert (len(found.hashes), found.is_cut, found.rest) == (512, True, None)


def said(make: Callable[[int], Any], n: int, ranks: int = 2) -> str:
    told = {rank: (first_samples(make(rank), None, n, ranks)) for rank in range(ranks)}
    first = {rank: None if one is None else (n, one) for rank, one in told.items()}
    return why_orders_differ({rank: str(rank) for rank in range(ranks)}, "Mine", ranks, first)


def test_parts_are_an_error_that_names_both_remedies() -> None:
    facts = ("rank 0 and rank 1", "sharded already", "Mine", "none in common but padding")
    with raises(RankMismatchError, facts, ("is_ddp_aware = True in Mine", "one process")):
        said(lambda rank: range(rank, 21, 2), 21)


def test_orders_alone_blame_a_generator_and_what_is_unclear_blames_nobody() -> None:
    own = ("Rank 0 and rank 1", "different orders", "random generator", "set", "files", "rank 0 draws")
    orders = said(lambda rank: PRIVATE["a permutation"](100, rank), 100)
    assert_tells(orders, own, "same on every rank")
    assert "sharded" not in orders
    unclear = said(UNCLEAR["pairs"][0], 100)
    assert_tells(unclear, (*own, "sharded already", "do not show which"), ("same on every rank", "is_ddp_aware = True"))


# Loaders that are sharded already, by what each rank's was made for: its place here, and (rank, ranks) there.
COVERED: list[dict[int, tuple[int, tuple[int, int]]]] = [
    {0: (0, (0, 2)), 1: (1, (1, 2))},
    {0: (0, (1, 2)), 1: (1, (0, 2))},  # counted in another order
    {0: (0, (0, 2)), 1: (1, (0, 2)), 2: (2, (1, 2)), 3: (3, (1, 2))},  # pairs that replicate each other
    {0: (0, (0, 2)), 1: (0, (0, 2)), 2: (1, (1, 2)), 3: (1, (1, 2))},  # the same, by a mesh
    {0: (0, (0, 1)), 1: (1, (0, 1))},  # all replicate each other
]
NOT_COVERED: list[dict[int, tuple[int, tuple[int, int]]]] = [
    {0: (0, (0, 4)), 1: (1, (1, 4))},
    {0: (0, (0, 2)), 1: (1, (0, 2))},
    {0: (0, (0, 2)), 1: (1, (1, 2)), 2: (2, (0, 2))},
    {0: (0, (0, 2)), 1: (1, (1, 3))},
    {0: (0, (0, 4)), 1: (0, (1, 4)), 2: (1, (2, 4)), 3: (1, (3, 4))},  # a mesh whose ranks ought to replicate
]


@pytest.mark.parametrize("held", COVERED)
def test_shares_that_the_ranks_take_equally_often_are_right(held: Any) -> None:
    require_all_shares(held)


@pytest.mark.parametrize("held", NOT_COVERED)
def test_shares_that_nobody_takes_are_an_error(held: Any) -> None:
    with raises(RankMismatchError, ("Agreeing", "sharded already", "on rank"), ("own rank", "process_group=")):
        require_all_shares(held)


def test_a_dataset_is_not_copied_for_a_look() -> None:
    class Untouchable(Indices):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("it was copied")

    dataset = Untouchable()
    sampler = Own(lambda: np.arange(dataset.n))
    sampler.dataset = dataset  # type: ignore[attr-defined]
    assert first_samples(sampler, dataset, 23, 2) is not None
