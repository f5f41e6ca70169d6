"""A base class by which Hugging Face's Trainer trains on a patched loader, and resumes mid-epoch."""

import math
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch
import transformers
from accelerate import skip_first_batches
from accelerate.utils import recursively_apply
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import get_last_checkpoint, has_length

from ddp_patch.compat.private_packages import (
    TRAINER_BEGINS,
    TRAINER_RESTORES_RNG,
    TRAINER_RUNS_EPOCH,
    TRAINER_SHARES_ITSELF,
    TRAINER_SKIPS,
    TRAINER_STATE,
)
from ddp_patch.errors import StateError
from ddp_patch.loaders.recognition import sharded_by
from ddp_patch.patching import PatchOptions, patch_dataloader_to_ddp
from ddp_patch.resume import loader_state, resume_loader, state_or_reason
from ddp_patch.sharding.sampler import EpochSampler
from ddp_patch.validation import counted
from ddp_patch.wrappers import alone, with_mesh

__all__ = ["PatchedLoadersMixin"]


class PatchedLoadersMixin:
    """A base class that patches a Trainer's training loader, and resumes mid-epoch from checkpoints.

    Name this class before ``Trainer``, or before a class that is derived from ``Trainer``. If there are several
    processes, the loader of the other class's ``get_train_dataloader`` is patched, and accelerate does not shard it
    again. Checkpoints keep the position in ``trainer_state.json``, and resume on any number of processes. accelerate
    shards the loaders of ``evaluate`` and ``predict``; rows, metrics and ``eval_loss`` are the same as in one process.

    Attributes:
        patch_options: The keywords of ``patch_dataloader_to_ddp``, for derived classes to set. Default of
            ``device_mesh``: the accelerator's mesh, if it has one.
        patches_one_process: Whether a single process patches its loader, too. Only then can several processes resume
            its checkpoints mid-epoch. The order of its epochs then differs from the Trainer's own order.

    Raises:
        DDPPatchError: From ``train``: any error of ``patch_dataloader_to_ddp``.
        StateError: From ``train``: the checkpoint has no position of this loader; or the loader's sampler groups
            samples by another batch size than before; or the Trainer's version cannot count epochs with another number
            of steps.

    Examples:
        >>> from transformers import Trainer
        >>> class MyTrainer(PatchedLoadersMixin, Trainer):
        ...     patch_options = {"uneven": "drop"}
    """

    patch_options: ClassVar[PatchOptions] = {}
    patches_one_process: ClassVar[bool] = False

    # Attributes of the Trainer.
    accelerator: Any
    args: Any
    add_callback: Any
    gather_function: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.add_callback(_LoaderPlace)
        self._saved: TrainerState | None = None  # the checkpoint's state, while training resumes from it
        self._count: _Count | None = None
        self._rows: int | None = None  # the rows of this rank's batch, in an evaluation

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the Trainer's own training loader, patched if there are several processes."""
        trainer: Any = super()
        is_alone = self.accelerator.num_processes == 1
        stays = is_alone and not self.patches_one_process and _kept_by(self._saved).get("place") is None
        if stays or TRAINER_SHARES_ITSELF.items() <= vars(self.args).items():
            loader: DataLoader[Any] = trainer.get_train_dataloader()
            return loader
        with patch.object(self.accelerator, "prepare_data_loader", lambda loader, *args, **options: loader):
            loader = trainer.get_train_dataloader()
        options: Any = with_mesh(self.patch_options, getattr(self.accelerator, "torch_device_mesh", None))
        return patch_dataloader_to_ddp(loader, **(alone(options) if is_alone else options))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Train as the Trainer does; from a checkpoint, continue with the rest of the epoch's batches."""
        trainer: Any = super()
        # A version of transformers that lacks these methods never calls their replacements.
        begin, run_epoch = (getattr(trainer, name, _skipped) for name in (TRAINER_BEGINS, TRAINER_RUNS_EPOCH))

        def begun(*values: Any, **named: Any) -> tuple[int, int]:
            counted: tuple[int, int] = begin(*values, **named)
            return counted if self._count is None else self._count.begun

        def epoch_run(*values: Any, **named: Any) -> Any:
            if self._count is not None and named["epoch"] == self._count.begun[0]:
                named["steps_in_epoch"] = self._count.batches
                if self._count.begun[1] == self._count.batches:  # the Trainer restores them only after the first step
                    getattr(self, TRAINER_RESTORES_RNG)(named["resume_from_checkpoint"])
            return run_epoch(*values, **named)

        self._saved, self._count = _saved_in(resume_from_checkpoint, self.args.output_dir), None
        try:
            with (
                patch(TRAINER_SKIPS, _skipped),
                patch.object(self, TRAINER_BEGINS, begun, create=True),
                patch.object(self, TRAINER_RUNS_EPOCH, epoch_run, create=True),
            ):
                return trainer.train(resume_from_checkpoint, *args, **options)
        finally:
            self._saved = self._count = None

    def set_initial_training_values(self, args: Any, dataloader: Any, *others: Any) -> tuple[Any, ...]:
        """Return the Trainer's numbers of epochs and steps; from a checkpoint, corrected for the rest of the epoch."""
        trainer: Any = super()
        values = list(trainer.set_initial_training_values(args, dataloader, *others))
        if self._saved is None or not self._saved.global_step:
            return tuple(values)
        steps = values[1]  # steps of an epoch
        self._count = count = _restore(self._saved, dataloader, args, steps)
        if count is None:
            return tuple(values)
        # Steps count on from the checkpoint's step, whose number is in its folder's name. ``ahead`` is that step less
        # the step after the same epochs of the present length.
        ahead = self._saved.global_step - count.step
        if (ahead or count.batches != len(dataloader)) and not hasattr(super(), TRAINER_RUNS_EPOCH):
            raise StateError(
                f"Resuming from step {self._saved.global_step}: with {counted(steps, 'step')} an epoch that is not "
                f"step {count.step} of the epochs, and the Trainer of transformers {transformers.__version__} would "
                "end its epoch elsewhere. Use transformers 5.22 or newer, or the number of processes, the batch size "
                "and the gradient_accumulation_steps of before."
            )
        if args.max_steps > 0:
            values[0] = math.ceil((args.max_steps - ahead) / steps)
        else:
            values[-1] += ahead
        return tuple(values)

    def evaluation_loop(self, dataloader: Any, *args: Any, **options: Any) -> Any:
        """Evaluate as the Trainer does; on several processes, with the rows and the loss of one process."""
        trainer: Any = super()
        if self._shares_rows():
            self.gather_function = self._gathered  # the Trainer resets it to its own function
            if sharded_by(dataloader) is None:  # get_eval_dataloader has not called accelerate
                dataloader = self.accelerator.prepare(dataloader)
        return trainer.evaluation_loop(dataloader, *args, **options)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Predict as the Trainer does, without the rows with which accelerate fills up the last batches."""
        trainer: Any = super()
        self._rows = rows = find_batch_size(inputs)
        state = self.accelerator.gradient_state
        if rows is None or not self._shares_rows() or not state.end_of_dataloader or state.remainder < 1:
            return trainer.prediction_step(model, inputs, *args, **options)
        # At least one row: the model must be called, and the outputs of padding are cut off later.
        real = min(rows, max(1, state.remainder - self.accelerator.process_index * rows))
        loss, *outputs = trainer.prediction_step(model, recursively_apply(_cut, inputs, rows, real), *args, **options)
        logits, labels = (recursively_apply(_filled, output, real, rows) for output in outputs)
        return loss, logits, labels

    def _shares_rows(self) -> bool:
        """Return whether each process evaluates different rows."""
        return self.accelerator.num_processes > 1 and getattr(self.accelerator, "torch_device_mesh", None) is None

    def _gathered(self, outputs: Any) -> Any:
        """Return all ranks' outputs, without the repeats of a loss that the Trainer adds to fill a whole batch."""
        return self.accelerator.gather_for_metrics(recursively_apply(_limited, outputs, self._rows))


def _cut(value: torch.Tensor, rows: int, real: int) -> torch.Tensor:
    return value[:real] if value.ndim and len(value) == rows else value


def _limited(value: torch.Tensor, rows: int | None) -> torch.Tensor:
    return value[:rows] if value.ndim else value


def _filled(value: torch.Tensor, real: int, rows: int) -> torch.Tensor:
    """Return as many rows as other ranks have, by repeating the last row."""
    if not value.ndim or len(value) != real:
        return value
    return torch.cat([value, value[-1:].expand(rows - real, *value.shape[1:])])


class _Count(NamedTuple):
    """The counts with which a Trainer goes on after a checkpoint.

    Attributes:
        step: The number of the step, if all epochs had as many steps as now.
        begun: The epoch, and how many of its batches count as finished, in whole steps.
        batches: How many batches this epoch then has.
    """

    step: int
    begun: tuple[int, int]
    batches: int


def _saved_in(checkpoint: Any, folder: str) -> TrainerState | None:
    """Return the state in a checkpoint, if there is one; ``True`` means the latest checkpoint in the folder."""
    found = get_last_checkpoint(folder) if checkpoint is True else checkpoint
    path = Path(found, TRAINER_STATE) if found else None
    return None if path is None or not path.is_file() else TrainerState.load_from_json(str(path))


def _kept_by(state: TrainerState | None) -> dict[str, Any]:
    """Return the callback's values in a checkpoint; an empty dict if there are none."""
    entry = {} if state is None else state.stateful_callbacks.get(_LoaderPlace.__name__, {})
    attributes: dict[str, Any] = entry.get("attributes", {})
    return attributes


def _is_ours(loader: DataLoader[Any] | None) -> bool:
    return isinstance(getattr(loader, "sampler", None), EpochSampler)


def _skipped(loader: Any, num_batches: int = 0) -> Any:
    """Return the loader without its first batches; a restored loader itself, because it has nothing to skip."""
    return loader if _is_ours(loader) else skip_first_batches(loader, num_batches)


def _plan_of(loader: Any, args: Any) -> list[int | None]:
    """Return how many batches an epoch has, and how many a step has."""
    return [len(loader) if has_length(loader) else None, args.gradient_accumulation_steps]


def _restore(saved: TrainerState, loader: Any, args: Any, steps: int) -> _Count | None:
    """Restore the position of a Trainer's loader, and return how to count on; None to count as the Trainer does."""
    kept, is_ours, of_step = _kept_by(saved), _is_ours(loader), args.gradient_accumulation_steps
    place, plan = kept.get("place"), _plan_of(loader, args)
    part, epoch = math.modf(saved.epoch or 0)
    # If the loader is not patched, the Trainer counts batches, whose number per epoch or step has changed.
    is_recounted = not is_ours and kept.get("plan", plan) != plan
    if not args.ignore_data_skip and (is_recounted or (part and is_ours == (place is None))):
        raise StateError(
            f"The checkpoint (step {saved.global_step}, epoch {saved.epoch:g}) has no position that the training "
            "loader here can go on from, so samples would be lost or repeated: it was taken without "
            "PatchedLoadersMixin, or by one process without patches_one_process = True; or one of the two loaders is "
            f"not patched, and an epoch and a step had {kept.get('plan')} batches and have {plan} here. Use the number "
            "of processes and the arguments of before, or pass ignore_data_skip=True in the TrainingArguments to begin "
            "with the whole epoch."
        )
    if not is_ours:
        return None
    if place is not None and not args.ignore_data_skip:
        _require_same_groups(kept, loader)
        resume_loader(loader, place, counts_rest=True)
        if not has_length(loader):
            # Without a length, the Trainer counts epochs from 0 anew; the loader counts its own epochs.
            vars(loader).pop("set_epoch", None)
            loader.sampler.rank_passes.epochs.counts_rest = False
            return None
        return _count_of_rest(loader, args, steps, has_ended=kept.get("has_ended", False))
    if not has_length(loader) or (part and not kept):
        return None
    return _Count(int(epoch) * steps + round(part * len(loader)) // of_step, (int(epoch), 0), len(loader))


def _count_of_rest(loader: Any, args: Any, steps: int, *, has_ended: bool) -> _Count:
    """Return how to count on after a restore, when the loader's length is the rest of its epoch.

    If the rest is empty, the Trainer still does what follows an epoch's last step, unless it did so before.
    """
    sampler, of_step = loader.sampler, args.gradient_accumulation_steps
    epoch, left = sampler.rank_passes.epochs.position.epoch, len(loader)
    if has_ended:
        epoch += 1
        sampler.set_epoch(epoch)
        left = len(loader)
    sampler.rank_passes.epochs.counts_rest = False
    # The last step of the rest may have fewer batches, as the last step of an epoch.
    done = steps - math.ceil(left / of_step)
    return _Count(epoch * steps + done, (epoch, done * of_step), done * of_step + left)


def _require_same_groups(kept: dict[str, Any], loader: Any) -> None:
    """Raise StateError if a sampler groups samples by another batch size than before, which changes its order."""
    before, now = kept.get("groups"), _groups_of(loader)
    if before != now:
        raise StateError(
            f"The sampler groups samples by batches of {now}, and of {before} when the checkpoint was taken, so its "
            "epoch has another order: samples would be lost or repeated. Use the per_device_train_batch_size and "
            "gradient_accumulation_steps of before (the number of processes may change), or pass ignore_data_skip=True "
            "in the TrainingArguments to begin with the whole epoch."
        )


def _groups_of(loader: Any) -> int | None:
    """Return the sampler's own batch size, which the Trainer's sampler for group_by_length has; None if it has none."""
    size = getattr(loader.sampler, "batch_size", None)
    return size if isinstance(size, int) else None


class _LoaderPlace(TrainerCallback, ExportableState):  # type: ignore[misc] # types are checked without transformers
    """A callback that saves the position of a Trainer's training loader in checkpoints."""

    def __init__(self) -> None:
        self.loader: Any = None
        self.plan: list[int | None] = []
        self.has_ended = False

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **others: Any) -> None:
        """Record the loader whose position is saved."""
        self.loader = train_dataloader if _is_ours(train_dataloader) else None
        self.plan = _plan_of(train_dataloader, args)
        # The Trainer raises an error when it saves if this entry is missing, as in a checkpoint without this callback.
        state.stateful_callbacks.setdefault(type(self).__name__, {"args": {}, "attributes": {}})

    def on_epoch_begin(self, *args: Any, **others: Any) -> None:
        """Record that checkpoints from now on are within an epoch."""
        self.has_ended = False

    def on_epoch_end(self, *args: Any, **others: Any) -> None:
        """Record that the epoch has ended: the Trainer now evaluates and saves."""
        self.has_ended = True

    def state(self) -> dict[str, Any]:
        """Return this callback's values for a checkpoint."""
        place = None if self.loader is None else state_or_reason(self.loader, partial(loader_state, self.loader))
        groups = None if self.loader is None else _groups_of(self.loader)
        kept = {"place": place, "plan": self.plan, "groups": groups, "has_ended": self.has_ended}
        return {"args": {}, "attributes": kept}
