"""The passes over one loader: which epoch comes next, which pass is the latest, where the next one resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader

from ddp_patch.errors import InvalidOptionError, StateError
from ddp_patch.orders.chunks import State
from ddp_patch.orders.random_states import EpochCounter, one_at_a_time
from ddp_patch.positions_and_padding import Batching, Plan
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.ranks.parts import Parts
from ddp_patch.ranks.pass_monitor import PassMonitor, Rules
from ddp_patch.sharding.sampler_states import DatasetStates, SamplerStates
from ddp_patch.sharding.saved_state import Position, States
from ddp_patch.validation import as_index

if TYPE_CHECKING:
    from ddp_patch.sharding.passes import Pass

__all__ = ["Passes"]


T = TypeVar("T")


class Passes(Generic[T]):
    """The passes over one loader, and what they have in common. It is the base of those over samplers and datasets.

    Args:
        name: The class of the sampler or dataset that is drawn.
        wrapper: The class of the sampler that shards it, by which errors call the loader until that is known.
        agreed: What the ranks agreed on.
        batching: How the loader makes batches of its items.
        sampler_states: The objects whose generators are drawn from.
        facts: What identifies what is sharded, for a state.
        rules: What holds where ranks compare passes.
        why_in_common: As in ``Agreed``.
        workers: As in ``Parts``.

    Attributes:
        plan: Which positions of the stream are this rank's.
        batch_plan: The rank's share of each batch, where batches are divided; otherwise None.
        monitor: Compares the passes with the other ranks'.
        slack: How many batches more one rank may have in a pass than another.
        batches_ahead: How many batches the loader's workers fetch before they are taken.
        epochs: Which epoch comes next.
        latest: The latest pass, if there was one since an epoch was set.
        position: Where the next pass resumes, if a state was loaded for it.
        counts_rest: Whether lengths count the rest of a resumed epoch, rather than the whole epoch.
        has_one_iterator: Whether the loader has one iterator for all epochs, which continues after a ``break``.
    """

    def __init__(
        self,
        name: str,
        wrapper: str,
        agreed: Agreed,
        batching: Batching,
        sampler_states: SamplerStates | DatasetStates,
        facts: Mapping[str, object],
        rules: Rules | None = None,
        why_in_common: Callable[[], str] | None = None,
        workers: int = 1,
    ) -> None:
        self.name: str = name
        self.agreed: Agreed = agreed
        self.batching: Batching = batching
        self.sampler_states: SamplerStates | DatasetStates = sampler_states
        self.plan: Plan = agreed.plan
        self.batch_plan: Plan | None = agreed.batch_plan
        parts = None
        if why_in_common is not None and agreed.claims is not None and agreed.claims.read_one_stream:
            parts = Parts(
                self.described,
                why_in_common,
                replicas=agreed.world.replicas,
                workers=workers,
                is_padded=not agreed.options.by_worker,
            )
        is_begun_by_all = agreed.world.share_of_rank is not None and agreed.world.num_replicas > 1
        rules = replace(rules or Rules(), name=self.described, is_begun_by_all=is_begun_by_all)
        self.monitor: PassMonitor = PassMonitor(agreed.claims, rules, parts)
        self.slack: int = int(self.plan.uneven == "keep")
        self.batches_ahead: int = 0
        self.epochs: EpochCounter = EpochCounter()
        self.latest: Pass[T] | None = None
        self.position: Position | None = None
        self.counts_rest: bool = True
        self.has_one_iterator: bool = False
        self.keeps_sizes: bool = False
        self._has_warned = False
        self._counts_next = False  # whether an iterator that counts batches is about to begin a pass
        self._beginning: Position | None = None  # where a pass begins, while its sampler is begun
        self._loader_name = wrapper
        self._was_chosen = False  # an epoch, and none has begun since
        # The loader's, if samplers draw from it, too; and whether the loader makes only one iterator with that.
        self._shared_generator: torch.Generator | None = None
        self._keeps_workers = False
        self._facts = {**facts, "uneven": agreed.options.uneven, "layout": agreed.options.layout}

    def __getstate__(self) -> dict[str, Any]:
        # A running pass cannot be copied.
        return {**self.__dict__, "latest": None}

    # ---- what is drawn; samplers and datasets answer differently ----

    def stream_length(self, epoch: int) -> int:
        """Return how many items the stream has; if unknown, raise TypeError or what the user's code raises."""
        raise NotImplementedError

    def snapshot(self, epoch: int) -> States:
        """Return what the samplers hold now, when an epoch is about to begin: generators, states and counters."""
        return self.sampler_states.snapshot(epoch)

    def facts(self, latest: Pass[T] | None) -> Mapping[str, object]:
        """Return the facts by which a state is known to be of this loader, with its length in a pass or now."""
        return self._facts

    def require_fits(self, position: Position) -> None:
        """Raise StateError if what is drawn cannot have such a position."""

    def note_length(self, start: Position, length: int) -> None:
        """Record how many items all ranks share in a pass, when it has found that."""

    # ---- the loader ----

    def note_loader(self, loader: DataLoader[Any], batches_ahead: int, readers: int) -> None:
        """Record which loader this is put into, before its first pass.

        Args:
            loader: The loader.
            batches_ahead: How many batches its workers fetch before they are taken.
            readers: How many workers may each read a part, of which one rank may get an item more than another.
        """
        self._loader_name, self.batches_ahead = type(loader).__name__, batches_ahead
        self.slack *= readers
        if self.sampler_states.holds(loader.generator):
            self._shared_generator, self._keeps_workers = loader.generator, loader.persistent_workers

    def described(self) -> str:
        """Return what errors call the loader."""
        return f"{self._loader_name} {self.agreed.place}".rstrip()

    def noting(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a ``collate_fn`` with whose batches travels what workers note of them: here none do."""
        return collate_fn

    @contextmanager
    def iterator_context(self, loader: DataLoader[Any]) -> Iterator[None]:
        """While entered, the loader makes an iterator, for which it draws a number from its generator.

        If samplers draw from that, too, the pass draws that number, first of all, and the iterator draws another. If it
        is the global one, another thread's sampler may not have put private states there.

        Raises:
            StateError: The latest pass ended by an error, so that this rank alone would leave out its rest.
        """
        self.require_no_failure()
        given = loader.generator
        is_shared = self.sampler_states.holds(given)
        with (
            one_at_a_time(self._loader_name) if given is None else nullcontext(),
            patch.object(loader, "generator", torch.Generator()) if is_shared else nullcontext(),
        ):
            yield

    def require_no_failure(self) -> None:
        """Raise StateError if the latest pass ended by an error, so that this rank alone would leave out its rest."""
        current = self.latest
        if (
            current is not None
            and current.delivery.state is State.FAILED
            and self.position is None
            and self.monitor.is_on
        ):
            raise StateError(  # no RuntimeError, which a script may catch because of torch's workers
                f"Iterating the {self._loader_name} again: its pass over epoch {current.epoch} ended by an error, "
                f"raised in place of batch {current.delivery.batches or 0} (from 0). The script caught it, and a "
                "new pass would begin on this rank alone: the rest of its shard of that epoch would be lost, and "
                "the ranks' steps would not match. Correct what raised the error, and let it end the training: all "
                "ranks then resume from a checkpoint. Or tell the other ranks of it in that step, and call "
                "loader.set_epoch(N) with the same N on every rank, which leaves out the rest of the epoch."
            )

    def may_warn_of_no_state(self) -> bool:
        """Return True the first time: whoever saves checkpoints is told once that this loader has no state."""
        may_warn, self._has_warned = not self._has_warned, True
        return may_warn

    # ---- epochs and passes ----

    def choose(self, epoch: int) -> None:
        """Make ``epoch`` the next one. If it already is, a position that was loaded stays."""
        number = as_index(epoch)
        if number is None or number < 0:
            raise InvalidOptionError(
                f"set_epoch({epoch!r}): an epoch is a whole number of at least 0, because its order is derived "
                "from it. Pass the number of the epoch that comes next."
            )
        if number != self.epochs.upcoming:
            self.position = None
        self._finish_latest()
        self.latest = None
        self._was_chosen = True
        self.monitor.numbers.strike_looks()
        self.epochs.current = self.epochs.upcoming = number

    def _finish_latest(self) -> None:
        """Let the latest pass count as drawn to its end, where that makes a difference; see ``SamplerStates``."""

    def _note_begun(self, current: Pass[T]) -> None:
        """Record a pass that begins to draw; it takes the position that was loaded."""
        self.epochs.current, self.epochs.upcoming = current.epoch, current.epoch + 1
        self.epochs.passes += not current.start.is_ended  # of one that gives nothing, workers are told nothing
        self.latest, self.position = current, None
        if self._counts_next:
            self._counts_next = False
            current.delivery.begin_loop()

    @contextmanager
    def counting(self, counts: bool = True) -> Iterator[None]:
        """While entered, a pass that begins is one whose batches are counted, though its iterator has given none yet.

        A signal's handler, or the user's dataset, may ask for the position meanwhile.
        """
        self._counts_next = counts
        try:
            yield
        finally:
            self._counts_next = False

    @contextmanager
    def beginning(self, start: Position) -> Iterator[None]:
        """While entered, the position is where the pass begins: a sampler that is begun draws already."""
        self._beginning = start
        try:
            yield
        finally:
            self._beginning = None

    def note_running(self, current: Pass[T]) -> None:
        """Record that the training loop is in a pass, because it was given a batch of it after a ``set_epoch``.

        Lightning starts an epoch's workers before it says which epoch it is.
        """
        if self.position is None:
            self.latest = current

    @property
    def current(self) -> Pass[T] | None:
        """The latest pass, unless a state was restored since, or another one is about to begin."""
        return self.latest if self.position is None and self._beginning is None else None

    @property
    def begins_at_end(self) -> bool:
        """Whether the next pass resumes after the last batch of its epoch, and gives none."""
        return self.position is not None and self.position.is_ended

    @property
    def batches_into_pass(self) -> int:
        """How many batches of its pass a loader with one iterator for all epochs has given; 0 between two passes."""
        current = self.latest if self.has_one_iterator else None
        return 0 if current is None or current.delivery.state is State.ENDED else current.batches(self.batching)

    @contextmanager
    def keeping_sizes(self) -> Iterator[None]:
        """While entered, let passes that begin record how many samples their items have, and those of all ranks."""
        self.keeps_sizes = True
        try:
            yield
        finally:
            self.keeps_sizes = False

    # ---- lengths ----

    def length_if_any(self, epoch: int) -> int | None:
        """Return how many items the stream has; None if that is not known."""
        try:
            return self.stream_length(epoch)
        except Exception:  # noqa: BLE001 - the user's code, which an unpatched loader may never call
            return None

    def items_left(self, position: Position) -> int | None:
        """Return how many items of this rank's share are left at a position; None if the length is not known."""
        length = self.length_if_any(position.epoch)
        return None if length is None else len(self.plan.share(length, position.taken_of_all))

    def counted_by_len(self) -> tuple[int, int]:
        """Return what ``len()`` counts: an epoch, and how many items of it were taken before.

        If a position was loaded, this is about the next pass, which resumes there; otherwise about the running one.
        """
        current, taken = self.latest, 0
        if self.position is not None:
            epoch, taken = self.position.epoch, self.position.taken_of_all
        elif current is None or current.is_over:
            epoch = self.epochs.current
        else:
            epoch, taken = current.epoch, current.taken_before
        return epoch, taken if self.counts_rest else 0

    # ---- positions ----

    def position_now(self) -> Position:
        """Return where the next pass would go on, as callers of torch's Stateful protocol count."""
        if (known := self._beginning or self.position) is not None:
            return known
        if self.latest is None:
            return Position(self.epochs.upcoming, states=self.snapshot(self.epochs.upcoming))
        if self.latest.is_ended:
            return self.latest.position_at_end(self.snapshot(self.epochs.upcoming))
        return self.latest.position(self.latest.items.taken, self.batching)

    def resume_at(self, position: Position, *, counts_rest: bool) -> None:
        """Make the next pass resume at a position; see the attribute ``counts_rest``."""
        # First, because a sampler may refuse its state.
        self.sampler_states.restore(position.epoch + position.is_ended, position.states)
        if position.seed is not None:
            self.agreed.seed.value = position.seed
        self.latest = None
        self.monitor.numbers.cut_off()
        self.choose(position.epoch)  # also on samplers whose own state has the epoch before
        self.position, self.counts_rest = position, counts_rest
