"""What a framework's module describes, and how it is measured on ranks."""

import faulthandler
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

from quick import run_ranks
from zoo import seed_ambient

from ddp_patch import autopatch
from frameworks.kinds import KINDS, Batch

__all__ = ["EPOCHS", "HANGS", "Epochs", "Framework", "Measured", "Raised", "Seen", "measure"]

Epochs: TypeAlias = list[list[Batch]]  # what a rank's training step saw: epochs of batches

How = Literal["patched", "autopatched", "unpatched"]

HANGS = "hangs"
START_S = 90.0  # for ranks to start, and to import the framework
# For one loader; one that does not hang takes less than one.
LIMIT_S: dict[How, float] = {"patched": 60.0, "autopatched": 60.0, "unpatched": 15.0}

# Three passes as they come, and one of which the user says that it is epoch 1, as the second was.
EPOCHS: tuple[int | None, ...] = (None, None, None, 1)


@dataclass(frozen=True)
class Framework:
    """A framework and how a loader is handed to it.

    Attributes:
        packages: The distributions whose versions the table shows.
        passes: Called on every rank with a finished, unpatched loader, whether to patch it, and what epochs to pass
            over: None for the next one, or a number that is set by ``set_epoch``, in the way that the framework's
            users have. It hands the loader to the framework as its documentation says, trains a tiny model, and
            returns what the training step saw.
        moves: Whether the framework itself puts batches on the device.
        launch: Runs a function on ranks: ``launch(fn, world_size, *args)``, with ``fn(rank, world_size, *args)``;
            what it returns is not looked at.
    """

    packages: tuple[str, ...]
    passes: Callable[[Any, bool, Sequence[int | None]], Epochs]
    moves: bool
    launch: Callable[..., object] = run_ranks

    @property
    def versions(self) -> str:
        """The packages' versions."""
        return ", ".join(f"{package} {version(package).partition('+')[0]}" for package in self.packages)


@dataclass(frozen=True)
class Raised:
    """What ended a rank's training: an error's name, or ``HANGS``."""

    error: str
    report: str


@dataclass(frozen=True)
class Seen:
    """What a rank's training steps saw, and under autopatch what became of the loaders.

    Attributes:
        epochs: All batches.
        fates: What the summary says of each loader.
    """

    epochs: Epochs
    fates: set[str] = field(default_factory=set)


Case: TypeAlias = tuple[str, How]  # a kind's name, and what is done to its loader
Measured: TypeAlias = "dict[Case, Seen | Raised]"


def measure(module: str, world_size: int) -> list[Measured]:
    """Train with every kind of loader, in each way, and return what each rank saw."""
    # Ray's modules ask whether loaders are patched, which under autopatch patches them.
    ways: list[How] = ["patched", *([] if module.startswith("ray_") else ["autopatched"]), "unpatched"]  # type: ignore[list-item]  # mypy widens the text
    ranks: list[Measured] = [{} for _ in range(world_size)]
    # After an error a framework may leave its ranks out of step: what is left is measured on new ones.
    while left := [(kind.name, how) for how in ways for kind in KINDS if (kind.name, how) not in ranks[0]]:
        for rank, found in zip(ranks, _measured_on_new_ranks(module, world_size, left), strict=True):
            rank |= found
    return ranks


def _measured_on_new_ranks(module: str, world_size: int, cases: list[Case]) -> list[Measured]:
    """Go through the cases until one raises an error or hangs."""
    from frameworks import framework

    with TemporaryDirectory() as folder:
        failure = None
        try:
            timeout = START_S + sum(LIMIT_S[how] for _, how in cases)
            framework(module).launch(_on_rank, world_size, module, cases, folder, timeout=timeout)
        except Exception as error:  # noqa: BLE001 - raised again, but for a hang
            failure = error
        reports = [_reports_in(Path(folder, str(rank))) for rank in range(world_size)]
    done = min(map(len, reports))
    ranks: list[Measured] = [dict(zip(cases, found[:done], strict=False)) for found in reports]
    if failure is not None:
        _, how = stopped_at = cases[done]
        if how != "unpatched":
            raise failure
        for rank in ranks:
            rank[stopped_at] = Raised(HANGS, str(failure))
    return ranks


def _on_rank(rank: int, world_size: int, module: str, cases: Sequence[Case], folder: str) -> None:
    """Write down what this rank sees, case by case, until one raises an error."""
    from frameworks import framework

    warnings.simplefilter("ignore")  # frameworks warn of small data, of CPUs and of their own deprecations
    passes = framework(module).passes
    kinds = {kind.name: kind for kind in KINDS}
    for name, how in cases:
        seed_ambient(100 + rank)
        seen: Seen | Raised
        with _time_limit(LIMIT_S[how]):
            try:
                with autopatch() if how == "autopatched" else nullcontext() as summary:
                    epochs = passes(kinds[name].make(), how == "patched", EPOCHS if how == "patched" else EPOCHS[:-1])
                seen = Seen(epochs, {record.fate for record in summary.records} if summary else set())
            except Exception as error:  # noqa: BLE001 - whatever a framework raises is its result
                seen = Raised(type(error).__name__, traceback.format_exc())
        with Path(folder, str(rank)).open("ab") as file:
            pickle.dump(seen, file)
        if isinstance(seen, Raised):
            return


def _reports_in(path: Path) -> list[Seen | Raised]:
    reports: list[Seen | Raised] = []
    if path.exists():
        with path.open("rb") as file:
            while file.peek(1):
                reports.append(pickle.load(file))  # noqa: S301 - our own rank's
    return reports


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """End this process if the body takes too long, wherever it hangs."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
