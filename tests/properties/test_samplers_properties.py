"""Samplers by properties: any number of labels, of batches and of samples of each label; any groups; any weights."""

from collections import Counter
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddp_patch.samplers import GroupedBatchSampler, PKBatchSampler, WeightedClassSampler


@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 40))
def test_any_number_of_batches_has_all_labels_alike_often(
    data: st.DataObject, sizes: list[int], k: int, number: int
) -> None:
    p = data.draw(st.integers(1, len(sizes)))
    seed, epoch = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 3))
    labels = np.repeat(np.arange(len(sizes)), sizes)
    sampler = PKBatchSampler(labels, p, k, num_batches=number or None, seed=seed)
    number = number or -(-len(sizes) // p)  # by default, as many as have every label
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler) == number
    assert sampler.batch_size == p * k
    for batch in batches:
        assert list(Counter(labels[batch].tolist()).values()) == [k] * p
        for index, times in Counter(batch).items():
            size = sizes[labels[index]]
            assert times in {k // size, -(-k // size)}
    of_each = np.bincount(labels[np.concatenate(batches)], minlength=len(sizes)) // k
    assert of_each.max() - of_each.min() <= 1
    rounds = [label for batch in batches for label in dict.fromkeys(labels[batch].tolist())]
    for start in range(0, len(rounds) - len(sizes) + 1, len(sizes)):
        assert len({*rounds[start : start + len(sizes)]}) == len(sizes)
    positions = data.draw(st.lists(st.integers(0, number - 1), max_size=5))
    assert sampler.items_at(np.array(positions, np.int64), epoch).tolist() == [batches[at] for at in positions]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.randoms(), st.integers(1, 31), st.booleans())
def test_batches_are_of_one_group_in_the_samplers_order(
    groups: list[int], chance: np.random.Generator, size: int, drop_uneven: bool
) -> None:
    order = list(range(len(groups)))
    chance.shuffle(order)
    expected: list[list[int]] = []
    filling: dict[int, list[int]] = {}
    for index in order:
        batch = filling.get(groups[index], [])
        if len(batch) in {0, size}:
            expected.append(batch := [])
        filling[groups[index]] = batch
        batch.append(index)
    sampler = GroupedBatchSampler(order, groups, size, drop_uneven)
    assert len(sampler) == len(list(sampler))
    assert list(sampler) == [batch for batch in expected if len(batch) == size or not drop_uneven]


@given(st.lists(st.floats(0, 1e308), min_size=3, max_size=3).filter(any), st.integers(1, 100), st.integers(0, 9))
def test_counts_are_never_off_by_one_and_samples_come_alike_often(weights: list[float], length: int, seed: int) -> None:
    labels = [0] * 12 + [1] * 7 + [2] * 4
    sampler = WeightedClassSampler(labels, weights, length, seed=seed)
    exact = list(map(Fraction, weights))
    assert sum(sampler.counts.values()) == length
    for label, count in sampler.counts.items():
        assert abs(count - length * exact[int(str(label))] / sum(exact)) < 1
    times = Counter(sampler)
    for label in range(3):
        of_label = [times[index] for index in range(23) if labels[index] == label]
        assert sum(of_label) == sampler.counts[label]
        assert max(of_label) - min(of_label) <= 1
