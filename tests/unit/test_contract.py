"""One contract over every kind of loader: equal steps, shares disjoint and complete, new epochs, no trace."""

import multiprocessing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain, combinations, islice
from typing import Any

import pytest
from messages import assert_tells, raises
from quick import OF_RANKS
from torch.utils.data import DataLoader, DistributedSampler
from trying import SEED, WORLDS, over, over_in_turn
from zoo import ALL_KINDS, BY_NAME, STEPS, Kind, N, draw_ambient, loader, seed_ambient, units

from ddp_patch import check_loaders_is_patched, patch_dataloader_to_ddp
from ddp_patch.errors import ExhaustedSamplerError, NoStepsError, StreamLengthWarning
from ddp_patch.options import Uneven
from ddp_patch.positions_and_padding import Plan

FINITE = [kind for kind in ALL_KINDS if not kind.endless]
# A rank's own drop_last takes items off its share, so that shares of such a loader say nothing of the stream.
WHOLE = [kind for kind in FINITE if not kind.make().drop_last]


@contextmanager
def warned(kind: Kind) -> Iterator[None]:
    """Hold a kind to the one warning that it has, or to none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StreamLengthWarning)
        yield
    messages = [str(warning.message) for warning in caught if warning.category is StreamLengthWarning]
    assert len(messages) == (kind.warning is not None)
    for message in messages:
        assert_tells(message, kind.warning or (), "sampler's __len__")


@cache  # several tests look at the same ones, and some take long
def epochs_of(kind: Kind, rank: int, num_replicas: int, steps: int = STEPS, **options: Any) -> list[list[Any]]:
    """The epochs of one rank, seeded like no other, with other draws before and between."""
    seed_ambient(1000 * num_replicas + rank)
    given = kind.make()
    assert not check_loaders_is_patched(given)
    patched = patch_dataloader_to_ddp(given, rank=rank, num_replicas=num_replicas, seed=SEED, **options)
    assert check_loaders_is_patched(patched)
    epochs = []
    with warned(kind):
        for _ in range(kind.tried):
            draw_ambient(rank)
            epochs.append(units(kind, patched, steps))
    return epochs


@over_in_turn(WHOLE, "num_replicas", WORLDS, every=True)
def test_every_rank_takes_its_share_of_the_one_stream(kind: Kind, num_replicas: int) -> None:
    streams = epochs_of(kind, 0, 1)
    assert streams == [kind.of_rank(stream, Plan(0, 1)) for stream in streams]
    for rank in range(num_replicas):
        shares = epochs_of(kind, rank, num_replicas)
        assert shares == [kind.of_rank(stream, Plan(rank, num_replicas)) for stream in streams]


@pytest.fixture
def started_by_forkserver() -> Iterator[None]:
    """Start workers as Python 3.14 does: all that they need is pickled."""
    multiprocessing.set_forkserver_preload(OF_RANKS)  # else each worker imports torch
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("started_by_forkserver")
@over([kind for kind in WHOLE if kind.make().num_workers])
def test_shares_are_the_same_where_workers_are_started_by_a_fork_server(kind: Kind) -> None:
    streams = epochs_of(kind, 0, 1)
    for rank in range(2):
        shares = epochs_of.__wrapped__(kind, rank, 2)
        assert shares == [kind.of_rank(stream, Plan(rank, 2)) for stream in streams]


@over([kind for kind in FINITE if not kind.shuffles and (kind.parts or not kind.make().num_workers)])
def test_the_one_stream_is_the_unpatched_loaders(kind: Kind) -> None:
    assert epochs_of(kind, 0, 1) == [units(kind, kind.make()) for _ in range(kind.tried)]


@over_in_turn([kind for kind in WHOLE if kind.make().num_workers < 2], "uneven", ("drop", "keep"))
def test_the_last_round_is_dropped_or_kept(kind: Kind, uneven: Uneven) -> None:
    streams = epochs_of(kind, 0, 1)
    num_replicas = 3 if kind.make().num_workers else 4
    for rank in range(num_replicas):
        if uneven == "drop" and any(0 < len(stream) < num_replicas for stream in streams):
            with raises(NoStepsError, ("no step", f"{num_replicas} ranks"), "uneven='pad'"):
                epochs_of(kind, rank, num_replicas, uneven=uneven)
            continue
        shares = epochs_of(kind, rank, num_replicas, uneven=uneven)
        assert shares == [kind.of_rank(stream, Plan(rank, num_replicas, uneven)) for stream in streams]


@over([kind for kind in ALL_KINDS if kind.endless])
def test_an_endless_stream_is_shared_from_its_beginning(kind: Kind) -> None:
    """And its length is the usual TypeError."""
    for world_size in (3,) if kind.make().num_workers else WORLDS:
        ranks = [epochs_of(kind, rank, world_size) for rank in range(world_size)]
        stream = epochs_of(kind, 0, 1, steps=world_size * STEPS)[0]
        assert list(chain.from_iterable(zip(*(epochs[0] for epochs in ranks), strict=True))) == stream
        for epoch in range(kind.tried):
            assert len({len(epochs[epoch]) for epochs in ranks}) == 1
    with pytest.raises(TypeError, match="has no len"):
        len(patch_dataloader_to_ddp(kind.make(), rank=0, num_replicas=2))


def test_an_endless_iterator_goes_on_after_a_break_with_nothing_lost() -> None:
    ranks = [epochs_of(BY_NAME["endless: itertools.count"], rank, 3) for rank in range(3)]
    together = sorted(item for epochs in ranks for epoch in epochs for item in epoch)
    assert together == list(range(3 * 3 * STEPS * 4))  # epochs x ranks x steps x batch


@over([kind for kind in FINITE if kind.epochs == 3])
def test_epochs_differ_if_and_only_if_the_loader_shuffles(kind: Kind) -> None:
    for one, other in combinations(epochs_of(kind, 0, 2), 2):
        assert (one != other) == kind.shuffles


def test_an_iterator_says_that_nothing_is_left() -> None:
    patched = patch_dataloader_to_ddp(loader(sampler=iter(range(N))), rank=0, num_replicas=2)
    assert len(list(patched)) == 3
    with raises(ExhaustedSamplerError, ("epoch 1", "iterator"), ("list", "__iter__")):
        list(patched)


@over([kind for kind in ALL_KINDS if "iterable" not in kind.name and kind.warning is None])
def test_drawing_leaves_no_trace_in_the_ambient_states(kind: Kind) -> None:
    seed_ambient(3)
    sampler = sharded(patch_dataloader_to_ddp(kind.make(), rank=0, num_replicas=2))
    seed_ambient(3)
    draw_ambient()  # leaves half of a pair of normals in numpy's state and in Python's
    without = draw_ambient(5)
    seed_ambient(3)
    draw_ambient()
    iterator = iter(sampler)
    next(iterator, None)
    list(islice(iterator, 100))
    assert draw_ambient(5) == without


def sharded(loader: DataLoader[Any]) -> Any:
    """The sampler that the patch put in."""
    return next(s for s in (loader.sampler, loader.batch_sampler) if isinstance(s, DistributedSampler))


@over([kind for kind in FINITE if kind.epochs == 3 and not kind.stateful and kind.warning is None])
def test_a_break_does_not_repeat_or_shift_what_follows(kind: Kind) -> None:
    whole = epochs_of(kind, 1, 2)
    seed_ambient(5)
    patched = patch_dataloader_to_ddp(kind.make(), rank=1, num_replicas=2, seed=SEED)
    for _ in patched:
        break
    iter(sharded(patched))  # made and never drawn from: no epoch
    assert units(kind, patched) == (whole[1] if whole[0] else whole[0])


@over([kind for kind in FINITE if kind.epochs == 3 and not kind.stateful and kind.warning is None])
def test_any_epoch_is_drawn_without_those_before(kind: Kind) -> None:
    whole = epochs_of(kind, 1, 2)
    patched = patch_dataloader_to_ddp(kind.make(), rank=1, num_replicas=2, seed=SEED)
    for epoch in (2, 0, 0, 1) if not kind.make().num_workers else (1, 0, 0):
        sharded(patched).set_epoch(epoch)
        assert units(kind, patched) == whole[epoch]


@over([kind for kind in ALL_KINDS if kind.stateful and "weighted" not in kind.name])
def test_ranks_stay_together_after_a_break_where_the_sampler_has_a_state(kind: Kind) -> None:
    shares = []
    for rank in range(2):
        seed_ambient(rank)
        patched = patch_dataloader_to_ddp(kind.make(), rank=rank, num_replicas=2)
        for _ in patched:
            break
        shares.append(units(kind, patched))
    assert set(shares[0]) | set(shares[1]) == set(range(N))
    assert len(shares[0]) == len(shares[1]) == 12
