"""Say in words why the ranks' shards are not disjoint and complete, and what to do about it.

Which cause fits is decided in ``causes``.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ddp_patch.auditing.judge.about import EXAMPLES, About, shards_of
from ddp_patch.auditing.judge.splitting import Split
from ddp_patch.auditing.problems import Problem

__all__ = [
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
