"""A sampler that gives one rank its share of another sampler's stream."""

import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Self, TypeVar, cast

from ddp_patch.errors import ExhaustedSamplerError, StateError, StreamLengthError, StreamLengthWarning
from ddp_patch.loaders.copying import random_generators
from ddp_patch.loaders.nesting import epoch_holders, nested_samplers, tell_epoch
from ddp_patch.plan import Plan, Rest, blocks
from ddp_patch.ranks.agreement import Agreed, describe
from ddp_patch.ranks.leader import FIRST_PIECE, LARGEST_PIECE
from ddp_patch.shares.epochs import EpochSampler
from ddp_patch.shares.passes import EpochPass, nothing_left
from ddp_patch.shares.place import Held, Place
from ddp_patch.shares.sources import share
from ddp_patch.streams.chunks import MOST_AHEAD, draw, own
from ddp_patch.streams.fingerprint import COMPARED, fingerprint, fingerprinted
from ddp_patch.streams.orders import Order, ScalableShuffle, has_order, is_random_access, order_of
from ddp_patch.streams.seeding import PrivateRNG, distributed_permutation, unmoved

__all__ = ["ShardedSampler"]

T = TypeVar("T")


class ShardedSampler(EpochSampler[T]):
    """One rank's share of the items that another sampler yields.

    Attributes:
        sampler: The wrapped sampler.
    """

    progress: EpochPass | None
    place: Place | None

    def __init__(self, sampler: Iterable[T], shuffle: bool, agreed: Agreed) -> None:
        facts = {
            "shared by": type(self).__name__,
            "shuffle_samples_between_gpus": shuffle,
            **describe(sampler),
        }
        super().__init__(agreed, list(nested_samplers(sampler)), facts)
        self.sampler = sampler
        self.dataset: Any = sampler  # DistributedSampler's name for it
        self.shuffle = shuffle
        self._warned_of_length = False
        self._nested_epochs = self._read_nested_epochs()
        self._known_end: dict[str, object] = {}

    @classmethod
    def of(cls, sampler: Iterable[T], agreed: Agreed) -> Self:
        """Wrap a sampler on whose sharing the ranks have agreed already."""
        wrapper = cls.__new__(cls)
        ShardedSampler.__init__(wrapper, sampler, shuffle=False, agreed=agreed)
        return wrapper

    @property
    def total_size(self) -> int:  # type: ignore[override]  # torch fixes it at construction; here it is computed
        """How many items all ranks take together in an epoch, or in what is left of it, padding included."""
        now = self._current()
        return self.plan.total(len(self._rest(now))) - now.skip * self.num_replicas

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # as total_size
        """How many items this rank takes in an epoch, or in what is left of one that a loaded state began in."""
        now = self._current()
        return max(0, len(self.plan.share(len(self._rest(now)))) - now.skip)

    def __len__(self) -> int:
        return self.num_samples

    def _rest(self, progress: EpochPass) -> Rest:
        return self.plan.rest(self._stream_length(progress.epoch), progress.before)

    def _stream_length(self, epoch: int) -> int:
        """The wrapped sampler's length, or its own TypeError; some samplers draw to tell it."""
        with self._rng(epoch), unmoved(random_generators(nested_samplers(self.sampler))):
            return len(cast(Any, self.sampler))

    def _held(self) -> Held:
        if isinstance(self.sampler, Iterator) and self.epochs.passes:
            why = (
                "the sampler is an iterator, which gives its items once, and how many of them earlier epochs took is "
                "not known. Give the loader something that can be iterated again"
            )
            return Held(unknown=why)
        return super()._held()

    def _sure_length(self, epoch: int) -> int | None:
        if not (self._is_looked_up() or self.plan.layout == "contiguous"):
            return None
        told = [(holder, getattr(holder, "epoch", None)) for holder in epoch_holders(self.sampler)]
        tell_epoch(self.sampler, epoch)  # epochs may have different lengths
        try:
            return self._stream_length(epoch)
        finally:
            for holder, before in told:
                cast(Any, holder).set_epoch(before if isinstance(before, int) else self.epochs.upcoming)

    def _rng(self, epoch: int) -> AbstractContextManager[None]:
        return nullcontext() if self.agreed.options.agreement == "ambient" else PrivateRNG(self.seed, epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be drawn; every nested sampler that has a ``set_epoch`` is told too.

        Calling it is optional: each pass that draws anything is followed by the next epoch.
        """
        super().set_epoch(epoch)
        self._tell_nested(self.epochs.upcoming)

    def _tell_nested(self, epoch: int) -> None:
        tell_epoch(self.sampler, epoch)
        self._nested_epochs = self._read_nested_epochs()

    def _read_nested_epochs(self) -> list[int]:
        epochs = [getattr(holder, "epoch", None) for holder in epoch_holders(self.sampler)]
        return [epoch for epoch in epochs if isinstance(epoch, int)]

    def _take_over_epoch(self) -> None:
        """Go to the epoch that the user has set on a nested sampler, past this one, since it was last told."""
        now = self._read_nested_epochs()
        changed = [epoch for epoch, before in zip(now, self._nested_epochs, strict=False) if epoch != before]
        if changed:
            self.set_epoch(changed[0])

    def __iter__(self) -> Iterator[T]:
        self._take_over_epoch()
        return chain.from_iterable(self._pass(*self._start()))

    @property
    def _meets_unevenly(self) -> bool:
        return self.agreed.options.verify and self.plan.uneven == "keep"

    def _is_looked_up(self) -> bool:
        """Whether a pass looks its items up in the epoch's order, instead of drawing those of all ranks."""
        if self.agreed.leader is not None or self.shuffle or not has_order(self.sampler):
            return False
        # All that is drawn is compared, where it can be drawn.
        sampler: object = self.sampler
        is_computed = type(sampler) is ScalableShuffle or is_random_access(sampler)
        return is_computed or not self.agreed.options.verify

    def _start(self) -> tuple[Iterator[T], AbstractContextManager[None], EpochPass]:
        """Begin the wrapped sampler's upcoming epoch."""
        epoch = self.epochs.upcoming
        self._tell_nested(epoch)
        place = self.place
        if place is not None and place.is_begun:
            place.held.reinstate(
                self._holders, self._at_first
            )  # others may have drawn from the generators since it was loaded
        else:
            place = Place(epoch, held=self._held())
        progress = self.progress = EpochPass.at(place, self.num_replicas, resumes=self.place is not None)
        progress.sizes = deque() if self.tells_sizes else None
        # Where ranks meet, one with an item more must do as those do that have come to their end.
        if place.ended or (self._meets_unevenly and progress.skip and progress.skip == self._rounds(progress)):
            # Nothing of this epoch is left; the next pass, even if this one is never drawn from, is the next epoch's.
            progress.ended = progress.over = True
            self.epochs.begin(epoch)
            self.place = None
            return iter(()), nullcontext(), progress
        rng = self._rng(epoch)
        if self._is_looked_up():
            return iter(()), rng, progress
        # Begun at once, as a DataLoader does before it draws its workers' seed: where both draw from the same
        # torch.Generator, the order of their draws is part of the stream.
        with rng:
            stream = iter(self.sampler) if self.agreed.leader is None else self._led()
        return stream, rng, progress

    def _pass(
        self, stream: Iterator[T], rng: AbstractContextManager[None], progress: EpochPass
    ) -> Iterator[Iterator[T]]:
        """Yield this rank's items in runs, from when the first is asked for."""
        if progress.ended:
            return
        again = self.epochs.passes > 0
        if progress.epoch != self.epochs.upcoming:
            # Another iterator has begun this epoch since: this one is the next epoch's.
            stream, rng, progress = self._start()
        self._begin(progress.epoch, {"position": progress.begins_at}, self._known_end)
        self._known_end = {}
        self.progress, self.place = progress, None
        self._draw_from(progress)
        try:
            yield from (
                self._looked_up(rng, progress) if self._is_looked_up() else self._drawn(stream, rng, again, progress)
            )
            progress.ended = True
        finally:
            progress.over = True

    def _draw_from(self, progress: EpochPass) -> None:
        """Have the generators where they were when the first item was drawn: a loader may draw from them before."""
        if progress.resumes and progress.drawn_from is not None:
            progress.drawn_from.reinstate_generators(self._holders)
        elif not progress.resumes and (now := self._held()).generators != progress.held.generators:
            progress.drawn_from = Held(now.generators)

    def _looked_up(self, rng: AbstractContextManager[None], progress: EpochPass) -> Iterator[Iterator[T]]:
        """Yield this rank's items from an order that is known as a whole."""
        self._catch_up(progress)
        with rng:
            order = order_of(self.sampler, progress.epoch)
        progress.to_end = partial(_finished, order, progress)
        if progress.now is not None:  # when the state was taken the order was drawn
            progress.now[1].reinstate_generators(self._holders)
            progress.now = None
        rest = self.plan.rest(order.length, progress.before)
        length = progress.length = len(rest)
        at = partial(_items_at, order, rest)
        real, repeated = self.plan.sources(length)
        padding = at(repeated)  # first: an order is looked up from its beginning on
        progress.given = progress.skip
        # The items that every rank has come first. Whoever asks for more finds the end, at the same step.
        rounds = length // self.plan.num_replicas
        for positions in blocks(real[progress.skip : rounds]):
            yield progress.begin(at(positions))
        if self.agreed.options.verify and progress.skip <= rounds:
            told = range(0, order.length, max(1, order.length // COMPARED))
            self._compare_end(progress.epoch, order.length, fingerprint(order.at(told)))
        for positions in blocks(real[max(progress.skip, rounds) :]):
            yield progress.begin(at(positions))
        yield progress.begin(padding[max(0, progress.skip - len(real)) :])
        progress.is_at_end()

    def _drawn(
        self, stream: Iterator[T], rng: AbstractContextManager[None], again: bool, progress: EpochPass
    ) -> Iterator[Iterator[T]]:
        """Yield this rank's items of a stream that is drawn chunk by chunk."""
        one_shot = isinstance(self.sampler, Iterator)  # which no pass begins anew
        # Of an iterator nothing is drawn ahead: after a break the next pass goes on where this one stopped.
        most = 1 if one_shot or self.agreed.options.agreement == "ambient" else MOST_AHEAD
        if self.shuffle:
            stream = _shuffled(stream, self.seed, progress.epoch)
        is_cut = self.plan.layout == "contiguous"
        rest = self.plan.rest(self._stream_length(progress.epoch) if is_cut else sys.maxsize, progress.before)
        if progress.before:
            stream = rest.select(stream)
        self._catch_up(progress)
        if progress.before and not progress.skip:
            progress.now = None  # which counts items of other ranks' shares
        chunks = _ReadAhead(draw(stream, rng, round_size=self.plan.num_replicas, most=most))
        # Of an iterator, what was read ahead would be lost to the next pass.
        progress.to_end = None if one_shot else partial(chunks.ends_within, self.plan)
        for part in self._parts(_not_empty(chunks, progress.epoch) if one_shot and again else chunks, rest, progress):
            run = progress.begin(part)
            self._catch_up(progress)
            yield run

    def _catch_up(self, progress: EpochPass) -> None:
        """Once as much is drawn as when a state was taken, give the generators their states of then."""
        if progress.now is not None and progress.given >= progress.now[0]:
            progress.now[1].reinstate_generators(self._holders)
            progress.now = None

    def _rounds(self, progress: EpochPass) -> int | None:
        """How many items the ranks with most of them take; None where that is not known."""
        length = self.rest_length(progress)
        return None if length is None else self.plan.rounds(length)

    def _led(self) -> Iterator[T]:
        """The sampler's stream, begun with its first item: an error then is one that the leader can tell of."""
        yield from self.sampler

    def _parts(self, chunks: Iterator[list[T]], rest: Rest, progress: EpochPass) -> Iterator[list[T]]:
        """Yield this rank's items: cut from what it draws, or as rank 0 sends them."""
        leader = self.agreed.leader
        if leader is None:
            return (
                part for (part,) in self._shares(self._verified(chunks, progress.epoch), [self.plan], rest, progress)
            )
        progress.to_end = None  # every rank knows of the end when the leader sends it
        turn = {"patched as": f"number {self.agreed.number}", "epoch": progress.epoch, "pass": self.epochs.passes}
        if not leader.draws:
            return leader.receive(turn, partial(_take_note, progress))
        plans = [self.agreed.plan(rank) for rank in (self.agreed.world.members or {}).values()]
        first_piece = LARGEST_PIECE if self._length_if_any(progress.epoch) is not None else FIRST_PIECE
        if self.plan.layout == "contiguous":
            first_piece = sys.maxsize  # all at once: a rank whose run comes late must not wait for steps of the others
        largest_piece = max(first_piece, LARGEST_PIECE)
        if isinstance(self.sampler, Iterator):
            first_piece = largest_piece = 1  # which is a round; see _drawn
        shares = self._shares(chunks, plans, rest, progress)
        return leader.send(shares, turn, partial(self._note, progress), first_piece, largest_piece)

    def _note(self, progress: EpochPass, is_last: bool) -> tuple[Held, Held | None, int | None]:
        """What the leader tells the others, so that every rank knows where the loader stands."""
        progress.after = self._held() if is_last else None
        return progress.held, progress.after, progress.length

    def _shares(
        self, chunks: Iterator[list[T]], plans: Sequence[Plan], rest: Rest, progress: EpochPass
    ) -> Iterator[list[list[T]]]:
        def at_end(drawn: int) -> None:
            progress.length = drawn
            if progress.skip > self.plan.rounds(drawn):
                raise StateError(
                    f"The pass cannot go on from the state: {progress.skip} items of each rank's share were done in "
                    f"it, and the sampler's stream ended after {drawn} items of all ranks. Restore the state of a "
                    "loader with this sampler."
                )
            # What of the stream is not in the rest was drawn too.
            self._compare_length(drawn + rest.n - len(rest), rest.n, progress.epoch)

        return share(plans, chunks, len(rest), at_end)

    def _verified(self, chunks: Iterator[list[T]], epoch: int) -> Iterator[list[T]]:
        """Pass chunks on; where the user wants it, compare at the end what the ranks have drawn."""
        if not self.agreed.options.verify:
            return chunks
        return fingerprinted(chunks, self.plan.num_replicas, partial(self._compare_end, epoch))

    def _compare_end(self, epoch: int, drawn: int, order: str) -> None:
        if self.plan.layout == "contiguous":
            # Ranks come to the stream's end at different steps, the last one while it has items to give.
            self._known_end = {"drawn in the epoch before": drawn, "order of the epoch before": order}
        else:
            self.agreed.check("Ending an epoch", {"epoch": epoch, "drawn": drawn, "order": order})

    def _compare_length(self, drawn: int, assumed: int, epoch: int) -> None:
        """Refuse runs that were cut from a wrong length; else warn, once, that a wrong one is told."""
        if self.plan.layout == "contiguous" and assumed != drawn:
            raise StreamLengthError(
                f"The sampler yielded {drawn} items and its len() said {assumed}. With layout='contiguous' each rank's "
                "run was cut from that length, so this epoch's shares are wrong. Correct the sampler's __len__, or use "
                "layout='interleaved', which needs none."
            )
        told = self._length_if_any(epoch)
        if told is not None and told != drawn and not self._warned_of_length:
            self._warned_of_length = True
            warnings.warn(
                f"{type(self.sampler).__name__} yielded {drawn} items and its len() says {told}. All {drawn} were "
                "shared, and every rank makes the same number of steps, but len() of this loader and whatever is "
                "planned from it (schedules, progress bars) is wrong. Correct the sampler's __len__.",
                StreamLengthWarning,
                stacklevel=2,
            )


def _not_empty(chunks: Iterator[list[T]], epoch: int) -> Iterator[list[T]]:
    """Pass chunks on; raise if there is none."""
    chunk: list[T] = []
    for chunk in chunks:
        yield chunk
    if not chunk:
        raise ExhaustedSamplerError(
            f"Nothing is left for epoch {epoch}: the sampler is an iterator, which gives its items once. Give the "
            "loader something that can be iterated again (a list, or a sampler whose __iter__ begins anew)."
        )


def _items_at(order: Order, rest: Rest, positions: range) -> Sequence[Any]:
    """Return the items at these positions of the rest."""
    runs = rest.cut(positions)
    return order.at(runs[0]) if len(runs) == 1 else [item for run in runs for item in order.at(run)]


def _finished(order: Order, progress: EpochPass, unused: int) -> bool:
    """Draw, once, what the sampler draws after its last item."""
    order.finish()
    progress.to_end = nothing_left
    return True


def _take_note(progress: EpochPass, note: tuple[Held, Held | None, int | None]) -> None:
    progress.held, progress.after, progress.length = note


class _ReadAhead(Iterator[list[T]]):
    """An iterator over chunks of which one can be read before it is asked for."""

    def __init__(self, chunks: Iterator[list[T]]) -> None:
        self._chunks = chunks
        self._read: deque[list[T]] = deque()
        self._failure: list[Exception] = []

    def __next__(self) -> list[T]:
        if not self._read and self._failure:
            raise self._failure.pop()
        return self._read.popleft() if self._read else next(self._chunks)

    def ends_within(self, plan: Plan, most: int) -> bool:
        """Read on, and tell whether no more than so many rounds come; of contiguous runs, which have an end, no items.

        An incomplete round that is left out is none.
        """

        def rounds() -> int:
            is_cut = plan.layout == "contiguous"
            return 0 if is_cut else sum(plan.rounds(len(chunk)) for chunk in self._read)

        while not self._failure and rounds() <= most:
            try:
                self._read.append(next(self._chunks))
            except StopIteration:
                return True
            except Exception as error:  # noqa: BLE001 - the user's own, raised when its place comes
                self._failure.append(error)
        return False


def _shuffled(stream: Iterator[T], seed: int, epoch: int) -> Iterator[T]:
    """Yield the stream in ``DistributedSampler(shuffle=True)``'s order, which needs all of it."""
    items = [own(item) for item in stream]
    for position in distributed_permutation(len(items), seed, epoch).tolist():
        yield items[position]
