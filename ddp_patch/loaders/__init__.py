"""The facts of a loader and of its data, and copies of loaders."""

__all__: list[str] = []
