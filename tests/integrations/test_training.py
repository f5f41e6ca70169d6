"""What ranks train under accelerate, Lightning and FSDP2, by weights, is what one process trains by means."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import digits
import pytest
import torch
from accelerate import Accelerator
from documented import CHECKOUT
from frameworks.lightning_trainer import quiet_trainer
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from quick import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from zoo import seed_ambient

from ddp_patch import iter_with_weights, patch_dataloader_to_ddp
from ddp_patch.integrations.accelerate import prepare_patched

# The page's own module.
sys.path.append(str(CHECKOUT / "docs" / "examples" / "frameworks"))
from lightning_weights import WeightedLoader


def patched(name: str, **world: Any) -> Any:
    return patch_dataloader_to_ddp(digits.make_loaders()[name], share="within_batches", seed=digits.SEED, **world)


def parameters(network: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(network.parameters()).detach()


def looped(model: nn.Module, optimizer: Any, loader: Any, backward: Callable[[Any], Any] = Tensor.backward) -> None:
    for _ in range(digits.EPOCHS):
        for (images, labels), weights in iter_with_weights(loader, dtype=torch.float64):
            optimizer.zero_grad()
            backward((cross_entropy(model(images), labels, reduction="none") * weights).sum())
            optimizer.step()


def with_accelerate(name: str) -> Tensor:
    accelerator = Accelerator(cpu=True)
    network = digits.make_network()
    model, optimizer = accelerator.prepare(network, digits.make_optimizer(network))
    looped(model, optimizer, prepare_patched(accelerator, patched(name)), accelerator.backward)
    return parameters(network)


def with_fsdp(name: str) -> Tensor:
    from torch.distributed.fsdp import fully_shard

    network = digits.make_network()
    fully_shard(network)
    looped(network, digits.make_optimizer(network), patched(name))
    whole: list[Any] = list(network.parameters())  # of DTensor
    return torch.cat([parameter.full_tensor().flatten() for parameter in whole]).detach()


class Module(LightningModule):  # type: ignore[misc]  # it is not there where types are checked
    def __init__(self, name: str, **world: Any) -> None:
        super().__init__()
        self.name, self.world, self.network = name, world, digits.make_network()

    def train_dataloader(self) -> WeightedLoader:
        return WeightedLoader(patched(self.name, **self.world), torch.float64)

    def training_step(self, batch: Any) -> Tensor:
        (images, labels), weights = batch
        loss: Tensor = (cross_entropy(self.network(images), labels, reduction="none") * weights).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return digits.make_optimizer(self.network)


def with_lightning(name: str) -> Tensor:
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"  # the ranks were started by something else than the Trainer
    module = Module(name)
    quiet_trainer(devices=2, strategy="ddp", max_epochs=digits.EPOCHS).fit(module)
    return parameters(module.network)


def on_rank(rank: int, world_size: int, train: Callable[[str], Tensor]) -> dict[str, Tensor]:
    seed_ambient(rank)
    return {name: train(name) for name in ("shuffled", "1 to 9 samples")}


@pytest.mark.parametrize("train", [with_accelerate, with_lightning, with_fsdp])
def test_frameworks_train_what_one_process_trains(train: Callable[[str], Tensor]) -> None:
    alone = digits.train_alone(1)
    for trained in run_ranks(on_rank, 2, train):
        for name, vector in trained.items():
            assert (vector - alone[name]).abs().max() < digits.TOLERANCE


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_a_weighted_loader_keeps_its_place_in_lightning(tmp_path: Path) -> None:
    def fitted(checkpoint: Path | None) -> Tensor:
        seed_ambient(5)
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=17, save_top_k=-1)
        module = Module("shuffled", rank=0, num_replicas=1)
        quiet_trainer(saving, max_epochs=digits.EPOCHS).fit(module, ckpt_path=checkpoint)
        return parameters(module.network)

    whole = fitted(None)
    resumed = fitted(tmp_path / "step=17.ckpt")  # of 13 steps an epoch
    assert (resumed - whole).abs().max() < digits.TOLERANCE
