"""Equal steps if a dataset splits itself: ranks with batches left give some to ranks that have none.

In a round every rank takes its own next batch. A rank that holds none, and reads none, gets a batch that another rank
holds beyond its own. The ranks report to each other how many batches each holds, plan the rounds that follow from these
numbers, swap batches for all of them, and deliver them to the loop before they report again.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, cast

from ddp_patch.errors import NoStepsError
from ddp_patch.options import Uneven
from ddp_patch.ranks.exchange import refuse
from ddp_patch.ranks.group import Channel, closed_at_exit, opened
from ddp_patch.streams.even_rounds import BalancedRounds, Round, rounds_ahead
from ddp_patch.streams.stream_passes import StreamPasses, StreamSource

# How many batches a rank holds when the ranks report, at most: to report takes time, and batches take memory.
AHEAD = 4


def even_batches(passes: StreamPasses, workers: int, name: str, wrapped: Iterator[Any]) -> Iterator[Any]:
    """Return the batches of a pass of all ranks.

    Args:
        passes: The passes over the loader.
        workers: How many workers the loader has.
        name: The loader's class, as errors name it.
        wrapped: The iterator of the loader's class, which gives this rank's own batches.
    """

    def note(batch: Any) -> None:
        if passes.epochs.latest is not None:
            passes.epochs.latest.delivery.note_samples(batch)

    return closed_at_exit(_handed_out(OwnBatches(wrapped, note), passes, workers, name))


def _handed_out(own: "OwnBatches", passes: StreamPasses, workers: int, name: str) -> Generator[Any]:
    """Yield a rank's batches of one pass; report a failure at its beginning to the other ranks, and raise it."""
    own.read(1)  # which begins the pass
    current, agreed, epoch = cast(Any, passes.epochs.latest), passes.agreed, passes.epochs.counter.current
    if current is not None and current.start.is_ended:
        return
    doing = f"Iterating the {name} over epoch {epoch}"
    members, uneven = agreed.world.peer_ranks(doing), agreed.options.uneven
    if (claims := passes.monitor.claims) is not None:
        claims.hear()  # a rank that has found a mismatch does not come
    if own.failure is not None:
        refuse(members, doing, own.failure)
        own.raise_failure()
    source = cast(StreamSource, current.source)
    rounds = cast(BalancedRounds, source.rounds)
    facts = {"epoch": epoch, "num_workers": workers}
    carried = f"batches of number {agreed.number}"
    # Not more than workers prefetch: they make the next batches while the loop uses the ones before.
    ahead = max(2, min(AHEAD, workers * passes.ahead))
    with opened(members, doing, carried, facts, agreed.options.timeout) as channel:
        left = yield from even_steps(own, channel, rounds, uneven, lambda: source.reported.column("batches"), ahead)
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
        failure: The error that reading raised.
        reads: Whether more batches may come.
    """

    def __init__(self, wrapped: Iterator[Any], note: Callable[[Any], object] = lambda _: None) -> None:
        self._wrapped, self._note = wrapped, note
        self._held: deque[Any] = deque()
        self.failure: Exception | None = None
        self.reads: bool = True

    @property
    def held(self) -> int:
        """How many batches are held beyond those of the planned rounds."""
        return len(self._held)

    def read(self, batches: int) -> None:
        """Read until so many batches are held, or no more come."""
        while self.held < batches and self.reads:
            try:
                self._held.append(next(self._wrapped))
                self._note(self._held[-1])
            except StopIteration:
                self.reads = False
            except Exception as error:  # noqa: BLE001 - the user's code; raised after the other ranks know it
                self.failure, self.reads = error, False

    def raise_failure(self) -> None:
        """Raise the error that reading raised, if there was one."""
        failure, self.failure = self.failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # else the error holds its traceback, which holds the loader with its workers

    def reports(self, channel: Channel, least: int, ends: Sequence[int]) -> list[list[int]]:
        """Report how many batches this rank holds, whether more may come, and its ends; return the reports of all.

        Args:
            channel: Connects the ranks.
            least: A failure is raised once fewer batches than this are held; batches before it are delivered.
            ends: How many batches each of this rank's workers makes in all.

        Raises:
            Exception: The error that reading raised here.
            RankMismatchError: Another rank failed, or has left.
        """
        if self.held < least:
            self.raise_failure()
        reads = self.reads or self.failure is not None
        return [[*map(int, row)] for row in channel.gathered([self.held, reads, *ends])]

    def exchanged(self, rounds: Sequence[Round], channel: Channel) -> deque[Any]:
        """Send the batches that other ranks get of this one, all at once; return those that this rank gets, in order.

        Args:
            rounds: The rounds that these batches are for.
            channel: Connects the ranks.
        """
        if not rounds:
            return deque()
        own = channel.index
        gets = [
            [get for get in of_rank if get is not None] for of_rank in zip(*(step.gets for step in rounds), strict=True)
        ]
        handed = {
            rank: [self._held[place] for source, place in of_rank if source == own]
            for rank, of_rank in enumerate(gets)
            if rank != own and any(source == own for source, _ in of_rank)
        }
        swapped = channel.swapped(handed, sorted({source for source, _ in gets[own]} - {own}))
        came = {rank: iter(batches) for rank, batches in swapped.items()}
        due = deque(self._held[place] if rank == own else next(came[rank]) for rank, place in gets[own])
        for _ in range(sum(step.taken[own] for step in rounds)):
            self._held.popleft()
        return due


def even_steps(
    own: OwnBatches,
    channel: Channel,
    rounds: BalancedRounds,
    uneven: Uneven,
    ends: Callable[[], Sequence[int]],
    ahead: int = AHEAD,
) -> Generator[Any, None, int]:
    """Yield a rank's batches in the rounds that all ranks plan; return how many batches are left on all ranks.

    The ranks plan one round at first, so that the first batch comes at once, and then up to twice as many as before.

    Args:
        own: The batches that this rank reads.
        channel: Connects the ranks.
        rounds: Records the rounds.
        uneven: How an incomplete round ends.
        ends: Returns how many batches each of this rank's workers makes in all; -1 while that is unknown.
        ahead: How many batches to hold at most when the ranks report, unless a round needs more.
    """
    least = wanted = 1
    while True:
        own.read(max(least, wanted))
        rows = own.reports(channel, least, ends())
        held, reads = [row[0] for row in rows], [bool(row[1]) for row in rows]
        rounds.note_ends([row[2:] for row in rows])
        plan = rounds_ahead(held, reads, uneven)
        due = own.exchanged(plan, channel)
        for step in plan:
            rounds.add(step)
            if step.gets[channel.index] is not None:
                channel.batches_delivered += 1
                yield due.popleft()
        if not any(reads):  # no other round can follow
            return sum(held) - sum(sum(step.taken) for step in plan)
        # A rank that reads alone must read a batch for every rank.
        least, wanted = -(-len(held) // max(1, sum(reads))), min(2 * wanted, ahead)
