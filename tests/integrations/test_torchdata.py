"""torchdata's StatefulDataLoader: shared like any loader, and resumed in the middle of an epoch."""

import json
import pickle
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torchdata.stateful_dataloader.sampler as torchdata_samplers
from messages import raises
from quick import soaked
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, get_worker_info
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader
from zoo import Drawn, Indices, PKBatches, Source, as_it_is, by_numpy, seed_ambient, seeded_generator

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import CannotResumeWarning, NotALoaderError, StateError

# torchdata 0.11 calls it in the constructor of every loader.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

Make = Callable[..., Any]

loader = partial(StatefulDataLoader, Indices(), collate_fn=as_it_is)


def shuffled(**options: Any) -> Any:
    # Ranks of an explicit world send nothing, so that they must be given alike generators.
    return loader(shuffle=True, generator=seeded_generator(), **options)


def shuffled_by_its_sampler(**options: Any) -> Any:
    """The workers' seeds do not come from the sampler's generator here."""
    return loader(sampler=torchdata_samplers.RandomSampler(Indices(), generator=seeded_generator()), **options)


def drawn_with_numpy(**options: Any) -> Any:
    return loader(sampler=Drawn(by_numpy, lazily=True), **options)


def batched_by_torch(batch_size: int, **options: Any) -> Any:
    """torch's own batch sampler says nothing of its place; torchdata's does, and takes over."""
    sampler = RandomSampler(Indices(), generator=seeded_generator())
    return loader(batch_sampler=BatchSampler(sampler, batch_size, drop_last=False), **options)


def pk_batches(**options: Any) -> Any:
    return loader(batch_sampler=PKBatches(), **options)


KINDS: dict[str, Make] = {
    "sequential": loader,
    "shuffled": shuffled,
    "shuffled by its sampler": shuffled_by_its_sampler,
    "batched by torch": batched_by_torch,
    "drawn with numpy": drawn_with_numpy,
}
# A rank of two has 12 of 23 items: batches of 4 are full, of batches of 5 the last is not, so that the sampler's end
# is found with the last batch and not after it. What it is made with, and what it is patched with.
LOADERS: dict[str, tuple[Make, dict[str, Any]]] = {
    f"{name}, batches of {batch_size}": (partial(make, batch_size=batch_size), {})
    for name, make in KINDS.items()
    for batch_size in (4, 5)
}
LOADERS |= {
    "P x K batches": (pk_batches, {}),
    "P x K batches, divided": (pk_batches, {"share": "within_batches"}),
    "shuffled, divided": (partial(shuffled, batch_size=5), {"share": "within_batches"}),
    "a stream, divided": (
        lambda **options: StatefulDataLoader(Source(splits=True), 5, collate_fn=as_it_is, **options),
        {"share": "within_batches"},
    ),
}
# With workers, which take long to start, one of each sort is tried; the session soak tries them all.
ONE = "shuffled by its sampler, batches of 5"
SOONER = {ONE, "batched by torch, batches of 4", "P x K batches", "a stream, divided"}
WORKERS = {"num_workers": 2}
CASES: list[Any] = [(name, {}) for name in LOADERS]
CASES += [(name, WORKERS) if name in SOONER else soaked(name, WORKERS) for name in LOADERS]
# With the last, torchdata counts the steps since the last snapshot.
CASES += [(ONE, {**WORKERS, "persistent_workers": True}), (ONE, {**WORKERS, "snapshot_every_n_steps": 2})]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_resumed_anywhere(name: str, how: dict[str, Any]) -> None:
    """In the second epoch, from states that are taken within the loop, as checkpoints are; between epochs; and twice.

    Each training goes over one rank's share, from a loader of its own, seeded like no other.
    """
    make, options = LOADERS[name]

    def start(ambient_seed: int, state: Any = None) -> Any:
        seed_ambient(ambient_seed)
        patched: Any = patch_dataloader_to_ddp(make(**how), rank=1, num_replicas=2, seed=3, **options)
        if state is not None:
            patched.load_state_dict(pickle.loads(pickle.dumps(state)))  # noqa: S301 - our own
        return patched

    whole = start(1)
    first, second, third, fourth = [list(whole) for _ in range(4)]
    stopped = start(2)
    continuations = [(stopped.state_dict(), [first, second])]
    list(stopped)
    continuations.append((stopped.state_dict(), [second, third]))  # the loop has seen the end of the first
    iterator = iter(stopped)
    for step in range(len(second) + 1):
        continuations.append((stopped.state_dict(), [second[step:], third]))
        assert next(iterator, None) == (second[step] if step < len(second) else None)
    continuations.append((stopped.state_dict(), [third, fourth]))
    again = start(3, continuations[3][0])  # after the first batch of the second epoch
    assert list(islice(again, 1)) == second[1:2]
    continuations.append((again.state_dict(), [second[2:], third]))
    for state, expected in continuations:
        resumed = start(4, state)
        assert [list(resumed), list(resumed)] == expected


class Numbers(IterableDataset[Any]):
    """Read whole by each worker, or in parts."""

    def __init__(self, in_parts: bool) -> None:
        self.in_parts = in_parts

    def __iter__(self) -> Any:
        worker = get_worker_info() if self.in_parts else None
        yield from range(worker.id, 101, worker.num_workers) if worker is not None else range(101)


@pytest.mark.parametrize(
    ("in_parts", "options"),
    [(False, {}), (True, {"num_workers": 2}), soaked(False, {"num_workers": 2, "persistent_workers": True})],
)
def test_a_stream_resumes_on_another_number_of_ranks(in_parts: bool, options: dict[str, Any]) -> None:
    def on(ranks: int) -> list[Any]:
        given = [StatefulDataLoader(Numbers(in_parts), 4, **options) for _ in range(ranks)]
        where: dict[str, Any] = {"num_replicas": ranks, "uneven": "keep"}
        return [patch_dataloader_to_ddp(one, rank=rank, **where) for rank, one in enumerate(given)]

    for steps in (0, 2, 5):
        first = on(2)
        seen = [item for loader in first for batch in islice(loader, steps) for item in batch.tolist()]
        states = [json.dumps(loader.state_dict()) for loader in first]
        assert states[0] == states[1]
        for loader in on(3):
            loader.load_state_dict(json.loads(states[0]))
            seen += [item for batch in loader for item in batch.tolist()]
            assert sum(map(len, loader)) in (33, 34)
        assert sorted(seen) == list(range(101))


class OfNodes(IterableDataset[Any]):
    """The remedy that the error of a loader of nodes names."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return iter(self.loader)


def test_a_loader_of_nodes_is_refused_and_the_remedy_works() -> None:
    made: Any = nodes.Loader(nodes.Batcher(nodes.IterableWrapper(range(20)), 3, drop_last=False))
    remedy = ("IterableDataset", "iter(loader)", "DataLoader(dataset, batch_size=None)")
    with raises(NotALoaderError, "torchdata", remedy):
        patch_dataloader_to_ddp(made, rank=0, num_replicas=2)
    for rank in range(2):
        patched = patch_dataloader_to_ddp(DataLoader(OfNodes(made), batch_size=None), rank=rank, num_replicas=2)
        whole = [list(range(start, min(start + 3, 20))) for start in range(0, 20, 3)]
        for _ in range(2):
            assert list(patched) == [*whole, whole[0]][rank::2]


def test_saving_a_loader_whose_workers_overtake_each_other_ends_no_training() -> None:
    patched: Any = patch_dataloader_to_ddp(loader(batch_size=2, num_workers=2, in_order=False), rank=0, num_replicas=2)
    batches = iter(patched)
    next(batches)
    with pytest.warns(CannotResumeWarning, match="in_order=False"):
        state = patched.state_dict()
    assert len([*batches]) == 5
    with pytest.raises(StateError, match="in_order=False"):
        patched.load_state_dict(state)


class Counting(Indices):
    """Counts what was read, as a dataset that torchdata's workers ask for its state."""

    read = 0

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return super().__getitem__(index)

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def test_a_state_without_the_datasets_own_is_told_once() -> None:
    patched: Any = patch_dataloader_to_ddp(StatefulDataLoader(Counting(), 2), rank=0, num_replicas=2)
    batches = iter(patched)
    next(batches)
    with pytest.warns(CannotResumeWarning, match=r"without what Counting\.state_dict\(\) returns") as told:
        states = [patched.state_dict() for _ in range(2)]
    assert len(told) == 1
    assert states[0] == states[1]
