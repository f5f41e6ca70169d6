"""What differs on a GPU, by ``nox -s gpu``: on one, which several gloo ranks share, and on several, with NCCL.

``tests/ranks/test_device_ranks.py`` does the same on the CPU.
"""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerated import ALL, Setting, hands_over, several, trains
from documented import run_command
from quick import run_ranks

GPUS = torch.cuda.device_count()

pytestmark = pytest.mark.skipif(GPUS == 0, reason="there is no GPU that torch sees: torch.cuda.device_count() is 0")
needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
needs_several = pytest.mark.skipif(GPUS < 2, reason=f"NCCL takes one rank for each GPU, and there are {GPUS}")


def check(found: list[list[Any]]) -> None:
    given = [number for rank in found for number in rank[ALL.index(hands_over)]]
    assert len(given) == len(set(given))
    parameters = [rank[ALL.index(trains)] for rank in found]
    assert all(one == parameters[0] for one in parameters)


def test_gloo_ranks_that_share_gpus(tmp_path: Path) -> None:
    check(run_ranks(several, 2, Setting("gloo", "cuda", tmp_path), ALL, timeout=300))


@needs_nccl
def test_the_script_of_the_readme_takes_a_gpu_for_each_rank() -> None:
    status, printed, error = run_command(f"torchrun --standalone --nproc-per-node {GPUS} docs/examples/ddp.py")
    assert status == 0, error
    assert [line.split(":")[0] for line in printed.splitlines()] == ["epoch 0", "epoch 1", "epoch 2"]


@needs_nccl
def test_a_rank_of_nccl(tmp_path: Path) -> None:
    check(run_ranks(several, 1, Setting("nccl", "cuda", tmp_path), ALL, timeout=300))


@needs_nccl
@needs_several
def test_ranks_of_nccl(tmp_path: Path) -> None:
    check(run_ranks(several, GPUS, Setting("nccl", "cuda", tmp_path), ALL, timeout=300))


def test_ranks_train_as_one_process_with_batch_normalisation_of_whole_batches(tmp_path: Path) -> None:
    """More ranks than GPUs share these."""
    script = """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        x = torch.randn(512, 20)
        loader = DataLoader(TensorDataset(x, (x[:, 0] > 0.3).long()), batch_size=64, shuffle=True, pin_memory=True)
        model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            loss.backward()
            optimizer.step()
            print(f"{loss.item():.12f}")
        print(f"{sum(each.sum().item() for each in model.parameters()):.12f}")
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    printed = []
    for ranks in ("1", "2"):
        command = [sys.executable, "-m", "ddp_patch", "run", "-n", ranks, "train.py"]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)  # noqa: S603 - our own
        printed.append(done.stdout)
    assert len(printed[0].splitlines()) == 9
    assert printed[0] == printed[1]
