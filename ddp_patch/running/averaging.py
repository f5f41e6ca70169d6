"""Average, send and compare many tensors, in a few flat buckets."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["average", "broadcast", "checksums"]


# As many bytes are averaged at once, as in DistributedDataParallel.
_BUCKET = 25 * 2**20
# So many buckets are under way at once, which bounds the memory that copies take.
_UNDER_WAY = 2
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def average(tensors: Sequence[torch.Tensor], ranks: int) -> int:
    """Put the mean over all ranks into each of some dense tensors; return how many bytes this rank sent for that.

    The tensors have the same shapes, dtypes and order on every rank. What is equal on all ranks stays as it is, but for
    rounding.
    """
    return _in_buckets(
        tensors,
        flattened=lambda bucket: torch.cat([tensor.reshape(-1) for tensor in bucket]).div_(ranks),
        sent=lambda flat: dist.all_reduce(flat, async_op=True),
    )


def broadcast(tensors: Sequence[torch.Tensor]) -> None:
    """Make tensors of any dtypes those of rank 0. They have the same shapes, dtypes and order on every rank."""
    _in_buckets(
        tensors,
        flattened=lambda bucket: torch.cat([tensor.reshape(-1) for tensor in bucket]),
        sent=lambda flat: dist.broadcast(flat.view(torch.uint8), 0, async_op=True),
    )


def _in_buckets(
    tensors: Sequence[torch.Tensor],
    flattened: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    sent: Callable[[torch.Tensor], Any],
) -> int:
    """Communicate tensors in flat buckets, and copy back what comes of it; return how many bytes these had."""
    under_way: deque[tuple[Any, torch.Tensor, Sequence[torch.Tensor]]] = deque()
    sent_bytes = 0

    def finish() -> None:
        work, flat, bucket = under_way.popleft()
        work.wait()
        for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))

    with torch.no_grad():
        for bucket in _buckets(tensors):
            if len(under_way) == _UNDER_WAY:
                finish()
            flat = flattened(bucket)
            sent_bytes += flat.numel() * flat.element_size()
            under_way.append((sent(flat), flat, bucket))
        while under_way:
            finish()
    return sent_bytes


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of one device and dtype together, up to a number of bytes."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for alike in kinds.values():
        ends = np.cumsum([tensor.numel() * tensor.element_size() for tensor in alike])
        numbered = zip((ends - 1) // _BUCKET, alike, strict=True)
        for _, bucket in groupby(numbered, key=lambda pair: pair[0]):
            yield [tensor for _, tensor in bucket]


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return a number for each tensor that is the same where all its bits are."""
    sums = []
    with torch.no_grad():
        for tensor in tensors:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            if real.layout != torch.strided:
                real = real.to_dense()
            flat = real.detach().contiguous().reshape(-1)
            sums.append(flat.view(_WHOLE_NUMBERS[flat.element_size()]).sum(dtype=torch.int64))
    return [int(value) for value in torch.stack([value.cpu() for value in sums])] if sums else []
