"""How a pass gets its items: looked up, drawn, or sent by the rank that draws for all. Chosen when the pass begins."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

import numpy as np

from ddp_patch.errors import StateError
from ddp_patch.orders.chunks import start_iterating
from ddp_patch.orders.fingerprint import evenly_spread, number_of, number_or_zero
from ddp_patch.orders.orders import EpochOrder, order_of
from ddp_patch.plan import Part, Plan, Rest, Schedule, Sizes
from ddp_patch.ranks.leader import FIRST_PIECE, LARGEST_PIECE, Leader
from ddp_patch.sharding.balancing import balanced_order
from ddp_patch.sharding.epoch_drawing import EpochDrawing, Stream
from ddp_patch.sharding.saved_position import BatchNote, Position, States, StreamSnapshot, StreamStart

__all__ = ["FromLeader", "Indexed", "ItemSource", "Nothing", "Streamed"]


T = TypeVar("T")


# So many items of an order that can be looked up are compared, evenly spread, and its length.
_LOOKED_UP = 64
# By how many of its first items an epoch that is drawn is recognised.
_RECOGNISED_BY = 8

# Returns the items at some positions.
_ItemsAt: TypeAlias = Callable[[range], Sequence[Any]]


class Rounds(Protocol):
    """The rounds in which ranks send each other batches."""

    @property
    def batches_delivered(self) -> int:
        """How many batches this rank was given in them."""

    @property
    def is_over(self) -> bool:
        """Whether all ranks came to the end."""


class ItemSource(Generic[T]):
    """How a pass gets its rank's items.

    Attributes:
        length: How many items all ranks share in the pass, once its end was found. Every rank knows it at the same
            step.
        states_before: What the samplers held before the pass, as the drawing rank reported it.
        states_after: What they held after it.
        sizes: How many samples each item of the pass has, for all ranks' items in order and as far as they were drawn;
            None if this rank does not see them, or nobody needs that.
        rounds: The rounds in which ranks send each other batches; None if each gives its own.
        is_open_ended: Whether a rank may find the end later than another.
        is_endless: Whether more is given than there is: workers find the end.
        is_in_parts: Whether several workers read a part each; False while that is unknown.
        has_own_length: Whether other ranks may have more or fewer batches.
        resumed_elsewhere: How many items are left out because another package's loader resumed within the pass.
    """

    # Subclasses annotate again what they set: pyright asks for it.
    length: int | None = None
    states_before: States | None = None
    states_after: States | None = None
    sizes: Sizes | None = None
    rounds: Rounds | None = None
    is_open_ended: bool = True
    is_endless: bool = False
    is_in_parts: bool = False
    has_own_length: bool = False
    resumed_elsewhere: int = 0

    def chunks(self, skip: int) -> Iterator[Sequence[T]]:
        """Yield this rank's items in order, but for the first ``skip``, in parts; some may be empty."""
        raise NotImplementedError

    def ends_within(self, items: int) -> bool:
        """Draw up to the end if it is at most this many items of the share away, and return whether it is.

        Then the samplers hold what the epoch leaves in them. Return False, too, where one rank would know and another
        not.
        """
        return False

    def beginning(self, taken: int) -> Sequence[StreamSnapshot]:
        """Return what the epoch's first items were, when this many were taken; empty if nobody looked."""
        return ()

    def lengths_found(self) -> Sequence[int | None]:
        """Return how many items the stream had, or each part of it; None where nobody came to the end."""
        return [self.length]

    def parts(self, skip: int, given: int, assumed: int | None) -> Sequence[Part]:
        """Return what the pass is over.

        Args:
            skip: How many items of each rank's share were taken before.
            given: How many were given, those before included.
            assumed: How many items all ranks share, as far as that must be known before the end.
        """
        return [Part(skip, assumed if self.length is None else self.length, least_items=given)]

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

    def keep(self, note: BatchNote) -> None:
        """Keep what the worker noted whose batch the loop is given."""

    def note_first_batch(self) -> None:
        """Record that the loop was given its first batch."""

    def note_loop_end(self) -> None:
        """Record that the loop has seen the end."""

    def require_one_order(self) -> None:
        """Raise RankMismatchError if this rank's workers should read one stream, and read others."""

    def _found(self, length: int) -> None:
        self.length = length


def _skipping(skip: int, parts: Iterable[Sequence[T]]) -> Iterator[Sequence[T]]:
    """Leave out the first items of some parts."""
    for part in parts:
        yield part[skip:] if skip else part
        skip = max(0, skip - len(part))


class Nothing(ItemSource[T]):
    """Has no items: nothing is left of the epoch."""

    sizes: Sizes | None

    def __init__(self) -> None:
        self.sizes = Sizes()  # those of no item are all known

    def chunks(self, skip: int) -> Iterator[Sequence[T]]:
        """Return no part."""
        return iter(())


class Indexed(ItemSource[T]):
    """Looks this rank's items up in the epoch's order."""

    is_open_ended: bool = False  # the whole epoch is drawn before the first item is given
    length: int | None
    sizes: Sizes | None

    def __init__(self, epoch: EpochDrawing[T]) -> None:
        self._epoch = epoch
        self._draw_rest: Callable[[], object] | None = None  # and not the order, which is large
        self._is_finished = False

    def chunks(self, skip: int) -> Iterator[Sequence[T]]:
        """Draw the order, and yield the items at this rank's positions."""
        plan, epoch = self._epoch.plan, self._epoch
        order = self._drawn_order()
        if epoch.balancer is not None:
            ranks = plan.num_replicas
            order = balanced_order(order, epoch.balancer, ranks, epoch.number, skip * ranks, self._note_window)
        rest = plan.rest(order.length, epoch.consumed_before)
        length = self.length = len(rest)
        at: _ItemsAt = partial(_items_at, order, rest)
        real, repeated = plan.own_and_repeated(length)
        padding = at(repeated)  # first: an order is looked up from its beginning on
        # The items that every rank has come first. Whoever asks for more finds the end, at the same step.
        rounds = length // plan.num_replicas
        self.sizes = _sizes_in(order, rest)
        if self.sizes is None and epoch.keeps_sizes and not plan.needs_length:
            self.sizes = Sizes()
            self.sizes.add(0, batches=min(length, skip * plan.num_replicas))  # nobody asks for those that were done
            at = partial(self._looking_at_all, at, plan, length)
        yield from map(at, order.pieces(real[skip:rounds]))
        if epoch.balancer is not None:
            order.at(range(length)[-1:])  # balances the last window, in which this rank may have no item
        yield from map(at, order.pieces(real[max(skip, rounds) :]) if len(real) > rounds else [range(length, length)])
        yield padding[max(0, skip - len(real)) :]
        self._finish()

    def _drawn_order(self) -> EpochOrder:
        epoch = self._epoch
        with epoch.random_context():
            order = order_of(epoch.sampler, epoch.number, epoch.private_generator)
        self._draw_rest = order.finish
        if epoch.digest is not None:
            seen = order.length if order.random_access is None else min(order.random_access, order.length)
            epoch.digest.add([order.length, *order.at(evenly_spread(seen, _LOOKED_UP))])
            epoch.digest.end()
        return order

    def _note_window(self, begin: int, places: np.ndarray[Any, Any]) -> None:
        """Take note of how a window was balanced, for the other ranks to compare."""
        if self._epoch.digest is not None:
            self._epoch.digest.add_hash(number_of([places]), len(places))

    def _looking_at_all(self, at: _ItemsAt, plan: Plan, length: int, positions: range) -> Sequence[T]:
        """Return the items at some of a rank's positions, and note the sizes of all ranks' items up to there."""
        sizes = cast(Sizes, self.sizes)
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
            with self._epoch.random_context():
                draw_rest()


class Streamed(ItemSource[T]):
    """Draws the whole stream, chunk by chunk, and keeps this rank's items."""

    sizes: Sizes | None

    def __init__(self, epoch: EpochDrawing[T], known: StreamStart | None = None) -> None:
        self._epoch = epoch
        # Begin the sampler now, as a DataLoader does before it draws its workers' seed: where both draw from the same
        # torch.Generator, the order of their draws is part of the stream.
        with epoch.random_context():
            stream = start_iterating(epoch.sampler)
        self._first: list[int] = []
        stream = chain(_recognised(stream, self._first, known, type(epoch.sampler).__name__), stream)
        # In runs, one rank would see another's batches steps later.
        self.sizes = Sizes() if epoch.keeps_sizes and not epoch.plan.needs_length else None
        self._stream = Stream(epoch, stream, self.sizes)

    def chunks(self, skip: int) -> Iterator[Sequence[T]]:
        """Draw, and yield this rank's items."""
        shares = self._stream.shares([self._epoch.plan], skip, self._found)
        return _skipping(skip, (part for (part,) in shares))

    def ends_within(self, items: int) -> bool:
        """Draw more, and return whether at most this many items of the share are left."""
        # What is read ahead of an iterator would be lost to the next pass.
        return not self._epoch.is_one_shot and self._stream.ends_within(items)

    def beginning(self, taken: int) -> Sequence[StreamSnapshot]:
        """Return what the epoch's first items were, when this many were taken."""
        first = self._first[: min(_RECOGNISED_BY, taken)]
        return [StreamSnapshot(StreamStart(len(first), None, number_of(first)))] if first else ()


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
    for item in islice(stream, _RECOGNISED_BY):
        first.append(number_or_zero(item))
        if known is not None and len(first) == known.seen and number_of(first) != known.whole:
            raise StateError(
                f"The pass cannot resume from the state: {name} began the epoch with other items when it was taken, so "
                "samples would be lost. It draws from what no state holds. Let it hold its generator in an attribute, "
                "give it a state_dict(), or put back what it draws from before you restore the state."
            )
        yield item


def _sizes_in(order: EpochOrder, rest: Rest) -> Sizes | None:
    """Return how many samples each item of the rest has, if the order shows it."""
    if order.sizes is None:
        return None
    sizes = Sizes()
    for size, batches in chain.from_iterable(map(order.sizes, rest.runs)):
        sizes.add(size, batches)
    return sizes


def _items_at(order: EpochOrder, rest: Rest, positions: range) -> Sequence[Any]:
    """Return the items at these positions of the rest."""
    runs = rest.stream_positions(positions)
    return order.at(runs[0]) if len(runs) == 1 else [item for run in runs for item in order.at(run)]


class FromLeader(ItemSource[T]):
    """Gets this rank's items from the leader; on the leader, draws for all and sends every rank its share.

    Args:
        epoch: The epoch.
        leader: How the ranks communicate.
        pass_facts: Tells which pass this is, to be compared between the ranks.
        plans: Every rank's, in the leader's order.
        states_before: What the samplers held before the pass.
        states_now: Tells what they hold.
        has_length: Whether the sampler says how many items it has.
    """

    length: int | None
    states_before: States | None
    states_after: States | None

    def __init__(
        self,
        epoch: EpochDrawing[T],
        leader: Leader,
        pass_facts: Callable[[], Mapping[str, object]],
        plans: Sequence[Plan],
        states_before: States,
        states_now: Callable[[], States],
        *,
        has_length: bool,
    ) -> None:
        self._leader, self._pass_facts, self._plans, self._states_now = leader, pass_facts, plans, states_now
        self._piece_sizes = _piece_sizes(epoch, has_length)
        # Begun with its first item: then the leader can report an error to the others.
        self._stream = Stream(epoch, chain(epoch.sampler), None)
        self.states_before = states_before

    def chunks(self, skip: int) -> Iterator[Sequence[T]]:
        """Yield what is sent, or on the leader this rank's part of what it draws."""
        facts = self._pass_facts()
        if self._leader.is_leader:
            of_all: Iterator[list[list[Any]]] = self._stream.shares(self._plans, skip, self._found)
            own = self._leader.send(of_all, facts, self._note, *self._piece_sizes)
        else:
            own = self._leader.receive(facts, self._take_note)
        return _skipping(skip, own)

    def _note(self, is_last: bool) -> tuple[States | None, States | None, int | None]:
        """Return what the leader sends to the others, so that every rank knows the loader's position."""
        self.states_after = self._states_now() if is_last else None
        return self.states_before, self.states_after, self.length

    def _take_note(self, note: tuple[States | None, States | None, int | None]) -> None:
        self.states_before, self.states_after, self.length = note

    def ends_within(self, items: int) -> bool:
        """Return whether the last piece was sent: every rank learns of the end from the leader."""
        return self.states_after is not None


def _piece_sizes(epoch: EpochDrawing[Any], has_length: bool) -> tuple[int, int]:
    """Return how many items, all ranks' together, the leader's first message holds, and a later one at most."""
    if epoch.is_one_shot:
        return 1, 1  # which is a round: nothing is drawn ahead
    if epoch.plan.needs_length:
        # All at once: a rank whose run comes late must not wait for steps of the others.
        return sys.maxsize, sys.maxsize
    return LARGEST_PIECE if has_length else FIRST_PIECE, LARGEST_PIECE
