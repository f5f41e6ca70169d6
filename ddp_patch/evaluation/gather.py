"""All ranks' outputs in the order of the unpatched loader; and which samples of a batch are padding."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeVar, cast, overload
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.errors import InvalidOptionError, OutputsError, UnsupportedLoaderError, WorldError
from ddp_patch.evaluation.rows import Structure, structure_of
from ddp_patch.evaluation.transfer import Arrangement, Members, Packed, gathered, packed
from ddp_patch.loaders.copying import Level, copy_loader, require_loader, sharding
from ddp_patch.plan import Plan
from ddp_patch.ranks.comparison import by_value, ranks_text
from ddp_patch.ranks.exchange import exchange
from ddp_patch.shares.batches import Batches, require_batches
from ddp_patch.shares.epochs import EpochSampler
from ddp_patch.shares.iterables.dataset import StreamSampler
from ddp_patch.shares.passes import EpochPass

__all__ = ["gather_in_order", "iter_with_mask"]

Outputs = TypeVar("Outputs")

_GATHERING = "Gathering outputs"

# What a row of the outputs stands for.
_UNITS = {Level.SAMPLE: "samples", Level.BATCH: "batches", Level.UNBATCHED: "items", Level.ITERABLE: "samples"}


@overload
def gather_in_order(outputs: Outputs, loader: DataLoader[Any], *, dst: None = None) -> Outputs: ...
@overload
def gather_in_order(outputs: Outputs, loader: DataLoader[Any], *, dst: int | None) -> Outputs | None: ...
def gather_in_order(outputs: Any, loader: DataLoader[Any], *, dst: int | None = None) -> Any:
    """Return the outputs of all ranks in the order in which the unpatched loader gives its samples, without padding.

    Call it on every rank after a whole pass over the loader. What it returns has one row for each sample of that pass
    (with ``uneven="drop"`` and ``drop_last=True``, of those that were given), so that metrics of it are those of one
    process. Besides the result it holds up to 64 MiB, and of lists one rank's part in pickled form.

    Args:
        outputs: This rank's outputs of the pass, in its own order: a tensor, an array or a list, or a nest of dicts and
            tuples of these. Each has one row (a list one element) for each sample that this rank got, padding included;
            of a loader with a batch sampler of its own, for each batch. A rank that got nothing may give None.
        loader: A loader from ``patch_dataloader_to_ddp``; or an unpatched one in a single process, where the outputs
            come back as they are.
        dst: The global rank that gets the result, while others get None; default: every rank gets it.

    Returns:
        The same structure. Tensors lie on the device that this rank's own lie on.

    Raises:
        OutputsError: A rank is in the middle of a pass, gives another number of rows than it got samples, or another
            structure than others; on every rank.
        MissingRanksError: A rank did not come here in time.
        NotPatchedError: The loader was not patched, and there are several ranks.
        WorldError: The world was given by ``rank=`` and ``num_replicas=``, so there is nobody to gather from.
        UnsupportedLoaderError: Which samples each rank got cannot be told.
        InvalidOptionError: ``dst`` is none of the ranks.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(5), batch_size=2), rank=0, num_replicas=1)
        >>> doubled = [2 * batch for batch in loader]
        >>> gather_in_order({"doubled": torch.cat(doubled)}, loader)
        {'doubled': tensor([0, 2, 4, 6, 8])}
    """
    if _is_alone(loader):
        return outputs
    batches = _require_one_stream("gather_in_order", loader)
    members = _members(batches, dst)
    said, own = _say(outputs, batches, dst)
    judge = partial(_judge, batches.sampler.plan, batches.sampler.agreed.world.members or [0])
    if len(members.ranks) == 1:
        arrangement = judge({members.rank: said})[members.rank]
    else:
        arrangement = exchange(members.ranks, _GATHERING, said, judge, members.timeout)
    return gathered(outputs, own, members, arrangement)


def iter_with_mask(loader: DataLoader[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each batch of a pass with a mask that is False on padding.

    Args:
        loader: A loader from ``patch_dataloader_to_ddp``; or an unpatched one in a single process, of which nothing is
            padding.

    Yields:
        The batch, and a bool tensor on the CPU with one element for each sample of it; with ``batch_size=None`` one
        without dimensions.

    Raises:
        NotPatchedError: The loader was not patched, and there are several ranks.
        UnsupportedLoaderError: Which samples a batch holds cannot be told.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(5), batch_size=2), rank=1, num_replicas=2)
        >>> for batch, mask in iter_with_mask(loader):
        ...     print(batch.tolist(), mask.tolist())
        [1, 3] [True, True]
        [0] [False]
    """
    if _is_alone(loader):
        return _all_real(loader)
    return _masked(loader, _require_one_stream("iter_with_mask", loader))


def _masked(loader: DataLoader[Any], batches: Batches) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each batch with its mask, which follows from the place of its items in this rank's share."""
    sampler = batches.sampler
    is_unbatched = loader.batch_sampler is None
    sampler.tells_sizes = batches.level is Level.BATCH
    try:
        for number, batch in enumerate(loader):
            if number == 0:
                progress, pass_number = cast(EpochPass, sampler.progress), sampler.epochs.passes
            mask = _mask(batches, progress, pass_number, number)
            yield batch, mask[0] if is_unbatched else mask
    finally:
        sampler.tells_sizes = False


def _mask(batches: Batches, progress: EpochPass, pass_number: int, number: int) -> torch.Tensor:
    """Tell which samples of a pass's batch ``number`` are no padding."""
    plan = batches.sampler.plan
    length = _length_found(batches.sampler, progress, pass_number)
    first = progress.skip + number * batches.size
    # Padding is given after the stream's end was found.
    share = first + batches.size if length is None else len(plan.share(length))
    real = share if length is None else share - len(plan.padding(length))
    if batches.level is Level.BATCH:
        return torch.full((cast("deque[int]", progress.sizes).popleft(),), first < real)
    return torch.arange(first, min(first + batches.size, share)) < real


def _is_alone(loader: DataLoader[Any]) -> bool:
    """Tell whether it is the unpatched loader of the only process."""
    require_loader("Evaluation", loader)
    return sharding(loader) is None and (not dist.is_initialized() or dist.get_world_size() == 1)


def _all_real(loader: DataLoader[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each batch of an unpatched loader with a mask that is True for all of it."""
    if loader.batch_sampler is None:
        for item in loader:
            yield item, torch.tensor(True)
        return
    # Only the samples, before they are put together, tell for any batch how many they are.
    for samples, batch in copy_loader(loader, collate_fn=_Counted(loader.collate_fn)):
        yield batch, torch.ones(samples, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class _Counted:
    """A ``collate_fn`` that puts the number of samples before what the user's returns."""

    collate_fn: Callable[[Any], Any]

    def __call__(self, samples: Any) -> tuple[int, Any]:
        return len(samples), self.collate_fn(samples)


def _require_one_stream(operation: str, loader: DataLoader[Any]) -> Batches:
    batches = require_batches(operation, loader)
    if batches.sampler.agreed.options.iterable_sharding == "by_worker" and batches.level is Level.ITERABLE:
        raise UnsupportedLoaderError(
            f"{operation} was given a loader with iterable_sharding='by_worker', whose dataset decides what each "
            "worker reads, so there is no one order and no padding. Use iterable_sharding='exact'."
        )
    return batches


def _members(batches: Batches, dst: int | None) -> Members:
    """Return who gathers: one rank for each share, this one among them.

    Where several take the same share, those with the same place among them gather from each other.
    """
    agreed = batches.sampler.agreed
    world, timeout = agreed.world, agreed.options.timeout
    if world.members is None:
        if world.num_replicas > 1:
            raise WorldError(
                f"gather_in_order cannot gather from {world.num_replicas} ranks: the loader's world was given by rank= "
                "and num_replicas=, and nothing tells which processes these are. Patch it with a process group."
            )
        return Members([0], 0, dst, timeout)
    takers: list[list[int]] = [[] for _ in range(world.num_replicas)]
    for rank, share in world.members.items():
        takers[share].append(rank)
    mine = takers[world.rank].index(dist.get_rank())
    return Members([ranks[mine] for ranks in takers], dist.get_rank(), dst, timeout)


def _length_found(sampler: EpochSampler[Any], progress: EpochPass, pass_number: int) -> int | None:
    """Return how many items all ranks share in a pass, once its end was found."""
    if isinstance(sampler, StreamSampler):
        return sampler.dataset.length_found(pass_number)
    return progress.length


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank says of its outputs.

    Attributes:
        dst: Who is to get the result.
        at: Which pass they are of.
        given: How many rows this rank has to give, padding left out.
        structure: The outputs.
        pickled: How many bytes its rows of objects are, by their path.
        problem: Why they are not those of a whole pass, or nothing.
    """

    dst: int | None
    at: str = ""
    given: int = 0
    structure: Structure = field(default_factory=lambda: structure_of(None))
    pickled: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""


def _say(outputs: Any, batches: Batches, dst: int | None) -> tuple[_Said, Packed]:
    """Return what this rank says of its outputs, and those of them that are sent pickled."""
    sampler, progress = batches.sampler, batches.sampler.progress
    if progress is None:
        return _Said(dst, problem="has made no pass over the loader"), {}
    length = _length_of_whole(sampler, progress)
    if length is None:
        return _Said(dst, problem=f"is in the middle of epoch {progress.epoch}"), {}
    begins = "" if progress.begins_at == "0" else f" from {progress.begins_at} on"
    at = f"gives the outputs of epoch {progress.epoch}{begins}, of {length} items"
    samples = max(0, len(sampler.plan.share(length)) - progress.skip)
    if batches.drops_last:
        samples -= samples % batches.size
    structure = structure_of(outputs)
    if problem := structure.problem(samples, _UNITS[batches.level]):
        return _Said(dst, at, problem=problem), {}
    given = len(sampler.plan.sources(length)[0][progress.skip : progress.skip + samples])
    try:
        own = packed(outputs, structure, given)
    except Exception as error:  # noqa: BLE001 - the user's objects; all ranks are told
        return _Said(dst, at, problem=f"gives what cannot be pickled: {error}"), {}
    return _Said(dst, at, given, structure, {path: len(data) for path, data in own.items()}), own


def _length_of_whole(sampler: EpochSampler[Any], progress: EpochPass) -> int | None:
    """Return how many items all ranks share in the latest pass, if this rank has come to its end."""
    found = _length_found(sampler, progress, sampler.epochs.passes)
    if isinstance(sampler, StreamSampler) or progress.ended:
        return found
    # Whoever takes as many batches as len() says does not ask for the end.
    length = sampler.rest_length(progress)
    return length if length is not None and progress.taken >= len(sampler.plan.share(length)) else None


def _judge(plan: Plan, ranks: Collection[int], records: Mapping[int, _Said]) -> dict[int, Arrangement]:
    """Return where all rows stand; raise where the ranks do not give the same pass in the same form."""
    wrong_dst = [said.dst for said in records.values() if said.dst is not None and said.dst not in ranks]
    if wrong_dst:
        raise InvalidOptionError(
            f"dst={wrong_dst[0]!r} is none of the ranks {list(ranks)} that share the loader. Pass one of these, or "
            "leave it out."
        )
    with_rows = {rank: said.structure for rank, said in records.items() if any(said.structure.rows.values())}
    found = (
        {rank: said.problem for rank, said in records.items() if said.problem}
        or _unless_same({rank: said.at for rank, said in records.items()})
        or _unless_same({rank: f"gives {structure.forms_text()}" for rank, structure in with_rows.items()})
        or _unless_same({rank: f"gives {structure.nest_text()}" for rank, structure in with_rows.items()})
        or _unless_same({rank: f"gives dst={said.dst}" for rank, said in records.items()})
    )
    if found:
        listed = "\n".join(f"  {ranks_text(ranks)}: {what}" for what, ranks in by_value(found).items())
        raise OutputsError(
            f"{_GATHERING}: the ranks do not give the outputs of one whole pass over the loader.\n{listed}\n"
            "Call gather_in_order() on every rank after the loop over the loader, with the same structure on each and "
            "one row for each sample (or batch of a batch sampler) that the rank got, padding included."
        )
    # Where nobody has a row, any structure that is one will do.
    structures = list(with_rows.values()) or [said.structure for said in records.values() if not said.structure.wrong]
    structure = structures[0].widened(structures) if structures else structure_of(None)
    counts = [said.given for said in records.values()]
    pickled = [said.pickled for said in records.values()]
    arrangement = Arrangement(structure, sum(counts), _places(plan, counts), pickled, uuid4().hex)
    return dict.fromkeys(records, arrangement)


def _unless_same(said: Mapping[int, str]) -> Mapping[int, str]:
    return said if len(by_value(said)) > 1 else {}


def _places(plan: Plan, counts: Sequence[int]) -> list[list[range]]:
    """Return where the rows of each share stand among those of all, in the stream's order.

    Args:
        plan: How the stream was shared.
        counts: How many rows each share has.
    """
    if plan.layout == "contiguous":
        runs = zip(counts, accumulate(counts), strict=True)
        return [[range(end - count, end)] if count else [] for count, end in runs]
    places: list[list[range]] = [[] for _ in counts]
    start = 0
    # Rounds in which the same ranks have a row: with drop_last and uneven="keep" some have a batch less.
    for before, until in pairwise(sorted({0, *counts})):
        takers = [share for share, count in enumerate(counts) if count >= until]
        end = start + len(takers) * (until - before)
        for place, share in enumerate(takers):
            places[share].append(range(start + place, end, len(takers)))
        start = end
    return places
