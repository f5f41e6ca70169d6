"""The scripts that docs/frameworks.md shows train on two ranks; those that save checkpoints resume within an epoch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documented import CHECKOUT
from quick import soaked

FOLDER = CHECKOUT / "docs" / "examples" / "frameworks"
CHECKPOINTS = {
    "lightning_callback": "step=5.ckpt",
    "hf_mixin": "checkpoint-5",
    "ignite_attached": "trainer_5.pt",
}
TRAIN = ["accelerate_loop", "fsdp", "torchdata_stateful"]
# What imports for long resumes, or is patched, in CI by the frameworks' own tests alone.
RESUMES: list[Any] = [("lightning_callback", False), ("hf_mixin", False), ("ignite_attached", True)]
RESUMES += [soaked("lightning_callback", True), soaked("hf_mixin", True)]
SOAKED = ["hf_datasets", "lightning_fabric", "pyg"]
STARTS_RANKS = ["notebook", pytest.param("ray_train", marks=pytest.mark.ray)]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(folder: Path, *command: str) -> None:
    """Run Python as a user does in a folder."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home folder
        "RAY_USAGE_STATS_ENABLED": "0",  # else it reports to its makers
    }
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(  # noqa: S603 - our own scripts
        [sys.executable, *command], cwd=folder, env=environment, timeout=240, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def script(name: str) -> str:
    return str(FOLDER / f"{name}.py")


@pytest.mark.parametrize(("name", "resumes"), RESUMES)
def test_a_script_of_the_page_trains_and_resumes(name: str, resumes: bool, tmp_path: Path) -> None:
    kept = Path("checkpoints", CHECKPOINTS[name])
    for arguments in ([], [str(kept)])[: 1 + resumes]:
        run(tmp_path, *TORCHRUN, script(name), *arguments)
        assert (tmp_path / kept).exists()


@pytest.mark.parametrize("name", [*TRAIN, *map(soaked, SOAKED)])
def test_a_script_of_the_page_trains(name: str, tmp_path: Path) -> None:
    run(tmp_path, *TORCHRUN, script(name))


@pytest.mark.parametrize("name", STARTS_RANKS)
def test_a_script_of_the_pages_starts_its_ranks(name: str, tmp_path: Path) -> None:
    run(tmp_path, script(name))


def test_no_script_is_left_out() -> None:
    elsewhere = {"lightning_weights", "ray_elastic"}  # in test_training.py and test_ray_elastic.py
    tried = {*CHECKPOINTS, *TRAIN, *SOAKED, "notebook", "ray_train", *elsewhere}
    assert {path.stem for path in FOLDER.glob("*.py")} == tried
