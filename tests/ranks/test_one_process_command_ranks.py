"""``ddp-patch run -n``: it starts the ranks, lets one speak, keeps exit codes, and names what goes wrong."""

import os
import signal
import subprocess
import sys
import textwrap
import time
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


def launch(
    folder: Path, body: str, *options: str, ranks: int | None = 2, before: str = TRAINING
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(textwrap.dedent(before) + textwrap.dedent(body))
    count = [] if ranks is None else ["-n", str(ranks)]
    command = [sys.executable, "-m", "ddp_patch", "run", *count, *options, "train.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)  # noqa: S603 - our own


def test_ranks_print_and_write_once_what_one_rank_does(tmp_path: Path) -> None:
    body = """
        import shutil, time
        from pathlib import Path
        time.sleep(float(rank))  # one rank is late
        run = Path("runs", "today")
        run.mkdir(parents=True)  # raises if it is there
        order = {word: place for place, word in enumerate({"a", "set", "of", "words"})}
        shutil.rmtree("old")
        with open("log.txt", "a") as log:
            for number in range(2):
                epoch()
                log.write(f"epoch {number}\\n")
        torch.save(model.state_dict(), run / "last.pt")
        os.replace(run / "last.pt", run / "best.pt")
        with open(run / "best.pt", "rb") as file:
            print("weights", torch.load(file)["weight"].shape, sorted(os.listdir(".")), order)
        sys.stderr.write(f"speaks {rank}\\n")
        sys.exit(3)
    """
    done, folders = [], [tmp_path / str(ranks) for ranks in (1, 2)]
    for ranks, folder in enumerate(folders, 1):
        (folder / "old").mkdir(parents=True)
        (folder / "old" / "model.pt").touch()
        (folder / "log.txt").write_text("before\n")
        done.append(launch(folder, body, "--keep-shadows", str(tmp_path / f"shadows-{ranks}"), ranks=ranks))
    alone, two = done
    assert alone.returncode == two.returncode == 3, two.stderr
    assert two.stdout.splitlines()[:3] == alone.stdout.splitlines()[:3]
    assert len(two.stdout.splitlines()) == 4
    assert two.stdout.split("[", 2)[2:] == alone.stdout.split("[", 2)[2:]
    assert [line for line in two.stderr.splitlines() if "speaks" in line] == ["speaks 0"]
    assert "2 ranks train as one process" in two.stderr
    assert "train.py:12 DataLoader, shuffled, 30 samples: each batch divided over 2 ranks, 5 steps" in two.stderr
    assert "train.py:12 DataLoader, in order, 11 samples: whole on every rank, 3 steps" in two.stderr
    assert "10 optimizer steps" in two.stderr
    trees = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) for folder in folders]
    assert trees[0] == trees[1]
    assert {(folder / "log.txt").read_text() for folder in folders} == {"before\nepoch 0\nepoch 1\n"}
    shadows = tmp_path / "shadows-2"
    assert "speaks 1" in (shadows / "rank-1.log").read_text()
    assert next(shadows.glob("rank-1/**/best.pt")).is_file()


WRITING = """
    import csv, json, logging, os, pickle, shutil, tempfile, zipfile
    from pathlib import Path
    import numpy as np
    import torch

    shutil.rmtree("out", ignore_errors=True)
    os.makedirs("out/logs")
    os.chdir("out")
    data = torch.utils.data.DataLoader(torch.arange(12.0).reshape(12, 1), batch_size=4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    for epoch in range(5):
        weights = sum(torch.stack([batch.sum() for batch in data]))
        torch.save({"epoch": epoch, "weights": weights}, f"last-{epoch}.pt")  # saved by name, then copied
        shutil.copyfile(f"last-{epoch}.pt", "best.pt")
        with open(f"open-{epoch}.pt", "wb") as file:  # to an open file
            torch.save(weights, file)
        folder = Path(f"epoch-{epoch}")  # in a new folder
        folder.mkdir(exist_ok=False)
        (folder / "config.json").write_text(json.dumps({"epoch": epoch}))
        with open(f"metrics-{epoch}.csv", "w", newline="") as file:  # begun, then added to
            csv.writer(file).writerow(["epoch"])
        with open(f"metrics-{epoch}.csv", "a", newline="") as file:
            csv.writer(file).writerow([epoch])
        np.savez(f"arrays-{epoch}.npz", weights=weights.numpy())
        with tempfile.NamedTemporaryFile("wb", dir=".", delete=False) as file:  # written aside, then put there
            pickle.dump(epoch, file)
        os.replace(file.name, f"state-{epoch}.pkl")
        handler = logging.FileHandler(f"logs/{epoch}.log")
        handler.emit(logging.makeLogRecord({"msg": f"epoch {epoch}"}))
        handler.close()
        with zipfile.ZipFile(f"all-{epoch}.zip", "w") as archive:
            archive.writestr(zipfile.ZipInfo("epoch"), str(epoch))
        number = os.open(f"raw-{epoch}.part", os.O_WRONLY | os.O_CREAT | os.O_EXCL)  # without Python's files
        os.write(number, b"raw" * epoch)
        os.close(number)
        os.rename(f"raw-{epoch}.part", f"raw-{epoch}")
        shutil.copytree(folder, f"copy-{epoch}")  # copied, changed in place, linked
        with open(f"copy-{epoch}/config.json", "r+") as file:
            file.write("[")
        os.symlink(f"copy-{epoch}", "newest.part")
        os.replace("newest.part", "newest")
        shutil.move("../given.txt", "there.txt") if epoch == 0 else None
        if epoch > 2:
            os.remove(f"logs/{epoch - 3}.log")
    found = [str(path) for path in sorted(Path().rglob("*")) if path.is_file() and "newest" not in str(path)]
    print(len(found), torch.load("best.pt"), Path("newest/config.json").read_text(), found)
"""


def tree(folder: Path) -> dict[str, bytes | str]:
    """Return what is in a folder, but for times."""
    found = {path: os.readlink(path) if path.is_symlink() else "a folder" for path in folder.rglob("*")}
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else what
        for path, what in found.items()
    }


def test_fifty_files_of_ten_idioms_are_the_same_on_one_rank_and_on_four(tmp_path: Path) -> None:
    done, trees = [], []
    for ranks in (1, 4):
        folder = tmp_path / str(ranks)
        (folder / "out").mkdir(parents=True)
        (folder / "out" / "old.pt").write_bytes(b"old")
        (folder / "given.txt").write_text("given")
        done.append(launch(folder, WRITING, ranks=ranks, before=""))
        assert done[-1].returncode == 0, done[-1].stderr
        trees.append(tree(folder))
    assert trees[0] == trees[1]
    assert done[0].stdout == done[1].stdout
    assert int(done[0].stdout.split()[0]) == 50
    assert not {"given.txt", "out/old.pt"} & trees[0].keys()


def test_a_script_without_loader_and_optimizer_speaks_and_writes_once_and_does_not_see_its_rank(tmp_path: Path) -> None:
    body = """
        import os
        open("out.txt", "a").write("x")
        import torch.distributed as dist
        try:
            dist.init_process_group("gloo")
        except Exception as error:
            print(type(error).__name__, "--mode ranks" in str(error), "RANK" in os.environ)
        os.environ["RANK"]
    """
    done = launch(tmp_path, body, before="")
    assert (done.returncode, done.stdout) == (1, "WorldError True False\n")
    assert (tmp_path / "out.txt").read_text() == "x"
    assert "every rank computed all of each batch" in done.stderr
    assert "KeyError: 'RANK'" in done.stderr
    assert "the script sees no RANK" in done.stderr
    assert "pass --mode ranks" in done.stderr


@pytest.mark.parametrize(
    ("body", "told"),
    [
        soaked(  # tests/ranks/test_one_process_ranks.py has more such
            """
            epoch(4 if rank == "1" else 100)
            epoch()
            """,
            [
                "RankMismatchError",
                "rank 0 calls backward()",
                "rank 1 begins to iterate a loader that is whole on every rank at train.py",
                "after 4 calls of backward() and 4 optimizer steps",
            ],
        ),
        pytest.param(
            """
            for batch in train:
                model(batch).view(7, 1)
                epoch(1)
            """,
            [
                "RuntimeError",
                "each rank has a part of each batch here, this one",
                "of 7 samples",
                "--whole train.py:12",
            ],
            id="a script that counts on the batch size",
        ),
        soaked(
            """
            epoch()
            if rank == "1":
                raise LookupError("of one rank")
            epoch()
            """,
            ["[rank 1] LookupError: of one rank", "rank 1 ended first"],
        ),
    ],
)
def test_what_goes_wrong_is_told(tmp_path: Path, body: str, told: list[str]) -> None:
    done = launch(tmp_path, textwrap.dedent(body))
    assert done.returncode != 0, done.stderr
    for words in told:
        assert words in done.stderr


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        pytest.param(
            """
            import time
            open("model.txt", "w").write("of the check")
            open(f"events.{time.time_ns()}.log", "w").write("begun")
            import tempfile
            cache = os.path.expanduser("~/.aside")
            os.makedirs(cache, exist_ok=True)
            for folder in (cache, tempfile.gettempdir()):
                tempfile.NamedTemporaryFile(dir=folder, delete=False).close()
            for epoch in range(2):
                for batch in train:
                    optimizer.zero_grad()
                    ((model(batch) * (batch > 0)).pow(2).sum() / (batch > 0).sum()).backward()
                    optimizer.step()
                print("epoch", epoch)
            """,
            1,
            [
                "steps: differs from step 2 on, first in",
                "in double precision",
                "printed lines: the same, 2 in these steps",
                "files: the same, 2 in these steps",
                "Not the same. The parts' losses have the mean",
                "it is a loss of the whole batch",
            ],
            id="a ratio of sums",
        ),
        soaked(
            """
            model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            epoch()
            """,
            0,
            ["without dropout: the same in 5 steps", "The same but for dropout."],
        ),
        soaked(
            """
            model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            train = DataLoader(data[:28], batch_size=7, shuffle=True)
            epoch()
            epoch(1)
            """,
            1,
            ["without batch normalisation: the same in 5 steps", "Batch normalisation sees a part of each batch."],
        ),
        soaked(
            """
            model = model.float()
            for batch in train:
                optimizer.zero_grad()
                model(batch.float()).pow(2).mean().backward()
                optimizer.step()
            """,
            0,
            ["apart at most, in single precision", "The same, within 0.001 in single precision."],
        ),
        soaked("epoch()", 0, ["steps: the same in 5 steps", "printed lines: the same, 2", "\nThe same."]),
        soaked(
            """
            for batch in train:
                print(len(batch))
                optimizer.zero_grad()
                model(batch).pow(2).mean().backward()
                optimizer.step()
            """,
            1,
            ["steps: the same in 5 steps", "printed lines: differ, first '7' and '4'", "a number of a part"],
        ),
        soaked(
            """
            for batch in train:
                optimizer.zero_grad()
                model(batch + torch.rand(len(batch), 2)).pow(2).mean().backward()
                optimizer.step()
            """,
            1,
            ["The script draws random numbers between its steps"],
        ),
        soaked(
            "model(next(iter(train)).view(7, 2))\nnext(iter(train))", 1, ["No optimizer of torch.optim made a step"]
        ),
        soaked(
            """
            for batch in train:
                model(batch).pow(2).mean().backward()
                optimizer.step()
                if len(batch) > 2:
                    batch.view(7, 2)
            """,
            1,
            ["It fails on 2 ranks, by exit code 1", "view"],
        ),
    ],
)
def test_a_check_says_what_is_so(tmp_path: Path, body: str, code: int, words: list[str]) -> None:
    done = launch(tmp_path, textwrap.dedent(body), "--check", "--steps", "7")
    assert done.returncode == code, done.stdout
    for each in words:
        assert each in done.stdout.replace("\n    ", " ")
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]  # no run has written here


def test_a_check_compares_batch_normalisation_that_sees_the_whole_batch(tmp_path: Path) -> None:
    """torch's takes tensors of accelerators alone: another one stands in its place."""
    body = """
        from torch.distributed.nn.functional import all_reduce

        def forward(self, part):
            rows = torch.tensor(len(part), dtype=part.dtype)
            count, total = all_reduce(rows), all_reduce(part.sum(0))
            mean = total / count
            variance = all_reduce((part - mean).pow(2).sum(0)) / count
            return (part - mean) / (variance + self.eps).sqrt() * self.weight + self.bias

        nn.SyncBatchNorm.forward = forward
        model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = DataLoader(data[:28], batch_size=7, shuffle=True)
        epoch()
        epoch()
    """
    done = launch(tmp_path, textwrap.dedent(body), "--check", "--steps", "7", "--sync-batchnorm")
    assert "steps: the same in 7 steps" in done.stdout, done
    assert "\nThe same." in done.stdout
    assert done.returncode == 0


def started(folder: Path) -> "subprocess.Popen[str]":
    """Start an endless script, whose loader has workers; each rank writes down its process."""
    endless = """
        open(os.path.join(os.environ["FOLDER"], f"{os.getpid()}.pid"), "w").close()
        train = DataLoader(data, batch_size=7, num_workers=1, persistent_workers=True)
        while True:
            epoch()
    """
    (folder / "train.py").write_text(textwrap.dedent(TRAINING) + textwrap.dedent(endless))
    options = ["-n", "2", "--keep-shadows", str(folder / "shadows")]
    return subprocess.Popen(  # noqa: S603 - our own script
        [sys.executable, "-m", "ddp_patch", "run", *options, "train.py"],
        cwd=folder,
        env={**os.environ, "FOLDER": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux' signal at the death of a parent")
@pytest.mark.parametrize("ended_by", ["Ctrl-C", "the launcher's death"])
def test_all_ranks_end(tmp_path: Path, ended_by: str) -> None:
    with started(tmp_path) as running:
        assert running.stdout is not None
        lines = [running.stdout.readline() for _ in range(3)]
        assert lines[2].startswith("loss")
        ranks = {int(path.stem) for path in tmp_path.rglob("*.pid")}  # of the first one, and in the other's shadow
        if ended_by == "Ctrl-C":
            os.killpg(running.pid, signal.SIGINT)
            assert running.wait(WAITS_S) == 130
            assert "Traceback" not in (running.stderr.read() if running.stderr else "")
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
def test_torchrun_restarts_ranks_that_see_what_the_first_one_left(tmp_path: Path) -> None:
    body = """
        epoch()
        if not os.path.exists("tried"):
            open("tried", "w").close()
            sys.exit(7)
        epoch()
    """
    done = launch(tmp_path, body, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5
    assert "10 optimizer steps" in done.stderr


@pytest.mark.soak
def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINING) + "epoch()\n")
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ddp_patch", "run"]
    done = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, *ranks, "--mode", "one", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks train as one process" in done.stderr
    assert len(done.stdout.splitlines()) == 2
