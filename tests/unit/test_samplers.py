"""The ready-made samplers: exact counts, uniform draws, any epoch looked up, any kind of labels and lengths."""

import array
import copy
import pickle
import random
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from zoo import GROUPS, LABELS, LENGTHS, EpochSeeded, Indices, N, Varying, loader, pk_batches

from ddp_patch import patch_dataloader_to_ddp
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


@every_sampler
@pytest.mark.parametrize("randomness", [dict, lambda: {"seed": 5}, lambda: {"generator": generator()}])
def test_each_pass_has_the_length_that_was_told_and_draws_anew(make: Callable[..., Any], randomness: Any) -> None:
    torch.manual_seed(3)
    ambient, given = torch.get_rng_state(), randomness()
    sampler = make(**given)
    assert has_order(sampler) == ("seed" in given)
    iter(sampler)  # which is no pass: nothing is asked for
    passes = []
    for _ in range(3):
        told = len(sampler)
        passes.append(list(sampler))
        assert len(passes[-1]) == told
    assert passes[0] != passes[1] != passes[2] != passes[0]
    after = torch.get_rng_state()
    torch.set_rng_state(ambient)
    assert list(make(**randomness())) == passes[0]
    # torch's RandomSampler draws a number for each pass, too, so whoever draws next draws the same numbers.
    assert torch.equal(torch.get_rng_state(), ambient) == bool(given)
    for _ in range(0 if given else 2):
        torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after)


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
            assert not isinstance(found, np.ndarray) or found.dtype == np.int64
        other.set_epoch(1)
        assert next(iter(other)) == passes[1][0]  # a pass that is left is followed by the next
        assert list(copy.deepcopy(other)) == list(pickle.loads(pickle.dumps(other))) == passes[2]  # noqa: S301 - our own
    assert list(make(seed=6)) != passes[0]


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


# Class-balanced.


def as_each_type(values: list[int]) -> list[Any]:
    return [values, tuple(values), np.array(values), np.array(values, np.int8), torch.tensor(values)]


HALF: Any = Fraction(1, 2)
WEIGHTED = [
    *((labels, [1, 1, 2]) for labels in as_each_type(LABELS)),
    ([torch.tensor(label) for label in LABELS], torch.tensor([1, 1, 2])),
    (torch.tensor(LABELS, dtype=torch.bfloat16), np.array([0.25, 0.25, 0.5])),
    ([("a", "b", "c")[label] for label in LABELS], {"c": 2, "b": 1.0, "a": np.float32(1)}),
    (np.array(["a", "b", "c"], object)[LABELS], {"c": Fraction(2, 3), "b": Decimal("0.5") - Decimal("0.5"), "a": 0}),
    ([("a", None, (1, 2))[label] for label in LABELS], {"a": HALF, None: HALF, (1, 2): 1}),  # can't be sorted
]


@pytest.mark.parametrize(("labels", "weights"), WEIGHTED, ids=map(str, range(len(WEIGHTED))))
def test_labels_and_weights_of_every_type_give_the_same_stream(labels: Any, weights: Any) -> None:
    is_third_alone = isinstance(weights, dict) and weights.get("a") == 0
    expected = [0, 0, 2] if is_third_alone else [1, 1, 2]
    drawn = list(WeightedClassSampler(labels, weights, 31, seed=5))
    assert drawn == list(WeightedClassSampler(LABELS, expected, 31, seed=5))
    assert all(type(index) is int for index in drawn)


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


def test_named_balances() -> None:
    assert WeightedClassSampler.upsample(LABELS).counts == {0: 12, 1: 12, 2: 12}
    assert set(WeightedClassSampler.upsample(LABELS)) == set(range(N))
    assert WeightedClassSampler.downsample(LABELS).counts == {0: 4, 1: 4, 2: 4}
    assert max(Counter(WeightedClassSampler.downsample(LABELS)).values()) == 1
    assert WeightedClassSampler.n_per_class(LABELS, 5).counts == {0: 5, 1: 5, 2: 5}
    seeded = WeightedClassSampler.n_per_class(torch.tensor(LABELS), 5, seed=3)
    assert list(seeded) == list(WeightedClassSampler(LABELS, [1, 1, 1], 15, seed=3))


# P x K.


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


# Groups.


class Once(RandomSampler):
    """A sampler of the user's."""


@pytest.mark.parametrize(
    "sampler",
    [
        range(N),
        SequentialSampler(Indices()),
        RandomSampler(Indices(), num_samples=7),
        RandomSampler(Indices(), replacement=True, generator=generator()),
        SubsetRandomSampler(range(3, 20)),
        WeightedRandomSampler(range(1, N + 1), 31),
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


class Uncopied(Indices):
    """Too much to be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("copied")


def test_telling_the_number_of_batches_draws_nothing_and_copies_no_dataset() -> None:
    torch.manual_seed(3)
    states = torch.get_rng_state(), torch.Generator.get_state(given := generator())
    for sampler in (
        Once(Uncopied(), replacement=True, generator=given),
        Once(Uncopied(), replacement=True),
        RandomSampler(Uncopied(), num_samples=40),
    ):
        assert len(GroupedBatchSampler(sampler, LABELS, 100)) == 3
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(given.get_state(), states[1])


def test_the_wrapped_samplers_epoch_is_set_through_it() -> None:
    grouped = GroupedBatchSampler(EpochSeeded(), LABELS, 3)
    grouped.set_epoch(4)
    assert grouped.epoch == 4
    assert list(grouped) == list(GroupedBatchSampler(np.random.default_rng(4).permutation(N), LABELS, 3))
    assert GroupedBatchSampler(range(3), "abc", 1).epoch == 0


@pytest.mark.parametrize("given", [list, np.array, torch.tensor])
def test_aspect_ratios_are_told_apart_at_the_edges(given: Any) -> None:
    widths, heights = given([1, 2, 3, 4, 5]), given([2, 2, 2, 2, 2])
    assert aspect_ratio_groups(widths, heights).tolist() == [0, 1, 1, 1, 1]
    assert aspect_ratio_groups(widths, heights, [0.5, 1.5, 2.5]).tolist() == [1, 1, 2, 2, 3]


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


def test_batches_are_as_large_as_the_budget_allows_whatever_holds_the_lengths() -> None:
    lengths = [10, 5] * 1000
    orders = [list(LengthBucketBatchSampler(given, max_tokens=100, seed=1)) for given in as_each_type(lengths)]
    assert Counter(map(len, orders[0])) == {10: 100, 20: 50}
    assert all(order == orders[0] for order in orders)


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
def test_a_training_begins_at_any_iteration(inner: Callable[[], Any]) -> None:
    random.seed(4)
    expected = batches_of_epochs(inner, 12)
    for start in (0, 1, 5, 7, 11, 12):
        random.seed(4)
        sampler = IterationBatchSampler(inner(), 12, start)
        assert len(sampler) == 12 - start
        assert list(sampler) == expected[start:]


def test_a_second_training_has_epochs_of_its_own() -> None:
    sampler = IterationBatchSampler(BatchSampler(EpochSeeded(), 4, drop_last=False), 13)
    first, second = list(sampler), list(sampler)
    assert not {tuple(batch) for batch in first} & {tuple(batch) for batch in second}
    for epoch, expected in ((1, second), (0, first)):
        sampler.set_epoch(epoch)
        assert list(sampler) == expected
        assert sampler.epoch == epoch


def test_what_comes_before_is_looked_up_where_there_is_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = IterationBatchSampler(inner := pk_batches(seed=5), 10**9, start_iteration=10**4)
    drawn = keys_drawn(inner, monkeypatch)
    assert next(iter(sampler)) == inner.items_at(np.array([10**4 % 3]), 10**4 // 3).tolist()[0]
    assert len(drawn) == 1


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


WINDOWS: list[tuple[Any, int, int, Any]] = [
    (np.arange(20).reshape(10, 2), 3, 8, [[16, 17], [18, 19], [0, 1]]),
    (torch.arange(20).reshape(10, 2), 3, 8, [[16, 17], [18, 19], [0, 1]]),
    ("abcde", 2, 4, "ea"),
    (b"abcde", 2, 4, b"ea"),
    ((1, 2, 3), 2, 2, (3, 1)),
    (array.array("i", range(5)), 2, 4, array.array("i", [4, 0])),
    (range(5), 2, 4, [4, 0]),
    (np.ma.array([1, 2, 3], mask=[True, False, False]), 2, 2, [3, None]),
]


@pytest.mark.parametrize(("data", "window", "start", "expected"), WINDOWS)
def test_windows_have_the_type_of_the_data(data: Any, window: int, start: int, expected: Any) -> None:
    found = WindowDataset(data, window)[start]
    assert (found.tolist() if isinstance(found, np.ndarray | torch.Tensor) else found) == expected
    whole = WindowDataset(data, window)[0]
    assert type(whole) is type(found)
    if isinstance(data, np.ndarray):
        assert np.shares_memory(whole, data)  # no copy
    if isinstance(data, torch.Tensor):
        assert whole.data_ptr() == data.data_ptr()


def test_a_loop_over_windows_ends() -> None:
    every: Any = WindowDataset(np.arange(3), 2)  # by its IndexError
    assert [window.tolist() for window in every] == [[0, 1], [1, 2], [2, 0]]


# The scalable shuffle.


@pytest.mark.parametrize("n", [0, 1, 2, 23, 70_000])
def test_a_scalable_shuffle_has_every_sample_once(n: int) -> None:
    assert sorted(ScalableRandomSampler(n)) == list(range(n))
