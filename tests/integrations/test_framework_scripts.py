"""The scripts that docs/frameworks.md shows train on two ranks, and resume from a checkpoint within an epoch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documented import CHECKOUT
from quick import soaked

SCRIPTS = {
    "lightning_callback": "step=5.ckpt",
    "hf_mixin": "checkpoint-5",
    "ignite_attached": "trainer_5.pt",
}


# Two of them import for so long that CI resumes in the frameworks' own tests alone.
CASES: list[Any] = [("lightning_callback", False), ("hf_mixin", False), ("ignite_attached", True)]
CASES += [soaked("lightning_callback", True), soaked("hf_mixin", True)]


@pytest.mark.parametrize(("name", "resumes"), CASES)
def test_a_script_of_the_page_trains_and_resumes(name: str, resumes: bool, tmp_path: Path) -> None:
    script = CHECKOUT / "docs" / "examples" / "frameworks" / f"{name}.py"
    kept = Path("checkpoints", SCRIPTS[name])
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONSAFEPATH", None)
    for arguments in ([], [str(kept)])[: 1 + resumes]:
        done = subprocess.run(  # noqa: S603 - our own scripts
            [sys.executable, *start, str(script), *arguments],
            cwd=tmp_path,
            env=environment,
            timeout=240,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / kept).exists()
