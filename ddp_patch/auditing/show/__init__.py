"""Show what ranks got as figures of bars, in HTML or as SVG files."""

__all__: list[str] = []
