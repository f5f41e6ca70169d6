"""Hugging Face's Trainer resumes within an epoch on another number of processes: each sample left is trained once."""

import json
import math
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from quick import run_ranks, soaked
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from zoo import seed_ambient

from ddp_patch.errors import RanksFailedError
from ddp_patch.integrations.transformers import PatchedLoadersMixin
from ddp_patch.patching import PatchOptions

SAMPLES, BATCH, EPOCHS = 53, 2, 2
ROWS: Any = [
    {"numbers": torch.ones(1), "labels": number, "input_ids": [0] * (1 + number % 7)} for number in range(SAMPLES)
]


class Stream(IterableDataset[Any]):
    """The rows in an order of their own for each pass, without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([ROWS[number] for number in torch.randperm(SAMPLES).tolist()])


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, numbers: torch.Tensor, labels: Any) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * numbers).mean(), "logits": numbers}


def collated(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([float(row[name]) for row in rows]) for name in ("numbers", "labels")}


class Telling(Trainer):  # type: ignore[misc]  # it is not there where types are checked
    """Writes down each batch when it is trained: the step in which, of which epoch, and its samples."""

    file: Path

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        epoch = self.callback_handler.train_dataloader.sampler.epoch
        with self.file.open("a") as file:
            print(json.dumps([self.state.global_step + 1, epoch, inputs["labels"].int().tolist()]), file=file)
        return super().training_step(model, inputs, *args)


class Told(PatchedLoadersMixin, Telling):
    pass


class Alone(Told):
    patches_one_process: ClassVar[bool] = True


class OwnLoader(Telling):
    """Makes its loader in a way of its own, without accelerate."""

    def get_train_dataloader(self) -> Any:
        weighted = WeightedRandomSampler([1.0 + number for number in range(SAMPLES)], SAMPLES, replacement=False)
        return DataLoader(self.train_dataset, BATCH, sampler=weighted, collate_fn=self.data_collator)


class Weighted(PatchedLoadersMixin, OwnLoader):
    patch_options: ClassVar[PatchOptions] = {"timeout": 60.0}


class Stopped(BaseException):
    """Ends a training as a signal would."""


class StopAfter(TrainerCallback):  # type: ignore[misc]  # as above
    def __init__(self, step: int, by_signal: bool) -> None:
        self.step, self.by_signal = step, by_signal

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Take a checkpoint after the step before."""
        control.should_save = state.global_step == self.step - 1
        if state.global_step == self.step:
            if self.by_signal:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Stopped


BY_SIGNAL, IGNORING, ALONE, OTHERS = "killed", "with ignore_data_skip", "from one process", "other batches before"
WEIGHTED = "own loader"
# What is trained, and the step after which the checkpoint is taken: of 9 batches an epoch on 3 ranks.
CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "epochs": (ROWS, {}, 4),
    "first step": (ROWS, {"gradient_accumulation_steps": 2}, 1),
    "last step": (ROWS, {}, 9),
    "next epoch": (ROWS, {"gradient_accumulation_steps": 2}, 6),
    "steps": (ROWS, {"max_steps": 30, "gradient_accumulation_steps": 2}, 3),
    "by length": (ROWS, {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 3}, 2),
    "stream": (Stream(), {"max_steps": 30}, 4),
    WEIGHTED: (ROWS, {}, 4),
    IGNORING: (ROWS, {}, 4),
    ALONE: (ROWS, {"gradient_accumulation_steps": 4}, 5),
    OTHERS: (ROWS, {"gradient_accumulation_steps": 2}, 2),
    BY_SIGNAL: (ROWS, {"gradient_accumulation_steps": 2}, 2),
}


# On 4 ranks; the session soak tries all, on 2.
SOONER = ["epochs", "next epoch", "by length", "stream", WEIGHTED, ALONE, BY_SIGNAL]


def trained(name: str, folder: Path, run: str, resume: int | None, stop: int | None = None, **options: Any) -> Any:
    """Train a case, or resume it from a checkpoint, and return what was logged; None if it was stopped."""
    rows, chosen, _ = CASES[name]
    arguments = TrainingArguments(
        str(folder / name),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{
            "logging_steps": 1,
            "save_strategy": "no",
            "num_train_epochs": EPOCHS,
            "per_device_train_batch_size": BATCH,
            "remove_unused_columns": False,
            **chosen,
            **options,
        },
    )
    callbacks = [] if stop is None else [StopAfter(stop, name == BY_SIGNAL)]
    kind: Any = {ALONE: Alone, WEIGHTED: Weighted}.get(name, Told)
    trainer = kind(model=Model(), args=arguments, train_dataset=rows, data_collator=collated, callbacks=callbacks)
    trainer.file = folder / f"{name}.{run}.{trainer.args.process_index}"
    trainer.file.touch()
    try:
        trainer.train(resume_from_checkpoint=resume and str(folder / name / f"checkpoint-{resume}"))
    except Stopped:
        return None
    finally:
        if dist.is_initialized():
            dist.barrier()  # the first rank has written the checkpoints
    return trainer.state


def first(rank: int, world_size: int, shared: str, names: Sequence[str]) -> None:
    """Train until one step after the checkpoint; the last time, until a signal."""
    for name in names:
        if name != ALONE:
            *_, step = CASES[name]
            seed_ambient(100 + rank)
            before = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 3} if name == OTHERS else {}
            trained(name, Path(shared), "first", None, step + 1, **before)


def again(rank: int, world_size: int, shared: str, names: Sequence[str]) -> dict[str, Any]:
    """Resume all cases, and return the states at their ends; also until after another checkpoint in that epoch."""
    states = {}
    for name in names:
        *_, step = CASES[name]
        seed_ambient(200 + rank)
        states[name] = trained(name, Path(shared), "again", step, ignore_data_skip=name == IGNORING)
        if name not in (IGNORING, BY_SIGNAL):
            trained(name, Path(shared), "twice", step, step + 2)
    return states


def lines_of(folder: Path, name: str, run: str, ranks: int) -> list[tuple[int, int, list[int]]]:
    lines = [line for rank in range(ranks) for line in (folder / f"{name}.{run}.{rank}").read_text().splitlines()]
    return [tuple(json.loads(line)) for line in lines]


def seen(folder: Path, name: str, run: str, ranks: int, until: float = math.inf) -> Counter[tuple[int, int]]:
    """Count the epochs' samples that a run trained up to a step."""
    told = lines_of(folder, name, run, ranks)
    return Counter((epoch, sample) for step, epoch, samples in told for sample in samples if step <= until)


def of_epoch(taken: Counter[tuple[int, int]], epoch: int) -> Counter[int]:
    return Counter({sample: count for (of, sample), count in taken.items() if of == epoch})


def steps_of(samples: int, ranks: int, of_step: int) -> int:
    return math.ceil(math.ceil(math.ceil(samples / ranks) / BATCH) / of_step)


def check_end(name: str, before: Counter[tuple[int, int]], ranks: int, run: str, state: Any, folder: Path) -> None:
    """Check samples, steps, epochs and learning rates of a training that was resumed after some samples."""
    _, options, _ = CASES[name]
    epoch = max(of for of, _ in before)
    done = state.global_step - len({step for step, _, _ in lines_of(folder, name, run, ranks)})
    left = SAMPLES - len(of_epoch(before, epoch))
    of_step, max_steps = options.get("gradient_accumulation_steps", 1), options.get("max_steps")
    taken = seen(folder, name, run, ranks)
    assert of_epoch(taken, epoch).keys().isdisjoint(of_epoch(before, epoch)), name
    assert of_epoch(taken, epoch).total() == left + -left % ranks, name
    for of in range(max(of for of, _ in taken)):  # the last one may end at max_steps
        assert len(of_epoch(before + taken, of)) == SAMPLES, (name, of)
    if max_steps is None:
        later = [SAMPLES] * (EPOCHS - 1 - epoch)
        max_steps = done + sum(steps_of(samples, ranks, of_step) for samples in (left, *later))
        assert state.epoch == EPOCHS, name
        assert len(before + taken) == EPOCHS * SAMPLES, name
    assert state.global_step == state.max_steps == max_steps, name
    rates = {entry["step"]: entry["learning_rate"] for entry in state.log_history if "learning_rate" in entry}
    assert list(rates) == list(range(1, max_steps + 1)), name  # those of before the checkpoint, too
    for step in range(done + 2, max_steps + 1):
        assert rates[step] == pytest.approx(5e-5 * (1 - (step - 1) / max_steps)), (name, step)
    if name != "stream":
        epochs = [entry["epoch"] for entry in state.log_history if entry["step"] > done]
        assert epochs == sorted(epochs), name


@pytest.mark.parametrize("ranks", [4, soaked(2)])
@pytest.mark.filterwarnings("ignore")  # by accelerate, of the number of threads; and by torch, of the CPU
def test_each_sample_that_was_left_is_trained_once(ranks: int, tmp_path: Path) -> None:
    names = [name for name in CASES if ranks == 2 or name in SOONER]
    with pytest.raises(RanksFailedError, match="SIGKILL"):
        run_ranks(first, 3, str(tmp_path), names, timeout=240, grace=20)
    trained(ALONE, tmp_path, "first", None, CASES[ALONE][2] + 1)
    states = run_ranks(again, ranks, str(tmp_path), names)[0]
    for name in names:
        *_, step = CASES[name]
        before = seen(tmp_path, name, "first", 1 if name == ALONE else 3, step)
        if name == IGNORING:
            anew = seen(tmp_path, name, "again", ranks)
            assert of_epoch(anew, 0).keys() == set(range(SAMPLES))
            assert states[name].global_step == states["epochs"].global_step  # as the Trainer counts by itself
            continue
        check_end(name, before, ranks, "again", states[name], tmp_path)
        if name == BY_SIGNAL:
            lost = seen(tmp_path, name, "first", 3) - before
            assert lost.total() == 3 * BATCH * 2  # a step of two batches, whose samples come again
            assert lost.keys() <= seen(tmp_path, name, "again", ranks).keys()
        else:
            seed_ambient(7)
            state = trained(name, tmp_path, "one", step + 1)
            check_end(name, before + seen(tmp_path, name, "twice", ranks, step + 1), 1, "one", state, tmp_path)
