"""``benchmarks/same.py`` finds no difference between a tree and itself, and shows a program that differs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_patch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "same.py"
TREE = Path(ddp_patch.__file__).parents[1]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test's run keeps what the tree gives, for the second one."""
    return tmp_path_factory.mktemp("kept")


def compared(after: Path, kept: Path, before: Path = TREE) -> subprocess.CompletedProcess[str]:
    arguments = ["--before", str(before), "--after", str(after), "--programs", "20", "--jobs", "1"]
    environment = {**os.environ, "TMPDIR": str(kept)}
    return subprocess.run(  # noqa: S603 - this very Python
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env=environment
    )


@pytest.mark.soak  # as below
def test_a_program_that_differs_is_shown(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(TREE / "ddp_patch", tmp_path / "ddp_patch", ignore=shutil.ignore_patterns("__pycache__"))
    plan = tmp_path / "ddp_patch" / "positions_and_padding.py"
    right, wrong = "range(self.rank, total, self.num_replicas)", "range(0, total, self.num_replicas)"
    assert plan.read_text().count(right) == 1
    plan.write_text(plan.read_text().replace(right, wrong))
    ran = compared(tmp_path, kept)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "of seed 0 differs" in ran.stdout
    assert {"-", "+"} <= {line[:1] for line in ran.stdout.splitlines()}


def test_a_folder_without_the_package_is_refused(kept: Path, tmp_path: Path) -> None:
    ran = compared(tmp_path, kept)
    assert (ran.returncode, "holds no ddp_patch" in ran.stderr) == (2, True)
