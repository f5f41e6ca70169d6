"""The type and the methods of patched loaders, and the check that finds unpatched ones."""

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
from ddp_patch.loaders.nested_samplers import steps_of
from ddp_patch.loaders.overlap import NotedIndices
from ddp_patch.loaders.recognition import is_loader, sharded_by
from ddp_patch.ranks.pass_facts import State
from ddp_patch.ranks.pass_monitor import PassMonitor
from ddp_patch.sharding.batches_by_value import by_value
from ddp_patch.sharding.iterators import CountedIterator, EmptyIterator, RepeatedPasses, WatchedIterator
from ddp_patch.sharding.loader_passes import Passes, items_left
from ddp_patch.sharding.sampler import EpochSampler
from ddp_patch.sharding.saved_state import Position, begin_next_epoch
from ddp_patch.walks import is_empty, nested, place_of

T_co = TypeVar("T_co", covariant=True)


class _TypeOfPatched(type):
    """A metaclass whose ``isinstance`` says whether a loader is patched, because a patched loader keeps its class."""

    if not TYPE_CHECKING:  # type checkers narrow types by the usual ``isinstance`` alone

        def __instancecheck__(cls, instance):
            if cls is not PatchedLoader:
                return super().__instancecheck__(instance)
            # A loader around a wrapper that the user made by hand has no set_epoch.
            is_loader = isinstance(instance, DataLoader) and callable(getattr(instance, "set_epoch", None))
            return is_loader and isinstance(sharded_by(instance), EpochSampler)


class PatchedLoader(DataLoader[T_co], metaclass=_TypeOfPatched):
    """A loader that this package has patched: a ``DataLoader`` with ``set_epoch``.

    This class is a type for annotations. At run time a patched loader has the class of the unpatched loader, and
    ``isinstance(loader, PatchedLoader)`` says whether a loader is patched. If your loader's class has attributes of its
    own, ``assert isinstance(loader, YourLoader)`` shows these attributes to a type checker.

    In a single process, ``patch_dataloader_to_ddp`` warns and returns the loader unchanged, without ``set_epoch``.

    Attributes:
        sampler: The sampler that shards; its ``set_epoch`` is the loader's.

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

    if not TYPE_CHECKING:  # type checkers do not narrow to a class that cannot be constructed

        def __new__(cls, *args, **options):
            """Raise a TypeError: the class is for annotations."""
            raise TypeError("PatchedLoader is a type for annotations. Call patch_dataloader_to_ddp(loader) to get one.")

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next epoch. The call is optional: each pass begins the next epoch by itself."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, by torch's Stateful protocol; see also ``loader_state``."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass resume where a state was saved; see also ``restore_loader``."""


_STATEFUL = ("state_dict", "load_state_dict")


class OwnMethods:
    """The methods of one patched loader, stored as the loader's attributes, because its class is not changed.

    The loader's iterators count the batches that they yield. ``state_dict`` and ``load_state_dict`` save and restore
    the loader's position. A deep copy of the loader and a pickled one have methods of their own. A shallow copy has
    none, because it would get the iterators of the original.

    Args:
        loader: The loader. Only a weak reference is kept, because the loader refers to this object.
        passes: The passes over the loader; None if something else shards the loader.
        repeated: The loader's one iterator for all epochs, if it has one.
        batches_of: Turns an iterator of the loader's class into the batches of a pass. Default: the iterator's own
            batches.
        monitor: Compares the passes over a loader that something else shards; None if ``passes`` compares them, or
            nothing does.
        data: A name of the data, if a sampler shards them: then the sampler's indices are compared, not the batches.
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
        # The batches of a loader with its own way of copying are not counted.
        is_torchs = passes is not None and copies_plainly(kind)
        # torchdata's loader counts the batches of one rank. Use torch's iterators and this package's position instead.
        self._kind = DataLoader if is_torchs and is_torchdatas(kind) else kind
        self._counts = repeated is not None or batches_of is not None or (is_torchs and not has_own_iteration(kind))
        makes_own = repeated is not None or has_own_iterators(self._kind)
        self._is_torchs = is_torchs and not makes_own
        self._takes_notes = self._is_torchs and isinstance(loader.dataset, IterableDataset)
        in_order = loader.num_workers == 0 or getattr(loader, "in_order", True)
        if self._kind is kind:
            self._is_resumable = self._counts and in_order and not any(hasattr(loader, name) for name in _STATEFUL)
        else:  # torchdata's methods need torchdata's iterators
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
            UnsupportedLoaderError: The loader is gone, and only a shallow copy or one of its methods is left.
        """
        loader = self._loader()
        if loader is None:
            raise UnsupportedLoaderError(
                "A patched loader was used after the loader itself is gone, by a method or a shallow copy of it: its "
                "iterators and methods were that loader's. Keep what patch_dataloader_to_ddp() returned, and use that."
            )
        return loader

    def make_iterator(self) -> Any:
        """Return an iterator of the loader that counts the batches that it yields."""
        loader, passes = self.loader(), self._passes
        with nullcontext() if passes is None else passes.iterator_context(loader):
            if self._repeated is not None:
                return self._repeated.begin_anew(loader)
            if passes is not None and self._is_torchs and _begins_at_end(passes.epochs.position):
                return EmptyIterator(loader, passes, reaches_loop=self._counts)
            counts = self._counts and (self._is_torchs or self._batches_of is not None)
            counting = nullcontext() if passes is None else passes.epochs.counting(counts)
            with counting, self._collating(loader), self._noting(loader) as noted:
                # Call the class's method: the loader's attribute of the same name is this method.
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
        """While entered, let a new iterator's workers send small batches by value, each with the worker's notes."""
        if self._passes is None or "collate_fn" not in vars(loader):
            return nullcontext()
        noted = self._passes.noting(loader.collate_fn) if self._takes_notes else loader.collate_fn
        return patch.object(loader, "collate_fn", by_value(noted) if loader.num_workers > 0 else noted)

    @contextmanager
    def _noting(self, loader: DataLoader[Any]) -> Iterator[NotedIndices | None]:
        """While entered, record the indices that a new iterator draws, if a sampler shards them; yield the recorder."""
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
        """Return the loader's position; or a placeholder with the reason why there is none."""
        from ddp_patch.resume import state_on_this_rank, state_or_reason  # few trainings need these functions

        loader = self.loader()
        if (trainer := lightning_trainer_that_saves()) is None:
            take = state_on_this_rank if self._kind is type(loader) else self._state_as_torchdatas
            return state_or_reason(loader, partial(take, loader))
        # Lightning itself begins the next epoch after one has ended. With the callback, it saves the callback's states.
        take = partial(self._state_for_lightning, loader)
        return state_or_reason(loader, take, warns=not any(map(saves_positions, trainer.callbacks)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass resume where a state was saved.

        ``len()`` stays that of a whole epoch, because callers of this protocol count from the epoch's beginning.

        Raises:
            StateError: The state is damaged, newer than this package, of another loader, or a placeholder.
        """
        from ddp_patch.resume import resume_loader

        resume_loader(self.loader(), state_dict, counts_rest=False)

    def _state_as_torchdatas(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the loader's state as torchdata does: of the next epoch, once the loop has seen an epoch's end."""
        from ddp_patch.resume import state_on_this_rank

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
        """Return the loader's state; refuse a state within an epoch without len(), where Lightning is a batch ahead."""
        from ddp_patch.resume import state_on_this_rank

        passes: Any = self._passes
        current: Any = None if passes is None else passes.epochs.running
        counts_here = current is not None and self._kind is type(loader)  # torchdata's loader counts its own batches
        is_within = counts_here and current.delivery.batches and current.delivery.state is not State.ENDED
        if is_within and items_left(passes, current.start) is None:
            raise StateError(
                f"The {type(loader).__name__} has no len(), so Lightning has fetched a batch ahead of the training "
                "loop, to find the end. Pass callbacks=[PatchDataLoaders()] to the Trainer, of "
                "ddp_patch.integrations.lightning; or give the dataset or sampler a __len__."
            )
        return begin_next_epoch(state_on_this_rank(loader))

    def copied(self) -> Any:
        """Return the attributes of a copy of the loader; a deep copy then attaches methods of its own."""
        own: dict[str, Any] = {METHODS: self, RUNNING_ITERATOR: None}  # the workers stay with the loader
        if any(part is not None for part in (self._repeated, self._batches_of, self._monitor)):
            own[MAKE_ITERATOR] = _OfOriginal(self)
        return state_for_copies(self.loader(), **own)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loader": self._loader()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _loader=weakref.ref(state["_loader"]))
        self._attach(state["_loader"])


def _begins_at_end(position: Position | None) -> bool:
    """Return whether the next pass resumes after the last batch of its epoch, so it yields none."""
    return position is not None and position.is_ended


class _OfOriginal:
    """The iterator method of a shallow copy, which cannot be iterated; a deep copy has a method of its own."""

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
        NotALoaderError: ``loaders`` has something that is not a loader, no loader at all, or an empty list or dict.

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
    """Raise an error unless every loader is sharded; the error names the unsharded loaders.

    Args:
        loaders: A loader, or a list, tuple or dict of loaders, nested as you like. None means no loader.

    Raises:
        NotPatchedError: At least one loader is not sharded. The error is also an ``AssertionError``.
        NotALoaderError: ``loaders`` has something that is not a loader, no loader at all, or an empty list or dict.

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
    """Return every loader, each after the code that gets it, such as ``loaders['val'][1]``."""
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
