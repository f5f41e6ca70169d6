"""webdataset's streams of tar files."""

import io
import tarfile
from pathlib import Path
from typing import Any

import webdataset as wds
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp
from third_party.base import Case, Fate, N, World, files

SHARDS = 6


def shards() -> list[str]:
    """The paths of tar files with N numbers."""
    return sorted(map(str, files("webdataset", write).iterdir()))


def write(folder: Path) -> None:
    folder.mkdir()
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", mode="w") as tar:
            for number in range(shard, N, SHARDS):
                text = str(number).encode()
                member = tarfile.TarInfo(f"{number:04}.cls")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))


def stream(**options: Any) -> Any:
    return wds.WebDataset(shards(), shardshuffle=False, empty_check=False, **options).decode().to_tuple("cls")


def unsplit(world: World, **options: Any) -> Any:
    return DataLoader(stream(nodesplitter=None), batch_size=4, **options)


def single_node(world: World) -> Any:
    return DataLoader(stream(), batch_size=4)


def split_by_node(world: World) -> Any:
    return DataLoader(stream(nodesplitter=wds.split_by_node), batch_size=4)


def web_loader(world: World) -> Any:
    return wds.WebLoader(stream(nodesplitter=None), batch_size=4)


def patch_inner(outer: Any, options: dict[str, Any]) -> Any:
    outer.pipeline[0] = patch_dataloader_to_ddp(outer.pipeline[0], **options)
    return outer


CASES = [
    Case("webdataset", "`WebDataset(nodesplitter=None)`", unsplit),
    Case(
        "webdataset",
        "`WebDataset(nodesplitter=None)` with 2 workers",
        lambda world: unsplit(world, num_workers=2),
    ),
    Case("webdataset", "`WebDataset(nodesplitter=None)` on ranks", unsplit, on_ranks=True),
    Case("webdataset", "`WebDataset(nodesplitter=split_by_node)`", split_by_node, Fate.AS_IT_IS, on_ranks=True),
    Case(
        "webdataset",
        "`WebLoader`",
        web_loader,
        Fate.REFUSED,
        remedy=patch_inner,
        told="outer.pipeline[0] = patch_dataloader_to_ddp(outer.pipeline[0])",
    ),
]
