"""What a framework's module describes, and what its training steps see on ranks."""

import pickle
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from quick import run_ranks
from zoo import seed_ambient

from ddp_patch import autopatch
from frameworks.kinds import KINDS, Batch

__all__ = ["Epochs", "Framework", "Seen", "measure"]

Epochs: TypeAlias = list[list[Batch]]  # what a rank's training step saw: epochs of batches

# Three passes as they come, and one of which the user says that it is epoch 1, as the second was.
EPOCHS: tuple[int | None, ...] = (None, None, None, 1)


@dataclass(frozen=True)
class Framework:
    """A framework and how a loader is handed to it.

    Attributes:
        packages: The distributions whose versions the page's table shows.
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
class Seen:
    """What a rank's training steps saw, and under autopatch what became of the loaders."""

    epochs: Epochs
    fates: set[str] = field(default_factory=set)


def measure(module: str, world_size: int) -> list[dict[tuple[str, str], Seen]]:
    """Train with every kind of loader, patched and under autopatch, and return what each rank saw."""
    from frameworks import framework

    with TemporaryDirectory() as folder:
        framework(module).launch(_on_rank, world_size, module, folder, timeout=600)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]  # noqa: S301 - ours


def _on_rank(rank: int, world_size: int, module: str, folder: str) -> None:
    from frameworks import framework

    warnings.simplefilter("ignore")  # frameworks warn of small data, of CPUs and of their own deprecations
    found = {}
    # Ray's modules ask whether loaders are patched, which under autopatch patches them.
    for how, kind in product(("patched",) if module.startswith("ray_") else ("patched", "autopatched"), KINDS):
        seed_ambient(100 + rank)
        is_patched = how == "patched"
        with nullcontext() if is_patched else autopatch() as summary:
            epochs = framework(module).passes(kind.make(), is_patched, EPOCHS if is_patched else EPOCHS[:-1])
        found[kind.name, how] = Seen(epochs, {record.fate for record in summary.records} if summary else set())
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
