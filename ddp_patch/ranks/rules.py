"""The five rules by which the logs of two ranks contradict each other, and what the ranks are told.

Ranks are fast and slow, and nobody waits. So a rule holds however old the other rank's record is: what it says of a
pass can only grow. Passes are numbered, looks apart; ``n`` is such a number.

    (a) Pass n has one epoch and one beginning on all ranks.
    (b) Where two ranks have come as far in pass n, they have the same digest.
    (c) A pass that one rank has left, or that has ended there, is not longer on another.
    (d) Looks, of at most one batch, do not count if an epoch is chosen after them, or if all epochs have one order.
    (e) When pass n began, all ranks had made equally many passes over their other loaders.

A pass is left when the next one takes its second batch, or ends. A restored position begins a new list of passes.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from ddp_patch.orders.digest import END
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.log import Entry, Log, Record, State

__all__ = ["Difference", "Rule", "difference", "mismatch_text", "shorter"]


class Rule(IntEnum):
    """Which rule two logs break, in the order in which they are looked at."""

    RESTORED = 0  # one rank has restored a position, and another went on
    BEFORE = 1  # an earlier pass differs
    EPOCH = 2  # (a)
    OTHERS = 3  # (e)
    ORDER = 4  # (b)
    LENGTH = 5  # (c)
    HELD = 6  # the datasets may hold other samples: whoever finds that asks what they hold


class Difference(NamedTuple):
    """How two ranks' logs contradict each other.

    Attributes:
        rule: The rule that they break.
        mine: This rank's pass; None if it is no longer kept.
        theirs: The other rank's.
    """

    rule: Rule
    mine: Entry | None
    theirs: Entry | None


def shorter(found: Difference) -> Entry | None:
    """Return the pass that is over, after fewer batches if both are; None if neither is, or is kept."""
    over = [one for one in (found.mine, found.theirs) if one is not None and one.state is not State.RUNNING]
    return min(over, key=lambda one: one.batches, default=None)


def difference(log: Log, theirs: Record, slack: int = 0) -> Difference | None:
    """Return how another rank's record contradicts a log; None if one rank may only be faster than the other.

    Args:
        log: This rank's log.
        theirs: The other rank's record.
        slack: How many batches more one rank may have in a pass.
    """
    if theirs.lists != log.lists:
        record = log.record()
        both = ((record, theirs), (theirs, record))
        is_outgrown = any(
            new.lists == old.lists + 1 and old.entry is not None and old.entry.number >= new.closed for new, old in both
        )
        return Difference(Rule.RESTORED, record.entry, theirs.entry) if is_outgrown else None
    other = theirs.entry
    if other is None:
        return None
    own = log.entry(other.number) if other.number < log.settled else None
    if other.number < log.settled and theirs.chain != log.chain(other.number):
        return Difference(Rule.BEFORE, own, other)
    for back, (batches, state) in enumerate(theirs.before, 1):
        if (found := _length_differs(log, other.number - back, batches, state, slack)) is not None:
            return found
    rule = None if own is None else _rule_broken(log, own, other, slack)
    return None if rule is None else Difference(rule, own, other)


def _length_differs(log: Log, number: int, batches: int, state: State, slack: int) -> Difference | None:
    """Return how an earlier pass of another rank, of so many batches, contradicts this rank's.

    This rank may be in it still; or has left it as well, and missed what the other said of it meanwhile.
    """
    mine = log.entry(number) if 0 <= number < log.settled else None
    if mine is None:
        return None
    theirs = mine._replace(batches=batches, state=state, mark=None)
    is_outgrown = _is_outgrown(theirs, mine, slack) or _is_outgrown(mine, theirs, slack)
    return Difference(Rule.LENGTH, mine, theirs) if is_outgrown else None


def _rule_broken(log: Log, own: Entry, other: Entry, slack: int) -> Rule | None:
    if own.begins_at != other.begins_at or (own.epoch != other.epoch and not log.has_one_order):
        return Rule.EPOCH
    if None not in {own.others, other.others} and own.others != other.others:
        return Rule.OTHERS
    digest = log.made(own.number).digest
    if digest is not None and other.mark is not None:
        at_their_count = digest.marks.get(other.mark.at, other.mark.value)
        if at_their_count != other.mark.value:
            return Rule.ORDER
    if _is_outgrown(own, other, slack) or _is_outgrown(other, own, slack):
        return Rule.LENGTH
    return Rule.HELD if own.held != other.held else None


def _is_outgrown(behind: Entry, further: Entry, slack: int) -> bool:
    """Return whether a pass is over on one rank, and longer on another."""
    if behind.is_own or further.is_own or behind.state is State.RUNNING:
        return False
    if behind.state is State.FAILED:
        # The others may have been given the batch in place of which the error came; they leave when they hear of it.
        return further.state is State.ENDED and further.batches > behind.batches + 1 + slack
    return further.batches > behind.batches + slack


# ---- what the ranks are told ----

_LOOK_ALIKE = (
    "Look at a batch on every rank, or iterate the unpatched loader, or call loader.set_epoch(N) with the same N on "
    "every rank before the epoch."
)
# What a rank did whose pass is over, and what to do.
_OVER = {
    State.LEFT: (
        "left",
        "Decide together when to stop: all-reduce the decision, and break on every rank after the same batch.",
    ),
    State.ENDED: (
        "came to the end of",
        "Give every rank equally many batches: skip an unreadable item on all of them or raise an error.",
    ),
    State.FAILED: ("was given an error in", "Let the error end the training, or tell all ranks of it."),
}


def mismatch_text(name: str, ranks: tuple[int, Sequence[int]], found: Difference, total: int | None, why: str) -> str:
    """Return what all ranks are told: what was seen, and what to do.

    Args:
        name: What errors call the loader.
        ranks: The rank that found it, and those that contradict it in the same way, as far as they have come.
        found: How they contradict each other.
        total: How many batches an epoch has, as this rank knows it; None if it does not.
        why: What differs, and what to do, where the ranks draw different orders; what their datasets hold otherwise.
    """
    here, there = ranks_text([ranks[0]]), ranks_text(ranks[1])
    mine, theirs, rule = found.mine, found.theirs, found.rule
    if rule is Rule.RESTORED or mine is None or theirs is None:
        told = (
            f"{here} and {there} do not go on from the same position: one has restored a state, and the other made "
            "another pass. Restore the same state on every rank, at the same point of the script."
        )
    elif rule is Rule.ORDER:
        within = theirs.mark.at if theirs.mark is not None else END
        where = f"within the first {within} items" if within != END else "or orders of different lengths"
        told = f"in epoch {mine.epoch}, {here} and {there} draw different orders, {where}. {why}"
    elif rule is Rule.LENGTH:
        is_mine = shorter(found) is mine
        behind, who, others = (mine, here, there) if is_mine else (theirs, there, here)
        did, remedy = _OVER[behind.state]
        is_look = behind.state is State.LEFT and behind.batches <= 1
        told = (
            f"{who} {did} epoch {behind.epoch} after {_batches(behind.batches, total)}{', a look' if is_look else ''}; "
            f"{others} took more of it, so samples would be lost and steps would not be equal. "
            f"{_LOOK_ALIKE if is_look else remedy}"
        )
    elif rule is Rule.OTHERS:
        told = (
            f"when pass {mine.number} over it began, the ranks had made different numbers of passes over the other "
            f"loaders: {mine.others} on {here}; {theirs.others} on {there}. A rank that iterates a patched loader "
            "alone, as 'if rank == 0: validate(loader)' does, sees its shard of the data only. Iterate each patched "
            "loader on every rank; or on one rank the loader that was not patched."
        )
    elif rule is Rule.HELD:
        told = (
            f"in epoch {mine.epoch}, the datasets of {here} and {there} have different samples at the same indices: "
            f"they differ in {why}. Each rank takes its shard of other samples, so some would be lost. Change the data "
            "alike on every rank: shuffle rows with a generator seeded by the epoch, list files in sorted order, and "
            "add the same rows. If only the content differs, order='seeded' does not compare it."
        )
    else:
        is_earlier = ", or one before it differs" if rule is Rule.BEFORE else ""
        told = (
            f"the ranks make different passes, so samples would be lost. On {here}, pass {mine.number} is over "
            f"{_what(mine)}, and on {there} over {_what(theirs)}{is_earlier}. {_LOOK_ALIKE}"
        )
    return f"Iterating the {name}: {told}"


def _what(entry: Entry) -> str:
    return f"epoch {entry.epoch}" + ("" if entry.begins_at == "0" else f" from item {entry.begins_at}")


def _batches(count: int, total: int | None) -> str:
    of_all = f" of {total}" if total is not None and total > count else ""
    return f"{count}{of_all} batch{'' if count == 1 and not of_all else 'es'}"
