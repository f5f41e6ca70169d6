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
from after_patch import Case, Me, Run, cases_of, disappointed, run_cases
from iterables import ShardPerWorker
from quick import run_ranks, soaked
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset, WeightedRandomSampler
from users import REMEDIED, SHUFFLERS, SIZE, N, loader

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader

CASES: dict[str, Case] = {}
case = cases_of(CASES)


def right(**how: Any) -> Callable[[Any], Any]:
    return case("right", is_quiet=True, **how)


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


@right(of={"samples": {}, "batches": {"share": "batches"}, "leader": {"order": "leader"}})
def a_sampler_learns_from_all_ranks(me: Me, options: dict[str, Any]) -> None:
    raw: Any = loader(sampler=users.Learns())
    train = me.patch(raw, **options)
    for _ in range(3):
        losses = [0.0] * N
        for indices in me.step(me.begin(), train):
            for index in indices:
                losses[index] = random.random()
        raw.sampler.losses = of_all_ranks(losses)


@right()
def batches_of_losses_that_are_alike_on_all_ranks(me: Me) -> None:
    train = me.patch(loader(batch_sampler=users.AlikeBatches()))
    for _ in range(3):
        me.train(train)
        train.batch_sampler.losses = of_all_ranks([random.random() for _ in range(N)])


@right()
def weights_follow_the_losses_of_all_ranks(me: Me) -> None:
    train = me.patch(loader(sampler=WeightedRandomSampler([1.0] * N, N, replacement=False)))
    for _ in range(3):
        me.train(train)
        train.sampler.weights = torch.tensor(of_all_ranks([random.random() for _ in range(N)]), dtype=torch.double)


@right(of={"in order": {}, "shuffled": {"shuffle": True}, "workers": {"shuffle": True, "num_workers": 1}})
def data_grow_alike(me: Me, how: dict[str, Any]) -> None:
    dataset = users.Rows()
    train = me.patch(loader(dataset, **how))
    for _ in range(3):
        me.train(train, list(dataset.rows))
        dataset.rows += range(len(dataset), len(dataset) + 12)


@right()
def rows_are_shuffled_alike(me: Me) -> None:
    dataset = users.Rows()
    train = me.patch(loader(dataset))
    for epoch in range(3):
        random.Random(epoch).shuffle(dataset.rows)
        me.train(train)


@right()
def a_part_is_chosen_alike(me: Me) -> None:
    train = me.patch(loader(Subset(range(N), list(range(24))), shuffle=True))  # type: ignore[arg-type]  # a range does
    me.train(train, range(24))
    train.dataset.indices = list(range(12, N))
    me.train(train, range(12, N))


class Augmented(users.Rows):
    """Each picture has its number and noise of its rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = random.Random(time.time_ns())

    def __getitem__(self, index: int) -> Any:
        return index, torch.randn(3) * self.rank.random(), np.random.rand()


@right(of=WORKERS)
def pictures_are_augmented(me: Me, how: dict[str, Any]) -> None:
    train = me.patch(loader(Augmented(), shuffle=True, **how))
    for _ in range(2):
        me.train(train)


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


@right(of={"no workers": {}, "workers": {"num_workers": 1}})
def a_dataset_remembers_what_its_rank_read(me: Me, how: dict[str, Any]) -> None:
    train = me.patch(loader(Remembering(me.rank), shuffle=True, **how))
    for _ in range(3):
        me.train(train)


@right(of={"no workers": {}, "workers": {"num_workers": 1}})
def a_dataset_notes_nothing_but_what_its_rank_read(me: Me, how: dict[str, Any]) -> None:
    train = me.patch(loader(users.Logs(me.rank), shuffle=True, **how))
    for _ in range(2 * me.world):
        me.train(train)


@right(of=users.KEPT)
def files_are_kept_elsewhere(me: Me, how: Any) -> None:
    kept, found = how
    train = me.patch(loader(users.Named(kept, found, [f"{number}.png" for number in range(N)]), shuffle=True))
    for _ in range(2):
        me.train(train)


@right(of=users.NAMED)
def rows_that_name_samples_are_shuffled_alike(me: Me, made: Callable[[int], Any]) -> None:
    dataset = users.Lazy()
    dataset.files = list(map(made, range(N)))
    train = me.patch(loader(dataset))
    for epoch in range(3):
        me.train(train)
        random.Random(epoch).shuffle(dataset.files)


@right(together="never")
def ranks_are_fast_and_slow(me: Me) -> None:
    train = me.patch(loader(shuffle=True, generator=users.seeded()))
    for _ in range(3):
        for _ in me.step(me.begin(), train):
            time.sleep(0.02 * me.rank)


@right(of={"steps": True, "alone": False}, together="never")
def one_rank_stands_still(me: Me, before: bool) -> None:
    train = me.patch(loader(sampler=users.Shuffles(random.Random(3))))
    for number in range(3):
        if me.rank == 0 and number == 1 and before:
            time.sleep(1)
        for step, _ in enumerate(me.step(me.begin(), train)):
            if me.rank == 1 and number == 1 and step == 1 and not before:
                time.sleep(1)


@right(of={"samples": 43, "a stream": 0}, together="never")
def some_ranks_have_an_item_less(me: Me, n: int) -> None:
    raw = loader(users.Rows(range(n)), shuffle=True) if n else loader(users.Stream(43))
    train = me.patch(raw, uneven="keep")
    for _ in range(3):
        me.train(train, range(43), is_uneven=True)


# What the errors say of orders by entropy, and of samplers that learn.
LED: dict[str, Callable[[], DataLoader[Any]]] = {
    **SHUFFLERS,
    "entropy": lambda: loader(sampler=users.Entropic()),
    "entropy, an iterator": lambda: loader(sampler=users.Iterates()),
}


@right(of=LED)
def a_leader_leads(me: Me, make: Callable[[], DataLoader[Any]]) -> None:
    train = me.patch(make(), order="leader")
    for _ in range(3):
        me.train(train)


@right()
def workers_read_their_own_parts(me: Me) -> None:
    train = me.patch(loader(ShardPerWorker([12] * 2 * me.world), num_workers=2), share="by_worker")
    for _ in range(2):
        me.train(train, range(24 * me.world))


ITEMS: dict[str, Callable[[int], Any]] = {
    "tuples": lambda number: (number, "a name", 0.5),
    "dicts": lambda number: {"id": number, "label": number % 3},
    "tensors": lambda number: torch.tensor(number),
    "dicts of tensors": lambda number: {"id": torch.tensor(number), "picture": torch.zeros(2, 2)},
}


@right(of=ITEMS)
def items_of_a_stream(me: Me, made: Callable[[int], Any]) -> None:
    for how in ({}, {"num_workers": 2}):
        train = me.patch(loader(users.Stream(made=made), **how))
        for _ in range(2):
            me.train(train)


@case("right")  # which may be said once
def items_without_a_stable_hash(me: Me) -> None:
    train = me.patch(loader(users.Stream(made=users.Opaque)))
    for _ in range(3):
        me.train(train)


@right()
def a_stream_is_augmented(me: Me) -> None:
    train = me.patch(loader(users.Stream(480, made=lambda number: (number, f"{number}.png", random.random()))))
    for _ in range(2):
        me.train(train, range(480))


def keyed(number: int, **made: Any) -> dict[str, Any]:
    return {"__key__": f"{number}", "id": number, **made}


SOMETIMES: dict[str, Callable[[random.Random, int], Any]] = {
    "a text": lambda own, number: keyed(number, text=f"{number}"[: None if own.random() > 0.1 else 1]),
    "a label": lambda own, number: keyed(number, label=number % 10 if own.random() > 0.1 else -1),
    "a flip": lambda own, number: (torch.tensor(number), {"file": f"{number}.png", "flipped": own.random() < 0.1}),
}


@right(of=SOMETIMES)
def some_items_of_a_stream_are_augmented(me: Me, made: Callable[[random.Random, int], Any]) -> None:
    for _ in range(2):
        train = me.patch(loader(users.Stream(480, made=partial(made, random.Random(time.time_ns())))))
        for _ in range(2):
            me.train(train, range(480))


class SaysSo(users.ShardsItself):
    """It shards itself, and says so."""

    is_ddp_aware = True


@right(of={"the group": users.rank_of_group, "the environment": users.rank_of_environment})
def a_stream_that_shards_itself_says_so(me: Me, ask: Callable[[], int]) -> None:
    train = me.patch(loader(SaysSo(ask)))
    for _ in range(2):
        me.train(train)


@right()
def all_skip_the_same_items_of_a_stream(me: Me) -> None:
    stream = users.Stream(480)
    train = me.patch(loader(stream))
    stream.skips = tuple(range(300, 312))
    for _ in range(2):
        me.train(train, set(range(480)) - set(stream.skips))


@right(of={"at once": True, "one after the other": False})
def two_loops_share_a_loader(me: Me, at_once: bool) -> None:
    train = me.patch(loader(shuffle=True, generator=users.seeded()))
    for _ in range(2):
        epochs = me.begin(), me.begin()
        if at_once:
            for batches in zip(train, train, strict=True):
                for epoch, batch in zip(epochs, batches, strict=True):
                    epoch.take(batch)
        else:
            for epoch in epochs:
                for batch in train:
                    epoch.take(batch)


@right(of=REMEDIED)
def all_look_and_all_break(me: Me, make: Callable[[], DataLoader[Any]]) -> None:
    train = me.patch(make())
    next(iter(train))
    me.train(train)
    me.train(train, most=1)
    list(islice(train, 2))
    for epoch in (7, 8):
        train.set_epoch(epoch)
        me.train(train)


@right(of=SHUFFLERS)
def all_repeat_an_epoch(me: Me, make: Callable[[], DataLoader[Any]]) -> None:
    train = me.patch(make())
    came = []
    for _ in range(2):
        train.set_epoch(0)
        came.append(me.train(train).samples)
    me.train(train)
    if came[0] != came[1]:
        raise AssertionError(f"epoch 0 was {came[0]}, then {came[1]}")


@right(of=SHUFFLERS, world_sizes=(3,))
def two_ranks_begin_and_three_resume(me: Me, make: Callable[[], DataLoader[Any]]) -> None:
    both = dist.new_group([0, 1])
    epoch = me.begin(is_uneven=True)
    states: list[Any] = [None]
    if me.rank < 2:
        train = patch_dataloader_to_ddp(make(), process_group=both, seed=1)
        for batch in islice(train, 3):
            epoch.take(batch)
        states = [loader_state(train)]
    dist.broadcast_object_list(states)
    train = me.patch(make(), seed=1)
    restore_loader(train, states[0])
    for batch in train:
        epoch.take(batch)
    me.train(train)


@right()
def one_rank_asks_and_copies(me: Me) -> None:
    raw = loader(shuffle=True, generator=users.seeded())
    train = me.patch(raw)
    for _ in range(2):
        for _ in me.step(me.begin(), train):
            if me.rank == 0:
                assert len(train) == N // SIZE // me.world
                assert repr(train)
                loader_state(train)
                copy.copy(train)
                train.dataset[random.randrange(N)]


@right()
def one_rank_looks_at_batches_to_validate_on(me: Me) -> None:
    train, val = (me.patch(loader(shuffle=shuffle)) for shuffle in (True, False))
    for _ in range(3):
        me.train(train)
        for _ in range(me.rank):
            next(iter(val))
        list(val)


@right()
def epochs_have_other_lengths_alike(me: Me) -> None:
    train = me.patch(loader(sampler=users.Curriculum(12)))
    for limit in (12, 24, 48):
        train.sampler.set_limit(limit)
        me.train(train, range(limit))


@right()
def a_shuffled_loader_of_many_epochs(me: Me) -> None:
    train = me.patch(loader(shuffle=True))
    for _ in range(30):
        me.train(train)


@right(of={"often the same": 1000, "seldom": 10000})
def a_sampler_of_each_rank_draws_with_replacement(me: Me, n: int) -> None:
    train = me.patch(loader(range(n), sampler=users.DrawsItsPart(n, me.rank, me.world)))
    for _ in range(12):
        me.train(train, range(n), most=N, padding=N * me.world)


@right(of={"eight": 8, "more": 20})
def samples_that_come_several_times_are_sharded_already(me: Me, n: int) -> None:
    data: ConcatDataset[int] = ConcatDataset([users.Rows(range(n))] * 3)
    train = me.patch(loader(data, sampler=DistributedSampler(data)))
    for epoch in range(4):
        train.sampler.set_epoch(epoch)
        me.train(train, list(range(n)) * 3, padding=2)


@right(together="epochs")
def parts_of_other_lengths_are_kept(me: Me) -> None:
    train = me.patch(loader(users.HandedOut(me.rank, me.world)), uneven="keep")
    for _ in range(3):
        me.train(train, is_uneven=True)


def on_rank(rank: int, world_size: int) -> dict[str, Run]:
    return run_cases(rank, world_size, CASES)


@pytest.mark.parametrize("world_size", [soaked(2), 3])
def test_nothing_is_told_where_nothing_is_lost(world_size: int) -> None:
    assert not disappointed(run_ranks(on_rank, world_size), CASES)
