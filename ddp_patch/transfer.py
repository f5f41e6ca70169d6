"""Rows sent from every rank to all, or to one; here are the only collectives of this package."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddp_patch.rows import Form, Structure, leaves_of

__all__ = ["Members", "gathered"]

# How many bytes are sent at once: what is held besides the result.
_LARGEST_MESSAGE = 2**26


@dataclass(frozen=True, slots=True)
class Members:
    """Who gathers.

    Attributes:
        ranks: The global ranks, by the share that they take.
        dst: Which of them gets the result; None where all do.
    """

    ranks: Sequence[int]
    dst: int | None

    @property
    def rank(self) -> int:
        """This process's."""
        return dist.get_rank() if len(self.ranks) > 1 else self.ranks[0]

    @property
    def receives(self) -> bool:
        """Whether this rank gets the result."""
        return self.dst is None or self.rank == self.dst


def gathered(outputs: Any, structure: Structure, members: Members, places: Sequence[slice], rows: int) -> Any:
    """Return all ranks' outputs as one, or None on a rank that gets nothing.

    Args:
        outputs: This rank's, in the same structure; anything where it has no rows.
        structure: What all give.
        members: Who gives.
        places: Where in the result the rows of each share stand; what a rank has beyond these is left out.
        rows: How many rows the result has.
    """
    own = dict(leaves_of(outputs))
    leaves = {}
    with _channel(members) as channel:
        for path, form in structure.forms.items():
            collect = _collect_bytes if form.is_bytes else _collect_objects
            leaves[path] = collect(channel, form, own.get(path), places, rows)
    return structure.rebuilt(leaves) if members.receives else None


@dataclass(frozen=True, slots=True)
class _Channel:
    """How bytes come from one member to those that receive.

    Attributes:
        members: Who gathers.
        group: Their process group; None is that of all ranks.
        device: Where the backend can send from.
    """

    members: Members
    group: dist.ProcessGroup | None
    device: torch.device

    def move(self, source: int, size: int, data: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Return ``size`` bytes of the source's, on those that receive and are not the source.

        Args:
            source: Which rank has them.
            size: How many they are.
            data: Gives them, on the source.
        """
        rank, dst = self.members.rank, self.members.dst
        takes_part = dst is None or (rank in {source, dst} and source != dst)
        if len(self.members.ranks) == 1 or not size or not takes_part:
            return None
        buffer = (data() if rank == source else torch.empty(size, dtype=torch.uint8)).to(self.device)
        if dst is None:
            dist.broadcast(buffer, source, self.group)
        elif rank == source:
            dist.send(buffer, dst, self.group)
        else:
            dist.recv(buffer, source, self.group)
        return None if rank == source else buffer


@contextmanager
def _channel(members: Members) -> Iterator[_Channel]:
    cpu = torch.device("cpu")
    if len(members.ranks) == 1:
        yield _Channel(members, None, cpu)
        return
    # Of some ranks only these make the group, and it is gone afterwards.
    is_all = sorted(members.ranks) == list(range(dist.get_world_size()))
    group = None if is_all else dist.new_group(sorted(members.ranks), use_local_synchronization=True)
    try:
        sends_from_cpu = "cpu:" in dist.get_backend_config(group)
        yield _Channel(members, group, cpu if sends_from_cpu else torch.accelerator.current_accelerator() or cpu)
    finally:
        if group is not None:
            dist.destroy_process_group(group)


def _collect_bytes(channel: _Channel, form: Form, own: Any, places: Sequence[slice], rows: int) -> Any:
    """Gather a tensor or array whose rows are so many bytes each."""
    result = _empty(form, own, rows) if channel.members.receives else None
    itemsize = form.dtype.itemsize
    row_bytes = itemsize * int(np.prod(form.row, dtype=np.int64))
    step = max(1, _LARGEST_MESSAGE // max(1, row_bytes))
    for source, place in zip(channel.members.ranks, places, strict=True):
        taken = range(*place.indices(rows))
        is_own = source == channel.members.rank
        for start in range(0, len(taken), step):
            part = taken[start : start + step]
            given = own[start : start + len(part)] if is_own else None
            came = channel.move(source, len(part) * row_bytes, lambda given=given: _bytes_of(given))  # type: ignore[misc]
            if result is not None and len(part) and row_bytes:
                into = slice(part.start, part.stop, part.step)
                result[into] = given if is_own else _rows_of(came, form, len(part), result)
    return result


def _empty(form: Form, own: Any, rows: int) -> Any:
    if form.kind == "array":
        return np.empty((rows, *form.row), form.dtype)
    device = own.device if isinstance(own, torch.Tensor) else torch.device(form.device)
    return torch.empty((rows, *form.row), dtype=form.dtype, device=device)


def _bytes_of(given: Any) -> torch.Tensor:
    if isinstance(given, np.ndarray):
        return torch.frombuffer(bytearray(given.tobytes()), dtype=torch.uint8)
    plain: torch.Tensor = given.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _rows_of(came: Any, form: Form, rows: int, result: Any) -> Any:
    if form.kind == "array":
        return np.frombuffer(came.cpu().numpy().tobytes(), form.dtype).reshape(rows, *form.row)
    return came.to(result.device).view(form.dtype).reshape(rows, *form.row)


def _collect_objects(channel: _Channel, form: Form, own: Any, places: Sequence[slice], rows: int) -> Any:
    """Gather a list, or an array of objects or strings."""
    result: Any = None
    if channel.members.receives:
        result = [None] * rows if form.kind == "list" else np.empty((rows, *form.row), form.dtype)
    for source, place in zip(channel.members.ranks, places, strict=True):
        taken = range(*place.indices(rows))
        if source == channel.members.rank:
            given = own[: len(taken)] if len(taken) else []
            _send(channel, source, _pickled(given))
        else:
            given = _receive(channel, source, form)
        if result is not None and len(taken):
            result[place] = given
    return result


def _pickled(given: Any) -> bytes:
    return pickle.dumps(_with_tensors(given, lambda tensor: tensor.detach().cpu()))


def _send(channel: _Channel, source: int, data: bytes) -> None:
    channel.move(source, 8, lambda: torch.tensor([len(data)]).view(torch.uint8))
    for start in range(0, len(data), _LARGEST_MESSAGE):
        part = data[start : start + _LARGEST_MESSAGE]
        channel.move(source, len(part), lambda part=part: torch.frombuffer(bytearray(part), dtype=torch.uint8))  # type: ignore[misc]


def _receive(channel: _Channel, source: int, form: Form) -> Any:
    nothing = torch.empty
    size = channel.move(source, 8, nothing)
    if size is None:
        return None
    data = bytearray()
    for start in range(0, total := int(size.cpu().view(torch.int64)), _LARGEST_MESSAGE):
        part = channel.move(source, min(_LARGEST_MESSAGE, total - start), nothing)
        data += part.cpu().numpy().tobytes()  # type: ignore[union-attr]  # as there was a size
    given = pickle.loads(data)  # noqa: S301 - our own ranks'
    if form.device == "cpu":
        return given
    return _with_tensors(given, lambda tensor: tensor.to(form.device))


def _with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a nest with each tensor in it changed."""
    match value:
        case torch.Tensor():
            return change(value)
        case Mapping():
            return {key: _with_tensors(part, change) for key, part in value.items()}
        case list():
            return [_with_tensors(part, change) for part in value]
        case tuple():
            parts = [_with_tensors(part, change) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
