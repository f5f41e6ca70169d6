"""Hugging Face's Trainer with ``PatchedLoadersMixin``, or with a loader patched by hand: what it trains and resumes.

On another number of processes, each sample that is left of an epoch is trained once.
"""

import json
import math
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import transformers
from messages import assert_tells, raises
from quick import run_ranks, soaked
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments
from zoo import seed_ambient

from ddp_patch import autopatch, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import RanksFailedError, StateError, UnsupportedLoaderError
from ddp_patch.integrations.transformers import PatchedLoadersMixin, _LoaderPlace
from ddp_patch.patching import PatchOptions

# By accelerate, of the number of threads; and by torch, of the CPU.
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES, BATCH, EPOCHS = 53, 2, 2
ROWS: Any = [
    {"numbers": torch.tensor([float(number)]), "labels": number, "input_ids": [0] * (1 + number % 7)}
    for number in range(SAMPLES)
]
FEW = ROWS[:26]
BY_LENGTH: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}


class Stream(IterableDataset[Any]):
    """Rows in an order of their own for each pass, without a length."""

    def __init__(self, rows: Any = ROWS) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter([self.rows[number] for number in torch.randperm(len(self.rows)).tolist()])


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.rows)


class Ordered(Stream):
    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class Model(torch.nn.Module):
    """Its outputs are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, numbers: torch.Tensor, labels: Any) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * numbers).mean(), "logits": numbers[:, None]}


def collated(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([float(row[name]) for row in rows]) for name in ("numbers", "labels")}


class Plain(Trainer):  # type: ignore[misc]  # it is not there where types are checked
    """Notes the samples of each batch that is trained: the step in which, and of which epoch."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[list[int]] = []
        self.file: Path | None = None

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        self.seen.append(inputs["labels"].int().tolist())
        if self.file is not None:
            epoch = self.callback_handler.train_dataloader.sampler.epoch
            with self.file.open("a") as file:
                print(json.dumps([self.state.global_step + 1, epoch, self.seen[-1]]), file=file)
        return super().training_step(model, inputs, *args)


class Patched(PatchedLoadersMixin, Plain):
    pass


class Alone(Patched):
    patches_one_process: ClassVar[bool] = True


class OwnLoader(Plain):
    """Makes its loaders in ways of its own, without accelerate."""

    def get_train_dataloader(self) -> Any:
        weighted = WeightedRandomSampler([1.0 + number for number in range(SAMPLES)], SAMPLES, replacement=False)
        return DataLoader(self.train_dataset, BATCH, sampler=weighted, collate_fn=self.data_collator)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return DataLoader(eval_dataset, 4, collate_fn=self.data_collator)

    get_test_dataloader = get_eval_dataloader


class Weighted(PatchedLoadersMixin, OwnLoader):
    patch_options: ClassVar[PatchOptions] = {"timeout": 60.0}


class ByHand(Plain):
    def get_train_dataloader(self) -> Any:
        shuffle = not isinstance(self.train_dataset, IterableDataset)
        # The same seed for every Trainer that a script makes, as a script that is started again has it.
        loader = DataLoader(self.train_dataset, 3, shuffle=shuffle, collate_fn=self.data_collator)
        return patch_dataloader_to_ddp(loader, seed=0)


class Sequences(PatchedLoadersMixin, Seq2SeqTrainer):  # type: ignore[misc]  # as above
    pass


def trainer_of(kind: Any, rows: Any, folder: Path | str, *callbacks: Any, **options: Any) -> Any:
    of_sequences: Any = Seq2SeqTrainingArguments if kind is Sequences else TrainingArguments
    always = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False}
    given = {"args": of_sequences(str(folder), **always, **options), "data_collator": collated}
    metrics: Any = lambda of: {"sum": of.predictions.sum()}  # noqa: E731 - an argument
    return kind(model=Model(), train_dataset=rows, callbacks=[*callbacks], compute_metrics=metrics, **given)


def trained(
    kind: type[Any], rows: Any, folder: Path, resume_from: int | None = None, *callbacks: Any, **options: Any
) -> Any:
    """Return a Trainer that has trained, with a checkpoint after each step, or from one of these."""
    saves = {"save_strategy": "steps" if resume_from is None else "no", "save_steps": 1, "logging_strategy": "no"}
    chosen = {"num_train_epochs": 1, "per_device_train_batch_size": 3, **options}
    trainer = trainer_of(kind, rows, folder, *callbacks, **saves, **chosen)
    trainer.train(resume_from_checkpoint=resume_from and str(folder / f"checkpoint-{resume_from}"))
    if resume_from is None and dist.is_initialized():
        dist.barrier()  # the first rank has written the checkpoints
    return trainer


# Each sample that is left, on other ranks.


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


class Drops(Model):
    """Draws random numbers, as dropout does, when it trains."""

    def forward(self, numbers: torch.Tensor, labels: Any) -> dict[str, torch.Tensor]:
        return super().forward(numbers * torch.rand(()) if self.training else numbers, labels)


class Evaluating(Alone):
    """Notes where it evaluates, and may be killed there."""

    def evaluate(self, *args: Any, **options: Any) -> Any:
        if self.state.global_step == self.dies_at:
            raise Stopped
        self.evaluated = [*getattr(self, "evaluated", []), (self.state.global_step, self.state.epoch)]
        return super().evaluate(*args, **options)


@pytest.mark.parametrize("rows", [FEW, Stream(FEW)], ids=["rows", "stream"])
@pytest.mark.parametrize("killed_at", [9, 18])
def test_killed_while_it_evaluates_it_evaluates_and_goes_on(tmp_path: Path, rows: Any, killed_at: int) -> None:
    """After an epoch's last step, and the checkpoint of that. One that was taken later does not evaluate again."""

    def train(resume_from: int | None = None, dies_at: int | None = None, **options: Any) -> Any:
        seed_ambient(3)
        how = {"eval_strategy": "epoch", "logging_strategy": "no", "per_device_train_batch_size": 3, **options}
        how |= {"num_train_epochs": 2} if rows is FEW else {"max_steps": 18}
        given: Any = {"args": TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, **how)}
        given["args"].remove_unused_columns = False
        trainer = Evaluating(Drops(), train_dataset=rows, eval_dataset=FEW, data_collator=collated, **given)
        trainer.dies_at = dies_at
        try:
            trainer.train(resume_from_checkpoint=resume_from and str(tmp_path / f"checkpoint-{resume_from}"))
        except Stopped:
            assert dies_at
        return trainer

    train(dies_at=killed_at, save_strategy="steps", save_steps=1)
    whole = train(save_strategy="no")
    resumed = train(killed_at, save_strategy="no")
    steps = [step for step, _ in resumed.evaluated]
    assert steps == [step for step, _ in whole.evaluated if step >= killed_at]
    if rows is FEW:
        assert resumed.evaluated == whole.evaluated[-len(steps) :]
    assert resumed.seen == whole.seen[killed_at:]
    assert torch.equal(resumed.model.weight, whole.model.weight)
    train(save_strategy="epoch")
    if killed_at == 9 and rows is FEW:
        assert train(killed_at, save_strategy="no").evaluated == whole.evaluated[1:]


BY_SIGNAL, IGNORING, ALONE, OTHERS = "killed", "with ignore_data_skip", "from one process", "other batches before"
WEIGHTED = "own loader"
# What is trained, and the step after which the checkpoint is taken: of 9 batches an epoch on 3 ranks.
CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "epochs": (ROWS, {}, 4),
    "next epoch": (ROWS, {"gradient_accumulation_steps": 2}, 6),
    "steps": (ROWS, {"max_steps": 30, "gradient_accumulation_steps": 2}, 3),
    "by length": (ROWS, {**BY_LENGTH, "gradient_accumulation_steps": 3}, 2),
    "stream": (Stream(), {"max_steps": 30}, 4),
    WEIGHTED: (ROWS, {}, 4),
    IGNORING: (ROWS, {}, 4),
    ALONE: (ROWS, {"gradient_accumulation_steps": 4}, 5),
    OTHERS: (ROWS, {"gradient_accumulation_steps": 2}, 2),
    BY_SIGNAL: (ROWS, {"gradient_accumulation_steps": 2}, 2),
}
SOAKED = ("steps", IGNORING, OTHERS)  # tried by the session soak alone, on 2 ranks


def run_of(name: str, folder: Path, run: str, resume: int | None, stop: int | None = None, **options: Any) -> Any:
    """Train a case, or resume it from a checkpoint, and return what was logged; None if it was stopped."""
    rows, chosen, _ = CASES[name]
    always = {"logging_steps": 1, "save_strategy": "no", "num_train_epochs": EPOCHS}
    callbacks = [] if stop is None else [StopAfter(stop, name == BY_SIGNAL)]
    kind: Any = {ALONE: Alone, WEIGHTED: Weighted}.get(name, Patched)
    chosen = {**always, "per_device_train_batch_size": BATCH, **chosen, **options}
    trainer = trainer_of(kind, rows, folder / name, *callbacks, **chosen)
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
            run_of(name, Path(shared), "first", None, step + 1, **before)


def again(rank: int, world_size: int, shared: str, names: Sequence[str]) -> dict[str, Any]:
    """Resume all cases, and return the states at their ends."""
    states = {}
    for name in names:
        *_, step = CASES[name]
        seed_ambient(200 + rank)
        states[name] = run_of(name, Path(shared), "again", step, ignore_data_skip=name == IGNORING)
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
    again = of_epoch(taken, epoch).keys() & of_epoch(before, epoch).keys()
    assert len(again) <= -left % ranks, name  # padding repeats the epoch's first samples
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
def test_each_sample_that_was_left_is_trained_once(ranks: int, tmp_path: Path) -> None:
    names = [name for name in CASES if ranks == 2 or name not in SOAKED]
    with pytest.raises(RanksFailedError, match="SIGKILL"):
        run_ranks(first, 3, str(tmp_path), names, timeout=240, grace=20)
    run_of(ALONE, tmp_path, "first", None, CASES[ALONE][2] + 1)
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
            check_end(name, before, 1, "one", run_of(name, tmp_path, "one", step), tmp_path)


# On the same ranks, of 26 rows: five steps an epoch.


class Restoring(TrainerCallback):  # type: ignore[misc]  # as above
    """Keeps where the loader stands after the seventh step, or lets it go on there."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def on_train_begin(self, *positional: Any, train_dataloader: Any, **options: Any) -> None:
        if self.state is not None:
            restore_loader(train_dataloader, self.state)

    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any, **options: Any) -> None:
        if state.global_step == 7 and self.state is None:
            self.state = loader_state(train_dataloader)
            assert self.state == loader_state(train_dataloader, batches_done=2)


def on_two_ranks(rank: int, world_size: int, shared: str) -> Any:
    """What is refused; what a mesh of ranks that share a model trains on; what the Trainer shares, and evaluates."""
    seed_ambient(100 + rank)
    told: list[Any] = []
    others: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (Plain, {}, {}),
        (Patched, BY_LENGTH, {**BY_LENGTH, "gradient_accumulation_steps": 2}),
    ]
    for kind, before, now in others:
        folder = Path(shared, kind.__name__)
        trained(kind, FEW, folder, **before)
        with pytest.raises(StateError) as caught:
            trained(Patched, FEW, folder, 2, num_train_epochs=2, **now)
        told.append(str(caught.value))
        anew = trained(Patched, FEW, folder, 2, ignore_data_skip=True)  # the remedy that both name
        told.append(len(anew.seen))
    with autopatch() as summary:
        trainer = trained(Patched, FEW, Path(shared, "two"))
    assert not any(record.fate == "patched" for record in summary.records)
    trainer.accelerator.state.device_mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp_shard", "tp"))
    of_mesh = [int(row) for batch in trainer.get_train_dataloader() for row in batch["labels"]]
    left = trained(Patched, FEW, Path(shared, "left"), train_sampling_strategy="batch_rebalance")
    return told, of_mesh, left.seen, {name: evaluated(*case, shared) for name, case in EVALUATED.items()}


# What is evaluated, of 23 rows in batches of 4: steps in which one rank has a batch of three and the other none.
EVALUATED: dict[str, tuple[type[Any], Any]] = {
    "rows": (Patched, ROWS[:23]),
    "stream": (Patched, Ordered(ROWS[:23])),
    "own loader": (Weighted, ROWS[:23]),
    "one row": (Patched, ROWS[:1]),
    "sequences": (Sequences, ROWS[:23]),
}


def evaluated(kind: type[Any], data: Any, folder: str) -> tuple[list[float], float, float]:
    trainer = trainer_of(kind, None, folder, per_device_eval_batch_size=4)
    metrics = trainer.evaluate(data)
    return trainer.predict(data).predictions[:, 0].tolist(), metrics["eval_sum"], metrics["eval_loss"]


def test_what_tells_no_place_is_refused_and_what_the_trainer_shares_rightly_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = run_ranks(on_two_ranks, 2, str(tmp_path))
    for (no_place, once, other_order, again), of_mesh, _, found in ranks:
        assert_tells(no_place, ("step 2", "PatchedLoadersMixin", "patches_one_process"), "ignore_data_skip=True")
        assert_tells(other_order, ("3", "6"), ("gradient_accumulation_steps", "ignore_data_skip=True"))
        assert once == again == 3
        assert sorted(of_mesh) == list(range(26))
        assert of_mesh == ranks[0][1]
        for name, (rows, total, loss) in found.items():
            assert rows == list(range(1 if name == "one row" else 23)), name
            assert (total, loss) == (sum(rows), sum(rows) / len(rows)), name
    assert sorted(chain.from_iterable(chain.from_iterable(left for _, _, left, _ in ranks))) == list(range(26))
    with raises(StateError, ("step 2", "not patched"), "ignore_data_skip=True"):
        trained(Patched, FEW, tmp_path / "two", 2, train_sampling_strategy="batch_rebalance")
    monkeypatch.setattr("ddp_patch.integrations.transformers.TRAINER_RUNS_EPOCH", "_of_another_version")
    with raises(StateError, ("step 2", "9", transformers.__version__), "transformers 5.22"):
        trained(Patched, FEW, tmp_path / "two", 2)


def by_hand(rank: int, world_size: int, shared: str) -> list[list[bool]]:
    """Whether a loader that was patched by hand goes on: in an epoch, between two, and in one by its state."""
    found = []
    for rows in (FEW, Sized(FEW)):
        seed_ambient(100 + rank)
        folder, noting = Path(shared, type(rows).__name__), Restoring()
        whole = trained(ByHand, rows, folder, None, noting, num_train_epochs=3).seen
        resumed = []
        for step, callbacks in ((7, []), (5, []), (7, [Restoring(noting.state)])):
            seed_ambient(200 + rank)
            how: dict[str, Any] = {"num_train_epochs": 3, "ignore_data_skip": bool(callbacks)}
            try:
                rest = trained(ByHand, rows, folder, step, *callbacks, **how).seen
            except UnsupportedLoaderError:
                rest = []
            resumed.append(rest == whole[step:])
        found.append(resumed)
    return found


def test_a_loader_that_was_patched_by_hand_resumes_by_epoch_and_step(tmp_path: Path) -> None:
    """To skip batches of an iterable dataset, accelerate makes a loader anew; that is refused, and a state does it."""
    assert run_ranks(by_hand, 2, str(tmp_path)) == [[[True] * 3, [False, True, True]]] * 2


# In one process.


def test_one_process_trains_as_without_it_and_refuses_other_batches(tmp_path: Path) -> None:
    both = []
    for kind in (Plain, Patched):
        seed_ambient(3)
        both.append(trained(kind, Sized(FEW), tmp_path / kind.__name__).seen)
    assert both[0] == both[1]
    assert len(both[0]) == 9
    assert trained(Patched, Sized(FEW), tmp_path / "Patched", 4).seen == both[0][4:]
    trained(Patched, FEW, tmp_path)
    for step in (4, 9):  # in the epoch, and after it
        with raises(StateError, (f"step {step}", "[9, 1]", "[5, 1]"), "ignore_data_skip=True"):
            trained(Patched, FEW, tmp_path, step, num_train_epochs=2, per_device_train_batch_size=6)


class Counting(Sampler[int]):
    """Has a state that JSON changes."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(ROWS)))

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["state"]


@pytest.mark.parametrize("state", [{0: 1}, (1, 2), {"0": [1]}])
def test_a_place_is_kept_by_json_whatever_a_samplers_state_holds(state: Any) -> None:
    def made(state: Any) -> Any:
        return patch_dataloader_to_ddp(DataLoader(ROWS, sampler=Counting(state)), rank=0, num_replicas=2, seed=0)

    kept, restored = _LoaderPlace(), made(None)
    kept.loader = made(state)
    restore_loader(restored, json.loads(json.dumps(kept.state()))["attributes"]["place"])
    assert restored.sampler.sampler.state == state
