"""Train a classifier of handwritten digits on all ranks, then evaluate it as one process would.

Start it with ``torchrun --standalone --nproc-per-node 3 docs/examples/evaluation.py``.
"""

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, average_precision_score, roc_auc_score
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import gather_in_order, iter_with_mask, patch_dataloader_to_ddp

Loader = DataLoader[tuple[Tensor, ...]]  # of images and labels
Outputs = dict[str, Tensor]

SEED = 7
# Three ranks divide neither number. With batches of 5, the shares of 566, 566 and 565 are 114, 114 and 113 batches.
TRAIN_SIZE, EVALUATION_SIZE, BATCH_SIZE = 1697, 100, 5


def make_loaders() -> tuple[Loader, Loader]:
    """Return a loader for training and one for evaluation, as they would be written for one process."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    data = TensorDataset(images / 16, labels)
    assert len(data) == TRAIN_SIZE + EVALUATION_SIZE
    train, evaluation = TensorDataset(*data[:TRAIN_SIZE]), TensorDataset(*data[TRAIN_SIZE:])
    return DataLoader(train, BATCH_SIZE, shuffle=True), DataLoader(evaluation, BATCH_SIZE)


def train(model: DistributedDataParallel, loader: Loader) -> int:
    """Train for an epoch, in which some ranks have a batch more; return how many batches this one had."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    steps = 0
    with model.join():  # answers for the ranks that have finished
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
            steps += 1
    return steps


@torch.no_grad()
def evaluate(model: nn.Module, loader: Loader) -> Outputs:
    """Return labels and probabilities for every sample that the loader gives."""
    batches = [(labels, model(images).softmax(dim=1)) for images, labels in loader]
    labels, probabilities = zip(*batches, strict=True)
    return {"labels": torch.cat(labels), "probabilities": torch.cat(probabilities)}


@torch.no_grad()
def mean_loss(model: nn.Module, loader: Loader) -> float:
    """Return the mean loss of all samples, from sums that leave padding out."""
    total = torch.zeros(2, dtype=torch.float64)
    for (images, labels), mask in iter_with_mask(loader):
        losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
        total += torch.stack([losses[mask].sum(), mask.sum()])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def metrics(outputs: Outputs) -> list[float]:
    """Return accuracy, area under the ROC curve and mean average precision."""
    labels, probabilities = outputs["labels"].numpy(), outputs["probabilities"].numpy()
    return [
        float(accuracy_score(labels, probabilities.argmax(axis=1))),
        float(roc_auc_score(labels, probabilities, multi_class="ovr")),
        float(average_precision_score(labels, probabilities)),
    ]


def with_padding(outputs: Outputs) -> Outputs:
    """Return all ranks' outputs as they are put together where nobody knows of padding."""
    ranks: list[Outputs] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, outputs)
    return {name: torch.cat([rank[name] for rank in ranks]) for name in outputs}


def report(rows: dict[str, Outputs]) -> None:
    """Print one row for each way to evaluate."""
    table = Table("evaluated", title=f"{EVALUATION_SIZE} samples on {dist.get_world_size()} ranks")
    for column in ("samples", "accuracy", "AUROC", "mAP"):
        table.add_column(column, justify="right")
    for name, outputs in rows.items():
        table.add_row(name, str(len(outputs["labels"])), *(f"{metric:.4f}" for metric in metrics(outputs)))
    Console().print(table)


def main() -> None:
    """Train and evaluate on all ranks; then evaluate on rank 0 alone, and compare."""
    torch.manual_seed(SEED + dist.get_rank())  # every rank differently
    unpatched, unpatched_evaluation = make_loaders()
    mlp = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    steps = [0] * dist.get_world_size()
    model = DistributedDataParallel(mlp)  # sends rank 0's weights to all
    dist.all_gather_object(steps, train(model, patch_dataloader_to_ddp(unpatched, uneven="keep", seed=SEED)))

    loader = patch_dataloader_to_ddp(unpatched_evaluation)
    outputs = evaluate(mlp, loader)
    padded = with_padding(outputs)
    gathered = gather_in_order(outputs, loader)
    alone = evaluate(mlp, unpatched_evaluation)
    loss = mean_loss(mlp, loader)
    if dist.get_rank() == 0:
        print("Batches of the training epoch:", *steps)
        report({"in one process": alone, "gathered in order": gathered, "with padding left in": padded})
        loss_alone = nn.functional.nll_loss(alone["probabilities"].log(), alone["labels"]).item()
        print(f"Mean loss: {loss:.4f} by masks, {loss_alone:.4f} in one process.")
        assert abs(loss - loss_alone) < 1e-9
    assert torch.equal(gathered["labels"], alone["labels"])
    torch.testing.assert_close(gathered["probabilities"], alone["probabilities"])
    assert metrics(gathered) == metrics(alone)
    # Nobody may end right after a collective: gloo's threads abort if they free its tensors while Python shuts down.
    dist.monitored_barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
