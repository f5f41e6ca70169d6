"""What a patched loader has: its type, its position as a state, and the guard that finds loaders nobody patched."""

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from unittest.mock import patch

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ddp_patch.compat.private_packages import held_loaders, lightning_trainer_that_saves, saves_positions
from ddp_patch.compat.private_torch import (
    LOADED_STATE,
    MAKE_ITERATOR,
    RUNNING_ITERATOR,
    BatchesOf,
    RunningLoader,
    has_own_iteration,
    has_own_iterators,
    is_torchdatas,
)
from ddp_patch.errors import CannotResumeWarning, NotALoaderError, NotPatchedError, StateError, UnsupportedLoaderError
from ddp_patch.loaders.copying import COPY, METHODS, copies_plainly, state_for_copies
from ddp_patch.loaders.hooks import about_to_use
from ddp_patch.loaders.overlap import NotedIndices
from ddp_patch.loaders.recognition import is_loader, sharded_by
from ddp_patch.loaders.samples import steps_of
from ddp_patch.orders.chunks import State
from ddp_patch.ranks.pass_monitor import PassMonitor
from ddp_patch.sharding.iterators import CountedIterator, EmptyIterator, RepeatedPasses, WatchedIterator
from ddp_patch.sharding.loader_passes import Passes, items_left
from ddp_patch.sharding.pickled_batches import by_value
from ddp_patch.sharding.sampler import EpochSampler
from ddp_patch.sharding.saved_state import Position, begin_next_epoch
from ddp_patch.walks import is_empty, nested, place_of

__all__ = ["OwnMethods", "PatchedLoader", "assert_loaders_patched", "check_loaders_is_patched"]


T_co = TypeVar("T_co", covariant=True)


class _TypeOfPatched(type):
    """Has ``isinstance`` tell whether a loader is patched, whatever its class: a patched loader keeps the user's."""

    if not TYPE_CHECKING:  # type checkers narrow types by the usual ``isinstance`` alone

        def __instancecheck__(cls, instance):
            if cls is not PatchedLoader:
                return super().__instancecheck__(instance)
            # A loader around a wrapper that somebody made by hand cannot be told its epoch.
            is_loader = isinstance(instance, DataLoader) and callable(getattr(instance, "set_epoch", None))
            return is_loader and isinstance(sharded_by(instance), EpochSampler)


class PatchedLoader(DataLoader[T_co], metaclass=_TypeOfPatched):
    """A loader that this package has patched: a ``DataLoader`` that can be told its epoch.

    It is a type for annotations. At run time a patched loader keeps the class of the loader that was given, and
    ``isinstance(loader, PatchedLoader)`` tells whether it is patched. If your loader's class has attributes of its own,
    ``assert isinstance(loader, YourLoader)`` shows them to a type checker, too.

    Where there is only one process, ``patch_dataloader_to_ddp`` warns and returns the loader as it is, without
    ``set_epoch``.

    Attributes:
        sampler: What shards; its ``set_epoch`` is the loader's.

    Examples:
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = DataLoader(range(4), shuffle=True)
        >>> patched = patch_dataloader_to_ddp(loader, rank=0, num_replicas=2)
        >>> patched.set_epoch(3)
        >>> isinstance(patched, PatchedLoader), isinstance(loader, PatchedLoader)
        (True, False)
    """

    # torch leaves the type of a sampler open.
    sampler: DistributedSampler[Any]  # pyright: ignore[reportIncompatibleVariableOverride]

    if not TYPE_CHECKING:  # a class that cannot be made is none to narrow to

        def __new__(cls, *args, **options):
            """Refuse to be made."""
            raise TypeError("PatchedLoader is a type for annotations. Call patch_dataloader_to_ddp(loader) to get one.")

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one. Calling it is optional: a pass is followed by the next epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, by torch's Stateful protocol; see also ``loader_state``."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass resume where a state was taken; see also ``restore_loader``."""


_STATEFUL = ("state_dict", "load_state_dict")


class OwnMethods:
    """Methods of one patched loader. They are its attributes, because its class stays that of the given loader.

    Its iterators count what they give. ``state_dict`` and ``load_state_dict`` save and restore its position. A deep
    copy and a pickled one have methods of their own. A shallow copy has none, because it would get the iterators of the
    original.

    Args:
        loader: The loader. It is not kept alive, because it holds this.
        passes: The passes over it; None if something else has sharded it already.
        repeated: Its one iterator for all epochs, if it has such.
        batches_of: Makes of an iterator of its class the batches of a pass. Default: they are those of that iterator.
        monitor: Compares the passes over a loader that is sharded already; None if ``passes`` has one, or nobody does.
        data: Names the data, if a sampler shards them: its indices are compared, and not what batches hold.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        passes: Passes[Any] | None,
        *,
        repeated: RepeatedPasses | None = None,
        batches_of: BatchesOf | None = None,
        monitor: PassMonitor | None = None,
        data: str = "",
    ) -> None:
        self._loader = weakref.ref(loader)
        self._passes, self._monitor, self._data = passes, monitor, data
        self._repeated, self._batches_of = repeated, batches_of
        kind = type(loader)
        # A loader that is copied in its own way is not counted here.
        is_torchs = passes is not None and copies_plainly(kind)
        # torchdata's counts what one rank has read: torch's iterators, and a position of ours, take its place.
        self._kind = DataLoader if is_torchs and is_torchdatas(kind) else kind
        self._counts = repeated is not None or batches_of is not None or (is_torchs and not has_own_iteration(kind))
        # A loader with one iterator for all epochs takes them by itself.
        makes_own = repeated is not None or has_own_iterators(self._kind)
        self._is_torchs = is_torchs and not makes_own
        self._takes_notes = self._is_torchs and isinstance(loader.dataset, IterableDataset)
        in_order = loader.num_workers == 0 or getattr(loader, "in_order", True)
        if self._kind is kind:
            self._is_resumable = self._counts and in_order and not any(hasattr(loader, name) for name in _STATEFUL)
        else:  # torchdata's own methods ask iterators of its own
            self._is_resumable = self._counts
        self._attach(loader)
        if self._kind is not kind and (state := vars(loader).get(LOADED_STATE)) is not None:
            vars(loader)[LOADED_STATE] = None
            self.load_state_dict(state)

    def _attach(self, loader: DataLoader[Any]) -> None:
        methods: dict[str, Any] = {}
        if copies_plainly(type(loader)):
            methods |= {COPY: self.copied, METHODS: self}
        if self._counts or self._takes_notes or self._monitor is not None:
            methods[MAKE_ITERATOR] = self.make_iterator
        if self._is_resumable:
            methods |= {name: getattr(self, name) for name in _STATEFUL}
        vars(loader).update(methods)

    def loader(self) -> DataLoader[Any]:
        """Return the loader.

        Raises:
            UnsupportedLoaderError: It is gone, and a shallow copy of it or one of its methods is left.
        """
        loader = self._loader()
        if loader is None:
            raise UnsupportedLoaderError(
                "A patched loader was used after the loader itself is gone, by a method or a shallow copy of it: its "
                "iterators and methods were that loader's. Keep what patch_dataloader_to_ddp() returned, and use that."
            )
        return loader

    def make_iterator(self) -> Any:
        """Return an iterator of the loader that counts the batches it gives."""
        loader, passes = self.loader(), self._passes
        with nullcontext() if passes is None else passes.iterator_context(loader):
            if self._repeated is not None:
                return self._repeated.begin_anew(loader)
            if passes is not None and self._is_torchs and _begins_at_end(passes.epochs.position):
                return EmptyIterator(loader, passes, reaches_loop=self._counts)
            counts = self._counts and (self._is_torchs or self._batches_of is not None)
            counting = nullcontext() if passes is None else passes.epochs.counting(counts)
            with counting, self._collating(loader), self._noting(loader) as noted:
                # The class's method, because the loader's own attribute of that name is this one.
                iterator = getattr(self._kind, MAKE_ITERATOR)(loader)
        is_torchs = isinstance(iterator, RunningLoader)
        if isinstance(iterator, CountedIterator) or not (is_torchs or self._batches_of is not None):
            return iterator
        if passes is not None:
            ahead = loader.num_workers > 0
            return CountedIterator(iterator, passes, self._batches_of, begins_ahead=ahead, reaches_loop=self._counts)
        if self._monitor is not None:
            return WatchedIterator(iterator, self._monitor, noted, is_open_ended=steps_of(loader) is None)
        return iterator

    def _collating(self, loader: DataLoader[Any]) -> AbstractContextManager[object]:
        """While entered, a new iterator's workers send small batches by value, each with what they note of it."""
        if self._passes is None or "collate_fn" not in vars(loader):
            return nullcontext()
        noted = self._passes.noting(loader.collate_fn) if self._takes_notes else loader.collate_fn
        return patch.object(loader, "collate_fn", by_value(noted) if loader.num_workers > 0 else noted)

    @contextmanager
    def _noting(self, loader: DataLoader[Any]) -> Iterator[NotedIndices | None]:
        """While entered, a new iterator's indices are noted, if a sampler shards them; yield what does."""
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        if not self._data or name not in vars(loader):
            yield None
            return
        sampler = vars(loader)[name]
        noted = NotedIndices(sampler, gives_batches=name == "batch_sampler", data=self._data)
        vars(loader)[name] = noted
        try:
            yield noted
        finally:
            vars(loader)[name] = sampler

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position, or why it is not known: the checkpoint may never be restored."""
        from ddp_patch.resume import state_on_this_rank, state_or_reason  # most trainings do not need them

        loader = self.loader()
        if (trainer := lightning_trainer_that_saves()) is None:
            take = state_on_this_rank if self._kind is type(loader) else self._state_as_torchdatas
            return state_or_reason(loader, partial(take, loader))
        # By itself Lightning begins the next epoch where one has ended. With the callback, it saves other states.
        take = partial(self._state_for_lightning, loader)
        return state_or_reason(loader, take, warns=not any(map(saves_positions, trainer.callbacks)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass resume where a state was taken.

        Lengths stay those of whole epochs, because callers of this protocol count from the epoch's beginning.

        Raises:
            StateError: The state is damaged, newer than this package, of another loader, or none.
        """
        from ddp_patch.resume import resume_loader  # as above

        resume_loader(self.loader(), state_dict, counts_rest=False)

    def _state_as_torchdatas(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the loader's state as torchdata has it: of the next epoch, once the loop has seen the end of one."""
        from ddp_patch.resume import state_on_this_rank  # as above

        state, dataset, passes = state_on_this_rank(loader), loader.dataset, self._passes
        if passes is None:
            return state
        has_state = not isinstance(dataset, IterableDataset) and all(hasattr(dataset, name) for name in _STATEFUL)
        if has_state and passes.is_first("no state"):
            warnings.warn(
                f"A checkpoint is saved without what {type(dataset).__name__}.state_dict() returns: the state of a "
                "patched loader is the same on every rank, for any number of workers. Let __getitem__ depend on the "
                "index and the epoch alone.",
                CannotResumeWarning,
                stacklevel=4,
            )
        return (
            begin_next_epoch(state)
            if passes.epochs.running is not None and passes.epochs.running.delivery.state is State.ENDED
            else state
        )

    def _state_for_lightning(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the loader's state; refuse one within an epoch if there is no len(): Lightning is a batch ahead."""
        from ddp_patch.resume import state_on_this_rank  # as above

        passes: Any = self._passes
        current: Any = None if passes is None else passes.epochs.running
        counts_here = current is not None and self._kind is type(loader)  # torchdata's counted what it has given
        is_within = counts_here and current.delivery.batches and current.delivery.state is not State.ENDED
        if is_within and items_left(passes, current.start) is None:
            raise StateError(
                f"The {type(loader).__name__} has no len(), so Lightning has fetched a batch ahead of the training "
                "loop, to find the end. Pass callbacks=[PatchDataLoaders()] to the Trainer, of "
                "ddp_patch.integrations.lightning; or give the dataset or sampler a __len__."
            )
        return begin_next_epoch(state_on_this_rank(loader))

    def copied(self) -> Any:
        """Return what a copy of the loader has for attributes: deep copies then attach methods of their own."""
        own: dict[str, Any] = {METHODS: self, RUNNING_ITERATOR: None}  # its workers stay with the loader
        if any(part is not None for part in (self._repeated, self._batches_of, self._monitor)):
            own[MAKE_ITERATOR] = _OfOriginal(self)
        return state_for_copies(self.loader(), **own)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loader": self._loader()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _loader=weakref.ref(state["_loader"]))
        self._attach(state["_loader"])


def _begins_at_end(position: Position | None) -> bool:
    """Return whether the next pass resumes after the last batch of its epoch, and gives none."""
    return position is not None and position.is_ended


class _OfOriginal:
    """Stands in a shallow copy, of which no iterator can be made; a deep copy has its own method instead."""

    def __init__(self, methods: OwnMethods) -> None:
        self._methods = methods

    def __call__(self) -> Any:
        raise UnsupportedLoaderError(
            "A shallow copy of this patched loader cannot be iterated: its iterators belong to the original. Iterate "
            "what patch_dataloader_to_ddp() returned, or use copy.deepcopy()."
        )

    def __reduce__(self) -> Any:
        return getattr, (self._methods, "make_iterator")


Loaders: TypeAlias = "DataLoader[Any] | Mapping[str, Loaders] | Sequence[Loaders] | None"


def check_loaders_is_patched(loaders: Loaders) -> bool:
    """Return whether every loader is sharded: by this package, by another ``DistributedSampler``, or by itself.

    Args:
        loaders: A loader, or a list, tuple or dict of loaders, nested as you like. None means no loader.

    Raises:
        NotALoaderError: Something in it is not a loader, there is no loader at all, or a list or dict is empty.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(10))
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> patched = patch_dataloader_to_ddp(loader, rank=0, num_replicas=2)
        >>> check_loaders_is_patched(patched), check_loaders_is_patched({"train": patched, "val": [loader]})
        (True, False)
    """
    return all(sharded_by(loader) is not None for _, loader in _loaders(loaders))


def assert_loaders_patched(loaders: Loaders) -> None:
    """Raise unless every loader is sharded; the error names those that are not.

    Args:
        loaders: A loader, or a list, tuple or dict of loaders, nested as you like. None means no loader.

    Raises:
        NotPatchedError: At least one loader is not sharded. It is also an ``AssertionError``.
        NotALoaderError: Something in it is not a loader, there is no loader at all, or a list or dict is empty.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> patched = patch_dataloader_to_ddp(DataLoader(range(10)), rank=0, num_replicas=2)
        >>> assert_loaders_patched({"train": patched, "val": [patched, DataLoader(range(3))]})
        Traceback (most recent call last):
        ...
        ddp_patch.errors.NotPatchedError: Every rank would get all data from 1 of 3 loaders: \
loaders['val'][1]. Pass each through patch_dataloader_to_ddp() on every rank.
        Causes and remedies: python -m ddp_patch explain NotPatchedError
    """
    found = _loaders(loaders)
    offenders = [place for place, loader in found if sharded_by(loader) is None]
    if offenders:
        raise NotPatchedError(
            f"Every rank would get all data from {len(offenders)} of {len(found)} loaders: "
            f"{', '.join('the loader' if place == place_of(()) else place for place in offenders)}. "
            "Pass each through patch_dataloader_to_ddp() on every rank."
        )


def _loaders(given: Loaders) -> list[tuple[str, DataLoader[Any]]]:
    """Return every loader, after the code that gets it, such as ``loaders['val'][1]``."""
    leaves = [(place_of(path), leaf) for path, leaf in nested(given)]
    for place, leaf in leaves:
        if is_empty(leaf):
            raise NotALoaderError(
                f"Found an empty {type(leaf).__name__} at {place}: there is nothing to check in it. Pass the loaders, "
                "or leave it out."
            )
        if leaf is not None and not is_loader(leaf):
            raise _no_loader(place, leaf)
        about_to_use(leaf)
    found = [(place, leaf) for place, leaf in leaves if leaf is not None]
    if not found:
        raise _no_loader(*leaves[0])
    return found


def _no_loader(place: str, found: object) -> NotALoaderError:
    inner = held_loaders(found)
    remedy = "Leave it out, or pass the loader itself" if inner is None else f"Pass what it wraps: {place}.{inner[0]}"
    return NotALoaderError(
        f"Found {found!r} ({type(found).__name__}) at {place} where a DataLoader or a list, tuple or dict of them was "
        f"expected. {remedy}."
    )
