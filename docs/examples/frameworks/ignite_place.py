"""ignite: a patched loader's place beside the engine's, in one checkpoint."""

from typing import Any

from ignite.engine import Engine, Events
from torch.utils.data import DataLoader

from ddp_patch import loader_state, restore_loader


class LoaderPlace:
    """Knows where an engine's loader stands."""

    def __init__(self, trainer: Engine, loader: DataLoader[Any]) -> None:
        self.trainer, self.loader = trainer, loader
        self.batches_done = 0  # of the pass in progress
        trainer.add_event_handler(Events.EPOCH_STARTED, self._begin)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._count)

    def _begin(self) -> None:
        self.batches_done = 0

    def _count(self) -> None:
        self.batches_done += 1

    def state_dict(self) -> dict[str, Any]:
        """Return where both stand: the engine's state has the length of a whole epoch."""
        place = loader_state(self.loader, batches_done=self.batches_done)
        return {"trainer": self.trainer.state_dict(), "loader": place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there, with the next ``trainer.run(loader)``."""
        self.trainer.load_state_dict(state["trainer"])
        restore_loader(self.loader, state["loader"])
