"""A worker sends the main process small batches by value; what arrives is what torch would send."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from quick import soaked
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from zoo import Source

from ddp_patch import patch_dataloader_to_ddp

LARGE = 2**16 // 8 + 1


class Kept(Dataset[Any]):
    """Makes each batch anew."""

    def __getitem__(self, index: int) -> Any:
        return [*BATCHES.values()][index][0]()

    def __len__(self) -> int:
        return len(BATCHES)


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


class Tagged(torch.Tensor):
    pass


def same_twice() -> list[torch.Tensor]:
    one = torch.arange(4)
    return [one, one]


def overlapping() -> list[torch.Tensor]:
    one = torch.arange(4)
    return [one, one[1:]]


def list_twice() -> list[list[torch.Tensor]]:
    one = [torch.ones(2)]
    return [one, one]


# What a batch is, and whether it comes by value.
BATCHES: dict[str, tuple[Callable[[], Any], bool]] = {
    "numbers": (lambda: torch.arange(4), True),
    "nested": (lambda: {"x": [torch.ones(2, 3), ("a", 1)], "y": (torch.tensor(2.5), b"b", np.arange(3))}, True),
    "half": (lambda: torch.tensor([1.5, -2.0], dtype=torch.bfloat16), True),
    "complex": (lambda: torch.tensor([1 + 2j]), True),
    "conjugated": (lambda: torch.tensor([1 + 2j]).conj(), True),
    "truths": (lambda: torch.tensor([True, False]), True),
    "single": (lambda: torch.tensor(3), True),
    "empty": (lambda: [torch.empty(0, 3, dtype=torch.float16), torch.empty(2, 0)], True),
    "one tensor twice": (same_twice, True),
    "a view of one element": (lambda: torch.ones(1, 3)[:, 0], False),
    "a column's strides": (lambda: torch.ones(4, 1).t(), False),
    "numbers of few bits": (lambda: torch.zeros(2, dtype=torch.uint8).view(vars(torch)["uint4"]), True),
    "a list twice": (list_twice, False),
    "none": (lambda: [None, torch.ones(1)], True),
    "no tensor": (lambda: ["a", 1, {"b": 2.5}], True),
    "as large as may be": (lambda: torch.zeros(LARGE - 1, dtype=torch.int64), True),
    "large": (lambda: torch.zeros(LARGE, dtype=torch.int64), False),
    "views of the same memory": (overlapping, False),
    "another order of its values": (lambda: torch.arange(6).view(2, 3).t(), False),
    "with a gradient": (lambda: torch.ones(2, requires_grad=True), False),
    "a parameter": (lambda: nn.Parameter(torch.ones(2)), False),
    "another class": (lambda: torch.ones(2).as_subclass(Tagged), False),
    "a named tuple": (lambda: Pair(torch.ones(2), torch.zeros(2)), False),
    "sparse": (lambda: torch.eye(3).to_sparse(), False),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8), False),
}


class Made(IterableDataset[Any]):
    """Makes each batch anew."""

    def __iter__(self) -> Iterator[Any]:
        yield from (make() for make, _ in BATCHES.values())


def first(items: list[Any]) -> Any:
    return items[0]


def described(value: Any) -> Any:
    """Return all that makes a batch what it is, but for where its memory lies."""
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        dense = plain.int_repr() if plain.is_quantized else plain.to_dense().resolve_conj()
        values = dense.view(torch.uint8) if "uint4" in str(dense.dtype) else dense
        stride = None if value.layout == torch.sparse_coo else value.stride()
        facts = value.dtype, value.shape, stride, value.layout, value.requires_grad
        return type(value), facts, values.to(torch.complex128).tolist()
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: described(each) for key, each in value.items()}
    return (type(value), [*map(described, value)]) if isinstance(value, list | tuple) else value


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in memory that processes share."""
    return bool(tensor.untyped_storage().is_shared())


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for each in held for tensor in tensors_in(each)]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # torch will drop these, and has them now
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch says so when it receives one
@pytest.mark.parametrize("dataset", [Made(), Kept()])
def test_what_arrives_is_what_torch_sends(dataset: Any) -> None:
    made: DataLoader[Any] = DataLoader(dataset, 1, num_workers=1, collate_fn=first)
    for name, expected, got in zip(BATCHES, made, patch_dataloader_to_ddp(made, rank=0, num_replicas=1), strict=True):
        assert_sent(name, expected, got)


def assert_sent(name: str, expected: Any, got: Any) -> None:
    assert described(got) == described(BATCHES[name][0]())
    assert described(got) == described(expected) or name == "conjugated"  # torch forgets that
    tensors, is_small = tensors_in(got), BATCHES[name][1]
    if name != "sparse":  # of whose memory torch says nothing
        assert {is_shared(each) for each in tensors if each.numel()} <= {not is_small}
    if name == "one tensor twice":
        assert got[0] is got[1]
    if name == "views of the same memory":
        got[0][1] = 7
        assert got[1][0] == 7
    for tensor in tensors:
        if not tensor.requires_grad and tensor.is_floating_point():
            tensor += tensor  # it can be written to


@pytest.mark.parametrize(("share", "ranks"), [("samples", 2), ("by_worker", 1)])
def test_so_it_is_however_a_stream_is_shared(share: Any, ranks: int) -> None:
    took = []
    for rank in range(ranks):
        made = DataLoader(Source(24, splits=True), 3, num_workers=2)
        batches = list(patch_dataloader_to_ddp(made, rank=rank, num_replicas=ranks, share=share))
        took += [item for batch in batches for item in batch.tolist()]
        assert not any(map(is_shared, batches))
    assert sorted(took) == [*range(24)]


def patched(dataset: Any, batch_size: int | None = 1, **options: Any) -> Any:
    return patch_dataloader_to_ddp(DataLoader(dataset, batch_size, **options), rank=0, num_replicas=1)


def test_what_comes_is_on_the_cpu_whatever_the_default_device_is() -> None:
    batches = iter(patched(Made(), num_workers=1, collate_fn=first))
    torch.set_default_device("meta")
    try:
        device = next(batches).device.type
    finally:
        torch.set_default_device(None)
    assert device == "cpu"


def in_circle(_: Any) -> dict[str, Any]:
    one: dict[str, Any] = {"x": torch.ones(2)}
    one["parts"] = [one]
    return one


def test_a_circle_stays_one() -> None:
    got = next(iter(patched(Source(2), num_workers=1, collate_fn=in_circle)))
    assert got["parts"][0] is got


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
def test_kinds_of_tensors_that_have_no_bytes_go_as_torch_sends_them() -> None:
    nested = next(iter(patched(Source(2), num_workers=1, collate_fn=ragged)))
    assert [each.tolist() for each in nested.unbind()] == [[1], [1, 1]]


def ragged(_: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


class Counter(IterableDataset[torch.Tensor]):
    """Yields a tensor of its own, in memory that its worker has and the main process, too."""

    def __init__(self) -> None:
        self.counted = torch.zeros(1)
        self.counted.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it unannotated

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(2):
            self.counted += 1
            yield self.counted


def test_a_datasets_own_shared_tensor_stays_shared() -> None:
    batches = list(patched(Counter(), None, num_workers=1))
    assert [*map(is_shared, batches)] == [True, True]
    assert [batch.item() for batch in batches] == [2, 2]


class Inner(IterableDataset[torch.Tensor]):
    """Reads a patched loader that has no workers, in a worker of another."""

    def __init__(self) -> None:
        self.loader = patched(Source(4), 2)

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (batch.sum() for batch in self.loader)


def test_a_loader_in_another_ones_worker_gives_tensors() -> None:
    assert [int(batch) for batch in DataLoader(Inner(), num_workers=1)] == [1, 5]


@pytest.mark.parametrize(("dataset", "context"), [(range(6), "fork"), (Source(6), "spawn"), soaked(range(6), "spawn")])
def test_workers_of_any_kind_send_small_batches_by_value(dataset: Any, context: str) -> None:
    loader = patched(dataset, 2, num_workers=1, persistent_workers=True, multiprocessing_context=context)
    epochs = [list(loader) for _ in range(2)]
    assert [[batch.tolist() for batch in epoch] for epoch in epochs] == [[[0, 1], [2, 3], [4, 5]]] * 2
    assert not any(is_shared(batch) for epoch in epochs for batch in epoch)


@pytest.mark.parametrize("dataset", [Source(3), range(3)])
def test_without_workers_nothing_is_sent(dataset: Any) -> None:
    batch = torch.arange(4)

    def given(_: Any) -> torch.Tensor:
        return batch

    loader = patched(dataset, 3, collate_fn=given)
    assert next(iter(loader)) is batch
    assert loader.collate_fn is given
