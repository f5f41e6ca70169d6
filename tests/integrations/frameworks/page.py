"""The table of ``docs/frameworks.md``: read, compared and written."""

from pathlib import Path

from frameworks import FRAMEWORKS

__all__ = ["PAGE", "Row", "read_rows", "write_rows"]

PAGE = Path(__file__).parents[3] / "docs" / "frameworks.md"
BEGIN, END = "<!-- frameworks: begin -->", "<!-- frameworks: end -->"
HEAD = ["framework", "version", "loader", "unpatched", "patched"]

Row = list[str]


def read_rows() -> list[Row]:
    """Return the rows that the page has."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def write_rows(measured: list[Row]) -> None:
    """Put measured rows in the place of their frameworks' old ones, and leave the others as they are."""
    names = list(FRAMEWORKS.values())
    new = {row[0] for row in measured}
    rows = [row for row in read_rows() if row[0] in names and row[0] not in new] + measured
    rows.sort(key=lambda row: names.index(row[0]))  # stable: a framework's rows stay in order
    lines = [f"| {' | '.join(cells)} |" for cells in [HEAD, ["---"] * len(HEAD), *rows]]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{rest.partition(END)[2]}")
