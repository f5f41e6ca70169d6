"""Walk through the attributes of objects, through lists and dicts, and through nests of loaders."""

import copy
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import reduce
from itertools import islice
from operator import getitem
from types import MemberDescriptorType
from typing import Any, Final, TypeAlias

from torch.utils.data import DataLoader

from ddp_patch.errors import NotALoaderError

# How many elements of a container are read.
LOOKED_AT: Final = 32


def stored(holder: object) -> dict[str, Any]:
    """Return the attributes that an object stores, in its ``__dict__`` or in slots.

    Properties are left out: they run the user's code, which may take long, raise or change something.
    """
    kept = dict(getattr(holder, "__dict__", {}))
    for kind in type(holder).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType) and kind.__module__ != "builtins":
                try:
                    kept[name] = slot.__get__(holder)
                except AttributeError:
                    continue  # an empty slot
    return kept


def elements(value: Any) -> Collection[Any]:
    """Return the elements of a list, tuple or set, or the values of a dict; none of anything else."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()


def first_parts(value: Any) -> list[Any]:
    """Return a value, with its first elements if it is a container."""
    return [value, *islice(elements(value), LOOKED_AT)]


def held(holder: object, is_wanted: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the wanted objects that an object stores as attributes, or in lists, tuples, sets and dicts.

    A container may be as long as a dataset. So it is read to its end only if a wanted object is among its first
    elements.
    """
    for value in stored(holder).values():
        if is_wanted(value):
            yield value
        if any(map(is_wanted, islice(elements(value), LOOKED_AT))):
            yield from filter(is_wanted, elements(value))


def walk(start: object, parts: Callable[[Any], Iterable[object]]) -> Iterator[Any]:
    """Yield an object and all objects that it leads to, each once, the nearest first; None is left out.

    Args:
        start: The object.
        parts: Returns what an object leads to.

    Examples:
        >>> list(walk("abc", lambda text: [text[1:], text[:-1]] if text else []))
        ['abc', 'bc', 'ab', 'c', 'b', 'a', '']
    """
    waiting, seen = [start], set[int]()
    while waiting:
        found = waiting.pop(0)
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            yield found
            waiting += parts(found)


# An object's address in memory, which differs between ranks.
_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")

# The keys that lead to a loader.
KeyPath: TypeAlias = tuple[Any, ...]


def nested(found: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield each element of nested dicts, lists and tuples, after the keys that lead to it; also empty containers.

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
    """Return whether an object is an empty dict, list or tuple."""
    return _is_container(found) and not found


def _is_container(found: object) -> bool:
    return isinstance(found, Mapping | list | tuple) and not isinstance(found, DataLoader)


def place_of(path: KeyPath) -> str:
    """Return the code that gets the element of ``loaders`` at these keys.

    Examples:
        >>> place_of(("val", 1))
        "loaders['val'][1]"
    """
    return "loaders" + "".join(f"[{_ADDRESS.sub('', repr(key))}]" for key in path)


def _not_copied(nest: object, why: str) -> NotALoaderError:
    return NotALoaderError(
        f"The {type(nest).__name__} of loaders cannot be returned with patched ones in it: {why}. Pass a list, tuple "
        "or dict of the loaders."
    )


class Nest:
    """Loaders in nested lists, tuples and dicts, or a single one.

    Args:
        given: The nest. None in it means no loader.

    Attributes:
        loaders: Each loader once, by the code that gets its first appearance; by an empty text for a single loader.
        described: The structure in words, equal for nests of equal structure; empty for a single loader.

    Raises:
        NotALoaderError: The nest cannot be copied, or the same code would get two loaders.

    Examples:
        >>> nest = Nest({"train": 1, "val": [2, None, 1]})
        >>> nest.loaders, nest.with_replaced([10, 20])
        ({"loaders['train']": 1, "loaders['val'][0]": 2}, {'train': 10, 'val': [20, None, 10]})
    """

    def __init__(self, given: Any) -> None:
        self._given, self._leaves = given, list(nested(given))
        first = {id(leaf): path for path, leaf in reversed(self._leaves) if not _is_no_loader(path, leaf)}
        self.loaders: Mapping[str, Any] = {
            place_of(path) if path else "": leaf for path, leaf in self._leaves if first.get(id(leaf)) == path
        }
        if len(self.loaders) < len(first):
            raise NotALoaderError(
                f"Several loaders would be called the same in errors ({', '.join(self.loaders)}), because different "
                "keys have the same repr(). Use strings as keys."
            )
        described = [_described(path, leaf, first.get(id(leaf))) for path, leaf in self._leaves]
        self.described: str = "" if self._leaves[0][0] == () and first else ", ".join(described)
        self.with_replaced(self.loaders.values())  # raises an error if it cannot be copied

    def with_replaced(self, new: Iterable[Any]) -> Any:
        """Return a copy of the nest, of the same classes, with new loaders, which come in the order of ``loaders``.

        Raises:
            NotALoaderError: A dict, list or tuple of the nest cannot be copied.
        """
        replaced = {id(old): each for old, each in zip(self.loaders.values(), new, strict=True)}
        keys = {id(key): key for path, _ in self._leaves for key in path}  # the copy of a key may not equal the key
        try:
            made = copy.deepcopy(self._given, keys | replaced)
            for inner in {path[:length] for path, _ in self._leaves for length in range(len(path))}:
                given, clone = (reduce(getitem, inner, part) for part in (self._given, made))
                if getattr(given, "__dict__", None) is given:  # its items are its attributes, too, except in a copy
                    clone.__dict__ = clone
            found = dict(nested(made))
        except Exception as error:
            raise _not_copied(self._given, f"copying it raised {type(error).__name__}: {error}") from error
        if any(found.get(path) is not replaced[id(leaf)] for path, leaf in self._leaves if id(leaf) in replaced):
            raise _not_copied(self._given, "a copy of it has other elements")
        return made


def _is_no_loader(path: KeyPath, leaf: object) -> bool:
    """Return whether a leaf is an empty container, or None in a container."""
    return is_empty(leaf) or (leaf is None and path != ())


def _described(path: KeyPath, leaf: object, first: KeyPath | None) -> str:
    place = place_of(path)
    if first is None:
        return f"{place} ({'None' if leaf is None else 'empty'})"
    return place if first == path else f"{place} (the same as {place_of(first)})"
