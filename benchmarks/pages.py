"""Tables that a benchmark prints, and puts into a page of the documentation between two comments."""

import subprocess
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

__all__ = ["commit", "put", "show", "show_and_put"]

Rows = Sequence[Sequence[str]]


def show_and_put(page: Path, name: str, rows: Rows, title: str = "", grouped: bool = False) -> None:
    """Print a table, whose first row is its head, and put it into the page.

    Args:
        page: A Markdown file.
        name: The comments' name: ``<!-- name: begin -->`` and ``<!-- name: end -->``.
        rows: The cells.
        title: Printed above it.
        grouped: Whether to make a table of its own of all rows with the same first cell, which then stands above it:
            narrow tables can be read on a phone.
    """
    show(rows, title)
    head, *body = rows
    put(page, name, in_groups(head, body) if grouped else markdown(head, body))


def show(rows: Rows, title: str = "") -> None:
    """Print a table, whose first row is its head."""
    head, *body = rows
    table = Table(*head, title=title or None)
    for row in body:
        table.add_row(*row)
    Console(width=140).print(table)


def in_groups(head: Sequence[str], body: Rows) -> str:
    """Return a table for all rows that share their first cell, below that cell."""
    tables = [
        f"**{group}**\n\n{markdown(head[1:], [row[1:] for row in rows])}"
        for group, rows in groupby(body, key=lambda row: row[0])
    ]
    return "\n\n".join(tables)


def markdown(head: Sequence[str], body: Rows) -> str:
    """Return a table as Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body))


def put(page: Path, name: str, text: str) -> None:
    """Put the text, and at which commit it was made, in the place of what stands between two comments of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n\n*Measured at {commit()}.*\n\n{end}{rest.split(end)[1]}")


def commit(checkout: Path = Path(__file__).parents[1]) -> str:
    """Return the commit that a checkout is at, and whether files differ from it that are imported or run."""
    head = _git("rev-parse", "--short", "HEAD", at=checkout)
    changed = _git("status", "--porcelain", "--", "ddp_patch", "benchmarks", at=checkout)
    return f"{head}, with changes" if changed else head


def _git(*command: str, at: Path) -> str:
    return subprocess.run(["git", *command], cwd=at, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603, S607 - git, from the path
