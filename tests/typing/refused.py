"""Mistakes that mypy and pyright find; each ignored error that they would not report is itself an error."""

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddp_patch import (
    DDPSamplerWrapper,
    assert_loaders_patched,
    gather_in_order,
    loader_state,
    patch_dataloader_to_ddp,
    restore_loader,
)
from ddp_patch.samplers import PKBatchSampler, ScalableRandomSampler
from ddp_patch.testing import run_ranks


def options(loader: DataLoader[str]) -> None:
    patch_dataloader_to_ddp(loader, uneven="wrong")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    patch_dataloader_to_ddp(loader, uneven="none")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    patch_dataloader_to_ddp(loader, fingerprint="files")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    patch_dataloader_to_ddp(loader, seed="0")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    patch_dataloader_to_ddp(loader, rank="0", num_replicas=2)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    patch_dataloader_to_ddp(loader, process_group=0)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    patch_dataloader_to_ddp(loader, unknown=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    patch_dataloader_to_ddp(loader, "drop")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def what_a_patched_loader_has_not(loader: DataLoader[str]) -> None:
    loader.set_epoch(3)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    patched = patch_dataloader_to_ddp(loader)
    patched.set_epoch("3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    patched.sampler.set_epochs(3)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def options_of_several(loader: DataLoader[str]) -> None:
    patch_dataloader_to_ddp((loader,), uneven="wrong")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    patch_dataloader_to_ddp((loader,), unknown=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def what_is_no_loader(dataset: Dataset[str], loader: DataLoader[str]) -> None:
    patch_dataloader_to_ddp(dataset)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert_loaders_patched([dataset])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    gather_in_order([1], dataset)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    loader_state(loader, 1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    restore_loader(loader, 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def what_all_ranks_get(outputs: Tensor, loader: DataLoader[str]) -> None:
    gather_in_order(outputs, loader, dst=0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def samplers() -> None:
    DDPSamplerWrapper([0, 1], uneven="wrong")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    DDPSamplerWrapper([0, 1], num_ranks=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    PKBatchSampler([0, 1])  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    ScalableRandomSampler("10")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def on_rank(rank: int, world_size: int, offset: int) -> int:
    return rank + world_size + offset


def ranks() -> None:
    run_ranks(on_rank, 2)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    run_ranks(on_rank, 2, "3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
