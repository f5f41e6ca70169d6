"""Equal steps if a dataset splits itself: ranks with batches left give some to those that have none.

In a round every rank takes its own next batch. Ranks that have none any more, and read none, get one that another holds
beyond its own. The ranks tell each other how many batches each holds, plan as many rounds as follow from that, hand
over what these need, and give the loop its batches of all of them before they talk again.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import cycle
from typing import Any, NamedTuple, cast

from ddp_patch.errors import NoStepsError
from ddp_patch.options import Uneven
from ddp_patch.positions_and_padding import made_in_turn, turn_after
from ddp_patch.ranks.exchange import refuse
from ddp_patch.ranks.group import Channel, closed_at_exit, opened
from ddp_patch.streams.stream_sampler import StreamPasses, StreamSource

__all__ = ["AHEAD", "BalancedRounds", "OwnBatches", "even_batches", "even_steps", "next_round", "rounds_ahead"]


# How many batches a rank holds when the ranks talk, at most: talking takes time, and batches take memory.
AHEAD = 4


# ---- who gets whose batches, and what that took: arithmetic ----


class Round(NamedTuple):
    """One step of all ranks.

    Attributes:
        gets: Each rank's batch: of which rank it is, and which of those that this one holds, from 0; None for no batch.
        taken: How many batches each rank has no longer after the round: its first ones.
    """

    gets: Sequence[tuple[int, int] | None]
    taken: tuple[int, ...]


def next_round(held: Sequence[int], reads: Sequence[bool], uneven: Uneven) -> Round | None:
    """Return the next round; None if ranks must read more for it, or, where none reads, if the pass is over.

    What is handed over comes from whoever holds most. Where fewer batches than ranks are left in all, ``uneven``
    decides: ``"drop"`` leaves them out, ``"keep"`` leaves some ranks without, and ``"pad"`` gives these a repeat of a
    batch of the same round.

    Args:
        held: How many batches each rank holds.
        reads: Whether each may have more.
        uneven: What becomes of an incomplete round.

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
    """Return the rounds that follow from what ranks hold, whatever else they read; places count from the first one.

    A rank that reads on takes part for as long as it has batches of its own: later ones may be its own too.

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
    """The rounds of a pass: what they took, by which it can be resumed, and where the ranks' workers end.

    Attributes:
        count: How many rounds there were.
        ends: Each rank's workers, as they take turns: how many batches each made in all; -1 where that is not known
            yet.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self.ends: Sequence[Sequence[int]] = ()
        self._runs: list[list[Any]] = []  # what a round took, and how often: most are alike

    def add(self, step: Round, rank: int) -> bool:
        """Record another round; return whether this rank gets a batch in it."""
        self.count += 1
        if self._runs and self._runs[-1][0] == step.taken:
            self._runs[-1][1] += 1
        else:
            self._runs.append([step.taken, 1])
        return step.gets[rank] is not None

    def taken(self, rounds: int) -> tuple[int, ...]:
        """Return how many of each rank's own batches the first rounds took.

        Examples:
            >>> rounds = BalancedRounds()
            >>> for step in rounds_ahead([4, 2], [False, False], "pad"):
            ...     _ = rounds.add(step, rank=0)
            >>> rounds.taken(2), rounds.taken(3)
            ((2, 2), (4, 2))
        """
        total: tuple[int, ...] = ()
        for taken, times in self._runs:
            counted = min(times, rounds)
            total = tuple(a + counted * b for a, b in zip(total or (0,) * len(taken), taken, strict=True))
            rounds -= counted
        return total

    def made(self, rounds: int, before: Sequence[Sequence[int]]) -> list[int]:
        """Return how many batches of each part of the first rank, the second and so on were taken in all.

        Args:
            rounds: After so many rounds.
            before: How many were taken of each rank's parts before the pass began.

        Examples:
            >>> rounds = BalancedRounds()
            >>> rounds.ends = [(1, -1), (2, 0)]
            >>> for step in rounds_ahead([3, 2], [True, False], "keep"):
            ...     _ = rounds.add(step, rank=0)
            >>> rounds.made(2, [(0, 0), (0, 0)]), rounds.made(2, [(1, 0), (1, 1)])
            ([1, 1, 2, 0], [2, 1, 3, 1])
        """
        made: list[int] = []
        for of_parts, ends, taken in zip(before, self.ends, self.taken(rounds), strict=True):
            first, now = turn_after(of_parts), made_in_turn([None if end < 0 else end for end in ends], taken)
            made += [count + now[(part - first) % len(now)] for part, count in enumerate(of_parts)]
        return made


# ---- the ranks' batches ----


def even_batches(passes: StreamPasses, workers: int, name: str, wrapped: Iterator[Any]) -> Iterator[Any]:
    """Return the batches of a pass of all ranks.

    Args:
        passes: The passes over the loader.
        workers: How many workers it has.
        name: What errors call it.
        wrapped: What its class's iterator gives: this rank's own batches.
    """
    parts = passes.monitor.parts
    noted = (lambda _: None) if parts is None else parts.note_batch
    return closed_at_exit(_handed_out(OwnBatches(wrapped, noted), passes, workers, name))


def _handed_out(own: "OwnBatches", passes: StreamPasses, workers: int, name: str) -> Generator[Any]:
    """Yield a rank's batches of one pass; raise this rank's failure at its beginning, and report it to the others."""
    own.read(1)  # which begins the pass
    current, agreed, epoch = cast(Any, passes.epochs.latest), passes.agreed, passes.epochs.counter.current
    if current is not None and current.start.is_ended:
        return
    doing = f"Iterating the {name} over epoch {epoch}"
    members, uneven = agreed.world.peer_ranks(doing), agreed.options.uneven
    if (claims := passes.monitor.claims) is not None:
        claims.hear()  # a rank that has found something does not come
    if own.failure is not None:
        refuse(members, doing, own.failure)
        own.raise_failure()
    source = cast(StreamSource, current.source)
    source.rounds = rounds = BalancedRounds()
    facts = {"epoch": epoch, "num_workers": workers}
    carried = f"batches of number {agreed.number}"
    # Not more than workers fetch ahead: they make the next ones while the loop uses these.
    ahead = max(2, min(AHEAD, workers * passes.ahead))
    with opened(members, doing, carried, facts, agreed.options.timeout) as channel:
        left = yield from even_steps(own, channel, rounds, uneven, source.batches_made, ahead)
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
        reads: Whether there may be more.
    """

    def __init__(self, wrapped: Iterator[Any], note: Callable[[Any], object] = lambda _: None) -> None:
        self._wrapped, self._note = wrapped, note
        self._held: deque[Any] = deque()
        self.failure: Exception | None = None
        self.reads: bool = True

    @property
    def held(self) -> int:
        """How many are held beyond those of the planned rounds."""
        return len(self._held)

    def read(self, batches: int) -> None:
        """Read until so many are held, or there are no more."""
        while self.held < batches and self.reads:
            try:
                self._held.append(next(self._wrapped))
                self._note(self._held[-1])
            except StopIteration:
                self.reads = False
            except Exception as error:  # noqa: BLE001 - the user's code; raised where the others are told
                self.failure, self.reads = error, False

    def raise_failure(self) -> None:
        """Raise what reading raised, if it did."""
        failure, self.failure = self.failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # or it would hold its own traceback, and that the loader with its workers

    def told(self, channel: Channel, least: int, ends: Sequence[int]) -> list[list[int]]:
        """Tell the others what this rank holds, and return what each said: how many batches, if it reads, its ends.

        Args:
            channel: Connects the ranks.
            least: With fewer batches than this, a failure is raised; what came before it is given.
            ends: Where this rank's workers end.

        Raises:
            Exception: What failed here.
            RankMismatchError: Another rank failed, or has left.
        """
        if self.held < least:
            self.raise_failure()
        reads = self.reads or self.failure is not None
        return [[*map(int, row)] for row in channel.gathered([self.held, reads, *ends])]

    def exchanged(self, rounds: Sequence[Round], channel: Channel) -> deque[Any]:
        """Hand over what other ranks get of this one, all at once; return what this one gets, in order.

        Args:
            rounds: The rounds, which these batches are for.
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
    """Yield a rank's batches in the rounds that all ranks plan; return how many batches all ranks have left.

    The ranks plan one round at first, so that the first batch comes at once, and then up to twice as many as before.

    Args:
        own: The batches that it reads itself.
        channel: Connects the ranks.
        rounds: Records the rounds.
        uneven: What becomes of an incomplete round.
        ends: Returns how many batches each of its workers made in all; -1 where that is not known yet.
        ahead: How many batches to hold at most when the ranks talk, unless a round needs more.
    """
    least = wanted = 1
    while True:
        own.read(max(least, wanted))
        rows = own.told(channel, least, ends())
        held, reads = [row[0] for row in rows], [bool(row[1]) for row in rows]
        rounds.ends = [row[2:] for row in rows]
        plan = rounds_ahead(held, reads, uneven)
        due = own.exchanged(plan, channel)
        for step in plan:
            if rounds.add(step, channel.index):
                channel.batches_delivered += 1
                yield due.popleft()
        if not any(reads):  # these were all that can follow
            return sum(held) - sum(sum(step.taken) for step in plan)
        # Who reads alone must read for all.
        least, wanted = -(-len(held) // max(1, sum(reads))), min(2 * wanted, ahead)
