"""P x K batches by properties: any number of labels, of batches and of samples of each label."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddp_patch.samplers import PKBatchSampler


@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 40))
def test_any_number_of_batches_has_all_labels_alike_often(
    data: st.DataObject, sizes: list[int], k: int, number: int
) -> None:
    p = data.draw(st.integers(1, len(sizes)))
    seed, epoch = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 3))
    labels = np.repeat(np.arange(len(sizes)), sizes)
    sampler = PKBatchSampler(labels, p, k, num_batches=number, seed=seed)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler) == number
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
    done = data.draw(st.integers(0, number))
    sampler.set_epoch(epoch)
    iterator = iter(sampler)
    assert [next(iterator) for _ in range(done)] == batches[:done]
    again = PKBatchSampler(labels, p, k, num_batches=number, seed=seed)
    if 0 < done < number:
        again.load_state_dict(sampler.state_dict())
        assert list(again) == batches[done:]
