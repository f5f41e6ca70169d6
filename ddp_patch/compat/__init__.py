"""What we rely on though nobody promised it: private names of torch, class names and marks of other packages.

No other room names one of these, so a new version of torch, or of another package, is tested against this room alone.
Each entry says why it is needed, in which version it was seen, and whether a public way exists.
"""

__all__: list[str] = []
