"""What differs on a GPU, by ``nox -s gpu``: on one, which several gloo ranks share, and on several, with NCCL.

``tests/ranks/test_device_ranks.py`` does the same on the CPU.
"""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerated import ALL, N, Setting, hands_over, in_setting, is_auto, numbers, shows, trains
from quick import run_ranks
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp

GPUS = torch.cuda.device_count()

pytestmark = pytest.mark.skipif(GPUS == 0, reason="there is no GPU that torch sees: torch.cuda.device_count() is 0")
needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
needs_several = pytest.mark.skipif(GPUS < 2, reason=f"NCCL takes one rank for each GPU, and there are {GPUS}")


def several(rank: int, world_size: int, setting: Setting, what: tuple[Any, ...]) -> list[Any]:
    """Do one after the other, in one process group, on this rank's GPU."""
    here = setting._replace(device=f"cuda:{rank % torch.cuda.device_count()}")
    found: list[Any] = in_setting(rank, world_size, here, lambda *where: [do(*where) for do in what])
    return found


def check(found: list[list[Any]]) -> None:
    given = [number for rank in found for number in rank[ALL.index(hands_over)]]
    assert len(given) == len(set(given))
    parameters = [rank[ALL.index(trains)] for rank in found]
    assert all(one == parameters[0] for one in parameters)


def test_gloo_ranks_that_share_gpus(tmp_path: Path) -> None:
    """The script of the page takes a GPU for each rank."""
    check(
        run_ranks(
            several, 2, Setting("gloo", "cuda", tmp_path), ALL if GPUS > 1 else ALL[: ALL.index(shows)], timeout=300
        )
    )


@needs_nccl
def test_a_rank_of_nccl(tmp_path: Path) -> None:
    check(run_ranks(several, 1, Setting("nccl", "cuda", tmp_path), ALL, timeout=300))


@needs_nccl
@needs_several
def test_ranks_of_nccl(tmp_path: Path) -> None:
    found = run_ranks(several, GPUS, Setting("nccl", "cuda", tmp_path), (*ALL, is_auto), timeout=300)
    check(found)
    assert [rank[-1] for rank in found] == [f"cuda:{rank}" for rank in range(GPUS)]


def patched(num_workers: int, **options: Any) -> Any:
    loader = DataLoader(numbers(), 4, num_workers=num_workers, pin_memory=True)
    return patch_dataloader_to_ddp(loader, rank=0, num_replicas=1, **{"device": "cuda"} | options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_copied_in_a_stream_of_their_own(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With workers, the copy of the next batch is begun before the first is handed out."""
    copied_in, recorded_in = [], []
    to, record = torch.Tensor.to, torch.Tensor.record_stream

    def notes_to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        copied_in.append((torch.cuda.current_stream(), tensor.is_pinned(), options))
        return to(tensor, *args, **options)

    def notes_record(tensor: torch.Tensor, stream: Any) -> None:
        recorded_in.append(stream)
        record(tensor, stream)

    iterator = iter(patched(num_workers))
    monkeypatch.setattr(torch.Tensor, "to", notes_to)
    monkeypatch.setattr(torch.Tensor, "record_stream", notes_record)
    x, y = next(iterator)
    assert (x.device.type, y.device.type) == ("cuda", "cuda")
    tensors = 2 * (2 if num_workers else 1)
    assert len(copied_in) == tensors
    assert all(stream != torch.cuda.current_stream() for stream, _, _ in copied_in)
    assert all(is_pinned and options == {"non_blocking": True} for _, is_pinned, options in copied_in)
    assert recorded_in == [torch.cuda.current_stream()] * 2


def test_memory_is_not_used_again_while_it_is_read() -> None:
    """Each batch is let go while the device is busy, and the next one is copied into what is free."""
    data = torch.arange(64, dtype=torch.float32).view(-1, 1).expand(-1, 2**18).contiguous()
    rows: Any = data  # which has what a dataset needs
    loader: DataLoader[Any] = DataLoader(rows, 1, num_workers=1, pin_memory=True)
    loader = patch_dataloader_to_ddp(loader, rank=0, num_replicas=1, device="cuda")
    busy, sums = torch.ones(2048, 2048, device="cuda"), []
    for x in loader:
        for _ in range(20):
            busy = (busy @ busy).clamp(max=1.0)
        sums.append((x * busy[0, 0]).mean())
        del x
    assert torch.stack(sums).tolist() == [float(row[0]) for row in data]


def nested(items: list[Any]) -> torch.Tensor:
    return torch.nested.nested_tensor([x[: 1 + int(y) % 2] for x, y in items])


@pytest.mark.filterwarnings("ignore")  # torch's, about nested tensors that it leaves behind
def test_nested_tensors_come_there() -> None:
    """They cannot be recorded in a stream."""
    loader = DataLoader(numbers(), 4, num_workers=1, collate_fn=nested)
    loader = patch_dataloader_to_ddp(loader, rank=0, num_replicas=1, device="cuda")
    batches = list(loader)
    assert {batch.device.type for batch in batches} == {"cuda"}
    assert sum(len(batch.unbind()) for batch in batches) == N


def test_a_loop_in_a_stream_of_its_own() -> None:
    cuda: Any = torch.cuda  # whose constructors have no types
    with cuda.stream(cuda.Stream()):
        found = [number for _, y in patched(2) for number in y.tolist()]
    assert found == list(range(N))


def test_a_break_leaves_the_rest_for_the_next_pass() -> None:
    loader = patched(2)
    list(islice(loader, 2))
    assert [number for _, y in loader for number in y.tolist()] == list(range(N))


def test_auto_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(GPUS - 1))
    x, _ = next(iter(patched(0, device="auto")))
    assert x.device == torch.device("cuda", GPUS - 1)
