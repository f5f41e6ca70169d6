"""Gather outputs in the order of the unpatched loader: what a rank sends of its own, and what all ranks' come to.

First a header says how many rows a rank has, and where they go. Then come, where there are any: keys that are no run, a
pickle of rows that have no fixed number of bytes, and all others, each row as its bytes in all tensors and arrays.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from time import monotonic
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.errors import DDPPatchError, UnsupportedLoaderError, message_of
from ddp_patch.evaluation.outputs import (
    GATHERING,
    Leaf,
    Reading,
    joined,
    judge_outputs,
    mapped,
    read,
    row_bytes,
)
from ddp_patch.evaluation.shares import Array, Misfit, RankShare, places_of, run_of, share_of_pass, share_of_step
from ddp_patch.evaluation.steps import shared_batches
from ddp_patch.loaders.recognition import sharded_by
from ddp_patch.ranks.exchange import MARGIN_S, digest, exchange
from ddp_patch.ranks.group import Group, kept_groups, made_group
from ddp_patch.ranks.log import State
from ddp_patch.ranks.packing import bytes_of, packed, unpacked
from ddp_patch.sharding.sampler import EpochSampler

__all__ = ["OwnOutputs", "are_alike", "gather_in_order", "gather_step", "gather_this_step", "is_in_a_step"]

Outputs = TypeVar("Outputs")

# How many bytes of rows travel at once, all ranks' together, which are held in memory besides the result.
_LARGEST_MESSAGE = 2**26


def gather_in_order(outputs: Outputs, loader: DataLoader[Any]) -> Outputs:
    """Return all ranks' outputs in the unpatched loader's order, without padding.

    Call it on every rank after a whole pass over the loader. The result is what one process would have: metrics
    computed from it equal those of one process. Samples that ``uneven="drop"`` or ``drop_last=True`` left out are not
    in it. Besides the result, it needs copies of this rank's outputs, and up to 64 MiB of memory. Lists and strings are
    pickled, which needs all ranks' once more.

    Args:
        outputs: This rank's outputs of the pass, in its own order, padding included. Each tensor, array or list has one
            row (a list: one element) per sample. It may also be a list with one entry per batch, as collected in the
            loop; the result is then such a list, too, with the batches of the unpatched loader. Dicts, tuples and
            dataclasses may hold these, and None. A rank that got nothing may pass None.
        loader: A loader from ``patch_dataloader_to_ddp``, or an unpatched one in a single process, where the outputs
            come back unchanged.

    Returns:
        The same structure, with tensors on the device of this rank's own; where it has none, on its current one of the
        other ranks' kind.

    Raises:
        OutputsError: A rank is in the middle of a pass, passes another number of rows than it got samples, or another
            structure than the others; raised on every rank.
        MissingRanksError: A rank did not arrive in time.
        NotPatchedError: The loader was not patched, and there are several ranks.
        WorldError: The world was given by ``rank=`` and ``num_replicas=``, so the other processes are unknown.
        UnsupportedLoaderError: It is unknown which samples each rank got, or ``cost=`` or ``layout=`` has changed their
            order.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(5), batch_size=2), rank=0, num_replicas=1)
        >>> outputs = [{"doubled": 2 * batch} for batch in loader]
        >>> torch.cat([batch["doubled"] for batch in gather_in_order(outputs, loader)])
        tensor([0, 2, 4, 6, 8])
    """
    return cast(Outputs, _gathered("gather_in_order", outputs, loader))


def gather_step(outputs: Outputs, loader: DataLoader[Any]) -> Outputs:
    """Return all ranks' outputs of the step that the loop is in, in the stream's order and without padding.

    Call it on every rank in every step that is gathered, inside the loop over the loader, as accelerate's
    ``gather_for_metrics``. What all steps return together is each sample once. The ranks communicate in each step:
    where the outputs fit into memory, ``gather_in_order`` after the loop is faster, and its order is that of one
    process. With ``cost=``, the rows of a step are in an order of its own.

    Args:
        outputs: This rank's outputs for the batch that the loop has, with one row per sample, padding included, as in
            ``gather_in_order``.
        loader: The loader that is iterated, or an unpatched one in a single process, where the outputs come back
            unchanged.

    Returns:
        The same structure, as in ``gather_in_order``.

    Raises:
        OutputsError: The ranks are in different steps, a rank passes another number of rows than its batch has samples
            or another structure than the others, or some ranks may have a step less (``uneven="keep"``); raised on
            every rank.
        MissingRanksError: A rank did not arrive in time, such as one that has left the loop.
        NotPatchedError: The loader was not patched, and there are several ranks.
        WorldError: The world was given by ``rank=`` and ``num_replicas=``, so the other processes are unknown.
        UnsupportedLoaderError: It is unknown which samples a batch holds.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(5), batch_size=2), rank=0, num_replicas=1)
        >>> [gather_step(2 * batch, loader).tolist() for batch in loader]
        [[0, 2], [4, 6], [8]]
    """
    return cast(Outputs, _gathered("gather_step", outputs, loader))


def is_in_a_step(loader: DataLoader[Any]) -> bool:
    """Return whether a loader is patched, and a loop over it has begun and not ended."""
    sampler = sharded_by(loader)
    current = sampler.rank_passes.latest if isinstance(sampler, EpochSampler) else None
    return current is not None and bool(current.batches_delivered) and current.state is not State.ENDED


def gather_this_step(outputs: Outputs, loader: DataLoader[Any], step: int) -> Outputs:
    """Return all ranks' outputs of a step, from 0, where something between the loader and the loop fetches ahead.

    See ``gather_step``.
    """
    return cast(Outputs, _gathered("gather_step", outputs, loader, step))


def _gathered(operation: str, outputs: Any, loader: DataLoader[Any], step: int | None = None) -> Any:
    """Compare the outputs with the other ranks', and return all ranks'; see ``gather_in_order``."""
    if (batches := shared_batches(operation, loader)) is None:
        return outputs
    agreed = batches.passes.agreed
    changes = (
        "cost=" if agreed.options.costs is not None else "layout='contiguous'" if agreed.options.gives_runs else ""
    )
    if operation == "gather_in_order" and changes:
        raise UnsupportedLoaderError(
            f"gather_in_order was given a loader with {changes}, which changes the order of the samples, so the "
            f"outputs would not be in the sampler's. Leave {changes} out of loaders that evaluate, or use "
            "gather_step() in the loop."
        )
    in_step = operation == "gather_step"
    share_of = partial(share_of_step, loader, batches, step) if in_step else partial(share_of_pass, batches)
    own, judge = OwnOutputs(outputs, share_of), partial(judge_outputs, operation)
    if agreed.world.num_replicas == 1:
        rank = 0 if agreed.world.share_of_rank is None else dist.get_rank()
        judge({rank: own.said()})
        headers = own.header[None]
        return own.whole(headers, ([data] for data, _ in own.parts(headers)))
    with _Members(agreed.world.peer_ranks(operation), agreed.options.timeout) as members:
        headers = members.headers(own.header)
        if not are_alike(headers):
            exchange(members.ranks, GATHERING, own.said(), judge, agreed.options.timeout)
        return own.whole(headers, (members.sent(data, sizes.tolist()) for data, sizes in own.parts(headers)))


class _Members:
    """One rank for each share, in the group that they keep.

    Args:
        ranks: Their global ranks.
        timeout: How many seconds they wait for each other.
    """

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        self.ranks: Sequence[int] = ranks
        self._timeout, self._begun = timeout, monotonic()
        kept = kept_groups(ranks, "rows")
        self._group = kept[0] if kept else self._met()

    def __enter__(self) -> "_Members":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """If this rank fails alone, tell the others and break the connections; errors of ours are raised on all."""
        if error is not None and not isinstance(error, DDPPatchError):
            self._group.close(f"{type(error).__name__}: {message_of(error)}")

    def _met(self) -> Group:
        """Meet for a new group. Ranks that have waited as long as they may have a moment left for it."""
        left = max(MARGIN_S, self._timeout - (monotonic() - self._begun))
        return made_group(self.ranks, "rows", GATHERING, left)

    def headers(self, own: Array) -> Array:
        """Return all ranks' headers."""
        data, sizes = own.view(np.uint8), [own.nbytes] * len(self.ranks)
        try:
            came = self._all_gather(data, sizes)
        except RuntimeError:  # since the group was last used, maybe; nothing is lost, so the ranks meet for a new one
            self._group.close()
            self._group = self._met()
            came = self.sent(data, sizes)
        return np.stack([block.view(own.dtype) for block in came])

    def sent(self, data: Array, sizes: Sequence[int]) -> list[Array]:
        """Send bytes, and return all ranks', of which each has so many."""
        with self._group.explained(GATHERING):
            return self._all_gather(data, sizes)

    def _all_gather(self, data: Array, sizes: Sequence[int]) -> list[Array]:
        return [block.numpy() for block in self._group.all_gather(torch.from_numpy(data), sizes, self._timeout)]


# ---- what a rank sends ----


def are_alike(headers: Array) -> bool:
    """Return whether all ranks call the same, and those that got something read alike."""
    calls, forms, *_ = headers.T
    return bool(calls.all()) and len({*calls.tolist()}) == 1 and len({*forms.tolist()} - {0}) <= 1


class OwnOutputs:
    """A rank's own outputs, and what it sends of them. Whatever is wrong is kept to be said, so that all ranks raise.

    Args:
        outputs: What the user passed.
        share_of: Returns what this rank got.

    Attributes:
        header: Numbers that all others learn first. Of the call: 0 if something is wrong. Of the form: 0 if this rank
            got nothing. How many rows there are; the first one's key, and the step from key to key, 0 if they are no
            run. How many bytes a row has, and how many are pickled.
    """

    def __init__(self, outputs: Any, share_of: Callable[[], RankShare]) -> None:
        self.header: Array = np.zeros(7, np.int64)
        self._given, self._problem = outputs, ""
        self._readings: Mapping[str, Reading] = {}
        try:
            self._share = share_of()
            self._readings = read(outputs, self._share)
            self._make_ready()
        except Exception as error:  # noqa: BLE001 - of the user's objects, too; all ranks get the error
            self._problem = f"{error}" if type(error) is Misfit else f"met {type(error).__name__}: {message_of(error)}"

    def said(self) -> dict[str, Any]:
        """Return what the others may hear, as plain values: for each leaf what it is, if there are rows."""
        forms = {path: reading.text for path, reading in self._readings.items()}
        return {"at": "" if self._problem else self._share.at, "problem": self._problem, "forms": forms}

    def _make_ready(self) -> None:
        """Make ready what is sent."""
        (fixed, objects), keys = _columns(self._readings), self._share.keys
        nest = mapped(self._given, lambda _, leaf: leaf[:0]) if self._readings else None
        form = nest, {path: reading.without_rows() for path, reading in self._readings.items()}
        self._pickled: Array = np.frombuffer(bytearray(packed((form, objects))), np.uint8)
        matrices = map(_matrix, fixed.values())
        self._rows: Array = np.concatenate([np.empty((len(keys), 0), np.uint8), *matrices], axis=1)
        texts = [(path, reading.text) for path, reading in sorted(self._readings.items())]
        self.header[:2] = _number(self._share.at), _number(texts) if texts else 0
        self.header[2:] = len(keys), *run_of(keys), self._rows.shape[1], len(self._pickled)

    def parts(self, headers: Array) -> Iterator[tuple[Array, Array]]:
        """Yield what this rank sends, as bytes, and how many bytes each rank sends then."""
        _, _, rows, _, steps, widths, pickled = headers.T
        if not steps.all():
            yield self._share.keys.view(np.uint8), 8 * rows
        if self._are_pickled(headers):
            yield self._pickled, pickled
        at_once = _rows_at_once(headers)
        for begin in range(0, rows.max() if widths.any() else 0, at_once):
            yield self._rows[begin : begin + at_once].reshape(-1), np.clip(rows - begin, 0, at_once) * widths.max()

    def whole(self, headers: Array, came: Iterator[Sequence[Array]]) -> Any:
        """Return all ranks' rows, put together.

        Args:
            headers: All ranks'.
            came: All ranks' parts.
        """
        if not headers[:, 1].any():  # nobody got anything
            return self._given
        keys = [np.arange(first, first + rows * step, step) for rows, first, step in headers[:, 2:5].tolist() if step]
        if len(keys) < len(headers):
            keys = [block.view(np.int64) for block in next(came)]
        nest, readings, pickled = self._given, self._readings, list[Any]()
        if self._are_pickled(headers):
            pickled = [unpacked(block.data) for block in next(came)]
            nest, readings = (nest, readings) if readings else pickled[headers[:, 1].argmax()][0]
        (fixed, objects), places = _columns(readings), places_of(keys)
        rooms = [np.empty((sum(map(len, keys)), row_bytes(form) or 0), np.uint8) for form in fixed.values()]
        _put(rooms, places, came, headers)
        whole = dict(zip(fixed, map(_as_leaf, rooms, fixed.values()), strict=True))
        for name, form in objects.items():
            whole[name] = _in_order(form, [given.get(name, form[:0]) for _, given in pickled], places)
        sizes = partial(self._share.batch_sizes, np.concatenate(keys))
        return mapped(nest, lambda path, _: readings[path].leaf(whole, path, sizes))

    def _are_pickled(self, headers: Array) -> bool:
        """Return whether pickles are sent: of rows, or of the form for a rank that got nothing."""
        got = np.count_nonzero(headers[:, 1])
        return bool(0 < got < len(headers) or _columns(self._readings)[1])


def _number(value: object) -> int:
    """Return a positive number for a value, the same on every rank."""
    return int(digest(value), 16) >> 1 | 1


def _rows_at_once(headers: Array) -> int:
    return max(1, _LARGEST_MESSAGE // (len(headers) * max(1, int(headers[:, 5].max()))))


def _columns(readings: Mapping[str, Reading]) -> tuple[dict[str, Leaf], dict[str, Leaf]]:
    """Return the columns whose rows have a fixed number of bytes, and the others, in an order that all ranks have."""
    columns = sorted((name, rows) for reading in readings.values() for name, rows in reading.columns.items())
    fixed = {name: rows for name, rows in columns if row_bytes(rows) is not None}
    return fixed, {name: rows for name, rows in columns if name not in fixed}


def _matrix(leaf: Leaf) -> Array:
    """Return the bytes of a tensor or an array, row by row: the same memory where it lies there in order."""
    data = bytes_of(leaf).numpy() if isinstance(leaf, torch.Tensor) else np.ascontiguousarray(leaf).reshape(-1)
    return cast(Array, data.view(np.uint8).reshape(len(leaf), cast(int, row_bytes(leaf))))


def _as_leaf(matrix: Array, form: Leaf) -> Leaf:
    """Return the tensor or array that has these bytes."""
    data, shape = matrix.reshape(-1), (len(matrix), *cast(Array, form).shape[1:])
    if isinstance(form, torch.Tensor):
        return torch.from_numpy(data).view(form.dtype).reshape(shape).to(form.device)
    return data.view(cast(Array, form).dtype).reshape(shape)


def _put(rooms: Sequence[Array], places: Sequence[Array], came: Iterator[Sequence[Array]], headers: Array) -> None:
    """Put all ranks' rows into their places, as they come."""
    at_once, ends = _rows_at_once(headers), np.cumsum([room.shape[1] for room in rooms])[:-1]
    for begin, blocks in zip(count(0, at_once), came, strict=False):
        where = np.concatenate([of_rank[begin : begin + at_once] for of_rank in places])
        parts = np.split(np.concatenate(blocks).reshape(len(where), -1), ends, axis=1)
        for room, part in zip(rooms, parts, strict=True):
            room[where] = part


def _in_order(form: Leaf, given: Sequence[Any], places: Sequence[Array]) -> Leaf:
    """Return all ranks' rows that were pickled, in order."""
    rows, order = joined([form[:0], *given]), np.argsort(np.concatenate(places))
    return [rows[place] for place in order.tolist()] if isinstance(rows, list) else cast(Array, rows[order])
