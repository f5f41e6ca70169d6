"""Let Hugging Face's Trainer train on a patched loader and resume it mid-epoch, by one base class."""

import json
from typing import Any, ClassVar
from unittest.mock import patch

from accelerate import skip_first_batches
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from ddp_patch.compat.packages import TRAINER_SHARES_ITSELF, TRAINER_SKIPS
from ddp_patch.errors import DDPPatchError, StateError, message_of
from ddp_patch.patching import PatchOptions, patch_dataloader_to_ddp
from ddp_patch.resume import go_on, loader_state
from ddp_patch.sharding.epochs import EpochSampler
from ddp_patch.sharding.position import no_state
from ddp_patch.wrappers import with_mesh

__all__ = ["PatchedLoadersMixin"]


class PatchedLoadersMixin:
    """Patch a Trainer's training loader, and resume it mid-epoch from checkpoints: a base class.

    Name it before ``Trainer``, or before a class that is derived from ``Trainer``. If there are several processes, it
    patches what ``get_train_dataloader`` of that class returns, and accelerate won't shard it again. Checkpoints keep
    the position in ``trainer_state.json``. Loaders for evaluation and prediction stay the Trainer's own: it can order
    outputs and remove padding only for loaders that accelerate shards.

    Attributes:
        patch_options: The keywords of ``patch_dataloader_to_ddp``, for derived classes to set. Default of
            ``device_mesh``: the accelerator's, if it has one.

    Raises:
        DDPPatchError: From ``train``: whatever ``patch_dataloader_to_ddp`` raises.
        StateError: From ``train``: the checkpoint has no position of this loader, or an epoch now has another number
            of steps.

    Examples:
        >>> from transformers import Trainer
        >>> class MyTrainer(PatchedLoadersMixin, Trainer):
        ...     patch_options = {"uneven": "drop"}
    """

    patch_options: ClassVar[PatchOptions] = {}

    # Those of the Trainer behind it.
    accelerator: Any
    args: Any
    add_callback: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.add_callback(_LoaderPlace)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the next class, patched if there are several processes."""
        trainer: Any = super()
        if self.accelerator.num_processes == 1 or TRAINER_SHARES_ITSELF.items() <= vars(self.args).items():
            loader: DataLoader[Any] = trainer.get_train_dataloader()
            return loader
        with patch.object(self.accelerator, "prepare_data_loader", lambda loader, *args, **options: loader):
            loader = trainer.get_train_dataloader()
        options: Any = with_mesh(self.patch_options, getattr(self.accelerator, "torch_device_mesh", None))
        return patch_dataloader_to_ddp(loader, **options)

    def train(self, *args: Any, **options: Any) -> Any:
        """Train as the next class does; from a checkpoint, continue with the batches that were left."""
        with patch(TRAINER_SKIPS, _skipped):
            trainer: Any = super()
            return trainer.train(*args, **options)


def _is_ours(loader: DataLoader[Any] | None) -> bool:
    return isinstance(getattr(loader, "sampler", None), EpochSampler)


def _skipped(loader: Any, num_batches: int = 0) -> Any:
    """Return what a Trainer iterates after a checkpoint: the restored loader itself, which has nothing to skip."""
    if not _is_ours(loader):
        return skip_first_batches(loader, num_batches)
    if loader.sampler.position is None:
        raise StateError(
            f"The checkpoint was taken {num_batches} batches into an epoch, without the training loader's position: it "
            "was taken without PatchedLoadersMixin, or by one process. Pass ignore_data_skip=True in the "
            "TrainingArguments to begin with the whole epoch."
        )
    return loader


class _LoaderPlace(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers is not there where types are checked
    """Saves the position of a Trainer's training loader in its checkpoints."""

    def __init__(self) -> None:
        self.loader: Any = None
        self.plan: list[int | None] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **others: Any) -> None:
        """Restore the position if the training comes from a checkpoint."""
        self.loader = train_dataloader if _is_ours(train_dataloader) else None
        self.plan = [len(train_dataloader) if has_length(train_dataloader) else None, args.gradient_accumulation_steps]
        # A checkpoint of another class has no entry, without which the Trainer would raise when it saves.
        kept = state.stateful_callbacks.setdefault(type(self).__name__, {"args": {}, "attributes": {}})["attributes"]
        if not kept or not state.global_step or args.ignore_data_skip:
            return
        if kept["plan"] != self.plan:
            raise StateError(
                f"An epoch has {self.plan[0]} batches now, {self.plan[1]} for each step, and had {kept['plan'][0]} and "
                f"{kept['plan'][1]} when the checkpoint was taken. The Trainer counts steps, so its epoch would not "
                "end where the samples do. Use the number of processes, the batch size and the "
                "gradient_accumulation_steps of before, or pass ignore_data_skip=True in the TrainingArguments to "
                "begin with a whole epoch."
            )
        if self.loader is None and kept["place"] is not None:
            raise StateError(
                "The checkpoint was taken by several processes, whose batches one process does not make. Use the "
                "number of processes of before, or pass ignore_data_skip=True in the TrainingArguments to begin with a "
                "whole epoch."
            )
        if kept["place"] is None:
            return  # one process took it, which `_skipped` refuses where there are several
        go_on(self.loader, kept["place"], tells_rest=False)
        if self.plan[0] is None:
            # Then the Trainer takes everything done for epoch 0 and counts epochs from there; the loader counts itself.
            vars(self.loader).pop("set_epoch", None)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        place = None if self.loader is None else self._place()
        return {"args": {}, "attributes": {"place": place, "plan": self.plan}}

    def _place(self) -> dict[str, Any]:
        """Return the loader's position, or why there is none: the checkpoint may never be restored."""
        try:
            place = loader_state(self.loader)
            if json.loads(json.dumps(place)) != place:
                return no_state("A sampler's state_dict() has keys that are no strings, or tuples: JSON changes them.")
        except (DDPPatchError, TypeError, ValueError) as error:
            return no_state(f"{type(error).__name__}: {message_of(error)}")
        return place
