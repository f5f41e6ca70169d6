"""Lightning's Trainer resumes within an epoch on any number of ranks: each sample of the rest once, counted as here."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks.kinds import Stream as Sized
from frameworks.lightning_trainer import Trained, every_step, quiet_trainer
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from messages import raises
from quick import soaked
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from zoo import seed_ambient

from ddp_patch.errors import StateError
from ddp_patch.integrations.lightning import PatchDataLoaders

SAMPLES = 50
NUMBERS: Any = range(SAMPLES)


class Stream(IterableDataset[int]):
    """A stream without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())


def shuffled(workers: int = 0, batch_size: int = 2) -> DataLoader[int]:
    return DataLoader(NUMBERS, batch_size, shuffle=True, num_workers=workers)


class Module(Trained):
    """Notes of each step what Lightning counts and which samples it has, and where it validates."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.epochs: list[int] = []
        self.batches: list[int] = []
        self.steps: list[int] = []
        self.logged: list[int] = []
        self.numbers: list[list[int]] = []
        self.validated: list[tuple[int, int]] = []
        self.ended: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(self.numbers) == self.fails_at:
            raise LookupError
        numbers = batch if isinstance(batch, torch.Tensor) else torch.empty(0) if batch[0] is None else batch[0]
        self.epochs.append(self.current_epoch)
        self.batches.append(batch_idx)
        self.steps.append(self.global_step)
        self.logged.append(self.trainer.fit_loop.epoch_loop._batches_that_stepped)
        self.numbers.append(numbers.tolist())
        return self.loss_of(numbers)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append((self.current_epoch, self.trainer.fit_loop.batch_idx + 1))

    def on_train_epoch_end(self) -> None:
        self.ended.append(self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.by_batch, self.by_epoch = (torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0) for _ in range(2))
        return [optimizer], [{"scheduler": self.by_batch, "interval": "step"}, self.by_epoch]

    def seen(self, epoch: int) -> list[int]:
        """The samples of an epoch's steps."""
        return list(chain.from_iterable(ns for at, ns in zip(self.epochs, self.numbers, strict=True) if at == epoch))


def make_trainer(*callbacks: Any, **options: Any) -> Trainer:
    return quiet_trainer(*callbacks, **{"max_epochs": 2, "num_sanity_val_steps": 0, **options})


def as_rank(rank: int, ranks: int, make: Callable[[], Any], *callbacks: Any, **options: Any) -> tuple[Module, Trainer]:
    """Train as one of so many ranks, in this process."""
    torch.manual_seed(100 * ranks + rank)
    module = Module(options.pop("fails_at", None))
    file, validation = options.pop("file", None), options.pop("validation", None)
    seed: Any = {} if file else {"seed": 3}
    trainer = make_trainer(PatchDataLoaders(rank=rank, num_replicas=ranks, **seed), *callbacks, **options)
    trainer.fit(module, make(), validation, ckpt_path=file)
    return module, trainer


def begun(folder: Path, make: Callable[[], Any], *saving: Any, **options: Any) -> list[Module]:
    """Train as three ranks, with a checkpoint at each step."""
    callbacks = saving or (every_step(folder),)
    return [as_rank(rank, 3, make, *(callbacks if rank == 0 else ()), **options)[0] for rank in range(3)]


def taken(modules: Sequence[Module], batches: int) -> list[int]:
    """The samples of the first so many batches of all ranks."""
    return [number for module in modules for numbers in module.numbers[:batches] for number in numbers]


def resumed(ranks: int, make: Callable[[], Any], file: Path, **options: Any) -> tuple[list[Module], Trainer]:
    """Resume as so many ranks, and return what they saw and one's Trainer."""
    found = [as_rank(rank, ranks, make, file=file, **options) for rank in range(ranks)]
    counts = [(module.epochs, module.batches, module.steps, module.validated) for module, _ in found]
    assert all(count == counts[0] for count in counts)
    return [module for module, _ in found], found[0][1]


def assert_once(before: Sequence[int], rest: Sequence[Module], epoch: int = 0) -> None:
    """Assert that each sample of the epoch came once, then the padding of the last round."""
    numbers = [*before, *chain.from_iterable(module.seen(epoch) for module in rest)]
    assert set(numbers) == set(NUMBERS)
    assert 0 <= len(numbers) - SAMPLES < len(rest)


def steps_of(samples: int, ranks: int) -> int:
    """How many steps so many samples make."""
    return -(-samples // (2 * ranks))


# Lightning warns of small data, of CPUs and of its own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")

STREAM: Any = lambda: DataLoader(Stream(), 2)  # noqa: E731 - beside the others
TORCHDATA: Any = lambda: StatefulDataLoader(NUMBERS, 2)  # noqa: E731 - as above
MAKERS: dict[str, tuple[Callable[[], Any], list[tuple[int, int]]]] = {
    "samples": (shuffled, [(step, ranks) for step in (1, 4, 8) for ranks in (1, 2, 3, 4)]),
    "workers": (lambda: shuffled(workers=2), [(4, 2)]),
    "stream with a length": (lambda: DataLoader(Sized(SAMPLES), 2), [(1, 4), (4, 2)]),
    "workers of a stream": (lambda: DataLoader(Sized(SAMPLES), 2, num_workers=2), [(4, 2)]),
    "stream": (STREAM, [(1, 4), (4, 1), (4, 2), (8, 4)]),
    "torchdata": (TORCHDATA, [(4, 2), (4, 4)]),
}


@pytest.mark.parametrize(("make", "cases"), MAKERS.values(), ids=MAKERS)
def test_the_rest_of_an_epoch_comes_once(tmp_path: Path, make: Any, cases: list[tuple[int, int]]) -> None:
    """It is counted as if the ranks of now had made the whole epoch, and the next epoch is whole."""
    first = begun(tmp_path, make)
    for step, ranks in cases:
        rest, trainer = resumed(ranks, make, tmp_path / f"step={step}.ckpt")
        assert_once(taken(first, step), rest)
        assert_once([], rest, epoch=1)
        module = rest[0]
        left, whole = steps_of(SAMPLES - 6 * step, ranks), steps_of(SAMPLES, ranks)
        assert module.steps == module.logged == list(range(step, step + left + whole))
        begins = 6 * step // (2 * ranks) if make in (STREAM, TORCHDATA) else whole - left
        assert module.batches == [*range(begins, begins + left), *range(whole)]
        assert module.ended == [0, 1]
        assert trainer.global_step == module.by_batch.last_epoch == step + left + whole
        assert module.by_epoch.last_epoch == 2


@pytest.mark.parametrize("make", [shuffled, soaked(lambda: shuffled(workers=2)), STREAM])
def test_after_the_last_batch_comes_the_next_epoch(tmp_path: Path, make: Any) -> None:
    begun(tmp_path, make)
    rest, trainer = resumed(4, make, tmp_path / "step=9.ckpt")
    assert set(rest[0].epochs) == {1}
    assert rest[0].batches == list(range(steps_of(SAMPLES, 4)))
    assert_once([], rest, epoch=1)
    assert trainer.global_step == 9 + steps_of(SAMPLES, 4)


class Killed(Module):
    """Is killed while it validates the first epoch."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.current_epoch == 0:
            raise LookupError


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (shuffled, {}),
        (shuffled, {"check_val_every_n_epoch": 2}),  # nothing to validate, and an end of the epoch all the same
        soaked(lambda: shuffled(workers=2), {}),
        (STREAM, {}),
        (lambda: DataLoader(Sized(SAMPLES), 2), {}),
        (shuffled, {"limit_train_batches": 6}),
        (lambda: CombinedLoader([shuffled(), DataLoader(range(50), 2)], "min_size"), {}),  # type: ignore[arg-type]
    ],
)
def test_killed_while_it_validates_it_validates_and_goes_on(tmp_path: Path, make: Any, options: Any) -> None:
    validation: Any = DataLoader(range(2))  # type: ignore[arg-type]  # a range is a dataset

    def fit(kind: type[Module], *callbacks: Any, **how: Any) -> Module:
        seed_ambient(3)
        module = kind()
        make_trainer(PatchDataLoaders(seed=3), *callbacks, **options).fit(module, make(), validation, **how)
        return module

    whole = fit(Module)
    validates = (0, whole.epochs.count(0)) in whole.validated
    with pytest.raises(LookupError) if validates else nullcontext():
        fit(Killed, every_step(tmp_path))
    steps = whole.epochs.count(0)
    resumed = fit(Module, ckpt_path=tmp_path / f"step={steps}.ckpt")
    assert (resumed.validated, resumed.ended) == (whole.validated, [0, 1])
    assert validates == ("check_val_every_n_epoch" not in options)
    for name in ("epochs", "batches", "steps", "logged", "numbers"):
        assert getattr(resumed, name) == getattr(whole, name)[steps:]
    assert resumed.by_epoch.last_epoch == whole.by_epoch.last_epoch == 2
    torch.testing.assert_close(list(resumed.parameters()), list(whole.parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("workers", [0, soaked(2)])
def test_limit_train_batches_is_of_the_ranks_of_now(tmp_path: Path, workers: int) -> None:
    """Where these have done as many, the next epoch follows; so it does after the last batch of the limit."""
    make = lambda: shuffled(workers)  # noqa: E731 - as above
    first = begun(tmp_path, make, limit_train_batches=6)
    for ranks, step, batches in ((4, 4, [3, 4, 5]), (2, 4, []), (2, 6, []), (3, 6, [])):
        rest, trainer = resumed(ranks, make, tmp_path / f"step={step}.ckpt", limit_train_batches=6)
        assert rest[0].batches == [*batches, *range(6)]
        assert trainer.global_step == step + len(batches) + 6
        numbers = taken(first, step) + [number for module in rest for number in module.seen(0)]
        assert len(set(numbers)) == len(numbers) == 6 * step + 2 * ranks * len(batches)
        assert len({number for module in rest for number in module.seen(1)}) == 12 * ranks
        assert rest[0].by_epoch.last_epoch == 2
    if workers == 0:  # the fraction is of what the epoch has
        rest, _ = resumed(1, make, tmp_path / "step=4.ckpt", limit_train_batches=0.6)
        assert rest[0].batches == [12, 13, 14, *range(15)]


def test_lightning_s_options_follow_the_new_count(tmp_path: Path) -> None:
    validation: Any = DataLoader(range(2))  # type: ignore[arg-type]  # a range is a dataset
    begun(tmp_path, shuffled)
    file = tmp_path / "step=4.ckpt"
    for ranks, options, points in (
        (1, {"val_check_interval": 0.5}, [24]),  # 13 of 25 are left, and 12 were half of them
        (2, {"val_check_interval": 0.5}, [12]),
        (4, {"val_check_interval": 0.5}, [6]),
        (1, {"val_check_interval": 5}, [15, 20, 25]),
        (2, {"val_check_interval": 5}, [10]),
        (2, {"val_check_interval": 5, "check_val_every_n_epoch": None}, [7, 12]),  # the 5th and 10th that were made
    ):
        rest, _ = resumed(ranks, shuffled, file, validation=validation, max_epochs=1, **options)
        assert rest[0].validated == [(0, batch) for batch in points]
    rest, trainer = resumed(4, shuffled, file, max_epochs=-1, max_steps=6)
    assert (rest[0].batches, trainer.global_step) == ([3, 4], 6)
    rest, trainer = resumed(
        1, shuffled, file, max_epochs=1, accumulate_grad_batches=3
    )  # steps end with 15, 18, 21, ...
    assert rest[0].steps == rest[0].logged == [4, 4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 7, 8]
    assert trainer.global_step == 9
    rest, trainer = resumed(2, shuffled, file, max_epochs=1, accumulate_grad_batches=4)  # with 8, 12, and the last
    assert rest[0].steps == [4, 4, 5, 5, 5, 5, 6]


def test_what_was_fetched_and_not_finished_comes_again(tmp_path: Path) -> None:
    """By Lightning's callbacks that save on an exception, here in the fifth batch and in an epoch's last one."""
    for case, (make, fails_at, ranks) in enumerate(
        [(shuffled, 4, 4), (STREAM, 4, 2), (shuffled, 8, 2), (STREAM, 8, 2)]
    ):
        folder = tmp_path / f"{case}"
        on_exception = ModelCheckpoint(folder, "{step}", every_n_train_steps=100, save_on_exception=True)
        with pytest.raises(LookupError):
            as_rank(0, 3, make, OnExceptionCheckpoint(folder), on_exception, fails_at=fails_at)
        first = begun(folder / "whole", make)
        for file in (folder / "on_exception.ckpt", folder / f"step={fails_at}.ckpt"):
            rest, _ = resumed(ranks, make, file)
            assert_once(taken(first, fails_at), rest)
            assert rest[0].steps[0] == fails_at


def test_a_nest_of_loaders_resumes_on_as_many_ranks(tmp_path: Path) -> None:
    make = lambda: CombinedLoader([shuffled(), DataLoader(range(56), 2)], "min_size")  # type: ignore[arg-type]  # noqa: E731 - as above
    as_rank(0, 3, make, every_step(tmp_path))
    with raises(StateError, ("5 batches", "9", "7", "several training loaders"), "at the end of an epoch"):
        as_rank(0, 4, make, file=tmp_path / "step=5.ckpt")


def test_another_batch_size_resumes_too(tmp_path: Path) -> None:
    first = begun(tmp_path, shuffled)
    rest, _ = resumed(3, lambda: shuffled(batch_size=5), tmp_path / "step=4.ckpt")
    assert_once(taken(first, 4), rest)
    assert rest[0].batches == [2, 3, 0, 1, 2, 3]


def test_twice_in_one_epoch_and_by_what_one_process_saved(tmp_path: Path) -> None:
    """One process needs no more than the callback: its training loaders are patched for one rank."""
    seed_ambient(3)
    alone = Module()
    make_trainer(PatchDataLoaders(), every_step(tmp_path / "1")).fit(alone, shuffled())
    second = [
        as_rank(rank, 2, shuffled, *([every_step(tmp_path / "2")] * (rank == 0)), file=tmp_path / "1" / "step=6.ckpt")[
            0
        ]
        for rank in range(2)
    ]
    third, _ = resumed(4, shuffled, tmp_path / "2" / "step=11.ckpt")
    assert_once(taken([alone], 6) + taken(second, 5), third)
    last = Module()
    make_trainer(PatchDataLoaders()).fit(last, shuffled(), ckpt_path=tmp_path / "2" / "step=11.ckpt")
    assert sorted(taken([alone], 6) + taken(second, 5) + last.seen(0)) == list(NUMBERS)
