"""One rank's share of a stream: the samplers that give it, and each pass over it."""

__all__: list[str] = []
