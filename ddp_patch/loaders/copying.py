"""Copy a loader with other parts; find the object that repeats a sampler in a loader with one endless iterator."""

import atexit
import copy
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, TypeVar

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from ddp_patch.compat.private_packages import LIGHTNING_ARGUMENTS
from ddp_patch.compat.private_torch import (
    MAKE_ITERATOR,
    RUNNING_ITERATOR,
    RunningLoader,
    call_at_second_batch,
    has_own_iteration,
    has_own_iterators,
)
from ddp_patch.errors import UnpatchedLoaderWarning, UnsupportedLoaderError
from ddp_patch.loaders.nested_samplers import iterated_by
from ddp_patch.loaders.recognition import require_loader
from ddp_patch.validation import check_flag

L = TypeVar("L", bound=DataLoader[Any])


_HOLD = frozenset({"sampler", "batch_sampler"})


def repeater_in(loader: Any) -> object | None:
    """Return the object that repeats a loader's sampler or batch sampler forever; None in ordinary loaders.

    In an ordinary loader, a sampler that repeats another is an endless stream, without epochs. An iterable dataset is
    read once, whatever repeats its indices.
    """
    kind = type(loader)
    if not has_own_iteration(kind) or has_own_iterators(kind) or isinstance(loader.dataset, IterableDataset):
        return None
    outer = iterated_by(loader)
    return outer if _repeats(outer) else None


def repeated_in(repeater: object) -> Any:
    """Return the sampler that a repeater repeats."""
    (repeated,) = vars(repeater).values()
    return repeated


def with_repeated(repeater: Any, sampler: object) -> Any:
    """Return a copy of a repeater that repeats another sampler."""
    clone = copy.copy(repeater)
    vars(clone).update(dict.fromkeys(vars(clone), sampler))
    return clone


def _repeats(sampler: object) -> bool:
    """Return whether a sampler has one attribute, which is a sampler, has no length, and repeats the inner sampler."""
    held = getattr(sampler, "__dict__", {})
    if len(held) != 1 or not held.keys() <= _HOLD or hasattr(type(sampler), "__len__") or None in held.values():
        return False
    try:
        return list(islice(with_repeated(sampler, _Trial([[0], [1]])), 5)) == [[0], [1], [0], [1], [0]]
    except Exception:  # noqa: BLE001 - the user's code, tried with a sampler that it was not made for
        return False


class _Trial(list[list[int]]):
    """A sampler for trying a copy of a possible repeater; raises an error if iterated without end."""

    begun = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.begun += 1
        if self.begun > len(self) + 1:
            raise RuntimeError("it has repeated enough")
        return super().__iter__()


# The attributes in which a patched loader stores methods that its class lacks, and the object they belong to.
COPY, METHODS = "__getstate__", "_ddp_patch_methods"
OWN_METHODS: Final = frozenset({MAKE_ITERATOR, "state_dict", "load_state_dict", COPY, METHODS})

# A class that defines one of these copies its loaders in its own way.
_COPYING = ("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")

_DATA_RELATED = frozenset({"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"})


def extract_loader_parameters(loader: DataLoader[Any], ignore_data_related_parameters: bool = False) -> dict[str, Any]:
    """Return the arguments that a loader was constructed with, by name.

    The names are read from the signature of the loader's class, so arguments of a newer torch or a subclass are
    included. ``shuffle`` is missing: a DataLoader turns it into a sampler and forgets it.

    Args:
        loader: Any DataLoader or subclass.
        ignore_data_related_parameters: Leave out ``dataset``, ``batch_size``, ``shuffle``, ``sampler``,
            ``batch_sampler`` and ``drop_last``. Pass the rest to a loader of other data.

    Returns:
        Names and values, in the order of the signature.

    Raises:
        NotALoaderError: ``loader`` is not a DataLoader.
        InvalidOptionError: ``ignore_data_related_parameters`` is neither True nor False.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(10), batch_size=4, timeout=0, pin_memory=True)
        >>> parameters = extract_loader_parameters(loader, ignore_data_related_parameters=True)
        >>> parameters["pin_memory"], "batch_size" in parameters
        (True, False)
        >>> other = DataLoader(range(20), batch_size=2, **parameters)
    """
    require_loader("extract_loader_parameters", loader, wrappers=False)
    check_flag("ignore_data_related_parameters", ignore_data_related_parameters)
    left_out = _DATA_RELATED if ignore_data_related_parameters else frozenset()
    names = [name for name in _signature(loader.__class__) if name not in left_out]
    return {name: getattr(loader, name) for name in names if hasattr(loader, name)}


def _signature(loader_type: type) -> list[str]:
    """Return the names of the constructor's arguments, also of arguments that ``*args`` or ``**kwargs`` pass on."""
    names: dict[str, None] = {}
    for base in loader_type.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        variadic = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        names |= dict.fromkeys(p.name for p in parameters if p not in variadic)
        if not variadic:
            break
    return list(names)


def copies_plainly(kind: type) -> bool:
    """Return whether loaders of a class are copied and pickled as torch's are."""
    return all(getattr(kind, name, None) is getattr(DataLoader, name, None) for name in _COPYING)


def state_for_copies(loader: Any, **more: Any) -> Any:
    """Return the attributes of a copy of a loader: the loader's, without methods of this package, and more."""
    state: Any = object.__getstate__(loader)
    attributes, *slots = state if isinstance(state, tuple) else (state,)
    kept = {name: value for name, value in attributes.items() if name not in OWN_METHODS} | more
    return (kept, *slots) if slots else kept


def copy_loader(loader: L, **replaced: Any) -> L:
    """Return a shallow copy of the loader, with some attributes replaced.

    The copy shares dataset, samplers and functions with the loader. Running iterators (``persistent_workers`` keeps
    one, and so may a user) stay in the loader; the copy has None instead.

    Raises:
        UnsupportedLoaderError: The loader's class forbids copying, or does not let an attribute be replaced.
    """
    try:
        clone = copy.copy(loader)
    except Exception as error:
        raise UnsupportedLoaderError(
            f"{type(loader).__name__} cannot be patched: copying it raised {type(error).__name__}: {error}. Let its "
            "__copy__ or __reduce_ex__ make a shallow copy, or build the loader with a DDPSamplerWrapper as its "
            "sampler."
        ) from error
    return change_loader(clone, **replaced)


def change_loader(loader: L, **replaced: Any) -> L:
    """Replace attributes of the loader itself as ``copy_loader`` does in a copy, and return it.

    The loader's running iterators are removed.

    Raises:
        UnsupportedLoaderError: The loader's class does not let an attribute be replaced. Other attributes are replaced
            by then.
    """
    running = [name for name, value in vars(loader).items() if isinstance(value, RunningLoader)]
    # Avoid DataLoader.__setattr__, which refuses to change a sampler after construction.
    vars(loader).update({**dict.fromkeys([RUNNING_ITERATOR, *running]), **replaced})
    for attribute in LIGHTNING_ARGUMENTS & vars(loader).keys():
        del vars(loader)[attribute]
    for attribute, value in replaced.items():
        if getattr(loader, attribute) is not value:
            raise UnsupportedLoaderError(
                f"{type(loader).__name__} cannot be patched: its class computes the attribute {attribute!r}, so no "
                "sharded one can replace it. Store it as DataLoader does, or build the loader with a "
                "DDPSamplerWrapper as its sampler."
            )
    return loader


class _Original:
    """Makes the iterators of a loader that has a patched copy, and warns once, because the copy may be meant.

    The object removes itself after the warning, and copies of the loader do not have it.
    """

    def __init__(self, loader: DataLoader[Any], patched_at: str, is_copy_used: Callable[[], bool]) -> None:
        self._loader, self._patched_at, self._is_copy_used = weakref.ref(loader), patched_at, is_copy_used
        vars(loader).update({MAKE_ITERATOR: self, COPY: self._state})

    def _state(self) -> Any:
        return state_for_copies(self._loader())

    def __call__(self) -> Any:
        loader = self._loader()
        iterator = getattr(type(loader), MAKE_ITERATOR)(loader)
        if isinstance(iterator, RunningLoader):
            call_at_second_batch(iterator, self._tell)
        return iterator

    def _tell(self) -> None:
        loader, ranks = self._loader(), dist.get_world_size() if dist.is_initialized() else 1
        if loader is None or vars(loader).get(MAKE_ITERATOR) is not self:
            return
        for name in (MAKE_ITERATOR, COPY):
            del vars(loader)[name]
        if ranks > 1 and not self._is_copy_used():
            warnings.warn(
                f"This {type(loader).__name__} gives each of {ranks} ranks all of its data: patch_dataloader_to_ddp(), "
                f"called at {self._patched_at}, has returned a patched copy and left this one as it is. If the copy "
                "was thrown away, write loader = patch_dataloader_to_ddp(loader) there. If this rank is to read "
                "everything, as to validate on rank 0 alone, ignore this: it comes once.",
                UnpatchedLoaderWarning,
                stacklevel=4,
            )


def notice_if_iterated(loader: DataLoader[Any], patched_at: str, is_copy_used: Callable[[], bool]) -> None:
    """Warn once if a loader that has a patched copy is iterated on several ranks for more than one batch.

    Args:
        loader: The loader. Nothing happens if its class has its own way of copying.
        patched_at: Where the loader was patched, for the warning.
        is_copy_used: Returns whether the copy has been used. Then this loader is iterated on purpose.
    """
    if dist.is_initialized() and dist.get_world_size() > 1 and copies_plainly(type(loader)):
        _Original(loader, patched_at, is_copy_used)


def notice_if_never_drawn(loader: DataLoader[Any], patched_at: str, passes_begun: Callable[[], int]) -> None:
    """Warn when this process exits if the class of a patched loader has its own iteration, and drew no index.

    Such a class may read the dataset without its samplers. What it reads cannot be seen; that nothing was drawn can.

    Args:
        loader: The patched loader. It is not kept.
        patched_at: Where it was patched, for the warning.
        passes_begun: Returns how many passes over the sharded sampler have begun.
    """
    kind = type(loader)
    if has_own_iteration(kind) and not isinstance(loader.dataset, IterableDataset):
        _may_draw_nothing.append((kind.__name__, type(loader.dataset).__name__, patched_at, passes_begun))


# Loaders whose class has its own iteration: the class, the dataset, where it was patched, and what counts its passes.
_may_draw_nothing: list[tuple[str, str, str, Callable[[], int]]] = []


@atexit.register
def warn_of_what_drew_nothing() -> None:
    """Warn of the loaders that ``notice_if_never_drawn`` has noted and that have drawn no index until now."""
    while _may_draw_nothing:
        name, dataset, patched_at, passes_begun = _may_draw_nothing.pop()
        if not passes_begun():
            warnings.warn(
                f"{name}, patched at {patched_at}, has drawn no index until this process exits: nothing iterated it, "
                f"or its own __iter__ reads {dataset} without loader.sampler and loader.batch_sampler, so every rank "
                "got all of it. Let it draw from one of these, or from super().__iter__(); or use a DataLoader.",
                UnpatchedLoaderWarning,
                stacklevel=2,
            )
