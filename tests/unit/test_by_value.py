"""A worker sends the main process small batches by value; what arrives is what torch would send."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import quick  # noqa: F401 - so the fork server's workers find imported what they need
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from zoo import Source

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.walks import elements

LARGE = 2**16 // 8 + 1
ONE = torch.arange(4)


class Tagged(torch.Tensor):
    pass


def in_circle() -> dict[str, Any]:
    one: dict[str, Any] = {"x": torch.ones(2)}
    one["parts"] = [one]
    return one


# What a batch is, and whether it comes by value.
BATCHES: dict[str, tuple[Callable[[], Any], bool]] = {
    "numbers": (lambda: torch.arange(4), True),
    "nested": (lambda: {"x": [torch.ones(2, 3), ("a", 1)], "y": (torch.tensor(2.5), b"b", np.arange(3), None)}, True),
    "half": (lambda: torch.tensor([1.5, -2.0], dtype=torch.bfloat16), True),
    "conjugated": (lambda: torch.tensor([1 + 2j]).conj(), True),
    "empty": (lambda: [torch.empty(0, 3, dtype=torch.float16), torch.empty(2, 0)], True),
    "one tensor twice": (lambda: [ONE] * 2, True),
    "a view of one element": (lambda: torch.ones(1, 3)[:, 0], True),
    "numbers of few bits": (lambda: torch.zeros(2, dtype=torch.uint8).view(vars(torch)["uint4"]), True),
    "as large as may be": (lambda: torch.zeros(LARGE - 1, dtype=torch.int64), True),
    "large": (lambda: torch.zeros(LARGE, dtype=torch.int64), False),
    "in a circle": (in_circle, False),
    "views of the same memory": (lambda: [ONE, ONE[1:]], False),
    "another order of its values": (lambda: torch.arange(6).view(2, 3).t(), False),
    "with a gradient": (lambda: torch.ones(2, requires_grad=True), False),
    "another class": (lambda: torch.ones(2).as_subclass(Tagged), False),
    "sparse": (lambda: torch.eye(3).to_sparse(), False),
    "ragged": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), False),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8), False),
}


class Kept(Dataset[Any]):
    """Makes each batch anew."""

    def __getitem__(self, index: int) -> Any:
        return [*BATCHES.values()][index][0]()

    def __len__(self) -> int:
        return len(BATCHES)


class Made(IterableDataset[Any]):
    """Makes each batch anew."""

    def __iter__(self) -> Iterator[Any]:
        yield from (make() for make, _ in BATCHES.values())


def first(items: list[Any]) -> Any:
    return items[0]


def described(value: Any) -> Any:
    """Return what makes a batch what it is, but for where its memory lies."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return [described(each) for each in value.unbind()]
        plain = value.detach()
        dense = plain.int_repr() if plain.is_quantized else plain.to_dense().resolve_conj()
        values = dense.view(torch.uint8) if "uint4" in str(dense.dtype) else dense
        return type(value), value.dtype, value.layout, value.requires_grad, values.to(torch.complex128).tolist()
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: described(each) for key, each in value.items() if key != "parts"}
    return (type(value), [*map(described, value)]) if isinstance(value, list | tuple) else value


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in memory that processes share."""
    return bool(tensor.untyped_storage().is_shared())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # torch will drop these, and has them now
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch says so when it receives one
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize("dataset", [Made(), Kept()])
def test_what_arrives_is_what_a_worker_made(dataset: Any) -> None:
    came = dict(zip(BATCHES, patched(dataset, num_workers=1, collate_fn=first), strict=True))
    for name, got in came.items():
        make, is_small = BATCHES[name]
        assert described(got) == described(make()), name
        found = elements(got) or [got]
        tensors = [
            part for part in found if type(part) is torch.Tensor and part.layout == torch.strided and not part.is_nested
        ]
        shared = {is_shared(each) for each in tensors if each.numel()}
        assert shared <= {not is_small}, name
    came["numbers"] += 1  # it can be written to
    assert came["in a circle"]["parts"][0] is came["in a circle"]
    same, views = came["one tensor twice"], came["views of the same memory"]
    views[0][1] = 7
    assert (same[0] is same[1], int(views[1][0])) == (True, 7)


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


@pytest.mark.parametrize(("dataset", "context"), [(range(6), "fork"), (Source(6), "forkserver")])
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
