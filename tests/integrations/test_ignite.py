"""ignite's engines over a patched loader: resumed within an epoch, and made deterministic."""

import sys
import warnings
from typing import Any

import pytest
from documented import CHECKOUT
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from zoo import seed_ambient

from ddp_patch import patch_dataloader_to_ddp, restore_loader

with warnings.catch_warnings():
    # Importing ignite imports parts of torch that use torch.jit, which torch 2.13 deprecates.
    warnings.filterwarnings("ignore", r"`torch.jit.\w+` is deprecated", DeprecationWarning)
    from ignite.engine import DeterministicEngine, Engine, Events

# The page's own module.
sys.path.append(str(CHECKOUT / "docs" / "examples" / "frameworks"))
from ignite_place import LoaderPlace

DATA: Any = range(16)


class Pairs(BatchSampler):
    """A batch sampler that is shared whole."""


class Training:
    """One of two ranks, with four steps in an epoch."""

    def __init__(self, engine: type[Any] = Engine, seed: int = 7, **options: Any) -> None:
        seed_ambient(seed)
        loader = DataLoader(DATA, 2, shuffle=True, **options)
        self.loader: Any = patch_dataloader_to_ddp(loader, seed=3, rank=1, num_replicas=2)
        self.seen: list[tuple[int, list[int]]] = []
        self.trainer = engine(lambda trainer, batch: self.seen.append((trainer.state.epoch, batch.tolist())))
        self.place = LoaderPlace(self.trainer, self.loader)

    def stop_after(self, step: int) -> dict[str, Any]:
        """Return what is saved after a step."""
        states: list[dict[str, Any]] = []
        saves = Events.ITERATION_COMPLETED(once=step)
        self.trainer.add_event_handler(saves, lambda: states.append(self.place.state_dict()))
        self.trainer.run(self.loader, max_epochs=3)
        return states[0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_resumed_within_an_epoch(num_workers: int) -> None:
    """The page's class: steps, and the epochs in which they are, are those of a run that was never stopped."""
    for step in (2, 5, 7, 8) if not num_workers else (7,):
        stopped, resumed = Training(num_workers=num_workers), Training(seed=8, num_workers=num_workers)
        resumed.place.load_state_dict(stopped.stop_after(step))
        resumed.trainer.run(resumed.loader)
        assert len(stopped.seen) == 12
        assert resumed.seen == stopped.seen[step:]


def test_planned_by_the_length_of_the_rest_all_epochs_are_cut_short() -> None:
    """Which is why the page has the engine's state loaded too."""
    stopped, resumed = Training(), Training()
    restore_loader(resumed.loader, stopped.stop_after(5)["loader"])
    resumed.trainer.run(resumed.loader, max_epochs=3)
    assert len(resumed.seen) == 9


def test_a_deterministic_engine_needs_the_loader_without_set_epoch() -> None:
    """It makes the loader anew from the arguments that it takes the attributes for."""
    refused, training, told = Training(DeterministicEngine), Training(DeterministicEngine), Training()
    with pytest.raises(TypeError, match="unexpected keyword argument 'set_epoch'"):
        refused.trainer.run(refused.loader, max_epochs=2)
    del training.loader.set_epoch
    training.trainer.run(training.loader, max_epochs=2)
    told.trainer.run(told.loader, max_epochs=2)
    assert training.seen == told.seen
    batches = Pairs(SequentialSampler(DATA), 2, drop_last=False)
    whole: Any = patch_dataloader_to_ddp(DataLoader(DATA, batch_sampler=batches), rank=1, num_replicas=2)
    del whole.set_epoch
    with pytest.raises(TypeError, match="batch_sampler should be torch"):
        Training(DeterministicEngine).trainer.run(whole)
