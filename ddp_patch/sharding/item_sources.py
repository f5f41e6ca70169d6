"""The sources of a pass's items: an order in which items are looked up, or a stream from which they are drawn."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import repeat
from typing import Any, Generic, TypeVar, cast

from ddp_patch.errors import StateError
from ddp_patch.orders.chunks import Drawn, split_chunks
from ddp_patch.orders.digest import END, Digest
from ddp_patch.orders.orders import EpochOrder
from ddp_patch.positions_and_padding import Part, Plan, Schedule, Sizes
from ddp_patch.ranks.pass_facts import Marks
from ddp_patch.sharding.saved_state import NotedBatch, Position

T = TypeVar("T")


# How many items of an order that can be looked up the ranks compare, evenly spread, besides its length.
_LOOKED_UP = 64


class ItemSource(Generic[T]):
    """The source of a rank's items in a pass. The base has no items.

    Attributes:
        length: How many items the epoch has, once its end was found: on every rank at the same step.
        sizes: How many samples each item of the pass has, for all ranks' items in order, as far as they were drawn;
            None if this rank does not see them, or if no caller needs the sizes.
        rounds: The rounds in which ranks send each other batches (``BalancedRounds``, ``streams/even_steps.py``); None
            if each rank delivers its own batches.
        is_open_ended: Whether a rank may find the end later than another rank.
        is_endless: Whether the source gives items without end, because workers find the end.
        is_in_parts: Whether several workers read a part each; False while that is unknown.
        has_own_length: Whether other ranks may have more or fewer batches.
        digest: A digest of the drawn items, for the ranks to compare; None if they do not compare them.
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

    def chunks(self) -> Iterator[Sequence[T]]:
        """Yield this rank's items of the pass in order, in parts, which may be empty."""
        return iter(())

    @property
    def marks(self) -> Marks:
        """A function that returns the digests of the drawn items, and does not keep the source alive."""
        marks = {} if self.digest is None else self.digest.marks
        return lambda: {count: (value, 0) for count, value in marks.items()}

    def ends_within(self, items: int) -> bool:
        """Draw to the end if at most this many items of the share are left; return whether this is the case.

        The samplers are then in the state after the epoch. Return False if some ranks know the answer and others do
        not.
        """
        return False

    def order_up_to(self, taken: int) -> tuple[int, int] | None:
        """Return a digest of the epoch's order up to some taken items: of how many items, and the digest."""
        return None

    def lengths_found(self) -> Sequence[int | None]:
        """Return how many items the stream or each part has; None if the end was not found."""
        return [self.length]

    def parts(self, taken: int) -> Sequence[Part]:
        """Return the parts of the pass, if this many items of the epoch were taken before."""
        return [Part(taken, self.length)]

    def position_after(self, position: Position, batches: int, schedule: Callable[[], Schedule]) -> Position:
        """Return the position after some batches. ``position`` has the facts that follow from their number alone."""
        return position

    def most_when_found(self, schedule: Callable[[], Schedule], batches: int, *, may_end: bool) -> int | None:
        """Wait for workers to find the end, and return how many batches the largest share then has; None if unknown.

        Args:
            schedule: Returns the schedule, with the ends that were found.
            batches: How many batches were given.
            may_end: Whether there may be no more batches.
        """
        return None

    def keep(self, note: NotedBatch) -> None:
        """Keep the worker's note of a batch that the loop gets."""

    def note_first_batch(self) -> None:
        """Record that the loop got its first batch."""

    def note_loop_end(self) -> None:
        """Record that the loop has seen the end."""

    def require_one_order(self) -> None:
        """Raise RankMismatchError if this rank's workers read different streams instead of one."""


class Nothing(ItemSource[T]):
    """The source of a pass that resumes after an epoch's last item: it has no items."""

    length: int | None = 0
    sizes: Sizes | None

    def __init__(self) -> None:
        self.sizes = Sizes()  # the sizes of no items are known


class Foreign(ItemSource[T]):
    """The source of a loader that was sharded already, whose items are unknown.

    Args:
        is_open_ended, has_own_length: As in ``ItemSource``.
    """

    is_open_ended: bool
    has_own_length: bool

    def __init__(self, *, is_open_ended: bool, has_own_length: bool) -> None:
        self.is_open_ended, self.has_own_length = is_open_ended, has_own_length


class Indexed(ItemSource[T]):
    """Looks this rank's items up in the epoch's order.

    Args:
        draw: Draws the order of the whole epoch.
        random_context: The context in which the sampler draws.
        plan: This rank's positions in the rest of the epoch.
        start: Where the pass begins.
        balanced: Returns the balanced order for a pass that begins at a position; None to leave the order as it is.
        keeps_sizes: Whether to record how many samples the items have.
        name: The sampler's class.
        has_digest: Whether some items of the order are looked up for a digest. A computed order follows from the epoch,
            so its digest only serves to compare ranks.
    """

    is_open_ended: bool = False  # the whole epoch is drawn before the first item is given
    length: int | None
    sizes: Sizes | None
    digest: Digest | None

    def __init__(
        self,
        draw: Callable[[], EpochOrder],
        random_context: AbstractContextManager[object],
        plan: Plan,
        start: Position,
        *,
        balanced: Callable[[EpochOrder, int, Digest | None], EpochOrder] | None,
        keeps_sizes: bool,
        name: str,
        has_digest: bool,
    ) -> None:
        self._draw, self._random_context, self._plan, self._start = draw, random_context, plan, start
        self._balanced, self._keeps_sizes, self._name = balanced, keeps_sizes, name
        self.digest = Digest() if has_digest else None
        self._draw_rest: Callable[[], object] | None = None  # not the order itself, which is large
        self._is_finished = False

    def chunks(self) -> Iterator[Sequence[T]]:
        """Draw the order, and yield the items at this rank's positions."""
        plan, taken, order = self._plan, sum(self._start.taken), self._drawn_order()
        if self._balanced is not None:
            order = self._balanced(order, taken, self.digest)
        length = self.length = order.length
        at: Callable[[range], Sequence[T]] = order.at
        real, repeated = plan.own_and_repeated(length, taken)
        padding = at(repeated) if repeated else []  # first: an order is looked up from its beginning on
        # The complete rounds come first. A rank that asks for more items finds the end, at the same step as the other
        # ranks.
        rounds = max(0, length - taken) // plan.num_replicas
        if order.sizes is not None:
            self.sizes = Sizes()
            for size, batches in order.sizes(range(min(taken, length), length)):
                self.sizes.add(size, batches)
        elif self._keeps_sizes:
            self.sizes = Sizes()
            at = partial(self._looking_at_all, at, length, taken)
        yield from map(at, order.pieces(real[:rounds]))
        if self._balanced is not None:
            order.at(range(length)[-1:])  # balances the last window, in which this rank may have no item
        yield from map(at, order.pieces(real[rounds:]) if len(real) > rounds else [range(length, length)])
        yield padding
        self._finish()

    def _drawn_order(self) -> EpochOrder:
        with self._random_context:
            order = self._draw()
        self._draw_rest = order.finish
        if self.digest is not None:
            spread = range(0, order.length, max(1, order.length // _LOOKED_UP))
            self.digest.add([order.length, *order.at(spread)])
            self.digest.end()
            known = tuple(self._start.order)
            if known and known[0] == END and known != self.order_up_to(0):
                raise other_order(self._name)
        return order

    def order_up_to(self, taken: int) -> tuple[int, int] | None:
        """Return the digest of some items of the whole order, evenly spread."""
        marks = {} if self.digest is None else self.digest.marks
        return (END, marks[END]) if END in marks else None

    def _looking_at_all(
        self, at: Callable[[range], Sequence[T]], length: int, taken: int, positions: range
    ) -> Sequence[T]:
        """Return the items at some of this rank's positions, and record the sizes of all ranks' items up to these."""
        sizes, plan = cast(Sizes, self.sizes), self._plan
        until = positions[-1] - plan.rank + plan.num_replicas if positions else length
        first = taken + len(sizes)
        everybodys = list(sizes.recording(at(range(first, min(until, length)))))
        return everybodys[positions.start - first :: plan.num_replicas] if positions else []

    def ends_within(self, items: int) -> bool:
        """Let the sampler draw to its end, which is possible at any time: the order was drawn as a whole."""
        self._finish()
        return self._is_finished

    def _finish(self) -> None:
        """Let the sampler make, once, the draws that follow its last item."""
        if self._draw_rest is not None:
            draw_rest, self._draw_rest, self._is_finished = self._draw_rest, None, True
            with self._random_context:
                draw_rest()


class Streamed(ItemSource[T]):
    """Draws the whole stream, chunk by chunk, and keeps this rank's items.

    Args:
        stream: Yields the items of the epoch, in the order in which the ranks share it.
        random_context: The context in which the sampler draws.
        plan: This rank's positions in the rest of the epoch.
        start: Where the pass begins.
        step: How many items of each rank make a step.
        draws_ahead: Whether more items may be drawn than were requested. False for an iterator, which the next pass
            continues where a break has left it.
        adapts: As in ``Drawn``; None if the sampler cannot change within a pass.
        keeps_sizes: Whether to record how many samples the items have.
        name: The sampler's class.
    """

    length: int | None
    sizes: Sizes | None
    digest: Digest

    def __init__(
        self,
        stream: Iterator[T],
        random_context: AbstractContextManager[object],
        *,
        plan: Plan,
        start: Position,
        step: int,
        draws_ahead: bool,
        adapts: Callable[[int], bool] | None,
        keeps_sizes: bool,
        name: str,
    ) -> None:
        self._plan, self._start, self._name, self._draws_ahead = plan, start, name, draws_ahead
        self.digest = Digest()
        self.sizes = Sizes() if keeps_sizes else None
        self._drawn = Drawn(
            stream,
            lambda: random_context,
            plan,
            taken=sum(start.taken),
            step=step,
            rounds=None if draws_ahead else repeat(1),
            adapts=adapts,
            digest=self.digest,
        )

    def chunks(self) -> Iterator[Sequence[T]]:
        """Draw, and yield this rank's items."""
        self._drawn.skip()
        self._require_same_order()
        if self.sizes is not None:
            self._drawn.pass_through(self.sizes.recording)
        yield from split_chunks(self._plan, self._drawn, self._found)

    def _require_same_order(self) -> None:
        """Refuse an epoch whose items up to the position differ from the items when the state was taken."""
        known, order = tuple(self._start.order), self.digest
        if known and known[0] != END and known[0] <= order.count and order.before(known[0]) != known:
            raise other_order(self._name)

    def _found(self, length: int) -> None:
        self.digest.end()
        self.length = length

    def ends_within(self, items: int) -> bool:
        """Draw more, and return whether at most this many items of the share are left."""
        # Items that are drawn ahead from an iterator would be lost to the next pass.
        return self._draws_ahead and self._drawn.ends_within(items)

    def order_up_to(self, taken: int) -> tuple[int, int] | None:
        """Return the latest digest of at most ``taken`` items: of how many items, and the digest."""
        return self.digest.before(taken)


def other_order(name: str) -> StateError:
    """Return the error for an epoch whose order differs from the order when the state was taken."""
    return StateError(
        f"The pass cannot resume from the state: {name} began the epoch with other items when it was taken, so samples "
        "would be lost. It draws from what no state holds. Let it hold its generator in an attribute, give it a "
        "state_dict(), or put back what it draws from before you restore the state."
    )
