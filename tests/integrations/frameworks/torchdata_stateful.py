"""torchdata's ``StatefulDataLoader``, stopped in the middle of every epoch and gone on with in a new one."""

import pickle
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ddp_patch import patch_dataloader_to_ddp
from frameworks.base import Epochs, Framework
from frameworks.kinds import Batch, tiny_model
from frameworks.loops import train

__all__ = ["FRAMEWORK"]

STOPS_AFTER = 2


class Interrupted:
    """Passes that each stop after some batches and go on in a new loader, as after a restart."""

    def __init__(self, loader: Any, patched: bool) -> None:
        self.given, self.patched = loader, patched
        self.loader = self.start()

    def start(self) -> Any:
        is_iterable = isinstance(self.given.dataset, IterableDataset)
        name = "batch_size" if is_iterable else "batch_sampler"
        options = {name: getattr(self.given, name), "collate_fn": self.given.collate_fn}
        loader: Any = StatefulDataLoader(self.given.dataset, **options)
        return patch_dataloader_to_ddp(loader) if self.patched else loader

    def __iter__(self) -> Iterator[Batch]:
        yield from islice(self.loader, STOPS_AFTER)
        state = pickle.dumps(self.loader.state_dict())
        self.loader = self.start()
        self.loader.load_state_dict(pickle.loads(state))  # noqa: S301 - our own
        yield from self.loader


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Make a loader with the same batches, and interrupt it."""
    interrupted = Interrupted(loader, patched)
    model = DistributedDataParallel(tiny_model())
    return train(model, interrupted, epochs, set_epoch=lambda epoch: interrupted.loader.sampler.set_epoch(epoch))


FRAMEWORK = Framework(("torchdata",), passes, moves=False)
