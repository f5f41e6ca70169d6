"""torchtitan's checkpoints and meshes with a patched dataloader: the script of docs/frameworks.md, and other ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from documented import CHECKOUT, run_command, run_on_twins
from quick import run_ranks
from torch.utils.data import DataLoader, IterableDataset
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.distributed import ParallelDims

from ddp_patch.integrations.torchtitan import PatchedDataLoader

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
SCRIPT = CHECKOUT / "docs" / "examples" / "frameworks" / "torchtitan_loader.py"
N = 64


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class Numbers(PatchedDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(PatchedDataLoader.Config):
        stream: bool = False

    def make_loader(self, config: Any, *, tokenizer: Any, seq_len: int, local_batch_size: int) -> DataLoader[Any]:
        if config.stream:
            return DataLoader(Stream(), local_batch_size)
        return DataLoader(torch.arange(N), local_batch_size, shuffle=True)  # type: ignore[arg-type]  # it is a dataset


class Nothing:
    """In place of the optimizers, and of what schedules them."""

    def state_dict(self) -> dict[str, Any]:
        return {"nothing": 0}

    def load_state_dict(self, state: Any) -> None:
        pass


def built(config: Any, tp: int = 1) -> Any:
    """Build a dataloader as the trainer does: of the mesh it takes the dimension of batches."""
    world_size = dist.get_world_size()
    with patch("torchtitan.distributed.parallel_dims.device_type", "cpu"):
        dims = ParallelDims(1, world_size // tp, 1, tp, 1, 1, world_size)
        mesh = dims.get_mesh("batch") if dims.dp_enabled else None
    degree, of = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
    given = {"tokenizer": None, "seq_len": 1, "local_batch_size": 4, "snapshot_every_n_steps": 3}
    return config.build(dp_world_size=degree, dp_rank=of, **given)


def train(rank: int, world_size: int, folder: str, stream: bool, steps: int, tp: int = 1) -> list[int]:
    """Go on from the latest checkpoint, if there is one, for some steps, and save another; return what was seen."""
    loader = built(Numbers.Config(stream=stream), tp)
    parts = {"model_parts": [torch.nn.Linear(1, 1)], "optimizers": Nothing(), "lr_schedulers": Nothing(), "states": {}}
    config = CheckpointManager.Config(enable=True, interval=1, last_save_model_only=False)
    checkpoints = config.build(dataloader=loader, **parts, sd_adapter=None, base_folder=folder)
    checkpoints.load(step=-1)
    seen = [number for batch in islice(loader, steps) for number in batch.tolist()]
    checkpoints.save(steps)
    checkpoints.close()
    return seen


@pytest.mark.parametrize("launch", [run_command, run_on_twins])
def test_the_script_of_the_page_trains_and_resumes(launch: Callable[[str], Any], tmp_path: Path) -> None:
    for argument in ("", "checkpoints/step-3"):
        status, _, error = launch(f"cd {tmp_path} && torchrun --standalone --nproc-per-node 2 {SCRIPT} {argument}")
        assert status == 0, error
        assert (tmp_path / "checkpoints" / "step-3").exists()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_other_ranks_go_on_within_the_epoch_and_with_the_next(ranks: int, stream: bool, tmp_path: Path) -> None:
    before = run_ranks(train, 2, str(tmp_path), stream, 4)
    left = (N - 2 * 4 * 4) // (4 * ranks)  # steps of this epoch
    after = run_ranks(train, ranks, str(tmp_path), stream, left + 1)
    rest = [samples[: left * 4] for samples in after]
    assert sorted(chain(*before, *rest)) == list(range(N))
    assert sum(len(samples) for samples in after) == (left + 1) * 4 * ranks


def test_ranks_that_share_a_model_s_parts_take_the_same_batches(tmp_path: Path) -> None:
    first, second, third, fourth = run_ranks(train, 4, str(tmp_path), False, 3, 2)
    assert first == second
    assert third == fourth
    assert set(first).isdisjoint(third)


def ended(rank: int, world_size: int) -> int:
    return len(list(built(Numbers.Config(infinite=False))))


def test_a_finite_one_ends_with_its_epoch() -> None:
    assert run_ranks(ended, 2) == [N // 4 // 2] * 2


def test_torchtitan_s_own_loader_refuses_other_ranks() -> None:
    own = ParallelAwareDataloader(Stream(), dp_rank=0, dp_world_size=2, batch_size=4)
    with pytest.raises(AssertionError, match="resharding is not supported"):
        ParallelAwareDataloader(Stream(), dp_rank=0, dp_world_size=3, batch_size=4).load_state_dict(own.state_dict())
