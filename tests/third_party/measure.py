"""What happens to a loader of another package when it is patched: measured in one process, or on real ranks."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from typing import Any

import torch.distributed as dist
from zoo import seed_ambient

from ddp_patch import check_loaders_is_patched, patch_dataloader_to_ddp
from ddp_patch.errors import NotALoaderError, RankMismatchError, UnsupportedLoaderError
from third_party.base import Batch, Case, Fate, World

__all__ = ["EPOCHS", "Seen", "cases_of", "one_process", "seen_on_rank", "world_by_hand"]

EPOCHS = 2
SEED = 100
TOO_MANY = 100  # batches: no case has as many in an epoch, so a loader that gives them repeats itself for ever


@dataclass
class Seen:
    """What one rank saw of a loader.

    Attributes:
        fate: What patching did; None where it failed otherwise.
        message: What a refusal, or another error, said.
        epochs: The batches of each epoch.
        length: ``len()`` of the loader, or the name of the error that it raises.
        counted: Whether the guard takes it for sharded.
    """

    fate: Fate | None = None
    message: str = ""
    epochs: list[list[Batch]] = field(default_factory=list)
    length: int | str = 0
    counted: bool = False


def cases_of(module: str) -> list[Case]:
    """Return the cases of a package."""
    with quiet():
        found: list[Case] = import_module(f"third_party.cases.{module}").CASES
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Let packages deprecate what they like: nothing is learnt from it here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def one_process(case: Case, seed: int = SEED, patched: bool = False) -> Seen:
    """Use the loader in one process: as it is, or patched for a world of one, whose order follows from the seed."""
    with quiet():
        seed_ambient(seed)
        if patched:
            return used_patched(case, World(), {"rank": 0, "num_replicas": 1, "seed": 0}, Seen())
        return used(case, case.make(World()), Seen(), case.steps)


def world_by_hand(case: Case, size: int) -> list[Seen]:
    """Patch the loader for each rank of a world that is given by hand, in this process."""
    return [_seen(case, World(rank, size), {"rank": rank, "num_replicas": size}) for rank in range(size)]


def seen_on_rank(rank: int, world_size: int, module: str) -> dict[str, Seen]:
    """On a real rank, patch each loader of a package that asks the process group for the world."""
    cases = [case for case in cases_of(module) if case.on_ranks]
    return {case.name: _seen(case, World(rank, world_size), {"timeout": 60.0}) for case in cases}


def _seen(case: Case, world: World, options: dict[str, Any]) -> Seen:
    """Make the loader as this rank would, seeded like no other, patch it and use it."""
    seen = Seen()
    with quiet():
        seed_ambient(SEED + world.rank)
        try:
            return used_patched(case, world, {**options, "seed": 0}, seen)
        except Exception as error:  # noqa: BLE001 - whatever is raised is what happened
            seen.fate, seen.message = None, f"{type(error).__name__}: {error}"
            return seen


def used_patched(case: Case, world: World, options: dict[str, Any], seen: Seen) -> Seen:
    """Patch and use the loader; where that is refused, at the patch or in a pass, do what the refusal says."""
    loader, steps = case.make(world), None if case.steps is None else case.steps // world.size
    try:
        patched = patch_dataloader_to_ddp(loader, **options)
        # What is sharded already may come back as a copy, whose passes are compared.
        is_same = patched.sampler is loader.sampler and patched.dataset is loader.dataset
        seen.fate = Fate.AS_IT_IS if is_same else Fate.SHARED
        used(case, patched, seen, steps)
    except (NotALoaderError, RankMismatchError, UnsupportedLoaderError) as error:
        if case.remedy is None:
            raise
        seen.message = str(error)
    messages = [seen.message]
    if dist.is_initialized() and case.remedy is not None:  # a rank may have come to its end before another is told
        messages *= dist.get_world_size()
        dist.all_gather_object(messages, seen.message)
    if case.remedy is not None and any(messages):
        seen.fate, seen.message, seen.epochs = Fate.REFUSED, max(messages), []
        used(case, case.remedy(loader, options), seen, steps)
    return seen


def used(case: Case, loader: Any, seen: Seen, steps: int | None) -> Seen:
    """Go through two epochs, and tell each to what takes it, as a training loop does."""
    for epoch in range(EPOCHS):
        _set_epoch(loader, epoch)
        seen.epochs.append([case.items(batch) for batch in islice(loader, steps or TOO_MANY)])
    seen.length = _length(loader)
    seen.counted = _is_counted(loader)
    return seen


def _set_epoch(loader: Any, epoch: int) -> None:
    holders = [loader, *(getattr(loader, name, None) for name in ("batch_sampler", "sampler", "dataset"))]
    for holder in holders:
        if hasattr(holder, "set_epoch"):
            holder.set_epoch(epoch)
            return


def _is_counted(loader: Any) -> bool:
    # The guard refuses webdataset's, PyTorch Geometric's and Lightning's loaders around others.
    inner = loader.pipeline[0] if hasattr(loader, "pipeline") else getattr(loader, "loader", loader)
    inner = getattr(inner, "iterables", inner)
    try:
        return check_loaders_is_patched([inner])
    except NotALoaderError:
        return False


def _length(loader: Any) -> int | str:
    try:
        return len(loader)
    except Exception as error:  # noqa: BLE001 - it has no length, however it says so
        return type(error).__name__
