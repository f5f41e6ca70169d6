"""Loaders that a framework has shared already are left alone, or refused by name; and the guard counts them."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from lightning.fabric import Fabric
from messages import assert_tells, raises
from quick import run_ranks
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from zoo import assert_shared_exactly, seed_ambient

from ddp_patch import check_loaders_is_patched, gather_in_order, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import NotPatchedError, StateError, UnsupportedLoaderError
from ddp_patch.integrations.accelerate import prepare_patched

with warnings.catch_warnings():
    # Importing ignite imports parts of torch that use torch.jit, which torch 2.13 deprecates.
    warnings.filterwarnings("ignore", r"`torch.jit.\w+` is deprecated", DeprecationWarning)
    import ignite.distributed as idist

N = 21


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


def numbered(**options: Any) -> DataLoader[Any]:
    return DataLoader(range(N), batch_size=4, **options)  # type: ignore[arg-type]  # a range is a dataset


def streamed() -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=4)


def left_alone(loader: Any) -> bool:
    patched = patch_dataloader_to_ddp(loader)
    is_same = patched.sampler is loader.sampler and patched.dataset is loader.dataset
    return is_same and check_loaders_is_patched({"train": [loader, patched]})


def refusal(loader: Any) -> str:
    assert not check_loaders_is_patched([loader])
    with pytest.raises(UnsupportedLoaderError) as error:
        patch_dataloader_to_ddp(loader)
    return str(error.value)


def shared_by_accelerate(rank: int, world_size: int) -> dict[str, Any]:
    seed_ambient(100 + rank)
    accelerator = Accelerator(cpu=True)
    dispatching = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    sharing = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    patched = patch_dataloader_to_ddp(numbered(shuffle=True))
    prepared: Any = prepare_patched(accelerator, patched)
    found: dict[str, Any] = {
        "shard": left_alone(accelerator.prepare(numbered())),
        "shard of an iterable": left_alone(sharing.prepare(streamed())),
        "dispatcher": left_alone(dispatching.prepare(numbered())),
        "dispatcher of an iterable": left_alone(accelerator.prepare(streamed())),
        "patched": accelerator.prepare(patched) is patched,
        "prepared": accelerator.prepare(prepared) is prepared and left_alone(prepared),
    }
    with raises(NotPatchedError, ("prepare_patched", "DataLoader", "not patched"), "patch_dataloader_to_ddp()"):
        prepare_patched(accelerator, numbered())
    for level, loader in {"iterable": streamed(), "unbatched": DataLoader(range(N), batch_size=None)}.items():  # type: ignore[arg-type]  # a range is a dataset
        shared = prepare_patched(accelerator, patch_dataloader_to_ddp(loader))
        found[level] = torch.cat([torch.as_tensor(batch).reshape(-1) for batch in shared]).tolist()
    # The last batch of an epoch is known as such.
    ends = [accelerator.gradient_state.end_of_dataloader for _ in prepared]
    found["ends"] = ends == [False] * (len(ends) - 1) + [True]
    found["in order"] = sorted(gather_in_order(torch.cat(list(prepared)), prepared).tolist())
    # A place of a later epoch is kept, although accelerate's loaders call set_epoch at each pass.
    prepared.set_epoch(7)
    whole = [batch.tolist() for batch in prepared]
    prepared.set_epoch(7)
    for _ in prepared:
        state = prepared.state_dict()
        with raises(StateError, ("_Prepared", "ahead"), "batches_done"):
            loader_state(prepared)  # accelerate has fetched one more
        assert state == loader_state(prepared, batches_done=1) != loader_state(patched)
        break
    again = patch_dataloader_to_ddp(numbered(shuffle=True), seed=patched.sampler.seed)
    restore_loader(again, state)
    found["resumed"] = [batch.tolist() for batch in prepare_patched(accelerator, again)] == whole[1:]
    return found


def gathered(rank: int, world_size: int) -> list[Any]:
    """What is gathered of a loader that is patched alone, of prepared ones, and of one that accelerate shards."""
    seed_ambient(rank)
    accelerator = Accelerator(cpu=True)
    patched: list[Any] = [
        prepare_patched(accelerator, patch_dataloader_to_ddp(numbered(), **options))  # type: ignore[call-overload]  # these
        for options in ({}, {"uneven": "drop"}, {"share": "within_batches"})
    ]
    loaders = [accelerator.prepare(patch_dataloader_to_ddp(numbered())), accelerator.prepare(numbered()), *patched * 2]
    found = []
    for loader in loaders:
        steps = [accelerator.gather_for_metrics({"rows": rows, "twice": 2 * rows}) for rows in loader]
        assert all(torch.equal(2 * step["rows"], step["twice"]) for step in steps)
        found.append([row for step in steps for row in step["rows"].tolist()])
    return found


SHARED = ["shard", "shard of an iterable", "dispatcher", "dispatcher of an iterable", "patched", "prepared"]
SHARED += ["ends", "resumed"]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_accelerates_loaders() -> None:
    first, second = run_ranks(shared_by_accelerate, 2)
    for rank in (first, second):
        assert all(rank[name] for name in SHARED)
        assert rank["in order"] == list(range(N))
    for name in ("iterable", "unbatched"):
        assert_shared_exactly([first[name], second[name]], N)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_gathering_for_metrics_gives_each_sample_once_in_order() -> None:
    first, second = run_ranks(gathered, 2)
    assert first == second
    plain, theirs, *prepared = first
    assert sorted(theirs) == plain == list(range(N))
    assert prepared == [plain, plain[: N - N % 2], plain] * 2  # padded, dropped and divided


def test_in_a_single_process_accelerate_prepares_it() -> None:
    accelerator = Accelerator(cpu=True)
    loader = numbered()
    prepared: Any = prepare_patched(accelerator, loader)
    assert [batch.tolist() for batch in prepared] == [batch.tolist() for batch in loader]
    assert prepared.device == accelerator.device
    # It is shared among one, and its wrapper cannot be shared among more.
    assert not check_loaders_is_patched([prepared])
    with raises(UnsupportedLoaderError, ("DataLoaderShard", "framework", "DataLoader"), "loader first"):
        patch_dataloader_to_ddp(prepared, rank=0, num_replicas=2)


def shared_by_others(rank: int, world_size: int) -> dict[str, Any]:
    seed_ambient(100 + rank)
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"  # the ranks were started by something else than Fabric
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="ddp")
    fabric.launch()
    patched = patch_dataloader_to_ddp(numbered(shuffle=True))
    sampler: Any = patched.sampler
    wrapped: Any = fabric.setup_dataloaders(patched)
    passing = iter(wrapped)
    for _ in range(2):
        next(passing)
    found: dict[str, Any] = {
        "Fabric's": left_alone(fabric.setup_dataloaders(numbered(shuffle=True))),
        "patched, then Fabric's": left_alone(wrapped),
        "state": loader_state(wrapped, batches_done=2) == loader_state(patched) == wrapped.state_dict(),
        "Fabric's, not shared": refusal(fabric.setup_dataloaders(numbered(), use_distributed_sampler=False)),
        "ignite's": left_alone(idist.auto_dataloader(range(N), batch_size=8)),
        "ignite's, of a sampler": left_alone(
            idist.auto_dataloader(range(N), batch_size=8, sampler=WeightedRandomSampler([1.0] * N, N))
        ),
    }
    # Fabric's wrapper says which epoch comes; passing over the patched loader itself goes on from a place.
    sampler.set_epoch(5)
    whole = [batch.tolist() for batch in patched]
    sampler.set_epoch(5)
    next(iter(patched))
    restore_loader(patched, loader_state(patched))
    found["resumed"] = [fabric.to_device(batch).tolist() for batch in patched] == whole[1:]
    # ignite takes a patched loader's sampler as it is; its batch size is that of all ranks together.
    sampler.set_epoch(5)
    of_sampler = idist.auto_dataloader(range(N), batch_size=8, sampler=sampler)
    found["ignite's, of a patched sampler"] = [batch.tolist() for batch in of_sampler] == whole
    return found


def test_fabric_keeps_a_loaders_place(tmp_path: Path) -> None:
    def made() -> Any:
        return patch_dataloader_to_ddp(numbered(shuffle=True), seed=3, rank=1, num_replicas=2)

    fabric = Fabric(accelerator="cpu", devices=1)
    loader, resumed = made(), made()
    passing = iter(fabric.setup_dataloaders(loader))
    next(passing)
    fabric.save(tmp_path / "saved.ckpt", {"loader": loader})
    fabric.load(tmp_path / "saved.ckpt", {"loader": resumed})
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in passing]


def test_lightnings_and_ignites_loaders() -> None:
    for rank in run_ranks(shared_by_others, 2):
        assert_tells(rank.pop("Fabric's, not shared"), ("_FabricDataLoader", "framework"), "loader first")
        assert rank == dict.fromkeys(rank, True)
