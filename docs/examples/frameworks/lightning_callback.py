"""Lightning: train on two ranks; with a checkpoint's file as argument, resume from it."""

import sys

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from ddp_patch.integrations.lightning import PatchDataLoaders

seed_everything(0)  # so that all ranks make the same random data
loader = DataLoader(RandomDataset(32, 64), batch_size=4, shuffle=True)
checkpoints = ModelCheckpoint("checkpoints", filename="{step}", every_n_train_steps=5, save_top_k=-1)
trainer = Trainer(accelerator="cpu", devices=2, max_epochs=2, callbacks=[PatchDataLoaders(), checkpoints])
trainer.fit(BoringModel(), loader, ckpt_path=sys.argv[1] if len(sys.argv) > 1 else None)
