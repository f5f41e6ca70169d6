"""What differs between ranks after the patch, so that samples would be lost: some rank raises within that epoch."""

import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import torch
import users
from jobs import Job, Programs
from quick import soaked
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from users import ITEMS, SHUFFLERS, SIZE, N, loader
from zoo import Bare

program = Programs(__name__)
Make = Callable[..., DataLoader[Any]]
LONG = 480  # more than the first items that are compared
WORKERS = {"no workers": 0, "workers": 1}
SAMPLED = {"no sampler": False, "a DistributedSampler": True}


# Orders.


def learnt(job: Job, raw: Any, learner: Any, **options: Any) -> None:
    """Train by a sampler that puts the largest losses first, of which each rank has its own."""
    train = job.patch(raw, **options)
    for _ in range(3):
        for indices in job.step(job.begin(padding=N if options else 0), train):
            for index in indices:
                learner.losses[index] = random.random()


@program(
    "error",
    each={
        "samples": {},
        "batches": {"share": "batches"},
        "within batches": {"share": "within_batches"},
        "costs": {"cost": [1 + number % 7 for number in range(N)]},
    },
)
def a_sampler_learns_from_its_own_rank(job: Job, options: dict[str, Any]) -> None:
    raw = loader(sampler=users.Learns())
    learnt(job, raw, raw.sampler, **options)


@program("error", each={"on the sampler": False, "through the loader": True})
def weights_follow_the_losses_of_a_rank(job: Job, through: bool) -> None:
    raw = loader(sampler=WeightedRandomSampler([1.0] * N, N, replacement=False, generator=users.seeded()))
    train = job.patch(raw)
    for _ in range(3):
        job.train(train)
        sampler: Any = (train if through else raw).sampler
        sampler.weights = torch.rand(N, dtype=torch.double) + 0.1


PARTS: dict[str, Callable[[int, int], Any]] = {
    "a closure's generator, seeded by rank": lambda rank, _: users.ByClosure(random.Random(rank)),
    "files in another order": lambda rank, _: [(row + rank) % N for row in range(N)],
    "a part of the indices": lambda rank, ranks: SubsetRandomSampler([*range(rank, N, ranks)] * ranks),
}
ORDERS = ("draw different orders", "seed what it draws from", "weights, indices, sorted files", "broadcast_object_list")


@program("error", each=PARTS, tells=(*ORDERS, "build it for one process", "is_ddp_aware = True"))
def an_order_differs_from_the_beginning(job: Job, make: Callable[[int, int], Any]) -> None:
    job.train(job.patch(loader(sampler=make(job.rank, job.world))))


ENTROPIC: dict[str, Make] = {
    "entropy": lambda: loader(sampler=users.Entropic()),
    "time": lambda: loader(sampler=users.Entropic(users.by_time)),
    "an iterator": lambda: loader(sampler=users.Iterates()),
    "workers": lambda: loader(sampler=users.Entropic(), num_workers=1),
}


@program("error", each=ENTROPIC)
def an_order_draws_on_entropy_later(job: Job, make: Make) -> None:
    job.train(job.patch(make()), epochs=3)


LOOKED_AT: dict[str, Make] = {
    "no workers": lambda: loader(shuffle=True),
    "workers": lambda: loader(shuffle=True, num_workers=1),
    "a stream": lambda: loader(users.Stream()),
}
LOOK = ("DataLoader patched at", "jobs.py:", "rank 0 left epoch 0 after 1 batch", "took more of it")
REMEDY = ("Look at a batch on every rank", "iterate the unpatched loader", "loader.set_epoch(N)")


@program("error", each=LOOKED_AT, tells=(*LOOK, *REMEDY))
def rank_0_looks_at_a_batch(job: Job, make: Make) -> None:
    train = job.patch(make())
    if job.rank == 0:
        next(iter(train))
    job.train(train)


@program("error", each=SHUFFLERS, tells=("the ranks make different passes", "pass 0 is over epoch", *REMEDY))
def each_rank_sets_another_epoch(job: Job, make: Make) -> None:
    train = job.patch(make())
    for epoch in range(2):
        train.set_epoch(epoch + job.rank)
        job.train(train)


@program("error", each=SHUFFLERS)
def one_rank_breaks(job: Job, make: Make) -> None:
    train = job.patch(make())
    job.train(train)
    for _ in job.step(job.begin(), train, 2 if job.rank == 1 else None):
        pass
    job.train(train)


@program("error")
def each_rank_seeds_its_generator_anew(job: Job) -> None:
    raw = loader(shuffle=True, generator=users.seeded())
    train = job.patch(raw)
    job.train(train)
    raw.generator.manual_seed(job.rank)
    job.train(train)


@program("complete")
def each_rank_seeds_a_generator_of_pythons_anew(job: Job) -> None:
    sampler = users.Shuffles(random.Random(3))
    train = job.patch(loader(sampler=sampler))
    job.train(train)
    sampler.rng.seed(job.rank)
    job.train(train)


@program("error", tells=("RandomSampler gave each its own", "seed what it draws from", "broadcast_object_list"))
def each_rank_gives_its_sampler_a_generator_later(job: Job) -> None:
    sampler = RandomSampler(range(N))
    train = job.patch(loader(sampler=sampler))
    sampler.generator = torch.Generator().manual_seed(job.rank)
    job.train(train, epochs=2)


class Queued(Dataset[int]):
    """Gives what comes next, whatever is asked for."""

    def __init__(self) -> None:
        self.queue = deque(range(1000))

    def __len__(self) -> int:
        return LONG

    def __getitem__(self, index: int) -> int:
        return self.queue.popleft()


@program("error", tells=("are also rank", "Queued.__getitem__", "whatever its index"))
def a_dataset_ignores_its_index(job: Job) -> None:
    job.train(job.patch(loader(Queued())), range(LONG), epochs=3)


class Limited(Dataset[int]):
    """An epoch of a stream, with a known number of steps."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.iterator = stream, iter(stream)

    def __len__(self) -> int:
        return LONG

    def __getitem__(self, index: int) -> int:
        return int(next(self.iterator))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return count()


@program("error", tells=("are also rank", "the iterable dataset itself, DataLoader(dataset.stream, ...)"))
def a_dataset_reads_a_stream(job: Job) -> None:
    job.train(job.patch(loader(Limited(Endless()))), range(LONG), epochs=3)


@program("error")
def each_rank_chooses_its_part_later(job: Job) -> None:
    rows: Any = range(N)
    train = job.patch(loader(Subset(rows, list(range(N))), shuffle=True))
    job.train(train)
    train.dataset.indices = list(range(job.rank, N, job.world)) * job.world
    job.train(train)


@program("error")
def one_rank_is_further_in_its_curriculum(job: Job) -> None:
    train = job.patch(loader(sampler=users.Curriculum()))
    job.train(train, range(24))
    train.sampler.set_limit(30 if job.rank else 36)
    job.train(train, range(36), padding=36)


@program("error")
def one_rank_leaves_each_epoch_of_what_is_sharded_already(job: Job) -> None:
    data: Any = range(N)
    train = job.patch(loader(sampler=DistributedSampler(data)))
    for epoch in range(3):
        train.sampler.set_epoch(epoch)
        for _ in job.step(job.begin(), train, 2 if job.rank == 1 else None):
            pass


@program("error", tells=("are also rank",))
def each_rank_seeds_anew_what_is_sharded_already(job: Job) -> None:
    data: Any = range(LONG)
    train = job.patch(loader(sampler=DistributedSampler(data)))
    train.sampler.seed = job.rank
    for _ in range(3):
        job.train(train, range(LONG))


@program("error", tells=("the ranks make different passes",))
def one_rank_is_in_another_epoch_of_what_is_sharded_already(job: Job) -> None:
    data: Any = range(LONG)
    train = job.patch(loader(sampler=DistributedSampler(data)))
    for epoch in range(3):
        train.sampler.set_epoch(7 if job.rank and epoch == 1 else epoch)
        job.train(train, range(LONG))


@program("error", tells=("rank 1 left epoch 0 after 3",), all_reduce="each epoch")
def one_rank_leaves_its_part_of_a_stream(job: Job) -> None:
    stream = users.HandedOut(job.rank, job.world, says_so=True)
    stream.part = range(24 * job.rank, 24 * job.rank + 24)
    train = job.patch(loader(stream))
    for _ in range(2):
        for _ in job.step(
            job.begin(range(24 * job.world), is_part=True, is_uneven=True), train, 3 if job.rank == 1 else None
        ):
            pass
        job.end()


# Rows.


@program("error", each={"patched": {}, "shuffled": {"shuffle": True}, "workers": {"num_workers": 1}})
def rows_are_shuffled_by_hand(job: Job, how: dict[str, Any]) -> None:
    dataset = users.Rows()
    train = job.patch(loader(dataset, **how))
    for _ in range(3):
        random.shuffle(dataset.rows)
        job.train(train)


@program("error", each=users.NAMED)
def rows_that_name_samples_are_shuffled(job: Job, how: Any) -> None:
    dataset = users.Named(how)
    train = job.patch(loader(dataset, shuffle=True))
    for _ in range(3):
        job.train(train)
        dataset.arrange(random.sample(range(N), N))


@program("error", each=users.NAMED)
def rows_that_name_samples_are_listed_in_another_order(job: Job, how: Any) -> None:
    job.train(job.patch(loader(users.Named(how, random.sample(range(N), N)))), epochs=2)


@program("error", tells=("have different samples at the same indices", "the indices of a Subset"))
def a_dataset_splits_itself_without_a_seed(job: Job) -> None:
    job.train(job.patch(loader(users.Split(random.Random(job.rank)))))


@program("warned", tells=("differ in Hidden.labels", "nothing is lost", "samples are lost", "fingerprint="))
def labels_alone_show_that_rows_are_in_another_order(job: Job) -> None:
    job.train(job.patch(loader(users.Hidden(random.Random(job.rank).sample(range(N), N)))))


def rows_of(dataset: users.Hidden) -> list[int]:
    return [dataset.row(index) for index in range(N)]


@program("error", tells=("fingerprint of its data",))
def a_function_says_that_rows_are_in_another_order(job: Job) -> None:
    dataset = users.Hidden(random.Random(job.rank).sample(range(N), N))
    job.train(job.patch(loader(dataset), fingerprint=rows_of))


@program("error", tells=("differ at the same indices, in what fingerprint= returns",), each=SAMPLED)
def a_function_says_that_rows_are_shuffled(job: Job, how: Any) -> None:
    dataset = users.Hidden(range(N))
    sampler: Any = DistributedSampler(dataset) if how else None
    train = job.patch(loader(dataset, sampler=sampler), fingerprint=rows_of)
    for epoch in range(2):
        if sampler is not None:
            sampler.set_epoch(epoch)
        job.train(train)
        order = random.Random(job.rank).sample(range(N), N)
        dataset.row = order.__getitem__


@program("error")
def one_of_several_datasets_is_shuffled(job: Job) -> None:
    parts = [users.Named(users.NAMED["files"], range(place * N, (place + 1) * N)) for place in range(2)]
    train = job.patch(loader(ConcatDataset(parts), shuffle=True))
    for _ in range(3):
        job.train(train, range(2 * N))
        parts[1].arrange(random.sample(range(N, 2 * N), N))


@program("error", each={"shuffled": True, "in order": False})
def a_dataset_grows_by_more_on_one_rank(job: Job, shuffle: bool) -> None:
    dataset = users.Rows()
    train = job.patch(loader(dataset, shuffle=shuffle))
    for _ in range(3):
        job.train(train, list(dataset.rows), padding=N)
        dataset.rows += range(len(dataset), len(dataset) + 6 * (1 + job.rank))


@program("error", each={"shuffled": True, "in order": False})
def a_worker_dies_and_the_user_goes_on(job: Job, shuffle: bool) -> None:
    dataset = users.Dies(is_alive=job.rank != 1)
    train = job.patch(loader(dataset, shuffle=shuffle, num_workers=1))
    for _ in range(3):
        epoch = job.begin()
        with suppress(RuntimeError):
            for _ in job.step(epoch, users.hearing_of_deaths(train)):
                pass
        dataset.is_alive = True


# Streams.


@program("error", tells=("NoStepsError",))
def some_ranks_have_no_full_batch(job: Job) -> None:
    rows: Any = range(5 * job.world - 1)
    given = loader(sampler=Bare(rows), batch_size=5, drop_last=True)
    job.train(job.patch(given, uneven="keep"), rows)


@program("error", tells=("NoStepsError",))
def some_ranks_have_no_full_batch_of_a_stream(job: Job) -> None:
    given = loader(users.Stream(5 * job.world - 1), batch_size=5, drop_last=True)
    job.train(job.patch(given, uneven="keep"))


class Stops(users.Numbers):
    """Takes the end of what it reads from for the end of all."""

    def __init__(self, after: int) -> None:
        self.items = iter(range(after))

    def __getitem__(self, index: int) -> int:
        next(self.items)
        return super().__getitem__(index)


@program("error", each={"at once": 0, "in its second batch": SIZE + 1})
def one_rank_ends_its_last_epoch(job: Job, after: int) -> None:
    job.train(job.patch(loader(Stops(N if job.rank == 0 else after), shuffle=True)))


# How rank 1 reads a stream otherwise than the others; in how many epochs, and with how many workers.
READINGS: dict[str, tuple[dict[str, Any], int, int]] = {
    "skips an item": ({"skips": (301,)}, 1, 0),
    "skips an item, workers": ({"skips": (301,)}, 1, 2),
    "skips items of each epoch": ({"skips": (5, 300)}, 2, 1),
    "takes a lost connection for the end": ({"ends": 300}, 2, 0),
    "takes a lost connection for the end, workers": ({"ends": 300}, 2, 2),
    "takes a lost connection for the end of the last epoch": ({"ends": 300}, 1, 0),
    "gets an item twice": ({"repeats": 300}, 1, 0),
    "skips one item and gets another twice": ({"skips": (290,), "repeats": 350}, 1, 0),
    "shuffles the end": ({"shuffled_from": 300}, 1, 0),
}


@program("error", each=READINGS)
def one_rank_reads_a_stream_otherwise(job: Job, reading: tuple[dict[str, Any], int, int]) -> None:
    (how, epochs, workers), stream = reading, users.Stream(LONG)
    train = job.patch(loader(stream, num_workers=workers))
    if job.rank == 1:
        vars(stream).update(how)
    job.train(train, range(LONG), epochs=epochs)


OF_A_STREAM = ("Stream", "lost", "seed", "same on every rank", "detshuffle=True, seed=0")


def shuffled(made: Callable[[int], Any] = str, *, splits: bool = True, **how: Any) -> Any:
    """A stream that the system's entropy shuffles."""
    stream = users.Stream(LONG, made, splits=splits)
    stream.shuffled_from = 0
    return loader(stream, **how)


@program("error", each={**ITEMS, "numbers, too": users.AUGMENTED["a file, and where it is cut"]}, tells=OF_A_STREAM)
def each_rank_shuffles_a_stream_by_itself(job: Job, made: Callable[[int], Any]) -> None:
    job.train(job.patch(shuffled(made)), range(LONG))


BOTH = ("same names and with other numbers", "nothing is lost", "samples are lost", "__key__")
PICTURES = {"pictures": lambda number: {"id": torch.full((3, 3), float(number))}}


@program("warned", each=users.NUMBERED | PICTURES, tells=(*BOTH, *OF_A_STREAM))
def each_rank_shuffles_a_stream_of_numbers_by_itself(job: Job, made: Callable[[int], Any]) -> None:
    job.train(job.patch(shuffled(made)), range(LONG))


@program("warned", tells=("Stream is read with other numbers by worker 0 and worker 1", *OF_A_STREAM))
def workers_read_a_stream_of_numbers_that_each_shuffles_by_itself(job: Job) -> None:
    job.train(job.patch(shuffled(int, splits=False, num_workers=2)), range(LONG))


@program("error", tells=(*OF_A_STREAM, "Stream is read in other orders", "worker 0 and worker 1"))
def workers_read_a_stream_that_each_shuffles_by_itself(job: Job) -> None:
    job.train(job.patch(shuffled(splits=False, num_workers=2)), range(LONG))


@program("error", tells=(*OF_A_STREAM, "share='by_worker'"))
def workers_shuffle_their_parts_by_themselves(job: Job) -> None:
    job.train(job.patch(shuffled(num_workers=2)), range(LONG))


@program("error")
def each_rank_shuffles_a_stream_by_itself_in_a_world_given_by_hand(job: Job) -> None:
    job.train(job.patch(shuffled(), rank=job.rank, num_replicas=job.world), range(LONG))


@program("error", each={"short": N, "long": 10 * LONG})
def a_stream_is_shuffled_by_entropy_later(job: Job, n: int) -> None:
    job.train(job.patch(loader(users.Reshuffled(n))), range(n), epochs=2)


@program("error", each=WORKERS)
def each_rank_sets_another_epoch_of_a_stream(job: Job, workers: int) -> None:
    train = job.patch(loader(users.EpochStream(), num_workers=workers))
    for epoch in range(2):
        train.dataset.set_epoch(epoch + job.rank)
        job.train(train, range(1000 * epoch, 1000 * epoch + N))


FOR_ITS_RANK: dict[str, Make] = {
    "it asks the group": lambda: loader(users.ShardsItself(users.rank_of_group)),
    "it asks the environment": lambda: loader(users.ShardsItself(users.rank_of_environment)),
    "it asks in a worker": lambda: loader(users.ShardsItself(users.rank_of_environment), num_workers=1),
    "it was made for its rank": lambda: loader(users.MadeForItsRank()),
    "it was made for its rank, a worker": lambda: loader(users.MadeForItsRank(), num_workers=1),
    "workers make it for their rank": lambda: loader(
        users.MadeInWorkers(), num_workers=2, worker_init_fn=users.make_for_its_rank
    ),
}


@program("error", each=FOR_ITS_RANK, tells=("is_ddp_aware = True", *OF_A_STREAM[1:]))
def a_stream_shards_itself(job: Job, make: Make) -> None:
    job.train(job.patch(make()))


@program("error", all_reduce="each epoch")
def parts_of_other_lengths(job: Job) -> None:
    job.train(job.patch(loader(users.HandedOut(job.rank, job.world))), epochs=3)


@pytest.mark.parametrize("world_size", [soaked(2), 3])
def test_what_differs_between_ranks_is_an_error_within_the_epoch(world_size: int) -> None:
    assert program.unexpected(world_size) == {}
