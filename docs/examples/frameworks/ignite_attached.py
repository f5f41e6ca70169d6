"""ignite: train on the ranks that torchrun starts; with a checkpoint's file as argument, resume from it."""

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch.integrations.ignite import attach_loader

idist.initialize("gloo")
trainer = Engine(lambda engine, batch: None)  # your training step
loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=4, shuffle=True)
loader = attach_loader(trainer, loader)
saver = DiskSaver("checkpoints", create_dir=True, require_empty=False)
trainer.add_event_handler(Events.ITERATION_COMPLETED(every=5), Checkpoint({"trainer": trainer}, saver, n_saved=None))
if len(sys.argv) > 1:
    Checkpoint.load_objects({"trainer": trainer}, sys.argv[1])
    trainer.run(loader)  # its state has max_epochs and epoch_length
else:
    trainer.run(loader, max_epochs=2)
idist.finalize()
