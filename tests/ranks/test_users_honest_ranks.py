"""What users do alike on every rank, or harmlessly on one: each sample comes once, and nothing is told or warned of."""

import copy
import random
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import users
from iterables import ShardPerWorker
from jobs import Job, Programs
from quick import soaked
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset
from users import AUGMENTED, ITEMS, KEYED, NUMBERED, REMEDIED, SHUFFLERS, SIZE, N, loader

from ddp_patch import loader_state

program = Programs(__name__)
Make = Callable[[], DataLoader[Any]]
WORKERS = {
    "no workers": {},
    "workers": {"num_workers": 1},
    "persistent": {"num_workers": 1, "persistent_workers": True},
}


def of_all_ranks(losses: list[float]) -> list[float]:
    """Return the ranks' losses together, as a training gathers them."""
    together = torch.tensor(losses)
    dist.all_reduce(together)
    return together.tolist()


@program("complete", each={"samples": {}, "batches": {"share": "batches"}})
def a_sampler_learns_from_all_ranks(job: Job, options: dict[str, Any]) -> None:
    raw: Any = loader(sampler=users.Learns())
    train = job.patch(raw, **options)
    for _ in range(3):
        losses = [0.0] * N
        for indices in job.step(job.begin(), train):
            for index in indices:
                losses[index] = random.random()
        raw.sampler.losses = of_all_ranks(losses)


@program(
    "complete", each={"in order": {}, "shuffled": {"shuffle": True}, "workers": {"shuffle": True, "num_workers": 1}}
)
def data_grow_alike(job: Job, how: dict[str, Any]) -> None:
    dataset = users.Rows()
    train = job.patch(loader(dataset, **how))
    for _ in range(3):
        job.train(train, list(dataset.rows))
        dataset.rows += range(len(dataset), len(dataset) + 12)


class Noisy(users.Numbers):
    """Takes what comes next of its noise, beside the sample of its index."""

    def __init__(self) -> None:
        self.noise = iter(range(10**6))

    def __getitem__(self, index: int) -> int:
        next(self.noise)
        return super().__getitem__(index)


@program(
    "complete",
    each={
        "shuffled": ({"shuffle": True}, {}),
        "in order": ({}, {}),
        "batches with padding": ({"batch_size": 5, "shuffle": True}, {"share": "within_batches"}),
    },
)
def a_dataset_holds_an_iterator(job: Job, how: tuple[dict[str, Any], dict[str, Any]]) -> None:
    given, options = how
    train = job.patch(loader(Noisy(), **given), **options)
    job.train(train, epochs=4, padding=N)


@program("complete")
def a_part_is_chosen_alike(job: Job) -> None:
    train = job.patch(loader(Subset(range(N), list(range(24))), shuffle=True))  # type: ignore[arg-type]  # a range does
    job.train(train, range(24))
    train.dataset.indices = list(range(12, N))
    job.train(train, range(12, N))


class Augmented(users.Rows):
    """Each picture has its number and noise of its rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = random.Random(time.time_ns())

    def __getitem__(self, index: int) -> Any:
        return index, torch.randn(3) * self.rank.random(), np.random.rand()


@program("complete", each=WORKERS)
def pictures_are_augmented(job: Job, how: dict[str, Any]) -> None:
    train = job.patch(loader(Augmented(), shuffle=True, **how))
    job.train(train, epochs=2)


@program("complete", each={"no workers": {}, "workers": {"num_workers": 1}})
def a_dataset_remembers_what_its_rank_read(job: Job, how: dict[str, Any]) -> None:
    job.train(job.patch(loader(users.Logs(job.rank), shuffle=True, **how)), epochs=2 * job.world)


@program("complete", each={"": False, "that the script fills before": True})
def a_dataset_keeps_what_its_rank_read(job: Job, fills: bool) -> None:
    dataset = users.Reads()
    train = job.patch(loader(dataset, shuffle=True))
    for epoch in range(4):
        for index in range(job.rank, N, job.world) if fills else ():
            dataset[index]
        if epoch == 1 and job.rank == 0:
            for index in range(N):
                dataset[index]
        job.train(train)


BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the same names": ({"files": [f"{number}.png" for number in range(N)]}, {}),
    "nothing, and data are not compared": ({}, {"fingerprint": None}),
    "nothing, and a function says that data are the same": ({}, {"fingerprint": lambda dataset: dataset.version}),
}


@program("complete", each=BESIDE)
def labels_and_noise_of_each_rank_beside(job: Job, how: tuple[dict[str, Any], dict[str, Any]]) -> None:
    held, options = how
    dataset = users.Hidden(range(N), noise=[random.random() for _ in range(N)], version=3, **held)
    dataset.labels = [random.randrange(3) for _ in range(N)]
    train = job.patch(loader(dataset), **options)
    for _ in range(2):
        job.train(train)
        dataset.labels = [random.randrange(3) for _ in range(N)]


@program("complete", each=users.NAMED)
def rows_that_name_samples_are_shuffled_alike(job: Job, how: Any) -> None:
    dataset = users.Named(how)
    train = job.patch(loader(dataset, shuffle=True))
    for epoch in range(3):
        job.train(train)
        dataset.arrange(random.Random(epoch).sample(range(N), N))


OF_EACH_RANK: dict[str, Callable[[int], DataLoader[Any]]] = {
    "generator=": lambda rank: loader(shuffle=True, generator=torch.Generator().manual_seed(rank)),
    "numpy Generator": lambda rank: loader(sampler=users.Shuffles(np.random.default_rng())),
    "numpy RandomState": lambda rank: loader(sampler=users.Shuffles(np.random.RandomState(rank))),
    "random.Random": lambda rank: loader(sampler=users.Shuffles(random.Random(rank))),
}


@program("complete", each=OF_EACH_RANK)
def each_rank_begins_with_a_generator_of_its_own(job: Job, make: Callable[[int], DataLoader[Any]]) -> None:
    job.train(job.patch(make(job.rank)), epochs=3)


@program("complete")
def workers_are_spawned(job: Job) -> None:
    spawned: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"}
    job.train(job.patch(loader(shuffle=True, **spawned)), epochs=2)


@program("complete", all_reduce="never")
def ranks_are_fast_and_slow(job: Job) -> None:
    train = job.patch(loader(shuffle=True, generator=users.seeded()))
    for _ in range(3):
        for _ in job.step(job.begin(), train):
            time.sleep(0.02 * job.rank)


@program("complete", each={"samples": 43, "a stream": 0}, all_reduce="never")
def some_ranks_have_an_item_less(job: Job, n: int) -> None:
    raw = loader(users.Rows(range(n)), shuffle=True) if n else loader(users.Stream(43))
    train = job.patch(raw, uneven="keep")
    job.train(train, range(43), is_uneven=True, epochs=3)


# What the error says of orders by entropy.


@program("complete", each={"entropy": users.Entropic, "entropy, an iterator": users.Iterates})
def rank_0_sends_all_the_order_that_it_drew(job: Job, make: Callable[[], Any]) -> None:
    sampler = make()
    dist.broadcast_object_list(orders := [list(sampler)])
    job.train(job.patch(loader(sampler=orders[0])), epochs=3)


@program("complete")
def workers_read_their_own_parts(job: Job) -> None:
    train = job.patch(loader(ShardPerWorker([12] * 2 * job.world), num_workers=2), share="by_worker")
    job.train(train, range(24 * job.world), epochs=2)


@program("complete", each=ITEMS | NUMBERED | KEYED)
def items_of_a_stream(job: Job, made: Callable[[int], Any], **how: Any) -> None:
    train = job.patch(loader(users.Stream(480, made), **how))
    job.train(train, range(480), epochs=2)


BOTH = ("same names and with other numbers", "nothing is lost", "samples are lost", "__key__", "seed")


@program("complete", each=AUGMENTED, tells=BOTH)
def items_of_a_stream_whose_numbers_each_rank_draws(job: Job, made: Callable[[int], Any]) -> None:
    items_of_a_stream(job, made)


@program("complete", each={"tensors": torch.tensor, "a cut text": KEYED["a cut text"]})
def items_of_a_stream_that_workers_read(job: Job, made: Callable[[int], Any]) -> None:
    items_of_a_stream(job, made, num_workers=2)


@program("complete", tells=("Stream", "cannot compare", "seed", "give each item", "StreamOrderWarning"))
def items_without_a_stable_hash(job: Job) -> None:
    job.train(job.patch(loader(users.Stream(480, users.Opaque))), range(480), epochs=3)


@program("complete", tells=("same strings and numbers", "StreamOrderWarning"))
def items_of_one_name(job: Job) -> None:
    given = users.Stream(480, lambda number: {"source": "web", "id": torch.tensor([float(number)])})
    job.train(job.patch(loader(given)), range(480), epochs=2)


class Drawn(users.Stream):
    """Shuffled by the global generators."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n).tolist())


@program("complete", each={"no workers": {}, "workers": {"num_workers": 2}})
def a_stream_draws_from_the_global_generators(job: Job, how: dict[str, Any]) -> None:
    job.train(job.patch(loader(Drawn(), **how)), epochs=2)


@program("complete")
def a_stream_in_a_world_given_by_hand(job: Job) -> None:
    job.train(job.patch(loader(users.Stream(480)), rank=job.rank, num_replicas=job.world), range(480), epochs=2)


class SaysSo(users.ShardsItself):
    """It shards itself, and says so."""

    is_ddp_aware = True


@program("complete", each={"the group": users.rank_of_group, "the environment": users.rank_of_environment})
def a_stream_that_shards_itself_says_so(job: Job, ask: Callable[[], int]) -> None:
    train = job.patch(loader(SaysSo(ask)))
    job.train(train, epochs=2)


@program("complete")
def all_skip_the_same_items_of_a_stream(job: Job) -> None:
    stream = users.Stream(480)
    train = job.patch(loader(stream))
    stream.skips = tuple(range(300, 312))
    job.train(train, set(range(480)) - set(stream.skips), epochs=2)


class Damaged(users.Numbers):
    """Cannot read some samples."""

    def __init__(self, samples: range) -> None:
        self.damaged = samples

    def __getitem__(self, index: int) -> int:
        if index in self.damaged:
            raise OSError
        return super().__getitem__(index)


@program("complete", all_reduce="each epoch")
def all_ask_on_after_samples_that_cannot_be_read(job: Job) -> None:
    damaged = range(SIZE * job.world, 2 * SIZE * job.world)  # the second batch of each rank
    train = job.patch(loader(Damaged(damaged)))
    for _ in range(2):
        batches, epoch = iter(train), job.begin(set(range(N)) - set(damaged))
        while True:
            try:
                epoch.take(next(batches))
            except OSError:
                continue
            except StopIteration:
                break
        job.end()


@program("complete", each={"at once": True, "one after the other": False})
def two_loops_share_a_loader(job: Job, at_once: bool) -> None:
    train = job.patch(loader(shuffle=True, generator=users.seeded()))
    for _ in range(2):
        epochs = job.begin(), job.begin()
        if at_once:
            for batches in zip(train, train, strict=True):
                for epoch, batch in zip(epochs, batches, strict=True):
                    epoch.take(batch)
        else:
            for epoch in epochs:
                for batch in train:
                    epoch.take(batch)


@program("complete", each=REMEDIED)
def all_look_and_all_break(job: Job, make: Make) -> None:
    train = job.patch(make())
    next(iter(train))
    job.train(train)
    job.train(train, most=1)
    for epoch in (7, 8):
        train.set_epoch(epoch)
        job.train(train)


@program("complete", each=SHUFFLERS)
def all_repeat_an_epoch(job: Job, make: Make) -> None:
    train = job.patch(make())
    came = []
    for _ in range(2):
        train.set_epoch(0)
        came.append(job.train(train).samples)
    job.train(train)
    if came[0] != came[1]:
        raise AssertionError(f"epoch 0 was {came[0]}, then {came[1]}")


@program("complete", each={"together": True, "one after the other": False})
def two_loaders_draw_from_one_generator(job: Job, at_once: bool) -> None:
    pair: Any = [loader(shuffle=True, generator=generator) for generator in [users.seeded()] * 2]
    pair = job.patch(pair) if at_once else [*map(job.patch, pair)]
    came = [[job.train(each).samples for each in pair] for _ in range(2)]
    if any(one == other for one, other in came):
        raise AssertionError(f"both had the order {came[0][0]}")


WAYS: dict[str, tuple[Make, dict[str, Any]]] = {
    "kept": (lambda: loader(users.Rows(range(43)), shuffle=True), {"uneven": "keep"}),
    "dropped": (lambda: loader(shuffle=True), {"uneven": "drop"}),
    "persistent workers": (lambda: loader(shuffle=True, num_workers=1, persistent_workers=True), {}),
    "a stream": (lambda: loader(users.Stream()), {}),
    "by worker": (lambda: loader(users.Stream(), num_workers=1), {"share": "by_worker"}),
}


@program("complete", each=WAYS, all_reduce="never")
def all_look_break_and_choose_epochs(job: Job, how: tuple[Make, dict[str, Any]]) -> None:
    make, options = how
    train = job.patch(make(), **options)
    is_uneven = options.get("uneven") == "keep"
    due = range(43 if is_uneven else N)
    job.train(train, due, is_uneven=is_uneven)
    next(iter(train))
    list(islice(train, 2))
    list(zip(train, train, strict=False))
    for epoch in (0, 0, 3, 1):
        train.set_epoch(epoch)
        list(islice(train, 1 + epoch))
        job.train(train, due, is_uneven=is_uneven)


@program("complete")
def one_rank_looks_within_each_epoch(job: Job) -> None:
    train = job.patch(loader(shuffle=True))
    for number in range(3):
        train.set_epoch(number)
        for step, _ in enumerate(job.step(job.begin(), train)):
            if step == 0 and job.rank == 0:
                next(iter(train))


@program("complete")
def one_rank_asks_and_copies(job: Job) -> None:
    raw = loader(shuffle=True, generator=users.seeded())
    train = job.patch(raw)
    for _ in range(2):
        for _ in job.step(job.begin(), train):
            if job.rank == 0:
                assert len(train) == N // SIZE // job.world
                assert repr(train)
                loader_state(train)
                copy.copy(train)
                train.dataset[random.randrange(N)]


@program("complete")
def one_rank_looks_at_batches_to_validate_on(job: Job) -> None:
    train, val = (job.patch(loader(shuffle=shuffle)) for shuffle in (True, False))
    for _ in range(3):
        job.train(train)
        for _ in range(job.rank):
            next(iter(val))
        list(val)


@program("complete")
def a_shuffled_loader_of_many_epochs(job: Job) -> None:
    train = job.patch(loader(shuffle=True))
    job.train(train, epochs=30)


@program("complete", each={"often the same": 1000, "seldom": 10000})
def a_sampler_of_each_rank_draws_with_replacement(job: Job, n: int) -> None:
    train = job.patch(loader(range(n), sampler=users.DrawsItsPart(n, job.rank, job.world)))
    job.train(train, range(n), most=N, padding=N * job.world, epochs=12)


@program("complete", each={"eight": 8, "more": 20})
def samples_that_come_several_times_are_sharded_already(job: Job, n: int) -> None:
    data: ConcatDataset[int] = ConcatDataset([users.Rows(range(n))] * 3)
    train = job.patch(loader(data, sampler=DistributedSampler(data)))
    for epoch in range(4):
        train.sampler.set_epoch(epoch)
        job.train(train, list(range(n)) * 3, padding=2)


@program("complete")
def one_rank_looks_at_what_is_sharded_already_and_all_break(job: Job) -> None:
    data: Any = range(N)
    train = job.patch(loader(sampler=DistributedSampler(data)))
    for number in range(4):
        train.sampler.set_epoch(number)
        most = 2 if number == 1 else None
        for step, _ in enumerate(job.step(job.begin(is_part=number == 1), train, most)):
            if job.rank == 1 and (number, step) in {(0, 2), (1, 0)}:
                next(iter(train))


@program("complete", all_reduce="each epoch")
def parts_of_other_lengths_are_kept(job: Job) -> None:
    train = job.patch(loader(users.HandedOut(job.rank, job.world)), uneven="keep")
    job.train(train, is_uneven=True, epochs=3)


@program("complete", tells=("came to the end of epoch 0 after", "took more of it"), all_reduce="each epoch")
def parts_of_other_lengths_are_on_purpose(job: Job) -> None:
    train = job.patch(loader(users.HandedOut(job.rank, job.world, says_so=True)))
    job.train(train, is_uneven=True, epochs=2)


@pytest.mark.parametrize("world_size", [soaked(2), 3])
def test_nothing_is_raised_where_nothing_is_lost(world_size: int) -> None:
    assert program.unexpected(world_size) == {}
