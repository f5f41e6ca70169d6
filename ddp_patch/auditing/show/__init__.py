"""Reports as pictures and as a page."""

__all__: list[str] = []
