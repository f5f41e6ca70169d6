"""Every remedy that a message names, tried literally on a program that meets the message.

The files here are tables of such programs. A program meets a message, of which a row has some words (``!``). All that
the message says from its first remedy on is quoted (``>``): whoever changes a message has to try it again here. Below a
quote stands how the program follows it, to run without a message: by edits, by another program (``|``), or, where
nobody can try that as code, why (``#``).

    loader = patch(over(), uneven='padd')
    ! uneven='padd' does not exist
    > Pass one of these: 'pad', 'drop', 'keep'
      'padd' => 'pad'
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from messages import REMEDY

import ddp_patch

__all__ = ["UNMET", "Met", "Untried", "is_of", "left_over", "remedies_in", "rows"]


@dataclass(frozen=True)
class Untried:
    """Why a remedy is not tried."""

    why: str


# What no row meets: how the text begins, and why.
_RANKS_END = "tests/ranks/test_faults_ranks.py ends ranks, and starts all again"
_RESUMES = "a training with that framework: its tests in tests/integrations resume with other ranks, and with the same"
UNMET = {
    "Give the engine {'epoch'": _RESUMES,
    "Pass a single one": "tests/integrations/test_lightning_callback.py",
    "Take checkpoints with PatchDataLoaders and loaders that have a state_dict": _RESUMES,
    "Use the number of ranks and the batch size of before": _RESUMES,
    "Use the number of processes and the arguments of before": _RESUMES,
    "Use the per_device_train_batch_size and gradient_accumulation_steps of before": _RESUMES,
    "Use transformers 5": _RESUMES,
    "Call manager": "tests/torchft, where torchft is",
    "Make the Manager with use_async_quorum=False": "tests/torchft, where torchft is",
    "Build the loader alike on every replica": "tests/torchft, where torchft is",
    "Give it several times for several loaders": "a help text: test_cli.py does so",
    "Patch loaders first": "a help text: test_cli.py does so",
    "Pass --traceback to see where": "test_cli.py does so",
    "Pass a Python file": "Python finds a loader for each file that ends in .py",
    "Split the dataset by torch": "test_audit.py has such a dataset, and the same split by its workers",
    "Use a version that docs/compatibility": "of torch: test_missing.py takes names away",
    "Use a loader whose workers are processes": "test_seeds.py has threads; the patch refuses loaders that say so",
    "Use workers for one of them": "tests/unit/test_threads.py",
    "Let __getitem__ depend on the index and the epoch alone": "tests/integrations/test_torchdata.py",
    "Look for the error of a rank that ended": _RANKS_END,
    "Look for what the missing ranks do instead": _RANKS_END,
    "Look for its error and start all ranks again": _RANKS_END,
    "Look for the rank": "tests/ranks/test_store_fails_ranks.py has a store that fails",
    "Take the state a step earlier": "workers that take 10 s to report an end",
    "Begin the epoch again": "the same dataset with other items than before: test_parts_resume.py",
    "Pass callbacks=[PatchDataLoaders": "tests/integrations/test_lightning_resume.py, with Lightning",
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


def rows(name: str) -> list[Met]:
    """Return the rows of a table."""
    text = (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8")
    return [_row(*re.split(r"^(?=[!>] )", row, flags=re.MULTILINE)) for row in text.rstrip("\n").split("\n\n")]


def _row(program: str, facts: str, *remedies: str) -> Met:
    told = [remedy.rstrip("\n").partition("\n") for remedy in remedies]
    follows = [(quote[2:], _followed(program, lines.split("\n"))) for quote, _, lines in told]
    return Met(program, _read(facts[2:].rstrip("\n")), follows)


def _followed(program: str, lines: Sequence[str]) -> "str | Untried":
    """Return the program that follows a remedy, as the lines below it say."""
    kind, said = lines[0][:4], [line[4:] for line in lines]
    if kind == "  # ":
        return Untried(said[0])
    if kind == "  | ":
        return "\n".join(said)
    for line in lines:
        old, _, new = line[2:].partition(" =>")
        assert _read(old) in program, f"{old} is not in {program}"
        program = program.replace(_read(old), _read(new[1:]))
    return program


def _read(text: str) -> str:
    return text.replace("\\n", "\n")


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
        if "running" in path.relative_to(folder).parts:
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
