"""What ranks do that move batches to a device: with the CPU in a GPU's place, all of it runs without one, too.

Every function is called on each rank, with a ``Setting``.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from ddp_patch import gather_in_order, iter_with_weights, loader_state, patch_dataloader_to_ddp, restore_loader

__all__ = ["ALL", "WITHOUT_COLLECTIVES", "Setting", "several"]

N = 37


class Setting(NamedTuple):
    """Where the ranks are.

    Attributes:
        backend: The process group's; "refuses" has no collective at all.
        device: Where the loop moves batches.
        folder: Where the ranks meet.
    """

    backend: str
    device: str
    folder: Path


class Refuses(dist.ProcessGroup):
    """A backend whose collectives are the user's alone, as NCCL's are: it raises wherever anybody else calls one."""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "refuses"

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a collective on the user's process group")

    allreduce = broadcast = allgather = _allgather_base = gather = scatter = reduce = barrier = _refuse
    send = recv = recv_anysource = alltoall = alltoall_base = reduce_scatter = _reduce_scatter_base = _refuse
    allgather_into_tensor_coalesced = allgather_coalesced = allreduce_coalesced = _refuse


def _refusing(store: Any, rank: int, size: int, timeout: timedelta) -> Refuses:
    kind: Any = Refuses  # torch's stubs know another constructor
    made: Refuses = kind(rank, size)
    return made


def in_setting(rank: int, world_size: int, setting: Setting, do: Callable[..., Any]) -> Any:
    """Call a function on a rank, in a process group of the setting's backend."""
    dist.destroy_process_group()
    if setting.backend == "refuses":
        # Only the size and the rank of it are asked for.
        dist.Backend.register_backend("refuses", _refusing, devices=["cpu"])
    device = torch.device(setting.device)
    if device.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    init_method = f"file://{setting.folder / 'store'}"
    limit = timedelta(seconds=100)
    dist.init_process_group(setting.backend, init_method, limit, rank=rank, world_size=world_size)
    torch.manual_seed(100 + rank)
    return do(rank, world_size, setting)


def several(rank: int, world_size: int, setting: Setting, what: Sequence[Callable[..., Any]]) -> list[Any]:
    """Do one after the other, in one process group, on this rank's GPU if there are any."""
    here = setting._replace(device=f"cuda:{rank % torch.cuda.device_count()}") if setting.device == "cuda" else setting
    found: list[Any] = in_setting(rank, world_size, here, lambda *where: [do(*where) for do in what])
    return found


def numbers(dtype: torch.dtype = torch.float32) -> TensorDataset:
    return TensorDataset(torch.arange(N * 3, dtype=dtype).view(N, 3), torch.arange(N))


class Parts(IterableDataset[torch.Tensor]):
    """Worker r of n reads its own numbers, and the first reads most."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info: Any = get_worker_info()
        for number in range(info.id, N, info.num_workers):
            if info.id == 0 or number < N // 2:
                yield torch.tensor(number)


def on(setting: Setting, tensor: Any) -> Any:
    """Return a tensor on the device, copied as docs/gpu.md shows it."""
    return tensor.to(setting.device, non_blocking=True)


def takes_shares(rank: int, world_size: int, setting: Setting) -> None:
    """The exchange and the histories; loaders of workers and of none, pinned and not."""
    for num_workers, pin_memory in ((0, False), (1, True)):
        loader: DataLoader[Any] = DataLoader(
            numbers(),
            4,
            shuffle=True,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
        )
        loader = patch_dataloader_to_ddp(loader, timeout=60)
        for _ in range(2):
            share = [(on(setting, x).tolist(), on(setting, y).tolist()) for x, y in loader]
            ids = gather_in_order([number for _, y in share for number in y], loader)
            assert sorted(ids) == list(range(N))
            assert all(row[0] == 3 * number for x, y in share for row, number in zip(x, y, strict=True))


def gathers(rank: int, world_size: int, setting: Setting) -> None:
    """Outputs on the device, of dtypes that not every library sends."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.complex64):
        loader = patch_dataloader_to_ddp(DataLoader(numbers(), 4), timeout=60)
        given = torch.cat([on(setting, x) for x, _ in loader]).to(dtype)
        (wanted,) = (numbers().tensors[0].to(dtype),)
        found = gather_in_order({"x": given}, loader)["x"]
        assert found.device == given.device
        assert torch.equal(found.cpu(), wanted)


def hands_over(rank: int, world_size: int, setting: Setting) -> list[int]:
    """A dataset that splits itself: ranks hand each other batches beside the user's group."""
    loader = DataLoader(Parts(), 2, num_workers=1, pin_memory=True)
    loader = patch_dataloader_to_ddp(loader, share="by_worker", uneven="keep", timeout=60)
    return [number for batch in loader for number in on(setting, batch).tolist()]


def weighs(rank: int, world_size: int, setting: Setting) -> None:
    """Ranks that sum a number in each step."""
    loader = patch_dataloader_to_ddp(DataLoader(numbers(), 4), timeout=60)
    weighed = list(iter_with_weights(loader, weight_of=lambda batch: batch[1] + 1.0))
    assert {weights.device.type for _, weights in weighed} == {"cpu"}
    total = sum(float((on(setting, weights) * on(setting, y + 1)).sum()) for (_, y), weights in weighed)
    assert total > 0


def resumes(rank: int, world_size: int, setting: Setting) -> None:
    """What was pinned ahead when the state was taken comes again."""

    def made() -> Any:
        loader = DataLoader(numbers(), 4, shuffle=True, num_workers=1, pin_memory=True)
        return patch_dataloader_to_ddp(loader, seed=3, timeout=60)

    whole, stopped, resumed = [on(setting, y).tolist() for _, y in made()], made(), made()
    for step, _ in enumerate(stopped, 1):
        if step == 2:
            break
    restore_loader(resumed, loader_state(stopped))
    assert [on(setting, y).tolist() for _, y in resumed] == whole[2:]


def computes(rank: int, world_size: int, setting: Setting) -> None:
    """Many batches, of which none is overwritten by a later one while the device still works on it."""
    size = 12 if setting.device == "cpu" else 256
    data = torch.arange(size, dtype=torch.float32).view(-1, 1).expand(-1, 16 * size).contiguous()
    loader = DataLoader(TensorDataset(data), 2, num_workers=1, pin_memory=True)
    loader = patch_dataloader_to_ddp(loader, timeout=60)
    busy, sums = torch.ones(8 * size, 8 * size, device=setting.device), []
    for (pinned,) in loader:
        x = on(setting, pinned)
        for _ in range(8):
            busy = (busy @ busy).clamp(max=1.0)
        sums.append((x * busy[0, 0]).sum(dim=1))  # enqueued behind all that
    found = gather_in_order(torch.cat(sums), loader)
    assert torch.equal(found.cpu(), data.sum(dim=1))


def trains(rank: int, world_size: int, setting: Setting) -> list[float]:
    """What ``docs/training.md`` shows; returns the parameters."""
    device = torch.device(setting.device)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).to(device)
    parallel = DistributedDataParallel(
        model, device_ids=None if device.type == "cpu" else [torch.cuda.current_device()]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = DataLoader(numbers(), 8, num_workers=1, pin_memory=True)
    loader = patch_dataloader_to_ddp(loader, share="within_batches", timeout=60)
    for (x, y), weights in iter_with_weights(loader):
        optimizer.zero_grad()
        losses = (parallel(on(setting, x)).squeeze(1) - on(setting, y)) ** 2
        (losses * weights.to(losses.device)).sum().backward()
        optimizer.step()
    return [value for parameter in model.parameters() for value in parameter.detach().cpu().flatten().tolist()]


WITHOUT_COLLECTIVES = (takes_shares, gathers, hands_over, weighs, resumes)
ALL = (*WITHOUT_COLLECTIVES, computes, trains)
