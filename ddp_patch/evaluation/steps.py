"""The batches of a pass, each with the number of samples of its step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch.utils.data import DataLoader

from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.loaders.facts import Level, look_at
from ddp_patch.loaders.moving import Mover
from ddp_patch.loaders.on_device import device_of, without_device
from ddp_patch.shares.batches import Batches
from ddp_patch.shares.epochs import EpochSampler
from ddp_patch.shares.passes import Pass
from ddp_patch.shares.step_samples import StepSamples

__all__ = ["Steps", "steps_alone", "steps_of"]

# A batch, and the samples of its step. Steps that are surely alike have one object.
Steps = Iterator[tuple[Any, StepSamples]]


def steps_of(operation: str, loader: DataLoader[Any], batches: Batches) -> Steps:
    """Yield each batch of a pass over a patched loader.

    Raises:
        UnsupportedLoaderError: The loader would continue a pass that has begun.
    """
    sampler = batches.sampler
    if sampler.given is not None and sampler.given.is_within:
        raise UnsupportedLoaderError(
            f"{operation} was given a {type(loader).__name__} in the middle of epoch {sampler.epoch}, after "
            f"{sampler.given.batches} batches: it has one iterator for all epochs, and continues after a break. Call "
            f"set_epoch({sampler.epoch}) first, to start the epoch again."
        )
    sampler.keeps_sizes = batches.level is Level.BATCH
    until = 0
    try:
        for number, batch in enumerate(loader):
            if number == 0:
                one = cast("Pass[Any]", sampler.latest)
                _require_own_pass(operation, sampler, one)
            if number >= until:
                step = sampler.samples_of_step(one, batches, number)
                until = step.until
            yield batch, step
    finally:
        sampler.keeps_sizes = False


def _require_own_pass(operation: str, sampler: EpochSampler[Any], one: Pass[Any]) -> None:
    if sampler.left_out(one):
        raise UnsupportedLoaderError(
            f"{operation} cannot know which samples a batch holds: the loader's own load_state_dict() resumed within "
            f"epoch {one.epoch}, so its first batches were counted elsewhere. Take the state with loader_state(), and "
            "resume with restore_loader()."
        )


def steps_alone(operation: str, loader: DataLoader[Any]) -> Steps:
    """Yield each batch of an unpatched loader in a single process, where nothing is padding."""
    if loader.batch_sampler is None:
        for item in loader:
            yield item, StepSamples(1, 1, 1, 0)
        return
    facts = look_at(loader)
    if facts.repeater is not None or facts.iterator_in is not None:
        raise UnsupportedLoaderError(
            f"{operation} counts samples in a copy of a loader that is not patched, and an iterator runs in this "
            f"{type(loader).__name__}, which a copy does not have. Patch it, in a single process with rank=0, "
            "num_replicas=1."
        )
    # Count samples before they are collated: a collated batch may have any type.
    step, device = StepSamples(0, 0, 0, 0), device_of(loader)
    mover = None if device is None else Mover(device)
    for samples, batch in without_device(loader, collate_fn=_Counted(loader.collate_fn)):
        if samples != step.items:
            step = StepSamples(samples, samples, samples, 0)
        yield batch if mover is None else mover.moved(batch), step


@dataclass(frozen=True, slots=True)
class _Counted:
    """A ``collate_fn`` that returns the number of samples, then what the user's ``collate_fn`` returns."""

    collate_fn: Callable[[Any], Any]

    def __call__(self, samples: Any) -> tuple[int, Any]:
        return len(samples), self.collate_fn(samples)
