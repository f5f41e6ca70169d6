"""All ranks' outputs in the order of the unpatched loader; and which samples of a batch are padding."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.comparison import by_value, ranks_text
from ddp_patch.errors import InvalidOptionError, OutputsError, UnsupportedLoaderError, WorldError
from ddp_patch.exchange import exchange
from ddp_patch.iterable import StreamSampler
from ddp_patch.loader import Level, require_loader, sharding
from ddp_patch.patched import Batches, require_batches
from ddp_patch.plan import Plan
from ddp_patch.rows import Structure, structure_of
from ddp_patch.transfer import Members, gathered

__all__ = ["gather_in_order", "iter_with_mask"]

_GATHERING = "Gathering outputs"


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
    members = Members(_ranks_by_share(batches), dst)
    if dst is not None and dst not in members.ranks:
        raise InvalidOptionError(
            f"dst={dst!r} is none of the ranks {members.ranks} that share the loader. Pass one of these, or leave it "
            "out."
        )
    said = _Said.of(outputs, batches)
    judge = partial(_judge, batches.sampler.plan)
    if len(members.ranks) == 1:
        pass_ = judge({members.ranks[0]: said})[members.ranks[0]]
    else:
        pass_ = exchange(members.ranks, _GATHERING, said, judge, batches.sampler.agreed.options.timeout)
    return gathered(outputs, pass_.structure, members, pass_.places, pass_.rows)


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
        for batch in loader:
            yield batch, torch.ones(_samples_in(batch), dtype=torch.bool)
        return
    batches = _require_one_stream("iter_with_mask", loader)
    sampler = batches.sampler
    sampler.tells_sizes = True
    try:
        iterator = iter(loader)
        for number, batch in enumerate(iterator):
            if number == 0:
                progress = sampler.progress
            yield batch, _mask(batches, progress, number)
    finally:
        sampler.tells_sizes = False


def _mask(batches: Batches, progress: Any, number: int) -> torch.Tensor:
    """Tell which samples of a pass's batch ``number`` are no padding."""
    plan = batches.sampler.plan
    length = _length_found(batches)
    first = progress.skip + number * batches.size
    # Padding is given after the stream's end was found.
    share = first + batches.size if length is None else len(plan.share(length))
    real = share if length is None else share - len(plan.padding(length))
    match batches.level:
        case Level.BATCH:
            return torch.full((progress.sizes.popleft(),), first < real)
        case Level.UNBATCHED:
            return torch.tensor(first < real)
    return torch.arange(first, min(first + batches.size, share)) < real


def _is_alone(loader: DataLoader[Any]) -> bool:
    """Tell whether it is the unpatched loader of the only process."""
    require_loader("Evaluation", loader)
    return sharding(loader) is None and (not dist.is_initialized() or dist.get_world_size() == 1)


def _samples_in(batch: Any) -> int:
    """Return how many samples a batch has, by the first dimension of what is in it."""
    match batch:
        case torch.Tensor() if batch.ndim:
            return len(batch)
        case Mapping() if batch:
            return _samples_in(next(iter(batch.values())))
        case tuple() if batch:
            return _samples_in(batch[0])
    return len(batch)


def _require_one_stream(operation: str, loader: DataLoader[Any]) -> Batches:
    batches = require_batches(operation, loader)
    if batches.sampler.agreed.options.iterable_sharding == "by_worker" and batches.level is Level.ITERABLE:
        raise UnsupportedLoaderError(
            f"{operation} was given a loader with iterable_sharding='by_worker', whose dataset decides what each "
            "worker reads, so there is no one order and no padding. Use iterable_sharding='exact'."
        )
    return batches


def _ranks_by_share(batches: Batches) -> list[int]:
    """Return one global rank for each share, this one among them.

    Where several take the same share, those with the same place among them gather from each other.
    """
    world = batches.sampler.agreed.world
    if world.members is None:
        if world.num_replicas > 1:
            raise WorldError(
                f"gather_in_order cannot gather from {world.num_replicas} ranks: the loader's world was given by rank= "
                "and num_replicas=, and nothing tells which processes these are. Patch it with a process group."
            )
        return [0]
    takers: list[list[int]] = [[] for _ in range(world.num_replicas)]
    for rank, share in world.members.items():
        takers[share].append(rank)
    mine = takers[world.rank].index(dist.get_rank())
    return [ranks[mine] for ranks in takers]


def _length_found(batches: Batches) -> int | None:
    """Return how many items all ranks share in the latest pass, once its end was found."""
    sampler = batches.sampler
    if isinstance(sampler, StreamSampler):
        return sampler.length_found()
    return None if sampler.progress is None else sampler.progress.length


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank says of its outputs.

    Attributes:
        at: Which pass they are of, and where it began.
        length: How many items all ranks share in it.
        skip: How many items of its share this rank had taken before it.
        samples: How many rows it must have.
        structure: The outputs.
        problem: Why they are not those of a whole pass, or nothing.
    """

    at: str
    length: int
    skip: int
    samples: int
    structure: Structure
    problem: str

    @classmethod
    def of(cls, outputs: Any, batches: Batches) -> "_Said":
        progress = batches.sampler.progress
        if progress is None:
            return cls("", 0, 0, 0, structure_of(None), "has made no pass over the loader")
        length = _length_found(batches)
        if length is None and not isinstance(batches.sampler, StreamSampler):
            length = batches.sampler.rest_length(progress)
        share = 0 if length is None else len(batches.sampler.plan.share(length))
        at = f"epoch {progress.epoch} from {progress.begins_at} on"
        is_whole = progress.ended or isinstance(batches.sampler, StreamSampler) or progress.taken >= share
        if length is None or not is_whole:
            return cls(at, 0, 0, 0, structure_of(None), f"is in the middle of epoch {progress.epoch}")
        samples = max(0, share - progress.skip)
        if batches.drops_last:
            samples -= samples % batches.size
        structure = structure_of(outputs)
        return cls(at, length, progress.skip, samples, structure, structure.problem(samples))


@dataclass(frozen=True, slots=True)
class _Pass:
    """What all ranks agreed to gather.

    Attributes:
        structure: Of the result, by the first rank that has rows.
        places: Where in the result the rows of each share stand.
        rows: How many rows the result has.
    """

    structure: Structure
    places: Sequence[slice]
    rows: int


def _judge(plan: Plan, records: Mapping[int, _Said]) -> dict[int, _Pass]:
    found = {rank: said.problem for rank, said in records.items() if said.problem}
    if not found:
        passes = {rank: f"gives {said.at}, of {said.length} items" for rank, said in records.items()}
        found = passes if len(by_value(passes)) > 1 else {}
    with_rows = {rank: said.structure for rank, said in records.items() if said.samples} if not found else {}
    if len(by_value({rank: structure.forms_text() for rank, structure in with_rows.items()})) > 1:
        found = {rank: f"gives {structure.forms_text()}" for rank, structure in with_rows.items()}
    if found:
        listed = "\n".join(f"  {ranks_text(ranks)}: {what}" for what, ranks in by_value(found).items())
        raise OutputsError(
            f"{_GATHERING}: the ranks do not give the outputs of one whole pass over the loader.\n{listed}\n"
            "Call gather_in_order() on every rank after the loop over the loader, with the same structure on each and "
            "one row for each sample that the rank got, padding included."
        )
    first = next(iter(records.values()))
    plans = [Plan(share, len(records), plan.uneven, plan.layout) for share in range(len(records))]
    shares = [
        each.sources(said.length)[0][said.skip : said.skip + said.samples]
        for each, said in zip(plans, records.values(), strict=True)
    ]
    structure = next(iter(with_rows.values()), first.structure).merged(list(with_rows.values()))
    return dict.fromkeys(records, _Pass(structure, _places(plan, shares), sum(map(len, shares))))


def _places(plan: Plan, shares: Sequence[range]) -> list[slice]:
    """Return where the items of each share stand among those of all, in the stream's order."""
    if plan.layout == "interleaved":
        return [slice(share, share + len(shares) * len(own), len(shares)) for share, own in enumerate(shares)]
    starts = [sum(map(len, shares[:share])) for share in range(len(shares))]
    return [slice(start, start + len(own)) for start, own in zip(starts, shares, strict=True)]
