"""The scripts that docs/frameworks.md shows train on two ranks; those that save checkpoints resume within an epoch."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from documented import CHECKOUT, run_command, run_on_twins
from quick import soaked

FOLDER = CHECKOUT / "docs" / "examples" / "frameworks"
CHECKPOINTS = {"lightning_callback": "step=5.ckpt", "hf_mixin": "checkpoint-5", "ignite_attached": "trainer_5.pt"}
TRAIN = ["accelerate_loop", "fsdp", "torchdata_stateful"]
# What imports for long is patched in CI by the frameworks' own tests alone.
SOAKED = ["hf_datasets", "lightning_fabric", "pyg"]
STARTS_RANKS = ["notebook", pytest.param("ray_train", marks=pytest.mark.ray)]


def run(folder: Path, *command: str) -> None:
    """Run a command as a user does in a folder."""
    check(run_command(f"cd {folder} && {shlex.join(command)}"))


def check(run: tuple[int, str, str]) -> None:
    status, _, error = run
    assert status == 0, error


def script(name: str) -> str:
    return str(FOLDER / f"{name}.py")


def by_torchrun(folder: Path, *command: str) -> None:
    check(run_command(f"cd {folder} && {TORCHRUN} {shlex.join(command)}"))


def by_torchrun_on_twins(folder: Path, *command: str) -> None:
    check(run_on_twins(f"cd {folder} && {TORCHRUN} {shlex.join(command)}"))


TORCHRUN = "torchrun --standalone --nproc-per-node 2"
as_it_stands = pytest.param(by_torchrun, marks=pytest.mark.torchrun)  # imports for long
launched = pytest.mark.parametrize("launch", [as_it_stands, by_torchrun_on_twins])


@launched
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_script_of_the_page_trains_and_resumes(name: str, launch: Any, tmp_path: Path) -> None:
    kept = Path("checkpoints", CHECKPOINTS[name])
    for arguments in ([], [str(kept)]):
        launch(tmp_path, script(name), *arguments)
        assert (tmp_path / kept).exists()


@launched
@pytest.mark.parametrize("name", [*TRAIN, *map(soaked, SOAKED)])
def test_a_script_of_the_page_trains(name: str, launch: Any, tmp_path: Path) -> None:
    launch(tmp_path, script(name))


@pytest.mark.parametrize("name", STARTS_RANKS)
def test_a_script_of_the_pages_starts_its_ranks(name: str, tmp_path: Path) -> None:
    run(tmp_path, "python", script(name))


def test_no_script_is_left_out() -> None:
    # In test_training.py, test_ray_elastic.py, and where sessions of their own try them.
    elsewhere = {"lightning_weights", "ray_elastic"}
    elsewhere |= {"composer_trainer", "deepspeed_loop", "torchft_replicas", "torchtitan_loader"}
    tried = {*CHECKPOINTS, *TRAIN, *SOAKED, "notebook", "ray_train", *elsewhere}
    assert {path.stem for path in FOLDER.glob("*.py")} == tried
