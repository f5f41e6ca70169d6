"""Kinds of problem, and checks of what must hold in an epoch or over all: each returns its problem, or None."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import factorial
from typing import Literal, TypeAlias, get_args

import numpy as np

from ddp_patch.auditing.drawn import Coding, EpochDraws, Numbers, RankDraws
from ddp_patch.auditing.judge_coverage import Judged, coverage, largest_batch
from ddp_patch.auditing.subject import Traits

__all__ = [
    "EXAMPLES",
    "CoverageKind",
    "Kind",
    "Lost",
    "Problem",
    "coverage_kinds",
    "error_problem",
    "idle_problem",
    "index_problem",
    "length_problem",
    "lost_of",
    "lost_problem",
    "no_step_problem",
    "order_problem",
    "problem_kinds",
    "sentence",
    "steps_problem",
    "unpatched_problem",
    "where_in",
]


def sentence(text: str) -> str:
    """Return a text that ends where a sentence ends.

    Examples:
        >>> sentence("no such file"), sentence("Is it there?")
        ('no such file.', 'Is it there?')
    """
    text = text.rstrip()
    return text if text.endswith((".", "!", "?", ":", "…")) else f"{text}."


# These mean: shards are not disjoint, or not complete.
CoverageKind: TypeAlias = Literal[
    "not_sharded",
    "ignores_world_size",
    "double_sharding",
    "ranks_disagree",
    "split_batch",
    "missing",
    "repeated",
    "foreign",
    "padding",
]
Kind: TypeAlias = Literal[
    CoverageKind, "tail_lost", "uneven_steps", "idle_workers", "same_order", "wrong_length", "error"
]
coverage_kinds: frozenset[CoverageKind] = frozenset(get_args(CoverageKind))
problem_kinds: Mapping[Kind, str] = {
    "not_sharded": "every rank gets all data, or ranks get the same part of it",
    "ignores_world_size": "make(0, 1) returns what rank 0 of several gets",
    "double_sharding": "data is sharded twice",
    "ranks_disagree": "the ranks use different orders",
    "split_batch": "a batch of the batch sampler reaches several ranks in pieces",
    "missing": "samples that no rank gets",
    "tail_lost": "the same few samples are left out in every epoch",
    "repeated": "samples that are seen more than once",
    "foreign": "samples that ranks get and one process never gets",
    "padding": "more samples are repeated than fill the last round",
    "uneven_steps": "ranks make different numbers of steps",
    "idle_workers": "workers of an iterable dataset get nothing to read",
    "same_order": "every epoch has the same order",
    "wrong_length": "len() of the loader is not the number of its steps",
    "error": "a rank's sampler raises",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Describe something that is wrong, and what to do about it.

    Attributes:
        kind: The kind of problem, a key of ``problem_kinds``.
        what: What was found, with its numbers.
        where: The epoch and the ranks.
        why: Why it matters, and where it comes from.
        remedy: What to do about it.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> (problem,) = audit(DataLoader(range(8)), world_size=2, patch=False).problems
        >>> problem.kind, problem.where, problem.what
        ('not_sharded', 'epoch 0, 2 ranks', 'Each of 2 ranks gets all of the data, 8 samples.')
    """

    kind: Kind
    what: str
    where: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.where}): {self.what} {self.why} {self.remedy}"


# Give this many examples.
EXAMPLES = 3


def where_in(epoch: EpochDraws) -> str:
    """Say which epoch, on how many ranks."""
    return f"epoch {epoch.number}, {len(epoch.ranks)} ranks"


def index_problem(epoch: EpochDraws, traits: Traits) -> Problem | None:
    """Check that an index chooses a sample of the dataset."""
    why, remedy = traits.ignores_index
    if not why or len(epoch.ranks) == 1:
        return None
    what = "Indices are shared, but they choose no samples of the dataset."
    return Problem("not_sharded", what, where_in(epoch), why, remedy)


def unpatched_problem(
    epoch: EpochDraws, again: Callable[[int], RankDraws], coding: Coding, workers: int
) -> Problem | None:
    """Check that a patched loader leaves out nothing that the unpatched one gives; None if it does not.

    Args:
        epoch: What was drawn.
        again: Draws the epoch of a number of the unpatched loader once more, seeded otherwise.
        coding: Gives samples their names.
        workers: The loader's workers.
    """
    given, alone = epoch.unpatched, epoch.alone
    if given is None or not (given.ended and alone.ended):
        return None
    found = coverage(given.items, [alone.items])
    if not found.lacking:
        return None
    if not given.has_same_samples(other := again(epoch.number)):
        # Samples are made at random: as many of others will do, where there are always as many.
        found = found.counts_alone()
        if not found.lacking or len(other.items) != len(given.items):
            return None
    such = "; ".join(coding.name(int(code)) for code in found.missing[:EXAMPLES])
    return Problem(
        "missing",
        f"{found.lacking} of the {len(given.items)} samples of the unpatched loader with num_workers={workers} are "
        f"missing{f' (such as {such})' if such else ''}, even in a world of one rank.",
        f"epoch {epoch.number}, a world of one rank",
        "The dataset gives its workers other samples than in the unpatched loader.",
        "Split the dataset by torch.utils.data.get_worker_info() in __iter__, or in worker_init_fn through "
        "get_worker_info().dataset, and by nothing else; or use num_workers=0.",
    )


# Six items have 720 orders, so an order returns by chance about once in 720 epochs. Fewer items repeat more often.
_FEW = 6


def error_problem(epoch: EpochDraws) -> Problem | None:
    """Check that no rank raises."""
    raised = {rank: drawn.error for rank, drawn in enumerate(epoch.ranks) if drawn.error}
    if not raised and epoch.alone.error:
        return Problem(
            "error",
            f"One process alone raises {sentence(epoch.alone.error)}",
            f"epoch {epoch.number}, a world of one rank",
            "The audit compares the ranks with what one process gets, so it knows nothing about their shares.",
            "Let make(0, 1) return a loader that one process can iterate.",
        )
    if not raised:
        return None
    rank, error = next(iter(raised.items()))
    alone = f"raises {sentence(epoch.alone.error)}" if epoch.alone.error else "does not."
    return Problem(
        "error",
        f"Rank {rank} raises {sentence(error)}",
        f"epoch {epoch.number}, ranks {', '.join(map(str, raised))}",
        f"In a training, the other ranks would wait for it. One process alone {alone}",
        "Mend the sampler, or pass epochs=1 if it is meant for one epoch.",
    )


def steps_problem(epoch: EpochDraws, may_differ: int) -> Problem | None:
    """Check that ranks' numbers of steps differ by ``may_differ`` at most."""
    steps = [len(drawn.sizes) for drawn in epoch.ranks]
    fewest, most = min(steps), max(steps)
    if most - fewest <= may_differ:
        return None
    return Problem(
        "uneven_steps",
        f"Rank {steps.index(fewest)} makes {fewest} steps and rank {steps.index(most)} makes {most}.",
        where_in(epoch),
        "Ranks with more steps wait in the all-reduce for the others, and the training hangs or fails there.",
        "Give each rank as many items as the others, as patch_dataloader_to_ddp() with uneven='pad' or 'drop' does.",
    )


def idle_problem(epoch: EpochDraws, traits: Traits) -> Problem | None:
    """Check that the workers that read an iterable dataset get something, where there are batches enough for all.

    A patched loader's workers read what the unpatched one's do, and some of it may be other ranks'.
    """
    drawn = epoch.ranks if epoch.unpatched is None else [epoch.unpatched]
    idle = {rank: each.idle for rank, each in enumerate(drawn) if _has_idle_workers(each, traits)}
    if not idle:
        return None
    rank, workers = next(iter(idle.items()))
    ranks = f"ranks {', '.join(map(str, idle))}" if epoch.unpatched is None else "a world of one rank"
    shards = "" if traits.num_shards is None else f" Its num_shards is {traits.num_shards}."
    return Problem(
        "idle_workers",
        f"{len(workers)} of {traits.num_workers} workers of rank {rank} get nothing of the dataset: "
        f"{', '.join(map(str, workers))}.{shards}",
        f"epoch {epoch.number}, {ranks}",
        "The other workers read all of it, so loading takes longer. The dataset gives its workers whole shards, and "
        "has too few; Hugging Face's .shuffle() may make fewer of them (one, in datasets 5.0).",
        f"Use num_workers={traits.num_workers - len(workers)}, or split the data into more shards. With datasets 5.0, "
        "pass .shuffle(..., max_buffer_input_shards=1), or use a newer version.",
    )


def _has_idle_workers(drawn: RankDraws, traits: Traits) -> bool:
    """Tell whether workers gave nothing, and the others enough for all.

    One of many may have an empty file. It is a mistake where the dataset says so itself, or half of them give nothing.
    """
    idle, workers = len(drawn.idle), traits.num_workers
    has_few_shards = traits.num_shards is not None and traits.num_shards < workers
    return drawn.ended and 0 < idle < workers <= len(drawn.sizes) and (has_few_shards or 2 * idle >= workers)


def no_step_problem(epoch: EpochDraws) -> Problem | None:
    """Check that some rank makes a step, where a single process would make one."""
    if epoch.expected == 0 or any(len(drawn.sizes) for drawn in epoch.ranks):
        return None
    return Problem(
        "missing",
        f"No rank makes a step: none gets any of the {epoch.expected} {epoch.units} that one process gets.",
        where_in(epoch),
        "A training that makes no step ends without an error and learns nothing.",
        "Use a smaller batch_size, fewer ranks, uneven='pad' or drop_last=False.",
    )


def length_problem(epoch: EpochDraws) -> Problem | None:
    """Check that ``len()`` of each rank's loader is the number of its steps, before the epoch or after."""
    for rank, drawn in enumerate(epoch.ranks):
        lengths, steps = [length for length in drawn.lengths if length is not None], len(drawn.sizes)
        if lengths and (steps not in lengths if drawn.ended else steps > max(lengths)):
            return Problem(
                "wrong_length",
                f"len() of rank {rank}'s loader says {lengths[0]} and it makes {steps} steps"
                f"{'' if drawn.ended else ' and more'}.",
                f"epoch {epoch.number}, rank {rank}",
                "Schedules, progress bars and shares that rely on it are wrong.",
                "Correct the sampler's __len__, or leave it out.",
            )
    return None


@dataclass(frozen=True, slots=True)
class Lost:
    """Hold the samples that no rank got in one epoch.

    Attributes:
        samples: Their numbers, shape (samples,).
        are_few: Whether incomplete last batches can hold them all: one for each rank, or for each of its workers that
            makes batches.
        are_last: Whether they are the last samples that a single process draws.
    """

    samples: Numbers
    are_few: bool
    are_last: bool


def lost_of(epoch: EpochDraws, judged: Judged, traits: Traits) -> Lost:
    """Return the samples that no rank got in an epoch."""
    count, missing = judged.samples.lacking, judged.samples.missing
    are_few = count < len(epoch.ranks) * traits.batchers * largest_batch(epoch, traits)
    last = epoch.alone.items[len(epoch.alone.items) - count :]
    return Lost(missing, are_few, are_last=bool(np.isin(last, missing).all()))


def lost_problem(lost: Sequence[Lost], coding: Coding) -> Problem | None:
    """Check that epochs do not all lose the same few samples."""
    first = lost[0].samples if lost else np.empty(0)
    is_same = all(np.array_equal(first, other.samples) for other in lost[1:])
    if len(lost) < 2 or not len(first) or not is_same or not all(epoch.are_few for epoch in lost):
        return None
    shown = ", ".join(coding.name(int(code)) for code in first[:3])
    samples = f"{len(first)} samples (such as {shown}) are" if len(first) > 1 else f"sample ({shown}) is"
    return Problem(
        "tail_lost",
        f"The same {samples} left out in every epoch.",
        f"epochs 0 to {len(lost) - 1}",
        "They are in the last, incomplete round or batch each time, which is dropped, so no rank ever sees them.",
        "Use uneven='pad' and drop_last=False, or shuffle, so that others are left out in each epoch.",
    )


def order_problem(
    tells: bool, epochs: int, orders: int, is_demanded: bool, items: int, *, is_told: bool = False
) -> Problem | None:
    """Return a problem for epochs that repeat an order, if they should not.

    Args:
        tells: Whether ``set_epoch()`` would change the order.
        epochs: How many epochs were drawn.
        orders: How many different orders they have.
        is_demanded: Whether the user wants every epoch to have another order.
        items: How many items the shortest epoch has.
        is_told: Whether it was called before each epoch, and did not.
    """
    if not (tells or is_demanded):
        return None
    if not tells:
        seen = "and epochs_differ=True says that they should differ."
        remedy = "Shuffle: pass shuffle=True, or a sampler that draws a new order in each __iter__."
    elif is_told:
        seen = "though set_epoch() was called before each."
        remedy = (
            "Leave persistent_workers=True out: workers that live on have copies of the dataset, which set_epoch() "
            "does not reach. Or keep the epoch in a tensor in shared memory."
        )
    else:
        seen = "and set_epoch() would change it."
        remedy = (
            "Call set_epoch(epoch) before each epoch (and pass set_epoch=True here if your training does), or pass "
            "the loader through patch_dataloader_to_ddp() instead of using a distributed sampler: then every pass is "
            "the next epoch."
        )
    return Problem(
        "same_order",
        (f"All {epochs} epochs have the same order" if orders == 1 else f"{epochs} epochs have {orders} orders")
        + f", {seen}"
        + (f" {items} items have only {factorial(items)} orders, so this may be chance." if items < _FEW else ""),
        f"epochs 0 to {epochs - 1}",
        "Every epoch then has the same batches, which a shuffle should prevent.",
        remedy,
    )
