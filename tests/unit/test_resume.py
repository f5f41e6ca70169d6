"""Stopping anywhere and going on: in the same world exactly, in another one with nothing lost or repeated."""

import copy
import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from iterables import Standing
from messages import raises
from quick import soaked
from resumed import RESUMED, Fetched, OwnCountsEpochs, Shuffled, as_saved, of
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from trying import over, patched
from zoo import (
    BY_NAME,
    KINDS,
    OUR_KINDS,
    STEPS,
    Indices,
    Kind,
    N,
    PKBatches,
    Source,
    as_it_is,
    comparable,
    loader,
    out_of_order,
    seeded_generator,
)

from ddp_patch import DDPSamplerWrapper, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import InvalidOptionError, NotPatchedError, StateError, UnsupportedLoaderError
from ddp_patch.sharding.values_as_text import as_text

pytestmark = pytest.mark.filterwarnings("ignore::ddp_patch.errors.StreamLengthWarning")  # some kinds have it

STATES: dict[str, Any] = {"generators": [], "samplers": [], "attributes": [], "streams": []}
AGAIN = [kind for kind in KINDS + OUR_KINDS if kind.epochs > 1 and "count" not in kind.name]  # no iterators


def batches_of(kind: Kind, given: Any, batches: list[Any] | None = None) -> list[Any]:
    """The batches of a pass, or those that are given, as they can be compared."""
    batches = list(islice(given, STEPS) if kind.endless else given) if batches is None else batches
    are_items = given.batch_sampler is None and not kind.batches
    return [comparable(batch) if are_items else [*map(comparable, batch)] for batch in batches]


def states_told(kind: Kind, running: Any, expected: list[Any], epoch: int) -> list[dict[str, Any]]:
    """Ask for the state at any time of an epoch; return what was told before the first batch and after each.

    It is that of the batches which the loop was given, whatever workers fetch ahead, and telling changes nothing.
    """
    iterator = iter(running)
    states, given = [loader_state(running)], []
    assert epoch or sum(states[0]["taken"]) == 0
    for step, batch in enumerate(islice(iterator, len(expected)), 1):
        given.append(batch)
        states.append(loader_state(running))
        assert states[step] == loader_state(running, batches_done=step)
        if "one iterator" not in kind.name:  # whose own count goes on after a break
            before = loader_state(running, batches_done=step - 1)
            states[0] = before if step == 1 else states[0]
    assert batches_of(kind, running, given) == expected
    if not kind.endless:
        assert next(iterator, None) is None
        end = loader_state(running)
        is_next = "one iterator" in kind.name  # which has no pass without batches
        assert (end["epoch"], end["turn"]) == ((epoch + 1, 0) if is_next else (epoch, None))
    return states


@over(AGAIN + RESUMED)
@pytest.mark.parametrize("num_replicas", [soaked(1), 2])
def test_stopped_anywhere_it_goes_on_as_a_run_that_was_never_stopped(kind: Kind, num_replicas: int) -> None:
    def start() -> Any:
        return patched(kind, num_replicas - 1, num_replicas)

    def assert_goes_on(loader: Any, stop: int) -> None:
        rest = epochs[1][stop:]
        assert not (kind.sized and rest) or len(loader) == len(rest)
        if kind.endless:
            assert batches_of(kind, loader)[: len(rest)] == rest
            return
        # The state after the last batch has nothing left of its epoch, and the next pass gives no batch.
        for batches in [rest, epochs[2]] if rest or "one iterator" not in kind.name else [epochs[2]]:
            assert batches_of(kind, loader) == batches
            assert not kind.sized or len(loader) == len(epochs[2]) or "other" in kind.name

    whole, running = start(), start()
    epochs = [batches_of(kind, whole) for _ in range(3)]
    states = [states_told(kind, running, epochs[epoch], epoch) for epoch in range(2)][1]
    stops = sorted({0, 1, len(epochs[1]) // 2, len(epochs[1]) - 1, len(epochs[1])} & set(range(len(epochs[1]) + 1)))
    if whole.num_workers:  # which take long to start
        stops = stops[num_replicas % 2 :: 2]
    for stop in stops:
        again = start()
        restore_loader(again, as_saved(states[stop]))
        assert loader_state(again) == states[stop]
        assert_goes_on(again, stop)
    # Left within the loop, with an iterator that is gone; and restored where it was iterated before.
    (stop,) = stops[-2:-1] or stops
    running = start()
    batches_of(kind, running)
    for step, _ in enumerate(running, 1):
        if step >= stop:
            break
    restore_loader(whole, as_saved(loader_state(running)))
    assert_goes_on(whole, max(1, stop))


class Stays(OwnCountsEpochs):
    """Stays at its end."""

    def __next__(self) -> Any:
        if self.at == N:
            raise StopIteration
        return super().__next__()


@over([Kind("Stays", lambda: of(Stays())()), *(kind for kind in RESUMED if kind.name.endswith(" 0 workers"))])
def test_a_state_of_a_streams_end_is_followed_by_the_next_epoch(kind: Kind) -> None:
    whole, stopped, again = patched(kind), patched(kind), patched(kind)
    epochs = [batches_of(kind, whole) for _ in range(2)]
    assert batches_of(kind, stopped) == epochs[0]
    restore_loader(again, as_saved(loader_state(stopped)))
    assert [batches_of(kind, again) for _ in range(2)] == [[], epochs[1]]
    assert (epochs[1] == []) == (kind.name == "Stays")


# Other loaders, other worlds.


def start(given: DataLoader[Any], rank: int = 0, num_replicas: int = 1, **options: Any) -> Any:
    options = {"seed": 7} | options
    return patch_dataloader_to_ddp(given, rank=rank, num_replicas=num_replicas, **options)


def state_of(given: DataLoader[Any], batches: int, **options: Any) -> Any:
    running = start(given, **options)
    taken = len(list(islice(running, batches)))
    state = loader_state(running, batches_done=taken)
    assert loader_state(running) == state  # which counts by itself
    return state


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stream_without_length_is_over_once_the_loop_has_seen_its_end(workers: int) -> None:
    """Not once a worker has found it: that comes sooner or later on each rank, so the states would differ."""
    running = start(DataLoader(Source(10, splits=workers > 1), 3, num_workers=workers))
    batches = len(list(islice(running, 4)))
    deadline = time.monotonic() + 30
    while None in running.sampler.rank_passes.epochs.latest.source.lengths_found() and time.monotonic() < deadline:
        time.sleep(0.01)  # its workers find the end
    state = loader_state(running)
    assert (batches, state["epoch"], None in running.sampler.rank_passes.epochs.latest.source.lengths_found()) == (
        4,
        0,
        False,
    )
    restored = start(DataLoader(Source(10, splits=workers > 1), 3, num_workers=workers))
    restore_loader(restored, state)
    assert [len(list(restored)), len(list(restored)), loader_state(restored)["epoch"]] == [0, 4, 1]


def test_the_state_is_small_and_says_what_it_is_of() -> None:
    state = state_of(loader(shuffle=True), 3)
    count, digest = state["order"]
    assert (count, -(2**63) <= digest < 2**63) == (-1, True)
    assert state == {
        "version": 4,
        "loader": json.dumps(
            {
                "shared by": "DDPSamplerWrapper",
                "shuffle_samples_between_gpus": False,
                "sampler": "RandomSampler",
                "sampler length": N,
                "generators": 0,
                "uneven": "pad",
                "layout": "interleaved",
            }
        ),
        "epoch": 0,
        "seed": 7,
        "taken": [12],
        "turn": 0,
        "steps": 3,
        "ranks": 1,
        "order": [count, digest],
        "states": json.dumps(STATES),
        "cannot_resume": "",
    }


@pytest.mark.parametrize("sampler", [None, Shuffled()], ids=["looked up", "drawn"])
def test_nothing_that_is_skipped_is_fetched_and_it_is_drawn_once_at_most(sampler: Shuffled | None) -> None:
    def make(dataset: Dataset[int]) -> DataLoader[Any]:
        shuffles: Any = {"shuffle": True} if sampler is None else {"sampler": sampler}
        return DataLoader(dataset, batch_size=2, **shuffles)

    state = state_of(make(Fetched()), 15)
    dataset = Fetched()
    again = start(make(dataset))
    restore_loader(again, state)
    assert dataset.fetched == []
    if sampler is not None:
        sampler.drawn.clear()
    assert len(again) == len(list(again)) == 5
    assert len(dataset.fetched) == 10
    if sampler is not None:
        assert len(sampler.drawn) == sampler.n


@pytest.mark.parametrize("share", ["samples", "batches"])
def test_rows_that_were_added_after_the_patch_are_there_when_a_state_is_restored(share: Any) -> None:
    def made(rows: list[int]) -> Any:
        loader: DataLoader[int] = DataLoader(rows, batch_size=4, shuffle=True)  # type: ignore[arg-type]  # it will do
        return patch_dataloader_to_ddp(loader, rank=0, num_replicas=2, seed=5, share=share)

    rows = list(range(24))
    running = made(rows)
    list(running)
    rows += range(24, 40)
    whole = [batch.tolist() for batch in copy.deepcopy(running)]
    next(iter(running))
    rows += range(40, 44)  # which come in the next pass
    again = made(list(range(40)))
    restore_loader(again, loader_state(running))
    assert [batch.tolist() for batch in again] == whole[1:]
    with pytest.raises(StateError, match=r"sampler length: (40|10) in the state; (24|6) here"):
        restore_loader(made(list(range(24))), loader_state(running))


def test_set_epoch_keeps_the_place_in_that_epoch_and_drops_it_for_another() -> None:
    whole = start(loader(shuffle=True))
    first, second = list(whole), list(whole)
    state = state_of(loader(shuffle=True), 2)
    for epoch, expected in [(0, first[2:]), (1, second)]:
        again = start(loader(shuffle=True))
        restore_loader(again, state)
        again.sampler.set_epoch(epoch)
        assert len(again) == len(expected)
        assert list(again) == expected


def test_a_pass_broken_off_after_a_restore_is_not_gone_on_with() -> None:
    whole = start(loader(shuffle=True))
    _, second, third = list(whole), list(whole), list(whole)
    again = start(loader(shuffle=True))
    restore_loader(again, state_of(loader(shuffle=True), 2))
    for _ in again:
        break
    assert len(again) == len(second)
    assert [list(again), list(again)] == [second, third]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_before_the_first_pass_has_where_the_dataset_stands(workers: int) -> None:
    def made(place: int) -> Any:
        dataset = Standing(40)
        dataset.place = place
        return start(DataLoader(dataset, num_workers=workers, persistent_workers=workers > 0))

    stopped, resumed = made(17), made(0)
    restore_loader(resumed, loader_state(stopped))
    assert list(resumed) == list(stopped) == [*range(18, 41)]


def test_a_sampler_whose_state_dict_raises_is_told_of_when_a_state_is_asked_for() -> None:
    class Fails(Shuffled):
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("rng")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    running = start(loader(sampler=Fails()))
    assert len(list(running)) == 10  # which needs no state
    with raises(StateError, ("state_dict()", "sampler", "KeyError('rng')"), "method"):
        loader_state(running, batches_done=2)


class Shards(IterableDataset[int]):
    """Splits itself by the worker that reads it; those with an odd number have more to give."""

    def __init__(self, each: int, more: int = 0) -> None:
        self.each, self.more = each, more

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        number = info.id if info else 0
        yield from range(100 * number, 100 * number + self.each + self.more * (number % 2))


def test_what_cannot_be_told_of_a_dataset_that_splits_itself_is_refused() -> None:
    def make(workers: int, num_replicas: int = 2) -> Any:
        given: Any = DataLoader(Shards(1, more=8), 2, collate_fn=as_it_is, num_workers=workers)
        return start(given, 0, num_replicas, share="by_worker", uneven="keep")

    running = make(2)
    iterator = iter(running)
    list(islice(iterator, 4))  # worker 0 has a single batch: then all are worker 1's
    state = loader_state(running, batches_done=4)
    del iterator
    again = make(2)
    restore_loader(again, state)
    with raises(StateError, ("Shards", "worker 0 of 2", "1 item"), "leave share out"):
        list(again)
    for other, told in (
        (make(4), "num_workers: 2 in the state; 4 here"),
        (make(2, 3), "num_replicas: 2 in the state; 3 here"),
    ):
        with raises(StateError, ("another loader", told), AS_IT_WAS):
            restore_loader(other, state)


# What is refused, and that nothing has changed then.

AS_IT_WAS = ("loader as it was", "same seed and options")
OTHERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sampler length: 23 in the state; 22 here", {"sampler": range(22)}, {}),
    ("sampler: RandomSampler in the state; SequentialSampler here", {"shuffle": False}, {}),
    ("seed: 7 in the state; 8 here", {}, {"seed": 8}),
    ("uneven: pad in the state; drop here", {}, {"uneven": "drop"}),
    ("layout: interleaved in the state; contiguous here", {}, {"layout": "contiguous"}),
    ("BatchSampler over RandomSampler here", {"drop_last": True}, {"share": "batches"}),
    ("generators: 0 in the state; 1 here", {"generator": torch.Generator()}, {}),
    ("shared by: DDPSamplerWrapper in the state; DDPBatchSamplerWrapper here", {"batch_sampler": PKBatches()}, {}),
]


@pytest.mark.parametrize(("told", "loading", "options"), OTHERS, ids=[told for told, _, _ in OTHERS])
def test_the_state_of_another_loader_is_refused(told: str, loading: dict[str, Any], options: dict[str, Any]) -> None:
    state = state_of(loader(shuffle=True), 2)
    shuffles = {} if {"sampler", "batch_sampler"} & loading.keys() else {"shuffle": True}
    here = start(loader(**shuffles | loading), **options)
    whole = list(start(loader(**shuffles | loading), **options))
    with raises(StateError, ("another loader", told), AS_IT_WAS):
        restore_loader(here, state)
    assert len(here) == len(whole)
    assert list(here) == whole or "generator" in loading  # which both have drawn from


SAVED = ("loader_state()", "state_dict()", "saved")
DAMAGED: list[tuple[Any, tuple[str, ...]]] = [
    (None, ("None", "NoneType", "dict")),
    ({}, ("no version, loader, epoch",)),
    ({"taken": [-1]}, ("taken", "[-1]")),
    ({"steps": 1.5}, ("steps", "1.5")),
    ({"order": [1]}, ("order", "[1]")),
    ({"turn": "next"}, ("turn", "'next'")),
    ({"loader": "it"}, ("loader", "'it'")),
    ({"loader": {"sampler": "it"}}, ("loader", "{'sampler': 'it'}")),
    ({"states": '{"!tensor": ["float33", [1], "AAAA"]}'}, ("states", "float33")),
    ({"states": '{"!code": "it"}'}, ("states", "!code")),
    ({"states": as_text({"generators": []})}, ("no samplers, attributes, streams",)),
    ({"states": as_text(STATES | {"attributes": [1]})}, ("attributes", "[1]")),
    ({"states": as_text(STATES | {"streams": [[[8, 1.5, 1], [], []]]})}, ("streams", "1.5")),
    ({"states": as_text(STATES | {"streams": [[None, [], []]] * 2})}, ("streams", "2 elements")),
]


@pytest.mark.parametrize(("damage", "told"), DAMAGED, ids=[" ".join(told) for _, told in DAMAGED])
def test_a_damaged_state_is_refused(damage: Any, told: tuple[str, ...]) -> None:
    state = state_of(loader(shuffle=True), 2) | damage if damage else damage
    here = start(loader(shuffle=True))
    with raises(StateError, ("damaged", *told), SAVED):
        restore_loader(here, state)
    assert list(here) == list(start(loader(shuffle=True)))


def test_a_state_of_another_version_is_refused() -> None:
    state = state_of(loader(), 2)
    with raises(StateError, ("version 3", "reads version 4 alone"), "version of ddp_patch"):
        restore_loader(start(loader()), state | {"version": 3})


def test_a_place_beyond_a_streams_end_is_found_where_no_length_can_be_relied_on() -> None:
    state = state_of(loader(sampler=Shuffled()), 2) | {"taken": [41]}
    again = start(loader(sampler=Shuffled()))
    restore_loader(again, state)
    with raises(StateError, ("41 items", "40 items"), "with this sampler"):
        list(again)


def test_what_no_state_can_hold_is_refused() -> None:
    with raises(NotPatchedError, ("loader_state", "DataLoader", "not patched"), "patch_dataloader_to_ddp()"):
        loader_state(loader(), batches_done=0)
    with raises(UnsupportedLoaderError, ("loader_state", "in_order=False", "2 workers"), "in_order=True"):
        loader_state(start(out_of_order(loader(num_workers=2))), batches_done=0)
    once = start(loader(sampler=iter(range(N))))
    iterator = iter(once)
    next(iterator)
    assert loader_state(once, batches_done=1)["taken"] == [4]
    list(iterator)
    once.sampler.set_epoch(1)
    with raises(StateError, "iterator", "iterated again"):
        loader_state(once, batches_done=0)
    nested: Any = DataLoader(
        Indices(N), batch_sampler=Pairs(DDPSamplerWrapper(range(N), False, rank=0, num_replicas=2, seed=7))
    )
    with raises(UnsupportedLoaderError, ("loader_state", "Pairs", "sharded sampler"), "patch_dataloader_to_ddp()"):
        loader_state(nested, batches_done=0)


class Pairs(BatchSampler):
    def __init__(self, sampler: Sampler[int]) -> None:
        super().__init__(sampler, 2, False)


def test_batches_done_is_a_count_of_batches_that_were_given() -> None:
    running = start(DataLoader(Indices(50), 8, drop_last=True, num_workers=2))
    for batches in (-1, 1.0, True, "1"):
        with raises(InvalidOptionError, (f"batches_done={batches!r}", "0"), "batches"):
            loader_state(running, batches_done=batches)  # type: ignore[arg-type]  # that is tested
    iterator = iter(running)
    for given, asked in ((0, 1), (1, 2), (6, 7)):  # workers fetch ahead; and the last batch is left out
        list(islice(iterator, given - (given > 1)))
        with raises(InvalidOptionError, (f"batches_done={asked}", f"given {given}"), "batches"):
            loader_state(running, batches_done=asked)
    end = loader_state(running, batches_done=6)
    assert (end["epoch"], end["turn"]) == (0, None)


# Shared generators, wrong lengths, going back: what is easily wrong.


def test_what_cannot_be_a_generators_state_is_refused_before_anything_is_changed() -> None:
    def start_with_generator() -> Any:
        return start(loader(shuffle=True, generator=seeded_generator()))

    whole = list(start_with_generator())
    for other in ("?", [1, 2], {"state": 3}, None):
        again = start_with_generator()
        state = loader_state(again) | {"states": as_text(STATES | {"generators": [[0, other]]})}
        with raises(StateError, ("damaged", "generators", "not the state of a Generator"), SAVED):
            restore_loader(again, state)
        assert list(again) == whole


ENDING = {"single items", "whole batches", "parts", "one iterator for all"}


@over([kind for kind in RESUMED if kind.name in ENDING], every=True)
def test_after_a_whole_pass_ranks_with_unequal_shares_say_the_same(kind: Kind) -> None:
    states = []
    for rank in (0, 2):  # of three ranks, the last has an item, or a batch, less
        running = patched(kind, rank, 3, uneven="keep")
        list(running)
        states.append(loader_state(running))
    assert states[0] == states[1]
    assert (states[0]["taken"], states[0]["turn"] is None) == ([], "one iterator" not in kind.name)


@pytest.mark.parametrize("make", [lambda: loader(3, shuffle=True), BY_NAME["iterable with len and set_epoch"].make])
def test_who_restores_by_the_stateful_protocol_is_told_the_length_of_whole_epochs(make: Callable[[], Any]) -> None:
    """As torchdata has it: who calls it counts from the epoch's beginning. ``restore_loader`` tells the rest."""
    whole = start(make(), 0, 2)
    epochs = [list(whole) for _ in range(2)]
    state = state_of(make(), 2, num_replicas=2)
    loaded, restored = start(make(), 0, 2), start(make(), 0, 2)
    loaded.load_state_dict(state)
    restore_loader(restored, state)
    steps = len(whole)
    assert (len(loaded), len(restored)) == (steps, steps - 2)
    for resumed, length in ((loaded, steps), (restored, steps - 2)):
        iterator = iter(resumed)
        seen = [next(iterator)]
        assert len(resumed) == length
        assert [[*seen, *iterator], list(resumed)] == [epochs[0][2:], epochs[1]]
        assert len(resumed) == steps
    restore_loader(loaded, state)
    assert len(loaded) == steps - 2


def test_a_state_before_the_first_batch_of_an_iterator_that_is_made_already() -> None:
    """To make it, torch draws from the loader's generator, which is the sampler's, too."""
    whole = start(loader(shuffle=True, generator=seeded_generator()))
    first, second, third = (list(whole) for _ in range(3))
    stopped = start(loader(shuffle=True, generator=seeded_generator()))
    assert list(stopped) == first
    iterator = iter(stopped)
    state = stopped.state_dict()
    assert list(iterator) == second
    resumed = start(loader(shuffle=True, generator=seeded_generator()))
    resumed.load_state_dict(state)  # no batch of the second was given: it is that of the first one's end
    assert [list(resumed) for _ in range(3)] == [[], second, third]


@pytest.mark.parametrize("options", [{"cost": [*range(1, 65)]}, {"layout": "contiguous"}, {}])
def test_restored_before_its_first_batch_an_epoch_is_begun_by_the_ranks_of_then(options: dict[str, Any]) -> None:
    """Balanced and contiguous orders follow from the number of ranks that begin an epoch."""

    def make(rank: int, ranks: int) -> Any:
        given: Any = DataLoader(Indices(64), 2, shuffle=True)
        return patch_dataloader_to_ddp(given, rank=rank, num_replicas=ranks, seed=3, **options)

    begun = make(0, 2)
    next(iter(begun))
    states, taken = [loader_state(begun, batches_done=0)], list[int]()
    for batches in (2, 3, None):
        ranks = [make(rank, 4) for rank in range(4)]
        for one in ranks:
            restore_loader(one, states[-1])
            taken += [int(index) for batch in islice(one, batches) for index in batch]
        states.append(loader_state(ranks[0]))
    assert sorted(taken) == [*range(64)]
