"""What users draw, look at, list, set and break off after the patch: every sample comes once in every epoch."""

import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
import users
from jobs import Job, Programs
from quick import soaked
from torch.utils.data import DataLoader, SubsetRandomSampler, WeightedRandomSampler
from users import REMEDIED, SHUFFLERS, SIZE, UNHELD, N, loader
from zoo import Source

from ddp_patch import loader_state, restore_loader
from ddp_patch.samplers import ScalableRandomSampler

program = Programs(__name__)
Make = Callable[[], DataLoader[Any]]
WORKERS = {"no workers": {}, "workers": {"num_workers": 1}}


@program("complete", each=WORKERS)
def one_generator_for_all_loaders_and_rank_0_validates(job: Job, how: dict[str, Any]) -> None:
    generator = users.seeded()
    raw, val = (loader(shuffle=shuffle, generator=generator, **how) for shuffle in (True, False))
    train = job.patch(raw)
    for _ in range(3):
        job.train(train)
        if job.rank == 0:
            list(val)


# What a sampler counts in its attributes moves with whoever iterates it.
COUNTER = {name: REMEDIED[name] for name in ("counter", "an iterator")}
UNCOUNTED = {name: make for name, make in REMEDIED.items() if name not in COUNTER}


@program("complete", each=UNCOUNTED)
def some_ranks_iterate_the_unpatched_loader(job: Job, make: Make) -> None:
    raw = make()
    train = job.patch(raw)
    for epoch in range(3):
        if job.rank == 0:
            list(islice(raw.batch_sampler, 100))  # type: ignore[arg-type]  # all of these have one, some without an end
        if job.rank == job.world - 1:
            list(islice(raw, 1 + 20 * epoch))
        job.train(train)


@program("error", each=UNHELD | COUNTER)
def rank_0_lists_a_sampler_that_draws_from_what_it_does_not_hold(job: Job, make: Make) -> None:
    some_ranks_iterate_the_unpatched_loader(job, make)


@program("complete", each=UNHELD)
def nobody_else_draws_from_what_a_sampler_does_not_hold(job: Job, make: Make) -> None:
    job.train(job.patch(make()), epochs=3)


COMPUTED: dict[str, Make] = {"computed": lambda: loader(sampler=ScalableRandomSampler(N, seed=1))}


@program("complete", each=REMEDIED | COMPUTED)
def some_ranks_look_and_all_set_an_epoch(job: Job, make: Make) -> None:
    train = job.patch(make())
    for epoch in (0, 1, 4, 5):
        for _ in range(job.rank):
            next(iter(train))
        train.set_epoch(epoch)
        job.train(train)


@program("error", each=SHUFFLERS)  # it is more than a look
def some_ranks_take_two_batches_and_all_set_a_later_epoch(job: Job, make: Make) -> None:
    train = job.patch(make())
    for epoch in (0, 3, 4):
        if job.rank:
            list(islice(train, 2))
        train.set_epoch(epoch)
        job.train(train)


@program("complete")
def one_rank_looks_and_sets_the_epoch_back(job: Job) -> None:
    train = job.patch(loader(shuffle=True))
    if job.rank == 0:
        for _ in range(2):
            next(iter(train))
        train.set_epoch(0)
    job.train(train)


# A loader; how all ranks change its sampler; and which samples it gives before and after.
CHANGED: dict[str, tuple[Make, Callable[[Any], object], range, range]] = {
    "weights": (
        lambda: loader(sampler=WeightedRandomSampler([1.0] * 24 + [0.0] * 24, 24, replacement=False)),
        lambda train: setattr(train.sampler, "weights", torch.tensor([0.0] * 24 + [1.0] * 24, dtype=torch.double)),
        range(24),
        range(24, N),
    ),
    "indices": (
        lambda: loader(sampler=SubsetRandomSampler(range(24))),
        lambda train: setattr(train.sampler, "indices", range(12, N)),
        range(24),
        range(12, N),
    ),
    "size of batches": (
        lambda: loader(batch_sampler=users.Batches(random.Random(3))),
        lambda train: setattr(train.batch_sampler, "most", 8),
        range(N),
        range(N),
    ),
    "by a method": (
        lambda: loader(sampler=users.Curriculum()),
        lambda train: train.sampler.set_limit(36),
        range(24),
        range(36),
    ),
    "length of a stream": (
        lambda: loader(users.Stream()),
        lambda train: setattr(train.dataset, "n", 24),
        range(N),
        range(24),
    ),
    "length of a stream, workers": (
        lambda: loader(users.Stream(), num_workers=1),
        lambda train: setattr(train.dataset, "n", 24),
        range(N),
        range(24),
    ),
}


@program("complete", each=CHANGED)
def all_change_what_it_gives(job: Job, how: tuple[Make, Callable[[Any], object], range, range]) -> None:
    make, change, before, after = how
    train = job.patch(make())
    job.train(train, before)
    change(train)
    job.train(train, after, epochs=2)


@program("complete", each={share: share for share in ("batches", "within_batches")})
def all_change_what_is_shared_otherwise(job: Job, share: str) -> None:
    make, change, before, after = CHANGED["by a method"]
    train = job.patch(make(), share=share)
    job.train(train, before, padding=N)
    change(train)
    job.train(train, after, padding=N)


@program("complete", each=WORKERS)
def the_dataset_s_own_set_epoch_counts(job: Job, how: dict[str, Any]) -> None:
    train = job.patch(loader(users.EpochStream(), **how))
    train.dataset.set_epoch(5)
    for epoch in (5, 6, 7):
        job.train(train, range(1000 * epoch, 1000 * epoch + N))


@program("complete or error")
def other_numbers_of_workers_and_all_break(job: Job) -> None:
    sampler = users.Shuffles(random.Random(3), lazily=True)
    train = job.patch(loader(sampler=sampler, num_workers=job.rank))
    job.train(train, most=2)
    job.train(train, epochs=2)


OPTIONS: dict[str, dict[str, Any]] = {
    "batches": {"share": "batches"},
    "within batches": {"share": "within_batches", "uneven": "keep"},
    "costs": {"cost": [1 + number % 7 for number in range(N)]},
    "dropped": {"uneven": "drop"},
}


@program("complete", each=OPTIONS)
def rank_0_lists_a_sampler_that_is_shared_otherwise(job: Job, options: dict[str, Any]) -> None:
    raw = loader(sampler=users.Shuffles(random.Random(3)))
    train = job.patch(raw, **options)
    for _ in range(3):
        if job.rank == 0:
            list(raw.sampler)
        job.train(train, is_uneven=options.get("uneven") == "keep")


RESUMED: dict[str, Make] = {
    **{name: make for name, make in SHUFFLERS.items() if name in UNCOUNTED},
    "global states": lambda: loader(sampler=users.Shuffles(random, lazily=True)),
    "a stream of global states, workers": lambda: DataLoader(Source(N, shuffles=True), SIZE, num_workers=2),
}


@program("complete", each=RESUMED)
def all_resume_in_an_epoch_after_others_drew(job: Job, make: Make) -> None:
    resumed(job, make)


def resumed(job: Job, make: Make, **options: Any) -> None:
    raw = make()
    train = job.patch(raw, **options)
    job.train(train)
    epoch = job.begin()
    for _ in job.step(epoch, train, 1):
        if job.rank == 0:
            list(() if isinstance(raw.dataset, Source) else raw.batch_sampler or ())  # a stream's never ends
    state = loader_state(train)
    raw = make()
    train = job.patch(raw, **options)
    restore_loader(train, state)
    if job.rank == 1:
        next(iter(raw))
    for _ in job.step(epoch, train):
        pass
    job.train(train)


@program("complete", each={"generator=": False, "own": True})
def all_seed_the_generator_anew(job: Job, own: bool) -> None:
    rng: Any = random.Random(3) if own else users.seeded()
    train = job.patch(loader(sampler=users.Shuffles(rng)) if own else loader(shuffle=True, generator=rng))
    for epoch in range(3):
        rng.seed(epoch) if own else rng.manual_seed(epoch)
        job.train(train)


@program("complete")
def global_states_are_seeded_by_rank(job: Job) -> None:
    train = job.patch(loader(sampler=users.Shuffles(random)))
    for epoch in range(3):
        random.seed(10 * epoch + job.rank)
        torch.manual_seed(job.rank)
        job.train(train)


@program("complete", each={"random.Random": random.Random, "torch.Generator": torch.Generator().manual_seed})
def a_dataset_crops_with_the_sampler_s_generator(job: Job, make: Callable[[int], Any]) -> None:
    rng = make(3)
    train = job.patch(loader(users.Rows(rng=rng), sampler=users.Shuffles(rng, lazily=isinstance(rng, random.Random))))
    for _ in range(3):
        if job.rank == 0:
            train.dataset[0]
        job.train(train)


@program("complete or error")
def a_generator_is_replaced(job: Job) -> None:
    train = job.patch(loader(sampler=users.Shuffles(random.Random(3))))
    for epoch in range(3):
        train.sampler.rng = random.Random(epoch)
        job.train(train)


@program("complete", each={"shuffled": (True, 0), "in order": (False, 0), "later": (True, 8)}, all_reduce="never")
def a_worker_dies_and_all_begin_the_next_epoch(job: Job, how: tuple[bool, int]) -> None:
    shuffle, after = how
    dataset = users.Dies(is_alive=job.rank != 1, after=after)
    train = job.patch(loader(dataset, shuffle=shuffle, num_workers=1))
    for number in range(3):
        train.set_epoch(number)
        epoch, batches = job.begin(is_part=number == 0), users.hearing_of_deaths(train)
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


@pytest.mark.parametrize("world_size", [soaked(2), 3])
def test_what_others_draw_look_at_list_or_set_loses_nothing(world_size: int) -> None:
    assert program.unexpected(world_size) == {}
