"""Recognise classes of other packages without importing them."""

__all__ = [
    "full_name",
]


def full_name(kind: type) -> str:
    """Return a class's full name, by which it is known where its package is not imported."""
    return f"{kind.__module__}.{kind.__qualname__}"
