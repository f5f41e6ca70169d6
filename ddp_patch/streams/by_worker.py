"""Equal steps if a dataset splits itself: ranks with batches left give some to those that have none.

The ranks tell each other how many batches each holds, plan as many rounds as follow from that, hand over what these
need, and give the loop its batches of all of them before they talk again.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from time import monotonic
from typing import Any, cast

import torch
import torch.distributed as dist

from ddp_patch.compat.private_torch import pinned_by
from ddp_patch.errors import NoStepsError, WorldError
from ddp_patch.options import Uneven
from ddp_patch.ranks.exchange import refuse
from ddp_patch.ranks.group import Channel, closed_at_exit, opened
from ddp_patch.streams.rounds import BalancedRounds, gets_of, rounds_ahead
from ddp_patch.streams.stream_sampler import StreamPasses, StreamSource
from ddp_patch.walks import nested

__all__ = ["AHEAD", "AHEAD_IF_FAST", "OwnBatches", "even_batches", "even_steps"]


_READS, _RAN_OUT, _FAILED = range(3)

# How many batches a rank reads beyond those of the planned rounds, at most: more where steps are fast, as talking takes
# as long as some of these, and where batches are small.
AHEAD, AHEAD_IF_FAST = 4, 128

# A step in which talking may take as long as all else, and how long a rank then reads on before it talks.
_FAST_S, _PATIENCE_S = 0.01, 0.05

# Read ahead in fast steps, at most, and as much again while it waits: a worker's large tensors are open files, of which
# a process often may have 1024, in shared memory, of which a container often has 64 MiB.
_MOST_FILES, _MOST_BYTES = 256, 2**23


def even_batches(passes: StreamPasses, workers: int, name: str, wrapped: Iterator[Any]) -> Iterator[Any]:
    """Return the batches of a pass of all ranks.

    Args:
        passes: The passes over the loader.
        workers: How many workers it has.
        name: What errors call it.
        wrapped: What its class's iterator gives: this rank's own batches.
    """
    return closed_at_exit(_handed_out(OwnBatches(wrapped, passes.monitor.note_batch), passes, workers, name))


def _handed_out(own: "OwnBatches", passes: StreamPasses, workers: int, name: str) -> Generator[Any]:
    """Yield a rank's batches of one pass; raise this rank's failure at its beginning, and report it to the others."""
    own.read(1)  # which begins the pass
    current, agreed, epoch = cast(Any, passes.latest), passes.agreed, passes.epochs.current
    doing = f"Iterating the {name} over epoch {epoch}"
    if not dist.is_initialized():
        raise WorldError(
            f"{doing}: the process group is gone, and with share='by_worker' ranks send each other "
            "batches. Call torch.distributed.init_process_group() again and patch the unpatched loader, or iterate "
            "the unpatched loader."
        )
    members, uneven = agreed.world.peer_ranks(doing), agreed.options.uneven
    if own.failure is not None:
        refuse(members, doing, own.failure)
        own.raise_failure()
    source = cast(StreamSource, current.source)
    source.rounds = rounds = BalancedRounds()
    # Without workers, a batch is made when it is read: one for the step and one ahead.
    own.ready = source.batches_ready if workers else lambda _: 2
    facts = {"epoch": epoch, "num_workers": workers}
    carried = f"batches of number {agreed.number}"
    with opened(members, doing, carried, facts, agreed.options.timeout) as channel:
        left = yield from even_steps(own, channel, rounds, uneven, source.batches_made)
        rounds.is_over = True
        if left and not rounds.count and current.start.is_at_epoch_start:  # the rest of an epoch may have no step
            raise NoStepsError(
                f"A rank would make no step in an epoch: a step needs a batch for each of {len(members)} ranks, all "
                f"workers together made {left}, and uneven={uneven!r} leaves out an incomplete step. Use one of "
                f"these: uneven='pad', uneven='keep', a number of ranks of at most {left}."
            )


class OwnBatches:
    """The batches that this rank's own workers make, read ahead.

    Args:
        wrapped: The loader's own iterator.
        note: Called with each batch that was read.

    Attributes:
        failure: What reading them raised.
        ready: Returns how many come without waiting, when so many were received.
    """

    def __init__(self, wrapped: Iterator[Any], note: Callable[[Any], object] = lambda _: None) -> None:
        self._wrapped, self._note = wrapped, note
        self._held: deque[Any] = deque()
        self._received = self._known_to_come = 0
        self._ran_out = False
        self.failure: Exception | None = None
        self.ready: Callable[[int], int] = lambda _: 0

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

    def read(self, least: int, most: int = 0, patience_s: float = 0) -> bool:
        """Read until as many are held, or there are no more; return whether to read on later.

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
        return self.held < most and self.reads

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

    def told(self, channel: Channel, least: int, most: int, ends: Sequence[int]) -> list[list[int]]:
        """Tell the others what this rank holds, and return what each said: how many batches, its state, its ends.

        Args:
            channel: Connects the ranks.
            least: With fewer batches than this, a failure is told; what came before it is given.
            most: Up to how many to read while this waits.
            ends: Where this rank's workers end.

        Raises:
            Exception: What failed here.
            RankMismatchError: Another rank failed, or has left.
        """
        state = _RAN_OUT if self._ran_out else _READS
        if self.failure is not None and self.held < least:
            channel.fail(self.failure)
            state = _FAILED
        rows = channel.gathered([self.held, state, *ends], lambda: self.read(0, most))
        if state == _FAILED:
            self.raise_failure()
        if any(row[1] == _FAILED for row in rows):
            channel.require_nobody_left()
        return rows

    def exchanged(
        self, gets: Sequence[Sequence[tuple[int, int]]], taken: Sequence[int], channel: Channel
    ) -> deque[Any]:
        """Hand over what other ranks get of this one, all at once; return what this one gets, in order.

        Args:
            gets: What each rank gets: whose batches, and which of these.
            taken: How many of each rank's batches are then gone.
            channel: Connects the ranks.
        """
        own = channel.index
        for rank, of_rank in enumerate(gets):
            if rank != own and (given := [self._held[place] for source, place in of_rank if source == own]):
                channel.send(rank, given)
        came = {rank: iter(channel.receive(rank)) for rank in sorted({source for source, _ in gets[own]} - {own})}
        due = deque(
            self._held[place] if rank == own else pinned_by(self._wrapped, next(came[rank]))
            for rank, place in gets[own]
        )
        channel.all_sent()
        for _ in range(taken[own]):
            self._held.popleft()
        return due


def even_steps(
    own: OwnBatches,
    channel: Channel,
    rounds: BalancedRounds,
    uneven: Uneven,
    ends: Callable[[], Sequence[int]],
    clock: Callable[[], float] = monotonic,
) -> Generator[Any, None, int]:
    """Yield a rank's batches in the rounds that all ranks plan; return how many batches all ranks have left.

    The ranks plan one round at first, and then up to twice as many as before: so the first batch comes at once, and
    they seldom talk where steps are fast.

    Args:
        own: The batches that it reads itself.
        channel: Connects the ranks.
        rounds: Records the rounds.
        uneven: What becomes of an incomplete round.
        ends: Returns how many batches each of its workers made in all; -1 where that is not known yet.
        clock: Returns the time, in seconds.
    """
    least, most, patience_s = 1, 1, 0.0
    while True:
        own.read(least, most, patience_s)
        rows = own.told(channel, least, 2 * most, ends())
        held, reads = [row[0] for row in rows], [row[1] == _READS for row in rows]
        rounds.ends = [row[2:] for row in rows]
        plan = rounds_ahead(held, reads, uneven)
        gets, taken = gets_of(plan, len(held))
        room = own.room if patience_s else AHEAD
        due = own.exchanged(gets, taken, channel)
        # Who reads alone must read for all.
        least = -(-len(held) // max(1, sum(reads)))
        most = max(least, min(room, 2 * least * len(plan)))
        began_s = clock()
        for step in plan:
            got = [due.popleft()] if rounds.add(step, channel.index) else []
            own.read(0, min(most, 2 * most - len(due)))
            if got:
                channel.batches_delivered += 1
                yield got.pop()
        if not any(reads):  # these were all that can follow
            return sum(held) - sum(taken)
        patience_s = _PATIENCE_S if clock() - began_s < _FAST_S * len(plan) else 0
