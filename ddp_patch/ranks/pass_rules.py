"""The rules by which two ranks' words about a pass contradict each other, and the texts of mismatches."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

from ddp_patch.orders.digest import END
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.pass_facts import State, Word
from ddp_patch.validation import counted

Rule: TypeAlias = Literal["passes", "others", "data", "order", "length", "numbers"]


def rule_broken(mine: Word, theirs: Word, marks: Mapping[int, tuple[int, int]], *, has_one_order: bool) -> Rule | None:
    """Return the rule by which two ranks' words about a pass contradict each other; None if both may be true.

    Args:
        mine: This rank's word.
        theirs: The other rank's word.
        marks: This rank's marks of the pass.
        has_one_order: Whether all epochs have the same order, so that ranks may be in different epochs.
    """
    if mine.item != theirs.item or (mine.epoch != theirs.epoch and not has_one_order):
        return "passes"
    if None not in {mine.other_passes, theirs.other_passes} and mine.other_passes != theirs.other_passes:
        return "others"
    if mine.data and theirs.data and mine.data != theirs.data:
        return "data"
    count, items, numbers = theirs.mark or (0, 0, 0)
    own_items, own_numbers = marks.get(count, (items, numbers))
    if own_items != items:
        return "order"
    if _is_outgrown(mine, theirs) or _is_outgrown(theirs, mine):
        return "length"
    return "numbers" if own_numbers != numbers else None


def _is_outgrown(behind: Word, further: Word) -> bool:
    """Return whether a pass is over on one rank, and longer on another."""
    if behind.slack is None or further.slack is None or behind.state is State.RUNNING:
        return False
    if behind.state is State.FAILED:
        # Other ranks may have got the batch that failed here. Those ranks stop when they read of the error.
        return further.state is State.ENDED and further.batches > behind.batches + 1 + behind.slack
    return further.batches > behind.batches + behind.slack


def shorter(mine: Word, theirs: Word) -> Word:
    """Return the word of the rank on which the pass is over; of two such ranks, the one with fewer batches."""
    return min((one for one in (mine, theirs) if one.state is not State.RUNNING), key=lambda one: one.batches)


_LOOK_ALIKE = (
    "Look at a batch on every rank, or iterate the unpatched loader, or call loader.set_epoch(N) with the same N on "
    "every rank before the epoch."
)
ALL_ITERATE = "Iterate each patched loader on every rank; or, on one rank, the loader that was not patched."
# By the state of a pass that is over: what the rank did, and what to do.
_OVER = {
    State.LEFT: ("left", f"Let every rank break after the same batch: all-reduce the decision to stop. {_LOOK_ALIKE}"),
    State.ENDED: (
        "came to the end of",
        "Give every rank equally many batches: skip an unreadable item on all of them or raise an error.",
    ),
    State.FAILED: ("was given an error in", "Let the error end the training, or tell all ranks of it."),
}


def mismatch_text(name: str, number: int, rule: Rule, words: tuple[Word, Word], why: str) -> str:
    """Return the text of a mismatch for all ranks: what differs, and what to do.

    Args:
        name: The loader's name in errors.
        number: The number of the pass.
        rule: The rule that is broken.
        words: This rank's word, and the other rank's.
        why: For "order" and "numbers", why they may differ, and what to do; for "data", what differs.
    """
    mine, theirs = words
    here, there = (ranks_text([word.rank]) for word in words)
    epoch = mine.epoch
    if rule == "passes":
        each = f"{_what(mine)} on {here}, and over {_what(theirs)} on {there}"
        seen = f"the ranks make different passes: pass {number} is over {each}"
        remedy = f"{_LOOK_ALIKE} Restore a state on every rank or on none."
    elif rule == "order":
        count = END if theirs.mark is None else theirs.mark[0]
        within = f"within the first {counted(count, 'item')}" if count != END else "or orders of different lengths"
        seen, remedy = f"in epoch {epoch}, {here} and {there} draw different orders, {within}", why
    elif rule == "length":
        behind = shorter(mine, theirs)
        who, others = (here, there) if behind is mine else (there, here)
        did, remedy = _OVER[behind.state]
        batches = counted(behind.batches, "batch")
        seen = f"{who} {did} epoch {behind.epoch} after {batches}; {others} took more of it"
    elif rule == "others":
        seen = (
            f"when pass {number} over it began, the ranks had made different numbers of passes over their other "
            f"loaders: {mine.other_passes} on {here}; {theirs.other_passes} on {there}"
        )
        remedy = ALL_ITERATE
    elif rule == "numbers":
        seen = f"in epoch {epoch}, {here} and {there} read items of the same names and with other numbers"
        remedy = why
    else:
        seen = f"in epoch {epoch}, the datasets of {here} and {there} differ at the same indices, in {why}"
        remedy = (
            "Make changes of the data alike on every rank: seed shuffles by the epoch, and sort files. If these may "
            "differ, pass fingerprint= a function of the dataset that returns what names its samples, or "
            "fingerprint=None to compare no data."
        )
    lost = "" if rule in {"order", "numbers"} else ", so samples would be lost"  # ``why`` says so
    return f"Iterating the {name}: {seen}{lost}. {remedy}"


def _what(word: Word) -> str:
    return f"epoch {word.epoch}" + (f" from item {word.item}" if word.item else "")
