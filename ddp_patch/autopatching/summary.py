"""What was done with a script's loaders, as a table with notes below it."""

from collections.abc import Iterator, Sequence

from ddp_patch.autopatching.models import Models
from ddp_patch.autopatching.records import Record, counted
from ddp_patch.autopatching.session import Session

__all__ = ["HEADINGS", "Summary"]

HEADINGS = ("made at", "loader", "what became of it", "passes", "each rank gets", "padding")


class Summary:
    """What was done with the loaders while autopatch is, or was, on.

    Args:
        session: What decided on them.
        models: What saw the models.
    """

    def __init__(self, session: Session, models: Models) -> None:
        self._session, self._models = session, models

    @property
    def records(self) -> Sequence[Record]:
        """The loaders that were used when there were several ranks, in that order."""
        return tuple(self._session.records)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """A row of the table for each."""
        for record in self._session.records:
            record.note_pass()
        return [
            (one.place, one.what, f"{one.fate} ({one.note})" if one.note else one.fate, str(one.passes), *_share(one))
            for one in self._session.records
        ]

    @property
    def notes(self) -> list[str]:
        """What else was noticed."""
        return list(self._noticed())

    def _noticed(self) -> Iterator[str]:
        session = self._session
        if not session.had_world:
            yield (
                "No loader was used in a process group of several ranks, so none was patched. A script for one process "
                "makes no group: start it with torchrun, and pass --init-process-group gloo (or nccl)."
            )
            return
        for place in sorted(session.early):
            yield f"The loader made at {place} was iterated when there was no group yet: each rank took all of it."
        for pattern in sorted(session.patterns.unused):
            yield f"The pattern {pattern!r} matched no loader that was used."
        if not self._models.seen:
            yield (
                "No DistributedDataParallel was seen, nor FSDP: unless the script averages gradients by itself, each "
                "rank trains a model of its own."
            )

    def __str__(self) -> str:
        rows = [HEADINGS, *self.rows] if self.rows else []
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *self.notes])


def _share(record: Record) -> tuple[str, str]:
    steps = "" if record.steps is None else counted(record.steps, "step")
    return ", ".join(filter(None, (record.samples, steps))), record.padding
