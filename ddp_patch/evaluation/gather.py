"""Gather outputs in the order of the unpatched loader: what a rank sends, and how all ranks' rows are put together.

Each rank sends a header that describes its data, then the keys of its rows, which give the rows' positions, and the
pickled rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.errors import DDPPatchError, UnsupportedLoaderError, message_of
from ddp_patch.evaluation.outputs import GATHERING, Leaf, Reading, joined, judge_outputs, mapped, read, row_bytes
from ddp_patch.evaluation.shares import Array, Misfit, RankShare, places_of, share_of_pass, share_of_step
from ddp_patch.evaluation.steps import shared_facts
from ddp_patch.loaders.recognition import sharded_by
from ddp_patch.ranks.exchange import bytes_of, digest, exchange, packed, unpacked
from ddp_patch.ranks.group import Group, kept_groups, made_group
from ddp_patch.ranks.pass_facts import State
from ddp_patch.sharding.patched_loaders import passes_of
from ddp_patch.sharding.sampler import EpochSampler

Outputs = TypeVar("Outputs")


def gather_in_order(outputs: Outputs, loader: DataLoader[Any]) -> Outputs:
    """Return all ranks' outputs in the unpatched loader's order, without padding.

    Call it on every rank after a whole pass over the loader. The result is what one process would have: metrics
    computed from it equal those of one process. Samples that ``uneven="drop"`` or ``drop_last=True`` left out are not
    in it. The call needs memory for the result, for copies of this rank's outputs, and for all ranks' outputs once
    more.

    Args:
        outputs: This rank's outputs of the pass, in its own order, padding included. Each tensor, array or list has one
            row (a list: one element) per sample. Outputs may also be a list with one entry per batch, as collected in
            the loop; the result is then a list of the unpatched loader's batches. Dicts, tuples and dataclasses may
            hold these outputs, and None. A rank that got no batch may pass None.
        loader: A loader from ``patch_dataloader_to_ddp``, or an unpatched loader in a single process, where the outputs
            are returned unchanged.

    Returns:
        The same structure, with tensors on the device of this rank's tensors. If this rank has none, they are on its
        current device of the type that the other ranks use.

    Raises:
        OutputsError: A rank is in the middle of a pass, passes a number of rows that is not its number of samples, or a
            structure that is not the other ranks'. Every rank raises this error.
        MissingRanksError: A rank did not arrive in time.
        RankMismatchError: A rank failed while the ranks gathered.
        NotPatchedError: The loader was not patched, and there are several ranks.
        WorldError: The world is explicit, by ``rank=`` and ``num_replicas=``, so the other processes are unknown.
        UnsupportedLoaderError: The samples of each rank are unknown, or ``cost=`` or ``layout=`` has changed their
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
    """Return all ranks' outputs of the loop's present step, in the stream's order and without padding.

    Call it on every rank in every step that is gathered, inside the loop over the loader, as accelerate's
    ``gather_for_metrics``. All steps together return each sample once. The ranks communicate in each step: if the
    outputs fit into memory, ``gather_in_order`` after the loop is faster, and has the order of one process. With
    ``cost=``, the rows of a step are in another order.

    Args:
        outputs: This rank's outputs for the present batch, with one row per sample, padding included, as in
            ``gather_in_order``.
        loader: The loader that is iterated, or an unpatched loader in a single process, where the outputs are returned
            unchanged.

    Returns:
        The same structure, as in ``gather_in_order``.

    Raises:
        OutputsError: The ranks are in different steps; a rank passes a number of rows that is not its batch's number of
            samples, or a structure that is not the other ranks'; or some ranks may have a step less
            (``uneven="keep"``). Every rank raises this error.
        MissingRanksError: A rank did not arrive in time, perhaps because it has left the loop.
        RankMismatchError: A rank failed while the ranks gathered.
        NotPatchedError: The loader was not patched, and there are several ranks.
        WorldError: The world is explicit, by ``rank=`` and ``num_replicas=``, so the other processes are unknown.
        UnsupportedLoaderError: The samples of a batch are unknown.

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
    current = sampler.rank_passes.epochs.latest if isinstance(sampler, EpochSampler) else None
    return current is not None and bool(current.delivery.batches) and current.delivery.state is not State.ENDED


def gather_this_step(outputs: Outputs, loader: DataLoader[Any], step: int) -> Outputs:
    """Return all ranks' outputs of step ``step``, from 0, if something between the loader and the loop prefetches.

    See ``gather_step``.
    """
    return cast(Outputs, _gathered("gather_step", outputs, loader, step))


def _gathered(operation: str, outputs: Any, loader: DataLoader[Any], step: int | None = None) -> Any:
    """Compare the outputs with the other ranks' outputs, and return all of them; see ``gather_in_order``."""
    if (facts := shared_facts(operation, loader)) is None:
        return outputs
    agreed = passes_of(facts).agreed
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
    share_of = partial(share_of_step, facts, step) if in_step else partial(share_of_pass, facts)
    own, judge = OwnOutputs(outputs, share_of), partial(judge_outputs, operation)
    if agreed.world.num_replicas == 1:
        rank = 0 if agreed.world.share_of_rank is None else dist.get_rank()
        judge({rank: own.said()})
        return own.whole(own.header[None], [own.data])
    ranks, timeout = agreed.world.peer_ranks(operation), agreed.options.timeout
    with _kept_group(ranks, timeout) as group:
        sizes = [own.header.nbytes] * len(ranks)
        came = group.all_gather(GATHERING, own.header.view(np.uint8), sizes, timeout, meets=True)
        headers = np.stack([header.view(np.int64) for header in came])
        if not are_alike(headers):
            exchange(ranks, GATHERING, own.said(), judge, timeout)
        return own.whole(headers, group.all_gather(GATHERING, own.data, headers[:, 3].tolist(), timeout))


@contextmanager
def _kept_group(ranks: Sequence[int], timeout: float) -> Iterator[Group]:
    """Yield the group in which these ranks gather. If this rank fails alone, the other ranks raise an error, too."""
    kept = kept_groups(ranks, "rows")
    if not kept:
        kept.append(made_group(ranks, GATHERING, timeout))
    (group,) = kept
    try:
        yield group
    except DDPPatchError:
        raise
    except BaseException as error:
        group.close(f"{type(error).__name__}: {message_of(error)}")
        raise


# ---- what a rank sends ----


def are_alike(headers: Array) -> bool:
    """Return whether all ranks make the same call, and all ranks with rows have the same form."""
    calls, forms, *_ = headers.T
    return bool(calls.all()) and len({*calls.tolist()}) == 1 and len({*forms.tolist()} - {0}) <= 1


class OwnOutputs:
    """A rank's own outputs, and the data that it sends. A problem is reported, so that all ranks raise an error.

    Args:
        outputs: What the user passed.
        share_of: Returns this rank's share.

    Attributes:
        header: Four numbers that are sent first: a hash of the call, 0 if there is a problem; a hash of the form, 0 if
            this rank has no rows; the number of rows; and the number of bytes of data.
        data: The keys of the rows, the pickled rows, and the pickled form, for a rank that has no rows.
    """

    def __init__(self, outputs: Any, share_of: Callable[[], RankShare]) -> None:
        self.header: Array = np.zeros(4, np.int64)
        self.data: Array = np.empty(0, np.uint8)
        self._given, self._problem = outputs, ""
        self._readings: Mapping[str, Reading] = {}
        try:
            self._share = share_of()
            self._readings = read(outputs, self._share)
            self._make_ready()
        except Exception as error:  # noqa: BLE001 - the user's objects may raise anything; all ranks get the error
            self._problem = f"{error}" if type(error) is Misfit else f"met {type(error).__name__}: {message_of(error)}"

    def said(self) -> dict[str, Any]:
        """Return this rank's report to the other ranks: its call, its problem, and the form of each leaf."""
        forms = {path: reading.text for path, reading in self._readings.items()}
        return {"at": "" if self._problem else self._share.at, "problem": self._problem, "forms": forms}

    def _make_ready(self) -> None:
        """Set ``header`` and ``data``."""
        keys, readings = self._share.keys, self._readings
        nest = mapped(self._given, lambda _, leaf: leaf[:0]) if readings else None
        form = nest, {path: reading.without_rows() for path, reading in readings.items()}
        columns = {name: _sent(rows) for name, rows in _columns(readings).items()}
        pickled = packed((packed(form), columns))
        self.data = np.concatenate([keys.view(np.uint8), np.frombuffer(pickled, np.uint8)])
        texts = [(path, reading.text) for path, reading in sorted(readings.items())]
        self.header[:] = _number(self._share.at), _number(texts) if texts else 0, len(keys), len(self.data)

    def whole(self, headers: Array, came: Sequence[Array]) -> Any:
        """Return all ranks' rows, put together.

        Args:
            headers: All ranks' headers.
            came: All ranks' data.
        """
        got = [(data, 8 * rows) for data, (_, form, rows, _) in zip(came, headers.tolist(), strict=True) if form]
        if not got:
            return self._given
        keys = [data[:end].view(np.int64) for data, end in got]
        nest, readings, places = self._given, self._readings, places_of(keys)
        if not readings:
            data, end = got[0]
            nest, readings = unpacked(unpacked(data[end:].data)[0])
        forms, count = _columns(readings), sum(map(len, keys))
        widths = {name: width for name, form in forms.items() if (width := row_bytes(form)) is not None}
        rooms = {name: np.empty((count, width), np.uint8) for name, width in widths.items()}
        objects = {name: [form[:0]] for name, form in forms.items() if name not in widths}
        for where, (data, end) in zip(places, got, strict=True):
            _, columns = unpacked(data[end:].data)
            for name, room in rooms.items():
                room[where] = columns[name]
            for name, rows in objects.items():
                rows.append(columns[name])
        order = np.argsort(np.concatenate(places))
        whole = {name: _as_leaf(room, forms[name]) for name, room in rooms.items()}
        whole |= {name: _in_order(joined(rows), order) for name, rows in objects.items()}
        sizes = partial(self._share.batch_sizes, np.concatenate(keys))
        return mapped(nest, lambda path, _: readings[path].leaf(whole, path, sizes))


def _number(value: object) -> int:
    """Return a positive number for a value, the same on every rank."""
    return int(digest(value), 16) >> 1 | 1


def _columns(readings: Mapping[str, Reading]) -> dict[str, Leaf]:
    return {name: rows for reading in readings.values() for name, rows in reading.columns.items()}


def _sent(leaf: Leaf) -> Leaf:
    """Return the form in which a leaf is pickled: a matrix of bytes, if rows have a fixed number of bytes."""
    if (width := row_bytes(leaf)) is None:
        return leaf
    data = bytes_of(leaf).numpy() if isinstance(leaf, torch.Tensor) else np.ascontiguousarray(leaf).reshape(-1)
    return cast(Array, data.view(np.uint8).reshape(len(leaf), width))


def _as_leaf(matrix: Array, form: Leaf) -> Leaf:
    """Return the tensor or array of a matrix of bytes."""
    data, shape = matrix.reshape(-1), (len(matrix), *cast(Array, form).shape[1:])
    if isinstance(form, torch.Tensor):
        return torch.from_numpy(data).view(form.dtype).reshape(shape).to(form.device)
    return data.view(cast(Array, form).dtype).reshape(shape)


def _in_order(rows: Leaf, order: Array) -> Leaf:
    return [rows[place] for place in order.tolist()] if isinstance(rows, list) else cast(Array, rows[order])
