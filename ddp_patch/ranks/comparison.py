"""Compare what several ranks report: list which ranks have which value, and raise an error with a table."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_patch.errors import RankMismatchError

__all__ = ["by_value", "ranks_text", "require_same"]


def ranks_text(numbers: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0, 2"."""
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def by_value(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Return the ranks that have each value."""
    holders: dict[Any, list[int]] = defaultdict(list)
    for rank, value in values.items():
        holders[value].append(rank)
    return holders


def require_same(doing: str, records: Mapping[int, Mapping[str, object]]) -> None:
    """Raise RankMismatchError, with a table of who has what, unless every rank's facts are the same."""
    rows = []
    for name in dict.fromkeys(name for record in records.values() for name in record):
        holders = by_value({rank: str(record.get(name, "nothing")) for rank, record in records.items()})
        if len(holders) > 1:
            rows.append(
                f"  {name}: " + "; ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in holders.items())
            )
    if rows:
        raise RankMismatchError(
            f"{doing}: the ranks differ, so their shards would overlap or their steps would not be equal.\n"
            + "\n".join(rows)
            + "\nMake these the same on every rank, and call and iterate the same loaders on each."
        )
