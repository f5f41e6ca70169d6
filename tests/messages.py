"""Hold what a message tells, whatever sentence tells it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import clear_frames
from typing import TypeAlias, TypeVar

import pytest

from ddp_patch import DDPPatchError

__all__ = ["REMEDY", "Words", "assert_tells", "missing", "raises"]

Words: TypeAlias = str | tuple[str, ...]
E = TypeVar("E", bound=Exception)

# The last line of every text of ddp_patch's: the command that explains it.
_SECTION = re.compile(r"\nCauses and remedies: python -m ddp_patch explain \w+\n?\Z")

# A remedy begins with one of these, at the beginning of a sentence, of a line or behind a colon.
_VERBS = (
    "Ask|Begin|Build|Call|Correct|Give|Go|Iterate|Leave|Let|Look|Make|Mend|Name|Pass|Patch|Restore|Return|See|Set|Share|"
    "Shard|Split|Start|Store|Take|Use|Wrap"
)
REMEDY = re.compile(rf"(?:^|(?<=[.:]\s))(?i:{_VERBS})\s(?![\d\0])", re.MULTILINE)


def missing(text: str, words: Words) -> list[str]:
    """Return which words a text lacks; a name or number within another is not the one that is looked for."""
    wanted = (words,) if isinstance(words, str) else words
    return [word for word in wanted if not re.search(_pattern(word), text)]


def _pattern(word: str) -> str:
    begins = r"(?<![\w.=-])" if word[0].isdigit() else r"(?<!\w)" if word[0].isalpha() else ""
    ends = r"(?!\w|\.\d)" if word[-1].isdigit() else ""
    return begins + re.escape(word) + ends


def assert_tells(message: str, facts: Words, remedy: Words | None = ()) -> None:
    """Fail unless a message tells all facts first, then a remedy with all of its words, and ends with a full stop.

    ``remedy=None`` is for the few messages that tell facts alone. The line that says where to look it up is none.
    """
    message = _SECTION.sub("", message)
    begins = REMEDY.search(message)
    assert (begins is None) == (remedy is None), f"Is there a remedy? {message}"
    end = begins.start() if begins else len(message)
    lacking = missing(message[:end], facts) + missing(message[end:], remedy or ())
    assert not lacking, f"{lacking} not told, or not where they belong: {message}"
    assert message.endswith("."), f"no full stop: {message}"


@contextmanager
def raises(error: type[E], facts: Words, remedy: Words | None = ()) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of this very type, whose message tells the facts and the remedy.

    What the frames that it went through hold is let go: torch raises a worker's error from a frame that holds it, and
    a loader's iterator that is left to the garbage collector waits for each worker.
    """
    with pytest.raises(error) as caught:
        yield caught
    assert caught.type is error
    clear_frames(caught.tb)
    message = str(caught.value)
    section = f"\nCauses and remedies: python -m ddp_patch explain {error.__name__}"
    assert message.rstrip().endswith(section) == issubclass(error, DDPPatchError), f"no section: {message}"
    if message.startswith("Caught "):  # by a DataLoader's worker, whose traceback comes first
        message = message.rpartition(f"{error.__name__}: ")[2].rstrip()
    assert_tells(message, facts, remedy)
