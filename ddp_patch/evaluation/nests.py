"""Nests of outputs: dicts, tuples and dataclasses, taken apart into leaves and put together again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

__all__ = ["Nest", "Node", "at", "filled", "leaves_of", "nest_of", "nest_text"]


@dataclass(frozen=True, slots=True)
class Node:
    """A dict, a tuple or a dataclass without its leaves.

    Attributes:
        kind: The class to make.
        parts: What it holds, by key, place or field.
    """

    kind: type
    parts: Mapping[Any, "Nest"]


# What stands where: a node, the path of a leaf, or None where the user has None.
Nest: TypeAlias = Node | str | None


def at(path: str) -> str:
    """Return how a message says where a leaf stands; nothing where the outputs are that leaf."""
    return path and f" at {path}"


def _parts(value: Any) -> tuple[type, list[tuple[Any, str, Any]]] | None:
    """Return the class of a node and, for each of its parts, key, path and value; None of a leaf."""
    if is_dataclass(value) and not isinstance(value, type):  # models' outputs of transformers are dicts, too
        return type(value), [(one.name, f".{one.name}", getattr(value, one.name)) for one in fields(value)]
    match value:
        case dict():
            return dict, [(key, f"[{key!r}]", part) for key, part in value.items()]
        case tuple() if hasattr(value, "_fields"):
            return type(value), [(name, f".{name}", getattr(value, name)) for name in value._fields]
        case tuple():
            return tuple, [(place, f"[{place}]", part) for place, part in enumerate(value)]
    return None


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path; None is no leaf.

    Examples:
        >>> list(leaves_of({"logits": ([1], None, [2])}))
        [("['logits'][0]", [1]), ("['logits'][2]", [2])]
    """
    if value is None:
        return
    parts = _parts(value)
    if parts is None:
        yield path, value
        return
    for _, step, part in parts[1]:
        yield from leaves_of(part, path + step)


def nest_of(value: Any, path: str = "") -> Nest:
    """Return a nest with each leaf replaced by its path."""
    if value is None:
        return None
    parts = _parts(value)
    if parts is None:
        return path
    return Node(parts[0], {key: nest_of(part, path + step) for key, step, part in parts[1]})


def filled(nest: Nest, leaves: Mapping[str, Any]) -> Any:
    """Return a nest with each path replaced by its leaf.

    Examples:
        >>> given = {"logits": (1.5, None)}
        >>> filled(nest_of(given), dict(leaves_of(given)))
        {'logits': (1.5, None)}
    """
    if nest is None:
        return None
    if isinstance(nest, str):
        return leaves[nest]
    parts = {key: filled(part, leaves) for key, part in nest.parts.items()}
    if nest.kind is dict:
        return parts
    if nest.kind is tuple:
        return tuple(parts.values())
    if not is_dataclass(nest.kind):  # a named tuple
        return nest.kind(**parts)
    made = nest.kind(**{one.name: parts[one.name] for one in fields(nest.kind) if one.init})
    for one in fields(nest.kind):
        object.__setattr__(made, one.name, parts[one.name])  # a __post_init__ may have changed it
    return made


def nest_text(nest: Nest, leaf: str = "rows") -> str:
    """Describe how a nest is built, alike for all that are built alike.

    Examples:
        >>> nest_text(nest_of({"b": 1, "a": (2, None)}))
        "{'a': tuple(rows, None), 'b': rows}"
    """
    if not isinstance(nest, Node):
        return "None" if nest is None else leaf
    texts = {key: nest_text(part, leaf) for key, part in nest.parts.items()}
    if nest.kind is dict:
        return "{" + ", ".join(sorted(f"{key!r}: {text}" for key, text in texts.items())) + "}"
    if nest.kind is tuple:
        return f"tuple({_listed(list(texts.values()))})"
    return f"{nest.kind.__name__}({_listed([f'{key}={text}' for key, text in texts.items()])})"


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(texts)
