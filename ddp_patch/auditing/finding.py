"""Find the loaders of a target such as ``package.module:name`` or ``file.py:name``."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader

from ddp_patch.auditing.ranks import Factory, made_by, name_of
from ddp_patch.errors import InvalidOptionError, NotALoaderError
from ddp_patch.loaders.hooks import from_here, made
from ddp_patch.orders.random_states import look
from ddp_patch.ranks.claims import unwatched
from ddp_patch.walks import KeyPath, is_empty, nested


def find(target: str) -> dict[str, DataLoader[Any] | Factory]:
    """Return the loaders and factories that a target names, by their places, such as ``loaders.train``.

    A target names a loader, a dict or list of loaders, or a function. A function that needs two arguments, or whose
    first two are ``rank`` and ``world_size``, is a factory of a rank's loader or loaders. A function without required
    arguments is called, and returns a loader, a factory, or a dict or list of these.

    Args:
        target: ``package.module:name`` or ``path/to/file.py:name``.

    Raises:
        InvalidOptionError: The target does not exist, or two loaders have the same place.
        NotALoaderError: The target is neither a loader nor a factory, or has none in it.

    Examples:
        >>> find("os:sep")
        Traceback (most recent call last):
        ...
        ddp_patch.errors.NotALoaderError: audit needs a DataLoader, a function make() or make(rank, world_size) that \
returns one, or a dict or list of these, and sep is '/' (str). Pass the finished loader itself.
        Causes and remedies: python -m ddp_patch explain NotALoaderError
    """
    name, found = look_up(target)
    return leaves_of(found, name)


def leaves_of(found: Any, name: str = "") -> dict[str, DataLoader[Any] | Factory]:
    """Return the loaders and factories in an object, or the object itself, by their places.

    Args:
        found: A loader, a factory, a function that returns loaders, or a dict or list of these.
        name: How each place begins; empty for a single loader.

    Raises:
        InvalidOptionError: Two loaders have the same place.
        NotALoaderError: The object is neither a loader nor a factory, or has none in it.

    Examples:
        >>> list(leaves_of({"train": DataLoader(range(2)), "val": [DataLoader(range(3))]}))
        ['train', 'val[0]']
    """
    leaves: dict[str, DataLoader[Any] | Factory] = {}
    for place, leaf in _leaves(found, name):
        if place in leaves:
            raise InvalidOptionError(f"Two loaders have one place, {place}. Give the keys of the dicts other names.")
        leaves[place] = leaf
    if not leaves:
        is_held = isinstance(found, Mapping | Sequence)
        empty = f"holds no loader: it is {found!r}" if is_held else "returned no loader"
        raise NotALoaderError(f"{name or 'What audit was given'} {empty}. Pass at least one.")
    return leaves


def line_of(found: DataLoader[Any] | Factory) -> str:
    """Return the file and line that constructed a loader, or where its factory begins; an empty text if unknown.

    Examples:
        >>> line_of(leaves_of).rpartition(":")[0].endswith("finding.py")
        True
    """
    if isinstance(found, DataLoader):
        where = made(found)
        return "" if where is None else from_here(where.place)
    code = getattr(inspect.unwrap(found), "__code__", None)
    return "" if code is None else from_here(f"{code.co_filename}:{code.co_firstlineno}")


def look_up(target: str) -> tuple[str, Any]:
    """Return the name in a target, and the object of this name.

    Args:
        target: ``package.module:name`` or ``path/to/file.py:name``; a name may have parts, ``loaders.train``.

    Raises:
        InvalidOptionError: The target does not exist.

    Examples:
        >>> look_up("math:pi")
        ('pi', 3.141592653589793)
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise InvalidOptionError(
            f"{target!r} does not say where to look. Pass package.module:name or path/to/file.py:name."
        )
    found: Any = _module(place)
    here = place
    for part in name.split("."):
        held = found if isinstance(found, Mapping) else getattr(found, "__dict__", {})
        if part not in held and not hasattr(found, part):
            names = [str(each) for each in held if not str(each).startswith("_")]
            raise InvalidOptionError(f"{here} has no {part!r}. It has: {', '.join(names) or 'nothing'}.")
        found = held[part] if part in held else getattr(found, part)
        here += f"{'.' if ':' in here else ':'}{part}"
    return name, found


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _module_of_file(Path(place))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place + ".").startswith(error.name + "."):
            raise  # the module exists, but a module that it imports does not
        raise InvalidOptionError(
            f"There is no module {place!r} to import from {Path.cwd()}. Pass package.module:name or "
            "path/to/file.py:name."
        ) from error


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidOptionError(f"There is no file {path}. Pass package.module:name or path/to/file.py:name.")
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path.absolute()):
        return known  # a file with two targets is run only once
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InvalidOptionError(f"{path} cannot be imported as a module. Pass a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # pickle and other processes look up its definitions there
    sys.path.insert(0, str(path.parent))  # like `python file.py`
    spec.loader.exec_module(module)
    return module


# The seed of the random states while the user's functions are called. The global states are not changed.
_SEED = 20_000


def _part(make: Callable[[int, int], Any], path: KeyPath) -> Factory:
    """Return a factory of a single loader, which these keys lead to in the return value of a factory of several."""

    def part(rank: int, world_size: int) -> Any:
        return reduce(getitem, path, make(rank, world_size))

    part.__name__ = _written(path, name_of(make))
    part.__wrapped__ = make  # type: ignore[attr-defined] # a function may have any attribute
    return part


def _leaves(found: Any, place: str) -> Iterator[tuple[str, DataLoader[Any] | Factory]]:
    """Yield the loaders and factories in an object, or the object itself, each after its place."""
    for keys, leaf in _nested(found):
        here = _written(keys, place)
        if isinstance(leaf, DataLoader):
            yield here, leaf
        elif callable(leaf) and _is_for_ranks(leaf):
            for inner in _parts(leaf):
                yield _written(inner, here), _part(leaf, inner) if inner else leaf
        elif callable(leaf) and _takes(leaf, 0):
            with look(seed=_SEED), unwatched():
                returned = leaf()
            yield from _leaves(returned, here)
        elif callable(leaf):
            raise InvalidOptionError(
                f"audit calls a factory as make(rank, world_size) for every rank, and {name_of(leaf)} lacks an "
                "argument or needs one more. Give it these two arguments, or pass the finished loader itself."
            )
        else:
            raise NotALoaderError(
                f"audit needs a DataLoader, a function make() or make(rank, world_size) that returns one, or a dict or "
                f"list of these, and {f'{here} is' if here else 'got'} {leaf!r} ({type(leaf).__name__}). Pass the "
                "finished loader itself."
            )


def _parts(make: Callable[[int, int], Any]) -> list[KeyPath]:
    """Return the keys that lead to each loader in a factory's return value; no keys if it returns a single loader.

    The factory is called for one process. If it raises an error, it counts as returning one loader, and the audit then
    reports the error for each rank: the factory may need a process group, which only real ranks have.
    """
    try:
        with look(seed=_SEED), unwatched():
            return [path for path, _ in _nested(made_by(make, 0, 1))]
    except Exception:  # noqa: BLE001 - the user's own error is raised again when the loaders are made
        return [()]


def _nested(found: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the elements of a nest, without empty containers, each after the keys that lead to it."""
    return ((path, leaf) for path, leaf in nested(found) if not is_empty(leaf))


def _written(path: KeyPath, place: str = "") -> str:
    """Return a place in words, from the place of a nest and the keys within it."""
    for key in path:
        place += f"[{key}]" if isinstance(key, int) else f".{key}" if place else str(key)
    return place


def _is_for_ranks(function: Any) -> bool:
    """Return whether a function is ``make(rank, world_size)``: it needs two arguments, or has these arguments."""
    if not _takes(function, 2):
        return False
    return not _takes(function, 0) or list(inspect.signature(function).parameters)[:2] == ["rank", "world_size"]


def _takes(function: Any, arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(arguments))
    except (TypeError, ValueError):
        return False
    return True
