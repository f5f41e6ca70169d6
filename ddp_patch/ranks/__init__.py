"""Which ranks there are, where they meet, and what they agree on."""

__all__: list[str] = []
