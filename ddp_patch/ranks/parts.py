"""What ranks were given where each has a part of the data: nobody should have another rank's."""

import json
from collections.abc import Callable, Collection
from typing import Any

from ddp_patch.loaders.overlap import Sketch, are_no_chance, common_items, row_hashes
from ddp_patch.ranks.claims import Claims
from ddp_patch.ranks.exchange import ranks_text

__all__ = ["Parts"]

# Where no sampler says of which samples a rank's part is, so many first ones of a pass are looked at.
_SAMPLES = 256
# What is left of so many passes is kept.
_SLOTS = 3


class Parts:
    """Compares the samples that ranks were given of their parts.

    Args:
        name: Tells what errors call the loader.
        why: Says why samples may be the same, and what to do.
        knows_all: Whether it is known of all samples that a rank was given, not of the first ones alone.
        replicas: The ranks that have the same part as this one.
    """

    def __init__(
        self,
        name: Callable[[], str],
        why: Callable[[], str],
        *,
        knows_all: bool = False,
        replicas: Collection[int] = (),
    ) -> None:
        self._name, self._why, self._knows_all, self._replicas = name, why, knows_all, replicas
        self._turn = 0
        self._latest: Sketch | None = None
        # How many items were in common, and how many repeated, by pass and rank.
        self._in_common: dict[tuple[int, int], tuple[int, int]] = {}

    def sketch(self, noted: Sketch | None) -> Sketch:
        """Return what takes note of a pass that begins: what its sampler notes, if that does."""
        self._latest = Sketch() if noted is None else noted
        return self._latest

    def note_batch(self, batch: Any, sketch: Sketch | None = None) -> None:
        """Note a batch of this rank's part, in a pass; in the latest one by default."""
        sketch = self._latest if sketch is None else sketch
        if sketch is not None and sketch.seen < _SAMPLES:
            sketch.add(row_hashes(batch, _SAMPLES - sketch.seen))

    def compare(
        self, claims: Claims, number: int, sketch: Sketch | None, is_due: bool, tell: Callable[[str], object]
    ) -> None:
        """Leave what this rank was given in a pass, and compare it with rank 0's and another one's, in turn.

        Args:
            claims: Where ranks leave it.
            number: That of the pass.
            sketch: What this rank was given.
            is_due: Whether to do so now.
            tell: Called with what was found.
        """
        if sketch is None or not claims.read_one_stream or not is_due:
            return
        mine, members = sketch.hashes, claims.members
        claims.put(f"part/{number % _SLOTS}/{claims.rank}", json.dumps([number, mine]))
        self._turn = self._turn % max(1, len(members) - 1) + 1
        others = {members[0], members[(members.index(claims.rank) + self._turn) % len(members)]}
        for rank in sorted(others - {claims.rank, *self._replicas}):
            if (theirs := _read(claims.value(f"part/{number % _SLOTS}/{rank}"), number)) and self._are_same(
                number, rank, found := common_items(mine, theirs), len(mine)
            ):
                tell(
                    f"Iterating the {self._name()}: of {len({*mine})} samples of {ranks_text([claims.rank])} that were "
                    f"looked at, {found[0]} are also {ranks_text([rank])}'s, though each rank should have a part of "
                    f"its own. {self._why()}"
                )

    def _are_same(self, number: int, rank: int, found: tuple[int, int], seen: int) -> bool:
        """Return whether so much is in common that it is no chance."""
        if self._knows_all:
            return bool(found[0]) and are_no_chance(*found, of=seen)
        self._in_common[number, rank] = found  # each pass shows little
        return bool(found[0]) and are_no_chance(*map(sum, zip(*self._in_common.values(), strict=True)))


def _read(text: str | None, number: int) -> list[int]:
    """Return what a rank has left of a pass; nothing if it has left nothing, or of another one."""
    try:
        of, hashes = json.loads(text or "[-1, []]")
        return [int(one) for one in hashes] if of == number else []
    except (ValueError, TypeError):  # junk
        return []
