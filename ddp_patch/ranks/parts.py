"""Compare the samples of ranks that each have a part of the data: no rank should have another rank's samples.

Two findings are certain: the data are not split, if two ranks, or two workers of a rank, have the same samples in the
same order for a whole pass; and indices are repeated, if two ranks of torch's own sampler have many in common. Other
samples in common are only a warning: they may be drawn with replacement, or repeated on purpose.
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

# If no sampler shows the indices of a rank's part, the first 256 samples of a pass are hashed, and then the samples of
# every 7th batch: a number of workers that take turns is seldom a multiple of 7.
_SAMPLES, _EACH = 256, 7
# This many samples in common may be chance.
_CHANCE = 2
# Fewer different samples that come in the same order prove nothing.
_FEWEST = 11
# For how many passes the store keeps the ranks' samples.
_SLOTS = 3


class Parts:
    """Compares the samples that ranks get of their parts.

    Args:
        name: Returns the loader's name in errors.
        why: Says why samples may be the same, and what to do.
        replicas: The ranks that have the same part as this rank.
        knows_all: Whether all samples of a rank are known, by their indices, and not only some.
        is_torchs: Whether torch's own sampler splits the samples, so that two ranks have only padding in common.
        shuffles: Whether the sampler that splits the samples draws another order after each ``set_epoch``.
        workers: How many workers read the samples in turn, if each worker should have a part of its own.
        is_padded: Whether the last samples may be padding.
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
        self._before = -1, 0  # the number of the latest pass that is over, and the hash of its order
        self._whole: tuple[int, list[int]] | None = None  # its number, and its samples
        self._in_common: dict[tuple[int, int], int] = {}  # how many samples are in common, by pass and rank
        self._warned: set[str] = set()

    def sketch(self, noted: Sketch | None) -> Sketch:
        """Return the sketch of a pass that begins: the sketch that its sampler makes, or a new one."""
        self._sketch = Sketch() if noted is None else noted
        return self._sketch

    def note_batch(self, batch: Any, sketch: Sketch | None = None) -> None:
        """Add a batch of this rank's part to the sketch of a pass; by default, of the latest pass."""
        sketch = self._sketch if sketch is None else sketch
        if sketch is not None and (sketch.seen < _SAMPLES or not sketch.added % _EACH):
            sketch.add(row_hashes(batch, _SAMPLES))
        elif sketch is not None:
            sketch.added += 1

    def compare(
        self, claims: Claims, number: int, sketch: Sketch | None, count: int | None, tell: Callable[[str], object]
    ) -> None:
        """Compare the samples of this rank in a pass, after a number of batches.

        Args:
            claims: The claims in which ranks store their samples' hashes.
            number: The number of the pass.
            sketch: The samples that this rank got.
            count: The number of batches; None if the pass is over.
            tell: Called with the text of a finding that is certain.

        Warns:
            PartsWarning: A finding is likely.
        """
        if sketch is None or not claims.read_one_stream:
            return
        if count is None:
            self._compare_order(claims, number, sketch, tell)
        if count is None and not self._is_padded:
            sketch.add(())
        if self._whole is not None and self._whole[0] < number:  # slower ranks have ended it, too
            self._compare_all(claims, *self._whole, tell)
            self._whole = None
        if count is None or not count & (count - 1):
            mine = sketch.hashes
            claims.put(f"part/{number % _SLOTS}/{claims.rank}", json.dumps([number, mine]))
            self._turn = self._turn % max(1, len(claims.members) - 1) + 1
            self._compare_all(claims, number, mine, tell)
            self._whole = (number, mine) if count is None else self._whole

    def _compare_order(self, claims: Claims, number: int, sketch: Sketch, tell: Callable[[str], object]) -> None:
        """Compare the order of a pass's samples between ranks and workers, and with the pass before.

        The order of the first samples alone proves nothing: two ranks may have drawn the same shard first.
        """
        *_, shuffles, workers = self._kind
        noted, before, self._before = sum(map(len, sketch.batches)), self._before, (number, sketch.order)
        if len({*chain.from_iterable(sketch.batches)}) < _FEWEST:  # fewer may be padding, or equal samples
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
        """Compare this rank's samples of a pass with the samples of rank 0, and of another rank in turn."""
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
        """Warn once of this kind of finding."""
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"Iterating the {self._name()}: {text}", PartsWarning, stacklevel=2)


def _read(text: str | None, number: int) -> list[int]:
    """Return the hashes that a rank has stored of a pass; none if the text is of another pass, or empty."""
    try:
        of, hashes = json.loads(text or "[-1, []]")
        return [int(one) for one in hashes] if of == number else []
    except (ValueError, TypeError):  # the text is not a rank's
        return []
