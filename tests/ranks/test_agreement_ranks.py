"""Real gloo ranks that disagree, are late, ahead or gone: found at once, or made to agree."""

import inspect
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import Words, assert_tells
from quick import run_each, run_ranks, said
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, RandomSampler, Subset
from zoo import Indices, N, loader, seed_ambient

import ddp_patch
from ddp_patch import DDPSamplerWrapper, patch_dataloader_to_ddp

SEED = 100


def items(loader: Any) -> list[Any]:
    return [item for batch in loader for item in batch]


# Ranks that differ.

LEAVE_OUT = ("whole dataset", "split_dataset_by_node()", "shard()", "random_split()", "shuffle()")
SAME = "same on every rank"


# What a rank patches, given whether it is rank 1 and its number; and the facts and the remedy that all are told.
DIFFERING: list[tuple[Callable[[bool, int], Any], Words, Words]] = [
    (lambda odd, _: loader(sampler=range(9 if odd else 10)), "sampler length: 9 on rank 1; 10 on ranks 0, 2", SAME),
    (
        lambda odd, _: DataLoader(Indices(20 + odd)),
        ("dataset length: 21 on rank 1; 20 on ranks 0, 2", "sampler length: 21 on rank 1; 20 on ranks 0, 2"),
        SAME,
    ),
    (
        lambda odd, _: [loader()] * 2 if odd else [loader(), loader()],
        "loaders: loaders[0], loaders[1] (the same as loaders[0]) on rank 1; loaders[0], loaders[1] on ranks 0, 2",
        SAME,
    ),
    (
        lambda odd, _: {name: loader() for name in (("val", "train") if odd else ("train", "val"))},
        "loaders: loaders['val'], loaders['train'] on rank 1; loaders['train'], loaders['val'] on ranks 0, 2",
        SAME,
    ),
    (lambda odd, _: [] if odd else [loader()], "loaders: loaders (empty) on rank 1; loaders[0] on ranks 0, 2", SAME),
    (
        lambda odd, _: [loader(), None if odd else loader()],
        "loaders: loaders[0], loaders[1] (None) on rank 1; loaders[0], loaders[1] on ranks 0, 2",
        SAME,
    ),
    (lambda odd, _: loader() if odd else [loader()], "loaders: one on rank 1; loaders[0] on ranks 0, 2", SAME),
    (
        lambda odd, _: [loader(shuffle=True), {"val": loader(batch_size=3 if odd else 4, shuffle=odd)}],
        (
            "loaders[1]['val'] batch_size: 3 on rank 1; 4 on ranks 0, 2",
            "loaders[1]['val'] sampler: RandomSampler on rank 1; SequentialSampler on ranks 0, 2",
        ),
        SAME,
    ),
    (
        lambda odd, _: [loader(), DataLoader(Subset(Indices(), range(5 * odd, 5 * odd + 5)))],
        ("loaders[1]: ", "datasets of ranks 0, 2 and rank 1", "indices of a Subset"),
        LEAVE_OUT,
    ),
]
# What one rank refuses, given whether it is that one; and by which error.
REFUSED: list[tuple[Callable[[bool], Any], str]] = [
    (lambda odd: patch_dataloader_to_ddp(loader(), seed=-1 if odd else 1), "InvalidOptionError"),
    (
        lambda odd: patch_dataloader_to_ddp(loader(sampler=iter(range(N)) if odd else range(N)), cost=[1] * N),
        "InvalidOptionError",
    ),
    (lambda odd: DDPSamplerWrapper(range(N), timeout=-1 if odd else 9), "InvalidOptionError"),
    (lambda odd: patch_dataloader_to_ddp(5 if odd else loader()), "NotALoaderError"),  # type: ignore[arg-type]  # on purpose
    (lambda odd: patch_dataloader_to_ddp((loader(), 5 if odd else loader())), "NotALoaderError: loaders[1]: "),
]


def differing(rank: int, world_size: int, with_errors: bool) -> Any:
    """What a rank is told of each, and what two loaders give that are patched afterwards."""
    seed_ambient(SEED + rank)
    odd, told, refused = rank == 1, [], []
    if with_errors:
        told = [said(lambda make=make: patch_dataloader_to_ddp(make(odd, rank))) for make, *_ in DIFFERING]  # type: ignore[misc]  # a default binds it
        told += [
            said(lambda: patch_dataloader_to_ddp(loader(), uneven="drop" if odd else "pad", seed=rank)),
            said(lambda: DDPSamplerWrapper(range(9 if odd else 10))),
        ]
        refused = [[said(lambda of=of, act=act: act(rank == of)) for act, _ in REFUSED] for of in range(2)]  # type: ignore[misc]  # as above
        ready = patch_dataloader_to_ddp(loader(), rank=rank, num_replicas=world_size)
        told.append(said(lambda: patch_dataloader_to_ddp(ready if odd else loader())))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ddp_patch, "__version__", f"0.{int(odd)}")
            told.append(said(lambda: patch_dataloader_to_ddp(loader())))
    patched = patch_dataloader_to_ddp((loader(shuffle=True), loader(shuffle=True)))
    return told, refused, [list(one) for one in patched]


def test_ranks_that_differ_are_told_so_on_every_rank_at_once_and_nothing_is_patched() -> None:
    ranks = run_ranks(differing, 3, True)  # ends them before any time-out of theirs
    expected = [(facts, remedy) for _, facts, remedy in DIFFERING]
    expected.append((("uneven: drop on rank 1; pad on ranks 0, 2", "seed: 0 on rank 0; 1 on rank 1"), SAME))
    expected.append(("sampler length: 9 on rank 1; 10 on ranks 0, 2", SAME))
    expected.append(("sharded already by: ", SAME))
    expected.append(("version of ddp_patch: 0.1 on rank 1; 0.0 on ranks 0, 2", SAME))
    for rank, (told, refused, _) in enumerate(ranks):
        assert told == ranks[0][0]
        for (name, message), (facts, remedy) in zip(told, expected, strict=True):
            assert name == "RankMismatchError"
            assert_tells(
                message, ("Agreeing on how data is sharded", *([facts] if isinstance(facts, str) else facts)), remedy
            )
        for odd, messages in enumerate(refused):
            for (name, message), (_, error) in zip(messages, REFUSED, strict=True):
                assert name == (error.partition(":")[0] if rank == odd else "RankMismatchError")
                if rank != odd:
                    facts = ("Agreeing on how data is sharded", f"rank {odd}: {error}")
                    assert_tells(message, facts, "all ranks again")
    # Seeds are counted as if those calls had not been made.
    assert [given for *_, given in ranks] == [given for *_, given in run_ranks(differing, 3, False)]


# Topology.


# The shape and the names of a mesh of four ranks, and the ranks that get the same batches.
MESHES: list[tuple[tuple[int, ...], tuple[str, ...], list[set[int]]]] = [
    ((2, 2), ("dp", "tp"), [{0, 1}, {2, 3}]),
    ((2, 2), ("pp", "fsdp"), [{0, 2}, {1, 3}]),
    ((2, 2, 1), ("dp_replicate", "dp_shard", "tp"), [{0}, {1}, {2}, {3}]),
    ((1, 2, 2), ("pp", "dp", "cp"), [{0, 1}, {2, 3}]),
    ((1, 2, 2, 1), ("pp", "dp_shard_mod_ep", "dp_shard_in_ep", "cp"), [{0}, {1}, {2}, {3}]),
    ((2, 1, 1, 2), ("data", "fsdp", "expert", "tensor"), [{0, 1}, {2, 3}]),
    ((2, 2), ("DP", "TP"), [{0, 1}, {2, 3}]),
]

# Meshes with a dimension of which nobody knows whether it splits the data, beside one that does; and which one it is.
UNUSUAL: list[tuple[tuple[int, ...], tuple[str, ...], str]] = [
    ((2, 2), ("node", "fsdp"), "'node' (of size 2)"),
    ((2, 2), ("dp_replicate", "ep"), "'ep' (of size 2)"),
    ((1, 2, 2), ("dp_replicate", "dp_shard_cp", "tp"), "'dp_shard_cp' (of size 2)"),
    ((2, 2, 1), ("rows", "columns", "dp"), "'rows' (of size 2) and 'columns' (of size 2)"),
]


def on_meshes(rank: int, world_size: int) -> list[list[int]]:
    seed_ambient(SEED + rank)
    given = []
    for shape, names, _ in MESHES:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        one = mesh["dp"] if names == ("dp", "tp") else mesh  # as many write it
        given.append(items(patch_dataloader_to_ddp(loader(shuffle=True), device_mesh=one)))
    return given


def on_a_mesh_of_other_names(rank: int, world_size: int) -> list[Any]:
    seed_ambient(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    alone = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    of_models = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    unnamed = DeviceMesh("cpu", list(range(world_size)))
    return [
        said(lambda: patch_dataloader_to_ddp(loader(), device_mesh=mesh)),
        said(lambda: patch_dataloader_to_ddp(loader(), device_mesh=of_models["tp"])),
        [items(patch_dataloader_to_ddp(loader(), device_mesh=one)) for one in (mesh["rows"], alone, unnamed)],
    ]


def on_a_mesh_with_an_unusual_name_beside_a_usual_one(rank: int, world_size: int) -> list[Any]:
    """The whole mesh; then, as the error says, the part of it that splits the data, or no mesh at all."""
    seed_ambient(rank)
    told = []
    for shape, names, _ in UNUSUAL:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        told.append(said(partial(patch_dataloader_to_ddp, loader(), device_mesh=mesh)))
    nodes = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("node", "fsdp", "tp"))
    parts = [nodes["node", "fsdp"], nodes["fsdp"], None]
    return [told, [items(patch_dataloader_to_ddp(loader(), device_mesh=part)) for part in parts]]


def worlds_that_differ(rank: int, world_size: int) -> list[tuple[str, str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    return [
        said(lambda: patch_dataloader_to_ddp(loader(), device_mesh=mesh["rows"] if rank else None)),
        said(lambda: patch_dataloader_to_ddp(loader(), device_mesh=mesh["columns" if rank == 3 else "rows"])),
        said(lambda: DDPSamplerWrapper(range(9), rank == 0)),
    ]


def test_four_ranks_share_over_the_data_parallel_dimensions_of_a_mesh_or_are_told_of_others() -> None:
    ranks, named, unusual, differing = run_each(
        4, on_meshes, on_a_mesh_of_other_names, on_a_mesh_with_an_unusual_name_beside_a_usual_one, worlds_that_differ
    )
    for rank, (refused, of_parts) in enumerate(unusual):
        for (name, message), (_, all_of_it, which) in zip(refused, UNUSUAL, strict=True):
            assert name == "InvalidOptionError"
            facts = (f"dimensions {all_of_it}", f"whether {which} splits the data")
            assert_tells(message, facts, "leave device_mesh= out")
        fourth_part, half = ([item % N for item in range(rank % shares, N + 1, shares)] for shares in (4, 2))
        assert of_parts == [fourth_part, half, fourth_part]
    for place, (_, _, alike) in enumerate(MESHES):
        shares = [{tuple(ranks[rank][place]) for rank in group} for group in alike]
        assert [len(share) for share in shares] == [1] * len(alike)
        together = Counter(item for (share,) in shares for item in share)
        assert set(together) == set(range(N))
        assert together.total() == 24
    for (name, message), names in zip(named[0][:2], ("('rows', 'columns')", "('tp',)"), strict=True):
        assert name == "InvalidOptionError"
        assert_tells(message, ("device_mesh", names), 'device_mesh=mesh["replicate", "shard"]')
    (first, of_four, unnamed), (second, *_), (third, *_), (fourth, *_) = (rank[2] for rank in named)
    assert first == second == list(range(0, N, 2))
    assert third == fourth == [*range(1, N, 2), 0]
    assert of_four == unnamed == [*range(0, N, 4)]
    for told in differing:
        assert [name for name, _ in told] == ["RankMismatchError"] * 3
        assert "rank 0: 0, rank 1: 1, rank 2: 2, rank 3: 3 on rank 0; rank 0: 0, rank 1: 0" in told[0][1]
        assert "  shares: " in told[1][1]
        assert "  shuffle_samples_between_gpus: True on rank 0; False on ranks 1 to 3" in told[2][1]


# An older torch sorts a group's ranks.
UNSORTED: Any = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}


def within_a_group(rank: int, world_size: int, ranks: list[int]) -> Any:
    """Everything that meets, in a group whose first rank is not rank 0, and while others train on something else."""
    group = dist.new_group(ranks, use_local_synchronization=True, **UNSORTED) if rank in ranks else None
    if rank == 3:
        dist.new_group([3], use_local_synchronization=True)  # ranks need not be in the same number of groups
    told: Any = None
    if group is not None:
        seed_ambient(SEED + rank)
        sampler = RandomSampler(range(N), generator=torch.Generator().manual_seed(rank))
        patched = [
            patch_dataloader_to_ddp(loader(sampler=sampler), process_group=group),
            patch_dataloader_to_ddp(loader(shuffle=True), process_group=group),
        ]
        told = [[items(one) for _ in range(2)] for one in patched]
    dist.barrier()
    return told


@pytest.mark.parametrize("ranks", [[1, 2, 3], [3, 1]])
def test_ranks_of_a_group_without_rank_0_meet(ranks: list[int]) -> None:
    results = run_ranks(within_a_group, 4, ranks)
    assert results[0] is None
    for place in range(2):
        epochs = [[results[rank][place][epoch] for rank in ranks] for epoch in range(2)]
        assert epochs[0] != epochs[1]
        for shares in epochs:
            together = Counter(item for share in shares for item in share)
            assert set(together) == set(range(N))
            assert together.total() == len(ranks) * -(-N // len(ranks))
