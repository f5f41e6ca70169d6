"""Compare what all ranks got with what a single process gets, and name what differs and why."""

__all__: list[str] = []
