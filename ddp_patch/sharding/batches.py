"""What a patched loader's batches are: how many, which were given, and how they leave workers."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ddp_patch.compat.private_torch import has_own_iteration
from ddp_patch.errors import NotPatchedError, StateError, UnsupportedLoaderError
from ddp_patch.loaders.facts import ShardedUnit, look_at
from ddp_patch.loaders.hooks import about_to_use
from ddp_patch.loaders.recognition import require_loader, sharded_by
from ddp_patch.loaders.samples import steps_of
from ddp_patch.options import Options
from ddp_patch.plan import Batching
from ddp_patch.ranks.packing import bytes_of
from ddp_patch.sharding.epochs import Passes
from ddp_patch.sharding.sampler import EpochSampler
from ddp_patch.sharding.saved_position import NotedBatch
from ddp_patch.walks import SCALARS, elements, plain_tensors

__all__ = [
    "Batches",
    "CollateByValue",
    "batches_delivered",
    "batches_of",
    "describe_share",
    "patched_sampler",
    "with_notes",
]


# They change no share, or another part of the text tells them.
_UNTOLD = {"share", "timeout", "cost"}


def describe_share(loader: DataLoader[Any]) -> str | None:
    """Return what a loader gives this rank, as the log says it; None if this package did not patch it.

    Shards are counted from 0, as ranks are. Only options that are not the default are named.

    Examples:
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = DataLoader(range(100), batch_size=8)
        >>> describe_share(patch_dataloader_to_ddp(loader, rank=1, num_replicas=4))
        'shard 1 of 4, samples, 4 steps of 8'
        >>> describe_share(patch_dataloader_to_ddp(loader, rank=1, num_replicas=4, uneven="drop"))
        "shard 1 of 4, samples, 4 steps of 8, uneven='drop'"
    """
    sampler = loader.sampler
    if not isinstance(sampler, EpochSampler):
        return None
    options, of_size = sampler.agreed.options, f" of {loader.batch_size}" if loader.batch_size else ""
    parts = [f"shard {sampler.rank} of {sampler.num_replicas}"]
    if options.divides_batches:
        parts.append(f"a part of each batch{of_size}")
        of_size = ""
    else:
        parts.append(_unit(loader, sampler))
    if (steps := steps_of(loader)) is not None:
        parts.append(f"{steps:,} step{'' if steps == 1 else 's'}{of_size}")
    else:
        parts += [*([f"steps{of_size}"] if of_size else []), "length unknown"]
    if options.by_worker and isinstance(loader.dataset, IterableDataset):
        parts.append("share='by_worker'")
    return ", ".join([*parts, *_chosen(options)])


def _unit(loader: DataLoader[Any], sampler: EpochSampler[Any]) -> str:
    """Return what is sharded."""
    if loader.batch_sampler is sampler:
        return "whole batches"
    unit = "samples" if loader.batch_size else "items"
    return f"{unit} of a stream" if isinstance(loader.dataset, IterableDataset) else unit


def _chosen(options: Options) -> Iterator[str]:
    """Yield the options that are not the default."""
    if options.costs is not None:
        yield "steps of equal cost"
    default = Options(order="seeded")  # which "auto" mostly comes to
    for name in (field.name for field in fields(options) if field.name not in _UNTOLD):
        if (value := getattr(options, name)) != getattr(default, name):
            yield f"{name}={value!r}"


# Small tensors leave a worker in the message itself, if a batch has at most so many bytes of them. torch would make a
# file in shared memory for each, and open it in the main process: several times the cost.
_SMALL_BYTES = 2**16


class CollateByValue:
    """A ``collate_fn`` whose batches leave a worker by value if they are small and plain.

    Args:
        collate_fn: Makes the batches.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn, self._process = collate_fn, os.getpid()

    def __call__(self, samples: Any) -> Any:
        """Return the batch of some samples, ready to be pickled if this is a worker's process."""
        made = self._collate_fn(samples)
        if os.getpid() == self._process:  # where nothing is sent
            return made
        if type(made) is NotedBatch:
            return made._replace(batch=_by_value(made.batch, samples))
        return _by_value(made, samples)


def with_notes(loader: DataLoader[Any]) -> Callable[[Any], Any]:
    """Return the loader's ``collate_fn``; with its batches travels what workers note, where these read a stream."""
    noted: Callable[[Any], Any] | None = getattr(loader.dataset, "collate_with_notes", None)
    return loader.collate_fn if noted is None else noted(loader.collate_fn)


def _by_value(batch: Any, samples: Any) -> Any:
    """Return a batch whose tensors are pickled by value if they are small and plain; or as it is."""
    tensors = plain_tensors(batch)
    if not tensors:
        return batch
    try:
        sizes = [tensor.nbytes for tensor in tensors.values()]
        memories = {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.nbytes}
        is_small = sum(sizes) <= _SMALL_BYTES and all(map(_is_simple, tensors.values()))
        if not is_small or len(memories) < sum(map(bool, sizes)):  # views of the same memory stay that
            return batch
        new = {key: _TensorByValue(tensor) for key, tensor in tensors.items()}
    except RuntimeError:  # a tensor of a rare kind
        return batch
    are_shared = any(tensor.untyped_storage().is_shared() for tensor in tensors.values())  # by torch's collate_fn
    is_datasets = are_shared and (plain_tensors(samples) or {}).keys() & tensors.keys()
    return batch if is_datasets else _replaced(batch, new)  # the dataset may want that others see what it writes


def _is_simple(tensor: torch.Tensor) -> bool:
    """Return whether nothing but its values, its type and its shape makes a tensor."""
    is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    is_default = tensor.stride() == torch.empty(tensor.shape, device="meta").stride()
    return is_dense and is_default and not (tensor.requires_grad or tensor.is_quantized)


def _replaced(value: Any, new: Mapping[int, Any]) -> Any:
    """Return plain containers with other tensors in them."""
    if id(value) in new:
        return new[id(value)]
    if SCALARS.issuperset(map(type, elements(value))):
        return value
    if isinstance(value, dict):
        return {key: _replaced(each, new) for key, each in value.items()}
    return type(value)(_replaced(each, new) for each in value)


class _TensorByValue:
    """Is pickled as a tensor of its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._parts = bytes_of(tensor).numpy().tobytes(), tensor.dtype, tuple(tensor.shape)

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        return _tensor, self._parts


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()  # where torch puts tensors
    return values.view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class Batches(Batching):
    """How a loader makes batches of a rank's share.

    Attributes:
        passes: The passes over the loader.
        unit: Which part of the loader is sharded.
    """

    passes: Passes[Any]
    unit: ShardedUnit


def batches_delivered(loader: DataLoader[Any], batches: Batches) -> int:
    """Return how many batches of the latest pass a patched loader has given, as its ``CountedIterator`` counts.

    Raises:
        StateError: Nobody counted them.
    """
    passes, current = batches.passes, batches.passes.current
    if current is None or not current.batches(batches):
        return 0
    if current.batches_delivered is not None and not has_own_iteration(type(loader)):
        return current.batches_delivered
    raise StateError(
        f"It is not known how many batches of epoch {passes.epochs.current} the {type(loader).__name__} has given: "
        f"{_why_not_counted(loader)}. Pass how many the training loop has finished: batches_done=step + 1 "
        "inside enumerate(loader)."
    )


def _why_not_counted(loader: DataLoader[Any]) -> str:
    if has_own_iteration(type(loader)):
        return "its class has its own __iter__, which may fetch batches ahead"
    if hasattr(type(loader), "state_dict"):
        return "its class has a state_dict() of its own, which holds its position"
    return (
        "the pass was made by another loader over the same sampler, or by an iterator that is not torch's, or it went "
        "on after an error"
    )


def patched_sampler(operation: str, loader: object) -> EpochSampler[Any]:
    """Return the sampler that shards a loader; raise NotPatchedError if it is not this package's."""
    require_loader(operation, loader)
    about_to_use(loader)
    return _ours(operation, loader, sharded_by(loader))  # type: ignore[arg-type]  # require_loader checked it


def _ours(operation: str, loader: object, found: object) -> EpochSampler[Any]:
    if not isinstance(found, EpochSampler):
        raise NotPatchedError(
            f"{operation} was given a {type(loader).__name__} that was not patched, so nobody counts its batches. Pass "
            "what patch_dataloader_to_ddp() returned; in a single process without a process group, patch it with "
            "rank=0, num_replicas=1."
        )
    return found


def batches_of(operation: str, loader: DataLoader[Any]) -> Batches:
    """Return how a patched loader makes batches of its share; raise if it does not make them in order."""
    require_loader(operation, loader)
    about_to_use(loader)
    facts = look_at(loader)
    sampler = _ours(operation, loader, facts.sharded_by)
    if facts.num_workers > 0 and not getattr(loader, "in_order", True):
        raise UnsupportedLoaderError(
            f"{operation} was given a loader with in_order=False, which gives batches as its {facts.num_workers} "
            "workers finish them, so nobody knows which samples a batch has. Use in_order=True."
        )
    if facts.unit is not ShardedUnit.ITERABLE and facts.stream.source is not sampler:
        raise UnsupportedLoaderError(
            f"{operation} was given a loader whose {type(loader.batch_sampler).__name__} makes batches of a sharded "
            "sampler in its own way, so nobody knows how many samples a batch took. Shard whole batches instead: pass "
            "the loader of the original samplers to patch_dataloader_to_ddp()."
        )
    return Batches(facts.batching.size, facts.batching.drop_last, sampler.rank_passes, facts.unit)
