"""Equal steps if a dataset splits itself: ranks with batches left give some to ranks that have none.

In a round every rank takes its own next batch. A rank that holds no batch, and reads none, gets one that another rank
holds beyond its own next batch. The ranks report to each other how many batches each holds, plan the rounds that follow
from these numbers, swap batches for all of them, and deliver them to the loop before they report again.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

from ddp_patch.errors import NoStepsError
from ddp_patch.options import Uneven
from ddp_patch.positions_and_padding import made_in_turn, turn_after
from ddp_patch.ranks.exchange import refuse
from ddp_patch.ranks.group import Channel, closed_at_exit, opened
from ddp_patch.sharding.loader_passes import Passes

# How many batches a rank holds when the ranks report, at most: to report takes time, and batches take memory.
AHEAD = 4


# ---- what follows from how many batches ranks hold ----


class Round(NamedTuple):
    """One step of all ranks.

    Attributes:
        gets: Each rank's batch: the rank that holds it, and its place among the batches held there; None for no batch.
        taken: How many of its batches, from the first one on, each rank has given away after the round.
    """

    gets: Sequence[tuple[int, int] | None]
    taken: tuple[int, ...]


def next_round(held: Sequence[int], reads: Sequence[bool], uneven: Uneven) -> Round | None:
    """Return the next round; None if ranks must read more for it, or, where none reads, if the pass is over.

    Ranks that hold most give batches away. Where fewer batches than ranks are left in all, ``uneven`` decides:
    ``"drop"`` leaves these batches out, ``"keep"`` leaves some ranks without a batch, and ``"pad"`` gives such ranks a
    repeat of a batch of the same round.

    Args:
        held: How many batches each rank holds.
        reads: Whether each rank may have more.
        uneven: How an incomplete round ends.

    Examples:
        >>> next_round([1, 3, 0], [True, True, False], "pad")
        Round(gets=[(0, 0), (1, 0), (1, 1)], taken=(1, 2, 0))
        >>> next_round([1, 1, 0], [True, False, False], "pad")
    """
    if sum(held) < len(held) and (any(reads) or uneven == "drop" or not any(held)):
        return None
    without = held.count(0)
    beyond = [(rank, place) for rank, count in enumerate(held) for place in range(1, min(count, without + 1))]
    richest = iter(sorted(beyond, key=lambda each: each[1] - held[each[0]]))
    gets = [(rank, 0) if count else next(richest, None) for rank, count in enumerate(held)]
    given = [each for each in gets if each is not None]
    repeats = cycle(given)
    if uneven == "pad":
        gets = [each or next(repeats) for each in gets]
    of_ranks = [rank for rank, _ in given]
    return Round(gets, tuple(map(of_ranks.count, range(len(held)))))


def rounds_ahead(held: Sequence[int], reads: Sequence[bool], uneven: Uneven) -> list[Round]:
    """Return the rounds that follow from what ranks hold, whatever they read later; places count from the first round.

    The rounds end when a rank that still reads has no batch left, because it may read its next batch itself.

    Examples:
        >>> [step.taken for step in rounds_ahead([3, 2], [True, True], "pad")]
        [(1, 1), (1, 1)]
        >>> [step.gets for step in rounds_ahead([3, 1], [True, False], "pad")]
        [[(0, 0), (1, 0)], [(0, 1), (0, 2)]]
    """
    rounds, left = list[Round](), [*held]
    while all(left[rank] or not reads[rank] for rank in range(len(held))):
        if (step := next_round(left, reads, uneven)) is None:
            break
        gone = [before - now for before, now in zip(held, left, strict=True)]
        rounds.append(step._replace(gets=[get and (get[0], gone[get[0]] + get[1]) for get in step.gets]))
        left = [count - taken for count, taken in zip(left, step.taken, strict=True)]
    return rounds


class BalancedRounds:
    """The rounds of a pass, for states: how many batches each rank gave, and how many each worker makes in all.

    Attributes:
        count: How many rounds there were.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self._ends: Sequence[Sequence[int]] = ()
        self._runs: list[list[Any]] = []  # the batches that a round took, and how often in a row: most rounds are alike

    def note_ends(self, ends: Sequence[Sequence[int]]) -> None:
        """Record how many batches each rank's workers make in all, in the order of their turns; -1 for unknown ones."""
        self._ends = ends

    def add(self, step: Round) -> None:
        """Record another round."""
        self.count += 1
        if self._runs and self._runs[-1][0] == step.taken:
            self._runs[-1][1] += 1
        else:
            self._runs.append([step.taken, 1])

    def taken(self, rounds: int) -> tuple[int, ...]:
        """Return how many of each rank's own batches the first rounds took.

        Examples:
            >>> rounds = BalancedRounds()
            >>> for step in rounds_ahead([4, 2], [False, False], "pad"):
            ...     rounds.add(step)
            >>> rounds.taken(2), rounds.taken(3)
            ((2, 2), (4, 2))
        """
        total: tuple[int, ...] = ()
        for taken, times in self._runs:
            counted = min(times, rounds)
            total = tuple(a + counted * b for a, b in zip(total or (0,) * len(taken), taken, strict=True))
            rounds -= counted
        return total

    def items_taken(self, rounds: int, before: Sequence[int], size: int) -> list[int]:
        """Return how many items were taken of each part: first the first rank's parts, then the second rank's parts.

        Args:
            rounds: The number of rounds of the pass.
            before: How many items were taken of each part before the pass began.
            size: How many items a batch has.

        Examples:
            >>> rounds = BalancedRounds()
            >>> rounds.note_ends([(1, -1), (2, 0)])
            >>> for step in rounds_ahead([3, 2], [True, False], "keep"):
            ...     rounds.add(step)
            >>> rounds.items_taken(2, [0, 0, 0, 0], size=1), rounds.items_taken(2, [1, 0, 1, 1], size=1)
            ([1, 1, 2, 0], [2, 1, 3, 1])
        """
        found, parts = list[int](), iter(before)
        for ends, taken in zip(self._ends, self.taken(rounds), strict=True):
            of_rank = [items // size for items in islice(parts, len(ends))]
            now = made_in_turn([None if end < 0 else end for end in ends], taken)
            first = turn_after(of_rank)
            found += [size * (made + now[(part - first) % len(ends)]) for part, made in enumerate(of_rank)]
        return found


# ---- a pass ----


def even_batches(passes: Passes[Any], workers: int, ahead: int, name: str, wrapped: Iterator[Any]) -> Iterator[Any]:
    """Return this rank's batches of a pass in which all ranks make equally many steps.

    Args:
        passes: The passes over the loader.
        workers: How many workers the loader has.
        ahead: How many batches these may be ahead of the training loop.
        name: The loader's class, as errors name it.
        wrapped: The iterator of the loader's class, which gives this rank's own batches.
    """

    def note(batch: Any) -> None:
        if passes.epochs.latest is not None:
            passes.epochs.latest.delivery.note_samples(batch)

    return closed_at_exit(_handed_out(OwnBatches(wrapped, note), passes, workers, ahead, name))


def _handed_out(own: "OwnBatches", passes: Passes[Any], workers: int, ahead: int, name: str) -> Generator[Any]:
    """Yield a rank's batches of one pass; report a failure at its beginning to the other ranks, and raise it."""
    own.read(1)  # which begins the pass
    current: Any = passes.epochs.latest
    agreed, epoch = passes.agreed, passes.epochs.counter.current
    if current is not None and current.start.is_ended:
        return
    doing = f"Iterating the {name} over epoch {epoch}"
    members, uneven = agreed.world.peer_ranks(doing), agreed.options.uneven
    if (claims := passes.monitor.claims) is not None:
        claims.hear()  # a rank that has found a mismatch does not come
    if own.failure is not None:
        refuse(members, doing, own.failure)
        own.raise_failure()
    rounds, reported = current.source.rounds, lambda: current.source.reported.column("batches")
    facts = {"epoch": epoch, "num_workers": workers}
    carried = f"batches of number {agreed.number}"
    # At most as many as workers prefetch: workers make the next batches while the loop uses the last ones.
    ahead = max(2, min(AHEAD, ahead))
    with opened(members, doing, carried, facts, agreed.options.timeout) as channel:
        left = yield from even_steps(own, channel, rounds, uneven, reported, ahead)
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
        """Read until this many batches are held, or no more batches come."""
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
            least: A failure is raised once fewer batches than this are held, after the batches before the failure were
                delivered.
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
        """Send other ranks their batches, all at once; return the batches that this rank gets, in order.

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
