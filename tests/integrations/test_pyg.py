"""PyTorch Geometric's DataLoader: a subclass with a collate function and arguments of its own."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from worlds import assert_epochs_differ_and_are_shared_exactly, assert_shared_exactly, epoch_of, ranks_of
from zoo import N

from ddp_patch import check_loaders_is_patched, patch_dataloader_to_ddp

with warnings.catch_warnings():
    # Importing PyTorch Geometric 2.8 calls torch.jit.script, which torch 2.13 deprecates.
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
    from torch_geometric.data import Batch, Data
    from torch_geometric.loader import DataLoader, NodeLoader
    from torch_geometric.sampler import BaseSampler, SamplerOutput


def ring(number: int) -> Any:
    """Graph ``number``: a ring, of one node more than the graph before it."""
    nodes = torch.arange(number + 2)
    edges = torch.stack([nodes, nodes.roll(-1)])
    return Data(x=nodes.float().unsqueeze(1), edge_index=edges, number=number, unwanted=nodes)


loader = partial(
    DataLoader, [ring(number) for number in range(N)], batch_size=4, follow_batch=["x"], exclude_keys=["unwanted"]
)


def numbers(batch: Any) -> list[int]:
    listed: list[int] = batch.number.tolist()
    return listed


def test_what_the_subclass_was_given_survives() -> None:
    patched: Any = patch_dataloader_to_ddp(loader(), rank=1, num_replicas=2)
    assert type(patched) is DataLoader
    assert check_loaders_is_patched(patched)
    assert (patched.follow_batch, patched.exclude_keys) == (["x"], ["unwanted"])
    batches = list(patched)
    assert [numbers(batch) for batch in batches] == [[1, 3, 5, 7], [9, 11, 13, 15], [17, 19, 21, 0]]
    for batch in batches:
        assert isinstance(batch, Batch)
        assert "unwanted" not in batch
        # Which graph of the batch each row of x belongs to: graph `number` has number + 2 nodes.
        nodes = torch.tensor(numbers(batch)) + 2
        assert batch.x_batch.tolist() == torch.arange(len(nodes)).repeat_interleave(nodes).tolist()


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_shared_exactly(num_replicas: int, num_workers: int) -> None:
    assert_shared_exactly(epoch_of(ranks_of(partial(loader, num_workers=num_workers), num_replicas), numbers), N)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_epochs_differ_where_it_shuffles(num_replicas: int) -> None:
    """That the shares complete one another shows that the ranks' orders are the same one."""
    assert_epochs_differ_and_are_shared_exactly(ranks_of(partial(loader, shuffle=True), num_replicas), numbers, N)


class Alone(BaseSampler):  # type: ignore[misc]  # it is not there where types are checked
    """Samples no neighbours: a batch's nodes are those that it was asked for."""

    def sample_from_nodes(self, inputs: Any, **options: Any) -> Any:
        none = torch.empty(0, dtype=torch.long)
        return SamplerOutput(inputs.node, row=none, col=none, edge=none, metadata=(inputs.input_id, None))

    def sample_from_edges(self, *inputs: Any, **options: Any) -> Any:
        raise NotImplementedError


def nodes(batch: Any) -> list[int]:
    return [int(node) for node in batch.x]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_samples_around_nodes_shares_these(num_workers: int) -> None:
    """Its ``sampler=`` is of another kind, and its dataset are the nodes to begin at."""
    graph = ring(N - 2)
    make = partial(NodeLoader, graph, Alone(), input_nodes=torch.arange(N), batch_size=4, num_workers=num_workers)
    assert_epochs_differ_and_are_shared_exactly(ranks_of(partial(make, shuffle=True), 2), nodes, N)
