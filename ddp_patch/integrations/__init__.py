"""What a framework needs beyond a patched loader: one module for each that needs anything, which imports it.

Nothing in this package imports these modules.
"""

__all__: list[str] = []
