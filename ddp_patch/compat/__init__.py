"""Names that may change without notice: private names of torch, class names and private attributes of other packages.

Only this package of ``ddp_patch`` uses such names, so it alone has to be tested with a new version of torch or another
library. Each entry says why the name is needed, in which version it was seen, and whether a public way exists.
"""

__all__: list[str] = []
