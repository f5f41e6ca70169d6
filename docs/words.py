"""Count the words of each page in the navigation, prose and tables without code, and hold them to what a reader bears.

Run it with ``nox -s docs``.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
_BLOCK = re.MULTILINE | re.DOTALL
MOST_PAGES, MOST_WORDS, MOST_IN_README, MOST_IN_A_LINE = 18, 17_500, 700, 120


def words(page: Path) -> int:
    """Return how many words a page has outside of blocks of code, comments, links' targets and commits' stamps."""
    text = re.sub(r"^( *)```.*?^\1```$|<!--.*?-->", "", page.read_text(), flags=_BLOCK)
    text = re.sub(r"\]\([^)]*\)|^\*Measured at \w+\.\*$", "]", text, flags=re.MULTILINE)
    return sum(any(map(str.isalnum, word)) for word in text.split())


def long_lines(page: Path) -> list[int]:
    """Return the numbers of the lines that are too long, but for those of code, tables and pictures."""
    # Blocks of code keep their lines' numbers.
    text = re.sub(r"^( *)```.*?^\1```$", lambda code: "\n" * code[0].count("\n"), page.read_text(), flags=_BLOCK)
    lines = enumerate(text.splitlines(), 1)
    return [n for n, line in lines if len(line) > MOST_IN_A_LINE and not line.lstrip().startswith(("|", "!", "<"))]


def main() -> None:
    """Print the table, and exit with an error where something is too long."""
    _, _, navigation = (DOCS.parent / "mkdocs.yml").read_text().partition("\nnav:\n")
    named = re.findall(r"- (?:.*: )?(\S+\.md)$", navigation, re.MULTILINE)
    pages = [DOCS / name for name in named if name != "changelog.md"]
    readme = DOCS.parent / "README.md"
    for page in sorted([readme, *pages], key=words):
        print(f"{words(page):6,} {page.name}")
    total = sum(map(words, pages))
    print(f"{total:6,} words on {len(pages)} pages")
    too_long = [f"{page.name}:{number}" for page in [readme, *pages] for number in long_lines(page)]
    if too_long:
        print(f"longer than {MOST_IN_A_LINE} characters: {', '.join(too_long)}")
    sys.exit(len(pages) > MOST_PAGES or total > MOST_WORDS or words(readme) > MOST_IN_README or bool(too_long))


if __name__ == "__main__":
    main()
