"""One rank's share of an iterable dataset, which is read inside the workers."""

__all__: list[str] = []
