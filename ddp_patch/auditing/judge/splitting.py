"""Find batches that a batch sampler made as one and that reach several ranks in pieces."""

from dataclasses import dataclass

from ddp_patch.auditing.draw.drawn import Epoch
from ddp_patch.auditing.judge.counting import batches_of

__all__ = ["Split", "split_of"]


@dataclass(frozen=True, slots=True)
class Split:
    """Count batches of a single process of which two or more ranks hold parts.

    Attributes:
        wholes: How many of these batches there are.
        parts: How many of the ranks' batches are parts of them.
        foreign: How many of the ranks' batches the single process does not make.
    """

    wholes: int
    parts: int
    foreign: int

    @property
    def explains(self) -> bool:
        """Tell whether split batches explain most of the batches that the single process does not make."""
        return 2 * self.parts > self.foreign


def split_of(epoch: Epoch) -> Split:
    """Look for batches of the single process in pieces on several ranks."""
    wholes = {frozenset(batch.tolist()) for batch in batches_of(epoch.alone)}
    wholes_with: dict[int, list[frozenset[int]]] = {}
    for whole in wholes:
        for item in whole:
            wholes_with.setdefault(item, []).append(whole)
    wholes_of_foreign: list[list[frozenset[int]]] = []  # for each foreign batch, the batches that it is a part of
    ranks_with_part: dict[frozenset[int], set[int]] = {}
    for rank, drawn in enumerate(epoch.ranks):
        for batch in {frozenset(batch.tolist()) for batch in batches_of(drawn)} - wholes:
            around = [whole for whole in wholes_with.get(next(iter(batch), -1), []) if batch < whole]
            wholes_of_foreign.append(around)
            for whole in around:
                ranks_with_part.setdefault(whole, set()).add(rank)
    in_pieces = {whole for whole, ranks in ranks_with_part.items() if len(ranks) > 1}
    parts = sum(not in_pieces.isdisjoint(around) for around in wholes_of_foreign)
    return Split(len(in_pieces), parts, len(wholes_of_foreign))
