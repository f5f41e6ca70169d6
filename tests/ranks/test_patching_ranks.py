"""Real gloo ranks, each seeded differently, over every kind of loader: the patch as users call it."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import assert_tells
from quick import run_each, run_ranks, soaked
from torch.utils.data import DataLoader, DistributedSampler
from zoo import (
    ALL_KINDS,
    BY_NAME,
    STEPS,
    Indices,
    Kind,
    draw_ambient,
    loader,
    seed_ambient,
    seeded_generator,
    units,
)

from ddp_patch import DDPSamplerWrapper, check_loaders_is_patched, patch_dataloader_to_ddp
from ddp_patch.errors import WorldError
from ddp_patch.positions_and_padding import Plan

SEED = 100
EPOCHS = 2  # of a kind that has as many
WHOLE = [kind for kind in ALL_KINDS if not kind.make().drop_last]
# Starting workers takes long, so with them there is but one number of ranks.
IN_WORLD = {world: [kind for kind in WHOLE if world == 2 or not kind.make().num_workers] for world in (2, 3, 4)}


def epochs_on_rank(kind: Kind, rank: int) -> tuple[int, list[list[Any]]]:
    """The seed and epochs of a kind, with an all-reduce at every step, so that uneven steps would hang."""
    seed_ambient(SEED + rank)
    patched: Any = patch_dataloader_to_ddp(kind.make())
    draw_ambient(rank)
    return patched.sampler.seed, [units(kind, InStep(patched, rank)) for _ in range(min(EPOCHS, kind.epochs))]


class InStep:
    """A loader whose every step meets all ranks and draws other random numbers on each."""

    def __init__(self, loader: DataLoader[Any], rank: int) -> None:
        self.loader, self.rank = loader, rank
        self.batch_sampler = loader.batch_sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        for step, batch in enumerate(self.loader):
            draw_ambient(self.rank + step)
            meet()
            yield batch
        meet()  # a rank that makes fewer steps meets the others' next one here, and theirs at the end is missing


def meet() -> None:
    ranks = torch.ones(())
    dist.all_reduce(ranks)
    assert ranks == dist.get_world_size()


def every_kind(rank: int, world_size: int) -> dict[str, tuple[int, list[list[Any]]]]:
    warnings.simplefilter("ignore")  # what is warned of is tested in process
    shares = {kind.name: epochs_on_rank(kind, rank) for kind in IN_WORLD[world_size]}
    for batch in InStep(patch_dataloader_to_ddp(loader(drop_last=True)), rank):
        assert len(batch) == 4
    return shares


@pytest.mark.parametrize("world_size", [soaked(2), 3, soaked(4)])
@pytest.mark.filterwarnings("ignore::ddp_patch.errors.StreamLengthWarning")
def test_every_kind_is_shared_exactly(world_size: int) -> None:
    ranks = run_ranks(every_kind, world_size)
    for kind in IN_WORLD[world_size]:
        seeds = {rank[kind.name][0] for rank in ranks}
        assert len(seeds) == 1
        seed_ambient(SEED)
        alone = patch_dataloader_to_ddp(kind.make(), rank=0, num_replicas=1, seed=seeds.pop())
        streams = [units(kind, alone, STEPS * world_size) for _ in range(min(EPOCHS, kind.epochs))]
        for epoch, stream in enumerate(streams):
            for rank in range(world_size):
                share = kind.of_rank(stream, Plan(rank, world_size))
                assert ranks[rank][kind.name][1][epoch] == share, (kind.name, epoch, rank)


def with_workers(rank: int, world_size: int) -> list[list[Any]]:
    seed_ambient(SEED + rank)
    given = loader(shuffle=True, num_workers=1, persistent_workers=True, multiprocessing_context="spawn")
    patched = patch_dataloader_to_ddp(given)
    assert isinstance(patched.sampler, DDPSamplerWrapper)
    return [[item for batch in InStep(patched, rank) for item in batch] for _ in range(2)]


def with_generators_of_their_own(rank: int, world_size: int) -> list[list[Any]]:
    """The user seeds a generator by rank and hands it to a loader whose stream must be rank 0's."""
    generator = torch.Generator().manual_seed(11 + rank)
    patched = patch_dataloader_to_ddp(loader(shuffle=True, generator=generator))
    return [[item for batch in patched for item in batch] for _ in range(3)]


def in_two_groups(rank: int, world_size: int) -> Any:
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine, other = groups[rank % 2], groups[1 - rank % 2]
    torch.manual_seed(rank)
    with pytest.raises(WorldError) as caught:
        patch_dataloader_to_ddp(loader(), process_group=other)
    patched = patch_dataloader_to_ddp(loader(shuffle=True), process_group=mine, uneven="drop")
    return [item for batch in patched for item in batch], str(caught.value)


def test_a_process_group_is_a_world_of_its_own() -> None:
    (first, said), (alone, _), (second, _) = run_ranks(in_two_groups, 3)
    assert not set(first) & set(second)
    assert (len(first), len(second), len(set(alone))) == (11, 11, 23)
    assert_tells(said, ("global rank 0 of 3", "process_group"), ("group's ranks", "group that this rank"))


def standing_alone(rank: int, world_size: int) -> Any:
    seed_ambient(SEED + rank)
    wrapper = DDPSamplerWrapper(BY_NAME["numpy's global state, lazily"].make().sampler)
    torchs: Any = DistributedSampler(Indices(), shuffle=False)
    plain = DDPSamplerWrapper(range(23), shuffle_samples_between_gpus=False)
    assert list(plain) == list(torchs)
    return list(wrapper), list(wrapper), wrapper.seed


def test_two_ranks_share_what_spawned_workers_read_a_generators_stream_and_a_wrappers() -> None:
    read, led, by_wrapper = run_each(2, with_workers, with_generators_of_their_own, standing_alone)
    for epoch in range(2):
        together = Counter(read[0][epoch] + read[1][epoch])
        assert set(together) == set(range(23))
        assert together.total() == 24
    assert read[0][0] != read[0][1]
    unpatched = loader(shuffle=True, generator=seeded_generator())
    for shares in zip(*led, strict=True):
        stream = [item for batch in unpatched for item in batch]
        assert [item for pair in zip(*shares, strict=True) for item in pair] == [*stream, stream[0]]  # rank 0's
    seed = by_wrapper[0][2]
    assert seed == by_wrapper[1][2]
    alone = DDPSamplerWrapper(BY_NAME["numpy's global state, lazily"].make().sampler, num_replicas=1, rank=0, seed=seed)
    for epoch in range(2):
        together_in_turn = [item for pair in zip(*(rank[epoch] for rank in by_wrapper), strict=True) for item in pair]
        assert together_in_turn[:23] == list(alone)


def world_of_one(rank: int, world_size: int) -> bool:
    return check_loaders_is_patched(patch_dataloader_to_ddp(loader()))


def test_a_group_of_one_rank_is_patched() -> None:
    assert run_ranks(world_of_one, 1) == [True]
