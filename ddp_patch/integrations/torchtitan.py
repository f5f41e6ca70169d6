"""Give torchtitan's trainer a patched loader, whose position its checkpoints keep for any number of ranks."""

import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.utils.data import DataLoader
from torchtitan.components.dataloader import BaseDataLoader

from ddp_patch.patching import PatchOptions, patch_dataloader_to_ddp
from ddp_patch.resume import loader_state, restore_loader

__all__ = ["PatchedDataLoader"]

_KEY = "ddp_patch"


class PatchedDataLoader(BaseDataLoader):  # type: ignore[misc]  # torchtitan is not there where types are checked
    """Base of a dataloader for ``Trainer.Config``: a subclass makes the loader of one process.

    The trainer says which data-parallel rank of how many this is; ranks that share a model's parts take the same
    batches. A checkpoint within an epoch goes on with the next batch, on any number of ranks.

    Attributes:
        patch_options: The keywords of ``patch_dataloader_to_ddp``, but for those about ranks and the seed.
    """

    patch_options: ClassVar[PatchOptions] = {}

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]  # as above
        """What a configuration says.

        Attributes:
            seed: Decides the orders of all epochs; the same on all ranks.
            infinite: Whether the next epoch follows; if not, the trainer stops where the first one ends.
        """

        seed: int = 0
        infinite: bool = True

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, **given: Any) -> None:
        self._is_infinite = config.infinite
        given.pop("snapshot_every_n_steps", None)  # a position is taken at any step
        options: Any = {"seed": config.seed, **self.patch_options}
        loader = self.make_loader(config, **given)
        self._loader = patch_dataloader_to_ddp(loader, rank=dp_rank, num_replicas=dp_world_size, **options)

    @abstractmethod
    def make_loader(self, config: Any, *, tokenizer: Any, seq_len: int, local_batch_size: int) -> DataLoader[Any]:
        """Return the finished loader, as for one process; its batches are what the trainer takes.

        Args:
            config: The configuration of this dataloader.
            tokenizer: The trainer's.
            seq_len: How many tokens a sample has.
            local_batch_size: How many samples a rank's batch has.
        """

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader
        while self._is_infinite:
            yield from self._loader

    def state_dict(self) -> dict[str, Any]:
        """Return the position, alike on all ranks, as text: a checkpoint takes a dict apart."""
        return {_KEY: json.dumps(loader_state(self._loader))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass go on where a checkpoint was taken; one that has no state of a dataloader says nothing."""
        if state_dict:
            restore_loader(self._loader, json.loads(state_dict[_KEY]))
