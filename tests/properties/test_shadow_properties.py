"""Programs of random steps leave the same tree in a shadow's world, and meet the same errors on the way."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from ddp_patch.running.overlay import shadowed

TOLD_APART = (FileNotFoundError, FileExistsError)
NAMES = st.sampled_from(["a", "b", "kept", "kept/x", "kept/sub", "kept/sub/y", "a/b", "b/a", "link", "./kept//x"])


def write(path: str) -> None:
    Path(path).write_text("w")


def append(path: str) -> None:
    with open(path, "a") as file:
        file.write("+")


def change(path: str) -> None:
    with open(path, "r+") as file:
        file.write("c")


def exclusive(path: str) -> None:
    with open(path, "x") as file:
        file.write("new")


def read(path: str) -> str:
    return Path(path).read_text()


def names(path: str) -> list[str]:
    return sorted(os.listdir(path))


def entries(path: str) -> list[tuple[str, str, bool, bool]]:
    with os.scandir(path) as found:
        return sorted((each.name, each.path, each.is_dir(), each.is_symlink()) for each in found)


def link(path: str, other: str) -> None:
    os.symlink(os.path.basename(other) or "a", path)


OF_ONE: list[Callable[[str], Any]] = [
    *(write, append, change, exclusive, read, names, entries),
    *(os.mkdir, os.remove, os.rmdir, os.makedirs, shutil.rmtree, os.path.exists, os.path.isdir, os.path.islink),
]
OF_TWO: list[Callable[[str, str], Any]] = [os.rename, os.replace, shutil.copyfile, shutil.move, link, os.link]
STEPS = st.one_of(
    st.tuples(st.sampled_from(OF_ONE), NAMES),
    st.tuples(st.sampled_from([names, entries]), st.just(".")),
    st.tuples(st.sampled_from(OF_TWO), NAMES, NAMES),
)


def _now(function: Any) -> Any:
    """Return what has a function's name now: within a shadow's world it is another one."""
    module = sys.modules[function.__module__]
    return getattr(os if module.__name__ == "posix" else module, function.__name__)


def run(program: list[Any], folder: str) -> list[object]:
    """Return what each step gives, or the error that it raises; then what is in the folder."""
    seen: list[object] = []
    before = os.getcwd()
    os.chdir(folder)
    for does, *paths in program:
        try:
            seen.append(_now(does)(*paths))
        except OSError as error:  # shutil.Error is one
            # Of two paths, either may be told first; rmtree of a link is another error where it goes by paths.
            kinds = TOLD_APART if len(paths) == 1 and does is not shutil.rmtree else ()
            seen.append(next((kind for kind in kinds if isinstance(error, kind)), OSError))
    tree = [(place, sorted(folders), sorted(files)) for place, folders, files in os.walk(".")]
    contents = [
        Path(place, name).read_text()
        for place, _, files in sorted(tree)
        for name in files
        if os.path.isfile(Path(place, name))
    ]
    os.chdir(before)
    return [*seen, sorted(tree), contents]


def prepared(folder: str) -> str:
    Path(folder, "kept", "sub").mkdir(parents=True)
    Path(folder, "kept", "x").write_text("x")
    Path(folder, "kept", "sub", "y").write_text("y")
    return folder


@given(st.lists(STEPS, max_size=12))
@example([(exclusive, "kept/x"), (append, "kept/x")])  # what is kept is a second name of it
@example([(os.rename, "kept/x", "b"), (append, "b")])
@example([(os.link, "kept/x", "a"), (append, "a")])
@example([(link, "a", "a"), (entries, ".")])
def test_a_program_does_the_same_in_a_shadows_world_before_and_after_the_first_rank(program: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as here:
        alone_saw = run(program, prepared(alone))
        untouched = run([], prepared(here))
        with tempfile.TemporaryDirectory() as scratch:
            Path(scratch, "rank-3").mkdir()  # whoever leaves last would remove the folder
            with shadowed(1, scratch):
                assert run(program, here) == alone_saw
            assert run([], here) == untouched
            with shadowed(0, scratch):
                assert run(program, here) == alone_saw
            made = run([], here)
            with shadowed(2, scratch):
                assert run(program, here) == alone_saw
            assert run([], here) == made
