"""What ranks ask of the store, and how many bytes travel: on 2 to 128 ranks, which are threads with one real store.

Run it with ``nox -s many_ranks``; ``docs/architecture.md`` holds its table. An operation is a function of the rank that
each thread calls; ``counted`` counts what it asks for on a world of some ranks.
"""

import multiprocessing
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from time import process_time, sleep, time
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from pages import markdown, show_and_put
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, RandomSampler, Sampler

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.evaluation.gather import OwnOutputs
from ddp_patch.evaluation.shares import share_of_step
from ddp_patch.loaders.facts import StreamFacts
from ddp_patch.options import Options
from ddp_patch.orders.digest import Digest
from ddp_patch.ranks import agreement, claims
from ddp_patch.ranks.agreement import Subject, agree
from ddp_patch.ranks.claims import Claims
from ddp_patch.ranks.exchange import exchange
from ddp_patch.ranks.pass_facts import Progress, State, next_count
from ddp_patch.ranks.pass_monitor import PassMonitor, Rules
from ddp_patch.ranks.world import World
from ddp_patch.sharding.patched_loaders import patched_facts

WORLDS = (2, 4, 8, 16, 32, 64, 128)
TIMEOUT_S = 120.0
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
# What the thread that runs is: its rank, the number of ranks, and its store.
HERE = threading.local()


class Asked(NamedTuple):
    """What a rank asked of the store."""

    requests: int
    size: int


class CountingStore:
    """A rank's own connection to the store, which counts.

    Attributes:
        requests: How many calls there were.
        size: How many bytes of keys and values there were, both ways.
    """

    def __init__(self, port: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]  # torch documents it
        self.requests = self.size = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counting(*args: Any) -> Any:
            self.requests += 1
            answer = call(*args)
            self.size += bytes_in(args) + bytes_in(answer)
            return answer

        return counting


def bytes_in(value: Any) -> int:
    """Return how many bytes of keys and values there are; numbers count as eight."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Iterable):
        return sum(map(bytes_in, value))
    return 8 if isinstance(value, int) and not isinstance(value, bool) else 0


def counted(operation: Callable[[int], object], world: int) -> Mapping[int, Asked]:
    """Return what each rank asks when all do an operation, which they have done once before."""
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # torch documents it

    def on_rank(rank: int) -> Asked:
        HERE.rank, HERE.world, HERE.store = rank, world, CountingStore(served.port)
        operation(rank)
        store = HERE.store
        begun = Asked(store.requests, store.size)
        operation(rank)
        return Asked(store.requests - begun.requests, store.size - begun.size)

    with ThreadPoolExecutor(world) as pool:
        return dict(enumerate(pool.map(on_rank, range(world))))


def agreeing(samplers: Callable[[int], Sequence[Sampler[int]]]) -> Callable[[int], object]:
    """Return the operation of agreeing on loaders, as a patch does."""

    def operation(rank: int) -> object:
        world = World(rank, HERE.world, {each: each for each in range(HERE.world)})
        streams = [StreamFacts(sampler) for sampler in samplers(rank)]
        subjects = [Subject(stream.described, stream, label=f"loaders[{at}]") for at, stream in enumerate(streams)]
        return agree(world, Options(timeout=TIMEOUT_S), subjects, f"{len(streams)} loaders")

    return operation


def shuffled(count: int) -> Callable[[int], Sequence[Sampler[int]]]:
    """Return what makes loaders' samplers, alike on every rank."""
    return lambda rank: [RandomSampler(range(1000)) for _ in range(count)]


class Passing:
    """A rank that makes passes of so many steps over a loader, of which some are compared.

    Args:
        rank: Its number.
    """

    def __init__(self, rank: int) -> None:
        key = f"passes/{HERE.world}"
        rules = Rules(is_begun_by_all=True)
        self.monitor = PassMonitor(Claims(key, rank, range(HERE.world)), rules)
        self.given, self.state, self.digest, self.passes = 0, State.RUNNING, Digest(), 0
        self.begin()

    def begin(self) -> None:
        """Begin a pass."""
        self.given, self.state, self.digest = 0, State.RUNNING, Digest()
        marks = self.digest.marks
        self.begun = self.monitor.begin(
            self.passes, 0, self.progress, lambda: {count: (value, 0) for count, value in marks.items()}
        )
        self.passes += 1

    def progress(self) -> Progress:
        """Return how far it has come."""
        return Progress(self.given, self.given, self.state, 0, self.given)

    def steps(self, count: int) -> None:
        """Make so many steps, and compare after the last."""
        for _ in range(count):
            self.given += 1
            self.digest.add(range(10 * self.given))
        self.monitor.compare(self.begun, next_count(self.given - 1))

    def end(self) -> None:
        """Come to the end, and begin the next pass."""
        self.state = State.ENDED
        self.monitor.compare(self.begun)
        self.begin()
        self.steps(2)


_passing = threading.local()


def passing(rank: int) -> Passing:
    """Return what this thread's rank passes over, in the pass that it is in."""
    if getattr(_passing, "of", None) != (HERE.world, id(HERE.store)):
        _passing.of, _passing.made = (HERE.world, id(HERE.store)), Passing(rank)
        _passing.made.steps(2)
    made: Passing = _passing.made
    return made


def comparing(rank: int) -> None:
    """Compare after some steps more."""
    made = passing(rank)
    made.steps(next_count(made.given) - made.given)


def ending(rank: int) -> None:
    """Come to a pass's end, and to the first comparison of the next."""
    passing(rank).end()


def meeting(rank: int) -> object:
    """Do as ranks when they make their group: meet, leave an address as gloo has it, and read one for each round."""
    name = exchange(range(HERE.world), "Gathering outputs", None, lambda _: uuid4().hex, TIMEOUT_S)
    HERE.store.set(f"ddp_patch/group/{name}/{rank}", bytes(154))
    after = [2**number for number in range((HERE.world - 1).bit_length())]
    others = {(rank + sign * each) % HERE.world for each in after for sign in (1, -1)}
    return [HERE.store.get(f"ddp_patch/group/{name}/{other}") for other in others]


def gathering(world: int, rows: int = 64, steps: int = 20) -> float:
    """Return how many milliseconds of a rank's CPU a step takes to gather, of rows with ten floats."""
    numbers: Any = range(rows * world)
    given = patch_dataloader_to_ddp(DataLoader(numbers, rows), rank=0, num_replicas=world)
    batch = next(iter(given))
    outputs, facts = batch[:, None].float().repeat(1, 10), patched_facts("gather_step", given)
    spent = []
    for _ in range(steps):
        begun = process_time()
        own = OwnOutputs(outputs, partial(share_of_step, facts))
        spent.append(process_time() - begun)
        headers, data = np.repeat(own.header[None], world, 0), np.repeat(own.data[None], world, 0)
        keys = np.arange(rows * world).reshape(rows, world).T  # every rank has its own
        data[:, : 8 * rows] = np.ascontiguousarray(keys).view(np.uint8)
        begun = process_time()
        whole = own.whole(headers, [*data])
        spent[-1] += process_time() - begun
        if len(whole) != rows * world:
            raise RuntimeError(f"gathered {len(whole)} rows of {rows * world}")
    return 1000 * float(np.median(spent))


class Connection:
    """A rank's own connection to a store in this process."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def keys_held(world: int, passes: int) -> str:
    """Return how many keys the store holds when ranks, in turn, have made so many passes of 8 steps."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch documents it
    HERE.world, connections, ranks = world, [Connection(store) for _ in range(world)], list[Passing]()
    for HERE.rank, HERE.store in enumerate(connections):
        ranks.append(Passing(HERE.rank))
    for _ in range(passes):
        for HERE.store, rank in zip(connections, ranks, strict=True):
            rank.steps(8 - rank.given)
            rank.end()
    return f"{store.num_keys():,}"


def ask(port: int, since: float, until: float, asked: Any) -> None:
    """Compare with a store from one time to another, as a process of its own; count the requests."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]  # torch documents it
    sleep(max(0.0, since - time()))
    while time() < until:
        store.compare_set(f"pass/{asked.value % 50}", "", "x" * 60)
        store.compare_set("told", "~", "~")
        asked.value += 2


def served_a_second(clients: int, seconds: float = 3.0) -> float:
    """Return how many requests of comparisons one store serves a second, which so many processes ask at once."""
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # torch documents it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    since = time() + 10  # by then all have started
    counts = [context.Value("q", 0) for _ in range(clients)]
    processes = [context.Process(target=ask, args=(served.port, since, since + seconds, count)) for count in counts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return sum(count.value for count in counts) / seconds


def asked_a_second(world: int, steps: int, steps_a_second: float) -> float:
    """Return how many requests a second comparisons make on so many ranks, on average over a pass of so many steps."""
    counts, at = 0, 0
    while (at := next_count(at)) <= steps:
        counts += 1
    return 2 * counts * world * steps_a_second / steps


def of_the_store(ranks: int) -> list[list[str]]:
    """Return the rows of what one store holds, serves, and is asked for."""
    short, long = (asked_a_second(ranks, steps, 10) for steps in (100, 10_000))
    return [
        ["keys after 100 passes of 8 ranks, and after 10,000", f"{keys_held(8, 100)}, {keys_held(8, 10_000)}"],
        ["requests served a second: of one process, of 8", f"{served_a_second(1):,.0f}, {served_a_second(8):,.0f}"],
        [f"asked a second on {ranks} ranks, 10 steps a second: 100 steps, 10,000", f"{short:,.0f}, {long:,.0f}"],
    ]


OPERATIONS: dict[str, Callable[[int], object]] = {
    "compare a pass": comparing,
    "end a pass, begin the next": ending,
    "make the group, once": meeting,
    "agree on 1 loader": agreeing(shuffled(1)),
    "agree on 8 loaders": agreeing(shuffled(8)),
}


def fitted(counts: Sequence[float]) -> str:
    """Return the formula in W that fits the counts of more than two ranks: a constant, or a line in W or its log."""
    _, *counts = counts
    if max(counts) - min(counts) <= 0.2 * max(counts):
        return f"{round(float(np.mean(counts))):,}"
    lines = {
        name: np.polyfit(of(WORLDS[1:]), counts, 1, full=True) for name, of in (("W", np.array), ("log2 W", np.log2))
    }
    name = min(lines, key=lambda name: float(lines[name][1][0]))
    slope, start = (round(float(number)) for number in lines[name][0])
    return f"{slope:,} {name}" + (f" + {start:,}" if start > 0 else "")


def rows_of(name: str, operation: Callable[[int], object]) -> list[list[str]]:
    """Return the rows of an operation: of the first rank and of another, requests and bytes."""
    found = [counted(operation, world) for world in WORLDS]
    rows = []
    for what in Asked._fields:
        for who in ("first", "other"):
            each = [
                max(getattr(asked, what) for rank, asked in ranks.items() if (rank == 0) is (who == "first"))
                for ranks in found
            ]
            label = "requests" if what == "requests" else "bytes"
            rows.append([name, f"{label}, {who}", *(f"{count:,}" for count in each), fitted(each)])
    return rows


def main() -> None:
    """Count, print and write the table."""
    torch.set_num_threads(1)
    spent = [gathering(world) for world in (*WORLDS, 1024)]
    dist.get_rank = lambda *_: HERE.rank
    dist.get_world_size = lambda *_: HERE.world
    dist.is_initialized = lambda: True
    for module in (agreement, claims):
        module.default_store = lambda: HERE.store  # type: ignore[attr-defined]  # as they import it
    distributed_c10d._get_default_store = lambda: HERE.store
    head = ["", "on a rank", *(f"W = {world}" for world in WORLDS), "formula"]
    rows = [row for name, operation in OPERATIONS.items() for row in rows_of(name, operation)]
    print(markdown(head, rows))
    each = [[name, *(row[-1] for row in of_one)] for name, of_one in groupby(rows, key=itemgetter(0))]
    head = ["", *(f"W = {world:,}" for world in (*WORLDS, 1024))]
    show_and_put(PAGE, "many-ranks-gather", [head, ["ms", *(f"{each:.2g}" for each in spent)]])
    show_and_put(PAGE, "many-ranks-store", [["", "number"], *of_the_store(WORLDS[-1])])
    show_and_put(PAGE, "many-ranks", [["", *(row[1] for row in rows[: len(each[0]) - 1])], *each])


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
