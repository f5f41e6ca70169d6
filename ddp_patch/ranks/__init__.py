"""Find the ranks, let them meet, and make them agree."""

__all__: list[str] = []
