"""The step that a loop is in: its mask, its weight, and what all ranks have of it."""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.errors import InvalidOptionError, UnsupportedLoaderError
from ddp_patch.loaders.copying import copy_loader
from ddp_patch.loaders.facts import ShardedUnit, look_at
from ddp_patch.loaders.recognition import require_loader, sharded_by
from ddp_patch.plan import BatchRecord
from ddp_patch.ranks.channel import opened_sums
from ddp_patch.ranks.group import closed_at_exit
from ddp_patch.sharding.batches import Batches, batches_of
from ddp_patch.sharding.passes import Pass

__all__ = [
    "Steps",
    "WeightOf",
    "is_alone",
    "iter_with_mask",
    "iter_with_weights",
    "require_one_stream",
    "steps_alone",
    "steps_of",
]


def is_alone(operation: str, loader: DataLoader[Any]) -> bool:
    """Return whether the loader is unpatched and this process the only one."""
    require_loader(operation, loader)
    return sharded_by(loader) is None and (not dist.is_initialized() or dist.get_world_size() == 1)


def require_one_stream(operation: str, loader: DataLoader[Any]) -> Batches:
    """Return how a loader makes batches of its share; raise if its ranks do not share one stream."""
    batches = batches_of(operation, loader)
    if batches.passes.agreed.options.by_worker and batches.unit is ShardedUnit.ITERABLE:
        raise UnsupportedLoaderError(
            f"{operation} was given a loader with share='by_worker': its dataset decides what each worker "
            "reads, so there is no common order and no padding. Leave share out."
        )
    return batches


# Each batch with its record, or with an earlier one's that surely has the same numbers of samples.
Steps = Iterator[tuple[Any, BatchRecord]]


def steps_of(operation: str, loader: DataLoader[Any], batches: Batches, iterator: Iterator[Any] | None = None) -> Steps:
    """Yield each batch of a pass over a patched loader.

    Args:
        operation: What the user called, for errors.
        loader: The loader.
        batches: How it makes batches.
        iterator: The loader's iterator of the pass; None to make one.

    Raises:
        UnsupportedLoaderError: The loader would continue a pass that has begun.
    """
    passes = batches.passes
    if passes.batches_into_pass:
        raise UnsupportedLoaderError(
            f"{operation} was given a {type(loader).__name__} in the middle of epoch {passes.epochs.current}, after "
            f"{passes.batches_into_pass} batches: it has one iterator for all epochs, and continues after a break. "
            f"Call set_epoch({passes.epochs.current}) first, to start the epoch again."
        )
    until = 0
    with passes.keeping_sizes() if batches.unit is ShardedUnit.BATCH else nullcontext():
        for number, batch in enumerate(loader if iterator is None else iterator):
            if number == 0:
                current = cast("Pass[Any]", passes.latest)
                if current.resumed_elsewhere:
                    raise UnsupportedLoaderError(
                        f"{operation} cannot know which samples a batch holds: the loader's own load_state_dict() "
                        f"resumed within epoch {current.epoch}, so its first batches were counted elsewhere. Take the "
                        "state with loader_state(), and resume with restore_loader()."
                    )
            if number >= until:
                schedule = current.schedule(batches)
                record, until = schedule.record(number), schedule.same_size_until(number)
            yield batch, record


def steps_alone(operation: str, loader: DataLoader[Any]) -> Steps:
    """Yield each batch of an unpatched loader in a single process, where nothing is padding."""
    if loader.batch_sampler is None:
        for item in loader:
            yield item, _unshared(1)
        return
    facts = look_at(loader)
    if facts.repeater is not None or facts.iterator_in is not None:
        raise UnsupportedLoaderError(
            f"{operation} counts samples in a copy of a loader that is not patched, and an iterator runs in this "
            f"{type(loader).__name__}, which a copy does not have. Patch it, in a single process with rank=0, "
            "num_replicas=1."
        )
    # Count samples before they are collated: a collated batch may have any type.
    record = _unshared(0)
    for samples, batch in copy_loader(loader, collate_fn=partial(_numbered, loader.collate_fn)):
        if samples != record.samples:
            record = _unshared(samples)
        yield batch, record


def _unshared(samples: int) -> BatchRecord:
    """Return the record of a batch that one process has for itself."""
    return BatchRecord(0, 0, samples, samples, samples, samples, samples)


def _numbered(collate_fn: Callable[[Any], Any], samples: Any) -> tuple[int, Any]:
    """Return the number of samples, then what the user's ``collate_fn`` makes of them."""
    return len(samples), collate_fn(samples)


_MASKING = "iter_with_mask"


def iter_with_mask(loader: DataLoader[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each batch of a pass with a mask that is False on padding.

    A rank's last batch may be all padding, and what the mask keeps of it is empty, which not every metric takes. So
    update a metric ``if mask.any()``, and let the ranks communicate after the loop.

    Args:
        loader: A loader from ``patch_dataloader_to_ddp``, or an unpatched one in a single process, which has no
            padding.

    Yields:
        The batch and its mask, a bool tensor on the CPU, of shape [samples], or of shape [] with ``batch_size=None``.

    Raises:
        NotPatchedError: The loader was not patched, and there are several ranks.
        UnsupportedLoaderError: It is unknown which samples a batch holds, or a batch has fewer rows than samples.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(5), batch_size=2), rank=1, num_replicas=2)
        >>> for batch, mask in iter_with_mask(loader):
        ...     print(batch.tolist(), mask.tolist())
        [1, 3] [True, True]
        [0] [False]
    """
    if is_alone(_MASKING, loader):
        return _masked(steps_alone(_MASKING, loader), loader)
    batches = require_one_stream(_MASKING, loader)
    return _masked(steps_of(_MASKING, loader, batches), loader)


def _masked(steps: Steps, loader: DataLoader[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    is_unbatched = loader.batch_sampler is None
    for batch, record in steps:
        mask = torch.arange(record.samples, device="cpu") < record.real_samples  # whatever is the default
        if not is_unbatched and (rows := max(_rows_in(batch, record.samples), default=record.samples)) < record.samples:
            raise UnsupportedLoaderError(
                f"{_MASKING} cannot know which rows are padding: a batch of {record.samples} samples came with {rows} "
                "rows, so collate_fn leaves some out. Let it keep a row for each sample, or leave these samples out of "
                "the dataset."
            )
        yield batch, mask[0] if is_unbatched else mask


def _rows_in(batch: Any, samples: int) -> Iterator[int]:
    """Yield how many rows the tensors and arrays of a batch have; of a list with one element per sample, as many."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        yield from batch.shape[:1]
    elif isinstance(batch, list | tuple) and len(batch) == samples:
        yield samples
    elif isinstance(batch, list | tuple | Mapping):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _rows_in(part, samples)


WeightOf: TypeAlias = Callable[[Any], "torch.Tensor | Sequence[float] | float"]
Weighed: TypeAlias = Iterator[tuple[Any, torch.Tensor]]

_WEIGHING = "iter_with_weights"


def iter_with_weights(
    loader: DataLoader[Any], *, weight_of: WeightOf | None = None, dtype: torch.dtype | None = None
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each batch of a pass with a weight per sample, so that all ranks train what one process trains.

    Let ``loss = (loss_per_sample * weights).sum()``. ``DistributedDataParallel`` averages the ranks' gradients, and the
    average is then the gradient of the mean loss over the step's real samples: those that all ranks got, without
    padding. A real sample weighs ``ranks / real samples of the step``, padding weighs 0.

    The ranks know how many samples a step has without communicating. They communicate once a step, a number each,
    where ``weight_of`` is given, and where one rank cannot know: whole batches of a batch sampler under a
    leader, and parts of an iterable dataset, one for each worker, with ``uneven="keep"``.

    Args:
        loader: A loader from ``patch_dataloader_to_ddp``, or an unpatched one in a single process, where a sample
            weighs ``1 / samples of the batch``.
        weight_of: Returns how much each sample of a batch counts, at least 0: for a loss that is summed over tokens,
            each sample's number of tokens. A real sample then weighs ``ranks / sum of these over the step``, so
            ``loss_per_sample`` must be a sum over its tokens, not their mean.
        dtype: The weights' dtype. Default: ``torch.get_default_dtype()``.

    Yields:
        The batch, and its weights, of shape [samples], or of shape [] with ``batch_size=None``. They are on the CPU:
        on a GPU, multiply by ``weights.to(losses.device)``.

    Raises:
        NotPatchedError: The loader was not patched, and there are several ranks.
        UnsupportedLoaderError: It is unknown which samples a batch holds.
        InvalidOptionError: ``weight_of`` is no function, or gives something else than a number of at least 0 for each
            sample; or ``dtype`` holds no fractions.
        WorldError: The ranks must communicate, and the world was given by ``rank=`` and ``num_replicas=``.
        RankMismatchError: Where ranks communicate, another one broke off.
        MissingRanksError: Where ranks communicate, another one did not come to the step in time.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = DataLoader(range(7), batch_size=4)
        >>> for rank in range(2):
        ...     patched = patch_dataloader_to_ddp(loader, share="within_batches", rank=rank, num_replicas=2)
        ...     print([(batch.tolist(), weights.tolist()) for batch, weights in iter_with_weights(patched)])
        [([0, 2], [0.5, 0.5]), ([4, 6], [0.6666666865348816, 0.6666666865348816])]
        [([1, 3], [0.5, 0.5]), ([5, 4], [0.6666666865348816, 0.0])]

    Source:
        The gradient of a mean is the weighted mean of the parts' gradients; DistributedDataParallel weighs each rank
        ``1 / ranks``, as ``torch.nn.parallel.DistributedDataParallel`` documents.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidOptionError(
            f"dtype={dtype!r} cannot hold weights, which are fractions. Pass a floating-point dtype such as "
            "torch.float32, or leave it out."
        )
    if not (weight_of is None or callable(weight_of)):
        raise InvalidOptionError(
            f"weight_of={weight_of!r} is no function. Pass one that takes a batch and returns a number per sample."
        )
    if is_alone(_WEIGHING, loader):
        sum_of = None if weight_of is None else float
        weighed = _weighed(steps_alone(_WEIGHING, loader), 1, dtype, weight_of, sum_of)
    else:
        batches = require_one_stream(_WEIGHING, loader)
        weighed = closed_at_exit(_shared(steps_of(_WEIGHING, loader, batches), batches, dtype, weight_of))
    if loader.batch_sampler is not None:
        return weighed
    return ((item, weights.reshape(())) for item, weights in weighed)


def _shared(steps: Steps, batches: Batches, dtype: torch.dtype, weight_of: WeightOf | None) -> Generator[Any]:
    """Yield the batches of a patched loader, with their weights."""
    passes, world = batches.passes, batches.passes.agreed.world
    ranks = world.num_replicas
    with closing(steps):  # type: ignore[type-var]  # a generator, which has a close()
        # What a rank can know is known once its pass has begun.
        first = [step for step in [next(steps, None)] if step is not None]
        current, all_steps = passes.latest, chain(first, steps)
        if weight_of is None and (current is None or current.schedule(batches).knows_totals):
            yield from _weighed(all_steps, ranks, dtype, None, None)
            return
        if ranks == 1:
            yield from _weighed(all_steps, ranks, dtype, weight_of, float)
            return
        members, agreed, facts = world.peer_ranks(_WEIGHING), passes.agreed, {"epoch": passes.epochs.current}
        with opened_sums(members, "Weighing samples", agreed.number, facts, agreed.options.timeout) as sums:
            yield from _weighed(all_steps, ranks, dtype, weight_of, sums.sum_over_ranks)


def _weighed(
    steps: Steps,
    ranks: int,
    dtype: torch.dtype,
    weight_of: WeightOf | None,
    sum_of: Callable[[float], float] | None,
) -> Weighed:
    """Yield batches with their weights.

    Args:
        steps: The batches.
        ranks: How many ranks there are.
        dtype: The weights'.
        weight_of: What the samples of a batch count; None where each counts 1.
        sum_of: Sums over the ranks how much a step's samples count; None where the records tell.
    """
    for batch, record in steps:
        own = record.real_samples if weight_of is None else _counts(batch, record, weight_of)
        total = record.samples_of_all if sum_of is None else sum_of(own)
        weights = torch.full((record.samples,), ranks / total if total else 0.0, dtype=dtype, device="cpu")
        weights[record.real_samples :] = 0
        yield batch, weights


def _counts(batch: Any, record: BatchRecord, weight_of: WeightOf) -> float:
    """Return how much the samples of a batch count that are not padding."""
    given = weight_of(batch)
    try:
        each = torch.as_tensor(given, dtype=torch.float64, device="cpu").reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidOptionError(
            f"weight_of returned a {type(given).__name__} that holds no numbers ({error}). Return a tensor or a list "
            "with a number per sample."
        ) from error
    if len(each) != record.samples:
        raise InvalidOptionError(
            f"weight_of returned {len(each)} numbers for a batch of {record.samples} samples. Return one per sample, "
            "in order, padding included."
        )
    real = each[: record.real_samples]
    if not bool(((real >= 0) & (real < math.inf)).all()):
        raise InvalidOptionError(
            f"weight_of returned {real[~((real >= 0) & (real < math.inf))][0].item()} for a sample. Return finite "
            "numbers of at least 0."
        )
    return real.sum().item()
