"""What ranks were given where each has a part of the data: nobody should have another rank's.

Certain is that nobody splits, where two ranks, or two workers of one, were given the same samples of a whole pass in
the same order; and that indices were given twice, where torch's own sampler splits. All else that parts have in common
is likely at most: who draws with replacement, or repeats samples on purpose, does the same.
"""

import json
import warnings
from collections.abc import Callable, Collection
from itertools import chain
from typing import Any

from ddp_patch.errors import PartsWarning
from ddp_patch.loaders.overlap import Sketch, common_items, is_more_than_padding, row_hashes
from ddp_patch.ranks.claims import Claims
from ddp_patch.ranks.exchange import ranks_text

__all__ = ["Parts"]

# Where no sampler says of which samples a rank's part is, so many first ones of a pass are looked at, and then those of
# each of so many batches: no number of workers that take turns is likely to have a factor in common with that.
_SAMPLES, _EACH = 256, 7
# So many in common may be chance.
_CHANCE = 2
# Fewer different samples that come in the same order are certain of nothing.
_FEWEST = 11
# What is left of so many passes is kept.
_SLOTS = 3


class Parts:
    """Compares the samples that ranks were given of their parts.

    Args:
        name: Tells what errors call the loader.
        why: Says why samples may be the same, and what to do.
        replicas: The ranks that have the same part as this one.
        knows_all: Whether it is known of all samples that a rank was given, not of the first ones alone.
        is_torchs: Whether torch's own sampler splits them, so that no two ranks have the same but for padding.
        shuffles: Whether what splits them draws another order for each epoch that it is told.
        workers: How many workers read them, in turn, where each should have a part of its own.
        is_padded: Whether what came last may be padding.
    """

    def __init__(
        self,
        name: Callable[[], str],
        why: Callable[[], str],
        *,
        replicas: Collection[int] = (),
        knows_all: bool = False,
        is_torchs: bool = False,
        shuffles: bool = False,
        workers: int = 1,
        is_padded: bool = True,
    ) -> None:
        self._name, self._why, self._replicas = name, why, replicas
        self._kind = knows_all, is_torchs, shuffles, workers
        self._is_padded = is_padded
        self._turn = 0
        self._sketch: Sketch | None = None  # of the latest pass that began
        self._before = -1, 0  # the number of the latest pass that is over, and its order
        self._whole: tuple[int, list[int]] | None = None  # that number, and what this rank was given in all of the pass
        self._in_common: dict[tuple[int, int], int] = {}  # how many samples are, by pass and rank
        self._warned: set[str] = set()

    def sketch(self, noted: Sketch | None) -> Sketch:
        """Return what takes note of a pass that begins: what its sampler notes, if that does."""
        self._sketch = Sketch() if noted is None else noted
        return self._sketch

    def note_batch(self, batch: Any, sketch: Sketch | None = None) -> None:
        """Note a batch of this rank's part, in a pass; in the latest one by default."""
        sketch = self._sketch if sketch is None else sketch
        if sketch is not None and (sketch.seen < _SAMPLES or not sketch.added % _EACH):
            sketch.add(row_hashes(batch, _SAMPLES))
        elif sketch is not None:
            sketch.added += 1

    def compare(
        self, claims: Claims, number: int, sketch: Sketch | None, count: int | None, tell: Callable[[str], object]
    ) -> None:
        """Compare what this rank was given in a pass, after so many batches.

        Args:
            claims: Where ranks leave it.
            number: That of the pass.
            sketch: What this rank was given.
            count: How many batches; None if the pass is over.
            tell: Called with what is certain.

        Warns:
            PartsWarning: Something is likely.
        """
        if sketch is None or not claims.read_one_stream:
            return
        if count is None:
            self._compare_order(claims, number, sketch, tell)
        if count is None and not self._is_padded:
            sketch.add(())
        if self._whole is not None and self._whole[0] < number:  # by now slower ranks have left the rest of theirs
            self._compare_all(claims, *self._whole, tell)
            self._whole = None
        if count is None or not count & (count - 1):
            mine = sketch.hashes
            claims.put(f"part/{number % _SLOTS}/{claims.rank}", json.dumps([number, mine]))
            self._turn = self._turn % max(1, len(claims.members) - 1) + 1
            self._compare_all(claims, number, mine, tell)
            self._whole = (number, mine) if count is None else self._whole

    def _compare_order(self, claims: Claims, number: int, sketch: Sketch, tell: Callable[[str], object]) -> None:
        """Compare the samples of a pass in their order: all ranks', this rank's workers', the pass's before.

        The first samples of a pass are certain of nothing: two ranks may have drawn the same shard first.
        """
        *_, shuffles, workers = self._kind
        noted, before, self._before = sum(map(len, sketch.batches)), self._before, (number, sketch.order)
        if len({*chain.from_iterable(sketch.batches)}) < _FEWEST:  # fewer may be padding, or made up data all alike
            return
        whose = claims.claim(f"{number}/order/{sketch.order:x}", f"{claims.rank}")
        if whose.isdecimal() and int(whose) not in {claims.rank, *self._replicas}:
            self._tell(tell, claims.rank, noted, f"{ranks_text([int(whose)])}'s, in the same order")
        of_workers = [[*chain.from_iterable(sketch.batches[worker::workers])] for worker in range(workers)]
        least = min(map(len, of_workers))
        is_all = noted <= _SAMPLES
        if is_all and workers > 1 and least >= _FEWEST and of_workers[0][:least] == of_workers[1][:least]:
            text = f"those of worker 0 are also worker 1's on {ranks_text([claims.rank])}, in the same order"
            tell(f"Iterating the {self._name()}: of 2 x {least} samples that were looked at, {text}. {self._why()}")
        if shuffles and before == (number - 1, sketch.order):
            self._warn(
                "one order",
                f"pass {number} over it has the same order as the one before, because nobody called the set_epoch() by "
                "which its sampler shuffles. Call loader.sampler.set_epoch(epoch) before each epoch; or give "
                "patch_dataloader_to_ddp() the loader as for one process, with shuffle=True and without that sampler. "
                "If one order is right, as for validation, ignore this PartsWarning.",
            )

    def _compare_all(self, claims: Claims, number: int, mine: list[int], tell: Callable[[str], object]) -> None:
        """Compare what this rank was given in a pass with what rank 0 has left of it, and another rank, in turn."""
        knows_all, is_torchs, *_ = self._kind
        members, key = claims.members, f"part/{number % _SLOTS}"
        others = {members[0], members[(members.index(claims.rank) + self._turn) % len(members)]}
        for rank in sorted(others - {claims.rank, *self._replicas}):
            common = common_items(mine, _read(claims.value(f"{key}/{rank}"), number))
            self._in_common[number, rank] = common
            if is_torchs and is_more_than_padding(common, of=len(mine)):
                self._tell(tell, claims.rank, len({*mine}), f"{ranks_text([rank])}'s", common)
            in_all = common if knows_all else sum(self._in_common.values())
            if common and (
                is_more_than_padding(in_all, of=len(mine) if knows_all else 0) if self._is_padded else in_all > _CHANCE
            ):
                self._warn(
                    "in common",
                    f"of {len({*mine})} samples of {ranks_text([claims.rank])} that were looked at, {common} are also "
                    f"{ranks_text([rank])}'s. That may be on purpose, where samples are drawn with replacement, come "
                    "from resampled shards, or are repeated to be augmented; or others are lost. How often each comes "
                    f"in an epoch of all ranks shows which. {self._why()} If it is on purpose, ignore this "
                    "PartsWarning.",
                )

    def _tell(self, tell: Callable[[str], object], rank: int, seen: int, whose: str, common: int | None = None) -> None:
        tell(
            f"Iterating the {self._name()}: of {seen} samples of {ranks_text([rank])} that were looked at, "
            f"{seen if common is None else common} are also {whose}, though each rank should have a part of its own. "
            f"{self._why()}"
        )

    def _warn(self, what: str, text: str) -> None:
        """Warn of something, once."""
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"Iterating the {self._name()}: {text}", PartsWarning, stacklevel=2)


def _read(text: str | None, number: int) -> list[int]:
    """Return what a rank has left of a pass; nothing if it has left nothing, or of another one."""
    try:
        of, hashes = json.loads(text or "[-1, []]")
        return [int(one) for one in hashes] if of == number else []
    except (ValueError, TypeError):  # junk
        return []
