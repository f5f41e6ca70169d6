"""What ranks are told whose logs contradict each other."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ddp_patch.orders.digest import END
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.records import Entry, State
from ddp_patch.ranks.rules import Difference, Rule

__all__ = ["Parties", "held_text", "mismatch_text"]


class Parties(NamedTuple):
    """The ranks whose logs contradict each other.

    Attributes:
        here: The rank that found it.
        there: The ranks that contradict it in the same way, as far as they have come.
    """

    here: int
    there: Sequence[int]


def mismatch_text(
    name: str, parties: Parties, found: Difference, total: int | None, why_orders_differ: Callable[[], str]
) -> str:
    """Return what all ranks are told.

    Args:
        name: What errors call the loader.
        parties: Who differs.
        found: How.
        total: How many batches an epoch has, as this rank knows it; None if it does not.
        why_orders_differ: Says what differs, and what to do, where the ranks draw different orders.
    """
    here, there = ranks_text([parties.here]), ranks_text(parties.there)
    mine, theirs = found.mine, found.theirs
    began = f"Iterating the {name}"
    if found.rule is Rule.RESTORED or mine is None or theirs is None:
        return (
            f"{began}: {here} and {there} do not go on from the same position: one has restored a state, and the other "
            "made another pass. Restore the same state on every rank, at the same point of the script."
        )
    if found.rule is Rule.ORDER:
        within = theirs.mark.at if theirs.mark is not None else END
        where = f"within the first {within} items" if within != END else "or orders of different lengths"
        return (
            f"{began}: in epoch {mine.epoch}, {here} and {there} draw different orders, {where}. {why_orders_differ()}"
        )
    if found.rule is Rule.LENGTH:
        is_mine = found.shorter is mine
        behind, further = (mine, theirs) if is_mine else (theirs, mine)
        who, others = (here, there) if is_mine else (there, here)
        return f"{began}: {_length(behind, who, others, further, total)}"
    if found.rule is Rule.OTHERS:
        return (
            f"{began}: when pass {mine.number} over it began, {here} had made {_passes(mine.others)} over the other "
            f"loaders, and {there} {_passes(theirs.others)}. A rank that iterates a patched loader alone, as 'if rank "
            "== 0: validate(loader)' does, sees its shard of the data only. Iterate each patched loader on every rank; "
            "or on one rank the loader that was not patched."
        )
    is_earlier = ", or one before it differs" if found.rule is Rule.BEFORE else ""
    return (
        f"{began}: the ranks make different passes, so samples would be lost. On {here}, pass {mine.number} is over "
        f"{_what(mine)}, and on {there} over {_what(theirs)}{is_earlier}. {_ALIKE}"
    )


def held_text(name: str, ranks: Sequence[int], epoch: int, attributes: Sequence[str]) -> str:
    """Return what ranks are told whose users have changed their datasets in other ways.

    Args:
        name: What errors call the loader.
        ranks: The ranks that differ.
        epoch: The epoch.
        attributes: What differs.
    """
    return (
        f"Iterating the {name}: in epoch {epoch}, the datasets of {ranks_text(ranks)} have different samples at the "
        f"same indices: they differ in {', '.join(attributes)}. Each rank takes its shard of other samples, so some "
        "would be lost. Change the data alike on every rank: shuffle rows with a generator seeded by the epoch, list "
        "files in sorted order, and add the same rows. If only the content differs, order='seeded' does not "
        "compare it."
    )


_ALIKE = (
    "Look at a batch on every rank, or iterate the unpatched loader, or call loader.set_epoch(N) with the same N on "
    "every rank before the epoch."
)


def _what(entry: Entry) -> str:
    return f"epoch {entry.epoch}" + ("" if entry.begins_at == "0" else f" from item {entry.begins_at}")


def _passes(count: int | None) -> str:
    return f"{count} pass{'' if count == 1 else 'es'}"


def _batches(count: int, total: int | None = None) -> str:
    of_all = f" of {total}" if total is not None and total > count else ""
    return f"{count}{of_all} batch{'' if count == 1 and not of_all else 'es'}"


def _length(behind: Entry, who: str, others: str, further: Entry, total: int | None) -> str:
    epoch, taken = f"epoch {behind.epoch}", _batches(behind.batches, total)
    so = "so samples would be lost and steps would not be equal."
    if behind.state is State.ENDED:
        return (
            f"{epoch} ended after {_batches(behind.batches)} on {who}, and {others} had {further.batches} by then, "
            f"{so} Give every rank equally many batches: skip an unreadable item on all of them or raise an error."
        )
    if behind.state is State.FAILED:
        return (
            f"{who} was given an error in {epoch} after {taken}, and went on; {others} had the whole epoch, {so} "
            "Let the error end the training, or tell all ranks of it."
        )
    if behind.batches <= 1:
        return (
            f"{who} took {taken} of {epoch}, a look, and then began the next; {others} took more of {epoch}, {so} "
            f"{_ALIKE}"
        )
    return (
        f"{who} left {epoch} after {taken}; {others} took more of it, {so} Decide together when to stop: all-reduce "
        "the decision, and break on every rank after the same batch."
    )
