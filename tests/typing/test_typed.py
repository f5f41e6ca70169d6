"""What users write, and the types that mypy and pyright then see; it runs as a test too."""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar, assert_type

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from ddp_patch import (
    DDPBatchSamplerWrapper,
    DDPSamplerWrapper,
    PatchedLoader,
    assert_loaders_patched,
    check_loaders_is_patched,
    extract_loader_parameters,
    gather_in_order,
    gather_step,
    iter_with_mask,
    loader_state,
    patch_dataloader_to_ddp,
    restore_loader,
)
from ddp_patch.samplers import (
    GroupedBatchSampler,
    IterationBatchSampler,
    LengthBucketBatchSampler,
    PKBatchSampler,
    ScalableRandomSampler,
    WeightedClassSampler,
    WindowDataset,
    WindowSampler,
    aspect_ratio_groups,
)
from ddp_patch.testing import run_ranks

T_co = TypeVar("T_co", covariant=True)


class Words(Dataset[str]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> str:
        return "abcdef"[index]


class Stream(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter("abcdef")


class Pairs(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3], [4, 5]])


class Logged(DataLoader[T_co]):
    """A subclass with more to it."""

    log: list[str]


def test_a_patched_loader_is_of_the_type_that_was_given() -> None:
    sample = DataLoader(Words(), batch_size=2, sampler=RandomSampler(Words()))
    assert_type(patch_dataloader_to_ddp(sample, rank=0, num_replicas=2), PatchedLoader[str])
    batch = DataLoader(Words(), batch_sampler=Pairs())
    assert_type(patch_dataloader_to_ddp(batch, rank=0, num_replicas=2, uneven="drop"), PatchedLoader[str])
    unbatched = DataLoader(Words(), batch_size=None)
    assert_type(patch_dataloader_to_ddp(unbatched, rank=0, num_replicas=2), PatchedLoader[str])
    iterable = DataLoader(Stream(), batch_size=2)
    assert_type(patch_dataloader_to_ddp(iterable, rank=0, num_replicas=2, share="auto"), PatchedLoader[str])
    shuffled = DataLoader(Words(), shuffle=True)
    assert_type(patch_dataloader_to_ddp(shuffled, rank=0, num_replicas=2, layout="contiguous"), PatchedLoader[str])
    by_length = patch_dataloader_to_ddp(shuffled, rank=0, num_replicas=2, fingerprint=len)
    assert_type(by_length, PatchedLoader[str])
    assert_type(patch_dataloader_to_ddp(shuffled, rank=0, num_replicas=2, fingerprint=None), PatchedLoader[str])
    logged = Logged(Words())
    logged.log = ["made"]
    patched = patch_dataloader_to_ddp(logged, rank=np.int64(0), num_replicas=2, timeout=60)
    assert_type(patched, PatchedLoader[str])
    assert isinstance(patched, Logged)
    assert_type(patched.log, list[str])
    patched.set_epoch(1)


class Loaders(NamedTuple):
    """A nest with names."""

    train: DataLoader[str]
    val: Logged[str] | None


def test_a_nest_of_loaders_is_of_the_type_that_was_given() -> None:
    train, logged = DataLoader(Words(), shuffle=True), Logged(Words())
    pair = patch_dataloader_to_ddp((train, logged), rank=0, num_replicas=2, uneven="drop", seed=1)
    assert_type(pair, tuple[PatchedLoader[str], PatchedLoader[str]])
    three = patch_dataloader_to_ddp((train, logged, train), rank=0, num_replicas=2)
    assert_type(three, tuple[PatchedLoader[str], PatchedLoader[str], PatchedLoader[str]])
    assert_type(patch_dataloader_to_ddp([train, train], rank=0, num_replicas=2), list[DataLoader[str]])
    by_name = patch_dataloader_to_ddp({"train": train, "val": train}, rank=0, num_replicas=2, share="batches")
    assert_type(by_name, dict[str, DataLoader[str]])
    named = patch_dataloader_to_ddp(Loaders(train, None), rank=0, num_replicas=2)
    assert_type(named, Loaders)
    assert_type(named.train, DataLoader[str])
    alone = patch_dataloader_to_ddp(logged, rank=0, num_replicas=2)
    assert_type(alone, PatchedLoader[str])
    assert_loaders_patched((pair, by_name, named, alone))
    assert_loaders_patched({"train": pair, "test": None})


def count_words(loader: DataLoader[str]) -> int:
    return sum(len(batch) for batch in loader)


def train(loader: PatchedLoader[str], epochs: int) -> None:
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            assert len(batch) <= 2


def test_a_patched_loader_is_told_its_epoch_without_a_cast() -> None:
    loader = patch_dataloader_to_ddp(DataLoader(Words(), batch_size=2, shuffle=True), rank=0, num_replicas=2)
    train(loader, 2)
    loader.sampler.set_epoch(3)
    assert_type(len(loader), int)
    assert count_words(loader) == 3
    state = loader.state_dict()
    assert_type(state, dict[str, Any])
    loader.load_state_dict(state)
    for batch in loader:
        assert len(batch) in {1, 2}
    unknown: DataLoader[str] = loader
    assert isinstance(unknown, PatchedLoader)
    unknown.set_epoch(4)
    by_name = patch_dataloader_to_ddp({"train": DataLoader(Words())}, rank=0, num_replicas=2)
    one = by_name["train"]
    assert isinstance(one, PatchedLoader)
    one.sampler.set_epoch(5)


def patched_words() -> PatchedLoader[str]:
    return patch_dataloader_to_ddp(DataLoader(Words(), batch_size=2), rank=0, num_replicas=1)


def test_the_guard() -> None:
    loader = patched_words()
    assert_type(check_loaders_is_patched({"train": loader, "val": [loader, (loader,)]}), bool)
    assert_loaders_patched([loader])
    assert_type(extract_loader_parameters(loader), dict[str, Any])


def test_outputs_keep_their_type() -> None:
    loader = patched_words()
    rows = [len(word) for batch in loader for word in batch]
    assert_type(gather_in_order(rows, loader), list[int])
    assert_type(gather_in_order(torch.tensor(rows), loader), Tensor)
    assert_type(gather_in_order([torch.zeros(2, 3)] * 3, loader), list[Tensor])
    for words in loader:
        assert_type(gather_step({"words": list(words)}, loader), dict[str, list[Any]])
    of_numpy: npt.NDArray[np.float32] = np.zeros(len(rows), np.float32)
    assert_type(gather_in_order({"score": of_numpy}, loader), dict[str, npt.NDArray[np.float32]])
    for step, (_, mask) in enumerate(iter_with_mask(loader)):
        assert_type(step, int)
        assert_type(mask, Tensor)


def test_resuming() -> None:
    loader = patched_words()
    next(iter(loader))
    state = loader_state(loader, batches_done=1)
    assert_type(state, dict[str, Any])
    restore_loader(loader, state)
    assert len(loader) == 2


def test_samplers_yield_what_they_are_given() -> None:
    indices = DDPSamplerWrapper(RandomSampler(Words()), num_replicas=2, rank=0)
    assert_type(indices, DDPSamplerWrapper[int])
    assert_type(list(indices), list[int])
    names = DDPSamplerWrapper(["a.jpg", "b.jpg"], False, uneven="keep", num_replicas=2, rank=0)
    assert_type(list(names), list[str])
    batches = DDPBatchSamplerWrapper(BatchSampler(RandomSampler(Words()), 2, False), num_replicas=2, rank=0)
    assert_type(list(batches), list[list[int]])
    assert_type(batches.batch_size, int)


def test_the_samplers_of_the_field() -> None:
    labels = ["cat", "dog"] * 3
    assert_type(list(WeightedClassSampler(labels, {"cat": 1, "dog": 2}, 6)), list[int])
    assert_type(WeightedClassSampler.upsample(labels, seed=0), WeightedClassSampler)
    assert_type(list(ScalableRandomSampler(10, seed=0)), list[int])
    assert_type(list(WindowSampler(10, window=3)), list[int])
    batches = PKBatchSampler(torch.tensor([0, 0, 1, 1]), p=2, k=2)
    assert_type(list(batches), list[list[int]])
    assert_type(list(IterationBatchSampler(batches, 3)), list[list[int]])
    assert_type(list(LengthBucketBatchSampler(np.array([3, 4, 5]), max_tokens=8)), list[list[int]])
    groups = aspect_ratio_groups([1.0, 3.0, 4.0], [2.0, 2.0, 2.0])
    assert_type(list(GroupedBatchSampler(range(3), groups, 2)), list[list[int]])
    windows = DataLoader(WindowDataset(torch.arange(10), window=3), sampler=WindowSampler(10, window=3))
    assert len(windows) == 4


def add(rank: int, world_size: int, offset: int, scale: float) -> float:
    return (rank + world_size + offset) * scale


def test_ranks_return_what_the_function_does() -> None:
    assert_type(run_ranks(add, 1, 3, 0.5, timeout=60), list[float])
