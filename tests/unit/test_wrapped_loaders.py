"""What holds a running iterator or wraps a loader: patched where nothing that matters runs, else told what to write."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from messages import raises
from torch.utils.data import DataLoader, IterableDataset
from zoo import Indices

from ddp_patch import check_loaders_is_patched, loader_state, patch_dataloader_to_ddp
from ddp_patch.errors import NotALoaderError, UnsupportedLoaderError, message_of

N = 12


def indices_of(loader: Any) -> list[int]:
    return [int(index) for batch in loader for index in torch.as_tensor(batch).reshape(-1)]


def shares_of(make: Callable[[], DataLoader[Any]]) -> list[list[int]]:
    return [indices_of(patch_dataloader_to_ddp(make(), rank=rank, num_replicas=2)) for rank in range(2)]


class Saveable(DataLoader[Any]):
    """As speechbrain's SaveableDataLoader: it keeps its latest iterator, to tell a checkpoint how far it came."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._speechbrain_iterator: Any = None

    def __iter__(self) -> Any:
        self._speechbrain_iterator = super().__iter__()
        return self._speechbrain_iterator


def looked_into(loader: Any, keep: bool) -> DataLoader[Any]:
    batches = iter(loader)
    next(batches)
    if keep:
        loader.batches = batches
    return loader  # type: ignore[no-any-return]


PEEKED: dict[str, Callable[[], DataLoader[Any]]] = {
    "speechbrain's, new": lambda: Saveable(Indices(N), 2),
    "speechbrain's": lambda: looked_into(Saveable(Indices(N), 2), keep=False),
    "its iterator kept": lambda: looked_into(DataLoader(Indices(N), 2), keep=True),
    "persistent workers": lambda: looked_into(
        DataLoader(Indices(N), 2, num_workers=2, persistent_workers=True), keep=True
    ),
}


@pytest.mark.parametrize("make", PEEKED.values(), ids=PEEKED)
def test_a_loader_that_was_looked_into_is_patched(make: Callable[[], DataLoader[Any]]) -> None:
    assert shares_of(make) == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]


def test_what_was_running_stays_with_the_given_loader() -> None:
    given: Any = looked_into(DataLoader(Indices(N), 2), keep=True)
    patched: Any = patch_dataloader_to_ddp(given, rank=0, num_replicas=2)
    assert patched.batches is None  # it would give unsharded data
    assert next(given.batches).tolist() == [2, 3]
    saveable: Any = patch_dataloader_to_ddp(PEEKED["speechbrain's"](), rank=0, num_replicas=2)
    assert saveable._speechbrain_iterator is None  # so that a checkpoint is still loaded
    batches: Any = iter(saveable)
    next(batches)
    assert batches is saveable._speechbrain_iterator
    assert loader_state(saveable, batches_done=1)["taken"] == [4]


class GoesOn(DataLoader[Any]):
    """It may go on with the iterator that it keeps, and has no sampler that is repeated."""

    running: Any = None

    def __iter__(self) -> Any:
        self.running = super().__iter__() if self.running is None else self.running
        return self.running


def test_an_iterator_that_the_loader_goes_on_with_is_refused_and_may_be_forgotten() -> None:
    loader = GoesOn(Indices(N), 2)
    iter(loader)
    with raises(UnsupportedLoaderError, ("GoesOn", "you have iterated it", "'running'"), "loader.running = None"):
        patch_dataloader_to_ddp(loader, rank=0, num_replicas=2)
    loader.running = None
    assert indices_of(patch_dataloader_to_ddp(loader, rank=1, num_replicas=2)) == [1, 3, 5, 7, 9, 11]


class PrefetchLoader:
    """As timm's and PyTorch Geometric's."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader

    def __len__(self) -> int:
        return len(self.loader)


class TimmsPrefetchLoader(PrefetchLoader):
    """It passes on attributes of the loader inside, and so looks like one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class WebLoader(IterableDataset[Any]):
    """As webdataset's: the loader is the first stage of a pipeline."""

    def __init__(self, loader: Any, *stages: Callable[[Any], Any]) -> None:
        self.pipeline = [loader, *stages]

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.pipeline[0])
        for stage in self.pipeline[1:]:
            items = stage(items)
        yield from items


class CombinedLoader:
    """As Lightning's: a nest of loaders, which is changed through the list of them."""

    def __init__(self, iterables: dict[str, Any]) -> None:
        self.iterables = iterables
        self._flattened = list(iterables.values())

    @property
    def flattened(self) -> list[Any]:
        return self._flattened

    @flattened.setter
    def flattened(self, flattened: list[Any]) -> None:
        self.iterables = dict(zip(self.iterables, flattened, strict=True))
        self._flattened = flattened

    def __iter__(self) -> Iterator[Any]:
        for loader in self._flattened:
            yield from loader


def doubled(batches: Any) -> Iterator[Any]:
    yield from batches


def over(size: int = 2) -> DataLoader[Any]:
    return DataLoader(Indices(N), size)


WRAPPERS: dict[str, tuple[Callable[[], Any], str]] = {
    "prefetching": (lambda: PrefetchLoader(over()), "outer.loader = "),
    "prefetching, timm's": (lambda: TimmsPrefetchLoader(over()), "outer.loader = "),
    "a pipeline": (lambda: WebLoader(over(), doubled), "outer.pipeline[0] = "),
    "a wrapper in a wrapper": (lambda: PrefetchLoader(WebLoader(over())), "outer.loader.pipeline[0] = "),
    "several": (lambda: CombinedLoader({"a": over(), "b": over(3)}), "outer.flattened = ["),
}


def inside(loaders: Any) -> Any:
    """Return what a wrapper wraps, as the guard's errors say it: they name one layer after the other."""
    try:
        check_loaders_is_patched(loaders)
    except NotALoaderError as error:
        found = message_of(error).partition("Pass what it wraps: ")[2].removesuffix(".")
        return inside(eval(found, {"loaders": loaders}))  # noqa: S307 - the remedy
    return loaders


@pytest.mark.parametrize(("make", "line"), WRAPPERS.values(), ids=WRAPPERS)
def test_the_line_that_the_error_names_is_right(make: Callable[[], Any], line: str) -> None:
    name = type(make()).__name__
    seen: list[int] = []
    for rank in range(2):
        outer = make()
        error = UnsupportedLoaderError if isinstance(outer, TimmsPrefetchLoader) else NotALoaderError
        with raises(error, name, ("outer", name, line)) as caught:
            patch_dataloader_to_ddp(outer, rank=rank, num_replicas=2)
        written = (
            message_of(caught.value)
            .partition(f"where outer is a {name} that was not iterated yet: ")[2]
            .removesuffix(".")
        )
        assert not check_loaders_is_patched(inside(outer))
        # As it is written; the world is that of a process group, for which an explicit one stands here.
        told = re.sub(r"(patch_dataloader_to_ddp\([^)]+)\)", rf"\1, rank={rank}, num_replicas=2)", written)
        exec(told, {"outer": outer, "patch_dataloader_to_ddp": patch_dataloader_to_ddp})  # noqa: S102 - the remedy
        assert check_loaders_is_patched(inside(outer))
        seen += indices_of(outer)
    assert sorted(seen) == sorted([*range(N)] * (2 if "several" in line or "flattened" in line else 1))


def test_other_calls_name_the_loader_inside_too() -> None:
    outer = PrefetchLoader(patch_dataloader_to_ddp(over(), rank=0, num_replicas=2))
    with raises(NotALoaderError, ("loader_state", "PrefetchLoader"), "loader_state(outer.loader, ...)"):
        loader_state(outer, batches_done=0)  # type: ignore[arg-type]  # on purpose
    for of_none in (PrefetchLoader([1, 2]), WebLoader(range(3))):
        with raises(NotALoaderError, ("patch_dataloader_to_ddp", type(of_none).__name__), "the finished loader itself"):
            patch_dataloader_to_ddp(of_none, rank=0, num_replicas=2)  # type: ignore[call-overload]  # on purpose


def assert_remedied(error: Exception, loader: Any) -> None:
    """Build the loader that an error writes down, and share it."""
    found = re.search(r"torch\.utils\.data\.DataLoader\(loader.*?\)(?=\.)", str(error))
    assert found is not None
    shares = shares_of(lambda: eval(found[0], {"torch": torch, "loader": loader}))  # noqa: S307 - the remedy
    assert shares == [[*range(0, N, 2)], [*range(1, N, 2)]]


class OwnStream(IterableDataset[int]):
    """As litdata's StreamingDataset, made for one process."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class StreamingDataLoader(DataLoader[Any]):
    """As litdata's, which takes a dataset of another class for one that mixes several."""

    def __init__(self, dataset: Any, batch_size: int) -> None:
        super().__init__(dataset, batch_size)

    def __iter__(self) -> Any:
        dataset: Any = self.dataset
        if not isinstance(dataset, OwnStream):
            dataset._set_use_streaming_dataloader(True)
        return super().__iter__()


StreamingDataLoader.__module__ = "litdata.streaming.dataloader"


def test_a_loader_that_iterates_its_own_datasets_alone_is_refused() -> None:
    class OwnLoader(StreamingDataLoader):
        """A user's subclass."""

    loader = OwnLoader(OwnStream(), 2)
    remedy = ("after init_process_group()", "num_workers=loader.num_workers, collate_fn=loader.collate_fn")
    with raises(UnsupportedLoaderError, ("OwnLoader", "litdata", "OwnStream"), remedy) as caught:
        patch_dataloader_to_ddp(loader, rank=0, num_replicas=2)
    assert indices_of(loader) == [*range(N)]
    assert_remedied(caught.value, loader)
