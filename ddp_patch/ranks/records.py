"""What ranks leave each other of their logs: plain, versioned records."""

import json
from typing import NamedTuple

from ddp_patch.orders.chunks import State
from ddp_patch.orders.digest import Mark

__all__ = ["VERSION", "Entry", "Record", "State"]

# The version of what ranks leave each other.
VERSION = 2


class Entry(NamedTuple):
    """A pass, as another rank is told of it; see ``LoggedPass`` and ``Progress``."""

    number: int
    epoch: int
    begins_at: str
    others: int | None
    batches: int
    state: State
    is_own: bool
    held: str
    mark: Mark | None


class Record(NamedTuple):
    """What a rank tells the others of its log.

    Attributes:
        lists: How many lists of passes it has closed, by restoring a position.
        closed: How many passes the last of them had.
        chain: A hash of all passes before the latest one.
        before: How many batches the passes before the latest one had, and how they ended, the last of them first, so
            that a rank that is still in one of these hears of its end. Of one of which others may have had more, 0.
        entry: The latest pass that is more than a look; None before the first.
    """

    lists: int = 0
    closed: int = 0
    chain: str = ""
    before: tuple[tuple[int, State], ...] = ()
    entry: Entry | None = None

    def to_text(self) -> str:
        """Return it as JSON."""
        entry: tuple[object, ...] = ()
        if self.entry is not None:
            *parts, is_own, held, mark = self.entry
            entry = (*parts, int(is_own), held, *(mark or ()))  # "false" is four bytes more
        return json.dumps([VERSION, *self[:-1], *entry], separators=(",", ":"))

    @classmethod
    def of_text(cls, text: bytes | str) -> "Record | None":
        """Return what ``to_text`` made text of; None if it is anything else, or of another version."""
        try:
            version, lists, closed, chain, told, *entry = json.loads(text)
            before = tuple((batches, State(state)) for batches, state in told)
            if version != VERSION or not _are_whole(lists, closed, *(batches for batches, _ in before)):
                return None
            if not entry:
                return cls(lists, closed, str(chain), before)
            number, epoch, begins_at, others, batches, state, is_own, held, *mark = entry
            digest = Mark(*mark) if mark else None
            made = Entry(number, epoch, str(begins_at), others, batches, State(state), bool(is_own), str(held), digest)
            is_known = _are_whole(number, epoch, batches, others or 0, *mark)
            return cls(lists, closed, str(chain), before, made) if is_known else None
        except (ValueError, TypeError):
            return None


def _are_whole(*numbers: object) -> bool:
    return all(isinstance(number, int) for number in numbers)
