"""The tables of ``docs/frameworks.md``: each framework's own, in its section, between two comments."""

from pathlib import Path

__all__ = ["AS_PATCHED", "PAGE", "Row", "read_table", "table", "write_tables"]

PAGE = Path(__file__).parents[3] / "docs" / "frameworks.md"

Row = tuple[str, str]  # a kind of loader, and what became of it unpatched
AS_PATCHED = "each sample once"  # what becomes of every kind that is patched


def table(versions: str, rows: list[Row]) -> str:
    """Return a framework's table, or a sentence where all loaders fare alike."""
    fates = {fate for _, fate in rows}
    if len(fates) == 1:
        return f"{versions}, all five loaders: {fates.pop()}."
    cells = [(versions, "unpatched"), ("---", "---"), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def read_table(module: str) -> str:
    """Return what the page has of it."""
    return _split(PAGE.read_text(), module)[1].strip()


def write_tables(tables: dict[str, str]) -> None:
    """Put the tables of some frameworks in the place of their old ones."""
    text = PAGE.read_text()
    for module, new in tables.items():
        before, _, after = _split(text, module)
        text = f"{before}\n\n{new}\n\n{after}"
    PAGE.write_text(text)


def _split(text: str, module: str) -> tuple[str, str, str]:
    """Cut a text at a framework's two comments, which stay with what is around."""
    begin, end = f"<!-- {module}: begin -->", f"<!-- {module}: end -->"
    before, _, rest = text.partition(begin)
    inside, _, after = rest.partition(end)
    return before + begin, inside, end + after
