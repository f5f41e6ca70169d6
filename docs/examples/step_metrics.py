"""Update a torchmetrics metric batch by batch, on all ranks.

Start it with ``torchrun --standalone --nproc-per-node 3 docs/examples/step_metrics.py``.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from ddp_patch import gather_step, patch_dataloader_to_ddp


@torch.no_grad()
def main() -> None:
    """Evaluate an untrained model on all ranks, and compare with one process."""
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    images, targets = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    unpatched = DataLoader(TensorDataset(images.float()[:100], targets[:100]), batch_size=7)
    loader = patch_dataloader_to_ddp(unpatched)

    accuracy = MulticlassAccuracy(num_classes=10, sync_on_compute=False)  # every rank sees all samples
    for images, labels in loader:
        logits, labels = gather_step((model(images), labels), loader)
        accuracy.update(logits, labels)

    alone = MulticlassAccuracy(num_classes=10, sync_on_compute=False)
    for images, labels in unpatched:
        alone.update(model(images), labels)
    assert torch.equal(accuracy.compute(), alone.compute())
    if dist.get_rank() == 0:
        print(f"accuracy: {accuracy.compute():.4f}, as in one process")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
        dist.monitored_barrier()
    finally:
        dist.destroy_process_group()
