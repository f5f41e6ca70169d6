"""Share arithmetic against torch's own, for every small case, and by properties for the rest."""

from collections import Counter
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from ddp_patch import DDPBatchSamplerWrapper, DDPSamplerWrapper
from ddp_patch.options import Uneven
from ddp_patch.positions_and_padding import Plan

lengths = st.integers(0, 2000)
worlds = st.integers(1, 64)
unevens: st.SearchStrategy[Uneven] = st.sampled_from(["pad", "drop", "keep"])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_replicas", range(1, 17))
def test_plan_and_wrappers_equal_torchs_sampler(num_replicas: int, drop_last: bool) -> None:
    uneven: Uneven = "drop" if drop_last else "pad"
    for n in range(61):
        for rank in range(num_replicas):
            if n == 0 and not drop_last:
                torchs: list[int] = []  # torch divides by zero where it should pad nothing
            else:
                torchs = list(
                    DistributedSampler(range(n), num_replicas, rank, shuffle=False, drop_last=drop_last)  # type: ignore[arg-type]
                )
            assert [p % n for p in Plan(rank, num_replicas, uneven).share(n)] == torchs
            # Making wrappers takes most of the time: these are enough for every rest of a division.
            if n > 2 * num_replicas or num_replicas > 8:
                continue
            if drop_last and 0 < n < num_replicas:
                continue  # torch's ranks get nothing then; ours refuse it
            world: Any = {"num_replicas": num_replicas, "rank": rank, "uneven": uneven}
            sampler = DDPSamplerWrapper(range(n), False, **world)
            batches = DDPBatchSamplerWrapper([[i] for i in range(n)], False, **world)
            assert list(sampler) == torchs
            assert len(sampler) == len(torchs)
            assert list(batches) == [[i] for i in torchs]
            assert len(batches) == len(torchs)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_replicas", range(1, 6))
def test_shuffled_wrapper_equals_torchs_sampler(num_replicas: int, drop_last: bool) -> None:
    for n in (1, 2, 3, 10, 61):
        for rank in range(num_replicas if n >= num_replicas or not drop_last else 0):
            torchs: Any = DistributedSampler(range(n), num_replicas, rank, seed=5, drop_last=drop_last)  # type: ignore[arg-type]
            ours = DDPSamplerWrapper(range(n), True, not drop_last, num_replicas=num_replicas, rank=rank, seed=5)
            for epoch in range(3):
                torchs.set_epoch(epoch)
                assert list(ours) == list(torchs)
            assert (ours.num_samples, ours.total_size, ours.drop_last) == (
                torchs.num_samples,
                torchs.total_size,
                torchs.drop_last,
            )


@given(lengths, worlds, unevens)
def test_ranks_together_take_every_position_once(n: int, world: int, uneven: Uneven) -> None:
    plans = [Plan(rank, world, uneven) for rank in range(world)]
    taken = Counter(chain.from_iterable(plan.share(n) for plan in plans))
    assert taken == Counter(range(plans[0].total(n)))


@given(lengths, worlds, unevens)
def test_rounds_are_even_unless_kept_and_padding_is_less_than_one(n: int, world: int, uneven: Uneven) -> None:
    plans = [Plan(rank, world, uneven) for rank in range(world)]
    sizes = [len(plan.share(n)) for plan in plans]
    assert max(sizes) - min(sizes) <= (uneven == "keep")
    assert sizes == sorted(sizes, reverse=True)
    together = sorted(chain.from_iterable(plan.padding(n) for plan in plans))
    assert together == list(range(n, n + len(together)))
    assert len(together) < world
    assert not together or uneven == "pad"


@given(lengths, worlds, unevens, st.data())
def test_parts_of_chunks_make_up_the_share(n: int, world: int, uneven: Uneven, data: st.DataObject) -> None:
    plan = Plan(data.draw(st.integers(0, world - 1)), world, uneven)
    chunk_size = world * data.draw(st.integers(1, 9))
    stream = range(n)
    taken: list[int] = []
    for start in range(0, n, chunk_size):
        chunk = stream[start : start + chunk_size]
        taken += chunk[plan.slice_of_chunk(len(chunk))]
    assert taken == [p for p in plan.share(n) if p < n]


@given(st.integers(0, 2**62), st.integers(1, 2**20), unevens)
def test_huge_streams_cost_nothing(n: int, world: int, uneven: Uneven) -> None:
    first, last = (Plan(rank, world, uneven).share(n) for rank in (0, world - 1))
    assert 0 <= len(first) - len(last) <= 1
