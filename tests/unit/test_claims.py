"""What is said to be sharded already is compared: settings, steps, and in each pass the samples."""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, permutations
from typing import Any, cast

import numpy as np
import pytest
import torch
from messages import raises
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler
from zoo import Indices

from ddp_patch.errors import RankMismatchError
from ddp_patch.loaders.facts import claimed_by, data_of, look_at
from ddp_patch.loaders.overlap import NotedIndices, common_items, is_more_than_padding
from ddp_patch.ranks.agreement import require_all_shares
from ddp_patch.ranks.exchange import require_same


class Stored(Sampler[Any]):
    """A user's, which stores its rank, and draws what a function of the rank and the number of ranks gives."""

    def __init__(self, draw: Callable[[int, int], Iterable[Any]], rank: int, world_size: int, length: int) -> None:
        self.draw, self.rank, self.world_size, self.length = draw, rank, world_size, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.draw(self.rank, self.world_size))


def judge(make: Callable[[int, int], DataLoader[Any]], ranks: int, *, even: bool = True) -> None:
    claims = {rank: claimed_by(look_at(make(rank, ranks)), even=even) for rank in range(ranks)}
    assert json.loads(json.dumps([*claims.values()]))
    require_same("Agreeing", claims)


def told(make: Callable[[int, int], DataLoader[Any]], ranks: int, batches: int | None = None) -> int:
    """How many samples some rank and another one have in common by their first batches that are not padding's."""
    sketches = []
    for rank in range(ranks):
        torch.manual_seed(100 + rank)  # as real ranks are seeded differently
        loader = make(rank, ranks)
        noted = NotedIndices(loader.batch_sampler, gives_batches=True, data=data_of(loader.dataset))
        assert len(list(islice(noted, batches))) == len(list(islice(noted, batches)))
        sketches.append(noted.sketch.hashes)
    pairs = [(mine, common_items(mine, theirs)) for mine, theirs in permutations(sketches, 2)]
    return max(found * is_more_than_padding(found, of=len(mine)) for mine, found in pairs)


def over(draw: Callable[[int, int], Iterable[Any]], n: int, *, in_batches: bool = False, length: int = 8) -> Any:
    def make(rank: int, ranks: int) -> DataLoader[Any]:
        sampler = Stored(draw, rank, ranks, length)
        given: dict[str, Any] = {"batch_sampler": sampler} if in_batches else {"sampler": sampler, "batch_size": 4}
        return DataLoader(Indices(n), **given)

    return make


def poisson(rank: int, ranks: int, n: int = 400) -> Iterator[list[int]]:
    """As opacus': batches of random sizes, also empty ones, of a rank's own samples."""
    own, draws = torch.randperm(n, generator=torch.Generator().manual_seed(7))[rank::ranks], np.random.default_rng(rank)
    for _ in range(8):
        yield own[torch.from_numpy(draws.random(len(own)) < 0.02)].tolist()


def even_batches(rank: int, ranks: int, n: int = 37, size: int = 4) -> list[list[int]]:
    """As accelerate's BatchSamplerShard: the last batches are filled up from the beginning."""
    step = ranks * size
    order = [place % n for place in range(-(-n // step) * step)]
    return [order[start : start + size] for start in range(rank * size, len(order), step)]


def by_lengths(rank: int, ranks: int) -> list[int]:
    """As of VITS: the samples of each length are filled up, to be shared evenly."""
    lengths = [range(start, start + 200 - start // 100) for start in range(0, 2000, 200)]
    filled = [[*each, *each[: -len(each) % (4 * ranks)]] for each in lengths]
    return [place for each in filled for place in each[rank::ranks]]


HONEST: dict[str, tuple[Callable[[int, int], Iterable[Any]], int, bool]] = {
    "interleaved, padded": (lambda r, w: (i % 37 for i in range(r, -(-37 // w) * w, w)), 37, False),
    "runs": (lambda r, w: range(r * 37 // w, (r + 1) * 37 // w), 37, False),
    "shuffled alike": (lambda r, w: np.random.default_rng(5).permutation(30_000)[r::w].tolist(), 30_000, False),
    "few samples": (lambda r, w: [r % 2], 2, False),
    "lengths of their own, each padded": (by_lengths, 2000, False),
    "names": (lambda r, w: [f"{i}.jpg" for i in range(r, 37, w)], 37, False),
    "tensors": (lambda r, w: [torch.tensor([i, i + 1]) for i in range(2 * r, 36, 2 * w)], 37, True),
    "even batches": (even_batches, 37, True),
    "one padded batch": (lambda r, w: [[*range(4)]], 4, True),
    "Poisson": (poisson, 400, True),
}


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("kind", HONEST)
def test_shards_are_apart(kind: str, ranks: int) -> None:
    draw, n, in_batches = HONEST[kind]
    for batches in (None, 5):
        assert not told(over(draw, n, in_batches=in_batches), ranks, batches)


def by_states(n: int) -> Callable[[int, int], Iterable[int]]:
    return lambda r, w: torch.randperm(n)[r::w].tolist()


FAULTY: dict[str, tuple[Callable[[int, int], Iterable[Any]], int, bool]] = {
    "all, in one order": (lambda r, w: range(37), 37, False),
    "all, each in its own": (lambda r, w: torch.randperm(37).tolist(), 37, False),
    "slices of orders that each rank's own states draw": (by_states(1000), 1000, False),
    "slices of many samples": (by_states(30_000), 30_000, False),
    "with replacement": (lambda r, w: np.random.default_rng(5).integers(500, size=2000)[r::w].tolist(), 2000, False),
    "few samples drawn often": (lambda r, w: np.random.default_rng(r).integers(20, size=4000).tolist(), 4000, False),
    "overlapping runs": (lambda r, w: range(max(0, r * 400 // w - 40), (r + 1) * 400 // w), 400, False),
    "batches, each in its own order": (lambda r, w: torch.randperm(36).reshape(-1, 4).tolist(), 36, True),
}


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("kind", FAULTY)
def test_samples_in_common_are_told(kind: str, ranks: int) -> None:
    draw, n, in_batches = FAULTY[kind]
    assert told(over(draw, n, in_batches=in_batches), ranks) > 10


def epochs_apart(rank: int, ranks: int, n: int = 5000) -> Iterator[int]:
    data: Any = range(n)
    sampler: Any = DistributedSampler(data, ranks, rank)
    sampler.set_epoch(rank)
    return iter(sampler)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_in_different_epochs_have_samples_in_common(ranks: int) -> None:
    assert told(over(epochs_apart, 5000), ranks) > 10


def test_indices_of_other_data_mean_other_samples() -> None:
    def make(rank: int, ranks: int) -> DataLoader[Any]:
        names: Any = [f"{rank}/{index}.jpg {rank}" for index in range(40)]
        return DataLoader(names, sampler=Stored(lambda r, w: range(40), rank, ranks, 40), batch_size=4)

    assert not told(make, 2)


def test_unequal_steps_are_told_unless_they_may_be() -> None:
    def make(rank: int, ranks: int) -> DataLoader[Any]:
        make_over = over(lambda r, w: range(20 * r, 20 * r + 10), 60, length=20 if rank == 0 else 10)
        return make_over(rank, ranks)  # type: ignore[no-any-return]  # it is a loader

    facts = ("batches of its Stored (uneven='keep' lets them differ)", "5 on rank 0; 3 on ranks 1, 2")
    with raises(RankMismatchError, facts, "the same on every rank"):
        judge(make, 3)
    judge(make, 3, even=False)


class Lengths(IterableDataset[int]):
    """As litdata's, of which each rank's part has its own length."""

    is_ddp_aware = True

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


def test_iterable_datasets_count_by_their_length_which_torch_forgets_again() -> None:
    with raises(RankMismatchError, ("batches of its Lengths", "4 on rank 0; 6 on rank 1"), "the same on every rank"):
        judge(lambda rank, ranks: DataLoader(Lengths(15 + 8 * rank), 4), 2)
    given = DataLoader(Lengths(15), 4)
    claimed_by(look_at(given), even=True)
    assert given._IterableDataset_len_called is None


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "seed": ({"seed": 117}, {"seed": 134}, "seed: 117 on rank 0; 134 on rank 1"),
    "shuffle": ({"shuffle": True}, {"shuffle": False}, "shuffle: True on rank 0; False on rank 1"),
    "drop_last": ({"drop_last": True}, {}, "drop_last: True on rank 0; False on rank 1"),
    "samples": ({"dataset": range(40)}, {"dataset": range(44)}, "number of samples: 40 on rank 0; 44 on rank 1"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_distributed_samplers_have_the_same_settings(name: str) -> None:
    *options, said = OPTIONS[name]

    def make(rank: int, ranks: int) -> DataLoader[Any]:
        given = {"dataset": range(40), **options[rank % 2]}
        sampler: Any = DistributedSampler(**given, num_replicas=ranks, rank=rank)
        return DataLoader(Indices(48), 4, sampler=sampler)

    setting, _, values = said.partition(": ")
    with raises(RankMismatchError, f"{setting} of its DistributedSampler: {values}", "on every rank"):
        judge(make, 2)


def test_noting_indices_keeps_little_and_changes_nothing() -> None:
    order = [np.int64(place) for place in range(30_000)]
    noted = NotedIndices(BatchSampler(cast(Any, order), 4, drop_last=True), gives_batches=True, data="0")
    assert len(noted) == 7_500
    assert noted.drop_last is True
    assert [place for batch in noted for place in batch] == order
    assert len(noted.sketch.hashes) == 256 < noted.sketch.seen == 29_996
    lazily = NotedIndices([iter([1, 2]), iter([3])], gives_batches=True, data="0")
    assert [list(batch) for batch in lazily] == [[1, 2], [3]]


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
