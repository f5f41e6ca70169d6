"""A job of accelerate that is killed goes on within the epoch on fewer and on more ranks: each sample counts once."""

import json
import os
import signal
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
SAVED, KILLED = 4, 6  # after which steps a checkpoint is taken, and a rank dies


def job(rank: int, world_size: int, folder: Path, checkpoint: Path, dies: bool) -> None:
    """Note which samples are trained; save, and die, if it is to."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from ddp_patch.integrations.accelerate import prepare_patched

    seed_ambient(rank + 10 * dies)
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config, gradient_accumulation_steps=2)
    given: DataLoader[Any] = DataLoader(torch.arange(N), BATCH, shuffle=True, num_workers=1)  # type: ignore[arg-type]  # torch's own use
    patched: Any = prepare_patched(accelerator, patch_dataloader_to_ddp(given))
    model = accelerator.prepare(nn.Linear(1, 1))
    if not dies:
        accelerator.load_state(str(checkpoint))
    for epoch in range(patched.iteration, EPOCHS):
        for step, indices in enumerate(patched):
            with accelerator.accumulate(model):
                accelerator.backward(model(indices[:, None] / N).sum())
            with (folder / f"trained-{rank}").open("a") as file:
                file.write(json.dumps([epoch, step, indices.tolist(), accelerator.sync_gradients]) + "\n")
            dist.barrier()
            if dies and step + 1 == SAVED:
                accelerator.save_state(str(checkpoint))
            if dies and step + 1 == KILLED and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_killed_while_it_validates_it_validates_and_goes_on(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from ddp_patch.integrations.accelerate import prepare_patched

    def train(checkpoint: Path | None = None, killed_in: int | None = None) -> list[Any]:
        seed_ambient(3)
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        given: DataLoader[Any] = DataLoader(torch.arange(N), 5, shuffle=True)  # type: ignore[arg-type]  # torch's own use
        patched: Any = prepare_patched(accelerator, patch_dataloader_to_ddp(given, rank=0, num_replicas=2, seed=3))
        did: list[Any] = []
        if checkpoint is not None:
            accelerator.load_state(str(checkpoint))
        for epoch in range(patched.iteration, EPOCHS):
            for indices in patched:
                did.append((epoch, indices.tolist()))
                if killed_in is not None:
                    accelerator.save_state(str(tmp_path / "latest"))
            if epoch == killed_in:
                break
            did.append(f"validated after epoch {epoch}")
        return did

    whole = train()
    for killed_in in range(EPOCHS):
        killed = train(killed_in=killed_in)
        assert killed + train(tmp_path / "latest") == whole


def trained_in(folder: Path) -> list[tuple[int, int, list[int], bool]]:
    """The epoch, step and samples of each line that the ranks wrote, and whether the optimizer made a step."""
    return [json.loads(line) for file in folder.iterdir() for line in file.read_text().splitlines()]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_killed_within_an_epoch_and_gone_on_with_fewer_and_more_ranks(tmp_path: Path) -> None:
    first, checkpoint = tmp_path / "first", tmp_path / "checkpoint"
    first.mkdir()
    checkpoint.mkdir()
    with pytest.raises(RanksFailedError, match="SIGKILL"):
        run_ranks(job, 3, first, checkpoint, True)
    trained = trained_in(first)
    assert 3 * KILLED <= len(trained) <= 3 * KILLED + 2  # two ranks may have begun the next step
    before = list(chain(*(samples for _, step, samples, _ in trained if step < SAVED)))  # two steps more come again
    assert len(set(before)) == len(before) == 3 * BATCH * SAVED
    for ranks in (1, 4):
        then = tmp_path / f"{ranks}"
        then.mkdir()
        run_ranks(job, ranks, then, checkpoint, False)
        after = trained_in(then)
        rest = list(chain(*(samples for epoch, _, samples, _ in after if epoch == 0)))
        assert sorted({*before, *rest}) == list(range(N))
        assert len(rest) == -(-(N - len(before)) // ranks) * ranks
        last = list(chain(*(samples for epoch, _, samples, _ in after if epoch == 1)))
        assert sorted(set(last)) == list(range(N))
        assert len(last) == -(-N // ranks) * ranks
        for epoch in range(EPOCHS):  # the last accumulation may have one batch
            steps = {step: synced for of, step, _, synced in after if of == epoch}
            assert [step for step in sorted(steps) if steps[step]] == sorted({*range(1, len(steps), 2), len(steps) - 1})
