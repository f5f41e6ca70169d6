"""DeepSpeed's engines with patched loaders: the script of docs/frameworks.md, and what its bullets say."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from documented import CHECKOUT, run_command, run_on_twins
from quick import run_ranks
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader

# torch's own ways that DeepSpeed calls by older names.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
SCRIPT = CHECKOUT / "docs" / "examples" / "frameworks" / "deepspeed_loop.py"
N, STEPS, OF_STEP = 64, 3, 2  # samples; optimizer steps before the checkpoint; batches of a step
RANKS = 2
TAKEN = STEPS * OF_STEP * RANKS * 4


def engine_of(stage: int, *, universal: bool = False, **options: Any) -> tuple[Any, Any]:
    model = torch.nn.Linear(1, 32)  # a part of it for each rank
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": OF_STEP}
    config |= {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    config |= {"checkpoint": {"load_universal": universal}}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    engine, _, loader, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, **options)
    return engine, loader


def train(
    rank: int, world_size: int, stage: int, folder: str, tag: str | None = None, batches: int = STEPS * OF_STEP
) -> list[int]:
    """Train some batches up to a checkpoint, or from there to the epoch's end; return this rank's samples."""
    engine, _ = engine_of(stage, universal=tag is not None and "universal" in tag)
    numbers: Any = torch.arange(float(N))[:, None]
    loader: Any = DataLoader(numbers, batch_size=4, shuffle=True)
    loader = patch_dataloader_to_ddp(loader, seed=3, rank=rank, num_replicas=world_size)
    if tag is not None:
        _, kept = engine.load_checkpoint(folder, tag)
        assert (engine.global_steps, engine.micro_steps % OF_STEP) == (STEPS, 0)
        restore_loader(loader, kept["loader"])
    seen: list[int] = []
    for batch in loader:
        seen += batch[:, 0].int().tolist()
        engine.backward(engine(batch).square().mean())
        engine.step()
        if tag is None and engine.micro_steps == batches:
            engine.save_checkpoint(folder, "saved", client_state={"loader": loader_state(loader)})
            break
    return seen


def assert_goes_on(before: list[list[int]], after: list[list[int]]) -> None:
    """Each sample of the epoch came, and no more again than fills up the last round."""
    first, rest = list(chain(*before)), list(chain(*after))
    assert len(first) == TAKEN
    assert {*first, *rest} == set(range(N))
    assert len(rest) - (N - TAKEN) in range(len(after))


@pytest.mark.parametrize("launch", [run_command, run_on_twins])
def test_the_script_of_the_page_trains_and_resumes(launch: Callable[[str], Any], tmp_path: Path) -> None:
    for argument in ("", "checkpoints/global_step3"):
        status, _, error = launch(f"cd {tmp_path} && torchrun --standalone --nproc-per-node 2 {SCRIPT} {argument}")
        assert status == 0, error
        assert (tmp_path / "checkpoints" / "global_step3").exists()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_of_each_stage_goes_on_with_the_next_batch(stage: int, tmp_path: Path) -> None:
    before = run_ranks(train, RANKS, stage, str(tmp_path))
    assert_goes_on(before, run_ranks(train, RANKS, stage, str(tmp_path), "saved"))


@pytest.mark.parametrize("ranks", [1, 3])
def test_without_zero_other_ranks_go_on(ranks: int, tmp_path: Path) -> None:
    before = run_ranks(train, RANKS, 0, str(tmp_path))
    assert_goes_on(before, run_ranks(train, ranks, 0, str(tmp_path), "saved"))


def refused(rank: int, world_size: int, stage: int, folder: str) -> None:
    # With ZeRO 3, a rank that has no file of its own asserts that there is one.
    with pytest.raises((ZeRORuntimeException, AssertionError)):
        train(rank, world_size, stage, folder, "saved")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_of_zero_other_ranks_go_on_after_ds_to_universal(stage: int, tmp_path: Path) -> None:
    before = run_ranks(train, RANKS, stage, str(tmp_path))
    run_ranks(refused, 3, stage, str(tmp_path))
    folders = f"--input_folder {tmp_path}/saved --output_folder {tmp_path}/universal"
    status, _, error = run_command(f"python -m deepspeed.checkpoint.ds_to_universal {folders} --inject_missing_state")
    assert status == 0, error
    assert_goes_on(before, run_ranks(train, 3, stage, str(tmp_path), "universal"))


def test_a_checkpoint_drops_what_was_accumulated(tmp_path: Path) -> None:
    """The engine counts on from the step that ended, and the loader from the batch after it."""
    before = run_ranks(train, RANKS, 0, str(tmp_path), None, STEPS * OF_STEP + 1)
    after = run_ranks(train, RANKS, 0, str(tmp_path), "saved")
    assert [len(samples) for samples in before + after] == [28, 28, 4, 4]


def passes_of_training_data(rank: int, world_size: int) -> list[list[int]]:
    _, loader = engine_of(0, training_data=TensorDataset(torch.arange(N)))
    return [[number for (batch,) in loader for number in batch.tolist()] for _ in range(2)]


def test_training_data_comes_in_the_same_order_every_epoch() -> None:
    for first, second in run_ranks(passes_of_training_data, RANKS):
        assert first == second != sorted(first)
