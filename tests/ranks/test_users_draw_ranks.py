"""What users draw, look at, list, set and break off after the patch: every sample comes once in every epoch."""

import copy
import random
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from queue import Queue
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
import users
from after_patch import Case, Me, Run, cases_of, disappointed, run_cases
from quick import run_ranks, soaked
from torch.utils.data import DataLoader, SubsetRandomSampler, WeightedRandomSampler
from users import REMEDIED, SHUFFLERS, SIZE, UNHELD, N, loader

from ddp_patch import loader_state, restore_loader

CASES: dict[str, Case] = {}
case = cases_of(CASES)
Make = Callable[[], DataLoader[Any]]


def rng_of(raw: Any) -> Any:
    """Return the generator that a loader's samplers hold, if they do."""
    for holder in (raw, raw.sampler, raw.batch_sampler, getattr(raw.batch_sampler, "sampler", None)):
        for name in ("generator", "rng"):
            if getattr(holder, name, None) is not None:
                return getattr(holder, name)
    return None


# The table.


@case("right", of={"no workers": {}, "workers": {"num_workers": 1}})
def one_generator_for_all_loaders_and_rank_0_validates(me: Me, how: dict[str, Any]) -> None:
    generator = users.seeded()
    raw, val = (loader(shuffle=shuffle, generator=generator, **how) for shuffle in (True, False))
    train = me.patch(raw)
    for _ in range(3):
        me.train(train)
        if me.rank == 0:
            list(val)


@case("right", of=SHUFFLERS)
def rank_0_lists_the_sampler(me: Me, make: Make) -> None:
    raw = make()
    train = me.patch(raw)
    for _ in range(3):
        if me.rank == 0:
            list(raw.batch_sampler)  # type: ignore[arg-type]  # all of these have one
        me.train(train)


@case("right", of=REMEDIED)
def rank_0_looks_and_all_set_the_epoch(me: Me, make: Make) -> None:
    train = me.patch(make())
    for epoch in range(3):
        if me.rank == 0:
            next(iter(train))
        train.set_epoch(epoch)
        me.train(train)


@case("right", of=REMEDIED)
def the_last_rank_iterates_the_unpatched_loader(me: Me, make: Make) -> None:
    raw = make()
    train = me.patch(raw)
    for epoch in range(3):
        if me.rank == me.world - 1:
            list(islice(raw, 1 + 20 * epoch))
        me.train(train)


@case("told", of=UNHELD)
def rank_0_lists_a_sampler_that_draws_from_what_it_does_not_hold(me: Me, make: Make) -> None:
    raw = make()
    train = me.patch(raw)
    for _ in range(3):
        if me.rank == 0:
            list(raw.batch_sampler)  # type: ignore[arg-type]  # all of these have one
        me.train(train)


@case("told", of={"random": False, "numpy": True})
def a_generator_of_the_module_crops_too(me: Me, with_numpy: bool) -> None:
    train = me.patch(loader(users.CroppedByModule(), sampler=users.ByModule(with_numpy)))
    for _ in range(3):
        me.train(train)


@case("right", of=UNHELD)
def nobody_else_draws_from_what_a_sampler_does_not_hold(me: Me, make: Make) -> None:
    train = me.patch(make())
    for _ in range(3):
        me.train(train)


@case("right", of={"no workers": {}, "workers": {"num_workers": 1}})
def the_length_of_a_stream_is_set(me: Me, how: dict[str, Any]) -> None:
    train = me.patch(loader(users.Stream(), **how))
    me.train(train)
    train.dataset.n = N // 2
    assert train.dataset.n == N // 2
    for _ in range(2):
        me.train(train, range(N // 2))


@case("right")
def weights_are_set(me: Me) -> None:
    train = me.patch(loader(sampler=WeightedRandomSampler([1.0] * 24 + [0.0] * 24, 24, replacement=False)))
    me.train(train, range(24))
    train.sampler.weights = torch.tensor([0.0] * 24 + [1.0] * 24, dtype=torch.double)
    me.train(train, range(24, N))


@case("right")
def indices_are_set(me: Me) -> None:
    train = me.patch(loader(sampler=SubsetRandomSampler(range(24))))
    me.train(train, range(24))
    train.sampler.indices = range(12, N)
    for _ in range(2):
        me.train(train, range(12, N), padding=0)


@case("right")
def the_size_of_own_batches_is_set(me: Me) -> None:
    train = me.patch(loader(batch_sampler=users.Batches(random.Random(3))))
    me.train(train)
    train.batch_sampler.most = 8
    epoch = me.train(train)
    assert epoch.steps == N // 8 // me.world


@case("right")
def a_method_of_the_sampler_is_called(me: Me) -> None:
    train = me.patch(loader(sampler=users.Curriculum()))
    me.train(train, range(24))
    train.sampler.set_limit(36)
    me.train(train, range(36))
    assert train.sampler.rng is not None


@case("right", of={"no workers": {}, "workers": {"num_workers": 1}})
def the_dataset_s_own_set_epoch_counts(me: Me, how: dict[str, Any]) -> None:
    train = me.patch(loader(users.EpochStream(), **how))
    train.dataset.set_epoch(5)
    for epoch in (5, 6, 7):
        me.train(train, range(1000 * epoch, 1000 * epoch + N))


@case("right")
def the_unpatched_dataset_s_set_epoch_counts(me: Me) -> None:
    dataset = users.EpochStream()
    train = me.patch(loader(dataset, num_workers=1, persistent_workers=True))
    for epoch in (5, 6, 9):
        dataset.set_epoch(epoch)
        me.train(train, range(1000 * epoch, 1000 * epoch + N))


@case("right or told", together="never")
def two_loaders_in_two_threads(me: Me) -> None:
    train = [me.patch(loader(sampler=users.Shuffles(random.Random(n), lazily=True))) for n in range(2)]
    for _ in range(3):
        epochs: list[Any] = [me.begin() for _ in train]
        raised: list[Exception] = []

        def run(number: int, epochs: list[Any] = epochs, raised: list[Exception] = raised) -> None:
            try:
                list(me.step(epochs[number], train[number]))
            except Exception as error:  # noqa: BLE001 - raised again in the main thread
                raised.append(error)

        threads = [Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if raised:
            raise raised[0]


@case("right or told")
def a_thread_reads_ahead_while_dropout_draws(me: Me) -> None:
    train = me.patch(loader(shuffle=True))
    for _ in range(3):
        epoch, queue = me.begin(), Queue[Any](2)

        def read(queue: Any = queue) -> None:
            try:
                for batch in train:
                    queue.put(batch)
                queue.put(None)
            except Exception as error:  # noqa: BLE001 - raised again in the main thread
                queue.put(error)

        thread = Thread(target=read)
        thread.start()
        while (batch := queue.get()) is not None:
            torch.nn.functional.dropout(torch.ones(1000))
            if isinstance(batch, Exception):
                raise batch
            epoch.take(batch)
        thread.join()


@case("right or told")
def other_numbers_of_workers_and_all_break(me: Me) -> None:
    sampler = users.Shuffles(random.Random(3), lazily=True)
    train = me.patch(loader(sampler=sampler, num_workers=me.rank))
    me.train(train, most=2)
    for _ in range(2):
        me.train(train)


# More in its spirit.


@case("right", of=SHUFFLERS)
def some_ranks_look_and_all_set_a_later_epoch(me: Me, make: Make) -> None:
    train = me.patch(make())
    for epoch in (0, 3, 4):
        for _ in range(me.rank):
            next(iter(train))
        train.set_epoch(epoch)
        me.train(train)


@case("told", of=SHUFFLERS)
def some_ranks_take_two_batches_and_all_set_a_later_epoch(me: Me, make: Make) -> None:
    train = me.patch(make())
    for epoch in (0, 3, 4):
        if me.rank:
            list(islice(train, 2))
        train.set_epoch(epoch)
        me.train(train)


@case("right or told", of=SHUFFLERS)
def rank_0_looks(me: Me, make: Make) -> None:
    train = me.patch(make())
    me.train(train)
    if me.rank == 0:
        next(iter(train))
    for _ in range(2):
        me.train(train)


HIDDEN = {"counter", "of an object"}  # they have no generator that the test finds


@case("right", of={kind: SHUFFLERS[kind] for kind in SHUFFLERS if kind not in HIDDEN})
def ranks_draw_from_the_generator_in_each_step(me: Me, make: Make) -> None:
    raw = make()
    train = me.patch(raw)
    for _ in range(3):
        for _ in me.step(me.begin(), train):
            for _ in range(me.rank):
                users.draw(rng_of(raw))


@case("right", of=SHUFFLERS)
def all_break_and_one_looks_at_the_unpatched_loader(me: Me, make: Make) -> None:
    raw = make()
    train = me.patch(raw)
    me.train(train, most=1)
    if me.rank == 1:
        next(iter(raw))
    me.train(train)
    me.train(train, most=1)
    me.train(train)


OPTIONS: dict[str, dict[str, Any]] = {
    "batches": {"share": "batches"},
    "within batches": {"share": "within_batches", "uneven": "keep"},
    "costs": {"cost": [1 + number % 7 for number in range(N)]},
    "contiguous": {"layout": "contiguous"},
    "leader": {"order": "leader"},
    "seeded": {"order": "seeded"},
    "dropped": {"uneven": "drop"},
}


@case("right", of=OPTIONS)
def rank_0_lists_a_sampler_that_is_shared_otherwise(me: Me, options: dict[str, Any]) -> None:
    raw = loader(sampler=users.Shuffles(random.Random(3)))
    train = me.patch(raw, **options)
    for _ in range(3):
        if me.rank == 0:
            list(raw.sampler)
        me.train(train, is_uneven=options.get("uneven") == "keep")


@case("right", of={"fresh": False, "persistent": True})
def workers_and_rank_0_validates(me: Me, persistent: bool) -> None:
    generator = users.seeded()
    train = me.patch(loader(shuffle=True, generator=generator, num_workers=1, persistent_workers=persistent))
    for _ in range(3):
        if me.rank == 0:
            list(loader(generator=generator, shuffle=True))
        me.train(train)


@case("right", of=SHUFFLERS)
def all_resume_in_an_epoch_after_others_drew(me: Me, make: Make) -> None:
    raw = make()
    train = me.patch(raw)
    me.train(train)
    epoch = me.begin()
    for _ in me.step(epoch, train, 1):
        if me.rank == 0:
            list(raw.batch_sampler)  # type: ignore[arg-type]  # all of these have one
    state = loader_state(train)
    raw = make()
    train = me.patch(raw)
    restore_loader(train, state)
    if me.rank == 1:
        next(iter(raw))
    for _ in me.step(epoch, train):
        pass
    me.train(train)


@case("right", of={"generator=": False, "own": True})
def all_seed_the_generator_anew(me: Me, own: bool) -> None:
    rng: Any = random.Random(3) if own else users.seeded()
    train = me.patch(loader(sampler=users.Shuffles(rng)) if own else loader(shuffle=True, generator=rng))
    for epoch in range(3):
        rng.seed(epoch) if own else rng.manual_seed(epoch)
        me.train(train)


@case("right")
def global_states_are_seeded_by_rank(me: Me) -> None:
    train = me.patch(loader(sampler=users.Shuffles(random)))
    for epoch in range(3):
        random.seed(10 * epoch + me.rank)
        torch.manual_seed(me.rank)
        me.train(train)


@case("right")
def a_dataset_crops_with_the_sampler_s_generator(me: Me) -> None:
    rng = random.Random(3)
    train = me.patch(loader(users.Rows(rng=rng), sampler=users.Shuffles(rng, lazily=True)))
    for _ in range(3):
        if me.rank == 0:
            train.dataset[0]
        me.train(train)


@case("right")
def two_loaders_have_one_generator(me: Me) -> None:
    rng = random.Random(3)
    train, val = (me.patch(loader(sampler=users.Shuffles(rng))) for _ in range(2))
    for _ in range(2):
        me.train(train)
        if me.rank == 0:
            list(islice(val, 1))
        val.set_epoch(0)
        me.train(val)


@case("right")
def two_loaders_are_read_at_once(me: Me) -> None:
    rng = users.seeded()
    first, second = (me.patch(loader(shuffle=True, generator=rng)) for _ in range(2))
    for _ in range(2):
        epochs = me.begin(), me.begin()
        for batches in zip(first, second, strict=True):
            for epoch, batch in zip(epochs, batches, strict=True):
                epoch.take(batch)


@case("right")
def rank_0_copies_what_it_draws_from(me: Me) -> None:
    raw = loader(sampler=users.Shuffles(random.Random(3)))
    train = me.patch(raw)
    for _ in range(3):
        if me.rank == 0:
            list(copy.deepcopy(raw))
            next(iter(copy.deepcopy(train)))
            repr(train)
        me.train(train)


@case("right")
def a_loader_without_end(me: Me) -> None:
    raw = loader(shuffle=True, generator=users.seeded())
    train = me.patch(raw)

    def forever() -> Any:
        while True:
            yield from train

    batches = forever()
    for _ in range(3):
        if me.rank == 0:
            list(raw)
        epoch = me.begin()
        for _ in range(N // SIZE // me.world):
            epoch.take(next(batches))
            me.meet()


@case("right")
def computed_shuffles_are_looked_at(me: Me) -> None:
    train = me.patch(loader(shuffle=True), order="scalable")
    for epoch in range(3):
        if me.rank:
            next(iter(train))
        train.set_epoch(epoch)
        me.train(train)


@case("right or told", of=SHUFFLERS)
def rank_0_makes_an_iterator(me: Me, make: Make) -> None:
    train = me.patch(make())
    for _ in range(3):
        if me.rank == 0:
            iter(train)
        me.train(train)


@case("told")  # it is more than a look
def a_search_for_a_learning_rate_on_rank_0(me: Me) -> None:
    raw = loader(shuffle=True, generator=users.seeded(), num_workers=1)
    train = me.patch(raw)
    if me.rank == 0:
        for _ in range(3):
            list(islice(train, 2))
    train.set_epoch(0)
    for _ in range(2):
        me.train(train)


@case("right or told")
def a_generator_is_replaced(me: Me) -> None:
    train = me.patch(loader(sampler=users.Shuffles(random.Random(3))))
    for epoch in range(3):
        train.sampler.rng = random.Random(epoch)
        me.train(train)


@case("right or told")
def an_error_in_a_look_is_caught(me: Me) -> None:
    raw = loader(users.Rows(range(N - 1)), sampler=users.Shuffles(random.Random(3)))
    raw.dataset.rows.append(N - 1)  # type: ignore[attr-defined]  # they are Rows
    train = me.patch(raw)
    for epoch in range(3):
        if me.rank == 0:
            with suppress(IndexError):
                for _ in raw:
                    raise IndexError
        train.set_epoch(epoch)
        me.train(train)


@case("right", of={"shuffled": (True, 0), "in order": (False, 0), "later": (True, 8)}, together="never")
def a_worker_dies_and_all_begin_the_next_epoch(me: Me, how: tuple[bool, int]) -> None:
    shuffle, after = how
    dataset = users.Dies(is_alive=me.rank != 1, after=after)
    train = me.patch(loader(dataset, shuffle=shuffle, num_workers=1))
    for number in range(3):
        train.set_epoch(number)
        epoch, batches = me.begin(is_part=number == 0), users.told_of_deaths(train)
        while True:
            try:
                batch = next(batches, None)
            except RuntimeError:
                batch, dataset.is_alive = None, True
            are_given = torch.tensor(batch is not None, dtype=torch.int64)
            dist.all_reduce(are_given, dist.ReduceOp.MIN)
            if not are_given:
                break
            epoch.take(batch)


def on_rank(rank: int, world_size: int) -> dict[str, Run]:
    return run_cases(rank, world_size, CASES)


@pytest.mark.parametrize("world_size", [soaked(2), 3])
def test_what_others_draw_look_at_list_or_set_loses_nothing(world_size: int) -> None:
    assert not disappointed(run_ranks(on_rank, world_size), CASES)
