"""Whether ranks' streams are parts, or the same samples in other orders: only sound evidence counts."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from messages import assert_tells, raises
from torch.utils.data import SubsetRandomSampler
from zoo import Indices

from ddp_patch.errors import RankMismatchError
from ddp_patch.loaders.overlap import are_parts, first_samples
from ddp_patch.ranks.agreement import require_all_shares, why_orders_differ

# Makes what a rank draws: of so many samples, for so many ranks, for this one.
Make = Callable[[int, int, int], Any]


class Drawing:
    def __init__(self, draw: Callable[[], Iterator[Any]]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[Any]:
        return self.draw()


def each(make: Make, n: int, ranks: int) -> list[Any]:
    """Return what is known of each rank's stream."""
    return [first_samples(make(n, ranks, rank), None, n, ranks) for rank in range(ranks)]


def shown(make: Make, n: int, ranks: int = 2) -> bool:
    seen = each(make, n, ranks)
    return None not in seen and are_parts(seen, n, ranks)


def permuted(n: int, seed: int) -> Any:
    return np.random.default_rng(seed).permutation(n)


PARTS: dict[str, Make] = {
    "interleaved, padded": lambda n, w, r: [i % n for i in range(r, -(-n // w) * w, w)],
    "interleaved, dropped": lambda n, w, r: range(r, n // w * w, w),
    "runs": lambda n, w, r: range(r * n // w, (r + 1) * n // w),
    "shuffled alike": lambda n, w, r: permuted(n, 0)[r::w].tolist(),
    "a subset's indices": lambda n, w, r: SubsetRandomSampler(range(r, n, w)),
    "batches": lambda n, w, r: [[*range(b, min(b + 4, n))] for b in range(4 * r, n, 4 * w)],
    "batches in tensors": lambda n, w, r: [torch.arange(b, min(b + 4, n)) for b in range(4 * r, n, 4 * w)],
    "names": lambda n, w, r: [f"{i}.jpg" for i in range(r, n, w)],
}
# Private generators, seeded by rank.
PRIVATE: dict[str, Make] = {
    "a permutation": lambda n, _, r: permuted(n, r).tolist(),
    "half of one": lambda n, _, r: permuted(n, r)[: n // 2].tolist(),
    "with replacement": lambda n, _, r: np.random.default_rng(r).integers(n, size=n).tolist(),
    "batches": lambda n, _, r: permuted(n, r)[: n // 4 * 4].reshape(-1, 4).tolist(),
    "large batches": lambda n, _, r: np.array_split(permuted(n, r), [n // 4, n // 2 - 1, 3 * n // 4]),
}
UNCLEAR: dict[str, tuple[Make, int]] = {
    "a million, of which few are looked at": (PRIVATE["a permutation"], 10**6),
    "few of many, drawn by rank": (lambda n, _, r: permuted(n, r)[:50].tolist(), 100_000),
    "few samples in all": (PRIVATE["a permutation"], 3),
    "endless over few": (lambda n, w, r: Drawing(lambda: (i % n for i in count(r, w))), 20),
    "numbers that are no indices": (lambda n, _, r: range(n + n * r, 2 * n + n * r), 1000),
    "pairs": (lambda n, w, r: [(i, 224) for i in range(r, n, w)], 100),
    "no length": (lambda _, w, r: range(r, 100, w), 0),
}


@pytest.mark.parametrize(("n", "ranks"), [(8, 2), (21, 2), (21, 4), (23, 3), (1000, 8), (5000, 2)])
@pytest.mark.parametrize("kind", PARTS)
def test_shards_of_a_sampler_are_parts(kind: str, n: int, ranks: int) -> None:
    assert shown(PARTS[kind], n, ranks)


@pytest.mark.parametrize(("n", "ranks"), [(24, 2), (100, 4), (1000, 8), (5000, 2)])
@pytest.mark.parametrize("kind", PRIVATE)
def test_private_generators_make_none(kind: str, n: int, ranks: int) -> None:
    assert not shown(PRIVATE[kind], n, ranks)


@pytest.mark.parametrize("n", [8, 12, 16])
@pytest.mark.parametrize("seed", range(20))
def test_few_batches_of_private_generators_make_none_though_the_first_have_nothing_in_common(n: int, seed: int) -> None:
    assert not shown(lambda n, w, r: PRIVATE["batches"](n, w, 2 * seed + r), n)


@pytest.mark.parametrize("kind", UNCLEAR)
def test_what_proves_nothing_is_no_proof(kind: str) -> None:
    assert not shown(*UNCLEAR[kind])


def test_few_samples_are_drawn_and_fewer_sent_and_the_dataset_is_not_copied() -> None:
    class Untouchable(Indices):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("it was copied")

    drawn = 0

    def noting() -> Iterator[int]:
        nonlocal drawn
        for index in range(10**7):
            drawn += 1
            yield index

    dataset, sampler = Untouchable(), Drawing(noting)
    vars(sampler)["dataset"] = dataset
    found = first_samples(sampler, dataset, 10**7, 2)
    assert found is not None
    assert (drawn, found.drawn, len(found.hashes), found.is_cut, found.rest) == (2**16 + 1, 2**16, 512, True, None)
    endless = first_samples(Drawing(lambda: iter(list, None)), None, 10, 2)  # of batches without a sample
    assert endless is not None
    assert (endless.drawn, endless.rest) == (0, None)


def said(make: Make, n: int) -> str:
    first = {rank: None if one is None else (n, one) for rank, one in enumerate(each(make, n, 2))}
    return why_orders_differ({rank: str(rank) for rank in range(2)}, "Mine", 2, first)


def test_parts_are_an_error_and_other_orders_a_warning_that_name_both_remedies() -> None:
    facts = ("rank 0 and rank 1", "sharded already", "Mine", "none in common but padding")
    with raises(RankMismatchError, facts, ("is_ddp_aware = True in Mine", "one process")):
        said(PARTS["names"], 21)
    own = ("Rank 0 and rank 1", "different orders", "random generator", "set", "files", "rank 0 draws", "do not show")
    for make, n in ((PRIVATE["a permutation"], 100), UNCLEAR["pairs"]):
        assert_tells(said(make, n), own, ("same on every rank", "is_ddp_aware = True in Mine"))


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


def test_shares_are_right_where_ranks_take_each_equally_often() -> None:
    for held in COVERED:
        require_all_shares(held)
    for held in NOT_COVERED:
        with raises(RankMismatchError, ("Agreeing", "sharded already", "on rank"), ("own rank", "process_group=")):
            require_all_shares(held)
