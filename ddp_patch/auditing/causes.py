"""Why shares are not disjoint and complete, in words, and what to do about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ddp_patch.auditing.coding import Coding
from ddp_patch.auditing.judge import Epoch, Judged, is_torn
from ddp_patch.auditing.report import Kind, Problem

__all__ = ["About", "Cause", "cause_of", "coverage_kinds", "unshared"]

# The kinds of problem that say that shares are not disjoint or not complete.
coverage_kinds: frozenset[Kind] = frozenset(
    {"not_sharded", "double_sharding", "ranks_disagree", "torn_batch", "missing", "repeated", "padding"}
)
_EXAMPLES = 3
_PATCH = "Pass the loader through patch_dataloader_to_ddp()"
_patch = _PATCH[0].lower() + _PATCH[1:]


@dataclass(frozen=True, slots=True)
class About:
    """Words for one epoch's coverage."""

    epoch: Epoch
    judged: Judged
    coding: Coding

    def problem(self, kind: Kind, what: str, why: str, remedy: str) -> Problem:
        """Return a problem of this epoch."""
        return Problem(kind, what, f"epoch {self.epoch.number}, {len(self.epoch.ranks)} ranks", why, remedy)

    def counts(self) -> str:
        """Say how many are missing and repeated, with examples."""
        of, found = f"of {self.epoch.expected} {self.epoch.units}", self.judged.found
        parts = []
        if found.lacking:
            parts.append(f"{found.lacking} {of} are missing{_such(self.missing())}.")
        if found.extra:
            shown = [f"{name} on ranks {', '.join(map(str, ranks))}" for name, ranks in self.repeated()]
            parts.append(f"{found.extra} {of} are got too often{_such(shown)}.")
        return " ".join(parts)

    def missing(self) -> tuple[str, ...]:
        """Return the names of some samples that no rank got, or too few."""
        return tuple(self.coding.name(int(code)) for code in self.judged.samples.missing[:_EXAMPLES])

    def repeated(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the names of some samples that were got too often, with the ranks that got them."""
        return tuple((self.coding.name(int(c)), self._owners(c)) for c in self.judged.samples.repeated[:_EXAMPLES])

    def _owners(self, code: int) -> tuple[int, ...]:
        return tuple(rank for rank, drawn in enumerate(self.epoch.ranks) if np.any(drawn.items == code))


def _such(shown: Sequence[str]) -> str:
    return f" (such as {'; '.join(shown)})" if shown else ""


@dataclass(frozen=True, slots=True)
class Cause:
    """What is wrong with an epoch's shares, and whether ranks agree that are seeded differently."""

    problems: tuple[Problem, ...]
    seeds_agree: bool | None


def cause_of(
    epoch: Epoch,
    judged: Judged,
    alike: Callable[[], tuple[Epoch, Judged]],
    sharers: int,
    coding: Coding,
    pads: bool,
) -> Cause:
    """Say why an epoch's shares are not disjoint and complete.

    Args:
        epoch: As ranks that are seeded differently drew it.
        judged: What it came to.
        alike: Draws and judges it again with all ranks seeded alike.
        sharers: How many parts of rank 0's loader share by themselves.
        coding: Gives items their names.
        pads: Whether samples may be repeated to fill the last round.
    """
    about = About(epoch, judged, coding)
    world = len(epoch.ranks)
    if not pads and not judged.found.lacking and judged.found.extra < world:
        return Cause((_padding(about, f"None may be repeated (padding=False), and {judged.found.extra} are."),), True)
    again, judged_again = alike()
    if _is_whole_on_every_rank(epoch) or _is_same_on_every_rank(again):
        return Cause((_same_part(about) if _is_part(again) else _not_sharded(about),), None)
    if judged_again.is_covered:
        return Cause((_disagreement(about, "nothing is"),), False)
    structural = _structural(About(again, judged_again, coding), sharers)
    if judged.found.lacking and not judged_again.found.lacking:
        return Cause((_disagreement(about, "none is missing"), structural), False)
    return Cause((structural,), None)


def unshared(epoch: Epoch, again: Epoch, judged: Judged, coding: Coding) -> Problem | None:
    """Return the problem that ranks seeded alike draw the same beginning of a stream, if they do."""
    return _not_sharded(About(epoch, judged, coding)) if _is_same_on_every_rank(again) else None


def _same_part(about: About) -> Problem:
    world, each = len(about.epoch.ranks), max(len(drawn.items) for drawn in about.epoch.ranks)
    return about.problem(
        "not_sharded",
        f"Every one of {world} ranks gets the same share, {each} samples.",
        "The others take no part in the training, and gradients average repeated samples.",
        "Share by each process's own rank (torch.distributed.get_rank()), as patch_dataloader_to_ddp() does.",
    )


def _not_sharded(about: About) -> Problem:
    world, each = len(about.epoch.ranks), max(len(drawn.items) for drawn in about.epoch.ranks)
    return about.problem(
        "not_sharded",
        f"Every one of {world} ranks gets the whole stream" + ("." if about.epoch.is_sample else f", {each} samples."),
        f"An epoch costs {world} times what it should, and gradients average repeated samples.",
        f"{_PATCH} on every rank, after init_process_group().",
    )


def _disagreement(about: About, alike: str) -> Problem:
    return about.problem(
        "ranks_disagree",
        f"{about.counts()} With all ranks seeded alike {alike}.",
        "The order comes from the global random states, in which the ranks differ.",
        f"{_PATCH}, which derives the order from (seed, epoch); or seed every rank alike where samplers draw.",
    )


def _structural(about: About, sharers: int) -> Problem:
    """Say what is wrong where the ranks' seeds are not to blame."""
    epoch, judged = about.epoch, about.judged
    found, world = judged.found, len(epoch.ranks)
    if found.lacking and _is_shared_twice(epoch, sharers):
        return about.problem(
            "double_sharding",
            f"{about.counts()} Each rank gets 1 / {world * world} of the stream where 1 / {world} is its share.",
            "Something shares what is shared already, so most samples are never seen.",
            "Share once: leave out the sampler wrapper, or the framework's own (use_distributed_sampler=False).",
        )
    if epoch.units == "batches" and is_torn(epoch):
        return about.problem(
            "torn_batch",
            about.counts(),
            "Batches that the batch sampler made as one (P x K, one length, one shape) reach the ranks in pieces.",
            f"Share whole batches: {_patch}, or wrap it in DDPBatchSamplerWrapper.",
        )
    if found.lacking and found.extra and _has_right_totals(epoch, judged):
        return about.problem(
            "ranks_disagree",
            f"{about.counts()} It is so with all ranks seeded alike, too.",
            "The order comes from randomness that each rank has for itself: a generator that is not seeded, or a set.",
            f"Seed the sampler's generator alike on every rank, or {_patch} with agreement='leader'.",
        )
    if found.lacking:
        return about.problem(
            "missing",
            about.counts(),
            "These samples take no part in the training, and metrics leave them out.",
            f"{_PATCH}, whose shares are complete; or use uneven='pad' and drop_last=False.",
        )
    largest = max((int(drawn.sizes.max()) for drawn in epoch.ranks if len(drawn.sizes)), default=1)
    if found.extra <= world * (largest if epoch.units == "samples" else 1):
        return _padding(about, f"To fill the last round of {world} ranks, {-epoch.expected % world} are enough.")
    return about.problem(
        "repeated",
        about.counts(),
        "Repeated samples weigh more than others, and an epoch takes longer.",
        f"{_PATCH}, whose shares are disjoint.",
    )


def _padding(about: About, limit: str) -> Problem:
    return about.problem(
        "padding",
        f"{about.counts()} {limit}",
        "Repeated samples count twice in gradients and in every metric of an evaluation.",
        "Use gather_in_order() or uneven='keep' for an evaluation, and no padding up to whole batches (accelerate: "
        "even_batches=False).",
    )


def _is_whole_on_every_rank(epoch: Epoch) -> bool:
    n, world = len(epoch.alone.items), len(epoch.ranks)
    return not epoch.is_sample and n >= 2 * world and all(len(drawn.items) == n for drawn in epoch.ranks)


def _is_same_on_every_rank(epoch: Epoch) -> bool:
    """Whether every rank drew the same, and more than padding makes the same."""
    first = epoch.ranks[0]
    return len(first.items) > 1 and all(np.array_equal(first.items, drawn.items) for drawn in epoch.ranks[1:])


def _is_part(epoch: Epoch) -> bool:
    """Whether ranks, which all draw the same, leave out most of what one process draws, from its beginning on."""
    got, alone = epoch.ranks[0].items, epoch.alone.items
    return 2 * len(got) <= len(alone) and not np.array_equal(got, alone[: len(got)])


def _is_shared_twice(epoch: Epoch, sharers: int) -> bool:
    n, world = epoch.expected, len(epoch.ranks)
    shared = [len(drawn.items if epoch.units == "samples" else drawn.sizes) for drawn in epoch.ranks]
    parts = world**2
    return sharers > 1 or (n > parts and all(n // parts <= got <= -(-n // parts) for got in shared))


def _has_right_totals(epoch: Epoch, judged: Judged) -> bool:
    n, world = len(epoch.alone.items), len(epoch.ranks)
    return n <= sum(len(drawn.items) for drawn in epoch.ranks) <= -(-n // world) * world + judged.padding
