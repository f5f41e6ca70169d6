"""From ``package.module:name``, or ``file.py:name``, to the loaders that stand there."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader

from ddp_patch.auditing.subject import Factory
from ddp_patch.errors import InvalidOptionError, NotALoaderError

__all__ = ["find", "look_up"]


def find(target: str) -> dict[str, DataLoader[Any] | Factory]:
    """Return what a target names, by place: a loader, a factory, or each of a dict or list of them.

    A function that can be called with two arguments is a factory of ranks' loaders, ``make(rank, world_size)``; one
    that can be called with none returns what is audited.

    Args:
        target: ``package.module:name`` or ``path/to/file.py:name``.

    Raises:
        InvalidOptionError: There is no such thing.
        NotALoaderError: It is neither a loader nor a factory.

    Examples:
        >>> find("os:sep")
        Traceback (most recent call last):
        ...
        ddp_patch.errors.NotALoaderError: sep is '/' (str), which is no DataLoader, no list or dict of them, and no \
function make() or make(rank, world_size) that returns one. Name one of these.
    """
    name, found = look_up(target)
    return _leaves(found, name)


def look_up(target: str) -> tuple[str, Any]:
    """Return the name in a target, and what it names.

    Args:
        target: ``package.module:name`` or ``path/to/file.py:name``; a name may have parts, ``loaders.train``.

    Raises:
        InvalidOptionError: There is no such thing.

    Examples:
        >>> look_up("math:pi")
        ('pi', 3.141592653589793)
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise InvalidOptionError(
            f"{target!r} does not say where to look. Pass package.module:name or path/to/file.py:name."
        )
    module = _module(place)
    found: Any = module
    for part in name.split("."):
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            raise InvalidOptionError(
                f"{place} has no {name!r}. It has: {', '.join(n for n in vars(module) if n[0] != '_') or 'nothing'}."
            )
    return name, found


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _module_of_file(Path(place))
    sys.path.insert(0, "")  # as `python -m` does
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place + ".").startswith(error.name + "."):
            raise  # something that the module itself imports
        raise InvalidOptionError(
            f"There is no module {place!r} to import from {Path.cwd()}. Pass package.module:name or "
            "path/to/file.py:name."
        ) from error
    finally:
        sys.path.remove("")


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidOptionError(f"There is no file {path}. Pass package.module:name or path/to/file.py:name.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InvalidOptionError(f"{path} cannot be imported as a module. Pass a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where other processes, and pickle, look for what it defines
    sys.path.insert(0, str(path.parent))  # as `python file.py` does
    spec.loader.exec_module(module)
    return module


def _leaves(found: Any, place: str) -> dict[str, DataLoader[Any] | Factory]:
    leaves: dict[str, DataLoader[Any] | Factory] = {}
    match found:
        case DataLoader():
            leaves[place] = found
        case Mapping():
            for key, nested in found.items():
                leaves |= _leaves(nested, f"{place}.{key}")
        case list() | tuple():
            for index, nested in enumerate(found):
                leaves |= _leaves(nested, f"{place}[{index}]")
        case _ if callable(found) and _takes(found, 0):
            leaves |= _leaves(found(), place)
        case _ if callable(found) and _takes(found, 2):
            leaves[place] = found
        case _:
            raise NotALoaderError(
                f"{place} is {found!r} ({type(found).__name__}), which is no DataLoader, no list or dict of them, and "
                "no function make() or make(rank, world_size) that returns one. Name one of these."
            )
    return leaves


def _takes(function: Any, arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(arguments))
    except (TypeError, ValueError):
        return False
    return True
