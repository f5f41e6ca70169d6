"""Bad input: each message word for word, with the operation, the values, the reason and the remedy."""

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from zoo import Indices, N, as_it_is, loader

from ddp_patch import (
    AlreadyPatchedError,
    DDPBatchSamplerWrapper,
    DDPPatchError,
    DDPSamplerWrapper,
    InvalidOptionError,
    NotALoaderError,
    NotPatchedError,
    StreamLengthError,
    UnsupportedLoaderError,
    WorldError,
    assert_loaders_patched,
    check_loaders_is_patched,
    extract_loader_parameters,
    patch_dataloader_to_ddp,
)
from ddp_patch.testing import run_ranks

EXPLICIT: dict[str, Any] = {"rank": 0, "num_replicas": 2}

OPTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"uneven": "padd"},
        "uneven='padd' does not exist. Pass one of these: 'pad' repeats the stream's first items to fill the last "
        "round, 'drop' leaves the last, incomplete round out, 'keep' gives some ranks one item less.",
    ),
    (
        {"layout": None},
        "layout=None does not exist. Pass one of these: 'interleaved' gives rank r every num_replicas-th item, "
        "'contiguous' gives rank r the r-th run of items.",
    ),
    (
        {"agreement": ["seeded"]},
        "agreement=['seeded'] does not exist. Pass one of these: 'auto' is 'seeded', and 'leader' where the ranks are "
        "found to draw different orders, 'seeded' derives every epoch's order from (seed, epoch), 'ambient' uses the "
        "global random states as they are, for ranks that are seeded alike, 'leader' has rank 0 draw and send every "
        "rank its share.",
    ),
    (
        {"seed": -1},
        "seed=-1 is not a whole number of at least 0, and orders are derived from one. Pass such an int, or None for "
        "rank 0's torch.initial_seed().",
    ),
    (
        {"seed": True},
        "seed=True is not a whole number of at least 0, and orders are derived from one. Pass such an int, or None "
        "for rank 0's torch.initial_seed().",
    ),
    (
        {"rank": 1, "num_replicas": None},
        "rank=1 was given without num_replicas: an explicit world needs both. Pass num_replicas too, or neither to "
        "read the process group.",
    ),
    (
        {"rank": None, "num_replicas": 2},
        "num_replicas=2 was given without rank: an explicit world needs both. Pass rank too, or neither to read the "
        "process group.",
    ),
    (
        {"rank": 2, "num_replicas": 2},
        "rank=2 is out of range for num_replicas=2: ranks count from 0 to 1. Pass this process's rank within the "
        "group.",
    ),
    (
        {"rank": -1, "num_replicas": 2},
        "rank=-1 is out of range for num_replicas=2: ranks count from 0 to 1. Pass this process's rank within the "
        "group.",
    ),
    (
        {"rank": 0, "num_replicas": 0},
        "num_replicas=0 leaves no rank to share with: pass the number of ranks, at least 1.",
    ),
    ({"rank": 0.0, "num_replicas": 2}, "rank=0.0 is a float, not an int. Pass a whole number."),
    ({"rank": 0, "num_replicas": "2"}, "num_replicas='2' is a str, not an int. Pass a whole number."),
    ({"rank": False, "num_replicas": 2}, "rank=False is a bool, not an int. Pass a whole number."),
    (
        {"process_group": "dp"},
        "The world was given in 2 ways, by rank= and process_group=, which may contradict each other. Pass one of "
        "them.",
    ),
    (
        {"data_parallel_dimensions": ["dp"]},
        "data_parallel_dimensions=['dp'] names dimensions of a device_mesh, and none was given. Pass device_mesh= too.",
    ),
    (
        {"agreement": "leader"},
        "agreement='leader' has the ranks communicate, and in a world given by rank= and num_replicas= nothing is sent. "
        "Leave these out, after torch.distributed.init_process_group(), or leave that out.",
    ),
    (
        {"verify": True},
        "verify=True has the ranks communicate, and in a world given by rank= and num_replicas= nothing is sent. Leave "
        "these out, after torch.distributed.init_process_group(), or leave that out.",
    ),
    (
        {"timeout": 0},
        "timeout=0 is not a number of seconds from 0.001 to 1e+08, and ranks that wait for each other need an end to it. "
        "Pass one.",
    ),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=lambda value: str(value)[:30])
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        patch_dataloader_to_ddp(loader(), **(EXPLICIT | options))
    assert str(caught.value) == message
    with pytest.raises(InvalidOptionError) as caught:
        DDPSamplerWrapper(range(3), **(EXPLICIT | options))
    assert str(caught.value) == message


@pytest.mark.parametrize("epoch", [-1, 1.5, None])
def test_epochs(epoch: Any) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        DDPSamplerWrapper(range(3), **EXPLICIT).set_epoch(epoch)
    assert str(caught.value) == (
        f"set_epoch({epoch!r}): an epoch is a whole number of at least 0, because its order is derived from it. Pass "
        "the number of the epoch that comes next."
    )


@pytest.mark.parametrize("operation", [patch_dataloader_to_ddp, extract_loader_parameters])
def test_not_a_loader(operation: Any) -> None:
    with pytest.raises(NotALoaderError) as caught:
        operation([1, 2])
    assert str(caught.value) == (
        f"{operation.__name__} needs a torch.utils.data.DataLoader and got [1, 2] (list): only a loader knows its "
        "dataset, sampler and batches. Pass the finished loader itself."
    )


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("workers", "options", "message"),
    [
        (
            0,
            {"layout": "contiguous"},
            "layout='contiguous' cuts a stream into one run for each of 2 ranks, for which its length must be known, and Stream "
            "has no len(). Give it a __len__, or use layout='interleaved', which needs none.",
        ),
        (
            0,
            {"layout": "contiguous", "iterable_sharding": "by_worker"},
            "layout='contiguous' cannot hold with iterable_sharding='by_worker': Stream itself decides what each worker "
            "reads. Use one or the other.",
        ),
        (
            0,
            {"agreement": "leader"},
            "agreement='leader' cannot hold for Stream: rank 0 sends indices, and an iterable dataset has none. Use "
            "agreement='seeded'.",
        ),
        (
            2,
            {"agreement": "ambient"},
            "agreement='ambient' cannot hold for Stream with num_workers=2: the stream is made inside the workers, whose "
            "random states differ by rank so that augmentations do. Use agreement='seeded'.",
        ),
        (
            0,
            {"iterable_sharding": "by_node"},
            "iterable_sharding='by_node' does not exist. Pass one of these: 'exact' has every rank read the whole stream "
            "and keep its share, 'by_worker' has the dataset split itself by get_worker_info(), over the workers of all "
            "ranks.",
        ),
    ],
)
def test_an_iterable_dataset_with_an_option_that_cannot_hold(
    workers: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        patch_dataloader_to_ddp(DataLoader(Stream(), num_workers=workers), **EXPLICIT, **options)
    assert str(caught.value) == message


class SplitStream(Stream):
    _distributed = "rank 0 of 2"


def test_a_dataset_that_was_split_by_node() -> None:
    with pytest.raises(UnsupportedLoaderError) as caught:
        patch_dataloader_to_ddp(DataLoader(SplitStream()), **EXPLICIT)
    assert str(caught.value) == (
        "SplitStream was split by split_dataset_by_node() already, and sharing a share again would lose the rest of it. "
        "Patch a loader of the whole dataset, without that call."
    )


class LyingStream(Stream):
    def __len__(self) -> int:
        return 5


def test_a_wrong_length_of_an_iterable_dataset_with_contiguous_runs() -> None:
    patched = patch_dataloader_to_ddp(DataLoader(LyingStream()), layout="contiguous", **EXPLICIT)
    with pytest.raises(StreamLengthError) as caught:
        list(patched)
    assert str(caught.value) == (
        "LyingStream yielded 0 items and its len() said 5. With layout='contiguous' each rank's run was cut from that "
        "length, so this epoch's shares are wrong. Correct the dataset's __len__, or use layout='interleaved', which "
        "needs none."
    )


def test_a_sampler_without_length_cut_into_runs() -> None:
    with pytest.raises(InvalidOptionError) as caught:
        DDPSamplerWrapper(iter([1, 2]), False, layout="contiguous", **EXPLICIT)
    assert str(caught.value) == (
        "layout='contiguous' cuts a stream into one run for each of 2 ranks, for which its length must be known, and "
        "list_iterator has no len(). Give it a __len__, or use layout='interleaved', which needs none."
    )


class MultiEpochsDataLoader(DataLoader[Any]):
    """As timm has it: one iterator, begun by the constructor, over a batch sampler that is repeated for ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vars(self)["batch_sampler"] = Repeated(self.batch_sampler)
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]  # the repeated one

    def __iter__(self) -> Any:
        return (next(self.iterator) for _ in range(len(self)))


class Repeated:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        while True:
            yield from self.sampler


def test_a_loader_that_runs_an_iterator_of_its_own() -> None:
    with pytest.raises(UnsupportedLoaderError) as caught:
        patch_dataloader_to_ddp(MultiEpochsDataLoader(Indices(), 4), **EXPLICIT)
    assert str(caught.value) == (
        "MultiEpochsDataLoader cannot be patched: it started an iterator in its constructor (attribute 'iterator'), which "
        "would go on yielding unsharded data. Build it with a sampler that is sharded already, "
        "MultiEpochsDataLoader(dataset, sampler=DDPSamplerWrapper(sampler, False), ...), or use a DataLoader with "
        "persistent_workers=True."
    )


class KeepsAGenerator(DataLoader[Any]):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.streams = [self.for_ever()]

    def for_ever(self) -> Any:
        while True:
            yield from super().__iter__()


def test_a_loader_that_keeps_a_generator_of_its_own() -> None:
    with pytest.raises(UnsupportedLoaderError, match="an iterator in its constructor \\(attribute 'streams'\\)"):
        patch_dataloader_to_ddp(KeepsAGenerator(Indices(), 4), **EXPLICIT)


@pytest.mark.parametrize("wrapper", [DDPSamplerWrapper, DDPBatchSamplerWrapper])
def test_a_sampler_that_shards_already_cannot_be_wrapped_by_hand(wrapper: Any) -> None:
    with pytest.raises(AlreadyPatchedError) as caught:
        wrapper(DDPSamplerWrapper(range(3), **EXPLICIT), **EXPLICIT)
    assert str(caught.value) == (
        f"{wrapper.__name__} was given a DDPSamplerWrapper that is, or holds, a sampler which shards already, and would share a "
        "share. Wrap the original sampler instead."
    )


def test_the_remedy_for_it_works() -> None:
    epochs = []
    for rank in range(2):
        sampler = DDPSamplerWrapper(RandomSampler(Indices()), False, rank=rank, num_replicas=2, seed=3)
        sharded = MultiEpochsDataLoader(Indices(), 4, sampler=sampler, collate_fn=as_it_is)
        assert check_loaders_is_patched(sharded)
        epochs.append([[item for batch in sharded for item in batch] for _ in range(2)])
    for first, second in zip(*epochs, strict=True):
        assert set(first) | set(second) == set(range(N))
        assert len(first) == len(second) == 12
    assert epochs[0][0] != epochs[0][1]


class Uncopyable(DataLoader[Any]):
    def __copy__(self) -> Any:
        raise TypeError("there is one of each")


class Computed(DataLoader[Any]):
    @property
    def batch_sampler(self) -> Any:
        return BatchSampler(SequentialSampler(Indices()), 3, drop_last=False)

    @batch_sampler.setter
    def batch_sampler(self, value: Any) -> None: ...


def test_a_loader_that_forbids_copying() -> None:
    with pytest.raises(UnsupportedLoaderError) as caught:
        patch_dataloader_to_ddp(Uncopyable(Indices()), **EXPLICIT)
    assert str(caught.value) == (
        "Uncopyable cannot be patched: copying it raised TypeError: there is one of each. Let its __copy__ or "
        "__reduce_ex__ make a shallow copy, or build the loader with a DDPSamplerWrapper as its sampler."
    )
    with pytest.raises(UnsupportedLoaderError) as caught:
        patch_dataloader_to_ddp(Computed(Indices()), **EXPLICIT)
    assert str(caught.value) == (
        "Computed cannot be patched: its attribute 'batch_sampler' is computed by the class, so a sharded one cannot take "
        "its place. Store it as DataLoader does, or build the loader with a DDPSamplerWrapper as its sampler."
    )


def test_a_group_that_was_announced_and_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(WorldError) as caught:
        patch_dataloader_to_ddp(loader())
    assert str(caught.value) == (
        "The environment says WORLD_SIZE=4, but no process group exists, so every rank would train on all data. Call "
        "torch.distributed.init_process_group() first (or what does so: Fabric.launch(), Accelerator()), or pass "
        "rank= and num_replicas=."
    )


def test_a_wrapper_without_a_world() -> None:
    with pytest.raises(WorldError) as caught:
        DDPSamplerWrapper(range(3))
    assert str(caught.value) == (
        "DDPSamplerWrapper does not know which rank of how many it is: there is no process group. Call "
        "torch.distributed.init_process_group() first, or pass rank= and num_replicas=."
    )


def test_patched_for_another_world() -> None:
    patched = patch_dataloader_to_ddp(loader(), **EXPLICIT)
    with pytest.raises(AlreadyPatchedError) as caught:
        patch_dataloader_to_ddp(patched, rank=0, num_replicas=3)
    assert str(caught.value) == (
        "The loader was patched for rank 0 of 2 and cannot be patched again for rank 0 of 3: it would share a share. "
        "Patch the original loader instead."
    )


def test_the_guard_names_each_offender_by_its_place() -> None:
    patched = patch_dataloader_to_ddp(loader(), **EXPLICIT)
    nest: Any = {"train": patched, "val": [patched, loader()], "test": {"clean": loader(), 3: (loader(),)}}
    assert not check_loaders_is_patched(nest)
    with pytest.raises(NotPatchedError) as caught:
        assert_loaders_patched(nest)
    assert str(caught.value) == (
        "Every rank would get all data from 3 of 5 loaders: val[1], test.clean, test.3[0]. Pass each through "
        "patch_dataloader_to_ddp() on every rank."
    )
    with pytest.raises(NotPatchedError, match="from 1 of 1 loaders: the loader"):
        assert_loaders_patched(loader())


@pytest.mark.parametrize("guard", [check_loaders_is_patched, assert_loaders_patched])
def test_the_guard_wants_loaders(guard: Any) -> None:
    with pytest.raises(NotALoaderError) as caught:
        guard({"train": [None]})
    assert str(caught.value) == (
        "Found None (NoneType) at train[0] where a DataLoader or a list, tuple or dict of them was expected. Leave it "
        "out, or pass the loader itself."
    )
    with pytest.raises(NotALoaderError, match=r"Found 'loader' \(str\) at the top where"):
        guard("loader")


class Liar(list[int]):
    """Ten items that say they are twelve."""

    def __len__(self) -> int:
        return 12


def test_a_wrong_length_with_contiguous_runs() -> None:
    sampler = DDPSamplerWrapper(Liar(range(10)), False, layout="contiguous", **EXPLICIT)
    with pytest.raises(StreamLengthError) as caught:
        list(sampler)
    assert str(caught.value) == (
        "The sampler yielded 10 items and its len() said 12. With layout='contiguous' each rank's run was cut from "
        "that length, so this epoch's shares are wrong. Correct the sampler's __len__, or use layout='interleaved', "
        "which needs none."
    )


def test_run_ranks_that_can_start_nothing() -> None:
    for world_size, timeout in ((0, 1.0), (1, 0.0)):
        with pytest.raises(InvalidOptionError) as caught:
            run_ranks(print, world_size, timeout=timeout)
        assert str(caught.value) == (
            f"run_ranks with world_size={world_size} and timeout={timeout} can start nothing: pass at least 1 rank "
            "and a positive number of seconds."
        )


def test_every_error_is_this_packages_and_the_builtin_that_users_catch() -> None:
    pairs: dict[type[DDPPatchError], type[Exception]] = {
        AlreadyPatchedError: RuntimeError,
        InvalidOptionError: ValueError,
        NotALoaderError: TypeError,
        NotPatchedError: AssertionError,
        StreamLengthError: RuntimeError,
        UnsupportedLoaderError: TypeError,
        WorldError: RuntimeError,
    }
    for error, builtin in pairs.items():
        assert issubclass(error, DDPPatchError)
        assert issubclass(error, builtin)


def test_nothing_is_drawn_or_changed_when_an_option_is_refused() -> None:
    given = loader(shuffle=True)
    before, state = dict(vars(given)), torch.get_rng_state()
    with pytest.raises(InvalidOptionError):
        patch_dataloader_to_ddp(given, uneven="no", **EXPLICIT)  # type: ignore[arg-type]
    assert vars(given) == before
    assert torch.equal(torch.get_rng_state(), state)
