"""An epoch in which a rank makes no step, though one process makes some, is refused."""

import gc
import re
import traceback
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, get_args

import pytest
from messages import raises
from torch.utils.data import DataLoader, IterableDataset, Sampler
from zoo import Bare, Source, as_it_is, loader

from ddp_patch import DDPBatchSamplerWrapper, DDPSamplerWrapper, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import NoStepsError, message_of
from ddp_patch.options import Uneven
from ddp_patch.positions_and_padding import Batching, Plan


def test_a_rank_is_lost_where_no_batch_of_its_share_is_full() -> None:
    """As brute force has it, for every share."""
    for n, ranks, size, drop_last in product(range(12), range(1, 5), (1, 2, 3, 5), (False, True)):
        for uneven in get_args(Uneven):
            plans, batching = [Plan(rank, ranks, uneven) for rank in range(ranks)], Batching(size, drop_last)
            assert plans[0].smallest_share(n) == min(len(plan.share(n)) for plan in plans)
            is_stepless = any(batching.count(len(plan.share(n))) == 0 for plan in plans)
            is_asked_for = uneven == "keep" and not drop_last
            expected = batching.count(n) > 0 and is_stepless and not is_asked_for
            assert batching.leaves_rank_without_step(plans[-1], n) == expected


# Samples, loader, ranks, options, and all remedies that are told.
FEWER, LAST, SIZE = "fewer ranks", "drop_last=False", "a batch_size of at most"
CASES: list[tuple[int, dict[str, Any], int, dict[str, Any], list[str]]] = [
    (100, {"batch_size": 32, "drop_last": True}, 8, {}, [FEWER, LAST, f"{SIZE} 13"]),
    (100, {"batch_size": 34, "drop_last": True}, 3, {"uneven": "drop"}, [FEWER, LAST, f"{SIZE} 33"]),
    (9, {"batch_size": 5, "drop_last": True}, 2, {"uneven": "keep"}, [FEWER, LAST, f"{SIZE} 4"]),
    (2, {"batch_size": 4}, 3, {"uneven": "drop"}, [FEWER, "uneven='pad'"]),
    (3, {"batch_size": 1}, 4, {"uneven": "drop"}, [FEWER, "uneven='pad'"]),
    (8, {"batch_size": 4, "drop_last": True}, 3, {"uneven": "drop", "share": "batches"}, [FEWER, "uneven='pad'"]),
]


# These streams can hide their length.
HIDDEN = [case for case in CASES if "share" not in case[3]]


def told(error: BaseException) -> list[str]:
    return message_of(error).rpartition("Use one of these: ")[2].rstrip().removesuffix(".").split(", ")


def changed(remedy: str, made: dict[str, Any], ranks: int, options: dict[str, Any]) -> tuple[Any, int, Any]:
    """The same call after one remedy."""
    if remedy == "fewer ranks":
        return made, 1, options
    if found := re.fullmatch(r"a batch_size of at most (\d+)", remedy):
        return {**made, "batch_size": int(found[1])}, ranks, options
    value = eval(f"dict({remedy})")  # noqa: S307 - as a user would paste it
    return ({**made, **value}, ranks, options) if "drop_last" in value else (made, ranks, {**options, **value})


def given(n: int, made: dict[str, Any], sampler: Any = None) -> DataLoader[Any]:
    return DataLoader(range(n), sampler=sampler, collate_fn=as_it_is, **made)  # type: ignore[arg-type]  # torch's own use


@pytest.mark.parametrize(("n", "made", "ranks", "options", "remedies"), CASES)
def test_it_is_refused_at_the_patch_and_every_remedy_helps(
    n: int, made: dict[str, Any], ranks: int, options: dict[str, Any], remedies: list[str]
) -> None:
    name = "BatchSampler" if "share" in options else "SequentialSampler"
    items, uneven = 2 if name == "BatchSampler" else n, f"uneven={options.get('uneven', 'pad')!r}"
    facts = ("no step", name, f"{items} items", f"{ranks} ranks", uneven, "One process makes")
    for rank in range(ranks):
        with raises(NoStepsError, facts) as caught:
            patch_dataloader_to_ddp(given(n, made), rank=rank, num_replicas=ranks, **options)
        assert told(caught.value) == remedies
    for remedy in remedies:
        other, fewer, chosen = changed(remedy, made, ranks, options)
        shares = [
            list(patch_dataloader_to_ddp(given(n, other), rank=rank, num_replicas=fewer, **chosen))
            for rank in range(fewer)
        ]
        loses_nothing = chosen.get("uneven") == "keep" and any(shares)
        assert all(shares) or loses_nothing, remedy


@pytest.mark.parametrize(("case", "workers"), [*((case, 0) for case in HIDDEN), (HIDDEN[2], 2)])
def test_so_is_an_iterable_dataset(case: Any, workers: int) -> None:
    """Its workers find that too: of the last case, where the first rank alone has a full batch."""
    n, made, ranks, options, remedies = case
    for rank in {0, ranks - 1}:
        one = DataLoader(Source(n), collate_fn=as_it_is, num_workers=workers, **made)
        mine = patch_dataloader_to_ddp(one, rank=rank, num_replicas=ranks, **options)
        iterator = iter(mine)
        with raises(NoStepsError, ("no step", "Source", f"{n} items")) as caught:
            next(iterator)
        assert told(caught.value) == [remedy for remedy in remedies if "share" not in remedy]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_is_the_same_whether_or_not_the_refused_iterator_is_gone(workers: int) -> None:
    """An error keeps it alive, until the garbage collector comes: at another time on each rank."""
    one = DataLoader(Source(5), 5, collate_fn=as_it_is, num_workers=workers, drop_last=True)
    mine = patch_dataloader_to_ddp(one, rank=0, num_replicas=2)
    states = []
    with pytest.raises(NoStepsError) as caught:
        next(iter(mine))
    states.append(loader_state(mine))
    traceback.clear_frames(caught.tb)
    del caught
    gc.collect()
    states.append(loader_state(mine))
    assert [(state["epoch"], state["parts"]) for state in states] == [(0, [[[2, 0]]])] * 2


def test_an_iterable_dataset_that_knows_its_length_is_refused_at_the_patch() -> None:
    class Sized(IterableDataset[int]):
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with raises(NoStepsError, ("Sized", "3 items")):
        patch_dataloader_to_ddp(DataLoader(Sized(), batch_size=None), rank=0, num_replicas=4, uneven="drop")
    # The dataset decides what each rank reads.
    patch_dataloader_to_ddp(DataLoader(Sized()), rank=0, num_replicas=4, uneven="keep", share="by_worker")


class ByEpoch(Sampler[int]):
    """Another length in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return [20, 5, 20][self.epoch]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


def test_an_epoch_that_is_shorter_than_others_is_refused_when_it_comes() -> None:
    for rank in range(2):
        mine = patch_dataloader_to_ddp(loader(sampler=ByEpoch(), drop_last=True), rank=rank, num_replicas=2)
        assert len(list(mine)) == 2
        with raises(NoStepsError, ("ByEpoch", "5 items", "2 ranks", "3 each")):
            list(mine)
        assert len(list(mine)) == 2


def test_the_wrappers_refuse_a_share_of_nothing() -> None:
    for wrapper in (DDPSamplerWrapper, DDPBatchSamplerWrapper):
        with raises(NoStepsError, ("list", "2 items", "3 ranks"), "uneven='pad'"):
            wrapper([[0], [1]], False, False, rank=0, num_replicas=3)
        hidden: Any = wrapper(Bare(range(2)), False, False, rank=0, num_replicas=3)
        with raises(NoStepsError, ("Bare", "2 items"), "uneven='pad'"):
            list(hidden)


# What loses nothing.


def steps(n: int, made: dict[str, Any], ranks: int, **options: Any) -> list[int]:
    sampler, several = Bare(range(n)), range(ranks)
    hidden = [patch_dataloader_to_ddp(given(n, made, sampler), rank=r, num_replicas=ranks, **options) for r in several]
    known = [patch_dataloader_to_ddp(given(n, made), rank=r, num_replicas=ranks, **options) for r in several]
    found = [len(list(one)) for one in known]
    assert [len(list(one)) for one in hidden] == [len(one) for one in known] == found
    return found


def test_what_was_asked_for_or_is_nothing_in_one_process_either_is_allowed() -> None:
    assert steps(2, {"batch_size": 4}, 3, uneven="keep") == [1, 1, 0]
    assert steps(0, {"batch_size": 4}, 3) == [0, 0, 0]
    assert steps(0, {"batch_size": 4, "drop_last": True}, 3, uneven="drop") == [0, 0, 0]
    assert steps(3, {"batch_size": 4, "drop_last": True}, 3) == [0, 0, 0]
    assert steps(1, {"batch_size": 4}, 3) == [1, 1, 1]
    assert steps(8, {"batch_size": 4, "drop_last": True}, 3, uneven="keep", share="batches") == [1, 1, 0]
    assert [list(DDPSamplerWrapper(Bare([]), False, rank=rank, num_replicas=2)) for rank in range(2)] == [[], []]


@pytest.mark.parametrize(
    "make",
    [
        lambda: given(26, {"batch_size": 4, "drop_last": True}, Bare(range(26))),
        lambda: DataLoader(Source(26), batch_size=4, drop_last=True, collate_fn=as_it_is),
    ],
    ids=["map-style", "iterable"],
)
def test_the_rest_of_an_epoch_may_have_no_full_batch(make: Callable[[], DataLoader[Any]]) -> None:
    """Two ranks took four batches of 26 samples, and four ranks make none of the ten that are left."""

    def start(ranks: int, rank: int) -> DataLoader[Any]:
        return patch_dataloader_to_ddp(make(), rank=rank, num_replicas=ranks)

    running = start(2, 0)
    iterator = iter(running)
    state = [next(iterator), next(iterator), loader_state(running, batches_done=2)][-1]
    for rank in range(4):
        resumed = start(4, rank)
        restore_loader(resumed, state)
        assert [len(list(resumed)), len(list(resumed))] == [0, 1]


def test_a_state_of_nothing_done_does_not_excuse_an_epoch_without_steps() -> None:
    def start(ranks: int) -> DataLoader[Any]:
        made = given(26, {"batch_size": 8, "drop_last": True}, Bare(range(26)))
        return patch_dataloader_to_ddp(made, rank=0, num_replicas=ranks)

    running = start(2)
    next(iter(running))
    resumed = start(4)
    restore_loader(resumed, loader_state(running, batches_done=0))
    with raises(NoStepsError, "26 items"):
        list(resumed)
