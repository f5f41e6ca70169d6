"""Judge why samples are lost or repeated: find the first cause that fits, and word it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_patch.auditing.drawn import Coding, EpochDraws, Numbers, signature
from ddp_patch.auditing.judge_coverage import Judged, is_constant, repeats_rank_0
from ddp_patch.auditing.judge_problems import EXAMPLES, Kind, Problem, where_in
from ddp_patch.auditing.subject import Traits

__all__ = ["About", "cause_of", "of_a_split", "unsharded"]


# List ranks one by one up to this many.
_FEW = 4
_PATCH = "Pass the loader through patch_dataloader_to_ddp()"
_patch = _PATCH[0].lower() + _PATCH[1:]


@dataclass(frozen=True, slots=True)
class About:
    """Word what was found in an epoch.

    Args:
        epoch: What was drawn.
        judged: How the epoch was judged.
        coding: Gives items their names.
        is_simulated: Whether a factory made the loaders of ranks that are simulated, without a process group.
    """

    epoch: EpochDraws
    judged: Judged
    coding: Coding
    is_simulated: bool = False

    def problem(self, kind: Kind, what: str, why: str, remedy: str) -> Problem:
        """Return a problem of this epoch."""
        return Problem(kind, what, where_in(self.epoch), why, remedy)

    def counts(self) -> str:
        """Say how many are missing, repeated and foreign, with examples."""
        found, samples, units = self.judged.found, self.judged.samples, self.epoch.units
        parts = []
        if found.lacking:
            such = self._such(samples.missing, with_ranks=False)
            parts.append(f"{found.lacking} of {self.epoch.expected} {units} are missing{such}.")
        if (different := len(found.repeated)) > 0:
            # Those of a part of an epoch, of which only the beginning was read, are not counted against its length.
            of = f" of {self.epoch.expected}" * (not self.epoch.is_sample)
            in_all = f", {found.extra} times too often in all" * (found.extra > different)
            such = self._such(samples.repeated)
            parts.append(f"{different}{of} {units} are seen more often than in one process{in_all}{such}.")
        elif found.extra:  # how many there are is all that is known of a world of one rank
            parts.append(f"Ranks get {found.extra} {units} too many.")
        if found.unexpected:
            such = self._such(samples.foreign)
            parts.append(f"Ranks get {found.unexpected} {units} that one process never gets{such}.")
        return " ".join(parts)

    def samples(self, count: int) -> str:
        """Say how many samples a rank got; nothing where only a part was drawn."""
        return "" if self.epoch.is_sample else f", {count} samples"

    def _such(self, codes: Numbers, *, with_ranks: bool = True) -> str:
        """Name some samples, and the ranks that got them."""
        shown = [self.coding.name(int(code)) + (self._on(code) if with_ranks else "") for code in codes[:EXAMPLES]]
        such = "such as" if self.epoch.units == "samples" else "with samples such as"
        return f" ({such} {'; '.join(shown)})" if shown else ""

    def _on(self, code: int) -> str:
        ranks = [str(rank) for rank, drawn in enumerate(self.epoch.ranks) if np.any(drawn.items == code)]
        return f" on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"


def cause_of(
    about: About, alike: Callable[[], tuple[EpochDraws, Judged]], traits: Traits, pads: bool
) -> Sequence[Problem]:
    """Say why an epoch's shards are not disjoint and complete.

    Args:
        about: What ranks drew that are seeded differently, and how that was judged.
        alike: Draws and judges the epoch again, on ranks that are all seeded alike.
        traits: Describes rank 0's loader.
        pads: Whether samples may be repeated to fill the last round.
    """
    epoch, judged = about.epoch, about.judged
    world, found = len(epoch.ranks), judged.found
    if not pads and not found.lacking and not found.unexpected and found.extra <= max(world - 1, epoch.filling):
        return [_too_much_padding(about, f"None may be repeated (padding=False), and {found.extra} are.")]
    again, judged_again = alike() if world > 1 else (epoch, judged)
    # As many ranks as workers: a share that each worker reads is as long as the stream.
    draws_all = _has_all_on_every_rank(epoch) and _every_worker_reads(about, traits) is None
    if _is_same_on_every_rank(again):
        return [_not_sharded(about, again)]
    if repeats_rank_0(epoch) and (_is_mostly_foreign(about) or not draws_all):
        return [_ignored_world_size(about)]
    if draws_all:
        return [_not_sharded(about, again)]
    if judged_again.is_covered:
        return [_disagreement(about, "nothing is")]
    structural = _structural(replace(about, epoch=again, judged=judged_again), traits)
    if found.lacking and not judged_again.found.lacking:
        return [_disagreement(about, "none is missing"), structural]
    return [structural]


def unsharded(about: About, again: EpochDraws) -> Problem | None:
    """Return the problem that ranks do not shard, for epochs in which counting cannot tell; None if they do.

    Args:
        about: What ranks drew that are seeded differently, and how that was judged.
        again: What ranks drew that are all seeded alike.
    """
    epoch = about.epoch
    may_be = not is_constant(epoch) if epoch.is_sample else _has_all_on_every_rank(epoch)
    return _not_sharded(about, again) if may_be and _is_same_on_every_rank(again) else None


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
    return next((problem for problem in found if problem is not None), _repeated(about))


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


# Ranks that do not shard


def _not_sharded(about: About, again: EpochDraws) -> Problem:
    """Say what ranks get if it does not depend on the rank."""
    epoch, ranks = about.epoch, len(about.epoch.ranks)
    # What to do where a factory asks the process group, because there is none.
    of_a_group = " If the factory asks torch.distributed instead of its arguments, pass processes=True."
    of_a_group *= about.is_simulated
    each, samples = f"Each of {ranks} ranks", about.samples(epoch.most_samples)
    if _is_whole_stream(about, again):
        times = ranks if epoch.is_sample else ranks * epoch.most_samples / len(epoch.alone.items)
        return about.problem(
            "not_sharded",
            f"{each} gets all of the data{samples}.",
            f"An epoch costs {times:g} times what it should, and gradients average repeated samples.",
            f"{_PATCH} on every rank, after init_process_group().{of_a_group}",
        )
    if _is_same_on_every_rank(epoch):
        return about.problem(
            "not_sharded",
            f"{each} gets the same part of the data{samples}.",
            "The other samples are never trained on, and gradients average repeated ones.",
            "Shard by each process's own rank (torch.distributed.get_rank()), as patch_dataloader_to_ddp() does."
            + of_a_group,
        )
    return about.problem(
        "not_sharded",
        f"{each} draws its own samples{samples}. {about.counts()}".rstrip(),
        "Seeded alike, all ranks get the same samples. Seeded differently, it is chance which are seen twice or never.",
        f"{_PATCH}, with a sampler that draws for all ranks; or allow it, if each rank is meant to draw its own.",
    )


def _is_whole_stream(about: About, again: EpochDraws) -> bool:
    """Tell whether ranks that draw the same get all data.

    They do if they get as much as a single process. Where only a part was drawn, they do if they begin as it does.
    """
    alone = about.epoch.alone.items
    if about.epoch.is_sample:
        got = _each_once(again.ranks[0].items)  # several workers may read the same
        return np.array_equal(got, _each_once(alone)[: len(got)])
    each = about.epoch.most_samples
    return each == len(alone) or (each > len(alone) and not about.judged.found.lacking)


def _each_once(items: Numbers) -> Numbers:
    """Return the different items, in the order of their first appearance."""
    return items[np.sort(np.unique(items, return_index=True)[1])]


def _has_all_on_every_rank(epoch: EpochDraws) -> bool:
    """Tell whether every rank got as many samples as a single process, and these are enough to mean something."""
    n, world = len(epoch.alone.items), len(epoch.ranks)
    return not epoch.is_sample and n >= 2 * world > 2 and all(len(drawn.items) == n for drawn in epoch.ranks)


def _is_same_on_every_rank(epoch: EpochDraws) -> bool:
    """Tell whether all of several ranks drew the same, and more than one sample, which padding could explain."""
    first, *others = epoch.ranks
    return bool(others) and len(first.items) > 1 and all(np.array_equal(first.items, other.items) for other in others)


def _is_mostly_foreign(about: About) -> bool:
    """Tell whether a single process never gets most of what ranks other than 0 get."""
    return 2 * about.judged.samples.unexpected > sum(len(drawn.items) for drawn in about.epoch.ranks[1:])


def _ignored_world_size(about: About) -> Problem:
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


def _same_shard_of_some(about: About, _: Traits) -> Problem | None:
    """Return the problem that ranks of a group get one shard."""
    ranks_of: dict[bytes, list[int]] = {}
    for rank, drawn in enumerate(about.epoch.ranks):
        if len(drawn.items) > 1:
            ranks_of.setdefault(signature([drawn]), []).append(rank)
    groups = [ranks for ranks in ranks_of.values() if len(ranks) > 1]
    if not groups or _fills_rounds(about):
        return None
    first, *others = groups
    too = "".join(f", and so do ranks {_listed(ranks)}" for ranks in others[: EXAMPLES - 1])
    samples = about.samples(len(about.epoch.ranks[first[0]].items))
    return about.problem(
        "not_sharded",
        f"Ranks {_listed(first)} get the same part of the data{samples}{too}.",
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


def _disagreement(about: About, alike: str) -> Problem:
    """Say that ranks draw different orders, which ``alike`` says of ranks that are seeded alike."""
    return about.problem(
        "ranks_disagree",
        f"{about.counts()} With all ranks seeded alike, {alike}.",
        "The order or the data depend on the global random states, which differ between ranks.",
        f"{_PATCH}, which derives the order from (seed, epoch); or seed every rank alike where the order is made.",
    )


def _own_randomness(about: About, _: Traits) -> Problem | None:
    """Return the problem that ranks draw different orders even where they are seeded alike."""
    epoch, found = about.epoch, about.judged.found
    n, world = len(epoch.alone.items), len(epoch.ranks)
    overlaps = found.extra or found.unexpected > len(found.foreign)
    most = -(-n // world) * world + about.judged.padding
    has_right_total = n <= sum(len(drawn.items) for drawn in epoch.ranks) <= most
    if not (found.lacking and overlaps and has_right_total) or _are_slices(epoch):
        return None
    return about.problem(
        "ranks_disagree",
        f"{about.counts()} The same happens with all ranks seeded alike.",
        "Each rank has randomness of its own: a generator that is not seeded or is seeded by rank, or a set.",
        f"Seed the sampler's generator alike on every rank, or {_patch} with order='leader'.",
    )


def _are_slices(epoch: EpochDraws) -> bool:
    """Tell whether each rank got evenly spaced samples, by their numbers or in the stream, as chance gives nobody.

    A slice may break once, where it goes on from the beginning.
    """
    codes, firsts = np.unique(epoch.alone.items, return_index=True)
    got = [np.isin(codes, drawn.items) for drawn in epoch.ranks]
    return any(all(_is_spaced(places[mask]) for mask in got) for places in (np.arange(len(codes)), firsts))


def _is_spaced(places: Numbers) -> bool:
    gaps = np.diff(np.sort(places))
    return len(gaps) - int(np.unique(gaps, return_counts=True)[1].max(initial=0)) <= 1


# Ranks that shard, but wrongly


def _double_sharding(about: About, traits: Traits) -> Problem | None:
    """Return the problem that each rank got a share of its share, or all ranks far too little where two parts shard."""
    n, world, shards = about.epoch.expected, len(about.epoch.ranks), about.epoch.shards
    parts, together = world**2, sum(shards)
    is_far_too_little = traits.sharers > 1 and 3 * together <= 2 * n
    are_shares_of_shares = n > parts > 1 and all(n // parts <= got <= -(-n // parts) for got in shards)
    if not (about.judged.found.lacking and (is_far_too_little or are_shares_of_shares)):
        return None
    return about.problem(
        "double_sharding",
        f"{about.counts()} The {world} ranks together get {together} of {n} {about.epoch.units}.",
        "The data is sharded twice, so most samples are never seen.",
        "Shard once: leave out the sampler wrapper, or the framework's own (use_distributed_sampler=False).",
    )


def _split_batch(about: About, _: Traits) -> Problem | None:
    """Return the problem that batches reach several ranks in pieces."""
    split = about.judged.split
    if split is None or not split.explains:
        return None
    return about.problem(
        "split_batch",
        f"{split.parts} of the ranks' {sum(about.epoch.shards)} batches are parts of {split.wholes} of the "
        f"{about.epoch.expected} batches that one process makes.",
        "Batches that the batch sampler made as one (P x K, one length, one shape) reach the ranks in pieces.",
        f"Shard whole batches: {_patch}, or wrap it in DDPBatchSamplerWrapper.",
    )


def _every_worker_reads(about: About, traits: Traits) -> Problem | None:
    """Return the problem that each of a rank's workers reads the rank's whole share."""
    workers, shards = traits.num_workers, [drawn.items for drawn in about.epoch.ranks]
    reads_all = traits.is_iterable and all(len(shard) == workers * len(np.unique(shard)) for shard in shards)
    if workers < 2 or not reads_all or not about.judged.found.extra:
        return None
    return about.problem(
        "repeated",
        f"{about.counts()} Each rank gets each of its samples {workers} times, once from each worker.",
        "Every worker reads an iterable dataset, and this one splits itself by rank but not by worker.",
        "Split each rank's share by torch.utils.data.get_worker_info(), too; or pass the loader of the whole dataset "
        "through patch_dataloader_to_ddp(), which needs no splitting.",
    )


def _foreign(about: About, _: Traits) -> Problem | None:
    """Return the problem that ranks get samples that a single process never gets."""
    if not about.judged.found.unexpected:
        return None
    return about.problem(
        "foreign",
        about.counts(),
        "Ranks train on other data than one process does: another split, another file, or indices that are off.",
        "Make every rank's loader from the same data as that of one process, make(0, 1).",
    )


def _missing(about: About, _: Traits) -> Problem | None:
    """Return the problem that no rank gets some samples."""
    if not about.judged.found.lacking:
        return None
    return about.problem(
        "missing",
        about.counts(),
        "The missing samples are never trained on, and metrics leave them out.",
        f"{_PATCH}, whose shares are complete; or use uneven='pad' and drop_last=False.",
    )


def _padding(about: About, _: Traits) -> Problem | None:
    """Return the problem that more is repeated than fills a last round, and no more than fills one of whole batches."""
    limit = f"To fill the last round of {len(about.epoch.ranks)} ranks, {about.epoch.filling} are enough."
    return _too_much_padding(about, limit) if _fills_rounds(about) else None


def _fills_rounds(about: About) -> bool:
    """Tell whether nothing is missing, and no more repeated than fills a last round of whole batches."""
    epoch, found = about.epoch, about.judged.found
    largest = max((int(drawn.sizes.max()) for drawn in epoch.ranks if len(drawn.sizes)), default=1)
    return not found.lacking and found.extra <= len(epoch.ranks) * (largest if epoch.units == "samples" else 1)


def _too_much_padding(about: About, limit: str) -> Problem:
    """Say that more is repeated than ``limit`` says may be, to fill the last round."""
    return about.problem(
        "padding",
        f"{about.counts()} {limit}",
        "Repeated samples count twice in gradients and in every metric of an evaluation.",
        "Use gather_in_order() or uneven='keep' for an evaluation, and no padding up to whole batches (accelerate: "
        "even_batches=False).",
    )


def _repeated(about: About) -> Problem:
    """Say that ranks see some samples more than once."""
    return about.problem(
        "repeated",
        about.counts(),
        "Repeated samples weigh more than others, and an epoch takes longer.",
        f"{_PATCH}, whose shares are disjoint.",
    )
