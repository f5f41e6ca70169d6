"""What a shadow writes, and sees of it: a program does the same there as where it is alone."""

import bz2
import csv
import glob
import io
import json
import logging
import os
import pickle
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_patch.running.past import Past
from ddp_patch.running.shadow import shadowed


def best_checkpoint() -> None:
    torch.save({"a": torch.ones(3)}, "last.pt")
    shutil.copyfile("last.pt", "best.pt")
    os.rename("last.pt", "epoch1.pt")
    assert torch.load("best.pt")["a"].sum() == 3


def made_anew() -> None:
    shutil.rmtree("there", ignore_errors=True)
    os.makedirs("there")
    assert os.listdir("there") == []
    torch.save(1, "there/model.pt")


def open_files() -> None:
    with open("best.pt", "wb") as file:
        torch.save(torch.ones(2), file)
    with open("best.pt", "rb") as file:
        assert torch.load(file).sum() == 2


def appended() -> None:
    with open("there/log.txt", "a") as file:
        file.write("more\n")
    with Path("there/log.txt").open("r+") as file:
        file.seek(1)
        file.write("X")
    assert Path("there/log.txt").read_text() == "oXe\nmore\n"


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


def removed() -> None:
    os.remove("there/log.txt")
    assert not Path("there/log.txt").exists()
    with pytest.raises(FileNotFoundError):
        Path("there/log.txt").read_text()
    with pytest.raises(FileNotFoundError):
        os.unlink("there/log.txt")
    assert os.listdir("there") == ["deep"]
    assert os.path.getsize("there/deep/data.bin") == 4


def linked() -> None:
    Path("model_1.pt").write_bytes(b"1")
    with suppress(FileNotFoundError):
        os.unlink("latest.pt")
    os.symlink("model_1.pt", "latest.pt")
    assert os.path.islink("latest.pt")
    assert Path("latest.pt").read_bytes() == b"1"
    assert Path("latest.pt").resolve() == Path("model_1.pt").resolve()
    os.link("model_1.pt", "hard.pt")
    os.symlink("there/deep", "short")
    Path("short/new.bin").write_bytes(b"2")
    assert Path("there/deep/new.bin").read_bytes() == b"2"


def moved() -> None:
    shutil.move("there/deep", "elsewhere")
    shutil.copytree("elsewhere", "copy")
    os.replace("copy/data.bin", "elsewhere/data.bin")
    os.rmdir("copy")
    assert sorted(glob.glob("**/*", recursive=True)) == ["elsewhere", "elsewhere/data.bin", "there", "there/log.txt"]


def looked_for() -> None:
    Path("there/new.txt").touch()
    os.remove("there/log.txt")
    assert sorted(map(str, Path().rglob("*"))) == ["there", "there/deep", "there/deep/data.bin", "there/new.txt"]
    assert list(Path("there").glob("*.txt")) == [Path("there/new.txt")]
    assert sorted(each.name for each in Path("there").iterdir()) == ["deep", "new.txt"]


def written_and_renamed() -> None:
    with tempfile.NamedTemporaryFile("w", dir="there", delete=False) as file:
        file.write("whole")
    os.replace(file.name, "there/state.txt")
    os.utime("there/state.txt", (1, 1))
    os.chmod("there/log.txt", 0o600)
    assert os.stat("there/state.txt").st_mtime == 1
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "x").write_text("1")
        assert len(os.listdir(folder)) == 1
    assert not os.path.exists(folder)


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


def refused() -> None:
    with pytest.raises(FileExistsError):
        os.mkdir("there")
    with pytest.raises(FileExistsError):
        Path("there/log.txt").touch(exist_ok=False)
    with pytest.raises(OSError, match="not empty"):
        os.rmdir("there")
    with pytest.raises(IsADirectoryError):
        Path("there").write_text("")
    with pytest.raises(FileNotFoundError):
        Path("nowhere/a.txt").write_text("")
    with pytest.raises(FileNotFoundError):
        os.rename("nothing", "something")
    with pytest.raises(NotADirectoryError):
        os.listdir("there/log.txt")
    assert not os.access("nothing", os.F_OK)


PROGRAMS: list[Callable[[], None]] = [
    best_checkpoint,
    made_anew,
    open_files,
    appended,
    in_a_new_folder,
    removed,
    linked,
    moved,
    looked_for,
    written_and_renamed,
    archives,
    arrays_and_logs,
    refused,
]


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
def test_a_shadow_sees_what_it_made_and_leaves_nothing(
    program: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, shadow, scratch = (tmp_path / name for name in ("alone", "shadow", "scratch"))
    for folder in (alone, shadow, scratch):
        folder.mkdir()
    monkeypatch.chdir(before(alone))
    program()
    monkeypatch.chdir(before(shadow))
    untouched = tree(str(shadow))
    with shadowed(1, str(scratch), keep=True):
        program()
        seen = tree(str(shadow))
        os.chdir(str(shadow))
    assert seen == tree(str(alone))
    assert tree(str(shadow)) == untouched


def test_two_programs_one_after_the_other_are_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, shadow, scratch = (tmp_path / name for name in ("alone", "shadow", "scratch"))
    for folder in (alone, shadow, scratch):
        folder.mkdir()
    order = [best_checkpoint, open_files, in_a_new_folder, linked, arrays_and_logs, made_anew]
    monkeypatch.chdir(before(alone))
    for program in order:
        program()
    monkeypatch.chdir(before(shadow))
    with shadowed(1, str(scratch), keep=True):
        for program in order:
            program()
        seen = tree(str(shadow))
    assert seen == tree(str(alone))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_shadow_sees_the_world_as_it_was_before_the_first_rank_changed_it(
    program: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, scratch = tmp_path / "here", tmp_path / "scratch"
    here.mkdir()
    scratch.mkdir()
    monkeypatch.chdir(before(here))
    untouched = tree(str(here))
    with shadowed(0, str(scratch), keep=True):
        program()
    made = tree(str(here))
    with shadowed(1, str(scratch), keep=True):
        os.chdir(str(here))
        assert tree(str(here)) == untouched
        program()
        os.chdir(str(here))
        assert tree(str(here)) == made
    assert tree(str(here)) == made


def test_a_pipe_is_not_read_to_be_kept(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    past = Past(str(tmp_path / "scratch"))
    past.keep(str(pipe), in_place=True)  # reading it would wait for ever
    assert past.lies(str(pipe)) == str(pipe)
