"""Gather all ranks' outputs in the order of the unpatched loader."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeVar, cast, overload
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.errors import InvalidOptionError, OutputsError, WorldError
from ddp_patch.evaluation.one_stream import is_alone, require_one_stream
from ddp_patch.evaluation.rows import Structure, leaves_of, rows_at, structure_of
from ddp_patch.evaluation.transfer import Arrangement, Members, Packed, gathered, packed
from ddp_patch.loaders.facts import Level
from ddp_patch.loaders.on_device import device_of
from ddp_patch.plan import Plan
from ddp_patch.ranks.comparison import by_value, ranks_text
from ddp_patch.ranks.exchange import exchange
from ddp_patch.shares.batches import Batches
from ddp_patch.shares.step_samples import DividedBatches
from ddp_patch.shares.turns import Turns, places_of_parts

__all__ = ["gather_in_order"]

Outputs = TypeVar("Outputs")

_GATHERING = "Gathering outputs"

# What one row of the outputs stands for.
_UNITS = {Level.SAMPLE: "samples", Level.BATCH: "batches", Level.UNBATCHED: "items", Level.ITERABLE: "samples"}


@overload
def gather_in_order(outputs: Outputs, loader: DataLoader[Any], *, dst: None = None) -> Outputs: ...
@overload
def gather_in_order(outputs: Outputs, loader: DataLoader[Any], *, dst: int | None) -> Outputs | None: ...
def gather_in_order(outputs: Any, loader: DataLoader[Any], *, dst: int | None = None) -> Any:
    """Return all ranks' outputs in the unpatched loader's order, without padding.

    Call it on every rank after a whole pass over the loader. The result has one row for each sample of that pass, so
    metrics computed from it equal those of one process; samples that ``uneven="drop"`` or ``drop_last=True`` left out
    have no row. Besides the result, it needs up to 64 MiB of memory, plus one rank's part of any lists, pickled.

    Args:
        outputs: This rank's outputs of the pass, in its own order: a tensor, an array or a list, or a nest of dicts and
            tuples of these. Each has one row (a list: one element) for each sample that this rank got, padding
            included; where whole batches are shared, one row for each batch. A rank that got nothing may pass None.
        loader: A loader from ``patch_dataloader_to_ddp``, or an unpatched one in a single process, where the outputs
            come back unchanged.
        dst: The global rank that gets the result; the others get None. Default: every rank gets it.

    Returns:
        The same structure, with tensors on the device of this rank's own; where it has none, on the loader's if the
        other ranks' are on one of that kind.

    Raises:
        OutputsError: A rank is in the middle of a pass, passes another number of rows than it got samples, or another
            structure than the others; raised on every rank.
        MissingRanksError: A rank did not arrive in time.
        NotPatchedError: The loader was not patched, and there are several ranks.
        WorldError: The world was given by ``rank=`` and ``num_replicas=``, so the other processes are unknown.
        UnsupportedLoaderError: It is unknown which samples each rank got.
        InvalidOptionError: ``dst`` is not one of the ranks.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(5), batch_size=2), rank=0, num_replicas=1)
        >>> doubled = [2 * batch for batch in loader]
        >>> gather_in_order({"doubled": torch.cat(doubled)}, loader)
        {'doubled': tensor([0, 2, 4, 6, 8])}
    """
    if is_alone("gather_in_order", loader):
        return outputs
    batches = require_one_stream("gather_in_order", loader)
    members = _members(batches, dst, device_of(loader))
    divided = _divided(batches)
    said, outputs, own = _say(outputs, batches, dst, divided)
    judge = partial(_judge, batches.sampler.plan, batches.sampler.agreed.world.members or [0])
    if len(members.ranks) == 1:
        arrangement = judge({members.rank: said})[members.rank]
    else:
        arrangement = exchange(members.ranks, _GATHERING, said, judge, members.timeout)
    places = arrangement.places if divided is None else divided.of_ranks()
    arrangement = replace(arrangement, places=places)
    result = gathered(outputs, own, members, arrangement)
    origins = _origins(batches, arrangement, members)
    return result if origins is None else _reordered(result, np.argsort(origins))


def _origins(batches: Batches, arrangement: Arrangement, members: Members) -> np.ndarray[Any, Any] | None:
    """Return where all ranks' rows come from in the unpatched loader's order; None where they lie in that order."""
    own = None if batches.sampler.latest is None else batches.sampler.latest.origins
    if own is None:
        return None
    form, name = structure_of(own), f"{arrangement.name}/origins"
    of_all = replace(arrangement, structure=form, pickled=[{} for _ in arrangement.pickled], name=name)
    return cast("np.ndarray[Any, Any] | None", gathered(own, {}, members, of_all))


def _reordered(outputs: Any, order: np.ndarray[Any, Any]) -> Any:
    """Return outputs with their rows in another order."""
    structure = structure_of(outputs)
    return structure.rebuilt({path: rows_at(leaf, order.tolist()) for path, leaf in leaves_of(outputs)})


def _members(batches: Batches, dst: int | None, device: torch.device | None) -> Members:
    """Return the ranks that gather with this one: one rank for each share."""
    agreed = batches.sampler.agreed
    world, timeout = agreed.world, agreed.options.timeout
    if world.members is None:
        if world.num_replicas > 1:
            raise WorldError(
                f"gather_in_order cannot gather from {world.num_replicas} ranks: the loader's world was given by rank= "
                "and num_replicas=, and nothing tells which processes these are. Patch it with a process group."
            )
        return Members([0], 0, dst, timeout, device)
    return Members(world.column(), dist.get_rank(), dst, timeout, device)


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank reports about its outputs.

    Attributes:
        dst: Which rank gets the result.
        at: Which pass the outputs are from.
        given: How many rows this rank contributes, without padding.
        structure: The outputs' structure.
        pickled: The size of its pickled rows in bytes, by path.
        problem: Why the outputs are not those of a whole pass; empty if they are.
        turns: The batches of that pass; None where it is not known.
    """

    dst: int | None
    at: str = ""
    given: int = 0
    structure: Structure = field(default_factory=lambda: structure_of(None))
    pickled: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    turns: Turns | None = None


def _divided(batches: Batches) -> DividedBatches | None:
    """Return this rank's rows in a whole pass, where batches are divided."""
    one = batches.sampler.latest
    turns = None if one is None else batches.sampler.turns_of_whole(one, batches)
    return None if one is None or turns is None else batches.sampler.divided_batches(one, turns)


def _say(outputs: Any, batches: Batches, dst: int | None, divided: DividedBatches | None) -> tuple[_Said, Any, Packed]:
    """Return this rank's report on its outputs, the outputs that it sends, and those of them that it sends pickled."""
    sampler, one = batches.sampler, batches.sampler.latest
    if one is None:
        return _Said(dst, problem="has made no pass over the loader"), outputs, {}
    turns = sampler.turns_of_whole(one, batches)
    if turns is None or (sampler.given is not None and sampler.given.is_within):
        return _Said(dst, problem=f"is in the middle of epoch {one.epoch}"), outputs, {}
    begins = "" if one.begins_at == "0" else f" from {one.begins_at} on"
    given = turns if divided is None else divided
    at = f"gives the outputs of epoch {one.epoch}{begins}, of {given.length} items"
    structure = structure_of(outputs)
    if problem := structure.problem(given.samples, _UNITS[batches.level] if divided is None else "samples"):
        return _Said(dst, at, problem=problem), outputs, {}
    # Each part's padding comes at its own end, in the midst of what other workers give; each batch's at the batch's.
    if given.rows < given.samples and (divided is not None or len(turns.parts) > 1):
        outputs = structure.rebuilt(
            {path: rows_at(leaf, list(given.real_places())) for path, leaf in leaves_of(outputs)}
        )
    try:
        own = packed(outputs, structure, given.rows)
    except Exception as error:  # noqa: BLE001 - the user's objects; all ranks get the error
        return _Said(dst, at, problem=f"gives what cannot be pickled: {error}"), outputs, {}
    sizes = {path: len(data) for path, data in own.items()}
    return _Said(dst, at, given.rows, structure, sizes, turns=turns), outputs, own


def _judge(plan: Plan, ranks: Collection[int], records: Mapping[int, _Said]) -> dict[int, Arrangement]:
    """Return where every row goes; raise unless the ranks report the same pass in the same form."""
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
    # If no rank has a row, any valid structure will do.
    structures = list(with_rows.values()) or [said.structure for said in records.values() if not said.structure.wrong]
    structure = structures[0].widened(structures) if structures else structure_of(None)
    counts = [said.given for said in records.values()]
    turns = [said.turns for said in records.values() if said.turns is not None]
    places = places_of_parts(turns) if len(turns[0].parts) > 1 else _places(plan, counts)
    pickled = [said.pickled for said in records.values()]
    arrangement = Arrangement(structure, sum(counts), places, pickled, uuid4().hex)
    return dict.fromkeys(records, arrangement)


def _unless_same(said: Mapping[int, str]) -> Mapping[int, str]:
    return said if len(by_value(said)) > 1 else {}


def _places(plan: Plan, counts: Sequence[int]) -> list[list[range]]:
    """Return the positions of each share's rows among all rows, in the stream's order.

    Args:
        plan: How the stream was sharded.
        counts: The number of rows of each share.
    """
    if plan.needs_length:
        runs = zip(counts, accumulate(counts), strict=True)
        return [[range(end - count, end)] if count else [] for count, end in runs]
    places: list[list[range]] = [[] for _ in counts]
    start = 0
    # Place rounds together in which the same ranks have a row: with drop_last and uneven="keep", some lack a batch.
    for before, until in pairwise(sorted({0, *counts})):
        takers = [share for share, count in enumerate(counts) if count >= until]
        end = start + len(takers) * (until - before)
        for place, share in enumerate(takers):
            places[share].append(range(start + place, end, len(takers)))
        start = end
    return places
