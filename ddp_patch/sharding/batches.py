"""What a patched loader's batches are: how many, which were given, and how a line of text says so."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ddp_patch.compat.private_torch import has_own_iteration
from ddp_patch.errors import DDPPatchError, NotPatchedError, StateError, UnsupportedLoaderError
from ddp_patch.loaders.facts import Level, look_at
from ddp_patch.loaders.hooks import about_to_use
from ddp_patch.loaders.recognition import require_loader, sharded_by
from ddp_patch.loaders.samples import length_of
from ddp_patch.options import Options
from ddp_patch.plan import Batching
from ddp_patch.sharding.epoch_sampler import EpochSampler
from ddp_patch.sharding.passes import Pass
from ddp_patch.sharding.position import NotedBatch

__all__ = ["Batches", "Tally", "batches_delivered", "describe_share", "patched_sampler", "require_batches"]


# They change no share, or another part of the text tells them.
_UNTOLD = {"share", "timeout", "cost"}


def describe_share(loader: DataLoader[Any]) -> str | None:
    """Return what a loader gives this rank, as ``repr(loader)`` says it; None if this package did not patch it.

    Shards are counted from 0, as ranks are. Only options that are not the default are named.

    Examples:
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = DataLoader(range(100), batch_size=8)
        >>> describe_share(patch_dataloader_to_ddp(loader, rank=1, num_replicas=4))
        'shard 1 of 4, samples, 4 steps of 8'
        >>> patch_dataloader_to_ddp(loader, rank=1, num_replicas=4, uneven="drop")
        <torch.utils.data.dataloader.DataLoader: shard 1 of 4, samples, 4 steps of 8, uneven='drop'>
    """
    # No more than a look: repr() may come at any moment, of loaders that are not ours or not yet made.
    sampler = vars(loader).get("sampler")
    if not isinstance(sampler, EpochSampler):
        return None
    options, size = sampler.agreed.options, loader.batch_size
    shard = f"shard {sampler.rank} of {sampler.num_replicas}"
    if options.divides_batches:
        parts = [f"a part of each batch{f' of {size}' if size else ''}", _steps(loader)]
    else:
        parts = [_unit(loader, sampler), _steps(loader) + (f" of {size}" if size else "")]
    if options.by_worker and isinstance(loader.dataset, IterableDataset):
        parts.append("share='by_worker'")
    return ", ".join([shard, *parts, *_chosen(options)])


def _unit(loader: DataLoader[Any], sampler: EpochSampler[Any]) -> str:
    """Return what is sharded."""
    if loader.batch_sampler is sampler:
        return "whole batches"
    unit = "samples" if loader.batch_size else "items"
    return f"{unit} of a stream" if isinstance(loader.dataset, IterableDataset) else unit


def _steps(loader: DataLoader[Any]) -> str:
    steps = length_of(loader, ())
    return "steps" if steps is None else f"{steps:,} step{'' if steps == 1 else 's'}"


def _chosen(options: Options) -> Iterator[str]:
    """Yield the options that are not the default."""
    if options.costs is not None:
        yield "steps of equal cost"
    default = Options(order="seeded")  # which "auto" mostly comes to
    for name in (field.name for field in fields(options) if field.name not in _UNTOLD):
        if (value := getattr(options, name)) != getattr(default, name):
            yield f"{name}={_shown(value)!r}"


def _shown(value: object) -> object:
    return str(value) if isinstance(value, torch.device) else value


class Tally:
    """Counts the batches that one iterator of a loader gives, in the pass that it makes.

    The count stays on the pass when the iterator is gone, as it is after a ``break``.

    Args:
        sampler: What shards the loader.
        begins_ahead: Whether a pass has begun before its first batch is asked for, as workers begin it; else the first
            batch begins it.
        counts: Whether the loop is given what the iterator gives. A loader with its own iteration may fetch ahead.
    """

    def __init__(self, sampler: EpochSampler[Any], *, begins_ahead: bool, counts: bool = True) -> None:
        self._sampler, self._begins_ahead, self._reaches_loop = sampler, begins_ahead, counts
        self._pass: Pass[Any] | None = None
        self.begin()

    def begin(self) -> None:
        """Record that a pass begins."""
        if self._pass is not None:
            self._pass.note_abandoned()
        self._has_failed = self._has_pass = False
        self._pass = None
        if self._begins_ahead:
            self._find_pass()

    def count(self, given: Any) -> Any:
        """Record that a batch is given, and return it alone. It is called for each, so it calls little itself."""
        if not self._has_pass:
            self._find_pass()
        note, batch = given if type(given) is NotedBatch else (None, given)
        if (current := self._pass) is None:
            return batch
        if self._has_failed:  # if the loader went on, some batch was skipped: nobody knows the position
            current.lose_count()
        current.deliver(note)
        if (latest := self._sampler.latest) is None:
            self._sampler.note_running(current)
        elif latest is not current:
            latest.note_interleaved()
        return batch

    def fail(self, error: BaseException) -> None:
        """Record that an error came instead of a batch; one of this package's leaves no doubt about what is lost."""
        self._find_pass()
        self._has_failed = True
        if self._pass is not None and isinstance(error, Exception) and not isinstance(error, DDPPatchError | Warning):
            self._pass.note_failed()

    def end(self) -> None:
        """Record that the loop has seen the end."""
        self._find_pass()
        if self._pass is not None and self._reaches_loop and not self._has_failed:
            self._pass.note_end_seen()

    def _find_pass(self) -> None:
        """Remember the pass, once: it is the latest one now, and another iterator may begin another."""
        if self._has_pass:
            return
        self._has_pass, self._pass = True, self._sampler.latest
        if self._pass is not None and self._reaches_loop:
            self._pass.note_loop(self)


@dataclass(frozen=True, slots=True)
class Batches(Batching):
    """How a loader makes batches of a rank's share.

    Attributes:
        sampler: The sampler that shards.
        level: Which part of the loader is sharded.
    """

    sampler: EpochSampler[Any]
    level: Level


def batches_delivered(loader: DataLoader[Any], sampler: EpochSampler[Any]) -> int:
    """Return how many batches of the latest pass a patched loader has given, as the ``Tally`` of its iterator counts.

    Raises:
        StateError: Nobody counted them.
    """
    current = sampler.running
    if current is None or not current.batches:
        return 0
    if current.batches_delivered is not None and (sampler.is_repeated or not has_own_iteration(type(loader))):
        return current.batches_delivered
    raise StateError(
        f"It is not known how many batches of epoch {sampler.epoch} the {type(loader).__name__} has given: "
        f"{_why_not_counted(loader)}. Pass how many the training loop has finished: batches_done=step + 1 inside "
        "enumerate(loader)."
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


def require_batches(operation: str, loader: DataLoader[Any]) -> Batches:
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
    if facts.level is not Level.ITERABLE and facts.stream.source is not sampler:
        raise UnsupportedLoaderError(
            f"{operation} was given a loader whose {type(loader.batch_sampler).__name__} makes batches of a sharded "
            "sampler in its own way, so nobody knows how many samples a batch took. Shard whole batches instead: pass "
            "the loader of the original samplers to patch_dataloader_to_ddp()."
        )
    sampler.batched(facts.batching)
    return Batches(facts.batching.size, facts.batching.drop_last, sampler, facts.level)
