"""Lightning: a loader that the Trainer's checkpoints keep the place of, by torch's Stateful protocol."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from ddp_patch import loader_state


class ResumableLoader(DataLoader[Any]):
    """To be patched: knows how many batches of the pass in progress were given."""

    batches_done = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch says that it is an iterator of its own
        self.batches_done = 0
        for batch in super().__iter__():
            self.batches_done += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the place; the Trainer puts it into its checkpoints."""
        return loader_state(self, batches_done=self.batches_done)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there; unlike ``restore_loader`` this leaves ``len()`` whole, by which the Trainer plans all epochs."""
        self.sampler.load_state_dict(state)  # type: ignore[attr-defined]  # the patched loader's sampler has it
