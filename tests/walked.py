"""Walk all public attributes of a loader's sampler or dataset, before the patch and after it."""

from collections.abc import Mapping
from types import MethodType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ddp_patch.compat.private_torch import is_torch_batch_sampler
from ddp_patch.sharding.wrapper_attributes import AttributeProxy

__all__ = ["OURS", "read", "set_elsewhere", "told_otherwise", "wrapped_part"]

OURS = frozenset(
    {
        # This rank's share, by the names of torch's DistributedSampler.
        *("drop_last", "num_replicas", "num_samples", "rank", "seed", "total_size"),
        # The epoch and position of the patched loader. Its set_epoch also tells what is wrapped.
        *("epoch", "load_state_dict", "set_epoch", "state_dict"),
        # Where whole batches are shared, loader.sampler is loader.batch_sampler, which has that one's.
        "batch_size",
    }
)
# A dataset's wrapper has a position and an epoch, and nothing of a sampler.
OF_DATASETS = frozenset({"load_state_dict", "set_epoch", "state_dict"})


def wrapped_part(loader: DataLoader[Any]) -> str:
    """Return which attribute of a loader is wrapped, among those that it draws from in one process."""
    if isinstance(loader.dataset, IterableDataset):
        return "dataset"
    batches = loader.batch_sampler
    return "sampler" if batches is None or is_torch_batch_sampler(type(batches)) else "batch_sampler"


def read(value: object) -> dict[str, Any]:
    """Return all public attributes, and the error in place of one that cannot be read."""
    names = [name for name in dir(value) if not name.startswith("_")]
    return {name: _read(value, name) for name in names}


def _read(value: object, name: str) -> Any:
    try:
        return getattr(value, name)
    except Exception as error:  # noqa: BLE001 - a property of another package
        return repr(error)


def told_otherwise(before: Mapping[str, Any], wrapper: Any) -> list[str]:
    """Return which attributes are others after the patch, but for those that are ours by design."""
    names = before.keys() - (OF_DATASETS if isinstance(wrapper, IterableDataset) else OURS)
    if not isinstance(wrapper, AttributeProxy):  # a copy of one that repeats another, of which this is the share
        names -= {"sampler"}
    return sorted(name for name in names if not _same(before[name], _read(wrapper, name)))


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, MethodType):
        return bool(getattr(now, "__wrapped__", now) == before)
    if before is now or type(before) is not type(now):
        return before is now
    equal = before == now
    return bool(equal.all() if hasattr(equal, "all") else equal)


def set_elsewhere(wrapped: Any, wrapper: Any) -> list[str]:
    """Set each plain attribute through the wrapper, and return those that did not reach what is wrapped."""
    # What ranks have agreed on can be read, and not be exchanged.
    ours = OF_DATASETS | {"dataset"} if isinstance(wrapper, IterableDataset) else OURS | {"sampler"}
    names = vars(wrapped).keys() - ours
    return sorted(name for name in names if not (name.startswith("_") or _reaches(wrapped, wrapper, name)))


def _reaches(wrapped: Any, wrapper: Any, name: str) -> bool:
    before, value = vars(wrapped)[name], object()
    setattr(wrapper, name, value)
    arrives = vars(wrapped)[name] is value and getattr(wrapper, name) is value and value not in vars(wrapper).values()
    setattr(wrapper, name, before)
    return arrives and vars(wrapped)[name] is before
