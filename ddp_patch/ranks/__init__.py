"""Find the ranks, exchange records between them, and make them agree."""

__all__: list[str] = []
