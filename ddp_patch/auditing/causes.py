"""Find why samples are lost or repeated, and word it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_patch.auditing import causes
from ddp_patch.auditing.counting import EXAMPLES, About, Judged, Split, is_constant, repeats_rank_0, shards_of
from ddp_patch.auditing.drawn import EpochDraws, Numbers, Traits, signature
from ddp_patch.auditing.epoch_report import Kind, Problem

__all__ = [
    "Cause",
    "cause_of",
    "coverage_kinds",
    "disagreement",
    "double_sharding",
    "draw_of_its_own",
    "every_worker_reads",
    "foreign",
    "ignored_world_size",
    "missing",
    "of_a_split",
    "own_randomness",
    "padding",
    "repeated",
    "same_shard",
    "same_shard_of_some",
    "split_batch",
    "unsharded",
    "whole_stream",
]


# List ranks one by one up to this many.
_FEW = 4
_PATCH = "Pass the loader through patch_dataloader_to_ddp()"
_patch = _PATCH[0].lower() + _PATCH[1:]


# Ranks that do not shard


def whole_stream(about: About, times: float) -> Problem:
    """Say that every rank gets all data, and so an epoch costs ``times`` times what it should."""
    return about.problem(
        "not_sharded",
        f"Each of {len(about.epoch.ranks)} ranks gets all of the data{about.most_samples()}.",
        f"An epoch costs {times:g} times what it should, and gradients average repeated samples.",
        f"{_PATCH} on every rank, after init_process_group().{_of_a_group(about)}",
    )


def same_shard(about: About) -> Problem:
    """Say that every rank gets the same part of the data."""
    return about.problem(
        "not_sharded",
        f"Each of {len(about.epoch.ranks)} ranks gets the same part of the data{about.most_samples()}.",
        "The other samples are never trained on, and gradients average repeated ones.",
        "Shard by each process's own rank (torch.distributed.get_rank()), as patch_dataloader_to_ddp() does."
        + _of_a_group(about),
    )


def _of_a_group(about: About) -> str:
    """Say what to do where a factory asks the process group, because there is none."""
    if not about.is_simulated:
        return ""
    return " If the factory asks torch.distributed instead of its arguments, pass processes=True."


def ignored_world_size(about: About) -> Problem:
    """Say that a factory makes for a single process what it makes for rank 0."""
    epoch, world = about.epoch, len(about.epoch.ranks)
    got = np.concatenate([np.unique(drawn.items) for drawn in epoch.ranks])
    ranks_with = np.unique(got, return_counts=True)[1]
    several = int(np.count_nonzero(ranks_with > 1))
    together = f"Together the {world} ranks get {len(ranks_with)} different samples"
    return about.problem(
        "ignores_world_size",
        f"make(0, 1) ignores world_size: it gets {len(epoch.alone.items)} samples, which are those of rank 0 of "
        f"{world}. {together}{f', {several} of them on several ranks' if several else ''}.",
        "The audit compares the ranks with what one process gets, so it can't tell whether their shares are complete.",
        "Let make(0, 1) return the loader of one process over all data: split by world_size, not by a fixed number, "
        "nor into parts made beforehand.",
    )


def draw_of_its_own(about: About) -> Problem:
    """Say that every rank draws its own samples."""
    draws = f"Each of {len(about.epoch.ranks)} ranks draws its own samples{about.most_samples()}."
    return about.problem(
        "not_sharded",
        f"{draws} {about.counts()}".rstrip(),
        "Seeded alike, all ranks get the same samples. Seeded differently, it is chance which are seen twice or never.",
        f"{_PATCH}, with a sampler that draws for all ranks; or allow it, if each rank is meant to draw its own.",
    )


def same_shard_of_some(about: About, groups: Sequence[Sequence[int]]) -> Problem:
    """Say which groups of ranks get one shard."""
    first, *others = groups
    too = "".join(f", and so do ranks {_listed(ranks)}" for ranks in others[: EXAMPLES - 1])
    return about.problem(
        "not_sharded",
        f"Ranks {_listed(first)} get the same part of the data{about.samples_of(first[0])}{too}.",
        "Gradients average repeated samples. This happens where processes shard by their local rank, or for fewer "
        "ranks than there are.",
        "Shard by each process's global rank (torch.distributed.get_rank() of get_world_size()), not by the local one, "
        "as patch_dataloader_to_ddp() does.",
    )


def _listed(ranks: Sequence[int]) -> str:
    """Return two ranks or more in words."""
    shown = [*map(str, ranks)]
    if len(shown) > _FEW:
        shown[EXAMPLES:] = [f"{len(shown) - EXAMPLES} more"]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


# Ranks that draw different orders


def disagreement(about: About, alike: str) -> Problem:
    """Say that ranks draw different orders, which ``alike`` says of ranks that are seeded alike."""
    return about.problem(
        "ranks_disagree",
        f"{about.counts()} With all ranks seeded alike, {alike}.",
        "The order or the data depend on the global random states, which differ between ranks.",
        f"{_PATCH}, which derives the order from (seed, epoch); or seed every rank alike where the order is made.",
    )


def own_randomness(about: About) -> Problem:
    """Say that ranks draw different orders even where they are seeded alike."""
    return about.problem(
        "ranks_disagree",
        f"{about.counts()} The same happens with all ranks seeded alike.",
        "Each rank has randomness of its own: a generator that is not seeded or is seeded by rank, or a set.",
        f"Seed the sampler's generator alike on every rank, or {_patch} with agreement='leader'.",
    )


# Ranks that shard, but wrongly


def double_sharding(about: About) -> Problem:
    """Say that shards are sharded again."""
    together, n = sum(shards_of(about.epoch)), about.epoch.expected
    return about.problem(
        "double_sharding",
        f"{about.counts()} The {len(about.epoch.ranks)} ranks together get {together} of {n} {about.epoch.units}.",
        "The data is sharded twice, so most samples are never seen.",
        "Shard once: leave out the sampler wrapper, or the framework's own (use_distributed_sampler=False).",
    )


def split_batch(about: About, split: Split) -> Problem:
    """Say how many batches reach several ranks in pieces."""
    return about.problem(
        "split_batch",
        f"{split.parts} of the ranks' {sum(shards_of(about.epoch))} batches are parts of {split.wholes} of the "
        f"{about.epoch.expected} batches that one process makes.",
        "Batches that the batch sampler made as one (P x K, one length, one shape) reach the ranks in pieces.",
        f"Shard whole batches: {_patch}, or wrap it in DDPBatchSamplerWrapper.",
    )


def every_worker_reads(about: About, workers: int) -> Problem:
    """Say that each of a rank's workers reads the rank's whole shard."""
    return about.problem(
        "repeated",
        f"{about.counts()} Each rank gets each of its samples {workers} times, once from each worker.",
        "Every worker reads an iterable dataset, and this one splits itself by rank but not by worker.",
        "Split each rank's share by torch.utils.data.get_worker_info(), too; or pass the loader of the whole dataset "
        "through patch_dataloader_to_ddp(), which needs no splitting.",
    )


def foreign(about: About) -> Problem:
    """Say that ranks get samples that a single process never gets."""
    return about.problem(
        "foreign",
        about.counts(),
        "Ranks train on other data than one process does: another split, another file, or indices that are off.",
        "Make every rank's loader from the same data as that of one process, make(0, 1).",
    )


def missing(about: About) -> Problem:
    """Say that no rank gets some samples."""
    return about.problem(
        "missing",
        about.counts(),
        "The missing samples are never trained on, and metrics leave them out.",
        f"{_PATCH}, whose shares are complete; or use uneven='pad' and drop_last=False.",
    )


def of_a_split(problem: Problem) -> Problem:
    """Add what ``split_dataset_by_node()`` has to do with it, which the dataset went through, or may have."""
    if problem.kind not in {"not_sharded", "missing", "repeated", "foreign"}:
        return problem
    return replace(
        problem,
        why=f"{problem.why} Where a dataset went through split_dataset_by_node(), .skip(), .take() and "
        "interleave_datasets() take from each rank's part for itself; some versions of datasets undo the split there.",
        remedy="Leave split_dataset_by_node() out, and pass the loader of the whole dataset through "
        "patch_dataloader_to_ddp().",
    )


def padding(about: About, limit: str) -> Problem:
    """Say that more is repeated than ``limit`` says may be, to fill the last round."""
    return about.problem(
        "padding",
        f"{about.counts()} {limit}",
        "Repeated samples count twice in gradients and in every metric of an evaluation.",
        "Use gather_in_order() or uneven='keep' for an evaluation, and no padding up to whole batches (accelerate: "
        "even_batches=False).",
    )


def repeated(about: About) -> Problem:
    """Say that ranks see some samples more than once."""
    return about.problem(
        "repeated",
        about.counts(),
        "Repeated samples weigh more than others, and an epoch takes longer.",
        f"{_PATCH}, whose shares are disjoint.",
    )


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


def cause_of(about: About, alike: Callable[[], tuple[EpochDraws, Judged]], traits: Traits, pads: bool) -> Cause:
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
    return replace(cause, problems=tuple(map(causes.of_a_split, cause.problems)))


def _cause_of(about: About, alike: Callable[[], tuple[EpochDraws, Judged]], traits: Traits, pads: bool) -> Cause:
    epoch, judged = about.epoch, about.judged
    world, found = len(epoch.ranks), judged.found
    if not pads and not found.lacking and not found.unexpected and found.extra <= max(world - 1, epoch.filling):
        limit = f"None may be repeated (padding=False), and {found.extra} are."
        return Cause((causes.padding(about, limit),), seeds_agree=True)
    again, judged_again = alike() if world > 1 else (epoch, judged)
    if _is_same_on_every_rank(again):
        return Cause((_not_sharded(about, again),), seeds_agree=None)
    # As many ranks as workers: a share that each worker reads is as long as the stream.
    draws_all = _has_all_on_every_rank(epoch) and _every_worker_reads(about, traits) is None
    if repeats_rank_0(epoch) and (_is_mostly_foreign(about) or not draws_all):
        return Cause((causes.ignored_world_size(about),), seeds_agree=None)
    if draws_all:
        return Cause((_not_sharded(about, again),), seeds_agree=None)
    if judged_again.is_covered:
        return Cause((causes.disagreement(about, "nothing is"),), seeds_agree=False)
    structural = _structural(replace(about, epoch=again, judged=judged_again), traits)
    if found.lacking and not judged_again.found.lacking:
        return Cause((causes.disagreement(about, "none is missing"), structural), seeds_agree=False)
    return Cause((structural,), seeds_agree=None)


def unsharded(about: About, again: EpochDraws) -> Problem | None:
    """Return the problem that ranks do not shard, for epochs in which counting cannot tell; None if they do.

    Args:
        about: What ranks drew that are seeded differently, and how that was judged.
        again: What ranks drew that are all seeded alike.
    """
    epoch = about.epoch
    may_be = not is_constant(epoch) if epoch.is_sample else _has_all_on_every_rank(epoch)
    return _not_sharded(about, again) if may_be and _is_same_on_every_rank(again) else None


def _not_sharded(about: About, again: EpochDraws) -> Problem:
    """Say what ranks get if it does not depend on the rank."""
    epoch = about.epoch
    if _is_whole_stream(about, again):
        world = len(epoch.ranks)
        return causes.whole_stream(about, world if epoch.is_sample else world * _most(epoch) / len(epoch.alone.items))
    return causes.same_shard(about) if _is_same_on_every_rank(epoch) else causes.draw_of_its_own(about)


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
    return next((problem for problem in found if problem is not None), repeated(about))


def _double_sharding(about: About, traits: Traits) -> Problem | None:
    fits = about.judged.found.lacking and _is_sharded_twice(about.epoch, traits.sharers)
    return causes.double_sharding(about) if fits else None


def _split_batch(about: About, _: Traits) -> Problem | None:
    pieces = about.judged.split
    return causes.split_batch(about, pieces) if pieces is not None and pieces.explains else None


def _every_worker_reads(about: About, traits: Traits) -> Problem | None:
    workers, shards = traits.num_workers, [drawn.items for drawn in about.epoch.ranks]
    reads_all = traits.is_iterable and all(len(shard) == workers * len(np.unique(shard)) for shard in shards)
    if workers < 2 or not reads_all or not about.judged.found.extra:
        return None
    return causes.every_worker_reads(about, workers)


def _same_shard_of_some(about: About, _: Traits) -> Problem | None:
    groups = _ranks_with_one_shard(about.epoch)
    return causes.same_shard_of_some(about, groups) if groups and not _fills_rounds(about) else None


def _own_randomness(about: About, _: Traits) -> Problem | None:
    found = about.judged.found
    overlaps = found.extra or found.unexpected > len(found.foreign)
    fits = found.lacking and overlaps and _has_right_totals(about.epoch, about.judged)
    return causes.own_randomness(about) if fits and not _are_slices(about.epoch) else None


def _foreign(about: About, _: Traits) -> Problem | None:
    return causes.foreign(about) if about.judged.found.unexpected else None


def _missing(about: About, _: Traits) -> Problem | None:
    return causes.missing(about) if about.judged.found.lacking else None


def _padding(about: About, _: Traits) -> Problem | None:
    limit = f"To fill the last round of {len(about.epoch.ranks)} ranks, {about.epoch.filling} are enough."
    return causes.padding(about, limit) if _fills_rounds(about) else None


def _most(epoch: EpochDraws) -> int:
    """Return how many samples the rank with the most got."""
    return max(len(drawn.items) for drawn in epoch.ranks)


def _has_all_on_every_rank(epoch: EpochDraws) -> bool:
    """Tell whether every rank got as many samples as a single process, and these are enough to mean something."""
    n, world = len(epoch.alone.items), len(epoch.ranks)
    return not epoch.is_sample and n >= 2 * world > 2 and all(len(drawn.items) == n for drawn in epoch.ranks)


def _is_mostly_foreign(about: About) -> bool:
    """Tell whether a single process never gets most of what ranks other than 0 get."""
    return 2 * about.judged.samples.unexpected > sum(len(drawn.items) for drawn in about.epoch.ranks[1:])


def _is_same_on_every_rank(epoch: EpochDraws) -> bool:
    """Tell whether all of several ranks drew the same, and more than one sample, which padding could explain."""
    first, *others = epoch.ranks
    return bool(others) and len(first.items) > 1 and all(np.array_equal(first.items, one.items) for one in others)


def _is_whole_stream(about: About, again: EpochDraws) -> bool:
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


def _ranks_with_one_shard(epoch: EpochDraws) -> list[list[int]]:
    """Return groups of ranks that drew the same several items."""
    ranks_of: dict[bytes, list[int]] = {}
    for rank, drawn in enumerate(epoch.ranks):
        if len(drawn.items) > 1:
            ranks_of.setdefault(signature([drawn]), []).append(rank)
    return [ranks for ranks in ranks_of.values() if len(ranks) > 1]


def _is_sharded_twice(epoch: EpochDraws, sharers: int) -> bool:
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


def _has_right_totals(epoch: EpochDraws, judged: Judged) -> bool:
    """Tell whether ranks together got as many samples as they should, though not the right ones."""
    n, world = len(epoch.alone.items), len(epoch.ranks)
    return n <= sum(len(drawn.items) for drawn in epoch.ranks) <= -(-n // world) * world + judged.padding


def _are_slices(epoch: EpochDraws) -> bool:
    """Tell whether each rank got evenly spaced samples, by their numbers or in the stream, as chance gives nobody.

    A slice may break once, where it goes on from the beginning.
    """
    codes, firsts = np.unique(epoch.alone.items, return_index=True)
    got = [np.isin(codes, drawn.items) for drawn in epoch.ranks]
    return any(all(_is_spaced(places[one]) for one in got) for places in (np.arange(len(codes)), firsts))


def _is_spaced(places: Numbers) -> bool:
    gaps = np.diff(np.sort(places))
    return len(gaps) - int(np.unique(gaps, return_counts=True)[1].max(initial=0)) <= 1
