"""webdataset's streams of tar files."""

from typing import Any

import webdataset as wds
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp
from third_party.base import Case, Fate, N, World, files, tars


def shards() -> list[str]:
    """The paths of tar files with N numbers."""
    folder = files("webdataset", lambda folder: tars(folder, (range(shard, N, 6) for shard in range(6))))
    return sorted(map(str, folder.iterdir()))


def stream(**options: Any) -> Any:
    return wds.WebDataset(shards(), shardshuffle=False, empty_check=False, **options).decode().to_tuple("cls")


def unsplit(world: World, **options: Any) -> Any:
    return DataLoader(stream(nodesplitter=None), batch_size=4, **options)


def single_node(world: World, **options: Any) -> Any:
    return DataLoader(stream(), batch_size=4, **options)


def without_node_splitter(loader: Any, options: dict[str, Any]) -> Any:
    return patch_dataloader_to_ddp(unsplit(World(), num_workers=loader.num_workers), **options)


def stages(*splitters: Any) -> list[Any]:
    return [wds.SimpleShardList(shards()), *splitters, wds.split_by_worker, wds.tarfile_to_samples(), wds.decode()]


def pipeline(world: World) -> Any:
    return DataLoader(wds.DataPipeline(*stages(wds.single_node_only), wds.to_tuple("cls")), batch_size=4)


def without_stage(loader: Any, options: dict[str, Any]) -> Any:
    return patch_dataloader_to_ddp(
        DataLoader(wds.DataPipeline(*stages(), wds.to_tuple("cls")), batch_size=4), **options
    )


def composed(world: World) -> Any:
    return DataLoader(stream().compose(wds.map(tuple)), batch_size=4)


def mixed(world: World) -> Any:
    return DataLoader(wds.RoundRobin([stream(), stream()]), batch_size=4)


def mixed_without(loader: Any, options: dict[str, Any]) -> Any:
    parts = [stream(nodesplitter=None), stream(nodesplitter=None)]
    return patch_dataloader_to_ddp(DataLoader(wds.RoundRobin(parts), batch_size=4), **options)


def web_loader_of_one_node(world: World) -> Any:
    return wds.WebLoader(stream(), batch_size=4).pipeline[0]


def split_by_node(world: World) -> Any:
    return DataLoader(stream(nodesplitter=wds.split_by_node), batch_size=4)


def web_loader(world: World) -> Any:
    return wds.WebLoader(stream(nodesplitter=None), batch_size=4)


def patch_inner(outer: Any, options: dict[str, Any]) -> Any:
    outer.pipeline[0] = patch_dataloader_to_ddp(outer.pipeline[0], **options)
    return outer


def refused(name: str, make: Any, remedy: Any, told: str = "webdataset.WebDataset(..., nodesplitter=None)") -> Case:
    return Case("webdataset", name, make, Fate.REFUSED, on_ranks=True, remedy=remedy, told=told)


CASES = [
    Case("webdataset", "`WebDataset(nodesplitter=None)`", unsplit),
    Case("webdataset", "`WebDataset(nodesplitter=None)` with 2 workers", lambda world: unsplit(world, num_workers=2)),
    Case("webdataset", "`WebDataset(nodesplitter=None)` on ranks", unsplit, on_ranks=True),
    Case("webdataset", "`WebDataset(nodesplitter=split_by_node)`", split_by_node, Fate.AS_IT_IS, on_ranks=True),
    Case("webdataset", "`WebDataset` in a world given by hand", single_node),
    refused("`WebDataset`", single_node, without_node_splitter),
    refused("`WebDataset` with 2 workers", lambda world: single_node(world, num_workers=2), without_node_splitter),
    refused("`WebDataset(...).compose(...)`", composed, without_node_splitter),
    refused("`RoundRobin` of two", mixed, mixed_without),
    refused("the loader inside `WebLoader`", web_loader_of_one_node, without_node_splitter),
    refused(
        "`DataPipeline` with `single_node_only`",
        pipeline,
        without_stage,
        "leave the stage webdataset.single_node_only out of webdataset.DataPipeline(...)",
    ),
    Case(
        "webdataset",
        "`WebLoader`",
        web_loader,
        Fate.REFUSED,
        remedy=patch_inner,
        told="outer.pipeline[0] = patch_dataloader_to_ddp(outer.pipeline[0])",
    ),
]
