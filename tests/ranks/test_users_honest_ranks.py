"""What users do alike on every rank, or harmlessly on one: each sample comes once, and nothing is told or warned of."""

import copy
import random
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import users
from iterables import ShardPerWorker
from jobs import Job, Programs, Run
from quick import run_ranks, soaked
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset, WeightedRandomSampler
from users import REMEDIED, SHUFFLERS, SIZE, N, loader

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader

program = Programs()
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


@program("complete", each={"samples": {}, "batches": {"share": "batches"}, "leader": {"order": "leader"}})
def a_sampler_learns_from_all_ranks(job: Job, options: dict[str, Any]) -> None:
    raw: Any = loader(sampler=users.Learns())
    train = job.patch(raw, **options)
    for _ in range(3):
        losses = [0.0] * N
        for indices in job.step(job.begin(), train):
            for index in indices:
                losses[index] = random.random()
        raw.sampler.losses = of_all_ranks(losses)


@program("complete")
def weights_follow_the_losses_of_all_ranks(job: Job) -> None:
    train = job.patch(loader(sampler=WeightedRandomSampler([1.0] * N, N, replacement=False)))
    for _ in range(3):
        job.train(train)
        train.sampler.weights = torch.tensor(of_all_ranks([random.random() for _ in range(N)]), dtype=torch.double)


@program(
    "complete", each={"in order": {}, "shuffled": {"shuffle": True}, "workers": {"shuffle": True, "num_workers": 1}}
)
def data_grow_alike(job: Job, how: dict[str, Any]) -> None:
    dataset = users.Rows()
    train = job.patch(loader(dataset, **how))
    for _ in range(3):
        job.train(train, list(dataset.rows))
        dataset.rows += range(len(dataset), len(dataset) + 12)


@program("complete")
def rows_are_shuffled_alike(job: Job) -> None:
    dataset = users.Rows()
    train = job.patch(loader(dataset))
    for epoch in range(3):
        random.Random(epoch).shuffle(dataset.rows)
        job.train(train)


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


class Remembering(users.Rows):
    """It keeps caches, losses and paths of its rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.files = [f"/scratch/rank{rank}/{number}.png" for number in range(N)]
        self.cache: list[Any] = [None] * N
        self.losses, self.hits, self.seen = [0.0] * N, np.zeros(N, dtype=int), list[int]()
        self.opened = time.time() + rank

    def __getitem__(self, index: int) -> int:
        self.cache[index] = object()
        self.hits[index] += 1
        self.losses[index] = random.random()
        self.seen.append(index)
        return index


REMEMBERING: dict[str, Callable[[int], Any]] = {"much": Remembering, "nothing else": users.Logs}


@program("complete", each={"no workers": {}, "workers": {"num_workers": 1}})
def a_dataset_remembers_what_its_rank_read(job: Job, how: dict[str, Any]) -> None:
    for make in REMEMBERING.values():
        job.train(job.patch(loader(make(job.rank), shuffle=True, **how)), epochs=2 * job.world)


@program("complete", each=users.KEPT)
def files_are_kept_elsewhere(job: Job, how: Any) -> None:
    kept, found = how
    train = job.patch(loader(users.Named(kept, found, [f"{number}.png" for number in range(N)]), shuffle=True))
    job.train(train, epochs=2)


@program("complete", each=users.NAMED)
def rows_that_name_samples_are_shuffled_alike(job: Job, made: Callable[[int], Any]) -> None:
    dataset = users.Lazy()
    dataset.files = list(map(made, range(N)))
    train = job.patch(loader(dataset))
    for epoch in range(3):
        job.train(train)
        random.Random(epoch).shuffle(dataset.files)


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


# What the errors say of orders by entropy, and of samplers that learn.
LED: dict[str, Make] = {
    **SHUFFLERS,
    "entropy": lambda: loader(sampler=users.Entropic()),
    "entropy, an iterator": lambda: loader(sampler=users.Iterates()),
}


@program("complete", each=LED)
def a_leader_leads(job: Job, make: Make) -> None:
    train = job.patch(make(), order="leader")
    job.train(train, epochs=3)


@program("complete")
def workers_read_their_own_parts(job: Job) -> None:
    train = job.patch(loader(ShardPerWorker([12] * 2 * job.world), num_workers=2), share="by_worker")
    job.train(train, range(24 * job.world), epochs=2)


ITEMS: dict[str, Callable[[int], Any]] = {
    "tuples": lambda number: (number, "a name", 0.5),
    "dicts": lambda number: {"id": number, "label": number % 3},
    "tensors": lambda number: torch.tensor(number),
    "dicts of tensors": lambda number: {"id": torch.tensor(number), "picture": torch.zeros(2, 2)},
}


@program("complete", each=ITEMS)
def items_of_a_stream(job: Job, made: Callable[[int], Any]) -> None:
    for how in ({}, {"num_workers": 2}):
        train = job.patch(loader(users.Stream(made=made), **how))
        for _ in range(2):
            job.train(train)


@program("complete", warns=True)  # which may be said once
def items_without_a_stable_hash(job: Job) -> None:
    train = job.patch(loader(users.Stream(made=users.Opaque)))
    job.train(train, epochs=3)


def keyed(number: int, **made: Any) -> dict[str, Any]:
    return {"__key__": f"{number}", "id": number, **made}


SOMETIMES: dict[str, Callable[[random.Random, int], Any]] = {
    "a text": lambda own, number: keyed(number, text=f"{number}"[: None if own.random() > 0.1 else 1]),
    "a label": lambda own, number: keyed(number, label=number % 10 if own.random() > 0.1 else -1),
    "a flip": lambda own, number: (torch.tensor(number), {"file": f"{number}.png", "flipped": own.random() < 0.1}),
}


@program("complete", each=SOMETIMES)
def some_items_of_a_stream_are_augmented(job: Job, made: Callable[[random.Random, int], Any]) -> None:
    for _ in range(2):
        train = job.patch(loader(users.Stream(480, made=partial(made, random.Random(time.time_ns())))))
        for _ in range(2):
            job.train(train, range(480))


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
    list(islice(train, 2))
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


@program("complete", each=SHUFFLERS, world_sizes=(3,))
def two_ranks_begin_and_three_resume(job: Job, make: Make) -> None:
    both = dist.new_group([0, 1])
    epoch = job.begin(is_uneven=True)
    states: list[Any] = [None]
    if job.rank < 2:
        train = patch_dataloader_to_ddp(make(), process_group=both, seed=1)
        for batch in islice(train, 3):
            epoch.take(batch)
        states = [loader_state(train)]
    dist.broadcast_object_list(states)
    train = job.patch(make(), seed=1)
    restore_loader(train, states[0])
    for batch in train:
        epoch.take(batch)
    job.train(train)


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


@program("complete", each={"few": 5, "more": 7})
def whole_batches_are_padding(job: Job, batches: int) -> None:
    data = users.Rows(range(16 * batches))
    train = job.patch(loader(data, batch_sampler=users.TakesBatches(batches, job.rank, job.world)))
    job.train(train, range(16 * batches), padding=32, epochs=3)


@program("complete", all_reduce="each epoch")
def parts_of_other_lengths_are_kept(job: Job) -> None:
    train = job.patch(loader(users.HandedOut(job.rank, job.world)), uneven="keep")
    job.train(train, is_uneven=True, epochs=3)


def on_rank(rank: int, world_size: int) -> dict[str, Run]:
    return program.run(rank, world_size)


@pytest.mark.parametrize("world_size", [soaked(2), 3])
def test_nothing_is_raised_where_nothing_is_lost(world_size: int) -> None:
    assert not program.unexpected(run_ranks(on_rank, world_size))
