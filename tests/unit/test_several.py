"""Several loaders in one call: any nest of them, options, errors and the case of one process."""

import inspect
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import pytest
import torch
from messages import assert_tells, raises
from torch.utils.data import DataLoader
from zoo import Indices, PKBatches, loader

from ddp_patch import assert_loaders_patched, check_loaders_is_patched, patch_dataloader_to_ddp
from ddp_patch.errors import (
    AlreadyPatchedError,
    InvalidOptionError,
    NotALoaderError,
    NotDistributedWarning,
    UnsupportedLoaderError,
)
from ddp_patch.patching import PatchOptions
from ddp_patch.walks import nested

WORLD: dict[str, Any] = {"rank": 1, "num_replicas": 2}


class Pair(NamedTuple):
    train: Any
    val: Any


class Named(list[Any]):
    name = "nobody"


class ByAttribute(dict[str, Any]):
    """A widespread recipe, whose attributes are its items."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


def named(loaders: list[Any]) -> Named:
    made = Named(loaders)
    made.name = "mine"
    return made


NESTS: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"train": a, "val": b},
    "named tuple": Pair,
    "OrderedDict": lambda a, b: OrderedDict([("val", a), ("train", b)]),
    "defaultdict": lambda a, b: defaultdict(list, {"train": a, "val": [b]}),
    "UserDict": lambda a, b: UserDict({"train": a, "val": b}),
    "a list's subclass": lambda a, b: named([a, b]),
    "a dict's subclass": lambda a, b: ByAttribute(train=a, val=b),
    "odd keys": lambda a, b: {object: a, (1, None): b},
    "nest": lambda a, b: {"train": Pair(a, None), "val": [(b,), [], {}], 3: None},
    "one": lambda a, _: a,
    "none": lambda _, __: [],
}


@pytest.mark.parametrize("nest", NESTS)
def test_a_nest_comes_back_as_it_was_with_patched_loaders(nest: str) -> None:
    train, val = loader(shuffle=True), loader(batch_sampler=PKBatches())
    given = NESTS[nest](train, val)
    before = list(nested(given))
    patched = patch_dataloader_to_ddp(given, **WORLD)
    after = list(nested(patched))
    assert type(patched) is type(given)
    assert [path for path, _ in after] == [path for path, _ in before]
    for (_, old), (_, new) in zip(before, after, strict=True):
        assert type(new) is type(old)
        assert (new is not old and check_loaders_is_patched(new)) if isinstance(old, DataLoader) else new == old
    assert all(one is other for (_, one), (_, other) in zip(before, nested(given), strict=True))


def test_what_belongs_to_a_container_stays() -> None:
    given: Any = named([loader()]), defaultdict[str, Any](list, a=loader()), [ByAttribute(train=loader())]
    mine, by_default, (by_attribute,) = patch_dataloader_to_ddp(given, **WORLD)
    assert mine.name == "mine"
    assert by_default["b"] == []
    assert by_attribute.train is by_attribute["train"]
    assert check_loaders_is_patched(by_attribute.train)


def test_a_loader_in_several_places_is_patched_once() -> None:
    one, other = loader(shuffle=True), loader(shuffle=True)
    patched = patch_dataloader_to_ddp({"train": one, "val": [other, one]}, **WORLD)
    assert patched["train"] is patched["val"][1]  # type: ignore[index]  # a dict of several classes is one of objects
    assert patched["train"] is not patched["val"][0]  # type: ignore[index]  # as above


def test_what_is_sharded_already_and_the_users_generators_stay_as_they_are() -> None:
    generator = torch.Generator().manual_seed(1)
    before, done = generator.get_state(), patch_dataloader_to_ddp(loader(), **WORLD)
    nest: Any = {"train": done, "val": [loader(shuffle=True, generator=generator)], "test": None}
    patched = patch_dataloader_to_ddp(nest, **WORLD)
    assert patched["train"] is done
    assert_loaders_patched(patched)
    assert torch.equal(generator.get_state(), before)  # in an explicit world


def test_one_process_gets_what_it_gave_back_with_one_warning() -> None:
    nests: list[Any] = [loader(), [loader(), {"val": loader()}]]
    for given in nests:
        with pytest.warns(NotDistributedWarning) as caught:
            assert patch_dataloader_to_ddp(given) is given
        assert len(caught) == 1
        assert caught[0].filename == __file__
        facts = ("patch_dataloader_to_ddp", "process group", "environment", "all data")
        assert_tells(str(caught[0].message), facts, "torch.distributed.init_process_group()")


class Started(DataLoader[Any]):
    """Keeps an iterator of its own that was begun, so that it cannot be copied."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running = map(str, range(1))


def test_errors_say_which_loader_they_are_about() -> None:
    with raises(NotALoaderError, ("loaders['val'][1]: patch_dataloader_to_ddp", "3 (int)"), "loader itself"):
        patch_dataloader_to_ddp({"train": loader(), "val": [loader(), 3]}, **WORLD)
    with raises(UnsupportedLoaderError, ("loaders[1]: Started cannot be patched", "'running'"), "persistent_workers"):
        patch_dataloader_to_ddp((loader(), Started(Indices())), **WORLD)
    with raises(InvalidOptionError, ("loaders[1]: share='samples'", "PKBatches"), "share='batches'"):
        patch_dataloader_to_ddp((loader(), loader(batch_sampler=PKBatches())), share="samples", **WORLD)
    with raises(InvalidOptionError, "seed=-1", "None"):  # which is about all of them
        patch_dataloader_to_ddp((loader(), loader()), seed=-1, **WORLD)
    done = patch_dataloader_to_ddp(loader(), rank=0, num_replicas=3)
    with raises(AlreadyPatchedError, ("loaders['a']: The loader is sharded already", "rank 0 of 3"), "original loader"):
        patch_dataloader_to_ddp({"a": done}, **WORLD)
    with raises(NotALoaderError, "patch_dataloader_to_ddp needs a torch.utils.data.DataLoader and got 3", "itself"):
        patch_dataloader_to_ddp(cast(Any, 3), **WORLD)


@pytest.mark.parametrize("other", ["x", object(), Indices(), iter([]), {1}, DataLoader, loader])
def test_what_is_neither_a_loader_nor_a_nest_is_refused(other: Any) -> None:
    with raises(NotALoaderError, ("loaders[0]", "patch_dataloader_to_ddp"), ("Pass", "loader")):
        patch_dataloader_to_ddp([other, loader()], **WORLD)


def test_a_nest_that_cannot_be_returned_with_others_is_refused() -> None:
    with raises(NotALoaderError, ("list", "cannot pickle"), "list, tuple or dict"):
        patch_dataloader_to_ddp([MappingProxyType({"train": loader()})], **WORLD)


def test_places_that_cannot_be_told_apart_are_refused() -> None:
    with raises(NotALoaderError, "loaders[nan]", "strings"):
        patch_dataloader_to_ddp({float("nan"): loader(), float("nan"): loader()}, **WORLD)


def test_all_keywords_of_one_loader_hold_for_several() -> None:
    keywords = [*inspect.signature(patch_dataloader_to_ddp).parameters][1:-1]  # without **unknown
    assert sorted(PatchOptions.__annotations__) == sorted(keywords)
    with pytest.raises(TypeError, match=r"has no option unevn: did you mean uneven\?"):
        patch_dataloader_to_ddp([loader()], unevn="drop")  # type: ignore[call-overload]  # on purpose
