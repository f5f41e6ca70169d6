"""Batches on the device: move them, by hand or ahead of the loop."""

import copy
from collections import UserString, deque
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, Final, TypeVar

import torch
from torch.utils.data import DataLoader

from ddp_patch.compat.private_torch import MAKE_ITERATOR, has_own_iteration, has_own_iterators, torchdata_batch_sampler
from ddp_patch.errors import InvalidOptionError, UnsupportedLoaderError
from ddp_patch.loaders.copying import copies_plainly, copy_loader
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit
from ddp_patch.options import Options

__all__ = [
    "ON_DEVICE",
    "Mover",
    "copies_ahead",
    "device_for",
    "device_of",
    "moved",
    "require_movable",
    "streams_of",
    "without_device",
]

L = TypeVar("L", bound=DataLoader[Any])


_TEXT = (str, bytes, bytearray, memoryview, UserString)


def streams_of(device: torch.device) -> Any:
    """Return what makes streams in which copies to a device run beside what it computes; None if it has none."""
    return torch.cuda if device.type == "cuda" else None


def moved(value: Any, move: Callable[[Any], Any]) -> Any:
    """Return a batch with ``move`` applied to all that has a ``.to()``, also in lists, dicts and the like.

    Examples:
        >>> moved({"x": (torch.zeros(2), "name")}, lambda tensor: tensor + 1)
        {'x': (tensor([1., 1.]), 'name')}
    """
    if callable(getattr(value, "to", None)):
        return move(value)
    return _each(value, partial(moved, move=move))


def _each(nest: Any, act: Callable[[Any], Any]) -> Any:
    """Return a container of the same kind with ``act`` applied to its elements; itself if that changes none."""
    if isinstance(nest, Mapping):
        held = dict(nest.items())
    elif isinstance(nest, Sequence) and not isinstance(nest, _TEXT):
        held = dict(enumerate(nest))
    else:
        return nest
    values = {key: act(value) for key, value in held.items()}
    if all(values[key] is value for key, value in held.items()):
        return nest
    try:
        return _rebuilt(nest, values)
    except Exception as error:
        raise UnsupportedLoaderError(
            f"device= does not work with a batch with a {type(nest).__name__}: making a copy with its tensors on the "
            f"device raised {type(error).__name__}: {error}. Give that class a .to(device), let the collate_fn return "
            "a dict, list or tuple, or leave device= out and call .to(device) in the loop."
        ) from error


def _rebuilt(nest: Any, values: dict[Any, Any]) -> Any:
    """Return a container of the same kind with other values, by their keys or indices."""
    kind = type(nest)
    if isinstance(nest, MutableMapping | MutableSequence):
        clone = copy.copy(nest)  # which may have more than its items
        for key, value in values.items():
            clone[key] = value
        return clone
    if isinstance(nest, Mapping):
        return kind(values)
    return kind(*values.values()) if hasattr(nest, "_fields") else kind(values.values())


class Mover:
    """Hands out on a device what one iterator gives.

    Args:
        device: Which one.
        copies_ahead: Whether to read the next batch, and begin to copy it, before one is given. Only a device with
            streams gains by it.
    """

    def __init__(self, device: torch.device, *, copies_ahead: bool = False) -> None:
        self._device, self._copies_ahead = device, copies_ahead
        self._held: deque[_Copied | Exception] = deque()

    def begin(self) -> None:
        """Forget what was read ahead: another pass begins."""
        self._held.clear()

    def moved(self, batch: Any) -> Any:
        """Return a batch on the device."""
        copies = self._copies
        if copies is None:
            return moved(batch, partial(_to, device=self._device))
        return copies.finished(copies.begun(batch))

    def next(self, read: Callable[[], Any]) -> Any:
        """Return the next batch on the device.

        If reading one ahead raises an error, or StopIteration, that is raised where its batch would have come.

        Args:
            read: Reads the iterator's next batch.
        """
        if not self._copies_ahead or (copies := self._copies) is None:
            return self.moved(read())
        # What is held stays so until it is returned: an interrupt loses no batch. After an error nothing is read ahead.
        while len(self._held) < 2 and not (self._held and isinstance(self._held[-1], Exception)):
            try:
                self._held.append(copies.begun(read()))
            except Exception as error:  # noqa: BLE001 - the user's code; raised where the batch would have come
                # Its traceback would hold the iterator, with its workers, as long as it is held.
                self._held.append(error.with_traceback(None))
        first = self._held.popleft()
        if not isinstance(first, Exception):
            return copies.finished(first)
        try:
            raise first
        finally:
            del first  # or it would hold its own traceback, and that the iterator with its workers

    @cached_property
    def _copies(self) -> "_Copies | None":
        # Made with the first batch: workers, which may be forked, have begun by then.
        streams = streams_of(self._device)
        return None if streams is None else _Copies(self._device, streams)

    def __reduce__(self) -> Any:
        return partial(Mover, copies_ahead=self._copies_ahead), (self._device,)


@dataclass
class _Copied:
    """A batch on its way to a device.

    Attributes:
        batch: The batch.
        copies: What of it was made in the stream of copies.
        has_rest: Whether it holds something that is still to be copied.
        event: Comes to pass when these copies are there.
    """

    batch: Any = None
    copies: list[Any] = field(default_factory=list)
    has_rest: bool = False
    event: Any = None


class _Copies:
    """Copies batches in a stream beside the one in which the training loop computes.

    The memory of a copy belongs to the stream in which it was made, which may use it again as soon as it is let go. So
    every copy is recorded in the loop's stream, too. What cannot be recorded is copied in the loop's stream.
    """

    def __init__(self, device: torch.device, streams: Any) -> None:
        index = streams.current_device() if device.index is None else device.index
        self._device, self._streams = torch.device(device.type, index), streams
        self._side = _side_stream(streams, self._device)

    def begun(self, batch: Any) -> _Copied:
        """Begin to copy a batch."""
        copied = _Copied()
        with self._streams.stream(self._side):
            copied.batch = moved(batch, partial(self._copy, copied))
        copied.event = self._side.record_event()
        return copied

    def finished(self, copied: _Copied) -> Any:
        """Return a batch for use in the stream that is the loop's now, which waits for this one alone."""
        current = self._streams.current_stream(self._device)
        current.wait_event(copied.event)
        for made in copied.copies:
            made.record_stream(current)
        return moved(copied.batch, self._to_device) if copied.has_rest else copied.batch

    def _copy(self, copied: _Copied, value: Any) -> Any:
        if not _is_recordable(value):
            copied.has_rest = True
            return self._copied_within(copied, value) if isinstance(value, MutableMapping) else value
        copy = self._to_device(value)
        if copy is not value or not isinstance(value, torch.Tensor):  # others may move what they hold
            copied.copies.append(copy)
        return copy

    def _copied_within(self, copied: _Copied, mapping: MutableMapping[Any, Any]) -> Any:
        """Begin to copy what a mapping with a ``.to()`` holds, as the batches of Hugging Face's tokenizers.

        One that cannot be rebuilt stays as it is, and comes to the device by its method.
        """
        try:
            rebuilt = _each(mapping, partial(moved, move=partial(self._copy, copied)))
        except UnsupportedLoaderError:
            return mapping
        return rebuilt if type(rebuilt) is type(mapping) else mapping

    def _to_device(self, value: Any) -> Any:
        try:
            return value.to(self._device, non_blocking=True)
        except TypeError:  # its method has no such argument
            return _to(value, self._device)


@cache
def _side_stream(streams: Any, device: torch.device) -> Any:
    """Return the stream of copies to a device: one for all loaders.

    Memory that is free is kept for the stream that has used it, so with new streams there would be ever more of it.
    """
    return streams.Stream(device)


def _is_recordable(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # Sparse, nested and quantized ones have parts that are not.
        return value.layout is torch.strided and not value.is_nested and not value.is_quantized
    return hasattr(value, "record_stream")


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device)


# The attribute of a loader whose batches come on a device.
ON_DEVICE: Final = "_ddp_patch_device"


def device_of(loader: DataLoader[Any]) -> torch.device | None:
    """Return the device on which a loader's batches come by ``device=``; None if they come as they are."""
    found: torch.device | None = getattr(loader, ON_DEVICE, None)
    return found


def device_for(facts: LoaderFacts[Any], options: Options) -> torch.device | None:
    """Return the device on which a patched loader's batches come: the one asked for, or else where they come already.

    Args:
        facts: The loader that is to be patched.
        options: What the user chose, with "auto" resolved.
    """
    return options.device if isinstance(options.device, torch.device) else device_of(facts.loader)


def without_device(loader: L, **replaced: Any) -> L:
    """Return a copy of a loader with other attributes, whose batches come as its class makes them."""
    plain = copy_loader(loader, **replaced)
    if vars(plain).pop(ON_DEVICE, None) is not None:
        vars(plain).pop(MAKE_ITERATOR, None)
    return plain


def copies_ahead(facts: LoaderFacts[Any], options: Options) -> bool:
    """Return whether a batch is copied to the device while the training loop works on the one before.

    The random numbers of the main process stay those that they are without a device. So it takes workers, which make
    the batch elsewhere. It takes torch's own iterators, because others count what is taken from them. And where ranks
    hand each other batches, one that copies ahead could wait for one that does not.
    """
    device, kind = device_for(facts, options), type(facts.loader)
    return (
        device is not None
        and streams_of(device) is not None
        and facts.num_workers > 0
        and facts.repeater is None
        and not has_own_iterators(kind)
        and torchdata_batch_sampler(kind) is None
        and not (facts.unit is ShardedUnit.ITERABLE and options.by_worker)
    )


def require_movable(facts: LoaderFacts[Any], device: torch.device) -> None:
    """Refuse a loader whose batches cannot be put on a device before its user gets them.

    Raises:
        InvalidOptionError: Its class iterates or copies in its own way, or is not torch's.
    """
    kind = type(facts.loader)
    # accelerate's wrappers pass isinstance() without being DataLoaders.
    is_torchs = issubclass(kind, DataLoader) and not has_own_iteration(kind)
    if not is_torchs and (facts.repeater is None or facts.sharded_by is not None):
        raise InvalidOptionError(
            f"device='{device}' does not work with a {kind.__name__}: it iterates in its own way, so batches cannot "
            "be moved before they come to the loop. Leave device= out, and call .to(device) there."
        )
    if not copies_plainly(kind):
        raise InvalidOptionError(
            f"device='{device}' does not work with a {kind.__name__}: it is copied in its own way, so a copy would "
            "iterate the original loader. Leave device= out, and call .to(device) in the loop."
        )
