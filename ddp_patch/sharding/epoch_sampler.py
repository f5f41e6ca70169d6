"""The base class of all samplers that this package puts into a loader: a ``DistributedSampler`` that counts epochs."""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, DistributedSampler

from ddp_patch.errors import InvalidOptionError, StateError
from ddp_patch.orders.chunks import State
from ddp_patch.orders.random_states import EpochCounter, one_at_a_time
from ddp_patch.plan import ONE_PER_STEP, Batching, Consumed, Plan
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.ranks.pass_monitor import PassMonitor
from ddp_patch.sharding.passes import Pass, PassContext
from ddp_patch.sharding.sampler_states import SamplerStates
from ddp_patch.sharding.saved_position import Position, States, read_state, split_consumed, write_state

__all__ = ["EpochSampler"]


T = TypeVar("T")


class EpochSampler(DistributedSampler[T]):
    """The base class of all samplers that this package puts into a loader: plan, agreement, epoch count, position.

    It is a ``DistributedSampler``, because every framework recognises a sharded loader by that class, and shards
    whatever the sampler says that it may wrap.

    Attributes:
        agreed: What the ranks agreed on.
        plan: Which positions of the stream are this rank's.
        epochs: Which epoch comes next.
        latest: The latest pass, if there was one since an epoch was set.
        position: Where the next pass resumes, if a state was loaded for it.
        counts_rest: Whether lengths count the rest of a resumed epoch, rather than the whole epoch.
        has_one_iterator: Whether its loader has one iterator for all epochs, which continues after a ``break``.
        monitor: Compares its passes with the other ranks'.
    """

    is_ddp_aware: bool = True
    _batching: Batching = ONE_PER_STEP
    _unit: str = "samples"  # what it shares, in words

    def __init__(self, agreed: Agreed, sampler_states: SamplerStates, facts: Mapping[str, object]) -> None:
        # Don't call DistributedSampler.__init__: it needs a length, and fixes it once.
        self.agreed = agreed
        self.plan: Plan = agreed.plan(agreed.world.rank)
        self.epochs: EpochCounter = EpochCounter()
        self.latest: Pass[T] | None = None
        self.position: Position | None = None
        self.counts_rest: bool = True
        self._keeps_sizes = False
        self.has_one_iterator: bool = False
        self._batch_plan = agreed.batch_plan
        self._sampler_states = sampler_states
        self._set_epoch_calls = self._last_call_applied = 0  # the last one is that whose states were put back
        self._epoch_was_set = False  # and none has begun since
        self._states_prepared = self._persistent_iterator_draws = False
        self._iterator_generator: torch.Generator | None = None  # by the loader, for the iterator that it made last
        options = agreed.options
        self._loader_name, self._batches_ahead = type(self).__name__, 0
        self.monitor: PassMonitor = PassMonitor(agreed.peers, slack=int(self.plan.uneven == "keep"))
        self._facts = {
            **facts,
            "uneven": options.uneven,
            "layout": self.plan.layout,
            "order": "scalable" if options.is_scalable else "drawn",
        }

    @property
    def seed(self) -> int:  # type: ignore[override]  # torch sets it at construction, as the two below
        """The seed of every epoch's order; the same on every rank."""
        return self.agreed.seed.value

    @property
    def rank(self) -> int:  # type: ignore[override]  # as seed
        """This rank, by ``DistributedSampler``'s name."""
        return self.agreed.world.rank

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # as seed
        """The number of ranks, by ``DistributedSampler``'s name."""
        return self.agreed.world.num_replicas

    def __repr__(self) -> str:
        length = self._length_if_any(self.epochs.upcoming)
        count = "length unknown" if length is None else f"{len(self.plan.share(length)):,} in an epoch"
        unit = self._unit if self._batch_plan is None else "a part of each batch"
        return f"{type(self).__name__}(shard {self.rank} of {self.num_replicas}, {unit}, {count})"

    def note_loader(self, name: str, batches_ahead: int, readers: int) -> None:
        """Record which loader this is put into, before its first pass.

        Args:
            name: The loader's class.
            batches_ahead: How many batches its workers fetch before they are taken.
            readers: How many workers may each read a part, of which one rank may get an item more than another.
        """
        self._loader_name, self._batches_ahead = name, batches_ahead
        self.monitor.name_loader(f"{name} {self.agreed.place}".rstrip(), readers)

    def __getstate__(self) -> dict[str, Any]:
        # A running pass cannot be copied.
        return {**self.__dict__, "latest": None}

    def collate_with_notes(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a ``collate_fn`` with whose batches travels what their workers note, where these read a stream."""
        return collate_fn

    def iterator_context(self, loader: DataLoader[Any]) -> AbstractContextManager[object]:
        """Return what to enter while a loader makes an iterator, for which it draws a number from its generator.

        The draw is one of the pass's, its first, if samplers draw from that generator too. If it is from the global
        generator, another thread's sampler may not have put private states there.

        Raises:
            StateError: The latest pass ended by an error, so that this rank alone would leave out its rest.
        """
        self._require_no_failure()
        if not self._sampler_states.holds(loader.generator):
            # Under a leader ranks wait for each other meanwhile, perhaps for one whose other thread waits for this.
            return one_at_a_time() if self.agreed.leader is None else nullcontext()
        if loader.persistent_workers:
            self._persistent_iterator_draws = True
        else:
            # An iterator that was never used does not count.
            self._states_prepared, self._iterator_generator = False, None
            self._begin_sampler_states()
            self._states_prepared, self._iterator_generator = True, loader.generator
        return self._sampler_states.drawing()

    def _require_no_failure(self) -> None:
        current = self.latest
        if current is not None and current.state is State.FAILED and self.position is None and self.monitor.is_on:
            raise StateError(  # no RuntimeError, which a script may catch because of torch's workers
                f"Iterating the {self._loader_name} again: its pass over epoch {current.epoch} ended by an error, "
                f"raised in place of batch {current.batches_delivered or 0} (from 0). The script caught it, and a "
                "new pass would begin on this rank alone: the rest of its shard of that epoch would be lost, and "
                "the ranks' steps would not match. Correct what raised the error, and let it end the training: all "
                "ranks then resume from a checkpoint. Or tell the other ranks of it, and call loader.set_epoch(N) "
                "with the same N on every rank, which leaves out the rest of the epoch."
            )

    def _begin_sampler_states(self) -> None:
        """Put back what the samplers draw from, for the upcoming pass."""
        if self._persistent_iterator_draws:  # once, and any pass may be another rank's first
            self._sampler_states.begin_from_here()
            self._persistent_iterator_draws = False
        if not self._states_prepared:
            # Only once per set_epoch: torchdata iterates the sampler twice for one pass.
            is_new = self._epoch_was_set and self._last_call_applied != self._set_epoch_calls
            self._last_call_applied = self._set_epoch_calls
            self._sampler_states.begin(self.epochs.upcoming if is_new else None)
            if is_new and self._iterator_generator is not None:
                # The iterator was made before the epoch was chosen, and drew its number from what was there.
                with self._sampler_states.drawing():
                    torch.empty((), dtype=torch.int64).random_(generator=self._iterator_generator)
        self._states_prepared, self._iterator_generator = False, None

    def sampler_snapshot(self) -> States:
        """Return what the samplers hold now."""
        return self._sampler_states.snapshot()

    def _pass_context(self) -> PassContext:
        """Return what all passes have in common."""
        return PassContext(
            self.plan,
            self._batching,
            self._batch_plan,
            self._sampler_states,
            self.monitor,
            self._batches_ahead,
            self._length_if_any,
        )

    def _stream_length(self, epoch: int) -> int:
        """Return how many items the stream has; if unknown, raise TypeError or what the user's code raises."""
        raise NotImplementedError

    def _length_if_any(self, epoch: int) -> int | None:
        try:
            return self._stream_length(epoch)
        except Exception:  # noqa: BLE001 - the user's code, which an unpatched loader may never call
            return None

    def batches_in_epoch(self) -> int | None:
        """Return how many batches this rank's share of the upcoming epoch has; None if that is not known."""
        length = self._length_if_any(self.epochs.upcoming)
        return None if length is None else self._batching.count(len(self.plan.share(length)))

    def items_left(self, position: Position) -> int | None:
        """Return how many items of this rank's share are left at a position; None if the length is not known."""
        length = self._length_if_any(position.epoch)
        consumed = split_consumed(position.consumed, self.plan.num_replicas)
        return None if length is None else self.plan.remaining(length, *consumed)

    @contextmanager
    def keeping_sizes(self) -> Iterator[None]:
        """While entered, let passes that begin record how many samples their items have, and those of all ranks."""
        self._keeps_sizes = True
        try:
            yield
        finally:
            self._keeps_sizes = False

    @property
    def epoch(self) -> int:
        """The current epoch; before the first pass, the next one."""
        return self.epochs.current

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def note_one_iterator(self) -> None:
        """Record that the loader has one iterator for all epochs."""
        self.has_one_iterator = True

    @property
    def batches_into_pass(self) -> int:
        """How many batches of its pass a loader with one iterator for all epochs has given; 0 between two passes."""
        current = self.latest if self.has_one_iterator else None
        return 0 if current is None or current.state is State.ENDED else current.batches(self._batching)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one.

        Calling it is optional: the epoch advances after each pass that draws anything. If ``epoch`` is already the next
        one, a position that was loaded stays.
        """
        try:
            number = operator.index(epoch)
        except TypeError:
            number = -1
        if number < 0:
            raise InvalidOptionError(
                f"set_epoch({epoch!r}): an epoch is a whole number of at least 0, because its order is derived "
                "from it. Pass the number of the epoch that comes next."
            )
        if number != self.epochs.upcoming:
            self.position = None
        self._finish_latest()
        self.latest = None
        self._set_epoch_calls, self._epoch_was_set, self._states_prepared = self._set_epoch_calls + 1, True, False
        self.monitor.choose_epoch()
        self.epochs.set(number)

    def _finish_latest(self) -> None:
        """Let the latest pass count as drawn to its end, where that makes a difference; see ``SamplerStates``."""

    def _note_begun(self, current: Pass[T], *, takes_position: bool) -> None:
        """Record a pass that begins, and whether it takes the position that was loaded."""
        self.latest = current
        if takes_position:
            self.position = None

    def note_running(self, current: Pass[T]) -> None:
        """Record that the training loop is in a pass, because it was given a batch of it after a ``set_epoch``.

        Lightning starts an epoch's workers before it says which epoch it is.
        """
        if self.position is None:
            self.latest = current

    def _counted_by_len(self) -> tuple[int, Consumed, int]:
        """Return what ``len()`` counts: an epoch, what other numbers of ranks took of it, what each rank took since.

        If a position was loaded, this is about the next pass, which resumes there; otherwise about the running one.
        """
        current, skip = self.latest, 0
        before: Consumed = ()
        if self.position is not None:
            epoch = self.position.epoch
            before, skip = split_consumed(self.position.consumed, self.plan.num_replicas)
        elif current is None or current.is_over:
            epoch = self.epochs.current
        else:
            epoch, before, skip = current.epoch, current.consumed_before, current.skip
        return (epoch, before, skip) if self.counts_rest else (epoch, (), 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, for packages that save and resume by torch's Stateful protocol.

        The state is the same on every rank, and can be loaded with any number of ranks.
        """
        return self.state_at(self._position_now())

    @property
    def current_pass(self) -> Pass[T] | None:
        """The latest pass, unless a state was restored since."""
        return self.latest if self.position is None else None

    def state_after(self, batches: int, batching: Batching, *, on_this_rank: bool = False) -> dict[str, Any]:
        """Return the state after some batches of the latest pass; after its last one, draw what the samplers draw then.

        Args:
            batches: How many.
            batching: How the loader makes them.
            on_this_rank: Say that the pass is over if this rank knows it, though others may not know it yet.

        Raises:
            InvalidOptionError: The pass has not yielded that many.
            StateError: The order depends on something that no state holds.
        """
        current = self.current_pass
        given = 0 if current is None else current.batches(batching)
        if self.has_one_iterator and batches != given:
            raise InvalidOptionError(
                f"batches_done={batches}, and {given} batches of epoch {self.epoch} were given: a loader with one "
                "iterator for all epochs continues after a break, so the loop's count may not be the epoch's. Pass "
                "how many batches of the epoch were given, or call set_epoch() before each loop, to begin an epoch "
                "there."
            )
        if batches > given:
            raise InvalidOptionError(
                f"batches_done={batches}, and the pass in progress has given {given}. Pass how many of its batches the "
                "training loop has finished, counted from the beginning of this pass."
            )
        if current is None:
            return self.state_dict()
        if current.draw_end_after(batches, batching, on_this_rank=on_this_rank):
            return self.state_at(current.position_at_end(self.sampler_snapshot()).or_next_epoch())
        return self.state_at(current.position_after(batches, batching))

    def state_at(self, position: Position) -> dict[str, Any]:
        """Return the state of this sampler at a position."""
        return write_state(replace(position, seed=self.seed), self._loader_facts(self.latest))

    def _position_now(self) -> Position:
        if self.position is not None:
            return self.position
        if self.latest is None:
            return Position(self.epochs.upcoming, states=self.sampler_snapshot())
        if self.latest.is_ended:
            return self.latest.position_at_end(self.sampler_snapshot())
        return self.latest.position(self.latest.items_taken)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass resume where a ``state_dict`` was taken, with its seed if the user chose none.

        Lengths stay those of whole epochs, as torchdata's do: callers of this protocol count from the epoch's
        beginning.

        Raises:
            StateError: The state is damaged, newer than this package, or of another loader. Nothing changes then.
        """
        self.resume_at(self.read(state_dict), counts_rest=False)

    def read(self, state: Any) -> Position:
        """Return the position that a state describes; raise StateError unless this loader has it."""
        position = read_state(state, self._loader_facts(None), self.agreed.seed, self._sampler_states.holders)
        seed = self.seed if position.seed is None else position.seed
        with self.agreed.seed.tried(seed):  # a length may follow from it
            length = self._sure_length(position.epoch)
        for number, (ranks, taken) in enumerate(position.consumed if length is not None else ()):
            left = len(self.plan.rest(length or 0, position.consumed[:number]))
            if taken > Plan(0, ranks, self.plan.uneven, self.plan.layout).largest_share(left):
                raise StateError(
                    f"The state is damaged: {ranks} ranks took {taken} items each in it, and only {left} items were "
                    "left for them. Pass what loader_state(), or state_dict(), returned, as it was saved."
                )
        return position

    def _loader_facts(self, latest: Pass[T] | None) -> Mapping[str, object]:
        """Return the facts by which a state is known to be of this loader, with its length in a pass or now."""
        return self._facts

    def _sure_length(self, epoch: int) -> int | None:
        """Return how many items the stream has, or None if that is not certain."""
        return None

    def resume_at(self, position: Position, *, counts_rest: bool) -> None:
        """Make the next pass resume at a position; see the attribute ``counts_rest``."""
        # First, because a sampler may refuse its state. Only a position for load_state_dict has ended: restore_loader
        # takes the one that follows.
        self._sampler_states.restore_epoch(position.epoch + position.is_ended, position.states)
        if position.seed is not None:
            self.agreed.seed.adopt(position.seed)
        self.latest = None
        self.monitor.restore()
        self.set_epoch(position.epoch)  # also on samplers whose own state has the epoch before
        self.position, self.counts_rest = position, counts_rest
