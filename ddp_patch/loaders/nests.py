"""Walk and copy lists, tuples and dicts of loaders, and name the loaders in errors."""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from typing import Any, TypeAlias, TypeVar

from torch.utils.data import DataLoader

from ddp_patch.errors import DDPPatchError, NotALoaderError, message_of

__all__ = ["Keys", "copied", "is_empty", "nested", "place_of", "told_at"]

N = TypeVar("N")

# An object's address in memory, which differs between ranks.
_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")

# The keys that lead to a loader.
Keys: TypeAlias = tuple[Any, ...]


def nested(found: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield everything in nested dicts, lists and tuples with the keys that lead to it, also what is empty.

    Examples:
        >>> list(nested({"train": 1, "val": [2, ()]}))
        [(('train',), 1), (('val', 0), 2), (('val', 1), ())]
    """
    if not _is_container(found) or is_empty(found):
        yield path, found
        return
    for key, value in found.items() if isinstance(found, Mapping) else enumerate(found):
        yield from nested(value, (*path, key))


def is_empty(found: object) -> bool:
    """Return whether it is an empty dict, list or tuple."""
    return _is_container(found) and not found


def _is_container(found: object) -> bool:
    return isinstance(found, Mapping | list | tuple) and not isinstance(found, DataLoader)


def place_of(path: Keys, root: str = "loaders") -> str:
    """Return the code that gets the element at these keys.

    Examples:
        >>> place_of(("val", 1))
        "loaders['val'][1]"
    """
    return root + "".join(f"[{_ADDRESS.sub('', repr(key))}]" for key in path)


@contextmanager
def told_at(place: str) -> Iterator[None]:
    """Make errors name the loader that they are about; ``place`` is empty for a single one."""
    try:
        yield
    except DDPPatchError as error:
        if place:
            error.args = (f"{place}: {message_of(error)}",)
        raise


def copied(nest: N, leaves: Sequence[tuple[Keys, Any]], new: Mapping[int, Any]) -> N:
    """Return a copy of nested lists, tuples and dicts, of the same classes, with some elements replaced.

    Args:
        nest: The lists, tuples and dicts.
        leaves: What ``nested`` found in them.
        new: What replaces an element, by that element's id.

    Raises:
        NotALoaderError: One of its dicts, lists or tuples cannot be copied so.
    """
    keys = {id(key): key for path, _ in leaves for key in path}  # a copy of a key may not equal it
    try:
        made = copy.deepcopy(nest, keys | dict(new))
        for inner in {path[:length] for path, _ in leaves for length in range(len(path))}:
            _mirror(_at(nest, inner), _at(made, inner))
        found = dict(nested(made))
    except Exception as error:
        raise _not_copied(nest, f"copying it raised {type(error).__name__}: {error}") from error
    if any(found.get(path) is not new[id(leaf)] for path, leaf in leaves if id(leaf) in new):
        raise _not_copied(nest, "a copy of it has other elements")
    return made


def _at(nest: Any, path: Keys) -> Any:
    return reduce(getitem, path, nest)


def _mirror(given: Any, made: Any) -> None:
    """Make the copy of a dict whose attributes are its items such a dict again; copying alone does not."""
    if getattr(given, "__dict__", None) is given:
        made.__dict__ = made


def _not_copied(nest: object, why: str) -> NotALoaderError:
    return NotALoaderError(
        f"The {type(nest).__name__} of loaders cannot be returned with patched ones in it: {why}. Pass a list, tuple "
        "or dict of the loaders."
    )
