"""Every remedy that a message names, tried literally on a program that meets the message.

The modules here are tables of programs, as text, so that a page of them is read without the packages that they need. A
program meets a message; the message's remedies are quoted word for word, and each is an edit of the program, which then
runs without a message. The quotes are all that a message says from its first remedy on: whoever changes a message has
to try it again here. What nobody can try as code says why.

    met("loader = patch(over(24), uneven='padd')", "uneven='padd' does not exist.", ("Pass one of these: 'pad'", "padd", "pad"))
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from messages import REMEDY

import ddp_patch

__all__ = ["UNMET", "Met", "Untried", "is_of", "left_over", "met", "remedies_in"]


@dataclass(frozen=True)
class Untried:
    """Why a remedy is not tried."""

    why: str


# What no row meets: how the text begins, and why.
_RANKS_END = "tests/ranks/test_faults_ranks.py ends ranks, and starts all again"
UNMET = {
    "Give it several times for several loaders": "a help text: test_cli.py does so",
    "Patch loaders first": "a help text: test_cli.py does so",
    "Pass --traceback to see where": "test_cli.py does so",
    "Pass a Python file": "Python finds a loader for each file that ends in .py",
    "Split the dataset by torch": "test_audit.py has such a dataset, and the same split by its workers",
    "Use a version that docs/compatibility": "of torch: test_missing.py takes names away",
    "Use a loader whose workers are processes": "in a worker: test_seeds.py has threads; patching refuses loaders that say so",
    "Look for the error of a rank that ended": _RANKS_END,
    "Look for what the missing ranks do instead": _RANKS_END,
    "Look for its error and start all ranks again": _RANKS_END,
    "Take the state a step earlier": "workers that take 10 s to report an end",
    "Begin the epoch again": "the same dataset with other items than before: test_parts_resume.py",
    "Call gather_step": "tests/integrations/test_training.py, with accelerate",
    "Patch a loader of the few samples to overfit": "tests/integrations/test_lightning.py, with Lightning",
}


@dataclass(frozen=True)
class Met:
    """A program that meets a message.

    Attributes:
        program: Its source.
        facts: Words that come before the remedies.
        remedies: A part of the message, and the program that follows it; or why nobody can try that.
    """

    program: str
    facts: str
    remedies: Sequence[tuple[str, "str | Untried"]]

    def __str__(self) -> str:
        return self.facts[:60]


def met(program: str, facts: str, *remedies: tuple[str, ...] | tuple[str, Untried]) -> Met:
    """Return a row of a table.

    Args:
        program: As in ``Met``.
        facts: As in ``Met``.
        remedies: A quote, then pairs of what is replaced in the program, and by what; a whole program; or ``Untried``.
    """
    return Met(program, facts, [(quote, _edited(program, edit)) for quote, *edit in remedies])


def _edited(program: str, edit: Sequence[Any]) -> "str | Untried":
    if len(edit) == 1:
        return edit[0]  # type: ignore[no-any-return]
    for old, new in zip(edit[::2], edit[1::2], strict=True):
        assert old in program, f"{old} is not in {program}"
        program = program.replace(old, new)
    return program


# ---- what messages say ----

_SECTION = re.compile(r"\nCauses and remedies: python -m ddp_patch explain \w+\n?\Z")
_BETWEEN = re.compile(r"\W|\b[Oo]r\b|\band\b")


def left_over(message: str, row: Met) -> str:
    """Return what is wrong with a row of a message, or what the message says of remedies that no quote has."""
    message = _SECTION.sub("", message).partition("\nTraceback ")[0]
    if message.startswith("Caught "):  # by a DataLoader's worker, whose traceback comes first
        message = message.rpartition("Error: ")[2].rstrip()
    quotes = sorted((quote for quote, _ in row.remedies), key=len, reverse=True)
    if lacking := [words for words in (row.facts, *quotes) if words not in message]:
        return f"not told: {lacking} in {message}"
    first = REMEDY.search(message)
    rest = message[min([*map(message.index, quotes), *([first.start()] if first else [])], default=len(message)) :]
    for quote in quotes:
        rest = rest.replace(quote, " ")
    return f"not tried: {rest!r}" if _BETWEEN.sub("", rest) else ""


# ---- what the package says ----

# So many characters of its facts have a text and a row in common.
_ALIKE = 10


def remedies_in() -> Iterator[tuple[str, str, str]]:
    """Yield each text of the package that names a remedy: where, the facts before that, and how it begins.

    ``running/`` is left out, whose messages are about scripts: their own tests run these.
    """
    folder = Path(ddp_patch.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        if "running" in path.parts:
            continue
        for line, text in _texts(ast.parse(path.read_text(encoding="utf-8"))):
            if (found := REMEDY.search(text)) is not None and len(text) > 25:
                begins = re.split(r"\0|[.:;,(]| or ", text[found.start() :])[0]
                yield f"{path.relative_to(folder)}:{line}", text[: found.start()], begins


def is_of(row: Met, facts: str, begins: str) -> bool:
    """Return whether a row is about a text: it quotes its remedy, and has facts in common with it, if there are any."""
    if not any(begins in quote for quote, _ in row.remedies):
        return False
    common = SequenceMatcher(None, row.facts, facts, autojunk=False).find_longest_match()
    return common.size >= min(_ALIKE, len(facts.strip()))


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line of each text, and it, with a NUL for what is put in; no docstring."""
    inner = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Expr) for part in _within(node)
    }
    for node in ast.walk(tree):
        if id(node) in inner:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _within(node: ast.JoinedStr | ast.Expr) -> Iterator[ast.AST]:
    if isinstance(node, ast.JoinedStr):
        yield from (part for part in ast.walk(node) if part is not node)
    elif isinstance(node.value, ast.Constant):
        yield node.value
