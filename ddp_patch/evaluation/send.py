"""Send rows to the ranks that want them, each with its place."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate, chain, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from ddp_patch.compat.private_torch import default_store, gloo_group
from ddp_patch.errors import MissingRanksError
from ddp_patch.evaluation.outputs import Form, Kind, Leaf
from ddp_patch.plan import Plan
from ddp_patch.ranks.exchange import bytes_of, unpacked
from ddp_patch.sharding.schedule import DividedBatches, Schedule, places_of_parts

__all__ = [
    "Column",
    "Connection",
    "Kept",
    "LocalColumn",
    "Members",
    "Placed",
    "StepStand",
    "WholeStand",
    "connected",
    "gathered",
    "placed_in_step",
    "placed_whole",
    "places_of_rows",
    "reordered",
]


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks that gather together.

    Attributes:
        ranks: Their global ranks, in the order of their shares.
        rank: This process's global rank.
        dst: The global rank that gets the result, which may be in another group of ranks; None if all get it.
        timeout: How long they wait for each other, in seconds.
        device: Where this rank's batches come, if that is known.
    """

    ranks: list[int]
    rank: int
    dst: int | None
    timeout: float
    device: torch.device | None = None

    @property
    def receives(self) -> bool:
        """Whether this rank gets the result."""
        return self.dst is None or self.rank == self.dst


@dataclass(frozen=True, slots=True)
class Connection:
    """Moves bytes from one member to those that receive.

    Attributes:
        members: The ranks that gather together.
        group: Their own gloo group; None if nothing is sent.
        name: A name that no other group has.
    """

    members: Members
    group: Any
    name: str = ""

    def move(self, source: int, size: int, data: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Move bytes, and return them on each rank that receives them from another.

        Args:
            source: The global rank that has them.
            size: How many bytes they are.
            data: Returns them; called on the source only.

        Returns:
            The bytes in the shape ``(size,)``; None on the source and on ranks that receive nothing.
        """
        rank, ranks, dst = self.members.rank, self.members.ranks, self.members.dst
        is_source = rank == source
        takes_part = dst is None or (source != dst and dst in ranks and rank in {source, dst})
        if self.group is None or not size or not takes_part:
            return None
        buffer = data() if is_source else torch.empty(size, dtype=torch.uint8)
        with _failures_told(self.members):
            if dst is None:
                self.group.broadcast(buffer, ranks.index(source)).wait()
            elif is_source:
                self.group.send([buffer], ranks.index(dst), 0).wait()
            else:
                self.group.recv([buffer], ranks.index(source), 0).wait()
        return None if is_source else buffer

    def close(self) -> None:
        """Wait until every member has all it receives, and leave."""
        if self.group is not None:
            with _failures_told(self.members):
                self.group.barrier().wait()  # a rank must not leave while others receive


class Kept:
    """The connections of passes whose steps are gathered one by one: the next step uses that of the step before."""

    def __init__(self) -> None:
        self._of_passes: WeakKeyDictionary[Any, Connection] = WeakKeyDictionary()

    def name(self, current: Any) -> str | None:
        """Return the name of a pass's connection; None where there is none."""
        kept = self._of_passes.get(current)
        return None if kept is None else kept.name

    @contextmanager
    def connected(self, current: Any, members: Members, name: str, *, is_last: bool) -> Iterator[Connection]:
        """Connect the members for a step of a pass.

        Args:
            current: The pass.
            members: The ranks that gather together.
            name: The name of the pass's connection on every rank, or a new one.
            is_last: Whether no step follows on any rank.
        """
        found = self._of_passes.pop(current, None)  # after an error, the next step begins anew
        if found is None or found.name != name:
            found = _opened(members, name)
        yield replace(found, members=members)
        if is_last:
            found.close()
        elif found.group is not None:
            self._of_passes[current] = found


@contextmanager
def connected(members: Members, name: str) -> Iterator[Connection]:
    """Connect the members for one call.

    Args:
        members: The ranks that gather together.
        name: The name of the connection, which no other has.

    Raises:
        MissingRanksError: The connection to another rank failed.
    """
    connection = _opened(members, name)
    yield connection
    connection.close()


def _opened(members: Members, name: str) -> Connection:
    """Connect the members by a gloo group of their own.

    gloo sends from CPU to CPU, whatever the training's backend is. torch's ``new_group`` will not do: it needs all
    ranks, or names a group of some by how many groups a process is in, and that number may differ between the ranks.
    """
    if len(members.ranks) == 1 or not (members.dst is None or members.dst in members.ranks):
        return Connection(members, None, name)
    place = members.ranks.index(members.rank)
    store = dist.PrefixStore(f"ddp_patch/gathering/{name}", default_store())  # type: ignore[attr-defined]  # in its __all__, not in its stubs
    with _failures_told(members):
        group = gloo_group(store, place, len(members.ranks), timedelta(seconds=members.timeout))
        group.barrier().wait()  # when all have read the addresses, nobody needs them
    with suppress(RuntimeError):
        store.delete_key(f"0/{place}")  # gloo leaves every rank's address there
    return Connection(members, group, name)


@contextmanager
def _failures_told(members: Members) -> Iterator[None]:
    """Raise MissingRanksError if the connection fails."""
    try:
        yield
    except RuntimeError as error:  # what gloo raises
        raise MissingRanksError(
            f"Gathering outputs: the connection between the ranks {list(members.ranks)} failed ({error}). Look for the "
            "error of a rank that ended. If none did, name the network interface by which they reach each other in "
            "GLOO_SOCKET_IFNAME, or pass a longer timeout=."
        ) from error


Order = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the rows of all ranks go.

    Attributes:
        rows: How many rows there are.
        places: Where each share's rows go, in order. Each may be iterated several times.
        cuts: How many of them each batch of the unpatched loader has; empty where nobody asks.
    """

    rows: int
    places: Sequence[Iterable[range]]
    cuts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class WholeStand:
    """What a rank got in a whole pass, as the others need to know it.

    Attributes:
        schedule: Its batches.
        rows: How many samples are not padding; of whole batches that are shared, how many batches.
        sizes: How many samples each of these batches has, without padding; of divided batches, each of one process's.
        division: The rank's share of a batch, where batches are divided.
    """

    schedule: Schedule
    rows: int
    sizes: Sequence[int] | None = None
    division: Plan | None = None

    @property
    def sent(self) -> "WholeStand":
        """The same, without what every rank knows."""
        return self if self.division is None else replace(self, sizes=None)


def placed_whole(stands: Sequence[WholeStand], own: WholeStand) -> Mapping[Kind, Placed]:
    """Return where the rows of a whole pass go, by what they stand for.

    Args:
        stands: What each share's rank got, as it was sent.
        own: What this rank got.
    """
    first, counts = stands[0], [stand.rows for stand in stands]
    if first.division is not None:
        sizes = own.sizes or ()
        divided = [
            DividedBatches(replace(first.division, rank=rank), sizes) for rank in range(first.division.num_replicas)
        ]
        return _of_samples(Placed(sum(counts), divided, sizes))
    if len(first.schedule.parts) > 1:
        schedule = [stand.schedule for stand in stands]
        cuts = Counter(place[:2] for of_rank in schedule for place in of_rank.positions())
        return _of_samples(Placed(sum(counts), places_of_parts(schedule), [cuts[batch] for batch in sorted(cuts)]))
    plan, rows, size = first.schedule.plan, sum(counts), first.schedule.batching.size
    placed = Placed(rows, places_of_rows(plan, counts), [min(size, rows - at) for at in range(0, rows, size)])
    if first.sizes is None:
        return _of_samples(placed)
    return _of_batches(placed, [stand.sizes or () for stand in stands])


@dataclass(frozen=True, slots=True)
class StepStand:
    """What a rank got in one step.

    Attributes:
        keys: By which its rows that are not padding are sorted among all.
        size: Where whole batches are shared, how many samples the batch has; else None.
        is_last: Whether no step follows.
    """

    keys: Sequence[Any]
    size: int | None
    is_last: bool

    @property
    def sent(self) -> "StepStand":
        """The same: all of it is needed."""
        return self


def placed_in_step(stands: Sequence[StepStand]) -> Mapping[Kind, Placed]:
    """Return where the rows of one step go, by what they stand for.

    Examples:
        >>> placed = placed_in_step([StepStand([4, 6], None, True), StepStand([5], None, True)])[Kind.SAMPLES]
        >>> placed.rows, placed.places
        (3, [[range(0, 1), range(2, 3)], [range(1, 2)]])
    """
    place_of = {key: place for place, key in enumerate(sorted(chain.from_iterable(stand.keys for stand in stands)))}
    places = [[range(place_of[key], place_of[key] + 1) for key in stand.keys] for stand in stands]
    placed = Placed(len(place_of), places)
    if stands[0].size is None:
        return _of_samples(placed)
    return _of_batches(placed, [[stand.size or 0] * len(stand.keys) for stand in stands])


def _of_samples(placed: Placed) -> Mapping[Kind, Placed]:
    return {Kind.SAMPLES: placed, Kind.LIST: placed}


def _of_batches(batches: Placed, sizes: Sequence[Sequence[int]]) -> Mapping[Kind, Placed]:
    """Return where the samples of whole batches go, too.

    Args:
        batches: Where the batches go.
        sizes: How many samples each of a share's batches has, by share.
    """
    in_order = [0] * batches.rows
    for places, of_share in zip(batches.places, sizes, strict=True):
        for place, size in zip(chain.from_iterable(places), of_share, strict=True):
            in_order[place] = size
    ends = list(accumulate(in_order))
    samples = [
        [range(ends[place] - in_order[place], ends[place]) for place in chain.from_iterable(places)]
        for places in batches.places
    ]
    placed = Placed(sum(in_order), samples, in_order)
    return {Kind.BATCHES: batches, Kind.SAMPLES: placed, Kind.LIST: placed}


def reordered(placed: Placed, origins: Order, *, of_batches: bool) -> tuple[Order, Sequence[int]]:
    """Return in which order to take rows that were dealt, and the cuts of that order.

    Args:
        placed: The rows as they were dealt.
        origins: Where each comes from in the unpatched loader's order; of whole batches, where each batch comes from.
        of_batches: Whether the rows are the samples of whole batches.

    Examples:
        >>> order, cuts = reordered(Placed(5, [], [2, 3]), np.array([1, 0]), of_batches=True)
        >>> order.tolist(), cuts
        ([2, 3, 4, 0, 1], [3, 2])
    """
    order = np.argsort(origins, kind="stable")
    if not of_batches:
        return order, placed.cuts
    sizes = np.array(placed.cuts, np.int64)
    begins = np.cumsum(sizes) - sizes
    taken = [np.arange(begins[batch], begins[batch] + sizes[batch]) for batch in order]
    return np.concatenate([np.empty(0, np.int64), *taken]), sizes[order].tolist()


def places_of_rows(plan: Plan, counts: Sequence[int]) -> list[list[range]]:
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


# How many bytes are sent at once, which are held in memory besides the result.
_LARGEST_MESSAGE = 2**26


@dataclass(frozen=True, slots=True)
class Column:
    """What the ranks know of a tensor, an array or a list of which each has some rows.

    Attributes:
        form: What a row of the result looks like.
        shapes: The shape of each share's rows, which may be narrower.
        pickled: How many bytes each share's rows have, if they are pickled.
    """

    form: Form
    shapes: Sequence[tuple[int, ...]]
    pickled: Sequence[int]


@dataclass(frozen=True, slots=True)
class LocalColumn:
    """This rank's rows of a column.

    Attributes:
        leaf: The rows, without padding; None if there are none.
        data: The same, pickled, if they are sent so.
    """

    leaf: Leaf | None = None
    data: bytes = b""


def gathered(connection: Connection, column: Column, placed: Placed, given: LocalColumn, pad: Any) -> Any:
    """Return all ranks' rows of a column, or None on a rank that does not get the result.

    Args:
        connection: Between the ranks.
        column: What the ranks know of the column.
        placed: Where all rows go.
        given: This rank's rows.
        pad: What fills rows up that are narrower than others.

    Raises:
        MissingRanksError: The connection to another rank failed.
    """
    members, form = connection.members, column.form
    result = _empty(form, given.leaf, placed.rows, members.device) if members.receives else None
    if result is not None and any(shape != form.row for shape in column.shapes):
        result[...] = pad
    for share, source in enumerate(members.ranks):
        places = placed.places[share]
        leaf = given.leaf if source == members.rank and any(places) else None
        if form.is_pickled:
            _move_objects(connection, source, leaf, given.data, column.pickled[share], result, places)
        else:
            _move_bytes(connection, source, leaf, form, column.shapes[share], result, places)
    return result


def _empty(form: Form, own: Any, rows: int, here: torch.device | None) -> Any:
    """Return room for the rows of a leaf; a tensor lies where this rank's own does, or else on its device of the kind.

    Args:
        form: What the rows look like.
        own: This rank's own, if it has one.
        rows: How many rows.
        here: This rank's device, if that is known.
    """
    if form.kind == "list":
        return [None] * rows
    if form.kind == "array":
        return np.empty((rows, *form.row), form.dtype)
    if isinstance(own, torch.Tensor):
        device = own.device
    else:
        device = here if here is not None and here.type == form.device else torch.device(form.device)
    return torch.empty((rows, *form.row), dtype=form.dtype, device=device)


def _move_bytes(
    connection: Connection,
    source: int,
    leaf: Leaf | None,
    form: Form,
    shape: tuple[int, ...],
    result: Any,
    places: Iterable[range],
) -> None:
    """Move rows with a fixed number of bytes to their places in the result."""
    row_bytes = form.dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    done = 0
    for ranges in _messages(places, max(1, _LARGEST_MESSAGE // max(1, row_bytes))):
        rows = sum(map(len, ranges))
        given = None if leaf is None else leaf[done : done + rows]
        done += rows
        came = connection.move(source, rows * row_bytes, lambda given=given: _bytes_of(given))  # type: ignore[misc]
        if result is not None and row_bytes:
            _put(_rows_of(came, form, shape, result) if given is None else _detached(given), result, ranges)


def _messages(places: Iterable[range], rows: int) -> Iterator[list[range]]:
    """Cut places into messages of so many rows, each one range or several."""
    message: list[range] = []
    room = rows
    for place in places:
        left = place
        while left:
            part, left = left[:room], left[room:]
            message.append(part)
            room -= len(part)
            if not room:
                yield message
                message, room = [], rows
    if message:
        yield message


def _put(rows: Any, result: Any, places: Iterable[range]) -> None:
    """Put rows into their places in the result, whose rows may be wider."""
    done = 0
    within = () if isinstance(result, list) else tuple(map(slice, rows.shape[1:]))
    for place in places:
        at = slice(place.start, place.stop, place.step)
        result[(at, *within) if within else at] = rows[done : done + len(place)]
        done += len(place)


def _detached(given: Any) -> Any:
    return given.detach() if isinstance(given, torch.Tensor) else given


def _bytes_of(given: Any) -> torch.Tensor:
    """Return the bytes of an array or a tensor."""
    if isinstance(given, np.ndarray):
        # Copy it, because it may be read-only or have gaps.
        return torch.from_numpy(np.array(given, order="C", copy=True).reshape(-1).view(np.uint8))
    return bytes_of(given)


def _rows_of(came: Any, form: Form, shape: tuple[int, ...], result: Any) -> Any:
    """Return the rows that these bytes are, on the result's device."""
    if form.kind == "array":
        return came.numpy().view(form.dtype).reshape(-1, *shape)
    return came.view(form.dtype).reshape(-1, *shape).to(result.device)


def _move_objects(
    connection: Connection,
    source: int,
    leaf: Leaf | None,
    data: bytes,
    size: int,
    result: Any,
    places: Iterable[range],
) -> None:
    """Move rows that are objects to their places in the result."""
    came = bytearray()
    for start in range(0, size, _LARGEST_MESSAGE):
        part = slice(start, min(size, start + _LARGEST_MESSAGE))
        piece = connection.move(
            source,
            part.stop - part.start,
            lambda part=part: torch.frombuffer(bytearray(data[part]), dtype=torch.uint8),  # type: ignore[misc]
        )
        if piece is not None:
            came += piece.numpy().data
    if result is None:
        return
    rows = unpacked(came) if leaf is None and came else leaf
    if rows is not None:
        _put(rows, result, places)
