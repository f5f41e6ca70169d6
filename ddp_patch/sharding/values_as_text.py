"""Write the states of users' samplers and datasets as text, which any file format keeps, and read them.

JSON alone turns tuples into lists, and keys that are numbers into texts. A value that JSON would change is written as
an object with one name that begins with "!", such as ``{"!tuple": [1, 2]}``.
"""

import base64
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ddp_patch.ranks.exchange import bytes_of

_PLAIN = frozenset({bool, int, float, str, type(None)})
_MARK = "!"


def as_text(value: Any) -> str:
    """Return a value as text, from which ``from_text`` makes an equal one.

    Args:
        value: Numbers, strings, bytes, None, tensors, arrays, and lists, tuples, sets and dicts of these.

    Raises:
        TypeError: The value holds something else.

    Examples:
        >>> as_text({"place": 3, "seen": (1, 2)}), from_text(as_text({7: (1, {2})}))
        ('{"place": 3, "seen": {"!tuple": [1, 2]}}', {7: (1, {2})})
    """
    return json.dumps(_written(value))


def from_text(text: str) -> Any:
    """Return the value that a text of ``as_text`` describes; raise TypeError or ValueError for other texts."""
    return _read(json.loads(text))


def _written(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN or (kind is list and _PLAIN.issuperset(map(type, value))):
        return value
    if kind is list:
        return [*map(_written, value)]
    if kind is dict and all(type(key) is str and not key.startswith(_MARK) for key in value):
        return {key: _written(part) for key, part in value.items()}
    for name, (of, write, _) in _KINDS.items():
        if kind is of or (of is np.generic and isinstance(value, np.generic)):
            return {_MARK + name: write(value)}
    raise TypeError(f"a {kind.__name__}")


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_read, value)]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (name := next(iter(value))).startswith(_MARK):
        if name.removeprefix(_MARK) not in _KINDS:
            raise ValueError(name)
        return _KINDS[name.removeprefix(_MARK)][2](value[name])
    return {key: _read(part) for key, part in value.items()}


def _of_bytes(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _of_array(array: Any) -> list[Any]:
    if array.dtype.hasobject or array.dtype.names:
        raise TypeError(f"an array of {array.dtype}")
    return [array.dtype.str, list(array.shape), _of_bytes(array.tobytes())]


def _array(parts: Any) -> Any:
    dtype, shape, data = parts
    return np.frombuffer(bytearray(base64.b64decode(data)), dtype).reshape(shape)


def _of_tensor(tensor: torch.Tensor) -> list[Any]:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"a tensor of {tensor.layout}, {tensor.dtype}")
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    return [dtype, shape, _of_bytes(bytes_of(tensor).numpy().tobytes() if tensor.numel() else b"")]


def _tensor(parts: Any) -> torch.Tensor:
    dtype, shape, data = parts
    kind, read = getattr(torch, dtype, None), base64.b64decode(data)
    if not isinstance(kind, torch.dtype):
        raise ValueError(dtype)
    values = torch.frombuffer(bytearray(read), dtype=torch.uint8).view(kind) if read else torch.empty(0, dtype=kind)
    return values.reshape(shape)


# By its name in a text: which class, how it is written, and how it is read.
_KINDS: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, lambda value: [*map(_written, value)], lambda parts: tuple(map(_read, parts))),
    "dict": (
        dict,
        lambda value: [[_written(key), _written(part)] for key, part in value.items()],
        lambda pairs: {_read(key): _read(part) for key, part in pairs},
    ),
    "ordered": (
        OrderedDict,
        lambda value: [[_written(key), _written(part)] for key, part in value.items()],
        lambda pairs: OrderedDict((_read(key), _read(part)) for key, part in pairs),
    ),
    "set": (set, lambda value: [*map(_written, value)], lambda parts: set(map(_read, parts))),
    "frozenset": (frozenset, lambda value: [*map(_written, value)], lambda parts: frozenset(map(_read, parts))),
    "bytes": (bytes, _of_bytes, base64.b64decode),
    "tensor": (torch.Tensor, _of_tensor, _tensor),
    "array": (np.ndarray, _of_array, _array),
    "number": (np.generic, _of_array, lambda parts: _array(parts)[()]),
}
