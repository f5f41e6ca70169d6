"""Batches that several ranks read by parts, as one process: each is that of one process, and no rank reads all."""

import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from quick import run_ranks, soaked
from torch.utils.data import DataLoader, Dataset

from ddp_patch import autopatch, leave_alone
from ddp_patch.running import reading

WAIT_S = 0.02  # for each sample


class Slow(Dataset[Any]):
    """Reads samples of several kinds, of which one may fail, or draw random numbers."""

    def __init__(self, does: str = "", wait: float = WAIT_S) -> None:
        self.does, self.wait = does, wait
        self.seen: list[int] = []
        self.layer = torch.nn.Linear(2, 1)

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.wait)
        if self.does == "notes":
            self.seen.append(index)
        if self.does == "draws" or (self.does == "draws later" and index > 60):
            random.random()
        if self.does == "asks":
            np.random.default_rng().random()
        if self.does == "calls":
            self.layer(torch.ones(1, 2))
        if self.does == "fails" and index == 70:
            raise LookupError("of a sample")
        row = torch.arange(float(index % 5))
        return {
            "row": row,
            "name": f"sample {index}",
            "array": np.full(2, index),
            "is": (index > 3, torch.tensor(True)),
        }


def padded(samples: list[Any]) -> Any:
    rows = torch.nn.utils.rnn.pad_sequence([each["row"] for each in samples], batch_first=True)
    rest = [(each["name"], each["array"].tolist(), each["is"][0], bool(each["is"][1])) for each in samples]
    return rows.tolist(), rest


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


class Ahead(DataLoader[Any]):
    """Reads in a thread, as loaders do that copy to a GPU meanwhile."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        with ThreadPoolExecutor(1) as pool:
            while (batch := pool.submit(next, batches, None).result()) is not None:
                yield batch


READ: dict[str, tuple[Slow, dict[str, Any], str]] = {
    # What is read: of which dataset, how, and what is told.
    "by this process": (Slow(), {}, "read by parts"),
    "by workers": (Slow(), {"num_workers": 2}, "read by parts"),
    "by workers that persist": (Slow(), {"num_workers": 2, "persistent_workers": True}, "read by parts"),
    "of which one sample fails": (Slow("fails"), {}, "read by parts"),
    "of which one sample fails in a worker": (Slow("fails"), {"num_workers": 1}, "read by parts"),
    "with random transforms": (Slow("draws"), {}, "reading draws random numbers"),
    "with random transforms of some samples": (Slow("draws later"), {"shuffle": False}, "read by parts"),
    "with generators that nobody has seeded": (Slow("asks"), {}, "read by parts"),
    "and noted by the dataset": (Slow("notes"), {}, "its dataset changes when it is read"),
    "in a thread": (Slow(), {}, ""),
    "by a module": (Slow("calls"), {}, "read by parts"),
    "at once": (Slow(wait=0.0), {}, ""),
}


def passes(loader: DataLoader[Any]) -> list[Any]:
    found: list[Any] = []
    for _ in range(2):
        batches = iter(loader)
        while (batch := following(batches)) is not None:
            found.append(batch)
    return [*found, torch.rand(1).item(), random.random()]


def following(batches: Any) -> Any:
    try:
        return next(batches, None)
    except LookupError as error:
        return "of a sample" in str(error)


def seconds_said(one: Any, _: float) -> float:
    """What was measured, whatever it was: a script waits a second for a batch, and sending one takes no time."""
    return 0.0 if one._wait else 1.0


def read(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    logger = logging.getLogger("ddp_patch.autopatch")
    logger.setLevel(logging.INFO)
    for name, (dataset, options, _) in READ.items():
        torch.manual_seed(5)
        random.seed(5)
        logger.addHandler(told := Told())
        dataset.wait, least = 0.0, 1e9 if name == "at once" else 0.0
        measured = patch.object(reading.Reading, "_mean", seconds_said)
        with patch.object(reading, "_LEAST_S", least), measured, autopatch(as_one_process=True):
            kind = Ahead if name == "in a thread" else DataLoader
            loader = kind(dataset, batch_size=7, collate_fn=padded, **{"shuffle": True, **options})
            found[name] = passes(loader), told.text, len(dataset.seen)
        logger.removeHandler(told)
    return found


@pytest.mark.parametrize("world_size", [2, soaked(3)])
def test_batches_that_are_read_by_parts_are_those_of_one_process(world_size: int) -> None:
    (alone,), ranks = run_ranks(read, 1), run_ranks(read, world_size)
    for name, (_, _, words) in READ.items():
        for of_rank in ranks:
            assert of_rank[name][0] == alone[name][0], name
            assert of_rank[name][2] == alone[name][2], name
        said = ranks[0][name][1]
        assert words in said if words else "batches are read" not in said, (name, said)


def left_alone(rank: int, world_size: int) -> int:
    dataset = Slow("notes")
    with autopatch(as_one_process=True):
        for _ in leave_alone(DataLoader(dataset, batch_size=9, collate_fn=padded)):
            pass
    return len(dataset.seen)


def test_a_loader_that_is_left_alone_is_whole_on_every_rank() -> None:
    assert run_ranks(left_alone, 2) == [90, 90]


class Counted(Slow):
    """Counts in an array what it reads, which changes no plain value."""

    def __init__(self) -> None:
        super().__init__()
        self.count = np.zeros(1)

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return super().__getitem__(index)


def counted(rank: int, world_size: int) -> float:
    dataset = Counted()
    with autopatch(as_one_process=True):
        for _ in DataLoader(dataset, batch_size=10, collate_fn=padded):
            pass
    return float(dataset.count[0])


def test_each_rank_reads_its_samples_once_reading_is_seen_to_take_the_time() -> None:
    # Four batches of ten are measured, the fifth is read whole and by parts, and four are divided by two.
    assert run_ranks(counted, 2) == [75.0, 75.0]
