"""Let accelerate treat a patched loader like its own loaders, without sharding it again."""

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar, cast

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader

from ddp_patch.compat.private_packages import ACCELERATE_NON_BLOCKING, ACCELERATE_UNCUT, AccelerateLeavesAlone
from ddp_patch.evaluation.gather import gather_this_step
from ddp_patch.loaders.recognition import sharded_by
from ddp_patch.resume import loader_state, resume_loader
from ddp_patch.sharding.patched_loaders import patched_sampler
from ddp_patch.sharding.sampler import EpochSampler

__all__ = ["prepare_patched"]

T = TypeVar("T")


def prepare_patched(accelerator: Accelerator, loader: DataLoader[T]) -> DataLoader[T]:
    """Prepare a patched loader as ``accelerator.prepare`` prepares other loaders, without sharding it again.

    Batches are moved to the accelerator's device, and gradient accumulation notices the end of an epoch.
    ``accelerator.prepare`` itself does neither: it returns a patched loader unchanged.

    With ``DataLoaderConfiguration(use_stateful_dataloader=True)``, ``save_state`` and ``load_state`` also save and
    restore the position of the returned loader, on any number of processes. Inside a loop over it,
    ``accelerator.gather_for_metrics`` returns each sample once, as ``gather_step`` does.

    Args:
        accelerator: The accelerator, whose device and settings are used.
        loader: What ``patch_dataloader_to_ddp`` returned.

    Returns:
        A loader around ``loader``, which ``accelerator.prepare`` returns unchanged. For an unpatched loader in a single
        process, the loader that ``accelerator.prepare`` returns.

    Raises:
        NotPatchedError: There are several processes, and the loader is not patched.

    Examples:
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(10), batch_size=4), rank=1, num_replicas=2)
        >>> [batch.tolist() for batch in prepare_patched(Accelerator(cpu=True), loader)]
        [[1, 3, 5, 7], [9]]
    """
    if accelerator.num_processes > 1 or sharded_by(loader) is not None:
        loader = cast(Any, _Prepared(accelerator, loader, patched_sampler("prepare_patched", loader)))
        accelerator.gather_for_metrics = partial(_gathered, accelerator)
    prepared: DataLoader[T] = accelerator.prepare(loader)
    return prepared


def _gathered(accelerator: Accelerator, input_data: Any, use_gather_object: bool = False) -> Any:
    """Replace ``accelerator.gather_for_metrics``, which cannot know the padding of a patched loader."""
    loader = accelerator.gradient_state.active_dataloader
    if isinstance(loader, _Prepared):
        return loader.gathered(input_data)
    return type(accelerator).gather_for_metrics(accelerator, input_data, use_gather_object)


class _Prepared(AccelerateLeavesAlone, DataLoaderShard):  # type: ignore[misc] # types are checked without accelerate
    """An accelerate loader around a patched loader, which counts the epochs."""

    def __init__(self, accelerator: Accelerator, loader: DataLoader[Any], sampler: EpochSampler[Any]) -> None:
        self._sampler = sampler
        super().__init__(
            loader.dataset,
            device=accelerator.device if accelerator.device_placement else None,
            **ACCELERATE_UNCUT,
            **{ACCELERATE_NON_BLOCKING: accelerator.non_blocking},
        )
        self.base_dataloader = loader
        # Lets `save_state` call our state_dict. Not passed to __init__, which would make a loader of torchdata's.
        self.use_stateful_dataloader = accelerator.use_stateful_dataloader
        self._batches_done = 0

    def __iter__(self) -> Iterator[Any]:
        self._batches_done = 0
        for batch in super().__iter__():
            self._batches_done += 1
            yield batch

    def gathered(self, outputs: T) -> T:
        """Return all ranks' outputs of the loop's present step; accelerate has fetched the next batch already."""
        return gather_this_step(outputs, self.base_dataloader, self._batches_done - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the yielded batches, which are one fewer than accelerate has fetched."""
        return loader_state(self.base_dataloader, batches_done=self._batches_done)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass resume where a state was saved; ``len()`` stays a whole epoch's, as in accelerate."""
        resume_loader(self.base_dataloader, state_dict, counts_rest=False)
        self._batches_done = 0

    @property
    def iteration(self) -> int:
        """The epoch of the next pass; accelerate sets it in each pass."""
        return self._sampler.rank_passes.epochs.upcoming

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        """Do nothing, because the sampler counts epochs, also after a restore."""

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next epoch."""
        self._sampler.set_epoch(epoch)
