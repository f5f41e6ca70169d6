"""What we rely on without a promise: private names of torch, class names and marks of other packages.

No other room names one of these, so only this room has to be tested with a new version of torch or another package.
Each entry says why it is needed, in which version it was seen, and whether a public way exists.
"""

__all__: list[str] = []
