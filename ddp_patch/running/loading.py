"""Share the reading of each batch: every rank reads some of its samples, and all ranks send each other theirs.

A pass over a loader is torch's own, and the sampler draws on every rank as in one process. What is divided are the
samples of a batch: they are sent before ``collate_fn`` sees them, so that makes the whole batch of them, whatever it
pads, sorts or mixes. The first two batches are read whole, and the parts are tried beside: reading goes on by parts if
that is the same and takes less time than what is sent. Otherwise, every rank reads all, which is always right.
"""

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any
from zlib import crc32

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.weak import WeakIdKeyDictionary

from ddp_patch.compat.private_torch import AroundIterator, has_own_iteration, has_own_iterators, has_thread_workers
from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.loaders.copying import copies_plainly, copy_loader
from ddp_patch.orders.random_states import GlobalState
from ddp_patch.ranks.packing import packed, unpacked
from ddp_patch.running.loader_reports import unpatched
from ddp_patch.running.lockstep import Lockstep
from ddp_patch.running.reading import Part, Reader, Request, Requests, Trial, Way, as_it_is, begin_worker, bounds
from ddp_patch.running.trees import mapped

__all__ = ["Loading"]


_TRIALS = 2  # the first one also opens files and imports
_MEMORY = "/dev/shm"  # noqa: S108 - where Linux has what processes share
_SMALL = 2**13  # bytes that travel with the beginning of an exchange
_SENT, _SHARED, _TOO_LARGE = range(3)  # how bytes are given: with the exchange, in memory, in an exchange of their own


@dataclass(eq=False)
class _Loader:
    """What is known of a loader.

    Attributes:
        name: What errors and exchanges call it.
        number: Which of the script's loaders it is.
        why: Why every rank reads all of its batches, if that is decided.
        way: How the next batch is requested.
        gives_first: Whether the ranks read different batches by themselves, so that all take rank 0's.
        requested: How many batches were requested.
        calls: How many modules the script had called when a batch was requested to be tried.
        gains: What reading by parts would save, in seconds on rank 0, for each batch that was tried.
    """

    name: str
    number: int
    why: str = ""
    way: Way = "trial"
    gives_first: bool = False
    requested: int = 0
    calls: int = 0
    gains: list[float] = field(default_factory=list)


class Loading:
    """Shares the reading of a script's loaders.

    Args:
        lockstep: The ranks.
        tell: Is given a loader, and what was decided on it.

    Attributes:
        seconds: How long this rank has sent and waited for samples.
    """

    def __init__(self, lockstep: Lockstep, tell: Callable[[DataLoader[Any], str], object]) -> None:
        self.seconds: float = 0.0
        self._lockstep, self._tell = lockstep, tell
        self._known: MutableMapping[DataLoader[Any], _Loader] = WeakIdKeyDictionary()
        # Copies whose workers go on from one pass to the next.
        self._kept: MutableMapping[DataLoader[Any], DataLoader[Any]] = WeakIdKeyDictionary()
        self._memory: _Memory | None = None
        self._loaders = 0

    def begin(self, loader: DataLoader[Any], name: str, why: str = "") -> Iterator[Any] | None:
        """Return the iterator of a pass that begins; None if the loader itself makes it.

        Args:
            loader: The loader.
            name: What it is called, the same on every rank.
            why: Why its reading is not to be shared; nothing to find that out.
        """
        if self._lockstep.ranks == 1 or threading.current_thread() is not threading.main_thread():
            return None
        if (known := self._known.get(loader)) is None:
            self._loaders += 1
            known = self._known[loader] = _Loader(name, self._loaders, why or _why_whole(loader))
        with unpatched():  # what is iterated here
            kept = self._kept.get(loader)
            if known.why and kept is None and known.requested and not known.gives_first:
                return None
            if not known.why and known.way == "whole":
                known.way = "trial"
            own = kept
            if own is None:
                own = loader if known.why else self._copied(loader, known)
            if loader.persistent_workers and own is not loader:
                self._kept[loader] = own
            requests: Any = None if own is loader else own.batch_sampler
            return _Pass(iter(own), requests, partial(self._given, loader, known))

    def _copied(self, loader: DataLoader[Any], known: _Loader) -> DataLoader[Any]:
        return copy_loader(
            loader,
            dataset=Reader(loader.dataset, loader.collate_fn),
            batch_sampler=Requests(loader.batch_sampler or (), partial(self._request, known)),
            collate_fn=as_it_is,
            worker_init_fn=partial(begin_worker, loader.worker_init_fn),
            pin_memory=False,
        )

    def _request(self, known: _Loader, batch: Any) -> Request:
        """Make the request of the next batch; the batches after one that is tried are whole until that is taken."""
        known.requested += 1
        ranks, way = self._lockstep.ranks, known.way
        indices = batch if isinstance(batch, list) else list(batch)
        if len(indices) < ranks:
            way = "whole"
        elif way == "trial":
            known.way, known.calls = "whole", self._lockstep.calls
        if way == "part":
            at = bounds(len(indices), ranks)
            indices = indices[at[self._lockstep.rank] : at[self._lockstep.rank + 1]]
        key = torch.initial_seed() % 2**63, known.number, known.requested, self._lockstep.rank
        return Request(way, indices if way == "part" else batch, ranks, key)

    # ---- what a pass gives ----

    def _of_first(self, known: _Loader, given: Any, failure: Exception | None) -> tuple[Any, Exception | None]:
        """Return what rank 0 was given."""
        if self._lockstep.rank:
            given, failure = None, None
        parts, failed = self._exchanged(known, None if given is None else _bytes(given), failure)
        return (None, failed) if failed is not None else (unpacked(parts[0].numpy()), None)

    def _given(
        self, loader: DataLoader[Any], known: _Loader, request: Request | None, given: Any, failure: Exception | None
    ) -> Any:
        """Return a batch of what was read of it, or raise what reading it has raised."""
        in_main = threading.current_thread() is threading.main_thread()
        way = "whole" if request is None else request.way
        if way == "part" and not in_main:
            raise UnsupportedLoaderError(
                f"Taking a batch of {known.name}: the ranks read parts of it, and send each other these in their main "
                "threads alone. Begin its passes in the thread that takes the batches, which then reads all of each; "
                "or pass --except and where the loader is made."
            )
        if way == "part":
            given, failure = self._joined(loader, known, given, failure)
        elif way == "trial" and failure is not None:
            known.way = "whole" if known.why else "trial"
        elif way == "trial":
            trial, given = given, given.batch
            known.why = known.why or ("" if in_main else "it is iterated in another thread")
            if not known.why:
                self._try(loader, known, trial)
        elif not known.requested and failure is None and in_main:
            known.requested += 1
            own = packed(given, by_value=True) if _can_be_sent(given) else b""
            known.gives_first = not self._lockstep.meet(f"takes the first batch of {known.name}", crc32(own))
            self._tell(loader, _told(known))
        if known.gives_first and way != "part" and in_main:
            given, failure = self._of_first(known, given, failure)
        if failure is not None:
            raise failure
        if loader.pin_memory and torch.cuda.is_available():
            return given.pin_memory() if hasattr(given, "pin_memory") else mapped(given, torch.Tensor.pin_memory)
        return given

    def _joined(
        self, loader: DataLoader[Any], known: _Loader, part: Part, failure: Exception | None
    ) -> tuple[Any, Exception | None]:
        """Return the batch of all ranks' parts, or what reading the first of those that failed has raised."""
        begun = time.perf_counter()
        parts, failed = self._exchanged(known, None if failure is not None else part.data, failure)
        self.seconds += time.perf_counter() - begun
        if failed is not None:
            return None, failed
        if part.drew:
            self._tell(loader, _BY_PARTS + _DREW)
        return loader.collate_fn(_samples(parts)), None

    def _exchanged(
        self, known: _Loader, data: torch.Tensor | None, failure: Exception | None
    ) -> tuple[list[torch.Tensor], Exception | None]:
        """Return what each rank has read, and what the first one has raised that could not read."""
        mark = torch.tensor([failure is not None], dtype=torch.uint8, device="cpu")
        own = torch.empty(0, dtype=torch.uint8, device="cpu") if data is None else data
        own = own if failure is None else _bytes(_as_sent(failure))
        self._memory = self._memory or _Memory(self._lockstep)
        found = self._memory.exchanged(f"takes a batch of {known.name}", torch.cat([mark, own]))
        for rank, each in enumerate(found):
            if each[0]:
                own_failed = failure if rank == self._lockstep.rank else None
                return [], own_failed or unpacked(each[1:].numpy())
        return [each[1:] for each in found], None

    # ---- what a trial shows ----

    def _try(self, loader: DataLoader[Any], known: _Loader, trial: Trial) -> None:
        """Find out if the parts of a batch make the batch, and decide how the loader goes on."""
        self._lockstep.meet(f"takes a first batch of {known.name}")
        calls = loader.num_workers == 0 and self._lockstep.calls != known.calls
        why = trial.why or ("its dataset calls a module" if calls else "")
        why = next(filter(None, self._lockstep.gathered(why)), "")
        if not why:
            part = trial.parts[self._lockstep.rank]
            self._exchanged(known, part, None)  # with all that is made once
            begun = time.perf_counter()
            parts, _ = self._exchanged(known, part, None)
            samples = _samples(parts)
            took = time.perf_counter() - begun
            same = [torch.equal(one, other) for one, other in zip(parts, trial.parts, strict=True)]
            found = self._lockstep.gathered((all(same), _collated_again(loader, trial, samples)))
            known.gives_first = not all(same for same, _ in found)
            if known.gives_first:
                why = "the ranks read other samples by themselves"
            elif not all(again for _, again in found):
                why = "its collate_fn does not make the same batch of samples that were sent"
            known.gains += self._lockstep.gathered(_gain(loader, trial, took, self._lockstep.ranks))[:1]
        if not why and len(known.gains) < _TRIALS:
            known.way = "trial"
            return
        if not why and min(known.gains) <= 0:
            why = "sending its samples takes longer than reading them"
        known.why, known.way = why, "whole" if why else "part"
        self._tell(loader, _told(known) + (_DREW if trial.drew and not why else ""))


def _gain(loader: DataLoader[Any], trial: Trial, took: float, ranks: int) -> float:
    """Return how many seconds less a batch takes if it is read by parts, where so many processes run at once."""
    read, made_bytes, collated = trial.seconds
    at_once = max(1, min(loader.num_workers, (os.cpu_count() or 1) // ranks))
    return (read * (1 - 1 / ranks) - made_bytes / ranks) / at_once - took - (collated if loader.num_workers else 0)


def _told(known: _Loader) -> str:
    if not known.why:
        return _BY_PARTS
    return f"whole on every rank ({known.why}{'; all take those of rank 0' if known.gives_first else ''})"


_BY_PARTS = "read by parts"
_DREW = ", each rank with random numbers of its own"


def _why_whole(loader: DataLoader[Any]) -> str:
    """Return why a loader's batches cannot be read by parts, as far as that shows before they are read."""
    kind = type(loader)
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset is iterable"
    if loader.batch_sampler is None:
        return "it makes no batches"
    if has_own_iteration(kind) or has_own_iterators(kind) or not copies_plainly(kind):
        return f"{kind.__name__} iterates in its own way"
    if has_thread_workers(loader):
        return "its workers are threads"
    return "" if getattr(loader, "in_order", True) else "its batches come in any order"


def _bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(packed(value)), dtype=torch.uint8)


def _samples(parts: Sequence[torch.Tensor]) -> list[Any]:
    return list(chain.from_iterable(unpacked(part.numpy()) for part in parts))


def _can_be_sent(value: Any) -> bool:
    try:
        unpacked(packed(value))
        packed(value, by_value=True)
    except Exception:  # noqa: BLE001 - whatever an object of the user's raises
        return False
    return True


def _as_sent(failure: Exception) -> Exception:
    """Return an error that other ranks can raise."""
    return failure if _can_be_sent(failure) else RuntimeError(f"{type(failure).__name__}: {failure}")


def _collated_again(loader: DataLoader[Any], trial: Trial, samples: list[Any]) -> bool:
    """Return whether ``collate_fn`` makes the same batch of samples that were sent, here in the main process."""
    after = GlobalState.capture().copied()
    if trial.numbers is not None:
        trial.numbers.install()
    try:
        again = packed(loader.collate_fn(samples), by_value=True)
        return again == packed(trial.batch, by_value=True)
    except Exception:  # noqa: BLE001 - whatever the user's code raises, it has not where it was tried first
        return False
    finally:
        after.install()


class _Pass(AroundIterator):
    """The iterator of a pass of which the ranks share the reading.

    Args:
        wrapped: The iterator of the loader, or of its copy.
        requests: What the copy was asked for; None where it is the loader's.
        give: Is given the request, what was read, and what reading has raised; returns the batch or raises.
    """

    def __init__(self, wrapped: Any, requests: Requests | None, give: Callable[..., Any]) -> None:
        super().__init__(wrapped)
        self._requests, self._give = requests, give

    def __next__(self) -> Any:
        given, failure = None, None
        try:
            given = next(self.wrapped)
        except Exception as error:  # noqa: BLE001 - all ranks raise what one has met
            failure = error
        asked = () if self._requests is None else self._requests.asked
        return self._give(asked.popleft() if asked else None, given, failure)


class _Memory:
    """Memory that the ranks of one machine share: each fills two files of its own in turn, and the others read them.

    A rank fills a file anew two exchanges later. Then the others have begun the exchange between, so they have read it.

    Args:
        lockstep: The ranks.
    """

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self._exchanges = self._made = 0
        self._files: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}  # by rank and turn: which one, and its bytes
        self._named: list[str] = []  # files that other ranks have not all opened yet
        token = lockstep.gathered(f"{_MEMORY}/ddp_patch-{os.urandom(8).hex()}")[0]
        if lockstep.rank == 0:
            with suppress(OSError):
                os.close(os.open(token, os.O_CREAT | os.O_EXCL, 0o600))
        lockstep.gathered(socket.gethostname())  # by now it is there
        self._is_shared = all(lockstep.gathered(os.path.exists(token)))
        if lockstep.rank == 0:
            with suppress(OSError):
                os.unlink(token)
        self._token: str = token
        weakref.finalize(self, partial(_remove_here, os.getpid()), self._named)

    def exchanged(self, doing: str, data: torch.Tensor) -> list[torch.Tensor]:
        """Return each rank's bytes."""
        turn, size = self._exchanges % 2, data.numel()
        self._exchanges += 1
        old = [*self._named]
        how = _SENT if size <= _SMALL or not self._is_shared else self._put(turn, data)
        made, _ = self._files.get((self._lockstep.rank, turn), (0, None))
        head = torch.tensor([how, size, made], device="cpu").view(torch.uint8)
        heads = self._lockstep.gather(doing, torch.cat([head, data]) if how == _SENT else head) or []
        _remove(self._named, old)  # all have opened these
        told = [each[: head.numel()].view(torch.int64).tolist() for each in heads]
        if any(how == _TOO_LARGE for how, _, _ in told):
            return self._lockstep.gather(doing, data) or []
        return [
            each[head.numel() :] if how == _SENT else self._taken(rank, turn, made)[:size].clone()
            for rank, (each, (how, size, made)) in enumerate(zip(heads, told, strict=True))
        ]

    def _put(self, turn: int, data: torch.Tensor) -> int:
        """Write bytes where other ranks read them; return whether there is room."""
        rank = self._lockstep.rank
        if (rank, turn) not in self._files or self._files[rank, turn][1].numel() < data.numel():
            self._made += 1
            name, room = f"{self._token}-{rank}-{self._made}", data.numel() * 5 // 4
            try:
                file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            except OSError:
                return _TOO_LARGE
            self._named.append(name)
            try:
                os.posix_fallocate(file, 0, room)  # else writing to it would kill this process
            except OSError:
                return _TOO_LARGE
            finally:
                os.close(file)
            self._files[rank, turn] = self._made, _mapped(name, room)
        self._files[rank, turn][1][: data.numel()] = data
        return _SHARED

    def _taken(self, rank: int, turn: int, made: int) -> torch.Tensor:
        if self._files.get((rank, turn), (0, None))[0] != made:
            name = f"{self._token}-{rank}-{made}"
            self._files[rank, turn] = made, _mapped(name, os.path.getsize(name))
        return self._files[rank, turn][1]


def _mapped(name: str, size: int) -> torch.Tensor:
    return torch.from_file(name, shared=True, size=size, dtype=torch.uint8, device="cpu")


def _remove(names: list[str], some: list[str]) -> None:
    """Remove some files, and their names."""
    for name in some:
        names.remove(name)
        with suppress(OSError):
            os.unlink(name)


def _remove_here(process: int, names: list[str]) -> None:
    if os.getpid() == process:
        _remove(names, [*names])
