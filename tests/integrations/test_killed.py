"""Jobs that are killed within an epoch go on with fewer and with more ranks: each sample of the epoch counts once."""

import json
import os
import signal
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from quick import run_ranks
from torch import nn
from torch.utils.data import DataLoader
from zoo import seed_ambient

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import RanksFailedError

N, BATCH, EPOCHS = 50, 2, 2
SAVED, KILLED = 3, 5  # after which steps a checkpoint is taken, and a rank dies


class Job:
    """What each framework does in a step: note which samples are trained, save, and die if it is to."""

    def __init__(self, rank: int, folder: Path, *, dies: bool) -> None:
        self.rank, self.folder, self.dies, self.steps = rank, folder, dies, 0

    def trained(self, epoch: int, indices: torch.Tensor) -> None:
        with (self.folder / f"trained-{self.rank}").open("a") as file:
            file.write(json.dumps([epoch, self.steps, indices.tolist()]) + "\n")
        self.steps += 1
        dist.barrier()
        if self.dies and self.steps == KILLED and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def saves(self) -> bool:
        return self.dies and self.steps == SAVED


def loader() -> DataLoader[Any]:
    data: Any = torch.arange(N)
    return DataLoader(data, BATCH, shuffle=True, num_workers=1)


def in_ignite(rank: int, job: Job, checkpoint: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch.jit.\w+` is deprecated", DeprecationWarning)
        from ignite.engine import Engine, Events

        from ddp_patch.integrations.ignite import attach_loader
    trainer: Any = Engine(lambda engine, batch: job.trained(engine.state.epoch - 1, batch))
    patched = attach_loader(trainer, loader())

    @trainer.on(Events.ITERATION_COMPLETED)  # type: ignore[untyped-decorator]  # ignite is not there where types are checked
    def save(engine: Any) -> None:
        if job.saves and rank == 0:
            torch.save(engine.state_dict(), checkpoint / "engine.pt")

    if job.dies:
        trainer.run(patched, max_epochs=EPOCHS)
    else:
        trainer.load_state_dict(torch.load(checkpoint / "engine.pt", weights_only=False))
        trainer.run(patched)


def in_accelerate(rank: int, job: Job, checkpoint: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from ddp_patch.integrations.accelerate import prepare_patched

    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    patched: Any = prepare_patched(accelerator, patch_dataloader_to_ddp(loader()))
    model = accelerator.prepare(nn.Linear(1, 1))
    if not job.dies:
        accelerator.load_state(str(checkpoint))
    for epoch in range(patched.iteration, EPOCHS):
        for indices in patched:
            accelerator.backward(model(indices[:, None] / N).sum())
            job.trained(epoch, indices)
            if job.saves:
                accelerator.save_state(str(checkpoint))


FRAMEWORKS = {"ignite": in_ignite, "accelerate": in_accelerate}


def run(rank: int, world_size: int, name: str, folder: Path, checkpoint: Path, dies: bool) -> None:
    seed_ambient(rank + 10 * dies)
    FRAMEWORKS[name](rank, Job(rank, folder, dies=dies), checkpoint)


def trained_in(folder: Path) -> list[tuple[int, int, list[int]]]:
    """The epoch, the step and the samples of each line that the ranks wrote."""
    return [json.loads(line) for file in folder.iterdir() for line in file.read_text().splitlines()]


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_killed_within_an_epoch_and_gone_on_with_fewer_and_more_ranks(name: str, tmp_path: Path) -> None:
    first, checkpoint = tmp_path / "first", tmp_path / "checkpoint"
    first.mkdir()
    checkpoint.mkdir()
    with pytest.raises(RanksFailedError, match="SIGKILL"):
        run_ranks(run, 3, name, first, checkpoint, True)
    trained = trained_in(first)
    assert 3 * KILLED <= len(trained) <= 3 * KILLED + 2  # two ranks may have begun the next step
    before = list(chain(*(samples for _, step, samples in trained if step < SAVED)))  # two steps more come again
    assert len(set(before)) == len(before) == 3 * BATCH * SAVED
    for ranks in (2, 4):
        then = tmp_path / f"{ranks}"
        then.mkdir()
        run_ranks(run, ranks, name, then, checkpoint, False)
        after = trained_in(then)
        rest = list(chain(*(samples for epoch, _, samples in after if epoch == 0)))
        assert sorted({*before, *rest}) == list(range(N))
        assert len(rest) == -(-(N - len(before)) // ranks) * ranks
        last = list(chain(*(samples for epoch, _, samples in after if epoch == 1)))
        assert sorted(set(last)) == list(range(N))
        assert len(last) == -(-N // ranks) * ranks
