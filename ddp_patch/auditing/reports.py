"""Hold the reports of several loaders."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddp_patch.auditing.report import Report, as_markdown
from ddp_patch.auditing.show.section import notebook
from ddp_patch.errors import AuditError

__all__ = ["Reports"]


@dataclass(frozen=True, slots=True)
class Reports(Mapping[str, Report]):
    """Map the places of several loaders to their reports. A notebook shows it with figures.

    Attributes:
        by_place: The reports by place, such as ``train`` or ``val[0]``.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> reports = audit({"train": DataLoader(range(10)), "val": [DataLoader(range(4))]}, world_size=2)
        >>> list(reports), reports.ok, reports["val[0]"].epochs[0].expected
        (['train', 'val[0]'], True, 4)
    """

    by_place: Mapping[str, Report]

    @property
    def ok(self) -> bool:
        """Whether all loaders pass."""
        return all(report.ok for report in self.by_place.values())

    @property
    def verdict(self) -> bool:
        """Whether all loaders pass once they are patched, with ``patched=True``; otherwise whether they pass."""
        return all(report.verdict for report in self.by_place.values())

    def raise_for_problems(self) -> None:
        """Raise an error that lists the problems, unless all pass; with ``patched=True``, once they are patched.

        Raises:
            AuditError: The verdict is False.
        """
        if not self.verdict:
            raise AuditError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the reports as JSON values, by place."""
        return {place: report.to_dict() for place, report in self.by_place.items()}

    def to_markdown(self) -> str:
        """Return the reports as Markdown, each below a heading with its place."""
        return "\n\n".join(
            f"## {as_markdown(place)}\n\n{report.to_markdown()}" for place, report in self.by_place.items()
        )

    def _repr_html_(self) -> str:
        """Show the reports in a notebook."""
        return notebook("".join(report.html(place) for place, report in self.by_place.items()))

    def __getitem__(self, place: str) -> Report:
        return self.by_place[place]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_place)

    def __len__(self) -> int:
        return len(self.by_place)

    def __str__(self) -> str:
        return "\n".join(f"{place}: {report}" for place, report in self.by_place.items())
