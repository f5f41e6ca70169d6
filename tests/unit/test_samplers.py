"""The samplers of the field: exact counts, uniform draws, whole batches on every rank, any epoch, any resumed pass."""

import array
import copy
import json
import pickle
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from messages import raises
from quick import soaked
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from zoo import GROUPS, LABELS, LENGTHS, EpochSeeded, Indices, N, Varying, as_it_is, loader, pk_batches

from ddp_patch import DDPBatchSamplerWrapper, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import SamplerError, StreamLengthWarning
from ddp_patch.orders.orders import has_order
from ddp_patch.samplers import (
    GroupedBatchSampler,
    IterationBatchSampler,
    LengthBucketBatchSampler,
    PKBatchSampler,
    ScalableRandomSampler,
    WeightedClassSampler,
    WindowDataset,
    WindowSampler,
    aspect_ratio_groups,
    classes,
)
from ddp_patch.samplers.lengths import LengthBatches

MANY = 2000
BOUND = 5.0  # standard deviations, as in test_permutation.py


def generator(seed: int = 11) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def keys_drawn(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The list to which the sampler adds, from now on, the key of each order that it draws."""
    drawn: list[Any] = []
    order = sampler._order

    def noted(key: Any) -> Any:
        drawn.append(key)
        return order(key)

    monkeypatch.setattr(sampler, "_order", noted)
    return drawn


# Each takes seed= or generator=, or neither.
MAKE: dict[str, Callable[..., Any]] = {
    "weighted": lambda **randomness: WeightedClassSampler(LABELS, [1, 1, 2], 31, **randomness),
    "P x K": pk_batches,
    "P x K, more batches": partial(pk_batches, num_batches=9),
    "lengths": lambda **randomness: LengthBucketBatchSampler(LENGTHS, max_tokens=20, **randomness),
    "windows": lambda **randomness: WindowSampler(N, 3, **randomness),
    "scalable": lambda **randomness: ScalableRandomSampler(N, **randomness),
    "grouped": lambda **randomness: GroupedBatchSampler(ScalableRandomSampler(N, **randomness), LABELS, 3),
}
every_sampler = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


# What all of them have in common.


RANDOMNESS: list[Callable[[], dict[str, Any]]] = [dict, lambda: {"seed": 5}, lambda: {"generator": generator()}]


@every_sampler
@pytest.mark.parametrize("randomness", RANDOMNESS)
def test_the_length_is_that_of_a_pass_and_passes_differ(make: Callable[..., Any], randomness: Any) -> None:
    torch.manual_seed(3)
    sampler = make(**randomness())
    assert has_order(sampler) == ("seed" in randomness())
    passes = []
    for _ in range(3):
        said = len(sampler)
        passes.append(list(sampler))
        assert len(passes[-1]) == said
    assert passes[0] != passes[1] != passes[2] != passes[0]


@every_sampler
def test_with_a_seed_an_epoch_follows_from_its_number(make: Callable[..., Any]) -> None:
    sampler = make(seed=5)
    passes = [list(sampler) for _ in range(3)]
    torch.manual_seed(1)
    for seed in (5, np.int64(5), torch.tensor(5)):
        other = make(seed=seed)
        for epoch in (2, 0, 0, 1):
            other.set_epoch(epoch)
            assert other.epoch == epoch
            assert list(other) == passes[epoch]
            found = other.items_at(np.arange(len(other)), epoch)
            assert (found.tolist() if isinstance(found, np.ndarray) else found) == passes[epoch]
        next(iter(other))
        assert json.loads(json.dumps(other.state_dict())) == other.state_dict()
    assert list(make(seed=6)) != passes[0]


@every_sampler
def test_a_pass_that_is_left_is_followed_by_the_next(make: Callable[..., Any]) -> None:
    sampler = make(seed=5)
    passes = [list(sampler) for _ in range(2)]
    other = make(seed=5)
    assert next(iter(other)) == passes[0][0]
    assert list(copy.deepcopy(other)) == list(pickle.loads(pickle.dumps(other))) == passes[1]  # noqa: S301 - our own
    iter(other)  # an iterator that is never drawn from is no epoch
    assert list(other) == passes[1]


@every_sampler
def test_without_a_seed_a_pass_draws_one_number(make: Callable[..., Any]) -> None:
    """torch's RandomSampler does so too, so whoever draws next draws the same numbers."""
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()
    after = torch.rand(2)
    torch.manual_seed(3)
    sampler = make()
    iterator = iter(sampler)
    first = list(iterator)
    assert torch.equal(torch.rand(2), after)
    torch.manual_seed(3)
    assert list(sampler) == first


@every_sampler
def test_a_generator_is_drawn_from_and_nothing_else(make: Callable[..., Any]) -> None:
    passes = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        sampler = make(generator=generator())
        passes.append([list(sampler) for _ in range(2)])
        assert torch.equal(torch.get_rng_state(), before)
    assert passes[0] == passes[1]
    assert passes[0][0] != passes[0][1]


@every_sampler
def test_an_epoch_is_drawn_once(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = make(seed=5)
    keyed = getattr(sampler, "sampler", sampler)
    drawn = keys_drawn(keyed, monkeypatch)
    for position in range(len(sampler)):
        sampler.items_at(np.array([position]), 3)
    batched = {"batch_sampler": sampler} if isinstance(next(iter(make(seed=5))), list) else {"sampler": sampler}
    patched = patch_dataloader_to_ddp(loader(**batched), rank=1, num_replicas=2)
    drawn.clear()
    list(patched)
    list(patched)
    assert len(drawn) <= 2


@every_sampler
@pytest.mark.parametrize("randomness", RANDOMNESS)
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("taken", [0, 1, 2, None])
def test_a_pass_goes_on_where_its_state_was_taken(
    make: Callable[..., Any], randomness: Any, before: int, taken: int | None
) -> None:
    torch.manual_seed(3)
    sampler = make(**randomness())
    for _ in range(before):
        list(sampler)
    iterator = iter(sampler)
    list(islice(iterator, taken))
    state = sampler.state_dict()
    ambient = torch.get_rng_state()
    rest = list(iterator) if taken else []  # a pass that nobody drew from has not begun
    expected = [rest, list(sampler), list(sampler)][0 if taken else 1 :]

    again = make(**randomness())
    again.load_state_dict(state)
    assert comparable(again.state_dict()) == comparable(state)
    torch.set_rng_state(ambient)
    assert [list(again) for _ in expected] == expected


def comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: comparable(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, torch.Tensor) else state


@every_sampler
def test_setting_the_epoch_forgets_a_resumed_pass_of_another(make: Callable[..., Any]) -> None:
    sampler = make(seed=5)
    passes = [list(sampler) for _ in range(3)]
    sampler.set_epoch(1)
    iterator = iter(sampler)
    next(iterator)
    state = sampler.state_dict()
    again = make(seed=5)
    again.load_state_dict(state)
    again.set_epoch(1)  # a training script that resumes in epoch 1 does so
    assert list(again) == passes[1][1:]
    again.load_state_dict(state)
    again.set_epoch(2)
    assert list(again) == passes[2]


@every_sampler
def test_a_pass_that_is_running_says_what_the_next_one_follows_from(make: Callable[..., Any]) -> None:
    """A patched loader asks between its passes, and the sampler it wraps may then be in one that was left."""
    sampler = make(seed=5)
    next(iter(sampler))
    state = sampler.state_between_passes()
    assert state["taken"] == 0
    again = make(seed=5)
    again.load_state_dict(state)
    assert list(again) == list(sampler)
    again.load_state_dict(first := sampler.state_dict() | {"taken": 1})
    assert again.state_between_passes() == first  # that pass is still to come


@every_sampler
def test_a_state_with_values_that_cannot_be_is_refused_and_changes_nothing(make: Callable[..., Any]) -> None:
    sampler = make(seed=5)
    next(iter(sampler))
    state = sampler.state_dict()
    again = make(seed=5)
    again.load_state_dict(state)
    for taken in (-1, 1.0, "1", None, True):
        with raises(SamplerError, f"taken={taken!r}", "state_dict()"):
            again.load_state_dict(state | {"taken": taken})
    with raises(SamplerError, ("state of seed=5", "has seed=6"), "seed"):
        make(seed=6).load_state_dict(state)
    assert again.state_dict() == state


# Class-balanced.


def as_each_type(values: list[int]) -> list[Any]:
    return [values, tuple(values), np.array(values), np.array(values, np.int8), torch.tensor(values)]


def test_labels_of_every_sequence_give_the_same_stream() -> None:
    drawn = [list(WeightedClassSampler(given, [1, 1, 2], 31, seed=5)) for given in as_each_type(LABELS)]
    named: list[Any] = [("a", "b", "c")[label] for label in LABELS]
    by_name: dict[str, Any] = {"c": 2, "b": 1.0, "a": np.float32(1)}
    both: list[Any] = [named, np.array(named), np.array(named, object)]
    drawn += [list(WeightedClassSampler(labels, by_name, 31, seed=5)) for labels in both]
    scalars: list[Any] = [torch.tensor(label) for label in LABELS]
    drawn.append(list(WeightedClassSampler(scalars, torch.tensor([1, 1, 2]), 31, seed=5)))
    drawn.append(list(WeightedClassSampler(LABELS, np.array([0.25, 0.25, 0.5]), 31, seed=5)))
    assert all(indices == drawn[0] for indices in drawn)
    assert all(type(index) is int for index in drawn[0])


def test_labels_of_other_types_of_numbers_are_told_apart() -> None:
    of_half = WeightedClassSampler(torch.tensor([1, 0, 1], dtype=torch.bfloat16), [1, 1], 4, seed=5)
    assert of_half.counts == {0.0: 2, 1.0: 2}
    days = np.array(["2020-01-01", "2021-01-01"], "M8[ns]")
    for labels in (days, list(days)):
        assert WeightedClassSampler(labels, {days[0]: 1, days[1]: 3}, 4).counts == {days[0]: 1, days[1]: 3}
    assert list(WeightedClassSampler([0, 1], {torch.tensor(0): 1, np.int8(1): 1}, 4).counts) == [0, 1]


def test_labels_are_told_apart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    unique = np.unique

    def noted(*args: Any, **options: Any) -> Any:
        told.append(args)
        return unique(*args, **options)

    monkeypatch.setattr(np, "unique", noted)
    labels = np.array(LABELS)
    for number, make in enumerate((WeightedClassSampler.upsample, WeightedClassSampler.downsample), start=1):
        make(labels)
        assert len(told) == number
    WeightedClassSampler.n_per_class(labels, 3)
    assert len(told) == 3


@pytest.mark.parametrize("make", [MAKE["weighted"], MAKE["P x K"], MAKE["windows"], MAKE["scalable"]])
def test_what_is_looked_up_has_64_bits(make: Callable[..., Any]) -> None:
    assert make(seed=1).items_at(np.arange(2), 0).dtype == np.int64


def test_labels_that_cannot_be_compared_are_told_apart_too() -> None:
    labels: list[Any] = ["a", None, (1, 2), "a", None]
    sampler = WeightedClassSampler(labels, {"a": 1, None: 1, (1, 2): 2}, 8, seed=5)
    assert sampler.counts == {"a": 2, None: 2, (1, 2): 4}
    assert Counter(labels[index] for index in sampler) == sampler.counts


@pytest.mark.parametrize(
    ("weights", "length", "counts"),
    [
        # quotas 10/3 each: the first is rounded up
        ([1, 1, 1], 10, [4, 3, 3]),
        # 1, 2, 7: exact, although no double holds these weights
        ([0.1, 0.2, 0.7], 10, [1, 2, 7]),
        # 0.7, 2.1, 4.2
        ([1, 3, 6], 7, [1, 2, 4]),
        # a class that is not drawn
        ([0, 1, 1], 5, [0, 3, 2]),
        # scales at the end of the doubles
        ([1e308, 1e308, 2e307], 11, [5, 5, 1]),
        ([5e-324, 5e-324, 0], 4, [2, 2, 0]),
        # numbers that no double holds
        ([Fraction(1, 3), Fraction(1, 3), Decimal("0.1")], 23, [10, 10, 3]),
        ([10**400, 10**400, 1], 4, [2, 2, 0]),
    ],
)
def test_counts_are_those_of_the_largest_remainders(weights: Any, length: int, counts: list[int]) -> None:
    sampler = WeightedClassSampler(LABELS, weights, length, seed=0)
    assert list(sampler.counts.values()) == counts
    for _ in range(3):
        assert np.bincount([LABELS[index] for index in sampler], minlength=3).tolist() == counts


def test_counts_are_never_off_by_one() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        weights = rng.random(3) ** 4
        length = int(rng.integers(1, 100))
        counts = np.array(list(WeightedClassSampler(LABELS, weights, length).counts.values()))
        assert counts.sum() == length
        assert (abs(counts - length * weights / weights.sum()) < 1).all()


@pytest.mark.parametrize("length", [3, 20, 36, 37, 100])
def test_samples_of_a_class_come_alike_often(length: int) -> None:
    for seed in range(20):
        times = Counter(WeightedClassSampler(LABELS, [1, 1, 1], length, seed=seed))
        for label in range(3):
            of_label = [times[index] for index in range(N) if LABELS[index] == label]
            assert max(of_label) - min(of_label) <= 1


def test_which_samples_come_more_often_and_where_is_left_to_chance() -> None:
    # 11 draws of each: of 12 samples one is left out, of 7 four come twice, of 4 three come three times.
    orders = np.stack([list(WeightedClassSampler(LABELS, [1, 1, 1], 33, seed=seed)) for seed in range(MANY)])
    times = np.bincount(orders.ravel(), minlength=N)
    for label, size in enumerate([12, 7, 4]):
        share = (11 / size) % 1
        of_label = times[np.array(LABELS) == label]
        deviation = np.sqrt(MANY * share * (1 - share))
        assert (abs(of_label - MANY * 11 / size) < BOUND * deviation).all()
    classes = np.take(LABELS, orders)
    for label in range(3):  # a third at every position
        at_position = (classes == label).sum(axis=0)
        assert (abs(at_position - MANY / 3) < BOUND * np.sqrt(MANY * 2 / 9)).all()


def test_named_balances() -> None:
    assert WeightedClassSampler.upsample(LABELS).counts == {0: 12, 1: 12, 2: 12}
    assert set(WeightedClassSampler.upsample(LABELS)) == set(range(N))
    assert WeightedClassSampler.downsample(LABELS).counts == {0: 4, 1: 4, 2: 4}
    assert max(Counter(WeightedClassSampler.downsample(LABELS)).values()) == 1
    assert WeightedClassSampler.n_per_class(LABELS, 5).counts == {0: 5, 1: 5, 2: 5}
    seeded = WeightedClassSampler.n_per_class(torch.tensor(LABELS), 5, seed=3)
    assert list(seeded) == list(WeightedClassSampler(LABELS, [1, 1, 1], 15, seed=3))


# P x K.


def assert_even(batch: list[int], labels: npt.NDArray[Any], p: int, k: int) -> None:
    """Each of p labels has k instances, each as often as the others or once more."""
    assert sorted(Counter(labels[batch].tolist()).values()) == [k] * p
    sizes = np.bincount(labels)
    for index, times in Counter(batch).items():
        assert times in {k // sizes[labels[index]], -(-k // sizes[labels[index]])}


@pytest.mark.parametrize(
    ("sizes", "p", "k"),
    [
        *[([1, 2, 3, 4, 5, 6, 20], p, k) for p, k in ((1, 1), (2, 3), (3, 4), (4, 9), (7, 2))],
        *[([1, 7, 99, 100, 299, 300, 301, 5000], 4, k) for k in (100, 300)],
    ],
)
def test_batches_have_p_labels_of_k_and_an_epoch_every_label(sizes: list[int], p: int, k: int) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    sampler = PKBatchSampler(labels, p, k, seed=0)
    assert sampler.batch_size == p * k
    for _ in range(10):
        batches = list(sampler)
        assert len(batches) == len(sampler) == -(-len(sizes) // p)
        for batch in batches:
            assert_even(batch, labels, p, k)
        of_batch = [set(labels[batch].tolist()) for batch in batches]
        assert set.union(*of_batch) == set(range(len(sizes)))
        assert sum(map(len, of_batch[:-1])) == len(set().union(*of_batch[:-1]))  # once each but for the last batch


@pytest.mark.parametrize("most_compared", [256, 0])
@pytest.mark.parametrize(("size", "k"), [(5, 2), (9, 8), (5, 5), (3, 7), (64, 3)])
def test_instances_are_drawn_uniformly(size: int, k: int, most_compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, "_MOST_COMPARED", most_compared)
    labels = np.repeat(np.arange(40), size)
    times = np.zeros(size)
    pairs = np.zeros((size, size))
    epochs = 50
    for batch in chain.from_iterable(PKBatchSampler(labels, 40, k, seed=seed) for seed in range(epochs)):
        for row in np.reshape(batch, (40, k)) % size:
            times += np.bincount(row, minlength=size)
            if k < size:
                pairs[np.ix_(row, row)] += 1
    rows = 40 * epochs
    share = (k / size) % 1
    assert (abs(times - rows * k / size) <= BOUND * np.sqrt(rows * share * (1 - share))).all()
    if 1 < k < size:
        both = k * (k - 1) / size / (size - 1)  # the chance of any two to come together
        off = pairs[~np.eye(size, dtype=bool)]
        assert (abs(off - rows * both) <= BOUND * np.sqrt(rows * both * (1 - both))).all()


@pytest.mark.parametrize(("labels", "p", "in_one_epoch"), [(10, 4, 1), (10, 5, 1), (9, 4, 1), (12, 8, 1), (10, 3, 0)])
def test_labels_meet_each_other_alike_often(labels: int, p: int, in_one_epoch: bool) -> None:
    """However p and the number of labels go together: in many rounds of one epoch, and in many epochs."""
    if in_one_epoch:
        batches = list(PKBatchSampler(np.arange(labels), p, 1, num_batches=MANY, seed=0))
    else:
        batches = [batch for seed in range(MANY) for batch in PKBatchSampler(np.arange(labels), p, 1, seed=seed)]
    met = np.zeros((labels, labels))
    for batch in batches:
        met[np.ix_(batch, batch)] += 1
    share = p / labels
    assert (abs(np.diag(met) - len(batches) * share) < BOUND * np.sqrt(len(batches) * share * (1 - share))).all()
    both = p * (p - 1) / labels / (labels - 1)  # the chance of any two to be in a batch
    off = met[~np.eye(labels, dtype=bool)]
    assert (abs(off - len(batches) * both) < BOUND * np.sqrt(len(batches) * both * (1 - both))).all()


def test_labels_of_every_category_come_again_alike_often() -> None:
    """The last batch is filled up with labels that came before, which are no more often of a small category."""
    sizes = np.array([5, 5, 5, 26])
    category_of = np.repeat(np.arange(4), sizes)
    sampler = PKBatchSampler(np.arange(41), 4, 1, categories=category_of, max_categories=2, seed=0)
    again = np.zeros(41)
    for epoch in range(MANY):
        again += np.bincount(sampler.items_at(np.arange(11), epoch).ravel(), minlength=41) - 1
    share = 3 / 41  # 44 places for 41 labels
    assert (abs(again - MANY * share) < BOUND * np.sqrt(MANY * share * (1 - share))).all()


@pytest.mark.parametrize(
    ("p", "most", "rounds"),
    [(p, most, rounds) for p, most in ((4, 2), (4, 3), (3, 1), (5, 1), (6, 4), (2, 2)) for rounds in (1, 3)]
    + [(7, 9, 1)],
)
def test_batches_have_few_categories_and_each_round_every_label(p: int, most: int, rounds: int) -> None:
    category_of = np.random.default_rng(1).permutation(np.repeat(np.arange(5), [5, 6, 7, 11, 9]))
    labels = np.repeat(np.arange(38), 3)
    categories = [f"category {category}" for category in category_of[labels]]
    options: dict[str, Any] = {"categories": categories, "max_categories": most, "seed": 0}
    in_round = len(PKBatchSampler(labels, p, 2, **options))
    number = rounds * in_round + (rounds > 1)  # and a part of another round
    sampler = PKBatchSampler(labels, p, 2, num_batches=number if rounds > 1 else None, **options)
    for _ in range(30 // rounds):
        batches = list(sampler)
        assert len(batches) == len(sampler) == number
        for batch in batches:
            assert sorted(Counter(labels[batch].tolist()).values()) == [2] * p
            assert len({categories[index] for index in batch}) <= most
        parts = [batches[start : start + in_round] for start in range(0, rounds * in_round, in_round)]
        for one in parts:
            assert {int(labels[index]) for batch in one for index in batch} == set(range(38))
        assert len(set(map(str, parts))) == rounds


def test_categories_meet_others_in_each_epoch() -> None:
    labels = np.arange(40)
    sampler = PKBatchSampler(labels, 4, 1, categories=labels // 5, max_categories=2, seed=0)
    met = {frozenset(index // 5 for index in batch) for _ in range(200) for batch in sampler}
    assert len([pair for pair in met if len(pair) == 2]) == 8 * 7 / 2


# Groups.


@pytest.mark.parametrize("large", [2**62, sys.maxsize, 2**70])
def test_batches_may_be_larger_than_any_group(large: int) -> None:
    assert list(GroupedBatchSampler(range(7), "aabbaba", large)) == [[0, 1, 4, 6], [2, 3, 5]]
    assert list(GroupedBatchSampler(range(7), "aabbaba", large, drop_uneven=True)) == []
    for how in ("batch_size", "max_tokens"):
        batches: Any = LengthBucketBatchSampler([5, 1, 1], **{how: large}, seed=0)  # type: ignore[arg-type]  # either
        assert sorted(map(sorted, batches)) == [[0], [1, 2]]


def by_first(batches: list[list[int]], order: list[int]) -> bool:
    firsts = [order.index(batch[0]) for batch in batches]
    return firsts == sorted(firsts)


@pytest.mark.parametrize("drop_uneven", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 30])
def test_batches_are_of_one_group_in_the_samplers_order(batch_size: int, drop_uneven: bool) -> None:
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(N).tolist()
        sampler = GroupedBatchSampler(order, LABELS, batch_size, drop_uneven)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert by_first(batches, order)
        for batch in batches:
            assert len({LABELS[index] for index in batch}) == 1
            assert [order.index(index) for index in batch] == sorted(order.index(index) for index in batch)
        for label in range(3):
            expected = [index for index in order if LABELS[index] == label]
            whole = len(expected) // batch_size * batch_size if drop_uneven else len(expected)
            assert [index for batch in batches for index in batch if LABELS[index] == label] == expected[:whole]


class Once(RandomSampler):
    """A sampler of the user's."""


@pytest.mark.parametrize(
    "sampler",
    [
        range(N),
        torch.arange(N),
        SequentialSampler(Indices()),
        RandomSampler(Indices()),
        RandomSampler(Indices(), num_samples=7),
        RandomSampler(Indices(), replacement=True),
        RandomSampler(Indices(), replacement=True, generator=generator()),
        SubsetRandomSampler(range(3, 20)),
        WeightedRandomSampler(range(1, N + 1), 31),
        ScalableRandomSampler(N),
        WeightedClassSampler(LABELS, [1, 1, 2], 9),
        WeightedClassSampler(LABELS, [1, 1, 2], 9, seed=4),
        EpochSeeded(),
        Once(Indices(), replacement=True),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
@pytest.mark.parametrize("drop_uneven", [False, True])
def test_the_number_of_batches_is_known_before(sampler: Any, drop_uneven: bool) -> None:
    grouped = GroupedBatchSampler(sampler, GROUPS, 4, drop_uneven)
    for _ in range(10):
        said = len(grouped)
        iterator = iter(grouped)
        batches = list(islice(iterator, 1))
        assert len(grouped) == said or not batches  # while the pass is running
        assert len(batches + list(iterator)) == said


def test_telling_the_number_of_batches_draws_nothing() -> None:
    torch.manual_seed(3)
    states = torch.get_rng_state(), torch.Generator.get_state(given := generator())
    len(GroupedBatchSampler(Once(Indices(), replacement=True, generator=given), LABELS, 4))
    len(GroupedBatchSampler(Once(Indices(), replacement=True), LABELS, 4))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(given.get_state(), states[1])


class Loaded(Indices):
    """Too much to be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("copied")


def test_telling_the_number_of_batches_copies_no_dataset() -> None:
    assert len(GroupedBatchSampler(RandomSampler(Loaded(), num_samples=40), LABELS, 100)) == 3


def test_the_wrapped_samplers_epoch_is_set_through_it() -> None:
    grouped = GroupedBatchSampler(EpochSeeded(), LABELS, 3)
    grouped.set_epoch(4)
    assert grouped.epoch == 4
    expected = list(GroupedBatchSampler(np.random.default_rng(4).permutation(N), LABELS, 3))
    assert list(grouped) == expected
    assert GroupedBatchSampler(range(3), "abc", 1).epoch == 0
    assert not GroupedBatchSampler(range(3), "abc", 1).has_random_access


RESUMED: dict[str, Callable[[], Any]] = {
    "no state": lambda: range(N),
    "sequential": lambda: SequentialSampler(Indices()),
    "generator": lambda: RandomSampler(Indices(), generator=generator()),
    "generator, replacement": lambda: RandomSampler(Indices(), replacement=True, generator=generator()),
    "subset, generator": lambda: SubsetRandomSampler(range(20), generator=generator()),
    "epoch": EpochSeeded,
    "scalable": lambda: ScalableRandomSampler(N),
}


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("name", RESUMED)
def test_a_pass_over_other_samplers_goes_on_by_their_epoch_and_generators(name: str, before: int) -> None:
    sampler = GroupedBatchSampler(RESUMED[name](), LABELS, 3)
    for _ in range(before):
        list(sampler)
    sampler.set_epoch(4)
    list(islice(iterator := iter(sampler), 2))
    again = GroupedBatchSampler(RESUMED[name](), LABELS, 3)
    again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    again.set_epoch(4)  # a training script that resumes in epoch 4 does so
    torch.manual_seed(99)
    assert list(again) == list(iterator)


def test_a_pass_that_the_global_generators_decide_is_told_of_before_and_after_it() -> None:
    sampler = GroupedBatchSampler(Varying(), [0, 1, 2] * N, 3)
    for _ in range(2):
        assert sampler.state_dict()["taken"] == 0
        iterator = iter(sampler)
        next(iterator)
        with raises(SamplerError, ("Varying", "global generators"), "generator="):
            sampler.state_dict()
        assert sampler.state_between_passes()["taken"] == 0
        list(iterator)


def test_a_pass_that_has_ended_leaves_no_order_behind() -> None:
    sampler = GroupedBatchSampler(ScalableRandomSampler(N), LABELS, 3)
    list(sampler)
    assert not [value for value in vars(sampler).values() if isinstance(value, LengthBatches)]


def test_aspect_ratios_are_told_apart_at_the_edges() -> None:
    widths_of_half = torch.tensor([1.0, 4.0], dtype=torch.bfloat16)
    assert aspect_ratio_groups(widths_of_half, widths_of_half.flip(0)).tolist() == [0, 1]
    widths, heights = [1, 2, 3, 4, 8], [2, 2, 2, 2, 2]
    for given in (list, np.array, torch.tensor):
        assert aspect_ratio_groups(given(widths), given(heights)).tolist() == [0, 1, 1, 1, 1]
        assert aspect_ratio_groups(given(widths), given(heights), [0.5, 1.5, 2.5]).tolist() == [1, 1, 2, 2, 3]


# Lengths.


@pytest.mark.parametrize("max_padding", [0, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("how", [{"max_tokens": 300}, {"batch_size": 8}])
def test_batches_keep_to_the_budget_and_the_padding(how: Any, max_padding: float) -> None:
    lengths = np.random.default_rng(2).integers(1, 200, 1000)
    sampler = LengthBucketBatchSampler(lengths, **how, max_padding=max_padding, seed=0)
    passes = [list(sampler) for _ in range(3)]
    for batches in passes:
        assert len(batches) == len(sampler)
        assert sorted(chain.from_iterable(batches)) == list(range(1000))
        for batch in batches:
            of_batch = lengths[batch]
            assert of_batch.min() >= of_batch.max() * (1 - max_padding)
            assert len(batch) * of_batch.max() <= 300 if "max_tokens" in how else len(batch) <= 8
    assert [sorted(batches) for batches in passes] != sorted(passes)
    assert sorted(map(sorted, passes[0])) != sorted(map(sorted, passes[1]))  # others meet


def test_batches_are_as_large_as_the_budget_allows() -> None:
    lengths = np.repeat([10, 5], 1000)
    sizes = Counter(len(batch) for batch in LengthBucketBatchSampler(lengths, max_tokens=100))
    assert sizes == {10: 100, 20: 50}


@pytest.mark.parametrize("given", as_each_type(LENGTHS), ids=lambda given: type(given).__name__)
def test_lengths_of_every_sequence_give_the_same_stream(given: Any) -> None:
    expected = list(LengthBucketBatchSampler(LENGTHS, max_tokens=20, seed=1))
    assert list(LengthBucketBatchSampler(given, max_tokens=20, seed=1)) == expected


# Iterations.


def batches_of_epochs(make: Callable[[], Any], iterations: int) -> list[list[int]]:
    """The batches of epochs 0, 1, 2 and so on, one epoch after the other."""
    sampler, epoch = make(), 0
    batches: list[list[int]] = []
    while len(batches) < iterations:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        elif hasattr(getattr(sampler, "sampler", None), "set_epoch"):
            sampler.sampler.set_epoch(epoch)
        batches += list(sampler)
        epoch += 1
    return batches[:iterations]


INNER: dict[str, Callable[[], Any]] = {
    "a list": lambda: [[0, 1], [2], [3, 4]],
    "set_epoch": lambda: BatchSampler(EpochSeeded(), 4, drop_last=False),
    "seed": lambda: pk_batches(seed=5),
    "generator": lambda: pk_batches(generator=generator()),
    "torch's generator": lambda: BatchSampler(RandomSampler(Indices(), generator=generator()), 4, drop_last=True),
    "other numbers of batches": lambda: GroupedBatchSampler(
        WeightedClassSampler(LABELS, [1, 1, 2], 9, seed=4), GROUPS, 4
    ),
    "other numbers, drawn": lambda: BatchSampler(Varying(), 4, drop_last=False),
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize("start", [0, 1, 5, 7, 11, 12])
def test_a_training_begins_at_any_iteration_and_goes_on_where_its_state_was_taken(
    inner: Callable[[], Any], start: int
) -> None:
    def made(start: int = 0) -> IterationBatchSampler:
        random.seed(4)
        return IterationBatchSampler(inner(), 12, start)

    random.seed(4)
    expected = batches_of_epochs(inner, 12)
    later = made(start)
    assert len(later) == 12 - start
    assert list(later) == expected[start:]
    sampler = made()
    list(islice(iterator := iter(sampler), start))
    state = json.loads(json.dumps(sampler.state_dict()))
    assert state["iteration"] == start
    assert list(iterator) == expected[start:]
    again = made()
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.set_epoch(0)
    assert list(again) == expected[start:]


def test_a_second_training_has_epochs_of_its_own() -> None:
    sampler = IterationBatchSampler(BatchSampler(EpochSeeded(), 4, drop_last=False), 13)
    first, second = list(sampler), list(sampler)
    assert sampler.state_dict() == {"kind": "IterationBatchSampler", "version": 1, "epoch": 2, "iteration": 0}
    sampler.set_epoch(1)
    assert list(sampler) == second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert not {tuple(batch) for batch in first} & {tuple(batch) for batch in second}


def test_what_comes_before_is_looked_up_where_there_is_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = IterationBatchSampler(inner := pk_batches(seed=5), 10**9, start_iteration=10**4)
    drawn = keys_drawn(inner, monkeypatch)
    assert next(iter(sampler)) == inner.items_at(np.array([10**4 % 3]), 10**4 // 3).tolist()[0]
    assert len(drawn) == 1


def test_the_epochs_that_it_tells_are_not_taken_for_the_users() -> None:
    """A wrapper takes over epochs that the user sets on a nested sampler; here they are set while a pass runs."""

    def wrapper() -> Any:
        batches = BatchSampler(EpochSeeded(), 4, drop_last=False)
        return DDPBatchSamplerWrapper(IterationBatchSampler(batches, 30), False, num_replicas=1, rank=0)

    sampler = IterationBatchSampler(BatchSampler(EpochSeeded(), 4, drop_last=False), 30)
    patched = wrapper()
    assert [list(patched) for _ in range(3)] == [list(sampler) for _ in range(3)]
    patched = wrapper()
    patched.sampler.set_epoch(2)  # but its own is
    sampler.set_epoch(2)
    assert list(patched) == list(sampler)


def test_iterators_go_on_beside_each_other() -> None:
    sampler = IterationBatchSampler([[0], [1]], 3)
    first = iter(sampler)
    next(first)
    assert list(sampler) == [[0], [1], [0]]
    second = iter(sampler)
    next(second)
    next(first)
    assert sampler.state_dict()["iteration"] == 1  # of the pass that was begun last
    sampler.set_epoch(7)
    next(first)
    assert list(first) == []
    assert sampler.state_dict()["iteration"] == 0
    sampler.load_state_dict(sampler.state_dict() | {"iteration": 2})
    assert list(second) == [[1], [0]]
    assert list(sampler) == [[0]]
    assert (sampler.epoch, sampler.state_dict()["epoch"]) == (7, 8)


def test_a_state_of_a_training_can_be_loaded_where_another_iteration_is_the_first() -> None:
    sampler = IterationBatchSampler([[0], [1], [2]], 8, start_iteration=4)
    next(iterator := iter(sampler))
    again = IterationBatchSampler([[0], [1], [2]], 8)
    again.load_state_dict(sampler.state_dict())
    assert list(again) == list(iterator) == [[2], [0], [1]]


OVER: dict[str, Callable[[], Any]] = {
    "a list": lambda: GroupedBatchSampler(range(50), [0] * 50, 3),
    "torch's sampler": lambda: GroupedBatchSampler(RandomSampler(range(50)), [0] * 50, 3),
    "torch's sampler, generator": lambda: GroupedBatchSampler(
        RandomSampler(range(50), generator=generator()), [0] * 50, 3
    ),
    "scalable": lambda: GroupedBatchSampler(ScalableRandomSampler(50), [0] * 50, 3),
    "scalable, generator": lambda: GroupedBatchSampler(ScalableRandomSampler(50, generator=generator()), [0] * 50, 3),
    "P x K": lambda: PKBatchSampler(range(50), 3, 1),
    "P x K, seed": lambda: PKBatchSampler(range(50), 3, 1, seed=5),
    "P x K, generator": lambda: PKBatchSampler(range(50), 3, 1, generator=generator()),
    "P x K, more batches": lambda: PKBatchSampler(range(12), 3, 1, num_batches=30),
}


@pytest.mark.parametrize("over_iterations", [True, False])
@pytest.mark.parametrize("make", OVER.values(), ids=OVER)
@pytest.mark.parametrize("left", [0, soaked(1), 4])
@pytest.mark.parametrize("done", [0, soaked(1), 3])
def test_a_loader_goes_on_whatever_pass_its_samplers_were_left_in(
    make: Callable[[], Any], over_iterations: bool, left: int, done: int
) -> None:
    def patched() -> Any:
        batches = IterationBatchSampler(make(), 20) if over_iterations else make()
        return patch_dataloader_to_ddp(
            DataLoader(Indices(50), batch_sampler=batches, collate_fn=as_it_is), rank=0, num_replicas=1
        )

    running = patched()
    list(running)  # the first training ends within an inner epoch
    if left:
        list(islice(running, left))  # a pass is left too
        running.batch_sampler.set_epoch(0)
    whole = iter(running)
    list(islice(whole, done))
    state = loader_state(running, batches_done=done)
    rest = list(whole)
    resumed = patched()
    restore_loader(resumed, state)
    assert list(resumed) == rest
    assert list(resumed) == list(running)


# Windows.


def test_the_windows_of_the_docs() -> None:
    data = list(range(1, 11))
    sampler = WindowSampler(10, 3, shuffle=False, seed=0)
    windows = WindowDataset(data, 3)
    by_offset = {starts[0]: [windows[start] for start in starts] for starts in (list(sampler) for _ in range(100))}
    assert by_offset[0] == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 1, 2]]
    assert by_offset[1] == [[2, 3, 4], [5, 6, 7], [8, 9, 10], [1, 2, 3]]
    assert set(by_offset) == set(range(10))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("size", "window", "stride"), [(10, 3, None), (12, 3, None), (10, 10, None), (11, 4, 2), (7, 1, 1)]
)
def test_an_epoch_sees_every_point_alike(size: int, window: int, stride: int | None, shuffle: bool) -> None:
    sampler = WindowSampler(size, window, stride, shuffle=shuffle, seed=0)
    step = stride or window
    total = np.zeros(size)
    for _ in range(MANY):
        starts = np.array(list(sampler))
        assert len(starts) == len(sampler) == -(-size // step)
        first = starts[0]
        ring = [(start - first) % size for start in starts]
        if not shuffle:
            assert ring == [step * i for i in range(len(starts))]
        seen = np.bincount(((starts[:, None] + np.arange(window)) % size).ravel(), minlength=size)
        assert seen.min() >= window // step
        assert seen.sum() == len(starts) * window
        total += seen
    expected = MANY * len(sampler) * window / size
    assert (abs(total - expected) < BOUND * np.sqrt(MANY) * 2).all()


def test_shuffled_windows_are_the_same_ones_in_another_order() -> None:
    for epoch in range(20):
        shuffled, ordered = (WindowSampler(103, 5, shuffle=shuffle, seed=3) for shuffle in (True, False))
        positions = np.arange(len(ordered))
        one, other = (sampler.items_at(positions, epoch) for sampler in (shuffled, ordered))
        assert sorted(one) == sorted(other)
        assert one.tolist() != other.tolist()


def test_windows_that_do_not_wrap_are_views() -> None:
    rows: npt.NDArray[Any] = np.arange(20).reshape(10, 2)
    assert np.shares_memory(WindowDataset(rows, 3)[7], rows)
    assert WindowDataset(rows, 3)[8].tolist() == [[16, 17], [18, 19], [0, 1]]
    tensor = torch.arange(20).reshape(10, 2)
    assert WindowDataset(tensor, 3)[7].data_ptr() == tensor[7].data_ptr()
    assert WindowDataset(tensor, 3)[8].tolist() == [[16, 17], [18, 19], [0, 1]]
    assert WindowDataset("abcde", 2)[4] == "ea"
    assert WindowDataset((1, 2, 3), 2)[2] == (3, 1)
    assert len(WindowDataset(tensor, 10)) == 10
    assert WindowDataset(tensor, 10)[1][-1].tolist() == [0, 1]
    assert WindowDataset(b"abcde", 2)[4] == b"ea"
    assert WindowDataset(bytearray(b"abcde"), 2)[4] == bytearray(b"ea")
    assert WindowDataset(machine_ints := array.array("i", range(5)), 2)[4] == machine_ints[4:] + machine_ints[:1]
    assert [WindowDataset(range(5), 2)[start] for start in (3, 4)] == [[3, 4], [4, 0]]
    masked: Any = WindowDataset(np.ma.array([1, 2, 3], mask=[True, False, False]), 2)[2]
    assert masked.tolist() == [3, None]
    every: Any = WindowDataset(np.arange(3), 2)  # which ends by its IndexError
    assert [window.tolist() for window in every] == [[0, 1], [1, 2], [2, 0]]


def test_windows_of_the_longest_series_do_not_overflow() -> None:
    size = 2**62 - 1
    starts = list(WindowSampler(size, 2**59, shuffle=False, seed=1))
    assert all(0 <= start < size for start in starts)
    assert all((after - before) % size == 2**59 for before, after in pairwise(starts))


# The scalable shuffle.


@pytest.mark.parametrize("n", [0, 1, 2, 23, 70_000])
def test_a_scalable_shuffle_has_every_sample_once(n: int) -> None:
    sampler = ScalableRandomSampler(n)
    assert sorted(sampler) == list(range(n))


def test_a_scalable_shuffle_of_a_loader_is_this_one() -> None:
    for n in (N, 100_000):
        patched = patch_dataloader_to_ddp(
            DataLoader(Indices(n), sampler=RandomSampler(Indices(n)), batch_size=100),
            rank=0,
            num_replicas=1,
            order="scalable",
            seed=9,
        )
        assert [index for batch in patched for index in batch.tolist()] == list(ScalableRandomSampler(n, seed=9))


class Half(ScalableRandomSampler):
    """A subclass that iterates in its own way is not looked up."""

    def __iter__(self) -> Iterator[int]:
        return (index for index in super().__iter__() if index % 2)


class FirstTwo(PKBatchSampler):
    """A subclass that iterates in its own way, of batches."""

    def __iter__(self) -> Iterator[list[int]]:
        return islice(super().__iter__(), 2)


def test_subclasses_with_an_order_of_their_own_are_iterated() -> None:
    assert has_order(ScalableRandomSampler(N, seed=1))
    assert not has_order(Half(N, seed=1))


def test_subclasses_with_an_order_of_their_own_are_iterated_when_wrapped() -> None:
    sampler = GroupedBatchSampler(Half(20, seed=1), [0] * 20, 3)
    assert not sampler.has_random_access
    assert len(sampler) == 4
    batches = list(sampler)
    assert sorted(chain.from_iterable(batches)) == list(range(1, 20, 2))
    patched = DDPBatchSamplerWrapper(GroupedBatchSampler(Half(20, seed=1), [0] * 20, 3), False, num_replicas=1, rank=0)
    assert list(patched) == batches
    whole = list(IterationBatchSampler(FirstTwo(range(12), 2, 1, seed=1), 12))
    assert list(IterationBatchSampler(FirstTwo(range(12), 2, 1, seed=1), 12, 7)) == whole[7:]


# Samplers that differ between the ranks of a patched loader, and misuse that no constructor can see.


def test_an_index_without_a_group_is_refused_when_it_is_drawn() -> None:
    with raises(SamplerError, ("list", "index 23", "group_ids", "23 entries"), "group"):
        list(GroupedBatchSampler([1, 23], LABELS, 2))


@pytest.mark.filterwarnings(f"error::{StreamLengthWarning.__module__}.{StreamLengthWarning.__name__}")
def test_epochs_of_other_lengths_are_shared_without_a_warning() -> None:
    inner: list[Callable[[], Iterable[int]]] = [
        lambda: WeightedRandomSampler(range(1, N + 1), 31),
        lambda: WeightedClassSampler(LABELS, [1, 1, 2], 13),
        lambda: WeightedClassSampler(LABELS, [1, 1, 2], 13, seed=5),
    ]
    for make in inner:
        patched = patch_dataloader_to_ddp(
            loader(batch_sampler=GroupedBatchSampler(make(), LENGTHS, 3)), rank=1, num_replicas=2
        )
        lengths = set()
        for _ in range(10):
            batches = list(patched)
            assert len(patched) == len(batches)
            lengths.add(len(batches))
        assert len(lengths) > 1
