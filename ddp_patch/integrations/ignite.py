"""Patch the loader of an ignite engine, and save the loader's position with the engine's state, by one call."""

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar, Unpack, cast

from ignite.engine import Engine, Events
from torch.utils.data import DataLoader

from ddp_patch.errors import AlreadyPatchedError, InvalidOptionError, StateError
from ddp_patch.loader import PatchedLoader
from ddp_patch.loaders.nested_samplers import length_of
from ddp_patch.loaders.recognition import sharded_by
from ddp_patch.patching import PatchOptions, patch_dataloader_to_ddp
from ddp_patch.resume import batches_as_here, loader_state, resume_loader, state_or_reason
from ddp_patch.sharding.sampler import EpochSampler
from ddp_patch.sharding.saved_state import epoch_after

__all__ = ["attach_loader"]

T = TypeVar("T")

_KEY = "ddp_patch_loader"
_PLAN = "ddp_patch_plan"
_ENDED = "ddp_patch_epoch_has_ended"
_INSTEAD = (
    "Give the engine {'epoch': epoch, 'max_epochs': max_epochs, 'epoch_length': len(loader)} before attach_loader to "
    "begin with an epoch's first batch instead; then, where there are several ranks, call loader.sampler.set_epoch."
)


def attach_loader(engine: Any, loader: DataLoader[T], **options: Unpack[PatchOptions]) -> PatchedLoader[T]:
    """Patch a loader for an ignite engine, whose checkpoints then resume mid-epoch.

    The engine's ``state_dict`` then also saves the loader's position, and its ``load_state_dict`` restores the
    position, on any number of ranks; in one process pass ``rank=0, num_replicas=1``. After loading a state, call
    ``engine.run(loader)`` without ``max_epochs`` and ``epoch_length``: the state has them. No handler has to call
    ``set_epoch``. If a state was saved between an epoch's last step and its ``Events.EPOCH_COMPLETED``, the engine
    fires this event first.

    Args:
        engine: The engine that trains, before its state is loaded.
        loader: The finished loader.
        options: The keywords of ``patch_dataloader_to_ddp``.

    Returns:
        The patched loader, for ``engine.run``. If there is only one process, ``loader`` itself, with a
        ``NotDistributedWarning``; the engine's state then has the number of batches of an epoch, and no position.

    Raises:
        InvalidOptionError: The engine has a loader already.
        AlreadyPatchedError: Something else shards the loader, so its position could not be saved.
        DDPPatchError: Any error of ``patch_dataloader_to_ddp``.

    Examples:
        >>> seen = []
        >>> trainer = Engine(lambda engine, batch: seen.append(batch.tolist()))
        >>> loader = attach_loader(trainer, DataLoader(range(10), batch_size=4), rank=1, num_replicas=2)
        >>> state = trainer.run(loader, max_epochs=1)
        >>> seen, trainer.state_dict()["ddp_patch_loader"]["epoch"]
        ([[1, 3, 5, 7], [9]], 0)
    """
    if not {"state_dict", "load_state_dict"}.isdisjoint(vars(engine)):
        raise InvalidOptionError(
            "attach_loader was called with an engine whose state already saves the position of a loader, and it can "
            "save only one. Pass another engine, or patch this loader with patch_dataloader_to_ddp()."
        )
    patched = patch_dataloader_to_ddp(loader, **options)
    if sharded_by(patched) is not None and not isinstance(patched.sampler, EpochSampler):
        raise AlreadyPatchedError(
            f"attach_loader was called with a {type(loader).__name__} that something else shards "
            f"({sharded_by(patched)}), so its position cannot be saved. Pass the loader without what shards it: "
            "attach_loader patches it."
        )
    place = _SavedPosition(engine, patched)
    engine.state_dict, engine.load_state_dict = place.state_dict, place.load_state_dict
    engine.add_event_handler(Events.EPOCH_STARTED, place.note_epoch, has_ended=False)
    engine.add_event_handler(Events.EPOCH_COMPLETED, place.note_epoch, has_ended=True)
    return patched


class _SavedPosition:
    """The methods of an engine that save and restore its loader's position, and the number of batches of an epoch.

    An engine counts iterations, and computes the epoch and its batch from this count. On another number of ranks, the
    count goes on as if these ranks had trained from the beginning, in epochs of their length.
    """

    def __init__(self, engine: Engine, loader: DataLoader[Any]) -> None:
        self._of_engine, self._loader = (engine.state_dict, engine.load_state_dict), loader
        self._engine, self._has_ended = engine, False

    def note_epoch(self, *, has_ended: bool) -> None:
        """Record whether the engine has fired the event of an epoch's end."""
        self._has_ended = has_ended

    def _plan(self) -> dict[str, Any]:
        """Return how many batches an epoch has; if unknown, the number of ranks and the batch size."""
        length = length_of(self._loader, [])
        if length is not None:
            return {"batches": length}
        sampler: Any = self._loader.sampler
        ranks = sampler.num_replicas if isinstance(sampler, EpochSampler) else 1
        return {"ranks": ranks, "batch_size": self._loader.batch_size}

    def state_dict(self) -> "OrderedDict[str, Any]":
        """Return the engine's state with the loader's position, or with the reason why there is none."""
        place = None
        if isinstance(self._loader.sampler, EpochSampler):
            place = state_or_reason(self._loader, partial(loader_state, self._loader))
        own = ((_KEY, place), (_PLAN, self._plan()), (_ENDED, self._has_ended))
        return OrderedDict([*self._of_engine[0]().items(), *own])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the engine's state and the loader's position."""
        is_shared = isinstance(self._loader.sampler, EpochSampler)
        if is_shared and state_dict.get(_KEY) is None:
            raise StateError(
                f"The engine's state has no {_KEY!r}, so its loader's position is not known: it was saved without "
                f"attach_loader, or by one process. {_INSTEAD}"
            )
        kept, here = state_dict.get(_PLAN, self._plan()), self._plan()
        of_engine = {name: value for name, value in state_dict.items() if name not in (_KEY, _PLAN, _ENDED)}
        # An epoch_length of the user's own, which is not the loader's, stays the same on any number of ranks.
        is_own = kept.get("batches", state_dict["epoch_length"]) != state_dict["epoch_length"]
        can_count = is_shared and "batches" in kept and "batches" in here and "max_iters" not in state_dict
        if (kept != here and not is_own and not can_count) or (not is_shared and state_dict.get(_KEY) is not None):
            raise StateError(
                f"The engine's state was saved with {_in_words(kept)}, and the loader here has {_in_words(here)}. The "
                "engine would count with the old numbers, and repeat or leave out samples. Patch the loader (in one "
                "process with rank=0, num_replicas=1), give it a len(), and set no max_iters; or use the number of "
                f"ranks and the batch size of before. {_INSTEAD}"
            )
        if is_shared:
            place = state_dict[_KEY]
            done = batches_as_here(self._loader, place)
            resume_loader(self._loader, place, counts_rest=False)
            if (upcoming := epoch_after(place)) > place["epoch"]:  # an engine begins with a batch
                cast(Any, self._loader).set_epoch(upcoming)
                done = 0
            if can_count and not is_own:
                epoch = state_dict["iteration"] // kept["batches"]
                of_engine |= {"iteration": epoch * here["batches"] + (done or 0), "epoch_length": here["batches"]}
        self._of_engine[1](of_engine)
        length = self._engine.state.epoch_length
        is_over = self._engine.state.iteration > 0 and length and self._engine.state.iteration % length == 0
        if is_over and not state_dict.get(_ENDED, True):
            self._end_epoch_first()

    def _end_epoch_first(self) -> None:
        """Let the engine fire the event of an epoch's end when it starts, because the saved engine had not fired it."""
        state = self._engine.state
        loaded = {"iteration": state.iteration, "epoch": state.epoch}

        def end_epoch(engine: Any) -> None:
            started.remove()
            if engine.state.iteration != loaded["iteration"]:  # the engine began anew, because all epochs are finished
                vars(engine.state).update(loaded, max_epochs=loaded["epoch"])
            engine.fire_event(Events.EPOCH_COMPLETED)

        started = self._engine.add_event_handler(Events.STARTED, end_epoch)


def _in_words(plan: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in plan.items())
