"""Compare the samples of ranks that each have a part of the data: no rank should have another rank's samples.

Two findings are certain: the data are not split, if two ranks, or two workers of a rank, have the same samples in the
same order for a whole pass; and indices are repeated, if two ranks of torch's own sampler have many in common. Other
samples in common are only a warning: they may be drawn with replacement, or repeated on purpose.
"""

import json
import warnings
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from itertools import chain

from torch.utils.data import DistributedSampler

from ddp_patch.errors import PartsWarning
from ddp_patch.loaders.overlap import SAMPLES, Sketch, common_items, is_more_than_padding
from ddp_patch.ranks.claims import Claims
from ddp_patch.ranks.exchange import ranks_text

# This many samples in common may be chance.
_CHANCE = 2
# Fewer different samples that come in the same order prove nothing.
_FEWEST = 11
# For how many passes the store keeps the ranks' samples.
_SLOTS = 3


@dataclass(eq=False)
class Parts:
    """Compares the samples that ranks get of their parts.

    Attributes:
        name: Returns the loader's name in errors.
        why: Says why samples may be the same, and what to do.
        replicas: The ranks that have the same part as this rank.
        sampler: The sampler that splits the samples and shows the indices of all; None if only some samples are known.
        workers: How many workers read the samples in turn, if each worker should have a part of its own.
        is_padded: Whether the last samples may be padding.
    """

    name: Callable[[], str]
    why: Callable[[], str]
    _: KW_ONLY
    replicas: Collection[int] = ()
    sampler: object = None
    workers: int = 1
    is_padded: bool = True

    def __post_init__(self) -> None:
        self._before = -1, 0  # the number of the latest pass that is over, and the hash of its order
        self._whole: tuple[int, list[int]] | None = None  # its number, and its samples
        self._in_common: dict[tuple[int, int], int] = {}  # how many samples are in common, by pass and rank
        self._of_workers = 0  # how many samples of this rank's first worker other workers have, in all passes
        self._warned = set[str]()

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
            if not self.is_padded:
                sketch.add(())
        if self._whole is not None and self._whole[0] < number:  # slower ranks have ended it, too
            self._compare_all(claims, *self._whole, None, tell)
            self._whole = None
        if count is None or not count & (count - 1):
            mine = sketch.hashes
            claims.put(f"part/{number % _SLOTS}/{claims.rank}", json.dumps([number, mine]))
            self._compare_all(claims, number, mine, count, tell)
            self._whole = (number, mine) if count is None else self._whole

    def _compare_order(self, claims: Claims, number: int, sketch: Sketch, tell: Callable[[str], object]) -> None:
        """Compare the order of a pass's samples between ranks and workers, and with the pass before.

        The order of the first samples alone proves nothing: two ranks may have drawn the same shard first.
        """
        seen, before, self._before = [*chain.from_iterable(sketch.batches)], self._before, (number, sketch.order)
        if len({*seen}) < _FEWEST:  # fewer may be padding, or equal samples
            return
        whose = claims.claim(f"{number}/order/{sketch.order:x}", f"{claims.rank}")
        if whose.isdecimal() and int(whose) not in {claims.rank, *self.replicas}:
            tell(self._found(claims.rank, len(seen), len(seen), f"{ranks_text([int(whose)])}'s, in the same order"))
        of_workers = [[*chain.from_iterable(sketch.batches[worker :: self.workers])] for worker in range(self.workers)]
        least = min(map(len, of_workers))
        first, *others = (samples[:least] for samples in of_workers)
        if least >= _FEWEST and len(seen) <= SAMPLES and others and first == others[0]:
            text = f"those of worker 0 are also worker 1's on {ranks_text([claims.rank])}, in the same order"
            tell(f"Iterating the {self.name()}: of 2 x {least} samples that were looked at, {text}. {self.why()}")
        common = len({*first} & {*chain.from_iterable(others)}) if len(seen) <= SAMPLES else 0  # else in no turn
        self._of_workers += common
        if common and is_more_than_padding(self._of_workers):
            self._warn_in_common(claims.rank, len(seen), common, "of worker 0 are also another worker's")
        shuffles = getattr(self.sampler, "shuffle", False) is True and hasattr(self.sampler, "set_epoch")
        if shuffles and before == (number - 1, sketch.order):
            self._warn(
                "one order",
                f"pass {number} over it has the same order as the one before, because nobody called the set_epoch() by "
                "which its sampler shuffles. Call loader.sampler.set_epoch(epoch) before each epoch; or give "
                "patch_dataloader_to_ddp() the loader as for one process, with shuffle=True and without that sampler. "
                "If one order is right, as for validation, ignore this PartsWarning.",
            )

    def _compare_all(
        self, claims: Claims, number: int, mine: list[int], count: int | None, tell: Callable[[str], object]
    ) -> None:
        """Compare this rank's samples of a pass with the samples of rank 0, and of another rank in turn."""
        members, turn = claims.members, number + (count or 0).bit_length()
        away = 1 + turn % max(1, len(members) - 1)
        others = {members[0], members[(members.index(claims.rank) + away) % len(members)]}
        for rank in sorted(others - {claims.rank, *self.replicas}):
            theirs = _read(claims.value(f"part/{number % _SLOTS}/{rank}"), number)
            seen, common = len({*mine}), common_items(mine, theirs)
            self._in_common[number, rank] = common
            in_all = sum(self._in_common.values()) if self.sampler is None else common  # passes may be short
            is_more = is_more_than_padding(in_all, of=0 if self.sampler is None else len(mine))
            if is_more and type(self.sampler) is DistributedSampler:  # two ranks have only padding in common
                tell(self._found(claims.rank, seen, common, f"{ranks_text([rank])}'s"))
            if common and (is_more or (in_all > _CHANCE and not self.is_padded)):
                self._warn_in_common(claims.rank, seen, common, f"are also {ranks_text([rank])}'s")

    def _found(self, rank: int, seen: int, common: int, whose: str) -> str:
        return (
            f"Iterating the {self.name()}: of {seen} samples of {ranks_text([rank])} that were looked at, {common} are "
            f"also {whose}, though each rank should have a part of its own. {self.why()}"
        )

    def _warn_in_common(self, rank: int, seen: int, common: int, whose: str) -> None:
        self._warn(
            "in common",
            f"of {seen} samples of {ranks_text([rank])} that were looked at, {common} {whose}. That may be on purpose, "
            "where samples are drawn with replacement, come from resampled shards, or are repeated to be augmented; or "
            f"others are lost. How often each comes in an epoch of all ranks shows which. {self.why()} If it is on "
            "purpose, ignore this PartsWarning.",
        )

    def _warn(self, what: str, text: str) -> None:
        """Warn once of this kind of finding."""
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"Iterating the {self.name()}: {text}", PartsWarning, stacklevel=2)


def _read(text: str | None, number: int) -> list[int]:
    """Return the hashes that a rank has stored of a pass; none if the text is of another pass, or empty."""
    try:
        of, hashes = json.loads(text or "[-1, []]")
        return [int(one) for one in hashes] if of == number else []
    except (ValueError, TypeError):  # the text is not a rank's
        return []
