"""One contract over every kind of loader: equal steps, shares disjoint and complete, new epochs, no trace."""

from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler
from zoo import KINDS, Kind, draw_ambient, seed_ambient, units

from ddp_patch import check_loaders_is_patched, patch_dataloader_to_ddp
from ddp_patch.options import Uneven
from ddp_patch.plan import Plan

EPOCHS = 3
SEED = 7


def epochs_of(kind: Kind, rank: int, num_replicas: int, **options: Any) -> list[list[Any]]:
    """Three epochs of one rank, seeded like no other, with other draws before and between."""
    seed_ambient(1000 * num_replicas + rank)
    loader = kind.make()
    assert not check_loaders_is_patched(loader)
    patched = patch_dataloader_to_ddp(loader, rank=rank, num_replicas=num_replicas, seed=SEED, **options)
    assert check_loaders_is_patched(patched)
    epochs = []
    for _ in range(EPOCHS):
        draw_ambient(rank)
        epochs.append(units(kind, patched))
    return epochs


def expected(stream: list[Any], plan: Plan) -> list[Any]:
    return [stream[p % len(stream)] for p in plan.share(len(stream))]


# A rank's own drop_last takes items off its share, so that shares of such a loader say nothing of the stream.
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
whole_kinds = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not kind.make().drop_last], ids=lambda kind: kind.name
)
# The user's torch.Generator is drawn from in sequence, as in one process; all else follows from (seed, epoch).
seeded_kinds = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if "generator" not in kind.name], ids=lambda kind: kind.name
)


@pytest.mark.parametrize("uneven", ["pad", "drop", "keep"])
@whole_kinds
def test_every_rank_takes_its_share_of_the_one_stream(kind: Kind, uneven: Uneven) -> None:
    streams = epochs_of(kind, 0, 1)
    for num_replicas in range(1, 6):
        for rank in range(num_replicas):
            plan = Plan(rank, num_replicas, uneven)
            shares = epochs_of(kind, rank, num_replicas, uneven=uneven)
            assert shares == [expected(stream, plan) for stream in streams]


@whole_kinds
def test_contiguous_shares_are_runs_of_the_same_stream(kind: Kind) -> None:
    streams = epochs_of(kind, 0, 1)
    for rank in range(3):
        plan = Plan(rank, 3, layout="contiguous")
        shares = epochs_of(kind, rank, 3, layout="contiguous")
        assert shares == [expected(stream, plan) for stream in streams]


@every_kind
def test_epochs_differ_if_and_only_if_the_loader_shuffles(kind: Kind) -> None:
    first, second, third = epochs_of(kind, 0, 2)
    assert (first != second and second != third and first != third) == kind.shuffles


@every_kind
def test_drawing_leaves_no_trace_in_the_ambient_states(kind: Kind) -> None:
    seed_ambient(3)
    sampler = sharded(patch_dataloader_to_ddp(kind.make(), rank=0, num_replicas=2))
    seed_ambient(3)
    draw_ambient()  # leaves half of a pair of normals in numpy's state and in Python's
    without = draw_ambient(5)
    seed_ambient(3)
    draw_ambient()
    iterator = iter(sampler)
    next(iterator)
    list(iterator)
    assert draw_ambient(5) == without


def sharded(loader: DataLoader[Any]) -> Any:
    """The sampler that the patch put in."""
    return next(s for s in (loader.sampler, loader.batch_sampler) if isinstance(s, DistributedSampler))


@seeded_kinds
def test_a_break_does_not_repeat_or_shift_what_follows(kind: Kind) -> None:
    whole = epochs_of(kind, 1, 2)
    seed_ambient(5)
    patched = patch_dataloader_to_ddp(kind.make(), rank=1, num_replicas=2, seed=SEED)
    for _ in patched:
        break
    iter(sharded(patched))  # made and never drawn from: no epoch
    assert units(kind, patched) == whole[1]


@seeded_kinds
def test_any_epoch_is_drawn_without_those_before(kind: Kind) -> None:
    whole = epochs_of(kind, 1, 2)
    patched = patch_dataloader_to_ddp(kind.make(), rank=1, num_replicas=2, seed=SEED)
    for epoch in (2, 0, 0, 1):
        sharded(patched).set_epoch(epoch)
        assert units(kind, patched) == whole[epoch]
