"""Whether a loss is a mean or a sum over a batch's samples, by the operations that computed it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from ddp_patch.running.losses import Reduction, reduction_of

PART, WHOLE, CLASSES = 5, 12, 3
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

LOSSES: dict[str, tuple[Loss, Reduction]] = {
    "mean squared error": (lambda x, y, _: functional.mse_loss(x, y), Reduction.MEAN),
    "its sum": (lambda x, y, _: functional.mse_loss(x, y, reduction="sum"), Reduction.SUM),
    "half of it": (lambda x, y, _: 0.5 * functional.mse_loss(x, y), Reduction.MEAN),
    "the sum, scaled": (lambda x, y, _: functional.mse_loss(x, y, reduction="sum") * 0.5, Reduction.SUM),
    "cross entropy": (lambda x, _, t: functional.cross_entropy(x, t), Reduction.MEAN),
    "its sum, in half": (lambda x, _, t: functional.cross_entropy(x, t, reduction="sum").float(), Reduction.SUM),
    "smoothed": (lambda x, _, t: functional.cross_entropy(x, t, label_smoothing=0.1), Reduction.MEAN),
    "classes weigh": (lambda x, _, t: functional.cross_entropy(x, t, weight=torch.ones(CLASSES)), Reduction.WEIGHED),
    "absolute": (lambda x, y, _: functional.l1_loss(x, y), Reduction.MEAN),
    "absolute, summed": (lambda x, y, _: nn.L1Loss(reduction="sum")(x, y), Reduction.SUM),
    "binary": (lambda x, y, _: functional.binary_cross_entropy_with_logits(x, y.sigmoid()), Reduction.MEAN),
    "divergence": (lambda x, y, _: functional.kl_div(x, y.softmax(1), reduction="batchmean"), Reduction.MEAN),
    "a mean by hand": (lambda x, y, _: ((x - y) ** 2).sum() / len(x), Reduction.MEAN),
    "a sum of means": (lambda x, y, _: ((x - y) ** 2).mean(1).sum(), Reduction.SUM),
    "a mean of sums": (lambda x, y, _: ((x - y) ** 2).sum(1).mean(), Reduction.MEAN),
    "by the batch size": (lambda x, y, _: ((x - y) ** 2).sum() / WHOLE, Reduction.SUM),
    "by some number": (lambda x, y, _: ((x - y) ** 2).sum() / 7, Reduction.UNKNOWN),
    "accumulated": (lambda x, y, _: functional.mse_loss(x, y) / 4, Reduction.MEAN),
    "two means": (lambda x, y, t: functional.mse_loss(x, y) + functional.cross_entropy(x, t), Reduction.MEAN),
    "a mean and a penalty": (
        lambda x, y, _: functional.mse_loss(x, y) + 0.1 * torch.ones(9, requires_grad=True).sum(),
        Reduction.MEAN,
    ),
    "a mean and a sum": (lambda x, y, _: functional.mse_loss(x, y) + (x**2).sum(), Reduction.BOTH),
    "a norm": (lambda x, y, _: (x - y).norm(), Reduction.UNKNOWN),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_is_of_its_samples(name: str) -> None:
    make, expected = LOSSES[name]
    outputs = torch.randn(PART, CLASSES, requires_grad=True)
    loss = make(outputs.log_softmax(1), torch.randn(PART, CLASSES), torch.randint(0, CLASSES, (PART,)))
    assert reduction_of(loss, PART, WHOLE) is expected
