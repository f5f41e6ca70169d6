"""``ddp-patch run -n``: it starts the ranks, lets one speak, keeps exit codes, and names what goes wrong."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from quick import soaked

TRAINING = """
    import os, sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    rank = os.environ.get("DDP_PATCH_RANK", "0")
    print("begins")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    data = torch.randn(30, 2)
    train, test = DataLoader(data, batch_size=7, shuffle=True), DataLoader(data[:11], batch_size=4)
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def epoch(steps=100):
        for _, batch in zip(range(steps), train):
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
        with torch.no_grad():
            print(f"loss {sum(model(batch).pow(2).sum().item() for batch in test):.9f}")
"""


OURS = ("-m", "ddp_patch", "run")


def launch(
    folder: Path, body: str, *options: str, before: str = TRAINING, launcher: Sequence[str] = (*OURS, "-n", "2")
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(textwrap.dedent(before) + textwrap.dedent(body))
    command = [sys.executable, *launcher, *options, "train.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)  # noqa: S603 - our own


# tests/unit/test_shadow.py has more ways to write.
WRITING = """
    import atexit, json, shutil, time
    from pathlib import Path

    time.sleep(float(rank) / 2)  # a later rank is late
    order = {word: place for place, word in enumerate({"a", "set", "of", "words"})}
    shutil.rmtree("out")
    os.makedirs("out")  # raises if it is there
    os.chdir("out")
    atexit.register(lambda: open("../log.txt", "a").write("at the end"))
    compiled = torch.jit.script(model)
    for number in range(5):
        epoch()
        weights = sum(torch.stack([batch.sum() for batch in test]))
        torch.save({"epoch": number, "weights": weights}, f"last-{number}.pt")  # saved by name, then copied
        shutil.copyfile(f"last-{number}.pt", "best.pt")
        folder = Path(f"epoch-{number}")  # in a new folder
        folder.mkdir(exist_ok=False)
        (folder / "config.json").write_text(json.dumps({"epoch": number}))
        shutil.move("../given.txt", "there.txt") if number == 0 else None
        with open("../log.txt", "a") as log:
            log.write(f"epoch {number}\\n")
        compiled.save("compiled.part")
        torch.jit.load("compiled.part")
        os.remove("compiled.part")
        if number > 2:
            os.remove(f"last-{number - 3}.pt")
    found = [str(path) for path in sorted(Path().rglob("*")) if path.is_file()]
    print(len(found), torch.load("best.pt"), found, order)
    sys.stderr.write(f"speaks {rank}\\n")
    sys.exit(3)
"""


def tree(folder: Path) -> dict[str, bytes]:
    """Return what is in a folder, but for times."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_ranks_print_and_write_once_what_one_rank_does(tmp_path: Path) -> None:
    done, trees = [], []
    for ranks in ("1", "3"):
        folder = tmp_path / ranks
        (folder / "out").mkdir(parents=True)
        (folder / "out" / "old.pt").write_bytes(b"old")
        (folder / "given.txt").write_text("given")
        (folder / "log.txt").write_text("before\n")
        done.append(launch(folder, WRITING, launcher=(*OURS, "-n", ranks)))
        trees.append(tree(folder))
    alone, three = done
    assert alone.returncode == three.returncode == 3, three.stderr
    assert trees[0] == trees[1]
    assert not {"given.txt", "out/old.pt"} & trees[0].keys()
    assert three.stdout == alone.stdout
    assert int(alone.stdout.splitlines()[-1].split()[0]) == 10
    assert [line for line in three.stderr.splitlines() if "speaks" in line] == ["speaks 0"]
    assert "3 ranks train as one process" in three.stderr
    assert "Linear: 40 calls, 33 divided over 3 ranks" in three.stderr
    assert "25 optimizer steps" in three.stderr


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.parametrize("launcher", [(*OURS, "-n", "2"), soaked((*TORCHRUN, *OURS, "--mode", "one"))])
def test_a_script_without_loader_and_optimizer_speaks_and_writes_once_and_does_not_see_its_rank(
    tmp_path: Path, launcher: Sequence[str]
) -> None:
    body = """
        import os
        open("out.txt", "a").write("x")
        import torch.distributed as dist
        torch.optim.SGD([torch.ones(1, requires_grad=True)])
        print(dist.is_initialized())
        try:
            dist.init_process_group("gloo")
        except Exception as error:
            seen = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"} & os.environ.keys()
            print(type(error).__name__, "--mode ranks" in str(error), seen, os.environ["DDP_PATCH_WORLD_SIZE"])
        os.environ["RANK"]
    """
    done = launch(tmp_path, body, before="import torch", launcher=launcher)
    assert (done.returncode, done.stdout) == (1, "False\nWorldError True set() 2\n")
    assert (tmp_path / "out.txt").read_text() == "x"
    assert "every rank computed all, and no time was saved" in done.stderr
    assert "KeyError: 'RANK'" in done.stderr
    assert "the script sees no RANK" in done.stderr
    assert "pass --mode ranks" in done.stderr


@pytest.mark.soak  # tests/ranks/test_one_process_ranks.py has what goes wrong on all ranks
def test_an_error_of_one_rank_is_told(tmp_path: Path) -> None:
    body = """
        epoch()
        if rank == "1":
            raise LookupError("of one rank")
        epoch()
    """
    done = launch(tmp_path, body)
    assert done.returncode != 0, done.stderr
    for words in ("[rank 1] LookupError: of one rank", "rank 1 ended first"):
        assert words in done.stderr


CHECKED: dict[str, tuple[str, int, list[str]]] = {
    "a rank that computes something else": (
        """
        open("model.txt", "w").write("of the check")
        for epoch in range(2):
            for batch in train:
                optimizer.zero_grad()
                model(batch + torch.rand(len(batch), 2)).pow(2).mean().backward()
                if rank == "1" and epoch:
                    model.weight.grad.add_(1)
                optimizer.step()
        """,
        1,
        ["gradient 0 of SGD of rank 1 is", "of its norm apart from rank 0's", "5 optimizer steps"],
    ),
    "dropout, and batch normalisation": (
        """
        model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        open("model.txt", "w").write("of the check")
        for epoch in range(2):
            for batch in train:
                optimizer.zero_grad()
                model(batch + torch.rand(len(batch), 2)).pow(2).mean().backward()
                optimizer.step()
        """,
        0,
        ["7 optimizer steps", "Checked: 7 calls made by parts and whole were the same, but for dropout and noise."],
    ),
    "a module that later sees the whole batch": (
        """
        class Later(nn.Linear):
            def forward(self, rows):
                out = super().forward(rows)
                return out - out.mean() if compares else out

        compares, model = [], Later(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(9):
            compares += [1] if number == 4 else []
            model(data).pow(2).mean().backward()
            optimizer.step()
        """,
        1,
        ["Call 5 of Later", "is not by parts what it is whole", "Call 4 was the last one"],
    ),
}


# The session soak tries the others; docs/autopatch.md has a check that finds nothing.
@pytest.mark.parametrize("name", [name if "computes" in name else soaked(name) for name in CHECKED])
def test_a_check_compares_every_call_and_step_and_writes_nothing(tmp_path: Path, name: str) -> None:
    body, code, words = CHECKED[name]
    done = launch(tmp_path, body, "--check", "--steps", "7")
    assert done.returncode == code, done.stderr
    for each in words:
        assert each in " ".join(done.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def started(folder: Path) -> "subprocess.Popen[str]":
    """Start an endless script, whose loader has workers; each rank writes down its process."""
    endless = """
        import subprocess
        subprocess.run(["touch", f"{os.getpid()}.pid"], check=True)  # a program of its own, which writes here
        train = DataLoader(data, batch_size=7, num_workers=1, persistent_workers=True)
        while True:
            epoch()
    """
    (folder / "train.py").write_text(textwrap.dedent(TRAINING) + textwrap.dedent(endless))
    return subprocess.Popen(
        [sys.executable, "-m", "ddp_patch", "run", "-n", "2", "train.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux' signal at the death of a parent")
@pytest.mark.parametrize("ended_by", ["Ctrl-C", soaked("the launcher's death")])
def test_all_ranks_end(tmp_path: Path, ended_by: str) -> None:
    with started(tmp_path) as running:
        assert running.stdout is not None
        lines = [running.stdout.readline() for _ in range(3)]
        assert lines[2].startswith("loss")
        ranks = {int(path.stem) for path in tmp_path.glob("*.pid")}
        if ended_by == "Ctrl-C":
            os.killpg(running.pid, signal.SIGINT)
            assert running.wait(WAITS_S) == 130
            # A thread of multiprocessing's may show that the other rank is gone. The script shows nothing.
            errors = running.stderr.read() if running.stderr else ""
            assert "KeyboardInterrupt" not in errors
            assert "train.py" not in errors
        else:
            running.kill()
    assert len(ranks) == 2
    late = time.monotonic() + WAITS_S
    while any(map(lives, ranks)):
        assert time.monotonic() < late
        time.sleep(0.1)


WAITS_S = 120  # much longer than it takes, also where the machine is busy


def lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.soak
@pytest.mark.parametrize(
    "launcher", [(*OURS, "-n", "2", "--max-restarts", "1"), (*TORCHRUN, "--max-restarts=1", *OURS, "--mode", "one")]
)
def test_ranks_that_torchrun_restarts_see_what_the_first_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Sequence[str]
) -> None:
    # torch 2.13 gives ranks that it restarts the store of those before, where they find addresses of the dead.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    body = """
        epoch()
        if not os.path.exists("tried"):
            open("tried", "w").close()
            sys.exit(7)
        epoch()
    """
    done = launch(tmp_path, body, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert "2 ranks train as one process" in done.stderr
    assert len(done.stdout.splitlines()) == 5
    assert "10 optimizer steps" in done.stderr
