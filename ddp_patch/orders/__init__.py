"""Streams of items: their order, their random states, and how they are drawn."""

__all__: list[str] = []
