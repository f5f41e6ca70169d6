"""What frameworks need beyond a patched loader. Each module is for one framework, and imports it.

Nothing in this package imports these modules.
"""

__all__: list[str] = []
