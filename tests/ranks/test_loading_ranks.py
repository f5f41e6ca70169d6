"""Scripts of one process whose loaders the ranks share the reading of: each gives what it gives in one process."""

import gc
import os
import random
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from quick import run_ranks, soaked
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.loaders.hooks import called_before
from ddp_patch.running import loading
from ddp_patch.running.loader_reports import is_off, user_of
from ddp_patch.running.lockstep import Lockstep

BY_PARTS = "read by parts"


@contextmanager
def sharing(told: list[str], *, always: bool = True) -> Iterator[None]:
    """Share the reading of loaders, whether it pays or not if ``always``."""
    lockstep = Lockstep()
    lockstep.join(60)
    shares = loading.Loading(lockstep, lambda _, text: None if text in told else told.append(text))

    def begin(loader: DataLoader[Any]) -> Any:
        return None if is_off() or user_of(loader) is not None else shares.begin(loader, "a loader")

    gains = patch.object(loading, "_gain", lambda *_: 1.0) if always else nullcontext()
    with gains, called_before("__iter__", begin):
        yield


def plain(value: Any) -> Any:
    """Return what can be compared."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, value.stride(), value.tolist()
    if isinstance(value, np.ndarray):
        return "array", value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [plain(each) for each in value]
    return value


class Rows(Dataset[Any]):
    """Rows of numbers, in a file each as far as anybody can tell."""

    def __init__(self, n: int = 43, width: int = 5) -> None:
        self.rows = torch.arange(n * width, dtype=torch.float64).reshape(n, width)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], index


def drawn() -> list[Any]:
    return [torch.rand(2).tolist(), random.random(), np.random.rand()]


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def epochs(loader: Any, n: int = 3) -> list[Any]:
    """Return what a loop over a loader sees, with random numbers that it draws itself."""
    seed()
    return [[len(loader), [(plain(batch), drawn()) for batch in loader], drawn()] for _ in range(n)]


# ---- loaders that are read by parts ----


def ragged(samples: list[Any]) -> Any:
    """Pad to the longest, and sort by length, the longest first."""
    rows = sorted((row[: 1 + index % 5] for row, index in samples), key=len, reverse=True)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), [len(row) for row in rows]


def mixed(samples: list[Any]) -> Any:
    rows = torch.stack([row for row, _ in samples])
    return torch.lerp(rows, rows[torch.randperm(len(rows))], np.random.beta(1, 1))


Pair = namedtuple("Pair", "name value")


class Objects(Rows):
    def __getitem__(self, index: int) -> Any:
        image = torch.arange(12.0).reshape(2, 2, 3).permute(2, 0, 1) + index  # channels last in memory
        boxes = [{"box": torch.ones(index % 3, 4), "label": "abc"[index % 3]}]
        return {"image": image, "boxes": boxes, "pair": Pair(f"n{index}", np.float32(index)), "none": None}


class Together(Rows):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self.rows[index] * 2, index) for index in indices]


class Cached(Rows):
    """Keeps what it has read, and opens its file when it first reads."""

    def __init__(self) -> None:
        super().__init__()
        self.file: Any = None
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or object()
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


class Lazy(BatchSampler):
    """Draws each batch from the global generators when it is asked for it."""

    def __init__(self) -> None: ...

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        for number in range(6):
            yield tuple(random.sample(range(43), number)) if number else [1]


def images(samples: list[Any]) -> Any:
    return samples[0]["none"], torch.stack([each["image"] for each in samples])


def worker_reads_its_dataset(worker: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    assert isinstance(info.dataset, Rows)
    info.dataset.rows += 0.5


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Rows(), 8, shuffle=True),
    "a generator of its own": lambda: DataLoader(Rows(), 8, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "small batches, some of less samples than ranks": lambda: DataLoader(Rows(25), 4),
    "drop_last": lambda: DataLoader(Rows(), 8, drop_last=True),
    "weighted": lambda: DataLoader(Rows(), 8, sampler=WeightedRandomSampler([*range(43)], 40)),
    "padded and sorted": lambda: DataLoader(Rows(), 8, shuffle=True, collate_fn=ragged),
    "mixed in collate_fn": lambda: DataLoader(Rows(), 8, shuffle=True, collate_fn=mixed),
    "objects": lambda: DataLoader(Objects(), 6, collate_fn=lambda samples: tuple(samples)),
    "objects, collated": lambda: DataLoader(Objects(), 3, collate_fn=images),
    "read together": lambda: DataLoader(Together(), 8),
    "a cache": lambda: DataLoader(Cached(), 8, shuffle=True),
    "lazy batches": lambda: DataLoader(Rows(), batch_sampler=Lazy()),
    "large rows": lambda: DataLoader(Rows(30, 3000), 4),
    "growing rows": lambda: DataLoader(Rows(40, 900), batch_sampler=[[*range(size)] for size in (4, 4, 4, 9, 30, 40)]),
    "workers": lambda: DataLoader(Rows(60), 4, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(Rows(60), 4, shuffle=True, num_workers=2, persistent_workers=True),
    "workers that change their dataset": lambda: DataLoader(
        Rows(60), 4, num_workers=2, prefetch_factor=1, worker_init_fn=worker_reads_its_dataset
    ),
}  # fmt: skip


def over_loaders(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for name, make in LOADERS.items():
        alone, told = epochs(make()), list[str]()
        with sharing(told):
            found[name] = alone == epochs(make()), told
    return found


@pytest.mark.parametrize("world_size", [2, 3, soaked(4)])
def test_every_rank_is_given_the_batches_and_random_numbers_of_one_process(world_size: int) -> None:
    for found in run_ranks(over_loaders, world_size):
        assert found == dict.fromkeys(LOADERS, (True, [BY_PARTS]))


# ---- loaders that every rank reads whole, and why ----


class Counting(Rows):
    """Counts what is read, which scripts print."""

    count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return self.rows[index], self.count


class Drawing(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.draw = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] * self.draw.random()


class Nested(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Counting()

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class Embedding(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(5, dtype=torch.float64, requires_grad=True)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] * self.scale


class Batches(Rows):
    def __getitem__(self, index: Any) -> Any:
        return self.rows[index] * 2

    def __getitems__(self, indices: list[int]) -> Any:
        return self.rows[indices]


class Items(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from torch.rand(20, 2)


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch, "more"


class Numbering:
    """Numbers its batches."""

    number = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.number += 1
        return self.number, torch.stack([row for row, _ in samples])


class Unsent(Rows):
    def __getitem__(self, index: int) -> Any:
        return index, threading.Lock()


def first_of(samples: list[Any]) -> Any:
    return [sample[0] for sample in samples]


WHOLE: dict[str, tuple[Callable[[], Any], str]] = {
    "counts": (lambda: DataLoader(Counting(), 8, shuffle=True), "its dataset keeps count of what is read"),
    "counts within": (lambda: DataLoader(Nested(), 8, shuffle=True), "its dataset keeps count of what is read"),
    "draws by itself": (lambda: DataLoader(Drawing(), 8, shuffle=True), "its dataset keeps count of what is read"),
    "counts in workers": (lambda: DataLoader(Counting(), 8, num_workers=2), "its dataset keeps count of what is read"),
    "numbers batches": (lambda: DataLoader(Rows(), 8, collate_fn=Numbering()), "its collate_fn keeps count"),
    "mixes in workers": (
        lambda: DataLoader(Rows(), 8, collate_fn=mixed, num_workers=2),
        "its collate_fn draws random numbers in workers",
    ),
    "reads batches": (lambda: DataLoader(Batches(), 8, collate_fn=lambda rows: rows), "its dataset reads batches"),
    "has gradients": (lambda: DataLoader(Embedding(), 8), "its samples have gradients, or are on a device"),
    "iterable": (lambda: DataLoader(Items(), 8), "its dataset is iterable"),
    "no batches": (lambda: DataLoader(Rows(), None, shuffle=True), "it makes no batches"),
    "own iteration": (lambda: OwnLoader(Rows(), 8), "OwnLoader iterates in its own way"),
    "cannot be sent": (lambda: DataLoader(Unsent(), 8, collate_fn=first_of), "its samples cannot be sent"),
}


def over_whole_loaders(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for name, (make, _) in WHOLE.items():
        length = patch.object(DataLoader, "__len__", lambda _: 0)  # of what is iterable, there is none
        with length:
            one, told = make(), list[str]()
            alone = epochs(one), getattr(one.dataset, "count", 0)
            with sharing(told):
                other = make()
                found[name] = alone == (epochs(other), getattr(other.dataset, "count", 0)), told
    return found


def test_what_cannot_be_divided_is_whole_on_every_rank_and_a_line_says_why() -> None:
    for found in run_ranks(over_whole_loaders, 2):
        assert {name: same for name, (same, _) in found.items()} == dict.fromkeys(WHOLE, True)
        for name, (_, why) in WHOLE.items():
            (told,) = found[name][1]
            assert told.startswith(f"whole on every rank ({why}")


# ---- ways to iterate ----


def leaves_early() -> Any:
    loader = DataLoader(Rows(), 4, shuffle=True, num_workers=0)
    seed()
    found = list[Any]()
    for taken in (0, 1, 3, 99, 2):
        for number, batch in enumerate(loader):
            if number == taken:
                break
            found.append((plain(batch), drawn()))
        found.append(drawn())
    found.append(plain(next(iter(loader))))
    return found


def leaves_persistent_workers_early() -> Any:
    loader = DataLoader(Rows(), 4, shuffle=True, num_workers=2, persistent_workers=True)
    seed()
    return [[plain(batch) for _, batch in zip(range(taken), loader, strict=False)] for taken in (1, 3, 99, 2, 99)]


def zips_and_nests() -> Any:
    a, b = DataLoader(Rows(), 4, shuffle=True), DataLoader(Rows(31), 6, shuffle=True, num_workers=1)
    seed()
    found = [[plain(pair) for pair in zip(a, b, strict=False)] for _ in range(3)]
    for outer in a:
        found += [[plain(outer), plain(inner)] for inner in a]
        found += [[plain(outer), plain(inner)] for inner in b]
    return found


def makes_a_loader_in_each_epoch() -> Any:
    seed()
    return [plain(batch) for _ in range(3) for batch in DataLoader(Rows(), 9, shuffle=True)]


def fails_and_goes_on(workers: int) -> Any:
    class Broken(Rows):
        def __getitem__(self, index: int) -> Any:
            if index in {13, 14, 30}:
                raise ValueError(f"cannot read {index}")
            return super().__getitem__(index)

    loader, found = DataLoader(Broken(), 4, num_workers=workers), list[Any]()
    for _ in range(2):
        batches = iter(loader)
        while True:
            try:
                found.append(plain(next(batches)))
            except StopIteration:
                break
            except ValueError as error:
                found.append(str(error).strip().splitlines()[-1])
    return found


def ends_by_its_dataset() -> Any:
    class Ending(Rows):
        def __getitem__(self, index: int) -> Any:
            if index == 22:
                raise StopIteration
            return super().__getitem__(index)

    return [[plain(batch) for batch in DataLoader(Ending(), 4)] for _ in range(2)]


def has_nothing() -> Any:
    loader = DataLoader(Rows(), batch_sampler=[])
    return [[*loader], [*loader], next(iter(DataLoader(Rows(1), 4)))[1].tolist()]


def asks_its_length() -> Any:
    loader: Any = DataLoader(Rows(), 4)
    batches = iter(loader)
    next(batches)
    return len(loader), len(batches), loader.batch_size, type(loader.dataset).__name__, len(loader.batch_sampler)


PROGRAMS: dict[str, Callable[[], Any]] = {
    "leaves early": leaves_early,
    "leaves persistent workers early": leaves_persistent_workers_early,
    "zips and nests": zips_and_nests,
    "a loader in each epoch": makes_a_loader_in_each_epoch,
    "fails and goes on": lambda: fails_and_goes_on(0),
    "fails in workers and goes on": lambda: fails_and_goes_on(2),
    "ends by its dataset": ends_by_its_dataset,
    "has nothing": has_nothing,
    "asks its length": asks_its_length,
}


def over_programs(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for name, program in PROGRAMS.items():
        alone = program()
        with sharing([]):
            found[name] = alone == program()
    return found


@pytest.mark.parametrize("world_size", [2, soaked(3)])
def test_a_script_iterates_as_it_does_in_one_process(world_size: int) -> None:
    for found in run_ranks(over_programs, world_size):
        assert found == dict.fromkeys(PROGRAMS, True)


# ---- random numbers that samples draw ----


class Noisy(Rows):
    def __getitem__(self, index: int) -> Any:
        return torch.cat([torch.rand(1), torch.tensor([random.random(), np.random.rand(), index])])


def augments(rank: int, world_size: int) -> Any:
    found, told = {}, list[str]()
    for workers in (0, 2):
        with sharing(told):
            seed()
            loader = DataLoader(Noisy(64), 8, shuffle=True, num_workers=workers, prefetch_factor=workers or None)
            found[workers] = [[batch.tolist() for batch in loader] for _ in range(2)], drawn()
    return found, told


def test_augmentation_differs_between_samples_and_is_the_same_for_all_ranks() -> None:
    (found, told), (other, _) = run_ranks(augments, 2)
    assert found == other
    assert told == [f"{BY_PARTS}, each rank with random numbers of its own"]
    for passes, _ in found.values():
        rows = [tuple(row[:3]) for batches in passes for batch in batches for row in batch]
        for numbers in zip(*rows, strict=True):
            assert len({*numbers}) == 128  # no two samples have drawn the same


class Unseeded(Rows):
    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng().random()


class UnseededItems(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        draw = np.random.default_rng()
        yield from draw.random(draw.integers(20, 60))


def draws_from_the_system(rank: int, world_size: int) -> Any:
    told = list[str]()
    with sharing(told):
        loaders = DataLoader(Unseeded(), 4, num_workers=1), DataLoader(UnseededItems(), 4, num_workers=1)
        return [[[batch.tolist() for batch in loader] for _ in range(2)] for loader in loaders], told


def test_batches_that_no_seed_makes_alike_are_those_of_rank_0() -> None:
    (first, told), (second, _) = run_ranks(draws_from_the_system, 2)
    assert first == second
    assert [text.partition("(")[2] for text in told] == [
        "the ranks read other samples by themselves; all take those of rank 0)",
        "its dataset is iterable; all take those of rank 0)",
    ]


# ---- what travels, and what it costs ----


def without_shared_memory(rank: int, world_size: int) -> Any:
    def refuse(*_: object) -> None:
        raise OSError("no space")

    make, found = LOADERS["growing rows"], list[Any]()
    alone = epochs(make())
    for place in (patch.object(os, "posix_fallocate", refuse), patch.object(loading, "_MEMORY", "/nowhere")):
        told = list[str]()
        with place, sharing(told):
            found.append((alone == epochs(make()), told))
    return found


def test_ranks_without_room_in_shared_memory_send_their_samples() -> None:
    for found in run_ranks(without_shared_memory, 2):
        assert found == [(True, [BY_PARTS])] * 2


def leaves_nothing(rank: int, world_size: int) -> list[str]:
    folder = loading._MEMORY
    before = {*os.listdir(folder)}
    with sharing([]):
        epochs(LOADERS["growing rows"]())
    gc.collect()
    torch.distributed.barrier()
    return [name for name in os.listdir(folder) if name.startswith("ddp_patch-") and name not in before]


def test_shared_memory_is_given_back() -> None:
    assert run_ranks(leaves_nothing, 2) == [[], []]


class Slow(Rows):
    def __init__(self, folder: Path) -> None:
        super().__init__(40)
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        with (self.folder / f"{os.getpid()}").open("a") as file:
            file.write("x")
        return super().__getitem__(index)


def reads_what_pays(rank: int, world_size: int, folder: Path) -> Any:
    told = list[str]()
    with sharing(told, always=False):
        for loader in (DataLoader(TensorDataset(torch.rand(64, 3)), 8), DataLoader(Slow(folder), 8)):
            for _ in range(2):
                assert len([*loader]) == len(loader)
    return told, (folder / f"{os.getpid()}").stat().st_size


def test_only_what_takes_long_is_read_by_parts_and_each_sample_by_one_rank(tmp_path: Path) -> None:
    for told, reads in run_ranks(reads_what_pays, 2, tmp_path):
        assert told == ["whole on every rank (sending its samples takes longer than reading them)", BY_PARTS]
        assert reads == 2 * 8 + (3 * 8 + 40) / 2  # two batches were tried


# ---- threads ----


def takes_batches_in_threads(rank: int, world_size: int) -> Any:
    told, found = list[str](), list[Any]()
    loader = DataLoader(Rows(), 4)

    def take(batches: Any, into: list[Any]) -> None:
        try:
            into.extend(plain(batch) for batch in batches)
        except UnsupportedLoaderError as error:
            into.append(str(error))

    def in_thread(batches: Any) -> list[Any]:
        into = list[Any]()
        thread = threading.Thread(target=take, args=(batches, into))
        thread.start()
        thread.join()
        return into

    with sharing(told):
        alone = [plain(batch) for batch in DataLoader(Rows(), 4, sampler=range(43))]
        found.append(in_thread(loader) == alone)  # begun there, too
        assert [plain(batch) for batch in loader] == alone
        found.append(in_thread(iter(loader))[-1])
        found.append(in_thread(iter(DataLoader(Rows(), 4))) == alone)
    return found


def test_a_thread_reads_whole_batches_by_itself() -> None:
    for began_there, begun_here, never_in_main in run_ranks(takes_batches_in_threads, 2):
        assert began_there
        assert never_in_main
        assert begun_here.startswith("Taking a batch of a loader: ")
        assert "Begin its passes in the thread that takes the batches" in begun_here
