"""Ray Train: lose a worker within an epoch, and go on with those that are left.

Start it with ``python ray_elastic.py FOLDER``, on a Ray cluster of two or three workers. Files in the folder tell which
samples each worker took at each step.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader

SAMPLES, EPOCHS, STEPS_PER_CHECKPOINT = 120, 2, 4


def train(config: dict[str, Any]) -> None:
    """What each worker does, from the newest checkpoint on."""
    context, folder = ray.train.get_context(), Path(config["folder"])
    x = torch.linspace(0, 1, SAMPLES).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, 2 * x, torch.arange(SAMPLES)), batch_size=2, shuffle=True)
    loader = patch_dataloader_to_ddp(loader, seed=7)
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    steps, first_epoch = 0, 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved) / "state.pt", weights_only=True)
        network.load_state_dict(state["network"])
        restore_loader(loader, state["loader"])
        steps, first_epoch = state["steps"], state["loader"]["epoch"]

    model = prepare_model(network)
    for epoch in range(first_epoch, EPOCHS):
        for inputs, targets, indices in loader:
            taken = {"epoch": epoch, "steps": steps, "world": context.get_world_size(), "indices": indices.tolist()}
            with (folder / f"taken-{context.get_world_rank()}").open("a") as log:
                log.write(json.dumps(taken) + "\n")
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            time.sleep(0.1)  # stands for a larger model
            steps += 1
            if steps % STEPS_PER_CHECKPOINT == 0:
                state = {"steps": steps, "network": network.state_dict(), "loader": loader_state(loader)}
                save(state, is_first=context.get_world_rank() == 0)


def save(state: dict[str, Any], *, is_first: bool) -> None:
    """Report a checkpoint, which each worker must do; Ray keeps that of the first."""
    with tempfile.TemporaryDirectory() as new:
        if is_first:
            torch.save(state, Path(new) / "state.pt")
        ray.train.report({}, checkpoint=Checkpoint.from_directory(new) if is_first else None)


def main(folder: Path) -> None:
    """Train on as many workers as there are, two or three, and start them again where one is lost."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=(2, 3)),
        run_config=RunConfig(storage_path=str(folder / "results"), failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
