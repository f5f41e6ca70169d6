"""What differs between ranks after the patch, so that samples would be lost: a rank tells within that epoch."""

import random
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
import users
from after_patch import Case, Me, Run, cases_of, disappointed, run_cases
from quick import run_ranks, soaked
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset, WeightedRandomSampler
from users import SHUFFLERS, SIZE, N, loader

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import StreamLengthWarning

CASES: dict[str, Case] = {}
case = cases_of(CASES)
NOT_YET: dict[str, Case] = {}  # docs/reliability.md says so, too
case_not_yet = cases_of(NOT_YET)
LONG = 480  # more than the first items that are compared

LEARNERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "samples": lambda: loader(sampler=users.Learns()),
    "batches of alike losses": lambda: loader(batch_sampler=users.AlikeBatches()),
}


@case("told", of=LEARNERS)
def a_sampler_learns_from_its_own_rank(me: Me, make: Callable[[], DataLoader[Any]]) -> None:
    raw = make()
    train = me.patch(raw)
    learner: Any = raw.sampler if isinstance(raw.sampler, users.Learns) else raw.batch_sampler
    for _ in range(3):
        for indices in me.step(me.begin(), train):
            for index in indices:
                learner.losses[index] = random.random()


SHARED: dict[str, dict[str, Any]] = {
    "batches": {"share": "batches"},
    "within batches": {"share": "within_batches"},
    "costs": {"cost": [1 + number % 7 for number in range(N)]},
    "contiguous": {"layout": "contiguous"},
}


@case("told", of=SHARED)
def a_sampler_learns_and_is_shared_otherwise(me: Me, options: dict[str, Any]) -> None:
    raw = loader(sampler=users.Learns())
    train = me.patch(raw, **options)
    for _ in range(3):
        for indices in me.step(me.begin(padding=N), train):
            for index in indices:
                raw.sampler.losses[index] = random.random()  # type: ignore[attr-defined]  # it is the one above


@case("told", of={"on the sampler": False, "through the loader": True})
def weights_follow_the_losses_of_a_rank(me: Me, through: bool) -> None:
    raw = loader(sampler=WeightedRandomSampler([1.0] * N, N, replacement=False, generator=users.seeded()))
    train = me.patch(raw)
    for _ in range(3):
        me.train(train)
        sampler: Any = (train if through else raw).sampler
        sampler.weights = torch.rand(N, dtype=torch.double) + 0.1


@case("told")
def hard_samples_come_once_more(me: Me) -> None:
    raw = loader(sampler=users.Collects())
    train = me.patch(raw)
    for _ in range(3):
        for indices in me.step(me.begin(range(N), padding=N), train):
            raw.sampler.hard += indices[: me.rank]  # type: ignore[attr-defined]  # it is the one above


ENTROPIC: dict[str, Callable[[], DataLoader[Any]]] = {
    "entropy": lambda: loader(sampler=users.Entropic()),
    "time": lambda: loader(sampler=users.Entropic(users.by_time)),
    "an iterator": lambda: loader(sampler=users.Iterates()),
    "workers": lambda: loader(sampler=users.Entropic(), num_workers=1),
}


@case("told", of=ENTROPIC)
def an_order_draws_on_entropy_later(me: Me, make: Callable[[], DataLoader[Any]]) -> None:
    train = me.patch(make())
    for _ in range(3):
        me.train(train)


@case("told", of=ENTROPIC, together="never")
def an_order_draws_on_entropy_later_and_nobody_waits(me: Me, make: Callable[[], DataLoader[Any]]) -> None:
    train = me.patch(make())
    for _ in range(3):
        for _ in me.step(me.begin(), train):
            time.sleep(0.003 * me.rank)


@case("told", of={"patched": {}, "shuffled": {"shuffle": True}, "workers": {"num_workers": 1}})
def rows_are_shuffled_by_hand(me: Me, how: dict[str, Any]) -> None:
    dataset = users.Rows()
    train = me.patch(loader(dataset, **how))
    for _ in range(3):
        random.shuffle(dataset.rows)
        me.train(train)


@case("told")
def rows_are_shuffled_by_hand_under_a_leader(me: Me) -> None:
    dataset = users.Rows()
    train = me.patch(loader(dataset), order="leader")
    for _ in range(3):
        me.train(train)
        random.shuffle(dataset.rows)


@case("told")
def files_are_listed_anew(me: Me) -> None:
    raw = loader(users.Annotated(list(range(N))), shuffle=True)
    train = me.patch(raw)
    for _ in range(3):
        me.train(train)
        train.dataset.ann["files"] = [f"{number}.png" for number in random.sample(range(N), N)]


@case("told", of={"shuffled": True, "in order": False})
def a_dataset_grows_by_more_on_one_rank(me: Me, shuffle: bool) -> None:
    dataset = users.Rows()
    train = me.patch(loader(dataset, shuffle=shuffle))
    for _ in range(3):
        me.train(train, list(dataset.rows), padding=N)
        dataset.rows += range(len(dataset), len(dataset) + 6 * (1 + me.rank))


@case("told")
def bad_rows_are_dropped_on_one_rank(me: Me) -> None:
    dataset = users.Rows()
    train = me.patch(loader(dataset))
    me.train(train)
    if me.rank:
        del dataset.rows[7]
    for _ in range(2):
        me.train(train)


@case("told", of=users.NAMED)
def files_are_listed_by_the_first_item(me: Me, made: Callable[[int], Any]) -> None:
    train = me.patch(loader(users.Lazy(made)))
    for _ in range(2):
        me.train(train)


@case("told", of=users.NAMED)
def rows_that_name_samples_are_shuffled(me: Me, made: Callable[[int], Any]) -> None:
    dataset = users.Lazy()
    dataset.files = list(map(made, range(N)))
    train = me.patch(loader(dataset, shuffle=True))
    for _ in range(3):
        me.train(train)
        random.shuffle(dataset.files)


@case("told", of=users.KEPT)
def files_are_kept_elsewhere(me: Me, how: Any) -> None:
    kept, found = how
    train = me.patch(loader(users.Named(kept, found, [f"{number}.png" for number in random.sample(range(N), N)])))
    for _ in range(2):
        me.train(train)


@case("told")
def files_of_several_samples_are_shuffled(me: Me) -> None:
    dataset = users.Crops([f"{number}.png" for number in range(N // 2)])
    train = me.patch(loader(dataset, shuffle=True))
    for _ in range(3):
        me.train(train)
        random.shuffle(dataset.files)


@case("told")
def one_of_several_datasets_is_shuffled(me: Me) -> None:
    parts = [users.Lazy(), users.Lazy()]
    for place, part in enumerate(parts):
        part.files = [f"{number}.png" for number in range(place * N, (place + 1) * N)]
    train = me.patch(loader(ConcatDataset(parts), shuffle=True))
    for _ in range(3):
        me.train(train, range(2 * N))
        random.shuffle(parts[1].files or [])


@case("told")
def another_part_of_the_files_is_chosen(me: Me) -> None:
    dataset = users.Lazy()
    dataset.all = [f"{number}.png" for number in range(N)]  # type: ignore[attr-defined]  # as many
    dataset.files = list(dataset.all)  # type: ignore[attr-defined]
    train = me.patch(loader(dataset))
    for _ in range(3):
        me.train(train)
        dataset.files = random.sample(dataset.files, N)


def streamed(me: Me, epochs: int, workers: int, **on_one_rank: Any) -> None:
    """Train on a stream of numbers that rank 1 reads in another way."""
    stream = users.Stream(LONG)
    train = me.patch(loader(stream, num_workers=workers))
    if me.rank == 1:
        vars(stream).update(on_one_rank)
    for _ in range(epochs):
        me.train(train, range(LONG))


@case("told", of={"no workers": 0, "workers": 2})
def one_rank_skips_an_item_in_the_last_epoch(me: Me, workers: int) -> None:
    streamed(me, 1, workers, skips=(301,))


@case("told")
def one_rank_skips_the_last_item(me: Me) -> None:
    streamed(me, 1, 0, skips=(LONG - 1,))


@case("told")
def one_rank_skips_items_of_every_epoch(me: Me) -> None:
    streamed(me, 2, 1, skips=(5, 300))


@case("told", of={"steps": 0, "workers": 2})
def one_rank_takes_a_lost_connection_for_the_end(me: Me, workers: int) -> None:
    streamed(me, 2, workers, ends=300)


@case("told")
def one_rank_takes_a_lost_connection_for_the_end_in_the_last_epoch(me: Me) -> None:
    streamed(me, 1, 0, ends=300)


@case("told", together="epochs")
def one_rank_takes_a_lost_connection_for_the_end_and_ranks_meet_after_it(me: Me) -> None:
    streamed(me, 1, 0, ends=300)


@case("told", world_sizes=(2,))
def one_rank_takes_a_lost_connection_for_the_end_where_items_load_slowly(me: Me) -> None:
    stream = users.Stream()
    train = me.patch(loader(stream))
    if me.rank == 1:
        stream.ends = 3 * SIZE * me.world
    else:
        stream.delay_s = 0.2
    me.train(train)


@case("told")
def one_rank_gets_an_item_twice(me: Me) -> None:
    streamed(me, 1, 0, repeats=300)


@case("told")
def one_rank_skips_one_item_and_gets_another_twice(me: Me) -> None:
    streamed(me, 1, 0, skips=(290,), repeats=350)


ASKS = {"the group": users.rank_of_group, "the environment": users.rank_of_environment}


@case("told", of=ASKS)
def a_stream_shards_itself(me: Me, ask: Callable[[], int]) -> None:
    train = me.patch(loader(users.ShardsItself(ask)))
    for _ in range(2):
        me.train(train)


@case("told")
def a_stream_shards_itself_in_workers(me: Me) -> None:
    train = me.patch(loader(users.ShardsItself(users.rank_of_environment), num_workers=1))
    me.train(train)


@case("told", of={"no workers": 0, "workers": 1})
def a_stream_was_made_for_its_rank(me: Me, workers: int) -> None:
    train = me.patch(loader(users.MadeForItsRank(), num_workers=workers))
    me.train(train)


@case("told")
def a_stream_is_made_for_its_rank_in_workers(me: Me) -> None:
    train = me.patch(loader(users.MadeInWorkers(), num_workers=2, worker_init_fn=users.make_for_its_rank))
    me.train(train)


@case("told", of={"shuffled": True, "in order": False})
def a_worker_dies_and_the_user_goes_on(me: Me, shuffle: bool) -> None:
    dataset = users.Dies(is_alive=me.rank != 1)
    train = me.patch(loader(dataset, shuffle=shuffle, num_workers=1))
    for _ in range(3):
        epoch = me.begin()
        with suppress(RuntimeError):
            for _ in me.step(epoch, users.told_of_deaths(train)):
                pass
        dataset.is_alive = True


# More in its spirit.


@case("told", of=SHUFFLERS)
def every_rank_sets_another_epoch(me: Me, make: Callable[[], DataLoader[Any]]) -> None:
    train = me.patch(make())
    for epoch in range(2):
        train.set_epoch(epoch + me.rank)
        me.train(train)


@case("told", of=SHUFFLERS)
def one_rank_breaks(me: Me, make: Callable[[], DataLoader[Any]]) -> None:
    train = me.patch(make())
    me.train(train)
    epoch = me.begin()
    for number, _ in enumerate(me.step(epoch, train), 1):
        if me.rank == 1 and number == 2:
            break
    me.train(train)


@case("right or told", of=SHUFFLERS)
def one_rank_looks_later_without_steps(me: Me, make: Callable[[], DataLoader[Any]]) -> None:
    train = me.patch(make())
    me.train(train)
    if me.rank == me.world - 1:
        list(islice(train, 2))
    me.train(train)


@case("told", of=SHUFFLERS)
def one_rank_goes_back(me: Me, make: Callable[[], DataLoader[Any]]) -> None:
    train = me.patch(make())
    for epoch in range(3):
        if me.rank == 0 and epoch == 2:
            train.set_epoch(0)
        me.train(train)


@case("told")
def every_rank_seeds_its_generator_anew(me: Me) -> None:
    raw = loader(shuffle=True, generator=users.seeded())
    train = me.patch(raw)
    me.train(train)
    raw.generator.manual_seed(me.rank)
    me.train(train)


@case("right")
def every_rank_seeds_a_generator_of_pythons_anew(me: Me) -> None:
    sampler = users.Shuffles(random.Random(3))
    train = me.patch(loader(sampler=sampler))
    me.train(train)
    sampler.rng.seed(me.rank)
    me.train(train)


@case("told")
def every_rank_chooses_its_part_later(me: Me) -> None:
    rows: Any = range(N)
    subset: Subset[int] = Subset(rows, list(range(N)))
    train = me.patch(loader(subset, shuffle=True))
    me.train(train)
    train.dataset.indices = list(range(me.rank, N, me.world)) * me.world
    me.train(train)


@case("told")
def one_rank_is_further_in_its_curriculum(me: Me) -> None:
    train = me.patch(loader(sampler=users.Curriculum()))
    me.train(train, range(24))
    train.sampler.set_limit(30 if me.rank else 36)
    me.train(train, range(36), padding=36)


@case("told")
def one_rank_makes_larger_batches(me: Me) -> None:
    train = me.patch(loader(batch_sampler=users.Batches(random.Random(3))))
    me.train(train)
    if me.rank:
        train.batch_sampler.most = 8
    me.train(train)


@case("told")
def a_stream_is_shuffled_by_entropy_later(me: Me) -> None:
    train = me.patch(loader(users.Reshuffled()))
    for _ in range(3):
        me.train(train)


@case("told")
def a_long_stream_is_shuffled_by_entropy_later(me: Me) -> None:
    train = me.patch(loader(users.Reshuffled(10 * LONG)))
    for _ in range(2):
        me.train(train, range(10 * LONG))


@case("told", of={"no workers": 0, "workers": 1})
def every_rank_sets_another_epoch_of_a_stream(me: Me, workers: int) -> None:
    train = me.patch(loader(users.EpochStream(), num_workers=workers))
    for epoch in range(2):
        train.dataset.set_epoch(epoch + me.rank)
        me.train(train, range(1000 * epoch, 1000 * epoch + N))


@case("told")
def one_rank_reads_a_longer_stream(me: Me) -> None:
    train = me.patch(loader(users.Stream()))
    me.train(train)
    train.dataset.n = N + 24 * me.rank
    me.train(train, range(N), padding=N)


@case("told")
def one_rank_shuffles_the_end_of_a_stream(me: Me) -> None:
    streamed(me, 1, 0, shuffled_from=300)


@case("told")
def one_rank_leaves_each_epoch_of_what_is_sharded_already(me: Me) -> None:
    data: Any = range(N)
    train = me.patch(loader(sampler=DistributedSampler(data)))
    for epoch in range(3):
        train.sampler.set_epoch(epoch)
        for number, _ in enumerate(me.step(me.begin(), train), 1):
            if me.rank == 1 and number == 2:
                break


@case("told", together="epochs")
def parts_of_other_lengths(me: Me) -> None:
    train = me.patch(loader(users.HandedOut(me.rank, me.world)))
    for _ in range(3):
        me.train(train)


class Warned(NamedTuple):
    """What a rank was given of parts of other lengths, and warned of."""

    steps: list[int]
    texts: list[str]


def says_that_it_is_sharded(rank: int, world_size: int) -> Warned:
    train = patch_dataloader_to_ddp(loader(users.HandedOut(rank, world_size, says_so=True)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = [len(list(train)) for _ in range(3)]
    return Warned(steps, [str(one.message) for one in caught if one.category is StreamLengthWarning])


def test_unequal_parts_of_what_says_that_it_is_sharded_are_a_warning() -> None:
    ranks = run_ranks(says_that_it_is_sharded, 2)
    assert [of_rank.steps for of_rank in ranks] == [[8] * 3, [4] * 3]
    texts = [text for of_rank in ranks for text in of_rank.texts]
    assert texts
    assert all("rank 1" in text for text in texts)
    assert max(len(of_rank.texts) for of_rank in ranks) == 1


@case_not_yet("right or told", of={"lists": False, "iterates": True})
def one_rank_makes_a_whole_pass_alone(me: Me, iterates: bool) -> None:
    train = me.patch(loader(shuffle=True))
    me.train(train)
    if me.rank == 0:
        list(train if iterates else train.sampler)
    for _ in range(2):
        me.train(train)


def on_rank_not_yet(rank: int, world_size: int) -> dict[str, Run]:
    return run_cases(rank, world_size, NOT_YET)


@pytest.mark.xfail(strict=False, reason="a rank that made a whole pass alone looks like a fast one")
def test_what_nobody_tells_yet() -> None:
    assert not disappointed(run_ranks(on_rank_not_yet, 2), NOT_YET)


def on_rank(rank: int, world_size: int) -> dict[str, Run]:
    return run_cases(rank, world_size, CASES)


@pytest.mark.parametrize("world_size", [soaked(2), 3])
def test_what_differs_between_ranks_is_told_within_the_epoch(world_size: int) -> None:
    assert not disappointed(run_ranks(on_rank, world_size), CASES)
