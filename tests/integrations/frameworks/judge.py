"""What became of a loader on all ranks, said in a few words."""

from collections import Counter
from itertools import chain, zip_longest

from frameworks.base import EPOCHS, HANGS, Raised, Seen
from frameworks.kinds import Kind

__all__ = ["judge"]


def judge(kind: Kind, ranks: "list[Seen | Raised]") -> str:
    """Say what the ranks' training steps saw of a kind of loader, in the passes before one that goes back.

    What is as it should be is not said: weights and batches that are kept, equal steps, a new order in each epoch.
    """
    if errors := sorted({rank.error for rank in ranks if isinstance(rank, Raised)}):
        return "hangs" if errors == [HANGS] else f"raises `{'`, `'.join(errors)}`"
    epochs: list[tuple[list[list[int]], ...]] = [
        tuple([batch.numbers for batch in epoch] for epoch in epochs_of_ranks)
        for epochs_of_ranks in zip(*(rank.epochs for rank in ranks if isinstance(rank, Seen)), strict=True)
    ][: EPOCHS.index(1)]
    facts = [*_cover(kind, epochs), *_weights(kind, epochs), *_uneven_steps(epochs)]
    return ", ".join(facts if _is_new(epochs) else [*facts, "same order every epoch"])


def _cover(kind: Kind, epochs: list[tuple[list[list[int]], ...]]) -> list[str]:
    """Whose the samples are in the worst epoch, and whether batches are those of the user."""
    _, worst = max(_cover_of_epoch(kind, shares) for shares in epochs)
    return [worst, *_split_batches(kind, epochs)]


def _cover_of_epoch(kind: Kind, shares: tuple[list[list[int]], ...]) -> tuple[int, str]:
    """How many samples are amiss, and what that is."""
    taken = [Counter(chain.from_iterable(share)) for share in shares]
    together = sum(taken, Counter[int]())
    missing, repeated = kind.n - len(together), together.total() - len(together)
    if all(len(numbers) == kind.n for numbers in taken):
        return missing + repeated, "all data on every rank"
    # One unit less than there are ranks may be needed to fill the last round: a sample, or a batch of them.
    unit = 1 if kind.is_whole is None else max(len(batch) for share in shares for batch in share)
    if not missing and repeated <= (len(shares) - 1) * unit:
        return 0, "each sample once"
    parts = {f"{missing} of {kind.n} missing": missing, f"{repeated} repeat{'s' if repeated > 1 else ''}": repeated}
    return missing + repeated, ", ".join(text for text, number in parts.items() if number)


def _split_batches(kind: Kind, epochs: list[tuple[list[list[int]], ...]]) -> list[str]:
    if kind.is_whole is None:
        return []
    batches = list(chain.from_iterable(chain.from_iterable(epochs)))
    # No rank makes more steps than one process, whose batches these should be.
    few = max(len(share) for shares in epochs for share in shares) <= len(kind.make())
    return [] if few and all(map(kind.is_whole, batches)) else ["batches split"]


def _weights(kind: Kind, epochs: list[tuple[list[list[int]], ...]]) -> list[str]:
    if kind.is_weighted is None:
        return []
    seen = [
        [number for batches in zip_longest(*shares, fillvalue=[]) for batch in batches for number in batch]
        for shares in epochs
    ]
    return [] if kind.is_weighted(seen) else ["weights ignored"]


def _uneven_steps(epochs: list[tuple[list[list[int]], ...]]) -> list[str]:
    steps = [[len(share) for share in shares] for shares in epochs]
    uneven = next((numbers for numbers in steps if len(set(numbers)) > 1), [])
    return [f"{' and '.join(map(str, uneven))} steps"] if uneven else []


def _is_new(epochs: list[tuple[list[list[int]], ...]]) -> bool:
    """Whether every rank sees another order in every epoch."""
    return all(len({repr(epoch) for epoch in rank}) == len(rank) for rank in zip(*epochs, strict=True))
