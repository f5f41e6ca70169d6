"""How large the package is, and how many of its classes one follows to see what happens.

Run it with ``nox -s size``. Lines of code are those that hold a token of a statement: no comments, no docstrings. A
class counts as followed where one of its functions runs, or one of its objects is made, in one of the examples below.
"""

import ast
import io
import sys
import tempfile
import threading
import tokenize
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch
from pages import markdown
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

import ddp_patch
from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import RankMismatchError
from ddp_patch.testing import run_ranks

HERE = Path(__file__).parents[1]
PACKAGE = Path(ddp_patch.__file__).parent
# What is on top of the core: each of these uses it, and it uses none of them.
ON_TOP = ("auditing", "samplers", "integrations", "testing", "running")
N, WORKERS = 64, 2
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def lines_of_code(text: str) -> int:
    """Return how many lines of a module hold code."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            documentation.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for one in tokens if one.type not in LAYOUT for line in range(one.start[0], one.end[0] + 1)}
    return len(code - documentation)


def classes_in(text: str) -> int:
    """Return how many classes a module defines."""
    return sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(text)))


def sizes() -> Iterator[tuple[str, int, int, int]]:
    """Yield each room's name, modules, lines of code and classes; then those of the core, of all, and of the tests."""
    rooms: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        rooms.setdefault(parts[0] if len(parts) > 1 else "", []).append(path)
    for room, paths in rooms.items():
        yield f"{room}/" if room else "top level", *size(paths)
    yield "core", *size([path for room, paths in rooms.items() if room not in ON_TOP for path in paths])
    yield "package", *size([path for paths in rooms.values() for path in paths])
    yield "tests/", *size(sorted((HERE / "tests").rglob("*.py")))


def size(paths: list[Path]) -> tuple[int, int, int]:
    """Return how many modules, beside ``__init__``, lines of code and classes some files have."""
    texts = [path.read_text(encoding="utf-8") for path in paths]
    modules = sum(path.stem != "__init__" for path in paths)
    return modules, sum(map(lines_of_code, texts)), sum(map(classes_in, texts))


# ---- which classes one follows ----


@contextmanager
def traced(seen: set[str]) -> Iterator[None]:
    """Add the package's classes whose functions run, or whose objects are made, in this thread and those it begins."""

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            seen.update(classes_of(frame))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def classes_of(frame: FrameType) -> Iterator[str]:
    """Yield the package's class that a function is of: where it is written, or whose object it makes."""
    code = frame.f_code
    if Path(code.co_filename).is_relative_to(PACKAGE):
        *outer, _function = code.co_qualname.replace("<locals>.", "").split(".")
        named = [name for name in outer if name.lstrip("_")[:1].isupper()]
        if named:
            yield f"{Path(code.co_filename).stem}.{named[-1]}"
    elif code.co_name in {"__init__", "__new__"} and code.co_argcount:
        made = frame.f_locals.get(code.co_varnames[0])
        kind = made if isinstance(made, type) else type(made)
        if kind.__module__.startswith("ddp_patch."):
            yield f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"


class Numbers(Dataset[int]):
    """The numbers below N."""

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return N


def of_an_index() -> dict[str, set[str]]:
    """Follow the first batch of a batch sampler's indices, of one epoch."""
    batches = BatchSampler(RandomSampler(Numbers()), 4, drop_last=False)
    loader = patch_dataloader_to_ddp(DataLoader(Numbers(), batch_sampler=batches), rank=0, num_replicas=2)
    seen: set[str] = set()
    with traced(seen):
        next(iter(loader))
    return {"an index of a batch sampler": seen}


class Stream(IterableDataset[int]):
    """The same numbers, one after the other."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class Traces:
    """Follows a worker from its beginning, and writes down what it saw after every item.

    Args:
        folder: Where each worker writes a file.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._seen = folder, set[str]()

    def __call__(self, worker: int) -> None:
        """Begin, in a worker."""
        self._file = Path(self._folder, str(worker))
        self._following = traced(self._seen)  # until the worker ends
        self._following.__enter__()

    def collate(self, items: list[int]) -> torch.Tensor:
        """Return a batch; write down what was seen so far."""
        if hasattr(self, "_file"):
            self._file.write_text("\n".join(self._seen))
        return torch.tensor(items)


def of_a_stream() -> dict[str, set[str]]:
    """Follow a stream that workers read: in the main process, and in a worker, to the end of one epoch."""
    main: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        traces = Traces(folder)
        loader = patch_dataloader_to_ddp(
            DataLoader(Stream(), batch_size=4, num_workers=WORKERS, worker_init_fn=traces, collate_fn=traces.collate),
            rank=0,
            num_replicas=2,
        )
        with traced(main):
            for _ in loader:
                pass
        worker = {name for path in Path(folder).iterdir() for name in path.read_text().split()}
    return {"an item of a stream, in the main process": main, "an item of a stream, in a worker": worker}


def of_a_state() -> dict[str, set[str]]:
    """Follow the position of a shuffled loader into a file's values, and back."""

    def patched() -> DataLoader[int]:
        return patch_dataloader_to_ddp(DataLoader(Numbers(), shuffle=True, batch_size=4), rank=0, num_replicas=2)

    loader, seen = patched(), set[str]()
    next(iter(loader))
    resumed = patched()
    with traced(seen):
        restore_loader(resumed, loader_state(loader))
    return {"loader_state and restore_loader": seen}


def told(rank: int, _world_size: int) -> set[str]:
    """Iterate in another order on each rank until that is told; return which classes one follows."""
    order, seen = Listed(range(N)), set[str]()
    loader = patch_dataloader_to_ddp(DataLoader(Numbers(), sampler=order, batch_size=2))
    order.items = list(range(rank, N)) + list(range(rank))
    with traced(seen), suppress(RankMismatchError):
        for _ in range(100):
            list(loader)
    return seen


class Listed(Sampler[int]):
    """A sampler of items that may be replaced.

    Args:
        items: The items.
    """

    def __init__(self, items: Sequence[int]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


def of_a_mismatch() -> dict[str, set[str]]:
    """Follow two ranks' orders that differ, to the error."""
    return {"a mismatch of orders": set().union(*run_ranks(told, 2))}


FOLLOWED: list[Callable[[], dict[str, set[str]]]] = [of_an_index, of_a_stream, of_a_state, of_a_mismatch]


def main() -> None:
    """Print both tables; with ``--names`` the classes as well."""
    warnings.simplefilter("ignore")
    rows = [[name, *(f"{count:,}" for count in counts)] for name, *counts in sizes()]
    print(markdown(["room", "modules", "lines of code", "classes"], rows))
    followed: dict[str, set[str]] = {}
    for follow in FOLLOWED:
        followed |= follow()
    print()
    print(markdown(["to follow", "classes"], [[what, str(len(seen))] for what, seen in followed.items()]))
    if "--names" in sys.argv:
        for what, seen in followed.items():
            print(f"\n{what}\n  " + "\n  ".join(sorted(seen)))


if __name__ == "__main__":
    main()
