"""Let this package shard the loaders of Lightning's Trainer, by one callback."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Unpack
from weakref import WeakKeyDictionary

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.utils.data import DataLoader, IterableDataset

from ddp_patch.compat.packages import LIGHTNING_TAKES_LOADERS, lightning_place
from ddp_patch.errors import InvalidOptionError, NotDistributedWarning, StateError
from ddp_patch.loaders.recognition import sharded_by
from ddp_patch.loaders.samples import length_of
from ddp_patch.patching import PatchOptions, patch_dataloader_to_ddp
from ddp_patch.wrappers import with_mesh

__all__ = ["PatchDataLoaders"]

_KEEPER, _METHOD = LIGHTNING_TAKES_LOADERS
# These change training only: evaluation takes each sample, in batches as they are.
_OF_TRAINING = {"cost", "cost_of", "cost_window", "scalable_shuffle", "share", "uneven"}
# What was given for each loader that was taken: the Trainer puts that into a CombinedLoader of the user's.
_GIVEN: WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = WeakKeyDictionary()
_PLAN = "ddp_patch_plan"
_INSTEAD = "or resume from a checkpoint that was taken at the end of an epoch."


class _Resumed(NamedTuple):
    """What a mid-epoch checkpoint says: how many batches were done, of how many, and whether it has states."""

    done: int
    planned: float | None
    has_states: bool


class PatchDataLoaders(Callback):  # type: ignore[misc]  # lightning is not there where types are checked
    """Patch every loader with which the Trainer trains, validates, tests or predicts: a callback.

    It patches the loaders that you pass to ``trainer.fit`` and the like, and those that a module or data module
    returns; also in lists, dicts and a ``CombinedLoader``. The Trainer does not shard them again, whatever
    ``use_distributed_sampler`` says, and saves their position in its checkpoints. Anything but torch's ``DataLoader``
    stays as it is, and so does everything in a single process. With ``DDPStrategy``, ``predict`` does not pad: ranks
    may make different numbers of steps.

    Args:
        options: The keywords of ``patch_dataloader_to_ddp``. ``cost``, ``cost_of``, ``cost_window``, ``share``,
            ``scalable_shuffle`` and ``uneven`` apply to training loaders only. Default of ``device_mesh``: the
            module's, which ``ModelParallelStrategy`` makes.

    Raises:
        InvalidOptionError: From ``trainer.fit`` and the like: the Trainer has two of these callbacks.
        DDPPatchError: From ``trainer.fit`` and the like: whatever ``patch_dataloader_to_ddp`` raises.
        StateError: From ``trainer.fit``: the checkpoint was taken mid-epoch and has no position of the loaders, or
            an epoch now has another number of batches.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
        >>> loader = DataLoader(RandomDataset(32, 64), batch_size=4, shuffle=True)
        >>> sharing = PatchDataLoaders(rank=1, num_replicas=2)  # leave the world out where there is a process group
        >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> trainer = Trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=False, callbacks=sharing, **quiet)
        >>> trainer.fit(BoringModel(), loader)
        >>> trainer.global_step, len(loader)
        (8, 16)
    """

    def __init__(self, **options: Unpack[PatchOptions]) -> None:
        super().__init__()
        self._options = options
        self._resumed: _Resumed | None = None
        self._training: list[DataLoader[Any]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the Trainer pass its loaders through this callback, before it asks for them."""
        if sum(isinstance(callback, PatchDataLoaders) for callback in trainer.callbacks) > 1:
            raise InvalidOptionError(
                "The Trainer has several PatchDataLoaders, and a loader can be patched only once. Pass a single one."
            )
        keeper = getattr(trainer, _KEEPER)
        take = partial(getattr(type(keeper), _METHOD), keeper)
        setattr(keeper, _METHOD, partial(self._take, take, trainer))
        self._resumed, self._training = None, []

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save how the Trainer counts the batches of an epoch."""
        checkpoint[_PLAN] = {"batches": trainer.num_training_batches, "ranks": trainer.world_size}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Record where a checkpoint resumes, before the Trainer looks for what one process or several have saved."""
        done, states = lightning_place(checkpoint)
        if not done or trainer.state.fn != TrainerFn.FITTING:
            return
        plan = checkpoint.get(_PLAN, {})
        if plan and (plan["ranks"] == 1) != (trainer.world_size == 1):
            raise StateError(
                f"The checkpoint was taken {done} batches into an epoch by {plan['ranks']} ranks, and here are "
                f"{trainer.world_size}: Lightning counts batches, which are others now, so samples would be lost or "
                f"repeated. Use {plan['ranks']} ranks, {_INSTEAD}"
            )
        self._resumed = _Resumed(done, plan.get("batches"), bool(states))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse to resume mid-epoch if an epoch has other batches now, or a loader's position is not known."""
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            return
        if self._training and not (resumed.has_states and all(hasattr(each, "state_dict") for each in self._training)):
            raise StateError(
                f"The checkpoint was taken {resumed.done} batches into an epoch, without the position of each training "
                "loader: it was taken without PatchDataLoaders or by one process, or a loader has no state. The "
                "epoch's first batches would come again instead of its last ones. Take checkpoints with "
                f"PatchDataLoaders and loaders that have a state_dict, {_INSTEAD}"
            )
        if resumed.planned not in (None, trainer.num_training_batches):
            raise StateError(
                f"The checkpoint was taken {resumed.done} batches into an epoch of {resumed.planned}, and here one has "
                f"{trainer.num_training_batches}. Lightning counts on from {resumed.done}, so samples would be lost or "
                f"repeated. Use the number of ranks and the batch size of before, {_INSTEAD}"
            )

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Undo the changes to the Trainer, which does not call ``teardown`` after an exception."""
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo the changes to the Trainer."""
        vars(getattr(trainer, _KEEPER)).pop(_METHOD, None)

    def _take(self, take: Callable[..., Any], trainer: Any, loader: object, *args: Any, **how: Any) -> Any:
        if not isinstance(loader, DataLoader):
            return take(loader, *args, **how)
        given = _GIVEN.get(loader, loader)
        patched = self._patched(given, trainer, how["mode"])
        if how["mode"] == RunningStage.TRAINING and sharded_by(patched) is not None:
            self._training.append(patched)
        # An iterable dataset has no indices to track; to predict, the Trainer would rebuild the loader without its
        # sampler.
        taken = patched if isinstance(patched.dataset, IterableDataset) else take(patched, *args, **how)
        if taken is not given:
            _GIVEN[taken] = given
        return taken

    def _patched(self, given: DataLoader[Any], trainer: Any, mode: RunningStage) -> DataLoader[Any]:
        options: Any = with_mesh(self._options, trainer.lightning_module.device_mesh)
        if mode != RunningStage.TRAINING:
            options = {name: value for name, value in options.items() if name not in _OF_TRAINING}
        with warnings.catch_warnings():
            # One process is nothing to warn of here: the group would exist by now.
            warnings.simplefilter("ignore", NotDistributedWarning)
            if mode == RunningStage.PREDICTING and _may_end_apart(trainer, given):
                unpadded = patch_dataloader_to_ddp(given, **{**options, "uneven": "keep"})
                # The Trainer refuses to predict where a rank has nothing to do.
                if trainer.strategy.reduce_boolean_decision(bool(length_of(unpadded, []))):
                    return unpadded
            return patch_dataloader_to_ddp(given, **options)


def _may_end_apart(trainer: Any, loader: DataLoader[Any]) -> bool:
    """Return whether ranks may predict in unequal numbers of steps: DDP waits for no rank there, sharded models do."""
    return type(trainer.strategy) is DDPStrategy and not isinstance(loader.dataset, IterableDataset)
