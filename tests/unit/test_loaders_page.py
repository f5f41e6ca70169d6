"""The page of loader kinds lists every kind that the tests try, each handled here."""

from pathlib import Path

from zoo import KINDS

PAGE = Path(__file__).parents[2] / "docs" / "loaders.md"


def rows() -> list[list[str]]:
    """The cells of the table of kinds, without its head and its totals; the first cell names those that fare alike."""
    _, _, generated = PAGE.read_text().partition("<!-- peers: begin -->")
    table, _, _ = generated.strip().partition("\n\n")
    _, _, *lines, _ = table.splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_kind_is_named_once() -> None:
    assert sorted(name for names, *_ in rows() for name in names.split("; ")) == sorted(kind.name for kind in KINDS)


def test_every_kind_is_handled_here() -> None:
    assert [names for names, ours, *_ in rows() if ours != "yes"] == []


def test_the_front_page_counts_them() -> None:
    assert f"all {len(KINDS)} kinds of loader" in PAGE.with_name("index.md").read_text()
