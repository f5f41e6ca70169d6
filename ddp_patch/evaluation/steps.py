"""The steps of a loop: masks of padding, and weights from all ranks' numbers of samples."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.errors import InvalidOptionError, UnsupportedLoaderError
from ddp_patch.loaders.copying import copy_loader
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit, look_at
from ddp_patch.loaders.recognition import require_loader, sharded_by
from ddp_patch.positions_and_padding import BatchRecord
from ddp_patch.ranks.group import Channel, closed_at_exit, opened
from ddp_patch.sharding.loader_passes import batches_into_pass
from ddp_patch.sharding.passes import Pass
from ddp_patch.sharding.patched_loaders import passes_of, patched_facts
from ddp_patch.validation import counted
from ddp_patch.walks import elements


def shared_facts(operation: str, loader: DataLoader[Any]) -> LoaderFacts[Any] | None:
    """Return the facts of a patched loader; None for an unpatched loader in a single process.

    Raises:
        NotPatchedError: There are several processes, and the loader is not patched.
        UnsupportedLoaderError: The ranks do not share one stream.
    """
    require_loader(operation, loader)
    if sharded_by(loader) is None and (not dist.is_initialized() or dist.get_world_size() == 1):
        return None
    facts = patched_facts(operation, loader)
    if passes_of(facts).agreed.options.by_worker and facts.unit is ShardedUnit.ITERABLE:
        raise UnsupportedLoaderError(
            f"{operation} was given a loader with share='by_worker': its dataset decides what each worker "
            "reads, so there is no common order and no padding. Leave share out."
        )
    return facts


# Each batch with its record.
Steps = Iterator[tuple[Any, BatchRecord]]


def steps_of(operation: str, facts: LoaderFacts[Any], iterator: Iterator[Any] | None = None) -> Steps:
    """Yield each batch of a pass over a patched loader.

    Args:
        operation: What the user called, for errors.
        facts: The loader.
        iterator: The loader's iterator of the pass; None to make one.

    Raises:
        UnsupportedLoaderError: The loader would continue a pass that has begun.
    """
    passes, loader = passes_of(facts), facts.loader
    epoch = passes.epochs.counter.current
    if given := batches_into_pass(passes):
        raise UnsupportedLoaderError(
            f"{operation} was given a {type(loader).__name__} in the middle of epoch {epoch}, after "
            f"{counted(given, 'batch')}: it has one iterator for all epochs, and continues after a "
            f"break. Call set_epoch({epoch}) first, to start the epoch again."
        )
    with passes.keeping_sizes() if facts.unit is ShardedUnit.BATCH else nullcontext():
        for number, batch in enumerate(loader if iterator is None else iterator):
            if number == 0:
                current = cast("Pass[Any]", passes.epochs.latest)
            yield batch, current.schedule(facts.batching).record(number)


def _steps_alone(operation: str, loader: DataLoader[Any]) -> Steps:
    """Yield each batch of an unpatched loader in a single process, where nothing is padding."""
    facts = look_at(loader)
    if facts.repeater is not None or facts.iterator_in is not None:
        kept, remedy = "", "Patch it, in a single process with rank=0, num_replicas=1."
        if facts.repeater is None:  # patching would refuse this loader, too
            kept = f" (attribute {facts.iterator_in!r})"
            remedy = (
                f"Call it before you iterate the loader, or forget the iterator: loader.{facts.iterator_in} = None."
            )
        raise UnsupportedLoaderError(
            f"{operation} counts samples in a copy of a loader that is not patched, and an iterator runs in this "
            f"{type(loader).__name__}{kept}, which a copy does not have. {remedy}"
        )
    if loader.batch_sampler is None:
        counted: Iterable[tuple[int, Any]] = ((1, item) for item in loader)
    else:  # count samples before they are collated: a collated batch may have any type
        counted = cast(Any, copy_loader(loader, collate_fn=partial(_counted, loader.collate_fn)))
    for samples, batch in counted:
        yield batch, BatchRecord(0, 0, samples, samples, samples, samples, samples)


def _counted(collate_fn: Callable[[Any], Any], samples: Any) -> tuple[int, Any]:
    """Return the number of samples, and the batch that the user's ``collate_fn`` makes of them."""
    return len(samples), collate_fn(samples)


def _steps(operation: str, loader: DataLoader[Any]) -> tuple[Steps, LoaderFacts[Any] | None]:
    """Return the batches of a pass, and the facts of a patched loader."""
    facts = shared_facts(operation, loader)
    return _steps_alone(operation, loader) if facts is None else steps_of(operation, facts), facts


def iter_with_mask(loader: DataLoader[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each batch of a pass with a mask that is False on padding.

    A rank's last batch may be all padding, and not every metric takes an empty update. So update a metric ``if
    mask.any()``, and let the ranks communicate after the loop.

    Args:
        loader: A loader from ``patch_dataloader_to_ddp``, or an unpatched loader in a single process, which has no
            padding.

    Yields:
        The batch and its mask, a bool tensor on the CPU, of shape [samples], or of shape [] with ``batch_size=None``.

    Raises:
        NotPatchedError: The loader was not patched, and there are several ranks.
        UnsupportedLoaderError: The samples of a batch are unknown, or a batch has fewer rows than samples.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(5), batch_size=2), rank=1, num_replicas=2)
        >>> for batch, mask in iter_with_mask(loader):
        ...     print(batch.tolist(), mask.tolist())
        [1, 3] [True, True]
        [0] [False]
    """
    steps, _ = _steps("iter_with_mask", loader)
    return (_masked(batch, record, loader) for batch, record in steps)


def _masked(batch: Any, record: BatchRecord, loader: DataLoader[Any]) -> tuple[Any, torch.Tensor]:
    samples = record.samples
    mask = torch.arange(samples, device="cpu") < record.real_samples  # whatever the default device is
    if loader.batch_sampler is None:
        return batch, mask[0]
    if (rows := max(_rows_in(batch, samples), default=samples)) < samples:
        raise UnsupportedLoaderError(
            f"iter_with_mask cannot know which rows are padding: a batch of {counted(samples, 'sample')} came with "
            f"{counted(rows, 'row')}, so collate_fn leaves some out. Let it keep a row for each sample, or leave these "
            "out of the dataset."
        )
    return batch, mask


def _rows_in(batch: Any, samples: int) -> Iterator[int]:
    """Yield how many rows each tensor or array of a batch has, or each list with one element per sample."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        yield from batch.shape[:1]
    elif isinstance(batch, list | tuple) and len(batch) == samples:
        yield samples
    else:
        for part in elements(batch):
            yield from _rows_in(part, samples)


WeightOf: TypeAlias = Callable[[Any], "torch.Tensor | Sequence[float] | float"]


def iter_with_weights(
    loader: DataLoader[Any], *, weight_of: WeightOf | None = None, dtype: torch.dtype | None = None
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each batch of a pass with a weight per sample, so that all ranks train what one process trains.

    Let ``loss = (loss_per_sample * weights).sum()``. ``DistributedDataParallel`` averages the ranks' gradients, and the
    average is then the gradient of the mean loss over the step's real samples, on all ranks and without padding. A real
    sample weighs ``ranks / real samples of the step``, padding weighs 0.

    The ranks know how many samples a step has without communicating. Each rank sends one number per step in two cases:
    with ``weight_of``, and with ``uneven="keep"`` if each worker reads a part of an iterable dataset.

    Args:
        loader: A loader from ``patch_dataloader_to_ddp``, or an unpatched loader in a single process, where a sample
            weighs ``1 / samples of the batch``.
        weight_of: Returns how much each sample of a batch counts, at least 0: for a loss that is summed over tokens,
            each sample's number of tokens. A real sample then weighs ``ranks / sum of the step's counts``, so
            ``loss_per_sample`` must be the sum over the sample's tokens, not their mean.
        dtype: The weights' dtype. Default: ``torch.get_default_dtype()``.

    Yields:
        The batch, and its weights, of shape [samples], or of shape [] with ``batch_size=None``. The weights are on the
        CPU: on a GPU, multiply by ``weights.to(losses.device)``.

    Raises:
        NotPatchedError: The loader was not patched, and there are several ranks.
        UnsupportedLoaderError: The samples of a batch are unknown.
        InvalidOptionError: ``weight_of`` is no function, or does not return a number of at least 0 for each sample; or
            ``dtype`` holds no fractions.
        WorldError: The ranks must communicate, and the world is explicit, by ``rank=`` and ``num_replicas=``.
        RankMismatchError: The ranks communicate, and another rank left the loop.
        MissingRanksError: The ranks communicate, and another rank did not reach the step in time.

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
    steps, facts = _steps("iter_with_weights", loader)
    weighed = closed_at_exit(_weighed(steps, facts, dtype, weight_of))
    if loader.batch_sampler is not None:
        return weighed
    return ((item, weights.reshape(())) for item, weights in weighed)


def _weighed(
    steps: Steps, facts: LoaderFacts[Any] | None, dtype: torch.dtype, weight_of: WeightOf | None
) -> Generator[tuple[Any, torch.Tensor]]:
    """Yield batches with their weights."""
    ranks = 1 if facts is None else passes_of(facts).agreed.world.num_replicas
    channel: Channel | None = None  # None if ranks do not communicate
    with closing(cast("Generator[Any]", steps)), ExitStack() as stack:
        # The pass must have begun before its facts are known.
        first = [step for step in [next(steps, None)] if step is not None]
        if facts is not None and ranks > 1 and (weight_of is not None or not _knows_totals(facts)):
            agreed, epoch = passes_of(facts).agreed, {"epoch": passes_of(facts).epochs.counter.current}
            members = agreed.world.peer_ranks("iter_with_weights")
            carried = f"weights of number {agreed.number}"
            channel = stack.enter_context(opened(members, "Weighing samples", carried, epoch, agreed.options.timeout))
        for batch, record in chain(first, steps):
            own = record.real_samples if weight_of is None else _counts(batch, record, weight_of)
            total = own if ranks == 1 else record.samples_of_all
            if channel is not None:
                total = sum(count for count, _ in channel.gathered([own, 1]))
                channel.batches_delivered += 1
            weights = torch.full((record.samples,), ranks / total if total else 0.0, dtype=dtype, device="cpu")
            weights[record.real_samples :] = 0
            yield batch, weights
        while channel is not None and any(is_step for _, is_step in channel.gathered([0, 0])):
            pass  # other ranks have more steps


def _knows_totals(facts: LoaderFacts[Any]) -> bool:
    """Return whether this rank knows, without communicating, how many samples each step of its latest pass has."""
    current = passes_of(facts).epochs.latest
    return current is None or current.schedule(facts.batching).knows_totals


def _counts(batch: Any, record: BatchRecord, weight_of: WeightOf) -> float:
    """Return the sum of ``weight_of`` over the samples of a batch that are not padding."""
    given = weight_of(batch)
    try:
        each = torch.as_tensor(given, dtype=torch.float64, device="cpu").reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _wrong_counts(f"a {type(given).__name__} that holds no numbers ({error})") from error
    if len(each) != record.samples:
        raise _wrong_counts(f"{counted(len(each), 'number')} for a batch of {counted(record.samples, 'sample')}")
    real = each[: record.real_samples]
    if len(wrong := real[~((real >= 0) & (real < math.inf))]):
        raise _wrong_counts(f"{wrong[0].item()} for a sample")
    return real.sum().item()


def _wrong_counts(what: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"weight_of returned {what}. Return a tensor or a list with a finite number of at least 0 per sample, in "
        "order, padding included."
    )
