"""What the outputs of several ranks come to, without sending anything; and outputs of every form."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader
from zoo import loader

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.evaluation.gather import OwnOutputs, are_alike
from ddp_patch.evaluation.outputs import judge_outputs
from ddp_patch.evaluation.shares import share_of_pass, share_of_step
from ddp_patch.evaluation.steps import shared_facts

__all__ = ["assert_same", "outputs_for", "shares", "together"]


def shares(world_size: int, **options: Any) -> list[DataLoader[Any]]:
    given = {name: options.pop(name) for name in ("batch_size", "batch_sampler", "sampler") if name in options}
    return [
        patch_dataloader_to_ddp(loader(**given), rank=rank, num_replicas=world_size, **options)
        for rank in range(world_size)
    ]


def together(outputs: list[Any], loaders: Sequence[DataLoader[Any]], *, in_step: bool = False) -> Any:
    """As each rank would have it."""
    operation, given = "gather_step" if in_step else "gather_in_order", []
    for own, shared in zip(outputs, loaders, strict=True):
        facts = shared_facts(operation, shared)
        assert facts is not None
        share_of = partial(share_of_step if in_step else share_of_pass, facts)
        given.append(OwnOutputs(own, share_of))
    headers = np.stack([own.header for own in given])
    judge_outputs(operation, {rank: own.said() for rank, own in enumerate(given)})
    assert are_alike(headers)
    assert headers[:, 3].tolist() == [len(own.data) for own in given]
    first, *_ = [own.whole(headers, [each.data for each in given]) for own in given]
    return first


class Pair(NamedTuple):
    logits: Any
    names: Any = None


@dataclass(frozen=True)
class Output:
    logits: Any
    loss: Any = None
    more: dict[str, Any] = field(default_factory=dict)


def outputs_for(items: list[int]) -> dict[str, Any]:
    """Outputs of every form for these items, no two of which have the same."""
    numbers = torch.tensor(items)
    plain = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint16]
    tensors = [numbers.to(dtype) for dtype in plain]
    tensors += [numbers % 3 == 0, torch.complex(numbers.double(), -numbers.double()).conj()]
    tensors += [
        torch.stack([numbers, -numbers]).T,
        numbers.expand(2, 3, -1).permute(2, 0, 1),
        numbers.float().requires_grad_(),
    ]
    tensors += [torch.zeros(len(items), 0), torch.nn.Parameter(numbers.float())]
    texts = [str(item) * (1 + item) for item in items]  # as wide as the rank's last
    arrays = [np.array(items, dtype) for dtype in ("f4", ">i8", "?", "c16", "u1", "datetime64[s]", "timedelta64[ms]")]
    arrays += [np.array(texts), np.array(texts, "S")]
    if hasattr(np.dtypes, "StringDType"):  # numpy 2's
        arrays.append(np.array(texts, np.dtypes.StringDType()))
    arrays += [np.array([None if item % 2 else {item} for item in items], object)]
    arrays += [np.array([(item, text, [item] * 2) for item, text in zip(items, texts, strict=True)], "i2,U9,(2,)f4")]
    arrays += [
        np.array(items).repeat(2).reshape(-1, 2)[:, ::-1],
        np.broadcast_to(np.array(items)[:, None], (len(items), 4)),
    ]
    # Not one box: of a rank with one sample, that would be a list of batches.
    boxes = [{"boxes": torch.full((2 * item, 4), item), "ids": list(range(2 * item))} for item in items]
    lists = [items, texts, list(numbers.float()[:, None].repeat(1, 3)), boxes]
    nests = Output(Pair(numbers, texts), more={"ids": items, "none": None}), (Pair(numbers), None)
    return {"tensors": tuple(tensors), "arrays": tuple(arrays), "lists": {"of": tuple(lists)}, "nests": nests}


def assert_same(one: Any, other: Any) -> None:
    match other:
        case torch.Tensor():
            assert one.dtype == other.dtype
            assert torch.equal(
                one.float() if one.dtype.itemsize == 1 else one, other.float() if one.dtype.itemsize == 1 else other
            )
            assert not one.requires_grad
        case np.ndarray():
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)
        case Output():
            assert_same(vars(one), vars(other))
        case dict():
            assert list(one) == list(other)
            assert_same(list(one.values()), list(other.values()))
        case list() | tuple():
            assert type(one) is type(other)
            assert len(one) == len(other)
            for mine, theirs in zip(one, other, strict=True):
                assert_same(mine, theirs)
        case _:
            assert one == other
