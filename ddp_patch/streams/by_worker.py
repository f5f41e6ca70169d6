"""Equal steps if a dataset splits itself: ranks with batches left give some to those that have none."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from ddp_patch.compat.private_torch import pinned_by
from ddp_patch.errors import NoStepsError, WorldError
from ddp_patch.ranks.channel import Channel, opened
from ddp_patch.ranks.exchange import refuse
from ddp_patch.ranks.group import closed_at_exit
from ddp_patch.sharding.passes import Pass
from ddp_patch.streams.balanced_rounds import AHEAD, AHEAD_IF_FAST, BalancedRounds, Holding, RoundPlan
from ddp_patch.streams.stream_sampler import StreamPasses
from ddp_patch.streams.stream_source import StreamSource
from ddp_patch.walks import nested

__all__ = ["WAITS", "EvenSteps", "OwnBatches", "even_steps"]


_READS, _RAN_OUT, _FAILED, _LEFT = range(4)

# A step in which reports may take as long as all else, and how long a rank then reads on before it reports.
_FAST_S, _PATIENCE_S = 0.01, 0.05

# Read ahead in fast steps, at most, and as much again while it waits: a worker's large tensors are open files, of which
# a process often may have 1024, in shared memory, of which a container often has 64 MiB.
_MOST_FILES, _MOST_BYTES = 256, 2**23

# Comes instead of a batch before a rank waits for the others.
WAITS: Final = object()


@dataclass(frozen=True)
class EvenSteps:
    """Makes passes of all ranks of what the iterators of a loader's class give.

    Attributes:
        passes: The passes over the loader.
        workers: How many workers it has.
        name: What errors call the loader.
    """

    passes: StreamPasses
    workers: int
    name: str

    def __call__(self, wrapped: Iterator[Any]) -> Iterator[Any]:
        """Return the batches of a pass, of which this rank's own come from ``wrapped``."""
        own = OwnBatches(wrapped, self.passes.monitor.note_batch)
        return (batch for batch in closed_at_exit(_handed_out(own, self)) if batch is not WAITS)

    def opened(self, own: "OwnBatches") -> AbstractContextManager[Channel]:
        """Synchronise with the other ranks when a pass begins; raise this rank's failure, and report it to them."""
        agreed, epoch = self.passes.agreed, self.passes.epochs.current
        doing = f"Iterating the {self.name} over epoch {epoch}"
        if not dist.is_initialized():
            raise WorldError(
                f"{doing}: the process group is gone, and with share='by_worker' ranks send each other "
                "batches. Call torch.distributed.init_process_group() again and patch the unpatched loader, or iterate "
                "the unpatched loader."
            )
        members = agreed.world.peer_ranks(doing)
        if own.failure is not None:
            refuse(members, doing, own.failure)
            own.raise_failure()
        facts = {"epoch": epoch, "num_workers": self.workers}
        return opened(members, doing, agreed.number, facts, agreed.options.timeout)


class OwnBatches:
    """The batches that this rank's own workers make, read ahead.

    Args:
        wrapped: The loader's own iterator.
        note: Called with each batch that was read.

    Attributes:
        failure: What reading them raised.
        ready: Returns how many come without waiting, when so many were received.
        due: What this rank gets in the planned rounds, in order: batches of its own and of others.
    """

    def __init__(self, wrapped: Iterator[Any], note: Callable[[Any], object] = lambda _: None) -> None:
        self._wrapped, self._note = wrapped, note
        self._held: deque[Any] = deque()
        self._received = self._known_to_come = 0
        self._ran_out = False
        self.failure: Exception | None = None
        self.ready: Callable[[int], int] = lambda _: 0
        self.due: deque[Any] = deque()

    @property
    def held(self) -> int:
        """How many are held beyond those of the planned rounds."""
        return len(self._held)

    @property
    def room(self) -> int:
        """How many batches like the latest one may be read ahead, where steps are fast."""
        leaves = [leaf for _, leaf in nested(self._held[-1])] if self._held else [self]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]
        texts = [leaf for leaf in leaves if isinstance(leaf, str | bytes)]
        numbers = sum(isinstance(leaf, int | float | None) for leaf in leaves)
        if len(tensors) + len(texts) + numbers < len(leaves):
            return AHEAD  # nobody knows what is in them
        files = sum(tensor.untyped_storage().is_shared() for tensor in tensors)  # small ones came by value
        size = sum(tensor.nbytes for tensor in tensors) + sum(map(len, texts))
        return max(AHEAD, min(AHEAD_IF_FAST, _MOST_FILES // max(1, files), _MOST_BYTES // max(1, size)))

    @property
    def reads(self) -> bool:
        """Whether there may be more."""
        return not self._ran_out and self.failure is None

    def read(self, least: int, most: int = 0, patience_s: float = 0) -> None:
        """Read until as many are held, or there are no more.

        Args:
            least: How many to wait for.
            most: How many to hold of those that come without waiting long.
            patience_s: How long that is, in seconds.
        """
        self._read_up_to(least)
        if self.held < most and self.reads:
            if self._received >= self._known_to_come:
                self._known_to_come = self._received + self.ready(self._received)
            self._read_up_to(min(most, self.held + self._known_to_come - self._received))
        until = monotonic() + patience_s
        while self.held < most and self.reads and patience_s and monotonic() < until:
            self._read_up_to(self.held + 1)

    def _read_up_to(self, batches: int) -> None:
        while self.held < batches and self.reads:
            try:
                self._held.append(next(self._wrapped))
                self._received += 1
                self._note(self._held[-1])
            except StopIteration:
                self._ran_out = True
            except Exception as error:  # noqa: BLE001 - the user's code; raised where the others are told
                self.failure = error

    def raise_failure(self) -> None:
        """Raise what reading raised, if it did."""
        failure, self.failure = self.failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # or it would hold its own traceback, and that the loader with its workers

    def report(self, channel: Channel, plan: RoundPlan, ends: Sequence[int]) -> None:
        """Begin to report to the others what this rank holds beyond the plan, and where its workers end."""
        state = _RAN_OUT if self._ran_out else _READS
        if self.failure is not None and self.held < plan.least:  # what came before it is given
            channel.fail(self.failure)
            state = _FAILED
        channel.begin_gather([self.held, state, *ends])
        plan.has_reported = True

    def hand_over(self, plan: RoundPlan, channel: Channel) -> None:
        """Begin to send each rank all that it gets of this one in the planned rounds."""
        for rank, gets in enumerate(plan.gets):
            given = [self._held[place] for source, place in gets if source == channel.index != rank]
            if given:
                channel.send(rank, given)

    def take(self, plan: RoundPlan, channel: Channel) -> None:
        """Have all that this rank gets in the planned rounds lie ready, and no longer what it has handed over."""
        gets, own = plan.gets[channel.index], channel.index
        came = {rank: iter(channel.receive(rank)) for rank in sorted({source.rank for source in gets} - {own})}
        for rank, place in gets:
            self.due.append(self._held[place] if rank == own else pinned_by(self._wrapped, next(came[rank])))
        channel.all_sent()
        for _ in range(plan.takes):
            self._held.popleft()


def _handed_out(own: OwnBatches, maker: EvenSteps) -> Generator[Any]:
    """Yield a rank's batches of one pass, in rounds of all ranks, and ``WAITS``."""
    own.read(1)  # which begins the pass
    current = cast("Pass[Any]", maker.passes.latest)
    source = cast(StreamSource, current.source)
    rounds, uneven = source.in_rounds(), maker.passes.agreed.options.uneven
    # Without workers, a batch is made when it is read: one for the step and one ahead.
    own.ready = source.batches_ready if maker.workers else lambda _: 2
    with maker.opened(own) as channel:
        plan = RoundPlan(channel.index, uneven)
        yield from even_steps(own, channel, plan, rounds, source.batches_made)
        rounds.end()
        if current.start.is_at_epoch_start:  # the rest of an epoch may well have no step
            _require_steps(rounds, plan.ranks, uneven)


def even_steps(
    own: OwnBatches,
    channel: Channel,
    plan: RoundPlan,
    rounds: BalancedRounds,
    ends: Callable[[], Sequence[int]],
    clock: Callable[[], float] = monotonic,
) -> Generator[Any]:
    """Yield a rank's batches in the rounds that all ranks plan, and ``WAITS`` before it waits for the others.

    Args:
        own: The batches that it reads itself.
        channel: Connects the ranks.
        plan: What they have agreed on.
        rounds: Records the rounds.
        ends: Returns how many batches each of its workers made in all; -1 where that is not known yet.
        clock: Returns the time, in seconds.
    """
    heard_at, steps = clock(), 0
    while not plan.is_over:
        if (step := plan.next()) is None:
            if not plan.has_reported:
                own.read(plan.least, plan.wanted, _PATIENCE_S if plan.is_fast else 0)
                own.report(channel, plan, ends())
            yield WAITS
            is_fast = clock() - heard_at < _FAST_S * (rounds.count - steps)
            heard = _heard(channel, own, rounds, 2 * plan.wanted)
            plan.hear(heard, is_fast=is_fast, room=own.room)
            if plan.hands_over:
                channel.meet()  # one that has reported and then left would be waited for
            # All at once: it takes fewer messages, and in the planned rounds nobody waits for another.
            own.hand_over(plan, channel)
            yield WAITS
            own.take(plan, channel)
            heard_at, steps = clock(), rounds.count
            continue
        got = [own.due.popleft()] if step.gets[channel.index] is not None else []
        rounds.add(step.taken)
        own.read(0, min(plan.wanted, 2 * plan.wanted - len(own.due)))
        if plan.may_report(own.held, own.reads):
            own.report(channel, plan, ends())
        if got:
            channel.count_batch()
            rounds.give()
            try:
                yield got.pop()
            except GeneratorExit:
                # If it has reported, it is missed when the ranks next exchange something.
                if not plan.has_reported:
                    channel.say_goodbye([0, _LEFT, *ends()])
                raise


def _heard(channel: Channel, own: OwnBatches, rounds: BalancedRounds, most: int) -> list[Holding]:
    """Return what each rank reported; raise if one failed, or left. Meanwhile, go on reading, up to so many."""

    def reads_on() -> bool:
        own.read(0, most)
        return own.reads and own.held < most

    rows = channel.gathered(reads_on)
    if rows[channel.index][1] == _FAILED:
        own.raise_failure()
    if any(state in {_FAILED, _LEFT} for _, state, *_ in rows):
        channel.require_nobody_left()
    rounds.hear([row[2:] for row in rows])
    return [Holding(held, state == _READS) for held, state, *_ in rows]


def _require_steps(rounds: BalancedRounds, ranks: Sequence[Holding], uneven: str) -> None:
    """Refuse to leave out all that there was."""
    if (left := sum(rank.held for rank in ranks)) and not rounds.count:
        raise NoStepsError(
            f"A rank would make no step in an epoch: a step needs a batch for each of {len(ranks)} ranks, all workers "
            f"together made {left}, and uneven={uneven!r} leaves out an incomplete step. Use one of "
            f"these: uneven='pad', uneven='keep', a number of ranks of at most {left}."
        )
