"""Run random programs of users on real ranks, and judge what each rank was given.

A program makes a loader, patches it and trains some epochs. Before and in them, ranks act: they draw, look, list, set,
seed, learn, change data, break off, resume, validate. Loops may keep their iterators, with the garbage collector off.
Some loaders say that they are sharded already, and some split themselves by worker. In a *faulty* program one rank acts
alone, or such a loader is wrong: each sample must come once, or a rank must tell within the epoch in which the first
would be lost (or in the next, if a rank left its loop alone: nobody knows that before it begins another; or if ranks
never meet: one may be some epochs ahead by then). In an *honest* one, all ranks act alike, or harmlessly: each sample
must come once, and nothing may be told or warned of, but once that a loader is iterated which was patched.

``nox -s soak -- programs --programs 500 --seed 0`` runs so many of each kind; 100 or more write what came of
them into ``docs/reliability.md``. A program that fails is shown, and ``--first`` runs it again.
"""

import argparse
import copy
import gc
import multiprocessing
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import quick
import torch
import torch.distributed as dist
import users
from jobs import AllReduce, Job, Run, run_job, verdict
from pages import markdown, put
from program_loaders import (
    CLAIMS,
    KEEPING,
    OF_WORKERS,
    WRONG_CLAIMS,
    WRONG_OF_WORKERS,
    AlikeBatches,
    CroppedByModule,
    Unreadable,
    UnreadableStream,
    iterated,
)
from users import SHUFFLERS, SIZE, N

from ddp_patch import loader_state, restore_loader
from ddp_patch.errors import RanksFailedError
from ddp_patch.orders.random_states import random_generators

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
WRITTEN_FROM = 100  # programs
AT_ONCE = 25  # programs of a launch
LIMIT_S = 300.0  # of a launch

TORCHS = ("generator=", "generator= of a sampler", "weighted", "subset", "torch.Generator")  # torch's generators
BATCHES = ("batch sampler", "alike batches")
ROWS = ("rows", "rows in order")
STREAMS = ("stream", "epoch stream", "unreadable stream")
STOPPING = ("unreadable", "an unreadable part")
FAILING = (*STOPPING, "unreadable stream", "by worker, unreadable")
LEARNERS = ("learner", "alike batches")
# Of the first kind, a sampler and its dataset draw from one generator of their module, which nobody puts back: ranks
# whose items draw another number of times then have other orders, and tell.
KINDS = ("module", *SHUFFLERS, "plain", "global", "unreadable", *ROWS, *STREAMS, *LEARNERS)
OTHERS: dict[str, Callable[..., Any]] = {
    "plain": lambda **how: users.loader(shuffle=True, **how),
    "global": lambda **how: users.loader(sampler=users.Shuffles(random), **how),
    "learner": lambda **how: users.loader(sampler=users.Learns(), **how),
    "alike batches": lambda **how: users.loader(batch_sampler=AlikeBatches(), **how),
}
ALREADY = {**CLAIMS, **WRONG_CLAIMS}
BY_WORKER = {**OF_WORKERS, **WRONG_OF_WORKERS}
UNEQUAL = "unequal parts of a stream"
WRONG = (*WRONG_CLAIMS, *WRONG_OF_WORKERS)
WITH_EPOCH = ("a DistributedSampler", "slices", "sharded batches")  # claims whose order follows from their epoch
WITH_RNG = tuple(kind for kind in SHUFFLERS if kind != "counter")
SEEDABLE = tuple(kind for kind in WITH_RNG if kind != "numpy Generator")
SHUFFLED = tuple(kind for kind in KINDS if kind != "rows in order")
MAPS = tuple(kind for kind in KINDS if kind not in STREAMS)
OPTIONS: list[dict[str, Any]] = [
    {"share": "batches"},
    {"share": "within_batches", "uneven": "keep"},
    {"cost": [1 + number % 7 for number in range(N)]},
]


class Act(NamedTuple):
    """What somebody does.

    Attributes:
        what: A name among ``ACTS``.
        rank: Who does it; -1 for all.
        epoch: In which epoch.
        step: After which step of it; 0 for before it.
        amount: How much of it.
    """

    what: str
    rank: int
    epoch: int
    step: int
    amount: int

    def when(self) -> tuple[int, int, bool]:
        """Return what programs order acts by."""
        return self.epoch, self.step, "seed the generator" in self.what or ACTS[self.what].does is fail

    def __str__(self) -> str:
        when = f"after step {self.step} of epoch {self.epoch}" if self.step else f"before epoch {self.epoch}"
        return f"{'all ranks' if self.rank < 0 else f'rank {self.rank}'}, {when}: {self.what} ({self.amount})"


@dataclass(frozen=True)
class Plan:
    """A program.

    Attributes:
        number: Which of its seed's.
        ranks: How many run it.
        kind: Which loader.
        workers: Its workers.
        persistent: Whether these stay.
        keeping: How training loops hold their iterators.
        keeper: Which rank's loops do; -1 for all.
        gc_off: Whether the garbage collector is off.
        options: Of the patch.
        all_reduce: After what the ranks meet.
        epochs: How many are trained.
        acts: What is done.
    """

    number: int
    ranks: int
    kind: str
    workers: int
    persistent: bool
    keeping: str
    keeper: int
    gc_off: bool
    options: dict[str, Any]
    all_reduce: AllReduce
    epochs: int
    acts: tuple[Act, ...]

    def __str__(self) -> str:
        loader = f"{self.kind!r}, num_workers={self.workers}, persistent_workers={self.persistent}"
        loops = f"loops: {self.keeping or 'plain'} on rank {self.keeper}{', gc off' if self.gc_off else ''}"
        lines = [f"{self.ranks} ranks, {self.epochs} epochs, meeting: {self.all_reduce}, {loops}", f"make({loader})"]
        return "\n  ".join([*lines, f"patch_dataloader_to_ddp(..., {self.options})", *map(str, self.acts)])

    @classmethod
    def drawn(cls, seed: int, number: int, is_honest: bool) -> "Plan":
        """Return a random one."""
        numbers = random.Random(f"{seed}/{number}/{is_honest}")
        ranks, epochs = numbers.choice([2, 3]), numbers.randint(2, 4)
        own = [CLAIMS, OF_WORKERS, FAILING, *([] if is_honest else [WRONG_CLAIMS, WRONG_OF_WORKERS])]
        kind = numbers.choice([*numbers.choice(own)] if numbers.random() < 0.4 else KINDS[is_honest:])
        workers = int(numbers.random() < 0.2 and kind != "split by its rank")  # a worker has no process group
        persistent = bool(workers) and numbers.random() < 0.5
        options: dict[str, Any] = {}
        if kind in BY_WORKER:
            options = {"share": "by_worker"}
        elif kind not in (*BATCHES, *STREAMS, *ROWS, *ALREADY) and numbers.random() < 0.3:
            options = numbers.choice(OPTIONS)
        all_reduce: AllReduce = numbers.choice(["each step", "each step", "each epoch", "never"])
        # A thread's passes are its own, so a fault in them is none that ranks can tell of; and it must not wait.
        may_thread = is_honest and kind not in BY_WORKER
        keeping = numbers.choice(KEEPING if may_thread else KEEPING[:-1]) if numbers.random() < 0.5 else ""
        keeper = -1 if keeping in {"ahead", "thread"} else numbers.randrange(-1, ranks)
        gc_off = numbers.random() < 0.3
        loops = (keeping, keeper, gc_off)
        plan = cls(number, ranks, kind, workers, persistent, *loops, options, all_reduce, epochs, ())
        may = [what for what, how in ACTS.items() if how.fits(plan) and not (is_honest and how.loses)]
        loses = [what for what in may if ACTS[what].loses]
        if kind in FAILING and numbers.random() < 0.5:
            loses = [what for what in loses if ACTS[what].does is fail] or loses
        chosen = [numbers.choice(may) for _ in range(numbers.randint(1, 4))]
        if not is_honest and kind not in WRONG:
            chosen[0] = numbers.choice(loses if numbers.random() < 0.7 else may)
        acts = sorted((ACTS[what].drawn(what, plan, numbers) for what in chosen), key=Act.when)
        return cls(**{**vars(plan), "acts": tuple(_together(acts))})


def _together(acts: Sequence[Act]) -> Iterator[Act]:
    """Yield acts that go together: one beginning and one end of an epoch; no resumption of what no state holds.

    Whoever seeds a generator does so last: what one rank then draws from it hides that it was seeded.
    """
    ended: set[int] = set()
    left: set[int] = set()
    done: set[tuple[str, int]] = set()
    changes = any(ACTS[act.what].is_not_saved for act in acts)
    # Who validates alone is found in the next epoch.
    alone = min((act.epoch for act in acts if act.what == "validates alone"), default=len(acts) + 99)
    for act in acts:
        if act.what in ENDS:
            # Where one rank broke off, that is found in the next epoch, of which there must be enough.
            if act.epoch in ended or act.epoch - 1 in left or (changes and act.what == "all resume"):
                continue
            if act.what == "all break off" and act.epoch > alone:
                continue
            ended.add(act.epoch)
            left |= {act.epoch} if act.what == "breaks off alone" else set()
        if (once := (_once(act), act.epoch)) in done and once[0]:
            continue
        done.add(once)
        yield act


def _once(act: Act) -> str:
    """Return what is done at most once in an epoch; empty if it is none of this."""
    how = ACTS[act.what]
    if how.does is fail:  # on one rank alone
        return "fail"
    if act.what == "validates alone":  # if each rank does, none does alone
        return act.what
    return "choose the epoch" if set_epoch in {how.does, how.then} else ""


class Training:
    """A program on one rank."""

    def __init__(self, job: Job, plan: Plan) -> None:
        self.job, self.plan = job, plan
        self.dataset: Any = None
        self.upcoming = 0
        self.kept: list[Any] = []
        self.raw = self.made()
        self.train = job.patch(self.raw, **plan.options)
        validates = any("validat" in act.what and ACTS[act.what].does is not validate for act in plan.acts)
        self.val: Any = job.patch(users.loader()) if validates else None

    def made(self) -> Any:
        """Return the loader, unpatched."""
        plan, how = self.plan, self._workers()
        if plan.kind in ALREADY or plan.kind in BY_WORKER:
            return {**ALREADY, **BY_WORKER}[plan.kind](self.job.rank, self.job.world, **how)
        match plan.kind:
            case "unreadable":
                return users.loader(Unreadable(), shuffle=True, **how)
            case "unreadable stream":
                return users.loader(UnreadableStream(range(N)), **how)
            case "module":
                return users.loader(CroppedByModule(), sampler=users.ByModule(bool(plan.number % 2)), **how)
            case "rows" | "rows in order":
                self.dataset = users.Rows(range(N) if self.dataset is None else self.dataset.rows)
                return users.loader(self.dataset, shuffle=plan.kind == "rows", **how)
            case "stream":
                self.dataset = users.Stream(N * (1 + plan.number % 8)) if self.dataset is None else self.dataset
                return users.loader(self.dataset, **how)
            case "epoch stream":
                self.dataset = users.EpochStream()
                return users.loader(self.dataset, **how)
        return {**SHUFFLERS, **OTHERS}[plan.kind](**how)

    def _workers(self) -> dict[str, Any]:
        if not self.plan.workers:
            return {}
        # Forked from a rank right after a collective, one may inherit a lock that a thread of gloo's holds.
        how = {"num_workers": self.plan.workers, "persistent_workers": self.plan.persistent}
        return {**how, "multiprocessing_context": "forkserver"}

    @property
    def rng(self) -> Any:
        """The generator that the sampler draws from."""
        holders = (self.raw, self.raw.sampler, self.raw.batch_sampler, getattr(self.raw.batch_sampler, "sampler", None))
        found = (getattr(holder, name, None) for holder in holders for name in ("generator", "rng"))
        within = random_generators(holder for holder in holders[1:] if holder is not None)  # in objects and classes
        return next((rng for rng in (*found, *within) if rng is not None), None)

    @property
    def learner(self) -> Any:
        """The sampler that learns."""
        return self.raw.sampler if self.plan.kind == "learner" else self.raw.batch_sampler

    @property
    def due(self) -> list[int]:
        """What one process would be given in the upcoming epoch."""
        match self.plan.kind:
            case "rows" | "rows in order":
                return list(self.dataset.rows)
            case "stream":
                return list(range(self.length))
            case "epoch stream":
                return list(range(1000 * self.upcoming, 1000 * self.upcoming + N))
        return list(range(N))

    @property
    def length(self) -> int:
        """How long the stream is on all ranks."""
        set_to = [
            act.amount for act in self.plan.acts if act.what == "all set the stream's length" and self._is_done(act)
        ]
        return N * set_to[-1] if set_to else N * (1 + self.plan.number % 8)

    def _is_done(self, act: Act) -> bool:
        return act.epoch <= len(self.job.run.epochs)

    def run(self) -> None:
        """Train."""
        for number in range(self.plan.epochs):
            acts = [act for act in self.plan.acts if act.epoch == number]
            for act in acts:
                if not act.step and act.what not in ENDS:
                    self.act(act)
            self.epoch(acts)
            self.job.end()
            self.upcoming += 1

    def act(self, act: Act) -> None:
        """Do it, on the ranks that do."""
        how = ACTS[act.what]
        if act.rank in {-1, self.job.rank}:
            how.does(self, act)
        if how.then is not None:
            how.then(self, act)

    def epoch(self, acts: Sequence[Act]) -> None:
        """Train an epoch, to the end that somebody makes."""
        end = next((act for act in acts if act.what in ENDS), None)
        epoch = self.job.begin(
            self.due, is_part=end is not None and end.what == "all break off", padding=(self.job.world - 1) * SIZE
        )
        most = self.steps_to(end) if end is not None and end.rank in {-1, self.job.rank} else None
        if self.plan.kind in WITH_EPOCH:
            self.sampler.set_epoch(self.upcoming)
        catches = any(act.what == "catches an error alone" and act.rank == self.job.rank for act in acts)
        with suppress(*[OSError] * catches):
            for step, _ in enumerate(self.job.step(epoch, self.loop(), most), 1):
                for act in acts:
                    if act.step == step and act.what not in ENDS:
                        self.act(act)
        if self.plan.kind in FAILING:
            self.raw.dataset.countdown.value = 0
        if end is not None and end.what == "all resume":
            # A loop that reads ahead has been given fewer batches than its loader has given.
            state = loader_state(self.train, batches_done=most)
            users.begin_anew()  # as a new process does, which knows of no pass that somebody made before
            self.job.run.owed = ""
            self.raw = self.made()
            self.train = self.job.patch(self.raw, **self.plan.options)
            restore_loader(self.train, state)
            for _ in self.job.step(epoch, self.loop()):
                pass

    def steps_to(self, end: Act) -> int:
        """Return after how many steps an epoch ends, for whoever ends it."""
        # A checkpoint after one batch may be of a look; and all epochs of a loader that is sharded already count as one
        # order, in which a look is never a pass.
        least = 1 + (end.what == "all resume" or self.plan.kind in ALREADY)
        # After one of the last batch comes a pass without batches; and what a loop that is a batch behind leaves out,
        # its loader has given.
        left = 1 + (self.plan.keeping == "ahead")
        return min(max(least, end.amount + (end.what == "all resume")), N // (SIZE * self.job.world) - left)

    def loop(self) -> Iterable[Any]:
        """Return what the training loop iterates."""
        is_keeper = self.plan.keeper in {-1, self.job.rank}
        return iterated(self.train, self.plan.keeping if is_keeper else "", self.kept)

    @property
    def sampler(self) -> Any:
        """The sampler that is told the epoch, of a loader that is sharded already."""
        return self.train.batch_sampler.sampler if self.plan.kind == "sharded batches" else self.train.sampler


Does = Callable[[Training, Act], Any]


@dataclass(frozen=True)
class How:
    """How something is done.

    Attributes:
        does: Does it.
        kinds: With which loaders; all if empty.
        loses: Whether it may lose samples if one rank does it alone.
        alike: Whether all ranks do it.
        then: What all ranks do after it.
        in_steps: Whether it may be done within an epoch.
        in_last: Whether it may be done in the last epoch.
        iterates: Whether it iterates a loader, which ends what persistent workers do.
        is_not_saved: Whether a state holds nothing of what it changes.
        passes: Whether it begins a pass over the patched loader: where ranks wait for each other, all must.
        copies: Whether it copies the loader, with what it draws from.
        grows: Whether it adds rows, or items.
        begins: Whether it begins the user's own sampler, which may count that.
        also: Of loaders that are sharded already, or split by worker, with which it may be done: "claims", "workers".
        owes: Whether it must be told, though each epoch is whole.
    """

    does: Does
    kinds: Sequence[str] = ()
    loses: bool = False
    alike: bool = False
    then: Does | None = None
    in_steps: bool = False
    in_last: bool = True
    iterates: bool = False
    is_not_saved: bool = False
    passes: bool = False
    copies: bool = False
    grows: bool = False
    begins: bool = False
    also: Sequence[str] = ()
    owes: bool = False

    def fits(self, plan: Plan) -> bool:
        """Tell whether it can be done in a program."""
        if self.passes and not self.loses and "order" in plan.options:
            return False
        if self.grows and plan.persistent:  # workers would not see the rows
            return False
        if self.begins and plan.kind == "counter":  # which then counts otherwise on one rank
            return False
        if self.copies and (plan.workers or plan.kind in (*TORCHS, "global", *FAILING)):  # which nobody can copy
            return False
        if group := "claims" if plan.kind in ALREADY else "workers" if plan.kind in BY_WORKER else "":
            return group in self.also or plan.kind in self.kinds
        return not self.kinds or plan.kind in self.kinds

    def drawn(self, what: str, plan: Plan, numbers: random.Random) -> Act:
        """Return when it is done, by whom and how much of it."""
        rank = -1 if self.alike else numbers.randrange(plan.ranks)
        epoch = numbers.randrange(plan.epochs - (not self.in_last))
        may_step = self.in_steps and not (self.iterates and plan.persistent) and plan.keeping != "thread"
        return Act(what, rank, epoch, numbers.choice([0, 0, 1, 2, 3]) if may_step else 0, numbers.randint(1, 3))


def seed_all(training: Training, act: Act) -> None:
    """Seed the global states by the rank."""
    seed = 100 * act.amount + training.job.rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_rng(training: Training, seed: int) -> None:
    """Seed the sampler's generator anew."""
    match training.rng:
        case torch.Generator() as rng:
            rng.manual_seed(seed)
        case np.random.Generator() as rng:
            rng.bit_generator.state = type(rng.bit_generator)(seed).state
        case rng:
            rng.seed(seed)


def validate(training: Training, act: Act) -> None:
    """Iterate another loader, with the same generator."""
    list(users.loader(shuffle=act.amount > 1, generator=training.rng))


def ask(training: Training, act: Act) -> None:
    """Ask for what nobody needs."""
    with suppress(TypeError):  # some have no length
        len(training.train)
    repr(training.train)
    if not act.step:
        loader_state(training.train)


def copy_raw(training: Training, act: Act) -> None:
    """Iterate a copy."""
    list(islice(copy.deepcopy(training.raw), act.amount))


def look(training: Training, act: Act) -> None:
    """Look at batches of the patched loader."""
    list(islice(training.train, act.amount))


def look_at_one(training: Training, act: Act) -> None:
    """Look at a batch of the patched loader."""
    next(iter(training.train))


def take_some(training: Training, act: Act) -> None:
    """Take more of the patched loader than a look."""
    list(islice(training.train, act.amount + 1))


def keep_a_look(training: Training, act: Act) -> None:
    """Look at a batch of the patched loader, and keep the iterator."""
    training.kept.append(iter(training.train))
    next(training.kept[-1])


def validate_patched(training: Training, act: Act) -> None:
    """Iterate the patched validation loader, or more of it than a look."""
    list(islice(training.val, None if act.amount > 1 else 3))


def look_at_validation(training: Training, act: Act) -> None:
    """Look at a batch of the patched validation loader."""
    next(iter(training.val))


def validate_alone(training: Training, act: Act) -> None:
    """As ``validate_patched``, and note that somebody must be told."""
    validate_patched(training, act)
    training.job.run.owed = f"rank {act.rank} validated alone"


def fail(training: Training, act: Act) -> None:
    """Let a sample of this epoch be unreadable on this rank."""
    stops = "StopIteration" in act.what
    # All epochs of a loader that is sharded already count as one order: there a pass that fails at once is a look.
    batches = max(act.amount, 1 if stops or training.plan.kind not in ALREADY else 2)
    training.raw.dataset.fail_after(SIZE * batches - 1, stops=stops)


def all_look(training: Training, act: Act) -> None:
    """Look at batches on every rank."""
    look(training, act)
    training.upcoming += 1


def set_epoch(training: Training, act: Act) -> None:
    """Set the epoch, alike on every rank."""
    training.upcoming = act.epoch + act.amount
    training.train.set_epoch(training.upcoming)


def set_dataset_epoch(training: Training, act: Act) -> None:
    """Call the dataset's own ``set_epoch``."""
    training.train.dataset.set_epoch(5 + act.amount)


def all_set_dataset_epoch(training: Training, act: Act) -> None:
    """Call the dataset's own ``set_epoch``, alike on every rank."""
    set_dataset_epoch(training, act)
    training.upcoming = 5 + act.amount


def learn(training: Training, seed: object) -> None:
    """Set the losses that a sampler orders by."""
    training.learner.losses = [random.Random(f"{seed}/{index}").random() for index in range(N)]


def weigh(training: Training, seed: int) -> None:
    """Set the weights that a sampler draws by."""
    training.train.sampler.weights = torch.rand(N, generator=torch.Generator().manual_seed(seed)).double() + 0.1


def shuffle_rows(training: Training, seed: object) -> None:
    """Shuffle the rows of a dataset."""
    random.Random(f"{seed}").shuffle(training.dataset.rows)


def add_rows(training: Training, rows: int) -> None:
    """Add rows to a dataset."""
    training.dataset.rows += range(len(training.dataset), len(training.dataset) + rows)


def change_stream(training: Training, **attributes: Any) -> None:
    """Have a stream read in another way."""
    vars(training.dataset).update(attributes)


def position(training: Training, act: Act) -> int:
    """Return a number somewhere in the stream."""
    return (training.plan.number * 37 + act.amount) % training.length


def draw(training: Training, times: int) -> None:
    """Draw from what the sampler draws from."""
    for _ in range(times):
        users.draw(training.rng)


def mine(training: Training, act: Act) -> str:
    """Return a seed of a rank's own."""
    return f"{training.job.rank}/{act}"


BOTH = ("claims", "workers")
HARMLESS: dict[str, How] = {
    "looks at the unpatched loader": How(
        lambda training, act: list(islice(training.raw, act.amount)),
        in_steps=True,
        iterates=True,
        begins=True,
        also=["workers"],
    ),
    "lists the unpatched loader": How(
        lambda training, act: list(training.raw), in_steps=True, iterates=True, begins=True
    ),
    "lists the sampler": How(lambda training, act: list(training.raw.batch_sampler), MAPS, in_steps=True, begins=True),
    "draws from the sampler's generator": How(
        lambda training, act: draw(training, act.amount), WITH_RNG, in_steps=True
    ),
    "validates with the same generator": How(validate, TORCHS, in_steps=True),
    "seeds the global states": How(seed_all, in_steps=True, also=BOTH),
    "waits": How(lambda training, act: time.sleep(0.03 * act.amount), in_steps=True, also=BOTH),
    "asks for length and position": How(ask, in_steps=True, also=["workers"]),
    "reads a copy": How(copy_raw, in_steps=True, iterates=True, copies=True),
    "looks, then all set the epoch": How(look_at_one, then=set_epoch, passes=True),
    "keeps a look, then all set the epoch": How(keep_a_look, then=set_epoch, passes=True),
    # All of their epochs have one order, as far as this package knows.
    "looks at a batch": How(look_at_one, [*CLAIMS, "rows in order"], in_steps=True, iterates=True),
    "looks at a batch of validation": How(look_at_validation, in_steps=True, also=BOTH),
}
ALIKE: dict[str, How] = {
    "all look": How(all_look, alike=True, also=BOTH),
    "all set the epoch": How(set_epoch, alike=True, also=["workers"]),
    "all break off": How(lambda training, act: None, alike=True, also=BOTH),
    "all resume": How(lambda training, act: None, alike=True, also=["workers"]),
    "all validate": How(validate_patched, alike=True, in_steps=True, also=BOTH),
    "all seed the generator": How(
        lambda training, act: seed_rng(training, 10 * act.epoch + act.amount + 3), SEEDABLE, alike=True
    ),
    "all learn alike": How(lambda training, act: learn(training, act), LEARNERS, alike=True, is_not_saved=True),
    "all set weights": How(
        lambda training, act: weigh(training, act.amount), ["weighted"], alike=True, is_not_saved=True
    ),
    "all shuffle rows alike": How(lambda training, act: shuffle_rows(training, act), ROWS, alike=True),
    "all add rows": How(lambda training, act: add_rows(training, 12 * act.amount), ROWS, alike=True, grows=True),
    "all set the stream's length": How(
        lambda training, act: change_stream(training, n=N * act.amount), ["stream"], alike=True, grows=True
    ),
    "all set the dataset's epoch": How(all_set_dataset_epoch, ["epoch stream"], alike=True, is_not_saved=True),
}
LOSING: dict[str, How] = {
    # Where all epochs have the same order, who is an epoch ahead loses nothing, and is compared an epoch late.
    "looks alone": How(look, [*SHUFFLED, *CLAIMS], in_steps=True, iterates=True),
    "looks alone, and keeps the iterator": How(keep_a_look, SHUFFLED, in_steps=True, iterates=True),
    "takes some, then all set the epoch": How(take_some, SHUFFLED, then=set_epoch, passes=True),
    "makes an iterator alone": How(
        lambda training, act: iter(training.train), in_steps=True, iterates=True, also=["claims"]
    ),
    "sets another epoch alone": How(lambda training, act: training.train.set_epoch(act.epoch + act.amount), SHUFFLED),
    "breaks off alone": How(lambda training, act: None, [*SHUFFLED, *CLAIMS, *OF_WORKERS], in_last=False),
    "validates alone": How(validate_alone, also=BOTH, in_steps=True, in_last=False),
    "StopIteration in the dataset alone": How(fail, STOPPING),
    "catches an error alone": How(fail, FAILING, in_last=False),
    "seeds the generator alone": How(lambda training, act: seed_rng(training, 99 + act.amount), SEEDABLE),
    "learns alone": How(
        lambda training, act: learn(training, mine(training, act)), LEARNERS, in_steps=True, is_not_saved=True
    ),
    "sets weights alone": How(lambda training, act: weigh(training, 99 + act.amount), ["weighted"], is_not_saved=True),
    "shuffles rows alone": How(lambda training, act: shuffle_rows(training, mine(training, act)), ROWS),
    "adds rows alone": How(lambda training, act: add_rows(training, 12 * act.amount), ROWS, grows=True),
    "drops a row alone": How(lambda training, act: training.dataset.rows.pop(act.amount), ROWS),
    "skips an item alone": How(
        lambda training, act: change_stream(training, skips=(position(training, act),)), ["stream"]
    ),
    "shuffles its stream alone": How(
        lambda training, act: change_stream(training, shuffled_from=position(training, act) // 2), ["stream"]
    ),
    "sets the stream's length alone": How(
        lambda training, act: change_stream(training, n=training.length + N), ["stream"], in_last=False
    ),
    "ends its stream alone": How(
        lambda training, act: change_stream(training, ends=position(training, act)), ["stream"], in_last=False
    ),
    "sets the dataset's epoch alone": How(set_dataset_epoch, ["epoch stream"], is_not_saved=True),
}
ACTS = {**HARMLESS, **ALIKE, **{what: How(**{**vars(how), "loses": True}) for what, how in LOSING.items()}}
ENDS = {"all break off", "all resume", "breaks off alone"}  # of an epoch


# Nobody knows of these before the rank begins the next epoch.
FOUND_NEXT = {"breaks off alone", "StopIteration in the dataset alone", "catches an error alone"}


def run_plan(plan: Plan, job: Job) -> None:
    """Run a program on this rank."""
    if plan.gc_off:
        gc.disable()
    try:
        Training(job, plan).run()
    finally:
        gc.enable()


def run_plans(rank: int, world: int, plans: Sequence[Plan]) -> list[Run]:
    """Run programs on this rank, one after the other, up to one after which ranks would not meet again.

    They have patched unequally often, or waited for each other unequally often.
    """
    runs: list[Run] = []
    for plan in plans:
        runs.append(run_job(rank, world, partial(run_plan, plan), plan.all_reduce))
        patches, waits = runs[-1].patches, "order" in plan.options or plan.kind in BY_WORKER
        found = torch.tensor([patches, -patches, bool(runs[-1].error and waits)])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        if found[0] + found[1] or found[2]:
            break
    return runs


def launched(plans: Sequence[Plan]) -> list[str]:
    """Run programs on new ranks, and return a verdict on each."""
    try:
        ranks = quick.run_ranks(run_plans, plans[0].ranks, plans, timeout=LIMIT_S)
    except RanksFailedError as error:
        return [f"failed: {error}"] if len(plans) == 1 else [said for plan in plans for said in launched([plan])]
    found: list[str] = []
    for runs in zip(*ranks, strict=True):
        warned = [text for run in runs for text in run.warned]
        came, error = verdict(runs), next((run.error for run in runs if run.error), "")
        # What parts have in common, or how long they are, may be on purpose, so it is no error.
        if came.startswith("lost") and warned and plans[len(found)].kind in {UNEQUAL, *WRONG}:
            came, error = "error", warned[0]
        found.append(
            f"warned: {warned[0]}" if came == "complete" and warned else f"error: {error}" if came == "error" else came
        )
    return found + (launched(plans[len(found) :]) if len(found) < len(plans) else [])


def _is_found_later(plan: Plan, lost: str) -> bool:
    """Return whether an error came in a later epoch, in a program in which nobody could raise it before."""
    found = re.search(r"epoch (\d+): .*; error in epoch (\d+)$", lost)
    epoch, raised = map(int, found.groups()) if found else (0, 0)
    is_next = raised == epoch + 1 and any(act.what in FOUND_NEXT and act.epoch == epoch for act in plan.acts)
    # Few samples that two ranks have in common are chance, as far as one epoch shows.
    return is_next or (raised > epoch and (plan.all_reduce == "never" or plan.kind == "parts that overlap"))


@dataclass
class Found:
    """What came of the programs.

    Attributes:
        counts: By what was done and what came of it, how many programs.
        wrong: Those that fail, with what came of them.
    """

    CAME = ("complete", "error", "error later", "lost in silence")

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[tuple[Plan, str]] = field(default_factory=list)

    def note(self, plan: Plan, said: str, is_honest: bool) -> None:
        """Note what came of a program."""
        came, _, rest = said.partition(":")
        # Who iterates the loader that was patched may have thrown the patched one away: that is told once.
        is_told_once = "explain UnpatchedLoaderWarning" in rest and any("unpatched" in act.what for act in plan.acts)
        if came == "warned" and (not is_honest or is_told_once):
            came = "complete"
        elif _is_found_later(plan, rest):
            came = "error later"
        if came not in ({"complete"} if is_honest else {"complete", "error", "error later"}):
            self.wrong.append((plan, said))
            came = came if came in {"error"} else "lost in silence"
        for what in {"all programs", *(act.what for act in plan.acts)}:
            self.counts[what, came] += 1

    def row(self, what: str) -> tuple[str, ...]:
        """Return a row of the table."""
        return (what, *(str(self.counts[what, came]) for came in self.CAME))


def run_all(plans: Sequence[Plan], seed: int, is_honest: bool) -> Found:
    """Run programs, many in one launch; say how far it came, and show those that fail."""
    found, done, shown, kind = Found(), 0, 0, "honest" if is_honest else "faulty"
    for ranks in (2, 3):
        alike = [plan for plan in plans if plan.ranks == ranks]
        for start in range(0, len(alike), AT_ONCE):
            some = alike[start : start + AT_ONCE]
            for plan, said in zip(some, launched(some), strict=True):
                found.note(plan, said, is_honest)
            done += len(some)
            for plan, said in found.wrong[shown:]:
                again = f"--seed {seed} --first {plan.number} --programs 1 --only {kind}"
                print(f"\nProgram {plan.number} ({kind}): {said}\n  {plan}\n  again: {again}\n", flush=True)
            shown = len(found.wrong)
            print(f"{done} {kind} programs, {shown} wrong", flush=True)
    return found


def told_of(found: dict[str, Found], seed: int) -> str:
    """Return what came of all programs in a sentence."""
    counts = {kind: those.counts for kind, those in found.items()}
    faulty, honest = (counts[kind]["all programs", "complete"] for kind in ("faulty", "honest"))
    told, later = (counts["faulty"]["all programs", came] for came in Found.CAME[1:3])
    return (
        f"Seed {seed}, 2 and 3 ranks. Of {faulty + told + later:,} faulty programs, {faulty:,} lost nothing, {told:,} "
        f"raised an error within the epoch (or warned, of unequal parts on purpose), and {later:,} raised it later: a "
        f"rank had left its loop alone, ranks never met, or few samples were the same. Of {honest:,} honest programs, "
        "none raised, and none warned but of iterating the loader that was patched."
    )


def main() -> None:
    """Run programs, and show what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=500, help="how many of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--only", choices=["faulty", "honest"])
    given = parser.parse_args()
    multiprocessing.set_forkserver_preload([*quick.OF_RANKS, "jobs", "users", "program_loaders"])
    numbers, found = range(given.first, given.first + given.programs), {}
    for kind in ("faulty", "honest") if given.only is None else (given.only,):
        plans = [Plan.drawn(given.seed, number, kind == "honest") for number in numbers]
        found[kind] = run_all(plans, given.seed, kind == "honest")
    rows: list[tuple[str, ...]] = [("what was done", *Found.CAME)]
    for kind, those in found.items():
        done = [what for what in ACTS if any(those.counts[what, came] for came in Found.CAME)]
        rows += [(f"{kind}: {those.row(what)[0]}", *those.row(what)[1:]) for what in ["all programs", *done]]
    print(markdown(rows[0], rows[1:]))
    if len(found) == 2 and given.programs >= WRITTEN_FROM and not any(those.wrong for those in found.values()):
        put(PAGE, "programmed", fill(told_of(found, given.seed), 120))
    if wrong := [plan.number for those in found.values() for plan, _ in those.wrong]:
        raise SystemExit(f"{len(wrong)} programs of seed {given.seed} went wrong: {wrong}")


if __name__ == "__main__":
    main()
