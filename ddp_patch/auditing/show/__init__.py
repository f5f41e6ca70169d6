"""Show reports as pictures and as an HTML page."""

__all__: list[str] = []
