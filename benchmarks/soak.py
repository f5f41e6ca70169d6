"""Train with random loaders, worlds and options while random things go wrong, and account for every sample.

A round is a training of some epochs that begins anew, mostly with another number of ranks, whenever it was broken off.
It resumes from the latest checkpoint that can be read. Each rank writes down what it trains on; a checkpoint says how
much of that counts. At the end each epoch must hold what one process's does, but for the padding that is promised.

``python benchmarks/soak.py --rounds 500 --seed 0``, or ``--minutes 10``; 100 rounds or more write what came of them
into ``docs/reliability.md``. A round that fails is told with its number, and ``--first`` runs it again.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
import torch.distributed as dist
from pages import markdown, put
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, WeightedRandomSampler, get_worker_info

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import StateError
from ddp_patch.sharding.saved_state import epoch_after

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
WRITTEN_FROM = 100  # rounds
EPOCHS = 2
LIMIT_S = 120.0  # of one attempt
TIMEOUT_S = 10.0  # that ranks wait for each other
MOST_FAULTS = 3  # in a round; what comes after them must go well

# What goes wrong, and whether the ranks may end before their training does.
FAULTS = {
    "a rank killed at a step (SIGKILL)": True,
    "a rank killed at a random moment (SIGKILL)": True,
    "a rank stopped for a while (SIGSTOP)": False,
    "a slow rank": False,
    "the store gone": True,
    "a full disk at a checkpoint": True,
    "a checkpoint cut short": True,
    "a checkpoint of another loader": True,
}


class Drawn(Sampler[int]):
    """Shuffles by the global random state, which every rank seeds differently: so the first rank draws for all."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(self.n), self.n))


class Uneven(BatchSampler):
    """Batches of one, two, three, ... and again one sample."""

    def __iter__(self) -> Iterator[list[int]]:
        order, size = list(self.sampler), 0
        while order:
            size = size % self.batch_size + 1
            yield order[:size]
            del order[:size]


class Stream(IterableDataset[int]):
    """Read whole by every worker, or in parts."""

    def __init__(self, n: int, in_parts: bool) -> None:
        self.n, self.in_parts = n, in_parts

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info() if self.in_parts else None
        return iter(range(self.n) if info is None else range(info.id, self.n, info.num_workers))


def listed(items: list[int]) -> list[int]:
    """Collate to what it is."""
    return items


def loader_of(kind: str, n: int, size: int, workers: int) -> DataLoader[Any]:
    """Return a loader of ``n`` samples, as a user would make it."""
    data: Any = range(n)
    options: dict[str, Any] = {"collate_fn": listed, "num_workers": workers}
    if workers:  # forked from a rank right after a collective, one may inherit a lock that a thread of gloo's holds
        options["multiprocessing_context"] = "forkserver"
    match kind:
        case "stream" | "parts":
            return DataLoader(Stream(n, kind == "parts"), size, **options)
        case "weighted":
            return DataLoader(data, size, sampler=WeightedRandomSampler([1.0 + i % 3 for i in range(n)], n), **options)
        case "batch sampler":
            return DataLoader(data, batch_sampler=Uneven(range(n), size, False), **options)
        case "drawn by rank 0":
            return DataLoader(data, size, sampler=Drawn(n), **options)
        case "in order":
            return DataLoader(data, size, **options)
    return DataLoader(data, size, shuffle=True, **options)


KINDS = ("shuffled", "in order", "weighted", "batch sampler", "drawn by rank 0", "stream", "parts")


@dataclass(frozen=True)
class Training:
    """What a round trains on.

    Attributes:
        kind: Which loader.
        n: How many samples it has.
        size: Its batches' size.
        workers: Its workers.
        options: Of the patch.
        every: How many steps there are from one checkpoint to the next.
    """

    kind: str
    n: int
    size: int
    workers: int
    options: dict[str, Any]
    every: int

    @classmethod
    def drawn(cls, numbers: random.Random) -> "Training":
        """Return a random one."""
        # Workers take long to start, so few rounds have any.
        kind, n, size = numbers.choice(KINDS[:-1] * 2 + KINDS[-1:]), numbers.randint(64, 160), numbers.randint(1, 6)
        workers = numbers.choice([2, 2, 3] if kind == "parts" else [0] * 15 + [1])
        options: dict[str, Any] = {"uneven": numbers.choice(["pad", "pad", "drop", "keep"]), "timeout": TIMEOUT_S}
        if kind not in {"weighted", "drawn by rank 0"}:
            options["seed"] = numbers.randrange(1000)
        if kind in {"shuffled", "in order"}:
            extra: list[dict[str, Any]] = [{}, {}, {"share": "batches"}, {"cost": [1 + i % 7 for i in range(n)]}]
            extra += [{"share": "within_batches", "uneven": "pad"}]
            options |= numbers.choice(extra)
        return cls(kind, n, size, workers, options, every=numbers.randint(1, 6))

    @property
    def has_equal_steps(self) -> bool:
        """Whether all ranks make the same number of steps."""
        return self.options["uneven"] != "keep"

    def loader(self) -> DataLoader[Any]:
        """Return the loader, unpatched."""
        return loader_of(self.kind, self.n, self.size, self.workers)

    def most_padding(self, ranks: int) -> int:
        """Return how many samples of an epoch may be repeated, or left out."""
        match self.options:
            case {"uneven": "keep"}:
                return 0
            case {"share": "within_batches"}:
                return -(-self.n // self.size) * (ranks - 1)
            case {"share": "batches"}:
                return (ranks - 1) * self.size
        return (ranks - 1) * (self.size if self.kind == "batch sampler" else max(1, self.workers))


@dataclass(frozen=True)
class Fault:
    """What goes wrong in an attempt: which, on which rank, and when, in steps or in parts of a second."""

    what: str
    rank: int
    at: int
    after_s: float


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks."""

    folder: Path
    training: Training
    number: int
    ranks: int
    port: int
    fault: Fault | None

    def finds_the_disk_full(self, number: int) -> bool:
        """Tell whether the checkpoint of this number cannot be written."""
        fault = self.fault
        return fault is not None and fault.what == "a full disk at a checkpoint" and number >= fault.at


class Log:
    """What a rank trained on, and the checkpoints."""

    def __init__(self, attempt: Attempt, rank: int) -> None:
        self.attempt, self.rank = attempt, rank
        self.lines = 0
        self.chain: list[Any] = []
        self._file = (attempt.folder / f"trained-{attempt.number}-{rank}").open("w")

    def note(self, epoch: int, items: Sequence[int]) -> None:
        """Write down a batch."""
        self._file.write(json.dumps([epoch, items]) + "\n")
        self.lines += 1

    def save(self, loader: DataLoader[Any]) -> None:
        """Take a checkpoint: every rank's log is on the disk before it, and all see it after."""
        self._file.flush()
        counts: list[Any] = [None] * self.attempt.ranks
        states: list[Any] = [None] * self.attempt.ranks
        state = loader_state(loader)
        dist.all_gather_object(counts, self.lines)
        dist.all_gather_object(states, state)
        if states != [state] * self.attempt.ranks:
            raise AssertionError(f"the ranks tell different states: {states}")
        if self.rank == 0:
            number = len(checkpoints(self.attempt.folder))
            path = self.attempt.folder / "being-written"
            with (Path("/dev/full") if self.attempt.finds_the_disk_full(number) else path).open("wb") as file:
                torch.save({"state": state, "chain": [*self.chain, (self.attempt.number, counts)]}, file)
                file.flush()
                os.fsync(file.fileno())
            path.replace(self.attempt.folder / f"checkpoint-{number:04}")
        dist.barrier()

    def resume(self, loader: DataLoader[Any]) -> None:
        """Resume from the latest checkpoint that can be read and is this loader's, and write down which."""
        for path in reversed(checkpoints(self.attempt.folder)):
            if zipfile.is_zipfile(path):  # else it was cut short, and torch cannot read it
                saved = torch.load(path)
                with contextlib.suppress(StateError):
                    restore_loader(loader, saved["state"])
                    self.chain = saved["chain"]
                    (self.attempt.folder / f"resumed-{self.attempt.number}-{self.rank}").write_text(path.name)
                    return


def checkpoints(folder: Path) -> list[Path]:
    """Return them, the oldest first."""
    return sorted(folder.glob("checkpoint-*"))


def train(attempt: Attempt, rank: int) -> None:
    """Train one rank until the end, or until something goes wrong."""
    training, fault = attempt.training, attempt.fault
    random.seed(1000 * attempt.number + rank)
    torch.manual_seed(1000 * attempt.number + rank)
    loader: Any = patch_dataloader_to_ddp(training.loader(), **training.options)
    log = Log(attempt, rank)
    log.resume(loader)
    steps = 0
    while (epoch := epoch_after(loader_state(loader))) < EPOCHS:
        for batch in loader:
            if fault is not None and fault.rank == rank and steps >= fault.at:
                if fault.what == "a rank killed at a step (SIGKILL)":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault.what == "a slow rank":
                    time.sleep(fault.after_s / 25)
            log.note(epoch, batch)
            steps += 1
            if training.has_equal_steps:
                dist.all_reduce(torch.ones(1))  # as gradients are averaged
                if steps % training.every == 0:
                    log.save(loader)
        log.save(loader)


def run_rank(attempt: Attempt, rank: int) -> None:
    """What a rank's process does; it leaves word of what it raised."""
    os.setsid()  # so that its workers end with it
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = dist.TCPStore("localhost", attempt.port, timeout=timedelta(seconds=TIMEOUT_S))
        options = {"rank": rank, "world_size": attempt.ranks, "timeout": timedelta(seconds=TIMEOUT_S)}
        dist.init_process_group("gloo", store=store, **options)
        (attempt.folder / f"begun-{attempt.number}-{rank}").touch()
        train(attempt, rank)
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever it is, the parent tells it
        (attempt.folder / f"raised-{attempt.number}-{rank}").write_text(traceback.format_exc())
        os._exit(1)


class Processes:
    """The ranks of an attempt, and the store in which they meet, which this process holds."""

    def __init__(self, folder: Path, training: Training, number: int, ranks: int, fault: Fault | None) -> None:
        self._store: Any = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.attempt = Attempt(folder, training, number, ranks, self._store.port, fault)
        context = multiprocessing.get_context("forkserver")
        self._ranks = [context.Process(target=run_rank, args=(self.attempt, rank)) for rank in range(ranks)]

    def run(self) -> bool:
        """Run them to their end; return whether all came to the training's."""
        for rank in self._ranks:
            rank.start()
        disturbing = threading.Thread(target=self._disturb)
        disturbing.start()
        until = time.monotonic() + LIMIT_S
        try:
            while any(rank.is_alive() for rank in self._ranks):
                if time.monotonic() > until:
                    raise TimeoutError(f"the ranks did not end within {LIMIT_S:g} s")
                if any(rank.exitcode for rank in self._ranks):  # whoever waits for it need not wait long
                    until = min(until, time.monotonic() + TIMEOUT_S + 15)
                time.sleep(0.01)
        finally:
            for rank in self._ranks:
                self._signal(rank, signal.SIGKILL)
            disturbing.join()
        return all(rank.exitcode == 0 for rank in self._ranks)

    def _disturb(self) -> None:
        fault = self.attempt.fault
        if fault is None:
            return
        # Before, they are in torch's hands: a group that cannot be made is no concern of this package.
        while len(list(self.attempt.folder.glob(f"begun-{self.attempt.number}-*"))) < self.attempt.ranks:
            if not self._ranks[fault.rank].is_alive():
                return
            time.sleep(0.005)
        time.sleep(fault.after_s / 4)  # most trainings take less than half a second
        match fault.what:
            case "a rank killed at a random moment (SIGKILL)":
                self._signal(self._ranks[fault.rank], signal.SIGKILL)
            case "a rank stopped for a while (SIGSTOP)":
                self._signal(self._ranks[fault.rank], signal.SIGSTOP)
                time.sleep(1)
                self._signal(self._ranks[fault.rank], signal.SIGCONT)
            case "the store gone":
                self._store = None

    def _signal(self, rank: Any, number: int) -> None:
        """Send a signal to a rank and all that it started."""
        if rank.pid is None:
            return
        try:
            os.killpg(rank.pid, number)
        except ProcessLookupError:
            if number == signal.SIGKILL:  # it leads no group yet, or is gone
                rank.kill()


@dataclass
class Found:
    """What came of the rounds."""

    rounds: int = 0
    attempts: int = 0
    samples: int = 0
    padding: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    broken_off: Counter[str] = field(default_factory=Counter)


def run_round(number: int, seed: int, found: Found) -> None:
    """Run a round; raise AssertionError, and leave its folder, if a sample is missing or one is too many."""
    numbers = random.Random(f"{seed}/{number}")
    training = Training.drawn(numbers)
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{number}-"))
    most = 3 if training.workers else 8  # each rank's workers come from a process of its own
    faults_left, attempt, ranks, ended = MOST_FAULTS, 0, numbers.randint(2, most), False
    damaged: set[str] = set()
    while not ended:
        fault = None
        if faults_left:
            what = numbers.choice(list(FAULTS))
            fault = Fault(what, numbers.randrange(ranks), numbers.randint(0, 12), numbers.random())
            faults_left -= 1
            found.faults[what] += 1
        ended = Processes(folder, training, attempt, ranks, fault).run()
        found.attempts += 1
        may_break = fault is not None and FAULTS[fault.what]
        if not ended and not may_break:
            raise AssertionError(f"{fault}: the ranks raised\n{raised(folder, attempt)}")
        if not ended and fault is not None:
            found.broken_off[fault.what] += 1
        if damaged & (resumed := {path.read_text() for path in folder.glob(f"resumed-{attempt}-*")}):
            raise AssertionError(f"resumed from {sorted(resumed)}, of which {sorted(damaged)} are damaged; {folder}")
        damaged |= damage(folder, fault, training)
        if ended and fault is not None and fault.what.startswith("a checkpoint"):
            ended = False  # which the damage is to be found for
        attempt += 1
        ranks = numbers.choice([ranks, numbers.randint(2, most)])
        if attempt > 2 * MOST_FAULTS:
            raise AssertionError("the round does not come to its end")
    account(folder, training, found)
    found.rounds += 1
    shutil.rmtree(folder)


def damage(folder: Path, fault: Fault | None, training: Training) -> set[str]:
    """Damage the latest checkpoint, if that is the fault; return which."""
    saved = checkpoints(folder)
    if fault is None or not saved or not zipfile.is_zipfile(saved[-1]):  # it is damaged already
        return set()
    if fault.what == "a checkpoint cut short":
        content = saved[-1].read_bytes()
        saved[-1].write_bytes(content[: int(len(content) * fault.after_s)])
    elif fault.what == "a checkpoint of another loader":
        other = torch.load(saved[-1])
        other["state"]["loader"] = {**other["state"]["loader"], "dataset length": training.n + 1}
        torch.save(other, saved[-1])
    else:
        return set()
    return {saved[-1].name}


def raised(folder: Path, attempt: int) -> str:
    """Return what the ranks raised."""
    return "\n".join(place.read_text() for place in sorted(folder.glob(f"raised-{attempt}-*")))


def account(folder: Path, training: Training, found: Found) -> None:
    """Compare what the checkpoints count with what one process trains on."""
    last = torch.load(next(filter(zipfile.is_zipfile, reversed(checkpoints(folder)))))
    chain = last["chain"]
    trained = [Counter[int]() for _ in range(EPOCHS)]
    most = 0
    for attempt, counts in chain:
        most = max(most, training.most_padding(len(counts)))
        for rank, count in enumerate(counts):
            lines = (folder / f"trained-{attempt}-{rank}").read_text().splitlines()[:count]
            for epoch, items in map(json.loads, lines):
                trained[epoch].update(items)
    for epoch, (got, due) in enumerate(zip(trained, due_of(training, last["state"]["loader"]["seed"]), strict=True)):
        missing, extra = due - got, got - due
        left_out = missing.total() if training.options["uneven"] == "drop" else 0
        if (missing and not left_out) or max(left_out, extra.total()) > most:
            raise AssertionError(
                f"epoch {epoch}: missing {dict(missing)}, too many {dict(extra)}, at most {most}; {folder}"
            )
        found.samples += got.total()
        found.padding += extra.total() + left_out


def due_of(training: Training, seed: int) -> list[Counter[int]]:
    """Return what one process trains on in each epoch."""
    if training.kind != "weighted":
        return [Counter(range(training.n))] * EPOCHS
    alone = patch_dataloader_to_ddp(training.loader(), rank=0, num_replicas=1, seed=seed)
    return [Counter(item for batch in alone for item in batch) for _ in range(EPOCHS)]


def run_many(before: int, after: int) -> str:
    """Train on so many ranks, kill one in the second epoch, and resume on another number of ranks; say what came."""
    training = Training("shuffled", 1000, 2, 0, {"seed": 1, "uneven": "pad", "timeout": LIMIT_S}, every=3)
    folder, found = Path(tempfile.mkdtemp(prefix="soak-many-")), Found()
    steps = -(-training.n // (before * training.size))
    fault = Fault("a rank killed at a step (SIGKILL)", before - 1, steps + 2, 0.0)
    if Processes(folder, training, 0, before, fault).run() or not Processes(folder, training, 1, after, None).run():
        raise AssertionError(raised(folder, 0) + raised(folder, 1))
    account(folder, training, found)
    shutil.rmtree(folder)
    return (
        f"{before} ranks on one machine were patched, trained for an epoch, and lost a rank (SIGKILL) in the next; "
        f"{after} ranks resumed: {found.samples:,} samples accounted for, {found.padding:,} of them padding."
    )


def main() -> None:
    """Run rounds, and show what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=sys.maxsize)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--ranks", type=int, nargs=2, help="nothing but one training of many ranks, resumed by others")
    given = parser.parse_args()
    if given.rounds == sys.maxsize and given.minutes == float("inf"):
        given.rounds = 20
    multiprocessing.set_forkserver_preload(["soak", "ddp_patch.streams.dataset"])
    if given.ranks:
        print(run_many(*given.ranks))
        return
    found, until = Found(), time.monotonic() + 60 * given.minutes
    for number in range(given.first, given.first + given.rounds):
        if time.monotonic() > until:
            break
        try:
            run_round(number, given.seed, found)
        except (AssertionError, TimeoutError) as error:
            raise SystemExit(f"Round {number} of seed {given.seed} failed: {error}") from error
        print(f"round {number}: {found.attempts} attempts, {found.samples} samples", flush=True)
    told = (
        f"{found.rounds:,} rounds (seed {given.seed}, from round {given.first}), {found.attempts:,} starts of 2 to 8 "
        f"ranks, {found.samples:,} samples accounted for, {found.padding:,} of them padding or left out as `uneven` "
        "says: none lost, none too many."
    )
    print(told)
    rows = [(what, str(found.faults[what]), str(found.broken_off[what])) for what in FAULTS]
    print(markdown(("what went wrong", "times", "ended the training"), rows))
    if found.rounds >= WRITTEN_FROM:
        put(PAGE, "soaked", fill(told, 120))


if __name__ == "__main__":
    main()
