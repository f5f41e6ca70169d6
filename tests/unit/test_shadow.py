"""What a shadow writes, and sees of it: a program does the same there as where it is alone."""

import bz2
import csv
import io
import json
import logging
import os
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_patch.running.overlay import World, kept, shadowed


def best_checkpoint() -> None:
    torch.save({"a": torch.ones(3)}, "last.pt")
    shutil.copyfile("last.pt", "best.pt")
    os.rename("last.pt", "epoch1.pt")
    assert torch.load("best.pt")["a"].sum() == 3


def open_files() -> None:
    with open("best.pt", "wb") as file:
        torch.save(torch.ones(2), file)
    with open("best.pt", "rb") as file:
        assert torch.load(file).sum() == 2


def in_a_new_folder() -> None:
    run = Path("runs") / "today"
    run.mkdir(parents=True, exist_ok=False)
    (run / "config.json").write_text(json.dumps({"lr": 1}))
    with (run / "metrics.csv").open("w", newline="") as file:
        csv.writer(file).writerow([1, 2])
    os.chdir(run)
    assert os.path.exists("config.json")
    assert Path.cwd().name == "today"
    Path("beside").touch()
    os.chdir("../..")
    assert sorted(each.name for each in run.iterdir()) == ["beside", "config.json", "metrics.csv"]


def archives() -> None:
    with zipfile.ZipFile("all.zip", "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("a"), "1")
    with bz2.open("a.bz2", "wb") as packed:
        packed.write(b"1")
    Path("plain").write_text("1")
    with tarfile.open("all.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a"), io.BytesIO())
    with tarfile.open("all.tar") as tar:
        tar.extractall("out", filter="data")
    assert os.listdir("out") == ["a"]


def arrays_and_logs() -> None:
    np.save("a.npy", np.arange(3))
    np.savetxt("a.txt", np.arange(3))
    np.savez("a.npz", a=np.arange(3))
    assert np.load("a.npy", mmap_mode="r").sum() == 3
    handler = logging.FileHandler("train.log")
    handler.emit(logging.makeLogRecord({"msg": "said"}))
    handler.close()
    with open("p.pkl", "wb") as file:
        pickle.dump([1], file)
    assert Path("train.log").read_text() == "said\n"


PROGRAMS: list[Callable[[], None]] = [*(best_checkpoint, open_files, in_a_new_folder, archives, arrays_and_logs)]


def tree(folder: str) -> dict[str, bytes | str]:
    """Return what is in a folder, as this process sees it."""
    found: dict[str, bytes | str] = {}
    for place, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            path = os.path.join(place, name)
            relative = os.path.relpath(path, folder)
            if os.path.islink(path):
                found[relative] = os.readlink(path)
            elif os.path.isdir(path):
                found[relative] = "folder"
            else:
                with open(path, "rb") as file:
                    found[relative] = file.read()
    return found


def before(folder: Path) -> str:
    """Make what is there before the script."""
    (folder / "there" / "deep").mkdir(parents=True)
    (folder / "there" / "log.txt").write_text("one\n")
    (folder / "there" / "deep" / "data.bin").write_bytes(b"four")
    return str(folder)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_shadow_sees_what_it_made_in_the_world_as_it_was_and_leaves_nothing(
    program: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, here = tmp_path / "alone", tmp_path / "here"
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # as one that is not set: no name of the current folder
    monkeypatch.chdir(before(alone))
    program()
    monkeypatch.chdir(before(here))
    made, untouched = tree(str(alone)), tree(str(here))
    (tmp_path / "scratch" / "rank-3").mkdir(parents=True)  # whoever leaves last would remove the folder
    for rank in (1, 0, 2):  # the first rank is before one of the others, and behind another
        is_first, found = rank == 0, tree(str(here))
        with shadowed(rank, str(tmp_path / "scratch")):
            os.chdir(here)
            assert tree(str(here)) == untouched
            program()
            os.chdir(here)
            assert tree(str(here)) == made
        assert tree(str(here)) == (made if is_first else found)


def test_a_pipe_is_not_read_to_be_kept(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    past = World([str(tmp_path / "scratch")], ())
    kept(past, str, ("changed",), pipe)  # reading it would wait for ever
    assert past.lies(str(pipe)) == str(pipe)
