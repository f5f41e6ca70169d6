"""Why shares are not disjoint and complete, in words, and what to do about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ddp_patch.auditing.draw.coding import Coding, Numbers
from ddp_patch.auditing.draw.traits import Traits
from ddp_patch.auditing.judge.judging import Epoch, Judged, is_torn, signature, torn
from ddp_patch.auditing.report import Kind, Problem

__all__ = ["About", "Cause", "cause_of", "coverage_kinds", "unshared"]

# The kinds of problem that say that shares are not disjoint or not complete.
coverage_kinds: frozenset[Kind] = frozenset(
    {"not_sharded", "double_sharding", "ranks_disagree", "torn_batch", "missing", "repeated", "padding"}
)
_EXAMPLES = 3
# So many ranks are listed one by one.
_FEW = 4
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
            parts.append(f"{found.lacking} {of} are missing{self._such(self.missing())}.")
        if found.extra:
            shown = [f"{name} on ranks {', '.join(map(str, ranks))}" for name, ranks in self.repeated()]
            parts.append(f"{found.extra} {of} are got too often{self._such(shown)}.")
        return " ".join(parts)

    def missing(self) -> tuple[str, ...]:
        """Return the names of some samples that no rank got, or too few."""
        return tuple(self.coding.name(int(code)) for code in self.judged.samples.missing[:_EXAMPLES])

    def repeated(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the names of some samples that were got too often, with the ranks that got them."""
        return tuple((self.coding.name(int(c)), self._owners(c)) for c in self.judged.samples.repeated[:_EXAMPLES])

    def _such(self, shown: Sequence[str]) -> str:
        such = "such as" if self.epoch.units == "samples" else "with samples such as"
        return f" ({such} {'; '.join(shown)})" if shown else ""

    def _owners(self, code: int) -> tuple[int, ...]:
        return tuple(rank for rank, drawn in enumerate(self.epoch.ranks) if np.any(drawn.items == code))


@dataclass(frozen=True, slots=True)
class Cause:
    """What is wrong with an epoch's shares, and whether ranks agree that are seeded differently."""

    problems: tuple[Problem, ...]
    seeds_agree: bool | None


def cause_of(
    epoch: Epoch,
    judged: Judged,
    alike: Callable[[], tuple[Epoch, Judged]],
    traits: Traits,
    coding: Coding,
    pads: bool,
) -> Cause:
    """Say why an epoch's shares are not disjoint and complete.

    Args:
        epoch: As ranks that are seeded differently drew it.
        judged: What it came to.
        alike: Draws and judges it again with all ranks seeded alike.
        traits: Of rank 0's loader.
        coding: Gives items their names.
        pads: Whether samples may be repeated to fill the last round.
    """
    about = About(epoch, judged, coding)
    world = len(epoch.ranks)
    if not pads and not judged.found.lacking and judged.found.extra < world:
        return Cause((_padding(about, f"None may be repeated (padding=False), and {judged.found.extra} are."),), True)
    again, judged_again = alike() if world > 1 else (epoch, judged)
    if _is_whole_on_every_rank(epoch) or _is_same_on_every_rank(again):
        return Cause((_not_sharded(about, again),), None)
    if judged_again.is_covered:
        return Cause((_disagreement(about, "nothing is"),), False)
    structural = _structural(About(again, judged_again, coding), traits)
    if judged.found.lacking and not judged_again.found.lacking:
        return Cause((_disagreement(about, "none is missing"), structural), False)
    return Cause((structural,), None)


def unshared(epoch: Epoch, again: Epoch, judged: Judged, coding: Coding) -> Problem | None:
    """Return the problem that ranks seeded alike draw the same, if they do, where counting cannot tell.

    Args:
        epoch: As ranks that are seeded differently drew it.
        again: As ranks that are seeded alike did.
        judged: What it came to.
        coding: Gives items their names.
    """
    may_be = not epoch.is_constant if epoch.is_sample else _is_whole_on_every_rank(epoch)
    return _not_sharded(About(epoch, judged, coding), again) if may_be and _is_same_on_every_rank(again) else None


def _not_sharded(about: About, again: Epoch) -> Problem:
    """Say what ranks get none of which depends on which rank it is."""
    if _is_whole_stream(about, again):
        return _whole_stream(about)
    return _same_part(about) if _is_same_on_every_rank(about.epoch) else _draw_of_its_own(about)


def _whole_stream(about: About) -> Problem:
    world, each, n = len(about.epoch.ranks), _most(about.epoch), len(about.epoch.alone.items)
    times = world if about.epoch.is_sample else world * each / n
    return about.problem(
        "not_sharded",
        f"Every one of {world} ranks gets the whole stream" + ("." if about.epoch.is_sample else f", {each} samples."),
        f"An epoch costs {times:g} times what it should, and gradients average repeated samples.",
        f"{_PATCH} on every rank, after init_process_group().",
    )


def _same_part(about: About) -> Problem:
    world, many = len(about.epoch.ranks), "" if about.epoch.is_sample else f", {_most(about.epoch)} samples"
    return about.problem(
        "not_sharded",
        f"Every one of {world} ranks gets the same share{many}.",
        "The other samples take no part in the training, and gradients average repeated ones.",
        "Share by each process's own rank (torch.distributed.get_rank()), as patch_dataloader_to_ddp() does.",
    )


def _draw_of_its_own(about: About) -> Problem:
    world, many = len(about.epoch.ranks), "" if about.epoch.is_sample else f", {_most(about.epoch)} samples"
    return about.problem(
        "not_sharded",
        f"Every one of {world} ranks makes a draw of its own{many}. {about.counts()}".rstrip(),
        "Seeded alike, all ranks get the same samples; seeded differently, it is chance which they get twice or never.",
        f"{_PATCH}, with a sampler that draws for all ranks; or allow it, if each rank is meant to draw anew.",
    )


def _disagreement(about: About, alike: str) -> Problem:
    return about.problem(
        "ranks_disagree",
        f"{about.counts()} With all ranks seeded alike {alike}.",
        "The order comes from the global random states, in which the ranks differ.",
        f"{_PATCH}, which derives the order from (seed, epoch); or seed every rank alike where samplers draw.",
    )


def _structural(about: About, traits: Traits) -> Problem:
    """Say what is wrong where the ranks' seeds are not to blame: the first cause that fits."""
    causes = (
        _double_sharding,
        _torn_batch,
        _every_worker_reads,
        _same_share_of_some,
        _own_randomness,
        _missing,
        _round,
    )
    found = (cause(about, traits) for cause in causes)
    return next((problem for problem in found if problem is not None), _repeated(about))


def _double_sharding(about: About, traits: Traits) -> Problem | None:
    together, n = sum(_shared(about.epoch)), about.epoch.expected
    if not about.judged.found.lacking or not _is_shared_twice(about.epoch, traits.sharers):
        return None
    return about.problem(
        "double_sharding",
        f"{about.counts()} The {len(about.epoch.ranks)} ranks together get {together} of {n} {about.epoch.units}.",
        "Something shares what is shared already, so most samples are never seen.",
        "Share once: leave out the sampler wrapper, or the framework's own (use_distributed_sampler=False).",
    )


def _torn_batch(about: About, _: Traits) -> Problem | None:
    if about.epoch.units == "samples" or not is_torn(about.epoch):
        return None
    found, of = torn(about.epoch), sum(_shared(about.epoch))
    return about.problem(
        "torn_batch",
        f"{found.parts} of the ranks' {of} batches are parts of {found.wholes} of the {about.epoch.expected} batches "
        "that one process makes.",
        "Batches that the batch sampler made as one (P x K, one length, one shape) reach the ranks in pieces.",
        f"Share whole batches: {_patch}, or wrap it in DDPBatchSamplerWrapper.",
    )


def _every_worker_reads(about: About, traits: Traits) -> Problem | None:
    workers, shares = traits.num_workers, [drawn.items for drawn in about.epoch.ranks]
    reads_all = traits.is_iterable and all(len(share) == workers * len(np.unique(share)) for share in shares)
    if workers < 2 or not reads_all or not about.judged.found.extra:
        return None
    return about.problem(
        "repeated",
        f"{about.counts()} Each rank gets every sample of its share {workers} times, once from each worker.",
        "An iterable dataset is read by every worker, and this one splits itself by rank but not by worker.",
        "Split each rank's share by torch.utils.data.get_worker_info(), too; or pass the loader of the whole dataset "
        "through patch_dataloader_to_ddp(), which needs no splitting.",
    )


def _same_share_of_some(about: About, _: Traits) -> Problem | None:
    groups = _ranks_with_one_share(about.epoch)
    if not groups or _fills_rounds(about):
        return None
    first, *others = groups
    many = "" if about.epoch.is_sample else f", {len(about.epoch.ranks[first[0]].items)} samples"
    too = "".join(f", and so do ranks {_listed(ranks)}" for ranks in others[: _EXAMPLES - 1])
    return about.problem(
        "not_sharded",
        f"Ranks {_listed(first)} get the same share{many}{too}.",
        "Gradients average repeated samples. It is so where processes share by their local rank, or for fewer ranks "
        "than there are.",
        "Share by each process's global rank (torch.distributed.get_rank() of get_world_size()), not by the local one, "
        "as patch_dataloader_to_ddp() does.",
    )


def _own_randomness(about: About, _: Traits) -> Problem | None:
    found = about.judged.found
    if not (found.lacking and found.extra and _has_right_totals(about.epoch, about.judged)):
        return None
    return about.problem(
        "ranks_disagree",
        f"{about.counts()} It is so with all ranks seeded alike, too.",
        "The order comes from randomness that each rank has for itself: a generator that is not seeded or one that is "
        "seeded by rank, or a set.",
        f"Seed the sampler's generator alike on every rank, or {_patch} with agreement='leader'.",
    )


def _missing(about: About, _: Traits) -> Problem | None:
    if not about.judged.found.lacking:
        return None
    return about.problem(
        "missing",
        about.counts(),
        "These samples take no part in the training, and metrics leave them out.",
        f"{_PATCH}, whose shares are complete; or use uneven='pad' and drop_last=False.",
    )


def _round(about: About, _: Traits) -> Problem | None:
    world, expected = len(about.epoch.ranks), about.epoch.expected
    limit = f"To fill the last round of {world} ranks, {-expected % world} are enough."
    return _padding(about, limit) if _fills_rounds(about) else None


def _padding(about: About, limit: str) -> Problem:
    return about.problem(
        "padding",
        f"{about.counts()} {limit}",
        "Repeated samples count twice in gradients and in every metric of an evaluation.",
        "Use gather_in_order() or uneven='keep' for an evaluation, and no padding up to whole batches (accelerate: "
        "even_batches=False).",
    )


def _repeated(about: About) -> Problem:
    return about.problem(
        "repeated",
        about.counts(),
        "Repeated samples weigh more than others, and an epoch takes longer.",
        f"{_PATCH}, whose shares are disjoint.",
    )


def _most(epoch: Epoch) -> int:
    return max(len(drawn.items) for drawn in epoch.ranks)


def _shared(epoch: Epoch) -> list[int]:
    """How many units each rank got."""
    return [len(drawn.items if epoch.units == "samples" else drawn.sizes) for drawn in epoch.ranks]


def _listed(ranks: Sequence[int]) -> str:
    """Return two ranks or more in words."""
    shown = [*map(str, ranks)]
    if len(shown) > _FEW:
        shown[_EXAMPLES:] = [f"{len(shown) - _EXAMPLES} more"]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _is_whole_on_every_rank(epoch: Epoch) -> bool:
    n, world = len(epoch.alone.items), len(epoch.ranks)
    return not epoch.is_sample and n >= 2 * world > 2 and all(len(drawn.items) == n for drawn in epoch.ranks)


def _is_same_on_every_rank(epoch: Epoch) -> bool:
    """Whether every one of several ranks drew the same, and more than padding makes the same."""
    first, *others = epoch.ranks
    return bool(others) and len(first.items) > 1 and all(np.array_equal(first.items, one.items) for one in others)


def _is_whole_stream(about: About, again: Epoch) -> bool:
    """Whether ranks that draw the same get as much as one process; of a sample, whether they begin as it does."""
    alone = about.epoch.alone.items
    if about.epoch.is_sample:
        got = _each_once(again.ranks[0].items)  # several workers may read the same
        return np.array_equal(got, _each_once(alone)[: len(got)])
    each = _most(about.epoch)
    return each == len(alone) or (each > len(alone) and not about.judged.found.lacking)


def _each_once(items: Numbers) -> Numbers:
    return items[np.sort(np.unique(items, return_index=True)[1])]


def _ranks_with_one_share(epoch: Epoch) -> list[list[int]]:
    """Return the ranks that drew the same several items, one list for each share."""
    ranks_of: dict[bytes, list[int]] = {}
    for rank, drawn in enumerate(epoch.ranks):
        if len(drawn.items) > 1:
            ranks_of.setdefault(signature([drawn]), []).append(rank)
    return [ranks for ranks in ranks_of.values() if len(ranks) > 1]


def _is_shared_twice(epoch: Epoch, sharers: int) -> bool:
    """Whether each rank gets its share's share; or, where two parts say that they share, all ranks far too little."""
    n, world, shared = epoch.expected, len(epoch.ranks), _shared(epoch)
    if sharers > 1 and 3 * sum(shared) <= 2 * n:
        return True
    parts = world**2
    return n > parts > 1 and all(n // parts <= got <= -(-n // parts) for got in shared)


def _fills_rounds(about: About) -> bool:
    """Whether nothing is missing, and no more repeated than could fill a last round of whole batches."""
    epoch, found = about.epoch, about.judged.found
    largest = max((int(drawn.sizes.max()) for drawn in epoch.ranks if len(drawn.sizes)), default=1)
    return not found.lacking and found.extra <= len(epoch.ranks) * (largest if epoch.units == "samples" else 1)


def _has_right_totals(epoch: Epoch, judged: Judged) -> bool:
    n, world = len(epoch.alone.items), len(epoch.ranks)
    return n <= sum(len(drawn.items) for drawn in epoch.ranks) <= -(-n // world) * world + judged.padding
