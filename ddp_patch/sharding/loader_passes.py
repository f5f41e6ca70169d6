"""The state that all passes over one loader share, and the loader's next epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader

from ddp_patch.errors import InvalidOptionError, StateError
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit
from ddp_patch.orders.random_states import EpochCounter, one_at_a_time
from ddp_patch.positions_and_padding import Batching, Plan
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.ranks.parts import Parts
from ddp_patch.ranks.pass_facts import State
from ddp_patch.ranks.pass_monitor import PassMonitor, Rules
from ddp_patch.sharding.sampler_states import DatasetStates, SamplerStates
from ddp_patch.sharding.saved_state import Position, States
from ddp_patch.validation import as_index

if TYPE_CHECKING:
    from ddp_patch.sharding.passes import Pass


T = TypeVar("T")


def epoch_number(epoch: object) -> int:
    """Return the number of an epoch that the user chooses.

    Raises:
        InvalidOptionError: The epoch is no whole number, or negative.
    """
    number = as_index(epoch)
    if number is None or number < 0:
        raise InvalidOptionError(
            f"set_epoch({epoch!r}): an epoch is a whole number of at least 0, because its order is derived "
            "from it. Pass the number of the epoch that comes next."
        )
    return number


class Epochs(Generic[T]):
    """The next epoch of a loader, its latest pass, and the position at which the next pass resumes.

    Attributes:
        counter: The numbers of the epochs and passes, which workers know, too.
        latest: The latest pass, if there was one since an epoch was chosen.
        position: Where the next pass resumes, if a state was loaded for it.
        counts_rest: Whether lengths count the rest of a resumed epoch, instead of the whole epoch.
        was_chosen: Whether the user has chosen the next epoch, and no pass has begun since.
    """

    def __init__(self) -> None:
        self.counter: EpochCounter = EpochCounter()
        self.latest: Pass[T] | None = None
        self.position: Position | None = None
        self.counts_rest: bool = True
        self.was_chosen: bool = False
        self._counts_next = False  # whether an iterator that counts batches is about to begin a pass
        self._beginning: Position | None = None  # where a pass begins, while its sampler begins

    def __getstate__(self) -> dict[str, Any]:
        # A running pass cannot be copied.
        return {**self.__dict__, "latest": None}

    @property
    def upcoming(self) -> int:
        """The epoch that comes next."""
        return self.counter.upcoming

    @property
    def running(self) -> Pass[T] | None:
        """The latest pass, unless a state was restored since, or another pass is about to begin."""
        return self.latest if self.known_position is None else None

    @property
    def known_position(self) -> Position | None:
        """The position of a pass that is about to begin or to resume; None if there is no such pass."""
        return self._beginning or self.position

    def choose(self, epoch: int) -> None:
        """Make an epoch the next one. A loaded position in this epoch stays."""
        if epoch != self.upcoming:
            self.position = None
        self.latest, self.was_chosen = None, True
        self.counter.choose(epoch)

    def cut_off(self) -> None:
        """Forget the latest pass: a position is restored."""
        self.latest = None

    def resume_at(self, position: Position, *, counts_rest: bool) -> None:
        """Make the next pass, over the epoch that was chosen, resume at a position."""
        self.position, self.counts_rest = position, counts_rest

    def begin(self, current: Pass[T]) -> None:
        """Make a pass the latest one when the pass begins to draw, and clear the loaded position."""
        self.counter.begin(current.epoch, passes=not current.start.is_ended)  # of no items, workers are told nothing
        self.latest, self.position, self.was_chosen = current, None, False
        if self._counts_next:
            self._counts_next = False
            current.delivery.begin_loop()

    def go_on(self, current: Pass[T]) -> None:
        """Make a pass the latest one again, because the loop got a batch of the pass after a ``set_epoch``.

        Lightning starts an epoch's workers before it says which epoch it is.
        """
        if self.position is None:
            self.latest = current

    @contextmanager
    def counting(self, counts: bool = True) -> Iterator[None]:
        """While entered, the batches of a pass that begins count from 0, even before the first batch.

        A signal's handler, or the user's dataset, may ask for the position before the first batch.
        """
        self._counts_next = counts
        try:
            yield
        finally:
            self._counts_next = False

    @contextmanager
    def beginning(self, start: Position) -> Iterator[None]:
        """While entered, the position is the beginning of the pass, because a sampler may draw when it begins."""
        self._beginning = start
        try:
            yield
        finally:
            self._beginning = None

    def counted_by_len(self) -> tuple[int, int]:
        """Return the epoch that ``len()`` counts, and how many items of the epoch were taken before.

        The epoch is the next pass's if a position was loaded, otherwise the running pass's.
        """
        current, taken = self.latest, 0
        if self.position is not None:
            epoch, taken = self.position.epoch, self.position.taken_of_all
        elif current is None or current.is_over:
            epoch = self.counter.current
        else:
            epoch, taken = current.epoch, current.taken_before
        return epoch, taken if self.counts_rest else 0


@dataclass(frozen=True)
class LoaderUse:
    """How a loader makes passes.

    Attributes:
        name: The class of the loader; the class of the sampler that shards it, until the loader is known.
        batches_ahead: How many batches the workers prefetch.
        readers: How many workers may each read a part of a stream. Of each part, one rank may get an item more than
            another.
        generator: The loader's generator; None if the loader draws from the global one.
        has_one_iterator: Whether the loader has one iterator for all epochs, which continues after a ``break``.
    """

    name: str
    batches_ahead: int = 0
    readers: int = 1
    generator: torch.Generator | None = None
    has_one_iterator: bool = False

    @classmethod
    def of(cls, facts: LoaderFacts[Any]) -> Self:
        """Return how a loader makes passes, from the facts about it."""
        readers = max(1, facts.num_workers) if facts.unit is ShardedUnit.ITERABLE else 1
        has_one_iterator = facts.repeater is not None
        loader = facts.loader
        return cls(type(loader).__name__, facts.batches_ahead, readers, loader.generator, has_one_iterator)


class Passes(Generic[T]):
    """The state that all passes over one loader share: the base of passes over samplers and over datasets.

    Args:
        name: The class of the sampler or dataset.
        loader: The loader that makes the passes.
        agreed: What the ranks agreed on.
        batching: How the loader makes batches of its items.
        sampler_states: The samplers or the dataset. An epoch's order follows from their states.
        facts: The facts by which a state is known to be of this loader.
        rules: The rules by which ranks compare passes.
        why_in_common: As in ``Agreed``.

    Attributes:
        plan: This rank's positions in the stream.
        batch_plan: The rank's share of each batch, where batches are divided; otherwise None.
        monitor: Compares the passes with the other ranks' passes.
        slack: How many batches more one rank may have in a pass than another.
        epochs: The next epoch, the latest pass, and the position at which the next pass resumes.
        loader: The loader that makes the passes.
    """

    def __init__(
        self,
        name: str,
        loader: LoaderUse,
        agreed: Agreed,
        batching: Batching,
        sampler_states: SamplerStates | DatasetStates,
        facts: Mapping[str, object],
        rules: Rules | None = None,
        why_in_common: Callable[[], str] | None = None,
    ) -> None:
        self.name: str = name
        self.loader: LoaderUse = loader
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
                workers=loader.readers,
                is_padded=not agreed.options.by_worker,
            )
        is_begun_by_all = agreed.world.share_of_rank is not None and agreed.world.num_replicas > 1
        rules = replace(rules or Rules(), name=self.described, is_begun_by_all=is_begun_by_all, parts=parts)
        self.monitor: PassMonitor = PassMonitor(agreed.claims, rules)
        self.slack: int = loader.readers * (self.plan.uneven == "keep")
        self.epochs: Epochs[T] = Epochs()
        self.keeps_sizes: bool = False
        self._said = set[str]()
        self._facts = {**facts, "uneven": agreed.options.uneven, "layout": agreed.options.layout}

    # ---- what is drawn: samplers and datasets answer differently ----

    def stream_length(self, epoch: int) -> int:
        """Return how many items the stream has; if unknown, raise TypeError or what the user's code raises."""
        raise NotImplementedError

    def snapshot(self, epoch: int) -> States:
        """Return the samplers' generators, states and counters now, when an epoch is about to begin."""
        return self.sampler_states.snapshot(epoch)

    def facts(self, latest: Pass[T] | None) -> Mapping[str, object]:
        """Return the facts by which a state is known to be of this loader, with the length in a pass or now."""
        return self._facts

    def require_fits(self, position: Position) -> None:
        """Raise StateError if the sampler or dataset cannot have such a position."""

    def note_length(self, start: Position, length: int) -> None:
        """Record how many items all ranks share in a pass, when its end was found."""

    # ---- the loader ----

    def described(self) -> str:
        """Return the loader's name in errors."""
        return f"{self.loader.name} {self.agreed.place}".rstrip()

    def noting(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a ``collate_fn`` that may add a worker's note to batches; here, the loader's own."""
        return collate_fn

    @contextmanager
    def iterator_context(self, loader: DataLoader[Any]) -> Iterator[None]:
        """While entered, the loader makes an iterator, for which it draws a number from its generator.

        If samplers draw from the loader's generator, too, the pass draws this number before the samplers draw, and the
        iterator draws another. If the loader draws from the global generator, the context waits for other threads that
        have put private states there.

        Raises:
            StateError: The latest pass ended by an error: this rank alone would leave out the rest of the pass.
        """
        require_no_failure(self)
        given = loader.generator
        is_shared = self.sampler_states.holds(given)
        with (
            one_at_a_time(self.loader.name) if given is None else nullcontext(),
            patch.object(loader, "generator", torch.Generator()) if is_shared else nullcontext(),
        ):
            yield

    def is_first(self, what: str) -> bool:
        """Return True the first time that ``what`` is passed, because a loader gives each warning once."""
        has_said = what in self._said
        self._said.add(what)
        return not has_said

    # ---- epochs and passes ----

    def choose(self, epoch: int) -> None:
        """Make ``epoch`` the next one. A loaded position in this epoch stays."""
        number = epoch_number(epoch)
        self.monitor.numbers.strike_looks()
        self.epochs.choose(number)

    @contextmanager
    def keeping_sizes(self) -> Iterator[None]:
        """While entered, passes that begin record how many samples their items have, and the other ranks' items."""
        self.keeps_sizes = True
        try:
            yield
        finally:
            self.keeps_sizes = False

    # ---- lengths ----

    def length_if_any(self, epoch: int) -> int | None:
        """Return how many items the stream has; None if unknown."""
        try:
            return self.stream_length(epoch)
        except Exception:  # noqa: BLE001 - the user's code, which an unpatched loader may never call
            return None

    # ---- positions ----

    def position_now(self) -> Position:
        """Return the position of the next pass by the items that were drawn, as torch's Stateful protocol counts."""
        epochs = self.epochs
        if (known := epochs.known_position) is not None:
            return known
        if epochs.latest is None:
            return Position(epochs.upcoming, states=self.snapshot(epochs.upcoming))
        if epochs.latest.is_ended:
            return epochs.latest.position_at_end(self.snapshot(epochs.upcoming))
        return epochs.latest.position(epochs.latest.items.taken, self.batching)

    def resume_at(self, position: Position, *, counts_rest: bool) -> None:
        """Make the next pass resume at a position; see ``Epochs.counts_rest``."""
        # First, because a sampler may refuse its state.
        self.sampler_states.restore(position.epoch + position.is_ended, position.states)
        if position.seed is not None:
            self.agreed.seed.value = position.seed
        self.epochs.cut_off()
        self.monitor.numbers.cut_off()
        self.choose(position.epoch)  # also on samplers whose own state has the epoch before
        self.epochs.resume_at(position, counts_rest=counts_rest)


def require_no_failure(passes: Passes[Any]) -> None:
    """Raise StateError if the latest pass ended by an error: this rank alone would leave out the rest of the pass."""
    current = passes.epochs.latest
    if (
        current is not None
        and current.delivery.state is State.FAILED
        and passes.epochs.position is None
        and passes.monitor.is_on
    ):
        raise StateError(  # no RuntimeError, which a script may catch because of torch's workers
            f"Iterating the {passes.loader.name} again: its pass over epoch {current.epoch} ended by an error, "
            f"raised in place of batch {current.delivery.batches or 0} (from 0). The script caught it, and a "
            "new pass would begin on this rank alone: the rest of its shard of that epoch would be lost, and "
            "the ranks' steps would not match. Correct what raised the error, and let it end the training: all "
            "ranks then resume from a checkpoint. Or tell the other ranks of it in that step, and call "
            "loader.set_epoch(N) with the same N on every rank, which leaves out the rest of the epoch."
        )


def batches_into_pass(passes: Passes[Any]) -> int:
    """Return how many batches of its pass a loader with one iterator for all epochs has delivered; 0 between passes."""
    current = passes.epochs.latest if passes.loader.has_one_iterator else None
    return 0 if current is None or current.delivery.state is State.ENDED else current.batches(passes.batching)


def items_left(passes: Passes[Any], position: Position) -> int | None:
    """Return how many items of this rank's share are left at a position; None if the length is unknown."""
    length = passes.length_if_any(position.epoch)
    return None if length is None else len(passes.plan.share(length, position.taken_of_all))
