"""Find out why the ranks' shards are not disjoint and complete. The words for each cause are in ``wording``."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ddp_patch.auditing.draw.coding import Numbers
from ddp_patch.auditing.draw.drawn import Epoch, signature
from ddp_patch.auditing.draw.traits import Traits
from ddp_patch.auditing.judge import wording
from ddp_patch.auditing.judge.about import About, shards_of
from ddp_patch.auditing.judge.counting import is_constant, repeats_rank_0
from ddp_patch.auditing.judge.judging import Judged
from ddp_patch.auditing.problems import Kind, Problem

__all__ = ["Cause", "cause_of", "coverage_kinds", "unsharded"]

# The kinds of problem that mean: shards are not disjoint, or not complete.
coverage_kinds: frozenset[Kind] = frozenset(
    {
        "not_sharded",
        "ignores_world_size",
        "double_sharding",
        "ranks_disagree",
        "split_batch",
        "missing",
        "repeated",
        "foreign",
        "padding",
    }
)


@dataclass(frozen=True, slots=True)
class Cause:
    """Say why an epoch's shards are wrong.

    Attributes:
        problems: What is wrong.
        seeds_agree: Whether ranks that are seeded differently draw one order; None where that cannot be told.
    """

    problems: tuple[Problem, ...]
    seeds_agree: bool | None


def cause_of(about: About, alike: Callable[[], tuple[Epoch, Judged]], traits: Traits, pads: bool) -> Cause:
    """Say why an epoch's shards are not disjoint and complete.

    Args:
        about: What ranks drew that are seeded differently, and how that was judged.
        alike: Draws and judges the epoch again, on ranks that are all seeded alike.
        traits: Describes rank 0's loader.
        pads: Whether samples may be repeated to fill the last round.
    """
    cause = _cause_of(about, alike, traits, pads)
    if not traits.may_be_split:
        return cause
    return replace(cause, problems=tuple(map(wording.of_a_split, cause.problems)))


def _cause_of(about: About, alike: Callable[[], tuple[Epoch, Judged]], traits: Traits, pads: bool) -> Cause:
    epoch, judged = about.epoch, about.judged
    world, found = len(epoch.ranks), judged.found
    if not pads and not found.lacking and not found.unexpected and found.extra <= max(world - 1, epoch.filling):
        limit = f"None may be repeated (padding=False), and {found.extra} are."
        return Cause((wording.padding(about, limit),), seeds_agree=True)
    again, judged_again = alike() if world > 1 else (epoch, judged)
    if _is_same_on_every_rank(again):
        return Cause((_not_sharded(about, again),), seeds_agree=None)
    # As many ranks as workers: a share that each worker reads is as long as the stream.
    draws_all = _has_all_on_every_rank(epoch) and _every_worker_reads(about, traits) is None
    if repeats_rank_0(epoch) and (_is_mostly_foreign(about) or not draws_all):
        return Cause((wording.ignored_world_size(about),), seeds_agree=None)
    if draws_all:
        return Cause((_not_sharded(about, again),), seeds_agree=None)
    if judged_again.is_covered:
        return Cause((wording.disagreement(about, "nothing is"),), seeds_agree=False)
    structural = _structural(replace(about, epoch=again, judged=judged_again), traits)
    if found.lacking and not judged_again.found.lacking:
        return Cause((wording.disagreement(about, "none is missing"), structural), seeds_agree=False)
    return Cause((structural,), seeds_agree=None)


def unsharded(about: About, again: Epoch) -> Problem | None:
    """Return the problem that ranks do not shard, for epochs in which counting cannot tell; None if they do.

    Args:
        about: What ranks drew that are seeded differently, and how that was judged.
        again: What ranks drew that are all seeded alike.
    """
    epoch = about.epoch
    may_be = not is_constant(epoch) if epoch.is_sample else _has_all_on_every_rank(epoch)
    return _not_sharded(about, again) if may_be and _is_same_on_every_rank(again) else None


def _not_sharded(about: About, again: Epoch) -> Problem:
    """Say what ranks get if it does not depend on the rank."""
    epoch = about.epoch
    if _is_whole_stream(about, again):
        world = len(epoch.ranks)
        return wording.whole_stream(about, world if epoch.is_sample else world * _most(epoch) / len(epoch.alone.items))
    return wording.same_shard(about) if _is_same_on_every_rank(epoch) else wording.draw_of_its_own(about)


def _structural(about: About, traits: Traits) -> Problem:
    """Return the first cause that fits, where ranks are seeded alike and shards are wrong all the same."""
    causes = (
        _double_sharding,
        _split_batch,
        _every_worker_reads,
        _same_shard_of_some,
        _own_randomness,
        _foreign,
        _missing,
        _padding,
    )
    found = (cause(about, traits) for cause in causes)
    return next((problem for problem in found if problem is not None), wording.repeated(about))


def _double_sharding(about: About, traits: Traits) -> Problem | None:
    fits = about.judged.found.lacking and _is_sharded_twice(about.epoch, traits.sharers)
    return wording.double_sharding(about) if fits else None


def _split_batch(about: About, _: Traits) -> Problem | None:
    pieces = about.judged.split
    return wording.split_batch(about, pieces) if pieces is not None and pieces.explains else None


def _every_worker_reads(about: About, traits: Traits) -> Problem | None:
    workers, shards = traits.num_workers, [drawn.items for drawn in about.epoch.ranks]
    reads_all = traits.is_iterable and all(len(shard) == workers * len(np.unique(shard)) for shard in shards)
    if workers < 2 or not reads_all or not about.judged.found.extra:
        return None
    return wording.every_worker_reads(about, workers)


def _same_shard_of_some(about: About, _: Traits) -> Problem | None:
    groups = _ranks_with_one_shard(about.epoch)
    return wording.same_shard_of_some(about, groups) if groups and not _fills_rounds(about) else None


def _own_randomness(about: About, _: Traits) -> Problem | None:
    found = about.judged.found
    overlaps = found.extra or found.unexpected > len(found.foreign)
    fits = found.lacking and overlaps and _has_right_totals(about.epoch, about.judged)
    return wording.own_randomness(about) if fits and not _are_slices(about.epoch) else None


def _foreign(about: About, _: Traits) -> Problem | None:
    return wording.foreign(about) if about.judged.found.unexpected else None


def _missing(about: About, _: Traits) -> Problem | None:
    return wording.missing(about) if about.judged.found.lacking else None


def _padding(about: About, _: Traits) -> Problem | None:
    limit = f"To fill the last round of {len(about.epoch.ranks)} ranks, {about.epoch.filling} are enough."
    return wording.padding(about, limit) if _fills_rounds(about) else None


def _most(epoch: Epoch) -> int:
    """Return how many samples the rank with the most got."""
    return max(len(drawn.items) for drawn in epoch.ranks)


def _has_all_on_every_rank(epoch: Epoch) -> bool:
    """Tell whether every rank got as many samples as a single process, and these are enough to mean something."""
    n, world = len(epoch.alone.items), len(epoch.ranks)
    return not epoch.is_sample and n >= 2 * world > 2 and all(len(drawn.items) == n for drawn in epoch.ranks)


def _is_mostly_foreign(about: About) -> bool:
    """Tell whether a single process never gets most of what ranks other than 0 get."""
    return 2 * about.judged.samples.unexpected > sum(len(drawn.items) for drawn in about.epoch.ranks[1:])


def _is_same_on_every_rank(epoch: Epoch) -> bool:
    """Tell whether all of several ranks drew the same, and more than one sample, which padding could explain."""
    first, *others = epoch.ranks
    return bool(others) and len(first.items) > 1 and all(np.array_equal(first.items, one.items) for one in others)


def _is_whole_stream(about: About, again: Epoch) -> bool:
    """Tell whether ranks that draw the same get all data.

    They do if they get as much as a single process. Where only a part was drawn, they do if they begin as it does.
    """
    alone = about.epoch.alone.items
    if about.epoch.is_sample:
        got = _each_once(again.ranks[0].items)  # several workers may read the same
        return np.array_equal(got, _each_once(alone)[: len(got)])
    each = _most(about.epoch)
    return each == len(alone) or (each > len(alone) and not about.judged.found.lacking)


def _each_once(items: Numbers) -> Numbers:
    """Return the different items, in the order of their first appearance."""
    return items[np.sort(np.unique(items, return_index=True)[1])]


def _ranks_with_one_shard(epoch: Epoch) -> list[list[int]]:
    """Return groups of ranks that drew the same several items."""
    ranks_of: dict[bytes, list[int]] = {}
    for rank, drawn in enumerate(epoch.ranks):
        if len(drawn.items) > 1:
            ranks_of.setdefault(signature([drawn]), []).append(rank)
    return [ranks for ranks in ranks_of.values() if len(ranks) > 1]


def _is_sharded_twice(epoch: Epoch, sharers: int) -> bool:
    """Tell whether each rank got a shard of its shard, or all ranks far too little where two parts shard."""
    n, world, shards = epoch.expected, len(epoch.ranks), shards_of(epoch)
    if sharers > 1 and 3 * sum(shards) <= 2 * n:
        return True
    parts = world**2
    return n > parts > 1 and all(n // parts <= got <= -(-n // parts) for got in shards)


def _fills_rounds(about: About) -> bool:
    """Tell whether nothing is missing, and no more repeated than fills a last round of whole batches."""
    epoch, found = about.epoch, about.judged.found
    largest = max((int(drawn.sizes.max()) for drawn in epoch.ranks if len(drawn.sizes)), default=1)
    return not found.lacking and found.extra <= len(epoch.ranks) * (largest if epoch.units == "samples" else 1)


def _has_right_totals(epoch: Epoch, judged: Judged) -> bool:
    """Tell whether ranks together got as many samples as they should, though not the right ones."""
    n, world = len(epoch.alone.items), len(epoch.ranks)
    return n <= sum(len(drawn.items) for drawn in epoch.ranks) <= -(-n // world) * world + judged.padding


def _are_slices(epoch: Epoch) -> bool:
    """Tell whether each rank got evenly spaced samples, by their numbers or in the stream, as chance gives nobody.

    A slice may break once, where it goes on from the beginning.
    """
    codes, firsts = np.unique(epoch.alone.items, return_index=True)
    got = [np.isin(codes, drawn.items) for drawn in epoch.ranks]
    return any(all(_is_spaced(places[one]) for one in got) for places in (np.arange(len(codes)), firsts))


def _is_spaced(places: Numbers) -> bool:
    gaps = np.diff(np.sort(places))
    return len(gaps) - int(np.unique(gaps, return_counts=True)[1].max(initial=0)) <= 1
