"""How a pass gets its items: looked up, or drawn. Chosen when the pass begins."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, Generic, TypeVar, cast

from ddp_patch.errors import StateError
from ddp_patch.orders.chunks import Drawn, split_chunks
from ddp_patch.orders.digest import Digest, number_of, number_or_zero
from ddp_patch.orders.orders import EpochOrder
from ddp_patch.positions_and_padding import Part, Plan, Schedule, Sizes
from ddp_patch.ranks.log import Marks
from ddp_patch.sharding.saved_state import RECOGNISED_BY, NotedBatch, Position, States, StreamSnapshot, StreamStart

__all__ = ["Indexed", "ItemSource", "Nothing", "Streamed"]


T = TypeVar("T")


# So many items of an order that can be looked up are compared, evenly spread, and its length.
_LOOKED_UP = 64


class ItemSource(Generic[T]):
    """How a pass gets its rank's items. By itself it has none.

    Attributes:
        length: How many items all ranks share in the pass, once its end was found. Every rank knows it at the same
            step.
        sizes: How many samples each item of the pass has, for all ranks' items in order and as far as they were drawn;
            None if this rank does not see them, or nobody needs that.
        rounds: The rounds in which ranks send each other batches (``BalancedRounds``, ``streams/even_steps.py``); None
            if each gives its own.
        is_open_ended: Whether a rank may find the end later than another.
        is_endless: Whether more is given than there is: workers find the end.
        is_in_parts: Whether several workers read a part each; False while that is unknown.
        has_own_length: Whether other ranks may have more or fewer batches.
        digest: Takes note of what is drawn, for the ranks to compare; None if nobody compares it.
    """

    # Subclasses annotate again what they set: pyright asks for it.
    length: int | None = None
    sizes: Sizes | None = None
    rounds: Any = None
    is_open_ended: bool = True
    is_endless: bool = False
    is_in_parts: bool = False
    has_own_length: bool = False
    digest: Digest | None = None

    def chunks(self, skip: int) -> Iterator[Sequence[T]]:
        """Yield this rank's items in order, but for the first ``skip``, in parts; some may be empty."""
        return iter(())

    @property
    def marks(self) -> Marks:
        """What tells the digests of what was drawn, and does not keep what draws it."""
        marks = {} if self.digest is None else self.digest.marks
        return lambda: marks

    @property
    def number_marks(self) -> Marks:
        """What tells the digests of the numbers in what was drawn, beside names; none where all is in ``marks``."""
        return dict

    def ends_within(self, items: int) -> bool:
        """Draw up to the end if it is at most this many items of the share away, and return whether it is.

        Then the samplers hold what the epoch leaves in them. Return False, too, where one rank would know and another
        not.
        """
        return False

    def states_within(self, states: States, taken: int) -> States:
        """Return the states from which the pass goes on.

        Args:
            states: What this rank's samplers held before the pass.
            taken: How many items all ranks have taken of the epoch.
        """
        return replace(states, streams=())

    def lengths_found(self) -> Sequence[int | None]:
        """Return how many items the stream had, or each part of it; None where nobody came to the end."""
        return [self.length]

    def parts(self, skip: int) -> Sequence[Part]:
        """Return what the pass is over, when so many items of each rank's share were taken before."""
        return [Part(skip, self.length)]

    def position_after(self, position: Position, batches: int, schedule: Callable[[], Schedule]) -> Position:
        """Return the position after this many batches, of which ``position`` has what follows from their number."""
        return position

    def most_when_found(self, schedule: Callable[[], Schedule], batches: int, *, may_end: bool) -> int | None:
        """Wait for workers to find the end, and return how many batches the largest share then has; None if unknown.

        Args:
            schedule: Returns the batches, with the ends that were found.
            batches: How many were given.
            may_end: Whether these may be all.
        """
        return None

    def keep(self, note: NotedBatch) -> None:
        """Keep what the worker noted whose batch the loop is given."""

    def note_first_batch(self) -> None:
        """Record that the loop was given its first batch."""

    def note_loop_end(self) -> None:
        """Record that the loop has seen the end."""

    def require_one_order(self) -> None:
        """Raise RankMismatchError if this rank's workers should read one stream, and read others."""


class Nothing(ItemSource[T]):
    """Is what a pass reads that resumes after an epoch's last item."""

    length: int | None = 0
    sizes: Sizes | None

    def __init__(self) -> None:
        self.sizes = Sizes()  # those of no item are all known


class Indexed(ItemSource[T]):
    """Looks this rank's items up in the epoch's order.

    Args:
        drawn: Draws the order of the whole epoch.
        random_context: Returns what to enter while the sampler draws.
        plan: Which positions of what is left are this rank's.
        taken: How many items other numbers of ranks have taken.
        balanced: Returns the order, balanced, for a pass that begins at a position; None to share it as it comes.
        digest: Takes note of the order, for the ranks to compare; None if nobody compares it.
        keeps_sizes: Whether to record how many samples the items have.
    """

    is_open_ended: bool = False  # the whole epoch is drawn before the first item is given
    length: int | None
    sizes: Sizes | None
    digest: Digest | None

    def __init__(
        self,
        drawn: Callable[[], EpochOrder],
        random_context: Callable[[], AbstractContextManager[object]],
        plan: Plan,
        taken: int,
        *,
        balanced: Callable[[EpochOrder, int], EpochOrder] | None,
        digest: Digest | None,
        keeps_sizes: bool,
    ) -> None:
        self._drawn, self._random_context, self._plan, self._taken = drawn, random_context, plan, taken
        self._balanced, self.digest, self._keeps_sizes = balanced, digest, keeps_sizes
        self._draw_rest: Callable[[], object] | None = None  # and not the order, which is large
        self._is_finished = False

    def chunks(self, skip: int) -> Iterator[Sequence[T]]:
        """Draw the order, and yield the items at this rank's positions."""
        plan, order = self._plan, self._drawn_order()
        if self._balanced is not None:
            order = self._balanced(order, skip * plan.num_replicas)
        taken = min(self._taken, order.length)
        length = self.length = order.length - taken
        at: Callable[[range], Sequence[T]] = partial(_items_from, order, taken) if taken else order.at
        real, repeated = plan.own_and_repeated(length)
        padding = at(repeated) if repeated else []  # first: an order is looked up from its beginning on
        # The items that every rank has come first. Whoever asks for more finds the end, at the same step.
        rounds = length // plan.num_replicas
        if order.sizes is not None:
            self.sizes = Sizes()
            for size, batches in order.sizes(range(taken, order.length)):
                self.sizes.add(size, batches)
        elif self._keeps_sizes:
            self.sizes = Sizes()
            self.sizes.add(0, batches=min(length, skip * plan.num_replicas))  # nobody asks for those that were done
            at = partial(self._looking_at_all, at, length)
        yield from map(at, order.pieces(real[skip:rounds]))
        if self._balanced is not None:
            order.at(range(length)[-1:])  # balances the last window, in which this rank may have no item
        yield from map(at, order.pieces(real[max(skip, rounds) :]) if len(real) > rounds else [range(length, length)])
        yield padding[max(0, skip - len(real)) :]
        self._finish()

    def _drawn_order(self) -> EpochOrder:
        with self._random_context():
            order = self._drawn()
        self._draw_rest = order.finish
        if self.digest is not None:
            spread = range(0, order.length, max(1, order.length // _LOOKED_UP))
            self.digest.add([order.length, *order.at(spread)])
            self.digest.end()
        return order

    def _looking_at_all(self, at: Callable[[range], Sequence[T]], length: int, positions: range) -> Sequence[T]:
        """Return the items at some of a rank's positions, and note the sizes of all ranks' items up to there."""
        sizes, plan = cast(Sizes, self.sizes), self._plan
        until = positions[-1] - plan.rank + plan.num_replicas if positions else length
        first = len(sizes)
        everybodys = list(sizes.recording(at(range(first, min(until, length)))))
        return everybodys[positions.start - first :: plan.num_replicas] if positions else []

    def ends_within(self, items: int) -> bool:
        """Finish, wherever the pass is: the order was drawn as a whole."""
        self._finish()
        return self._is_finished

    def _finish(self) -> None:
        """Draw, once, what the sampler draws after its last item."""
        if self._draw_rest is not None:
            draw_rest, self._draw_rest, self._is_finished = self._draw_rest, None, True
            with self._random_context():
                draw_rest()


class Streamed(ItemSource[T]):
    """Draws the whole stream, chunk by chunk, and keeps this rank's items.

    Args:
        begin: Begins what yields the items in the order of the epoch.
        random_context: Returns what to enter while the sampler draws.
        rest: Returns what is left of these items, in the order in which the ranks share it.
        plan: Which positions of what is left are this rank's.
        name: The sampler's class.
        draws_ahead: Whether more may be drawn than is asked for. An iterator, which can be used only once, goes on in
            the next pass where a break leaves it.
        keeps_sizes: Whether to record how many samples the items have.
        digest: Takes note of what is drawn, for the ranks to compare; None if nobody compares it.
        known: What the epoch's first items were when the state was taken that is resumed; None if none is.
    """

    length: int | None
    sizes: Sizes | None
    digest: Digest | None

    def __init__(
        self,
        begin: Callable[[], Iterator[T]],
        random_context: Callable[[], AbstractContextManager[object]],
        rest: Callable[[Iterator[T]], Iterator[T]],
        *,
        plan: Plan,
        name: str,
        draws_ahead: bool,
        keeps_sizes: bool,
        digest: Digest | None = None,
        known: StreamStart | None = None,
    ) -> None:
        self._plan, self._random_context = plan, random_context
        self._draws_ahead, self.digest = draws_ahead, digest
        with random_context():
            stream = begin()
        self._first: list[int] = []
        self._stream = rest(chain(_recognised(stream, self._first, known, name), stream))
        self._chunks: Drawn[T] | None = None
        self.sizes = Sizes() if keeps_sizes else None

    def chunks(self, skip: int) -> Iterator[Sequence[T]]:
        """Draw, and yield this rank's items."""
        self._chunks = Drawn(
            self._stream if self.sizes is None else self.sizes.recording(self._stream),
            self._random_context,
            self._plan,
            rounds=None if self._draws_ahead else repeat(1),
            digest=self.digest,
        )
        for part in split_chunks(self._plan, self._chunks, self._found):
            yield part[skip:] if skip else part
            skip = max(0, skip - len(part))

    def _found(self, length: int) -> None:
        if self.digest is not None:
            self.digest.end()
        self.length = length

    def ends_within(self, items: int) -> bool:
        """Draw more, and return whether at most this many items of the share are left."""
        # What is read ahead of an iterator would be lost to the next pass.
        return self._draws_ahead and self._chunks is not None and self._chunks.ends_within(items)

    def states_within(self, states: States, taken: int) -> States:
        """Return the states from which the pass goes on, with what the epoch's first items were."""
        first = self._first[: min(RECOGNISED_BY, taken)]
        return replace(
            states, streams=[StreamSnapshot(StreamStart(len(first), None, number_of(first)))] if first else ()
        )


def _recognised(stream: Iterator[T], first: list[int], known: StreamStart | None, name: str) -> Iterator[T]:
    """Yield the first items of an epoch, and note hashes of them.

    Args:
        stream: All items.
        first: Gets the hashes.
        known: What the items were when the state was taken that is resumed; None if none is.
        name: The sampler's class.

    Raises:
        StateError: They are others now.
    """
    for item in islice(stream, RECOGNISED_BY):
        first.append(number_or_zero(item))
        if known is not None and len(first) == known.seen and number_of(first) != known.whole:
            raise StateError(
                f"The pass cannot resume from the state: {name} began the epoch with other items when it was taken, so "
                "samples would be lost. It draws from what no state holds. Let it hold its generator in an attribute, "
                "give it a state_dict(), or put back what it draws from before you restore the state."
            )
        yield item


def _items_from(order: EpochOrder, taken: int, positions: range) -> Sequence[Any]:
    """Return the items at some positions of what is left when some were taken."""
    return order.at(range(positions.start + taken, positions.stop + taken, positions.step))
