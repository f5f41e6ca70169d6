"""Values as bytes for other ranks: what comes is what was sent."""

from typing import Any

import numpy as np
import pytest
import torch

from ddp_patch.ranks.packing import packed, unpacked


def sent(value: Any) -> Any:
    """A value as it comes at another rank, which receives it into memory of its own."""
    return unpacked(np.frombuffer(bytearray(packed(value)), np.uint8).data)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(12).reshape(3, 4)[:, 1:3],
        torch.arange(12).reshape(3, 4).t(),
        torch.ones(1, 3)[:, 0],
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.tensor(7),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
    ],
    ids=str,
)
def test_tensors_come_as_they_were_sent(tensor: torch.Tensor) -> None:
    came = sent({"x": tensor})["x"]
    assert (came.dtype, came.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(came, tensor)


def test_whatever_else_a_batch_holds() -> None:
    frozen = np.arange(4)
    frozen.flags.writeable = False
    batch = [{"name": "é", "n": 3, "none": None}, (frozen, np.arange(6).reshape(2, 3)[:, ::2], np.array(["a", "b"]))]
    came = sent(batch)
    assert came[0] == batch[0]
    for one, other in zip(came[1], batch[1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_came_can_be_changed() -> None:
    came = sent([torch.ones(3), np.ones(3)])
    came[0] += 1
    came[1] += 1
    assert came[0].tolist() == came[1].tolist() == [2.0] * 3


def test_a_view_comes_without_the_storage_behind_it() -> None:
    view = torch.arange(100_000)[:3]
    assert unpacked(packed(view)).tolist() == [0, 1, 2]
    assert len(packed(view)) < 1000
