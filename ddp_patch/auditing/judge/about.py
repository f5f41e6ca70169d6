"""Describe an epoch that was judged: what is missing, repeated or foreign, with examples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_patch.auditing.draw.coding import Coding, Numbers
from ddp_patch.auditing.draw.drawn import Epoch
from ddp_patch.auditing.judge.judging import Judged
from ddp_patch.auditing.problems import Kind, Problem

__all__ = ["EXAMPLES", "About", "shards_of", "where_in"]

# Give this many examples.
EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class About:
    """Word what was found in an epoch.

    Args:
        epoch: What was drawn.
        judged: How the epoch was judged.
        coding: Gives items their names.
        is_simulated: Whether a factory made the loaders of ranks that are simulated, without a process group.
    """

    epoch: Epoch
    judged: Judged
    coding: Coding
    is_simulated: bool = False

    def problem(self, kind: Kind, what: str, why: str, remedy: str) -> Problem:
        """Return a problem of this epoch."""
        return Problem(kind, what, where_in(self.epoch), why, remedy)

    def counts(self) -> str:
        """Say how many are missing, repeated and foreign, with examples."""
        of, found = f"of {self.epoch.expected} {self.epoch.units}", self.judged.found
        parts = []
        if found.lacking:
            parts.append(f"{found.lacking} {of} are missing{self._such(self.missing())}.")
        if found.extra:
            parts.append(self._extra())
        if found.unexpected:
            such = self._such(_placed(self.foreign()))
            parts.append(f"Ranks get {found.unexpected} {self.epoch.units} that one process never gets{such}.")
        return " ".join(parts)

    def _extra(self) -> str:
        """Say how many different ones are seen too often, and where it is not once each, how often in all."""
        found, units = self.judged.found, self.epoch.units
        different, such = len(found.repeated), self._such(_placed(self.repeated()))
        if not different:  # how many there are is all that is known of a world of one rank
            return f"Ranks get {found.extra} {units} too many."
        # Those of a part of an epoch, of which only the beginning was read, are not counted against its length.
        of = f" of {self.epoch.expected}" * (not self.epoch.is_sample)
        in_all = f", {found.extra} times too often in all" * (found.extra > different)
        return f"{different}{of} {units} are seen more often than in one process{in_all}{such}."

    def missing(self) -> tuple[str, ...]:
        """Return the names of some samples that ranks got too seldom."""
        return tuple(self.coding.name(int(code)) for code in self.judged.samples.missing[:EXAMPLES])

    def repeated(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the names of some samples that ranks saw too often, each with the ranks that got it."""
        return self._with_owners(self.judged.samples.repeated)

    def foreign(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the names of some samples that a single process never gets, each with the ranks that got it."""
        return self._with_owners(self.judged.samples.foreign)

    def samples_of(self, rank: int) -> str:
        """Say how many samples a rank got; nothing where only a part was drawn."""
        return "" if self.epoch.is_sample else f", {len(self.epoch.ranks[rank].items)} samples"

    def most_samples(self) -> str:
        """Say how many samples the rank with the most got; nothing where only a part was drawn."""
        return "" if self.epoch.is_sample else f", {max(len(drawn.items) for drawn in self.epoch.ranks)} samples"

    def _such(self, shown: Sequence[str]) -> str:
        such = "such as" if self.epoch.units == "samples" else "with samples such as"
        return f" ({such} {'; '.join(shown)})" if shown else ""

    def _with_owners(self, codes: Numbers) -> tuple[tuple[str, tuple[int, ...]], ...]:
        shown = [int(code) for code in codes[:EXAMPLES]]
        return tuple((self.coding.name(code), self._owners(code)) for code in shown)

    def _owners(self, code: int) -> tuple[int, ...]:
        return tuple(rank for rank, drawn in enumerate(self.epoch.ranks) if np.any(drawn.items == code))


def _placed(examples: Sequence[tuple[str, tuple[int, ...]]]) -> list[str]:
    """Return samples' names with the ranks that got them."""
    return [f"{name} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for name, ranks in examples]


def where_in(epoch: Epoch) -> str:
    """Say which epoch, on how many ranks."""
    return f"epoch {epoch.number}, {len(epoch.ranks)} ranks"


def shards_of(epoch: Epoch) -> list[int]:
    """Return how many samples or batches each rank got, by rank."""
    return [len(drawn.items if epoch.units == "samples" else drawn.sizes) for drawn in epoch.ranks]
