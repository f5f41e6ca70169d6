"""``ddp-patch run --mode ranks``: scripts that nobody edited, each rank on its shard."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

N = 23

# Knows of ranks, but not of this package. Its dataset writes down what is read.
SCRIPT = """
    import json, os, random, sys
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    class Recording(Dataset):
        def __init__(self, name):
            self.name = name

        def __len__(self):
            return 23

        def __getitem__(self, index):
            return {"name": self.name, "index": index}

    def record(**told):
        with open(os.path.join(sys.argv[1], f"rank-{os.environ['RANK']}"), "a") as file:
            file.write(json.dumps(told) + "\\n")

    def epoch_of(loader, epoch):
        for batch in loader:
            for name, index in zip(batch["name"], batch["index"].tolist()):
                record(name=name, epoch=epoch, index=index)

    early = DataLoader(Recording("early"), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)

    if __name__ == "__main__":
        torch.manual_seed(int(os.environ["RANK"]))
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        val = DataLoader(Recording("val"), batch_size=5)
        model = torch.nn.Linear(1, 1)
        if "parallel" in sys.argv:
            torch.nn.parallel.DistributedDataParallel(model)
        for epoch in range(2):
            epoch_of(early, epoch)
            if dist.get_rank() == 0:
                epoch_of(val, epoch)
        record(argv=sys.argv[2:], name="told", main=__file__, first=sys.path[0])
        if "fails" in sys.argv:
            raise SystemExit(3)
"""


VAL_LINE = 1 + next(number for number, line in enumerate(SCRIPT.splitlines()) if " val = " in line)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ddp_patch", "run")
OURS = ("-m", "ddp_patch", "run", "-n", "2")


def launch(folder: Path, launcher: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command, pipe = [sys.executable, *launcher, "--mode", "ranks", *arguments], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=folder) as running:  # noqa: S603 - our own
        try:
            out, err = running.communicate(timeout=300)
        finally:
            running.terminate()  # which ends the ranks too
    return subprocess.CompletedProcess(command, running.returncode, out, err)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    file = tmp_path / "package" / "training.py"
    file.write_text(textwrap.dedent(SCRIPT))
    return file


def told(folder: Path, name: str) -> list[list[dict[str, object]]]:
    """What each rank wrote down of one name."""
    lines = [(folder / f"rank-{rank}").read_text().splitlines() for rank in range(2)]
    return [[line for line in map(json.loads, of_rank) if line["name"] == name] for of_rank in lines]


def assert_shared(folder: Path, name: str) -> None:
    ranks = told(folder, name)
    for epoch in range(2):
        shares = [[line["index"] for line in lines if line["epoch"] == epoch] for lines in ranks]
        assert [len(share) for share in shares] == [-(-N // 2)] * 2
        assert {index for share in shares for index in share} == set(range(N))


def test_a_script_that_makes_a_group(script: Path, tmp_path: Path) -> None:
    excepted, own = ["--except", f"training.py:{VAL_LINE}"], [str(tmp_path), "parallel", "--seed", "x", "fails"]
    done = launch(tmp_path, OURS, *excepted, "package/training.py", *own)
    assert done.returncode == 3, done.stderr  # the ranks' own
    assert_shared(tmp_path, "early")
    assert [len(lines) for lines in told(tmp_path, "val")] == [2 * N, 0]
    for (line_of_rank,) in told(tmp_path, "told"):
        assert line_of_rank["argv"] == ["parallel", "--seed", "x", "fails"]  # the script's own
        assert line_of_rank["first"] == str(script.parent)
    assert done.stderr.count("ddp_patch: package/training.py:") == 2  # a line for each loader, on the first rank alone
    assert "DataLoader, shuffled, 23 samples: 2 ranks x 3 steps" in done.stderr
    assert "2 ranks x 3 steps, 2 passes" in " ".join(done.stderr.split())
    assert "left alone (--except)" in done.stderr
    assert "DistributedDataParallel" not in done.stderr


@pytest.mark.soak  # torchrun starts slowly
def test_a_module_that_averages_nothing(script: Path, tmp_path: Path) -> None:
    options = ["--except", f"*/training.py:{VAL_LINE}", "--seed=3", "-m", "package.training"]
    done = launch(tmp_path, TORCHRUN, *options, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert_shared(tmp_path, "early")
    for (line,) in told(tmp_path, "told"):
        assert (line["main"], line["first"]) == (str(script), str(tmp_path))
    assert "No DistributedDataParallel was seen" in done.stderr
