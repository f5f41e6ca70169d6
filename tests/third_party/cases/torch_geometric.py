"""PyTorch Geometric's loaders."""

from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.loader import (
    CachedLoader,
    DataListLoader,
    DataLoader,
    DynamicBatchSampler,
    ImbalancedSampler,
    NeighborLoader,
    NodeLoader,
    PrefetchLoader,
    RandomNodeLoader,
)
from torch_geometric.sampler import BaseSampler, SamplerOutput

from third_party.base import HELD, Batch, Case, Fate, N, World, held_patched

PACKAGE = "torch_geometric"


def ring(number: int, nodes: int) -> Any:
    """A graph in which each node is joined to the next."""
    edges = torch.arange(nodes)
    return Data(x=torch.zeros(nodes, 1), edge_index=torch.stack([edges, edges.roll(-1)]), number=number)


def graphs() -> list[Any]:
    return [ring(number, 3 + number % 4) for number in range(N)]


def numbers(batch: Any) -> Batch:
    return tuple(batch.number.tolist())


def shuffled(world: World, **options: Any) -> Any:
    return DataLoader(graphs(), batch_size=4, shuffle=True, **options)


def followed(batch: Any) -> Batch:
    """The numbers, if each node's graph is told, as the loader was asked to."""
    assert batch.x_batch.tolist() == torch.arange(len(batch.number)).repeat_interleave(batch.number % 4 + 3).tolist()
    return numbers(batch)


def by_size(world: World) -> Any:
    return DataLoader(graphs(), batch_sampler=DynamicBatchSampler(graphs(), max_num=12, shuffle=True))


def balanced(world: World) -> Any:
    labels = torch.arange(N) % 3
    return DataLoader(graphs(), batch_size=4, sampler=ImbalancedSampler(labels))


def listed(world: World) -> Any:
    return DataListLoader(graphs(), batch_size=4, shuffle=True)


def prefetched(world: World) -> Any:
    return PrefetchLoader(shuffled(world), device=torch.device("cpu"))


def cached(world: World) -> Any:
    return CachedLoader(DataLoader(graphs(), batch_size=4), device=torch.device("cpu"))


class Alone(BaseSampler):  # type: ignore[misc]  # not installed where types are checked
    """Samples no neighbours, which needs no compiled extension."""

    def sample_from_nodes(self, index: Any, **options: Any) -> Any:
        nothing = torch.empty(0, dtype=torch.long)
        return SamplerOutput(node=index.node, row=nothing, col=nothing, edge=nothing, metadata=(index.input_id, None))

    def sample_from_edges(self, index: Any, **options: Any) -> Any:
        raise NotImplementedError


def of_nodes(world: World) -> Any:
    return NodeLoader(ring(0, N), node_sampler=Alone(), batch_size=4, shuffle=True)


def of_neighbours(world: World) -> Any:
    return NeighborLoader(ring(0, N), num_neighbors=[2], neighbor_sampler=Alone(), batch_size=4, shuffle=True)


def seeds(batch: Any) -> Batch:
    return tuple(batch.input_id.tolist())


def random_parts(world: World) -> Any:
    whole = ring(0, N)
    whole.number = torch.arange(N)
    return RandomNodeLoader(whole, num_parts=6, shuffle=True)


CASES = [
    Case(PACKAGE, "`DataLoader`", lambda world: shuffled(world, follow_batch=["x"]), items=followed),
    Case(PACKAGE, "`DataLoader` with 2 workers", lambda world: shuffled(world, num_workers=2), items=numbers),
    Case(PACKAGE, "`DataListLoader`", listed, items=lambda batch: tuple(graph.number for graph in batch)),
    Case(PACKAGE, "`DynamicBatchSampler`", by_size, items=numbers, whole=True),
    Case(PACKAGE, "`ImbalancedSampler`", balanced, items=numbers),
    Case(PACKAGE, "`NodeLoader`", of_nodes, items=seeds),
    Case(PACKAGE, "`NeighborLoader`", of_neighbours, items=seeds),
    Case(PACKAGE, "`RandomNodeLoader`", random_parts, items=lambda batch: tuple(sorted(batch.number.tolist()))),
    Case(PACKAGE, "`PrefetchLoader`", prefetched, Fate.REFUSED, numbers, remedy=held_patched, told=HELD),
    Case(PACKAGE, "`CachedLoader`", cached, Fate.REFUSED, numbers, remedy=held_patched, told=HELD),
]
