"""Draw what every simulated rank gets, and record it as numbers."""

__all__: list[str] = []
