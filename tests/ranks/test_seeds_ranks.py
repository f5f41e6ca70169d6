"""Loaders without ``seed=`` on real ranks: each has a seed of its own, and a job that starts again resumes."""

from itertools import chain
from typing import Any

import torch.distributed as dist
from quick import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, RandomSampler
from zoo import Indices, N, as_it_is, seed_ambient

from ddp_patch import DDPSamplerWrapper, patch_dataloader_to_ddp


def shuffled(n: int = N, **options: Any) -> DataLoader[Any]:
    return DataLoader(Indices(n), 3, shuffle=True, collate_fn=as_it_is, **options)


def samples(loader: Any) -> list[int]:
    return list(chain.from_iterable(loader))


def several(rank: int, world_size: int, torch_seed: int) -> list[tuple[int, list[int]]]:
    """Seeds, and what is drawn: of two loaders alike, one of another length, one with a seed and two wrappers."""
    seed_ambient(torch_seed + rank)
    loaders = [patch_dataloader_to_ddp(loader) for loader in (shuffled(), shuffled(), shuffled(7))]
    chosen: Any = patch_dataloader_to_ddp(shuffled(), seed=4)
    wrapped = [DDPSamplerWrapper[int](RandomSampler(Indices()), shuffle) for shuffle in (False, True)]
    samplers = [loader.sampler for loader in (*loaders, chosen)]
    seeds = [sampler.seed for sampler in (*samplers, *wrapped)]
    drawn = [samples(loader) for loader in (*loaders, chosen)] + [list(sampler) for sampler in wrapped]
    return list(zip(seeds, drawn, strict=True))


def test_each_loader_has_a_seed_of_its_own_which_is_the_same_at_each_start() -> None:
    first, second = run_ranks(several, 2, 10)
    seeds = [seed for seed, _ in first]
    assert seeds == [seed for seed, _ in second]
    assert seeds[3] == 4
    assert len(set(seeds)) == len(seeds)
    drawn = [tuple(mine + other) for (_, mine), (_, other) in zip(first, second, strict=True)]
    assert len(set(drawn)) == len(drawn)
    assert [set(items) for items in drawn] == [set(range(7 if number == 2 else N)) for number in range(len(drawn))]
    (alone,) = run_ranks(several, 1, 10)  # another start, of another number of ranks
    assert [seed for seed, _ in alone] == seeds
    assert [alone[place][1][::2] for place in (0, 1, 3)] == [first[place][1] for place in (0, 1, 3)]
    others, _ = run_ranks(several, 2, 20)
    assert not {seed for seed, _ in others} & set(seeds) - {4}


def of_siblings(rank: int, world_size: int) -> list[tuple[int, list[int]]]:
    """Two loaders alike in groups of ranks that must draw alike: tensor-parallel ranks stand side by side."""
    seed_ambient(10 + rank)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    if rank % 2 == 0:  # one of the groups has a loader for validation, too
        patch_dataloader_to_ddp(DataLoader(Indices(5)), process_group=mine)
    loaders: list[Any] = [patch_dataloader_to_ddp(shuffled(), process_group=mine) for _ in range(2)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    loaders += [patch_dataloader_to_ddp(shuffled(), device_mesh=mesh) for _ in range(2)]
    loaders += [patch_dataloader_to_ddp(shuffled(), rank=rank // 2, num_replicas=2) for _ in range(2)]
    return [(loader.sampler.seed, samples(loader)) for loader in loaders]


def test_groups_that_cannot_ask_each_other_draw_alike_and_each_loader_its_own() -> None:
    ranks = run_ranks(of_siblings, 4)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    seeds = [seed for seed, _ in ranks[0]]
    assert seeds == [seed for seed, _ in ranks[2]]
    assert len(set(seeds[:4])) == 4
    assert seeds[4:] == [0, 0]  # in a world given by hand, as torch's DistributedSampler
    for (_, mine), (_, other) in zip(ranks[0], ranks[2], strict=True):
        assert set(mine + other) == set(range(N))
