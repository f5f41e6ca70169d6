"""accelerate: a patched loader with what accelerate's own loaders do, but for sharing it a second time."""

from collections.abc import Iterator
from typing import Any, TypeVar, cast

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader

from ddp_patch.compat import ACCELERATE_NON_BLOCKING, ACCELERATE_UNCUT, AccelerateLeavesAlone
from ddp_patch.loaders.recognition import sharded_by
from ddp_patch.resume import go_on, loader_state
from ddp_patch.shares.batches import patched_sampler
from ddp_patch.shares.epochs import EpochSampler

__all__ = ["prepare_patched"]

T = TypeVar("T")


def prepare_patched(accelerator: Accelerator, loader: DataLoader[T]) -> DataLoader[T]:
    """Prepare a patched loader as ``accelerator.prepare`` does others: batches on the device, the last one known.

    ``accelerator.prepare`` leaves a patched loader as it is, so that its batches stay on the CPU and gradient
    accumulation does not see where an epoch ends. With ``DataLoaderConfiguration(use_stateful_dataloader=True)``,
    ``save_state`` and ``load_state`` keep the place of what comes back.

    Args:
        accelerator: Whose device and settings count.
        loader: What ``patch_dataloader_to_ddp`` returned.

    Returns:
        A loader over ``loader``, to which ``accelerator.prepare`` does nothing more. In a single process, where nothing
        needs to be patched, what ``accelerator.prepare`` returns.

    Raises:
        NotPatchedError: Several processes share the data, and the loader is not patched.

    Examples:
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(10), batch_size=4), rank=1, num_replicas=2)
        >>> [batch.tolist() for batch in prepare_patched(Accelerator(cpu=True), loader)]
        [[1, 3, 5, 7], [9]]
    """
    if accelerator.num_processes > 1 or sharded_by(loader) is not None:
        loader = cast(Any, _Prepared(accelerator, loader, patched_sampler("prepare_patched", loader)))
    prepared: DataLoader[T] = accelerator.prepare(loader)
    return prepared


class _Prepared(AccelerateLeavesAlone, DataLoaderShard):  # type: ignore[misc]  # accelerate is not there where types are checked
    """A patched loader within accelerate's, which counts no epochs of its own."""

    def __init__(self, accelerator: Accelerator, loader: DataLoader[Any], sampler: EpochSampler[Any]) -> None:
        self._sampler = sampler
        super().__init__(
            loader.dataset,
            device=accelerator.device if accelerator.device_placement else None,
            **ACCELERATE_UNCUT,
            **{ACCELERATE_NON_BLOCKING: accelerator.non_blocking},
        )
        self.base_dataloader = loader
        # Set after the loader was made, which is not to be torchdata's: whether `save_state` asks for its state.
        self.use_stateful_dataloader = accelerator.use_stateful_dataloader
        self._batches_done = 0

    def __iter__(self) -> Iterator[Any]:
        self._batches_done = 0
        for batch in super().__iter__():
            self._batches_done += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands after the batches that were given, one fewer than accelerate has fetched."""
        return loader_state(self.base_dataloader, batches_done=self._batches_done)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass go on where a state was taken; ``len()`` stays whole, as accelerate's loaders have it."""
        go_on(self.base_dataloader, state_dict, tells_rest=False)
        self._batches_done = 0

    @property
    def iteration(self) -> int:
        """The epoch of the next pass, which each pass sets."""
        return self._sampler.epochs.upcoming

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        """Nothing: the sampler counts, also on from a restored place."""

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one."""
        self._sampler.set_epoch(epoch)
