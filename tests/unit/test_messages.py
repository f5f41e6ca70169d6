"""Bad input: each error has its type, tells the operation and the values that were met, and names a remedy."""

from typing import Any

import pytest
import torch
from messages import assert_tells, raises
from torch.utils.data import DataLoader
from zoo import Broken, Indices, N, Source, loader

from ddp_patch import assert_loaders_patched, check_loaders_is_patched, patch_dataloader_to_ddp
from ddp_patch.errors import (
    InvalidOptionError,
    NotALoaderError,
    NotPatchedError,
    StreamLengthError,
    UnsupportedLoaderError,
)

EXPLICIT: dict[str, Any] = {"rank": 0, "num_replicas": 2}


class SplitStream(Source):
    _distributed = "rank 0 of 2"


class AwareOver(Source):
    is_ddp_aware = True

    def __init__(self) -> None:
        self.dataset = SplitStream()


@pytest.mark.parametrize("kind", [SplitStream, AwareOver])  # also inside one that shards itself
def test_a_dataset_that_was_split_by_node(kind: type[Source]) -> None:
    with raises(UnsupportedLoaderError, (kind.__name__, "split_dataset_by_node()"), "whole dataset"):
        patch_dataloader_to_ddp(DataLoader(kind()), **EXPLICIT)


class BegunWhenMade(DataLoader[Any]):
    """Begins its own iterator, alone or in a list, when it is made."""

    keep: Any = staticmethod(lambda iterator: iterator)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running = self.keep(super().__iter__())

    def __iter__(self) -> Any:
        return self.running


class KeepsAGenerator(BegunWhenMade):
    keep = staticmethod(lambda iterator: [(batch for batch in iterator)])


@pytest.mark.parametrize("kind", [BegunWhenMade, KeepsAGenerator])
def test_a_loader_that_runs_an_iterator_of_its_own(kind: type[BegunWhenMade]) -> None:
    remedy = (f"{kind.__name__}(dataset, sampler=DDPSamplerWrapper(sampler, False)", "persistent_workers=True")
    with raises(UnsupportedLoaderError, (kind.__name__, "when it is made", "'running'"), remedy):
        patch_dataloader_to_ddp(kind(Indices(), 4), **EXPLICIT)


def test_the_guard_names_each_offender_by_its_place() -> None:
    patched = patch_dataloader_to_ddp(loader(), **EXPLICIT)
    nest: Any = {"train": patched, "val": [patched, loader()], "test": {"clean": loader(), 3: (loader(),)}}
    assert not check_loaders_is_patched(nest)
    offenders = "3 of 5 loaders: loaders['val'][1], loaders['test']['clean'], loaders['test'][3][0]."
    with raises(NotPatchedError, offenders, "patch_dataloader_to_ddp()"):
        assert_loaders_patched(nest)
    with raises(NotPatchedError, "1 of 1 loaders: the loader", "patch_dataloader_to_ddp()"):
        assert_loaders_patched(loader())
    with raises(NotPatchedError, "1 of 2 loaders: loaders['val'].", "patch_dataloader_to_ddp()"):
        assert_loaders_patched({"train": patched, "val": loader(), "test": None})  # None is no loader
    assert check_loaders_is_patched({"train": patched, "test": None})


@pytest.mark.parametrize("guard", [check_loaders_is_patched, assert_loaders_patched])
def test_the_guard_wants_loaders(guard: Any) -> None:
    for nest, place in (({"train": [None]}, "loaders['train'][0]"), ([None, {"val": None}], "loaders[0]")):
        with raises(NotALoaderError, ("None (NoneType)", place, "DataLoader"), "loader itself"):
            guard(nest)
    with raises(NotALoaderError, ("'loader' (str)", "at loaders ", "DataLoader"), "loader itself"):
        guard("loader")
    for empty, place in (
        ([], "loaders"),
        ({"train": [loader()], "val": []}, "loaders['val']"),
        ([[()]], "loaders[0][0]"),
    ):
        with raises(NotALoaderError, (f"at {place}:", "empty"), ("loaders", "out")):
            guard(empty)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_ends_the_epoch(workers: int) -> None:
    ends = DataLoader(Broken(N - 1, StopIteration()), num_workers=workers)
    patched = patch_dataloader_to_ddp(ends, rank=(N - 1) % 2, num_replicas=2)
    given: list[Any] = []
    with raises(StreamLengthError, "StopIteration", ("raise another error", "__len__")):
        given += patched  # which keeps what came before the error
    assert len(given) == len(patched) - 1


def test_nothing_is_drawn_or_changed_when_an_option_is_refused() -> None:
    given = loader(shuffle=True)
    before, state = dict(vars(given)), torch.get_rng_state()
    with pytest.raises(InvalidOptionError):
        patch_dataloader_to_ddp(given, uneven="no", **EXPLICIT)  # type: ignore[call-overload]
    assert vars(given) == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "message",
    [
        "rank=20 of 3 is too large. Pass a smaller rank=.",
        "rank=2 of 3 is too large. A smaller rank= would do.",
        "Pass a smaller rank=. rank=2 of 3 is too large.",
        "rank=2 of 3 is too large. Pass a smaller rank=",
    ],
)
def test_what_a_message_lacks_is_noticed(message: str) -> None:
    facts, remedy = ("rank=2", "3"), "rank="
    assert_tells("rank=2 of 3 is too large. Pass a smaller rank=.", facts, remedy)
    with pytest.raises(AssertionError):
        assert_tells(message, facts, remedy)
