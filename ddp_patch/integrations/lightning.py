"""A callback by which this package shards the loaders of Lightning's Trainer."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple, Unpack

from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.utils.data import DataLoader, IterableDataset

from ddp_patch.compat.private_packages import (
    LIGHTNING_TAKES_LOADERS,
    finish_lightning_epoch,
    keep_lightning_states,
    lightning_fetcher,
    lightning_place,
    lightning_restarts_exactly,
)
from ddp_patch.errors import InvalidOptionError, NotDistributedWarning, StateError, UnsupportedLoaderError
from ddp_patch.loader import PatchedLoader
from ddp_patch.loaders.nested_samplers import length_of
from ddp_patch.loaders.recognition import sharded_by
from ddp_patch.patching import PatchOptions, patch_dataloader_to_ddp
from ddp_patch.resume import batches_as_here, state_on_this_rank, state_or_reason
from ddp_patch.validation import counted
from ddp_patch.wrappers import alone, with_mesh

__all__ = ["PatchDataLoaders"]

_KEEPER, _METHOD = LIGHTNING_TAKES_LOADERS
# Options for training loaders only: evaluation takes each sample, in the loader's own batches.
_OF_TRAINING = {"cost", "share", "uneven"}
_PLAN = "ddp_patch_plan"
_INSTEAD = "or resume from a checkpoint that was taken at the end of an epoch."


class _Resumed(NamedTuple):
    """A mid-epoch checkpoint: how many batches were finished, of how many, on how many ranks; the loaders' states."""

    done: int
    planned: float | None
    ranks: int | None
    states: Sequence[Any]


class PatchDataLoaders(Callback):  # type: ignore[misc] # types are checked without lightning
    """A callback that patches every loader with which the Trainer trains, validates, tests or predicts.

    The callback patches the loaders that you pass to ``trainer.fit`` and the like, and the loaders that a module or
    data module returns; also in lists, dicts and a ``CombinedLoader``. The Trainer does not shard these loaders again,
    whatever ``use_distributed_sampler`` says, and saves their positions in its checkpoints. Loaders that are no
    ``DataLoader`` of torch are not changed. With ``DDPStrategy``, ``predict`` does not pad: ranks may make different
    numbers of steps.

    A single process patches only its training loaders, so that they have a position, and only if they can be patched.
    ``trainer.fit(..., ckpt_path=...)`` resumes mid-epoch on any number of ranks; with several training loaders, on the
    same number. Each sample of the rest comes once, and the Trainer counts the batches before as if the present ranks
    had made them.

    Args:
        options: The keywords of ``patch_dataloader_to_ddp``. ``cost``, ``share`` and ``uneven`` apply to training
            loaders only. Default of ``device_mesh``: the module's mesh, which ``ModelParallelStrategy`` makes.

    Raises:
        InvalidOptionError: From ``trainer.fit`` and the like: the Trainer has two of these callbacks.
        DDPPatchError: From ``trainer.fit`` and the like: any error of ``patch_dataloader_to_ddp``.
        StateError: From ``trainer.fit``: the checkpoint was saved mid-epoch without the positions of the loaders; or
            the number of ranks has changed, and there are several training loaders, or a loader with a position of its
            own, or Lightning is older than 2.5.

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

    saves_positions_of_loaders: bool = True

    def __init__(self, **options: Unpack[PatchOptions]) -> None:
        super().__init__()
        self._options = options
        self._resumed: _Resumed | None = None
        self._training: list[DataLoader[Any]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the Trainer pass its loaders through this callback."""
        if sum(isinstance(callback, PatchDataLoaders) for callback in trainer.callbacks) > 1:
            raise InvalidOptionError(
                "The Trainer has several PatchDataLoaders, and a loader can be patched only once. Pass a single one."
            )
        keeper = getattr(trainer, _KEEPER)
        take = partial(getattr(type(keeper), _METHOD), keeper)
        setattr(keeper, _METHOD, partial(self._take, take, trainer))
        self._resumed, self._training = None, []

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save how the Trainer counts an epoch's batches, and the loaders' positions after the finished batches."""
        checkpoint[_PLAN] = {"batches": trainer.num_training_batches, "ranks": trainer.world_size}
        states = lightning_place(checkpoint)[1]
        if (fetcher := lightning_fetcher(trainer)) is None or not states:
            return
        finished = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        # Until a resumed epoch goes on, the fetcher's count lacks the batches before the checkpoint.
        ahead = fetcher.fetched - (finished if fetcher.fetched >= finished else 0)
        loaders = _stateful(fetcher.combined_loader.flattened)
        own = [
            _state(loader, ahead) if _is_ours(loader) else state for loader, state in zip(loaders, states, strict=True)
        ]
        keep_lightning_states(checkpoint, own)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Record where a checkpoint resumes, before the Trainer loads the states of one process or of several."""
        done, states = lightning_place(checkpoint)
        plan = checkpoint.get(_PLAN, {})
        if (done or states) and trainer.state.fn == TrainerFn.FITTING:
            self._resumed = _Resumed(done, plan.get("batches"), plan.get("ranks"), states)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count a resumed epoch's batches as if the present ranks had made them; refuse if this is not possible."""
        resumed, self._resumed = self._resumed, None
        if resumed is None or not trainer.fit_loop.restarting:
            return
        fetcher = lightning_fetcher(trainer)
        loaders = [] if fetcher is None else fetcher.combined_loader.flattened
        # Of several loaders, Lightning's mode decides which one ends the epoch, so they need the same number of ranks.
        has_place = len(loaders) == len(resumed.states) == 1 and _is_ours(loaders[0])
        fitting, progress = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
        has_validated = progress.is_last_batch and progress.current.completed == progress.current.ready
        exactly = lightning_restarts_exactly(trainer)
        if has_place and exactly:
            self._count(trainer, loaders[0], resumed.states[0])
        else:
            self._require_same(trainer, resumed)
        if fetcher is not None and exactly and progress.is_last_batch and fitting.restarted_mid_epoch:
            finish_lightning_epoch(trainer, fetcher, has_validated=has_validated)
        elif progress.is_last_batch and any(map(_is_ours, loaders)):  # the next epoch begins
            for loader in filter(_is_ours, loaders):
                loader.set_epoch(fitting.epoch_progress.current.processed)
            iter(fetcher)

    def _count(self, trainer: Any, loader: Any, state: Any) -> None:
        """Set the Trainer's count of the epoch's batches as if the present ranks had made all of them."""
        planned, progress = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress
        done = batches_as_here(loader, state)
        was_over = progress.is_last_batch and progress.current.ready == progress.current.processed
        progress.is_last_batch = is_over = was_over or (done is not None and done >= planned)
        counted = planned if is_over and planned != inf else done
        shift = 0 if counted is None else counted - progress.current.processed
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress.current, name, getattr(progress.current, name) + shift)
        if is_over and not was_over:  # these ranks have no batch left, so do what follows the last batch
            trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def _require_same(self, trainer: Any, resumed: _Resumed) -> None:
        """Refuse a mid-epoch checkpoint if a loader's position is not known, or Lightning's count would be wrong."""
        if not resumed.done:
            return
        if self._training and not (resumed.states and all(hasattr(each, "state_dict") for each in self._training)):
            raise StateError(
                f"The checkpoint was taken {counted(resumed.done, 'batch')} into an epoch, without the position of "
                "each training loader: it was taken without PatchDataLoaders, or a loader has no state. The epoch's "
                "first batches would come again instead of its last ones. Take checkpoints with PatchDataLoaders and "
                f"loaders that have a state_dict, {_INSTEAD}"
            )
        saved, here = (resumed.planned, resumed.ranks), (trainer.num_training_batches, trainer.world_size)
        if any(then not in (None, now) for then, now in zip(saved, here, strict=True)):
            raise StateError(
                f"The checkpoint was taken {counted(resumed.done, 'batch')} into an epoch of {saved[0]} on {saved[1]} "
                f"ranks, and here an epoch has {here[0]} on {here[1]}. Lightning counts on from {resumed.done}, so "
                "samples would be lost or repeated. PatchDataLoaders cannot set the count: there are several training "
                "loaders, or one with another position than it gives, or none, or Lightning is older than 2.5. Use the "
                f"number of ranks and the batch size of before, {_INSTEAD}"
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
        patched = self._patched(loader, trainer, how["mode"])
        if how["mode"] == RunningStage.TRAINING and sharded_by(patched) is not None:
            self._training.append(patched)
        # An iterable dataset has no indices to track, and to predict, the Trainer would rebuild the loader without its
        # sampler.
        return patched if isinstance(patched.dataset, IterableDataset) else take(patched, *args, **how)

    def _patched(self, given: DataLoader[Any], trainer: Any, mode: RunningStage) -> DataLoader[Any]:
        options: Any = with_mesh(self._options, trainer.lightning_module.device_mesh)
        if mode != RunningStage.TRAINING:
            options = {name: value for name, value in options.items() if name not in _OF_TRAINING}
        with warnings.catch_warnings():
            # A single process is no mistake here: the group of several processes would exist by now.
            warnings.simplefilter("ignore", NotDistributedWarning)
            if mode == RunningStage.TRAINING and trainer.world_size == 1:
                return _patched_alone(given, self._options)
            if mode == RunningStage.PREDICTING and _may_end_apart(trainer, given):
                unpadded = patch_dataloader_to_ddp(given, **{**options, "uneven": "keep"})
                # The Trainer refuses to predict if a rank has no batch.
                if trainer.strategy.reduce_boolean_decision(bool(length_of(unpadded, []))):
                    return unpadded
            return patch_dataloader_to_ddp(given, **options)


def _may_end_apart(trainer: Any, loader: DataLoader[Any]) -> bool:
    """Return whether ranks may predict in unequal numbers of steps: with DDP, no rank waits for another."""
    # By name, because the package pytorch_lightning has a class of its own.
    return type(trainer.strategy).__name__ == "DDPStrategy" and not isinstance(loader.dataset, IterableDataset)


def _patched_alone(given: DataLoader[Any], options: Mapping[str, Any]) -> DataLoader[Any]:
    """Patch a loader of the only process, so that it has a position; return it unchanged if it cannot be patched."""
    chosen: Any = options if "rank" in options else alone(options)
    try:
        return patch_dataloader_to_ddp(given, **chosen)
    except UnsupportedLoaderError:
        return given


def _is_ours(loader: object) -> bool:
    """Return whether a loader has this package's position; some classes have a position of their own."""
    return isinstance(loader, PatchedLoader) and "state_dict" in vars(loader)


def _stateful(loaders: Sequence[Any]) -> list[Any]:
    """Return the loaders whose states Lightning saves."""
    return [each for each in loaders if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")]


def _state(loader: DataLoader[Any], ahead: int) -> dict[str, Any]:
    """Return a loader's state without the batches that are ahead of the loop, or the reason why there is none."""
    return state_or_reason(loader, partial(state_on_this_rank, loader, ahead=ahead))
