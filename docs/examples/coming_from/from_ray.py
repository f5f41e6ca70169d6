"""From Ray Train. Without torchrun: Ray starts the two workers."""

import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ranks import Indices, OwnBatchSampler, OwnSampler, show
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp


def compare() -> None:
    """Share two loaders by Ray, then by the patch."""
    own = DataLoader(Indices(), batch_size=4, sampler=OwnSampler())
    batched = DataLoader(Indices(), batch_sampler=OwnBatchSampler())

    # Before
    show("before, sampler", lambda: prepare_data_loader(own))
    show("before, batch sampler", lambda: prepare_data_loader(batched))

    # After: Ray still moves batches to the device.
    show("after, sampler", lambda: prepare_data_loader(patch_dataloader_to_ddp(own)))
    show("after, batch sampler", lambda: prepare_data_loader(patch_dataloader_to_ddp(batched)))


def work(settings: dict[str, Any]) -> None:
    """What each worker does; what it prints goes into a file, because workers have no screen."""
    torch.manual_seed(dist.get_rank())  # as for augmentations: on each rank another seed
    with Path(settings["printed"]).open("a") as printed, redirect_stdout(printed):
        compare()


def main() -> None:
    """Start the workers, and print what they printed."""
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed.txt"
        TorchTrainer(
            work,
            train_loop_config={"printed": str(printed)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        print(printed.read_text(), end="")
    ray.shutdown()


if __name__ == "__main__":
    main()
