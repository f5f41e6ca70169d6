"""Random programs that use public names of this package alone; ``same.py`` starts this in each tree.

``python same_programs.py SEED START STOP`` prints a digest of what each program gives, then what all covered.
With ``--show``, it prints the last of them and all that it gives instead.
"""

import copy
import gc
import hashlib
import json
import logging
import pickle
import random
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any

import numpy as np
import torch
from same_loaders import BATCHES, KINDS, RNGS, SAMPLERS, STREAMS, Rows, as_it_is, cost_of_index, counts_of
from torch.utils.data import DataLoader, _utils

import ddp_patch

MOST = 70  # batches of a pass: some have no end
LIMIT_S = 60.0  # a program that takes longer hangs
WITH_WORKERS = 0.01  # of all programs: with workers, one takes as long as twenty others

# The values of options, and how often each is given.
OPTIONS: dict[str, tuple[list[Any], float]] = {
    "uneven": (["pad", "drop", "keep", "keep"], 0.4),
    "share": (["samples", "batches", "within_batches", "within_batches", "by_worker"], 0.26),
    "seed": ([0, 7, 7, 7, 7, 7, -1], 0.12),
    "cost": (["list", "function", "function", "function", "short list"], 0.15),
    "cost_of": (["padded", "sum"], 0.15),
    "cost_window": ([1, 2, 2, 5, 5, 0], 0.2),
}


@dataclass(frozen=True)
class Run:
    """A part of a program, as a process of its own would do it.

    Attributes:
        ranks: How many there are.
        played: Which of them run here, one after another. The next run resumes from the first one's state.
        acts: What each does, and how much of it.
    """

    ranks: int
    played: tuple[int, ...]
    acts: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        acts = ", ".join(f"{name} ({amount})" for name, amount in self.acts)
        return f"{self.ranks} ranks, of which {[*self.played]}: {acts}"

    @classmethod
    def drawn(cls, rng: random.Random, ranks: int, is_first: bool, is_short: bool) -> "Run":
        """Return a random one."""
        played = range(ranks) if rng.random() < 0.08 and not is_short else [rng.randrange(ranks)]
        resume = [] if is_first else [rng.choice(["restore", "restore", "load", "load share"])]
        names = rng.choices([*ACTS], [often for _, often in ACTS.values()], k=rng.randint(1, 3 if is_short else 5))
        last = rng.choice(["take", "mask", "take some", "take some", "take some"])  # mostly, the next resumes mid-epoch
        acts = [(name, rng.randint(0, 5)) for name in [*resume, *names, last, "save"]]
        return cls(ranks, tuple(played), tuple(acts))


@dataclass(frozen=True)
class Program:
    """A loader, how it is patched, and what is done with it. Its attributes are what ``drawn`` draws."""

    number: int
    kind: str
    n: int
    size: int | None
    drop_last: bool
    is_lazy: bool
    form: str
    rng: str
    sampler: str
    stream: str
    workers: int
    persistent: bool
    way: str
    options: dict[str, Any]
    runs: tuple[Run, ...]

    def __str__(self) -> str:
        facts = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name != "runs")
        return "\n  ".join([facts, *map(str, self.runs)])

    @classmethod
    def drawn(cls, seed: int, number: int) -> "Program":
        """Return a random one."""
        rng = random.Random(f"{seed}/{number}")
        chance, choice = rng.random, rng.choice
        workers = rng.randint(1, 3) if chance() < WITH_WORKERS else 0
        kind = choice(["stream"] * (20 if workers else 6) + ["own"] * 5 + ["own, its generator", *KINDS])
        options = {name: choice(values) for name, (values, often) in OPTIONS.items() if chance() < often}
        if "cost" not in options:
            options = {name: value for name, value in options.items() if not name.startswith("cost")}
        way = rng.choices(["patch", "wrapper", "several", "alone"], [88, 0 if kind == "stream" else 7, 2, 2])[0]
        ranks = [choice([1, 1, 2, 2, 3, 4, 5])]
        for _ in range(choice([0, 1, 1, 2])):
            ranks.append(choice([ranks[-1], ranks[-1], *range(1, 6)]))
        return cls(
            number=number,
            kind=kind,
            n=rng.randint(0, 12 if workers else choice([6, 24, 24, 24, 60, 60])),
            size=None if kind not in BATCHES and chance() < 0.1 else choice([1, 2, 3, 3, 4, 5]),
            drop_last=chance() < 0.15,
            is_lazy=chance() < 0.25,
            form=choice(["ints", "ints", "dicts", "augmented", "tensors", "list"]),
            rng=choice([*RNGS]),
            sampler=choice([*SAMPLERS, "Known", "Known"]),
            stream=choice([*STREAMS]),
            workers=workers,
            persistent=chance() < 0.4,
            way="patch" if workers else way,
            options=options,
            runs=tuple(Run.drawn(rng, each, not at, bool(workers)) for at, each in enumerate(ranks)),
        )

    @property
    def generator(self) -> torch.Generator | None:
        """A generator for what takes only torch's."""
        return RNGS["torch.Generator"]() if self.rng == "torch.Generator" else None

    @property
    def seeded(self) -> dict[str, Any]:
        """What a sampler of ours draws from."""
        return {"seed": 3} if self.is_lazy else {"generator": self.generator}


# What a state has in every version that is compared.
STATE_FIELDS = ("version", "loader", "epoch", "seed", "taken", "turn", "steps", "ranks", "order", "states")


class Rank:
    """A rank that plays a run and records all that comes.

    Args:
        program: What it plays.
        run: Which part.
        rank: Which rank it is.
        state: What an earlier run saved.
    """

    def __init__(self, program: Program, run: Run, rank: int, state: Any) -> None:
        self.program, self.run, self.rank, self.state = program, run, rank, state
        self.record: list[str] = []
        self.got: list[Any] = []
        self.held: Iterator[Any] = iter(())

    def play(self) -> None:
        """Make the loader, patch it and act."""
        seed = self.program.number % 1000 + self.rank  # ranks are seeded differently
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        if self.recorded("patch", self.begin):
            for name, amount in self.run.acts:
                self.recorded(f"{name} ({amount})", ACTS[name][0], self, amount)
        self.recorded("draw", drawn)  # what the script draws afterwards

    def recorded(self, act: str, does: Callable[..., Any], *arguments: Any) -> bool:
        """Record what it gives; return whether it went well."""
        NOTICES.clear()
        self.got.clear()
        failure = None
        try:
            gave = does(*arguments)
        except Exception as error:  # noqa: BLE001 - what is raised is compared too
            gave = failure = error
        self.record.append(f"{self.rank} of {self.run.ranks}: {act}: {plain([self.got, gave, NOTICES])}")
        name = act.partition(" (")[0]
        COVERED.update(
            [f"act: {name}"] if failure is None else [f"refused: {name}", f"error: {type(failure).__name__}"]
        )
        return failure is None

    def begin(self) -> bool:
        """Make the loader and patch it."""
        p, rng = self.program, RNGS[self.program.rng]()
        self.sampler = SAMPLERS[p.sampler](p.n, rng, p.is_lazy)
        self.dataset: Any = [*range(p.n)] if p.form == "list" else Rows(p.n, p.form, rng)
        if p.kind == "stream":
            self.dataset = STREAMS[p.stream](p.n, rng, p.is_lazy or p.workers > 1)
        how = KINDS[p.kind](p, self.sampler)
        if "batch_sampler" not in how and "batch_size" not in how:
            how |= {"batch_size": p.size} if p.size is None else {"batch_size": p.size, "drop_last": p.drop_last}
        if p.workers:
            how |= {"num_workers": p.workers, "persistent_workers": p.persistent}
        self.raw = DataLoader(self.dataset, collate_fn=None if p.form == "tensors" else as_it_is, **how)
        self.loader: Any = self.patched()
        return ddp_patch.check_loaders_is_patched(self.loader)

    def patched(self) -> Any:
        """Return the loader, patched in the program's way."""
        p, options = self.program, {**self.program.options}
        where: dict[str, Any] = {"rank": self.rank, "num_replicas": self.run.ranks}
        if "cost" in options:
            costs = [cost_of_index(row) for row in range(p.n - (options["cost"] == "short list"))]
            cost = cost_of_index if options["cost"] == "function" else costs
            about = {
                name.removeprefix("cost_"): options.pop(name) for name in ("cost_of", "cost_window") if name in options
            }
            options["cost"] = ddp_patch.Cost(cost, **about) if about else cost
        match p.way:
            case "patch":
                return ddp_patch.patch_dataloader_to_ddp(self.raw, **options, **where)
            case "several":
                loaders = {"train": self.raw, "val": [DataLoader(Rows(5, "ints", None))]}
                return ddp_patch.patch_dataloader_to_ddp(loaders, **options, **where)["train"]
            case "alone":
                return self.raw
        where |= {name: options[name] for name in ("uneven", "seed") if name in options}
        if p.kind not in BATCHES or self.raw.batch_sampler is None:
            single = ddp_patch.DDPSamplerWrapper(self.raw.sampler, p.is_lazy, not p.drop_last, **where)
            return DataLoader(self.dataset, p.size, sampler=single, collate_fn=as_it_is)
        whole = ddp_patch.DDPBatchSamplerWrapper(self.raw.batch_sampler, p.is_lazy, not p.drop_last, **where)
        return DataLoader(self.dataset, batch_sampler=whole, collate_fn=as_it_is)

    @property
    def share(self) -> Any:
        """What shards, where torch has it."""
        found = self.loader.batch_sampler
        return found if isinstance(found, ddp_patch.DDPBatchSamplerWrapper) else self.loader.sampler

    def take(self, batches: Iterable[Any], most: int = MOST) -> None:
        """Record so many batches, as they come."""
        for batch in islice(batches, most):
            self.got.append(plain(batch))

    def hold(self, amount: int) -> None:
        """Begin a pass that something else may interrupt."""
        self.held = iter(self.loader)
        self.take(self.held, amount)

    def choose_late(self, epoch: int) -> None:
        """Choose the epoch of a pass whose iterator is there already."""
        self.held = iter(self.loader)
        self.set_epoch(epoch)
        self.take(self.held, epoch * epoch)

    def read_past(self, amount: int) -> None:
        """Go on with a pass in which a row could not be read."""
        self.dataset.fails_at = amount
        batches = iter(self.loader)
        for _ in range(MOST):
            try:
                self.take([next(batches)])
            except StopIteration:
                break
            except KeyError as error:
                self.got.append(plain(error))
        self.dataset.fails_at = None

    def gather(self, amount: int) -> Any:
        """Gather a pass: what it gives, or a number for each sample."""
        batches = [*islice(self.loader, MOST)]
        if amount == 3:
            batches = [*chain.from_iterable(zip_longest(self.loader, self.loader))][::2]
        outputs: Any = batches if amount % 2 else [torch.arange(len(batch)) for batch in batches]
        if amount == 4:
            outputs = torch.cat(outputs)
        return ddp_patch.gather_in_order(outputs, self.loader)

    def gather_steps(self, amount: int) -> None:
        """Gather some steps."""
        for batch in islice(self.loader, amount + 1):
            self.got.append(plain(ddp_patch.gather_step(batch, self.loader)))

    def save(self, state: Any) -> Any:
        """Keep a state, as a checkpoint does, and return what every version says in it."""
        self.state = pickle.loads(pickle.dumps(state))  # noqa: S301 - made here
        return {name: value for name, value in state.items() if name in STATE_FIELDS}

    def saved(self) -> Any:
        """Return the latest state."""
        if self.state is None:
            self.save(ddp_patch.loader_state(self.loader))
        return self.state

    def damage(self, amount: int) -> None:
        """Restore a state that is damaged or something else's."""
        state = copy.deepcopy(self.saved())
        name = STATE_FIELDS[self.program.number % len(STATE_FIELDS)]
        state[name] = [None, [[2, 1]], 12, [], {}, "another"][amount]
        ddp_patch.restore_loader(self.loader, state)

    def replace(self, loader: Any) -> None:
        """Go on with another loader."""
        self.loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch."""
        (self.loader if hasattr(self.loader, "set_epoch") else self.share).set_epoch(epoch)

    def grow(self, amount: int) -> None:
        """Make the data longer."""
        if self.program.kind == "stream":
            self.loader.dataset.n += amount
        else:
            (self.dataset if self.program.form == "list" else self.dataset.rows).extend(range(100, 100 + amount))
            self.sampler.n += amount

    def set_through(self, amount: int) -> Any:
        """Set an attribute of the user's sampler through what shards it; return what both have."""
        name = ["shift", "n", "fails_at", "batch_size", "drop_last", "another"][amount]
        setattr(self.share, name, amount)
        return getattr(self.share, name), getattr(self.sampler, name, None)

    def parameters(self, amount: int) -> Any:
        """Read the arguments that the loader was made with."""
        found = ddp_patch.extract_loader_parameters(self.loader, ignore_data_related_parameters=bool(amount % 2))
        return {name: value if isinstance(value, int | None) else type(value) for name, value in found.items()}

    def audit(self, amount: int) -> str:
        """Audit the loader before the patch."""
        options = {name: value for name, value in self.program.options.items() if name in {"uneven", "share"}}
        return str(ddp_patch.audit(self.raw, amount + 1, max_items=500, **options))


def drawn(*_: object) -> list[float]:
    """Draw from the global generators."""
    return [random.gauss(0, 1), np.random.randn(), torch.rand(()).item()]  # normals come in pairs, of which one stays


# What a rank does with a number, and how often.
ACTS: dict[str, tuple[Callable[[Rank, int], Any], float]] = {
    "take": (lambda r, k: r.take(r.loader), 12),
    "take some": (lambda r, k: r.take(r.loader, k), 10),
    "hold": (Rank.hold, 6),
    "go on": (lambda r, k: r.take(r.held, k * k), 6),
    "choose late": (Rank.choose_late, 2),
    "read past": (Rank.read_past, 2),
    "interleave": (lambda r, k: r.take(chain.from_iterable(zip_longest(r.loader, islice(r.loader, k)))), 2),
    "take indices": (lambda r, k: r.take(r.share, MOST if k % 2 else k), 2),
    "take unpatched": (lambda r, k: r.take(r.raw, k), 1),
    "mask": (lambda r, k: r.take(ddp_patch.iter_with_mask(r.loader), MOST if k % 2 else k), 6),
    "weigh": (lambda r, k: r.take(ddp_patch.iter_with_weights(r.loader), MOST if k % 2 else k), 6),
    "weigh by": (lambda r, k: r.take(ddp_patch.iter_with_weights(r.loader, weight_of=counts_of)), 2),
    "gather": (Rank.gather, 4),
    "gather steps": (Rank.gather_steps, 3),
    "set epoch": (lambda r, k: r.set_epoch(k), 8),
    "len": (lambda r, k: len(r.loader), 6),
    "len of share": (lambda r, k: len(r.share), 2),
    "save": (lambda r, k: r.save(ddp_patch.loader_state(r.loader)), 9),
    "save after": (lambda r, k: r.save(ddp_patch.loader_state(r.loader, batches_done=k)), 3),
    "state": (lambda r, k: r.save(r.loader.state_dict()), 4),
    "state of share": (lambda r, k: r.save(r.share.state_dict()), 2),
    "restore": (lambda r, k: ddp_patch.restore_loader(r.loader, r.saved()), 5),
    "load": (lambda r, k: r.loader.load_state_dict(r.saved()), 3),
    "load share": (lambda r, k: r.share.load_state_dict(r.saved()), 1),
    "damage": (Rank.damage, 1),
    "deepcopy": (lambda r, k: r.replace(copy.deepcopy(r.loader)), 1),
    "pickle": (lambda r, k: r.replace(pickle.loads(pickle.dumps(r.loader))), 1),  # noqa: S301 - made here
    "copy": (lambda r, k: r.take(copy.copy(r.loader), k), 1),
    "patch anew": (lambda r, k: r.replace(r.patched()), 1),
    "patch again": (lambda r, k: ddp_patch.patch_dataloader_to_ddp(r.loader, rank=0, num_replicas=2) is r.loader, 0.5),
    "grow": (Rank.grow, 2),
    "fail": (lambda r, k: setattr(r.sampler, "fails_at", k), 3),
    "fail to read": (lambda r, k: setattr(r.dataset, "fails_at", k), 1),
    "set": (Rank.set_through, 2),
    "parameters": (Rank.parameters, 1),
    "draw": (drawn, 2),
    "audit": (Rank.audit, 0.2),
}

NOTICES: list[str] = []  # what an act logged and warned of
COVERED: Counter[str] = Counter()
# An address, a count, how long something took or was waited for, and in which module a class of the package lives.
UNSTABLE = re.compile(
    r"(?<=0x)[0-9a-f]+|(?<=patched loader )\d+|(?<='s sampling: ).*|(?<=\bddp_patch\.)[a-z_.]+\.(?=[A-Z])"
    r"|(?<=items), and waited for them for [\d.]+ of [\d.]+ s"
)
OF_WORKERS = re.compile(r"^\s+.*\n|(?<=pid)\D+[\d, ]+|(?<=worker process )\d+", re.MULTILINE)  # any may fail first


def plain(value: Any) -> Any:
    """Return a value as plain ones, the same in each run: dicts are sorted, and what is long is hashed."""
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            text = UNSTABLE.sub("", value)
            return OF_WORKERS.sub("", text) if "Traceback" in text else text
        case list() | tuple():
            each = [*map(plain, value)]
            return each if len(each) <= MOST else hashlib.sha1(repr(each).encode()).hexdigest()  # noqa: S324
        case dict():
            return {str(name): plain(value[name]) for name in sorted(value, key=str)}
        case torch.Tensor() | np.ndarray():
            return str(value.dtype), [*value.shape], plain(value.flatten().tolist())
        case BaseException():
            # What others say of a wrong value follows from how it was read.
            is_ours = isinstance(value, ddp_patch.DDPPatchError | Warning)
            text = plain(str(value)) if is_ours else ""
            return type(value).__name__, text, type(value.__cause__).__name__, getattr(value, "__notes__", None)
    return plain(repr(value))


class Listener(logging.Handler):
    """Keeps what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        NOTICES.append(f"{record.levelname}: {record.getMessage()}")


class HangError(BaseException):
    """A program takes too long; no ``except Exception`` catches this."""


def hang(*_: object) -> None:
    """End a program that takes too long."""
    raise HangError


def recorded(program: Program) -> list[str]:
    """Run a program, and return what all its ranks record."""
    COVERED.update([f"kind: {program.kind}", f"way: {program.way}", f"workers: {program.workers}"])
    records: list[str] = []
    state = None
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        for run in program.runs:
            ranks = [Rank(program, run, number, state) for number in run.played]
            for rank in ranks:
                rank.play()
                records += rank.record
            state = ranks[0].state
    except HangError:
        records.append("It hangs.")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return records


def listen() -> None:
    """Keep what is logged and warned of, and end what takes too long."""
    logger = logging.getLogger("ddp_patch")
    logger.setLevel(logging.INFO)
    logger.addHandler(Listener())
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, kind, *_, **__: NOTICES.append(f"{kind.__name__}: {message}")
    signal.signal(signal.SIGALRM, hang)


def main(seed: int, start: int, stop: int, *, shows: bool) -> None:
    """Run programs, and print a digest of each; or the last one and what it gives."""
    torch.set_num_threads(1)
    _utils.MP_STATUS_CHECK_INTERVAL = 0.1  # a worker that the garbage collector ends takes so long
    listen()
    gc.freeze()
    for number in range(start, stop):
        program = Program.drawn(seed, number)
        records = recorded(program)
        if program.workers:
            gc.collect()  # workers end with their loaders
        if not shows:
            print(hashlib.sha1("\n".join(records).encode()).hexdigest()[:16])  # noqa: S324
    print(json.dumps([str(program), records] if shows else COVERED))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), shows="--show" in sys.argv)
