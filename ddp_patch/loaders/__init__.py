"""What a loader is, and how it is copied."""

__all__: list[str] = []
