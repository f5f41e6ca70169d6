"""The passes over a sampler that ranks share: what each pass draws, in which order, and from which states."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from ddp_patch.errors import ExhaustedSamplerError, StateError, StreamLengthWarning, StreamOrderWarning
from ddp_patch.loaders.facts import StreamFacts
from ddp_patch.loaders.nested_samplers import epochs_in, tell_epoch
from ddp_patch.orders.chunks import copy_item, start_iterating
from ddp_patch.orders.digest import Digest
from ddp_patch.orders.orders import EpochOrder, has_computed_order, has_order, is_always_alike, order_of
from ddp_patch.orders.random_states import RandomGenerator, distributed_permutation, epoch_seed, look, random_generators
from ddp_patch.positions_and_padding import Batching, Sizes
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.ranks.pass_monitor import Rules
from ddp_patch.sharding.balancing import Balancer, balanced_order, balanced_stream, part_of_batch
from ddp_patch.sharding.item_sources import Indexed, ItemSource, Nothing, Streamed
from ddp_patch.sharding.loader_passes import LoaderUse, Passes, epoch_number, require_no_failure
from ddp_patch.sharding.passes import Pass
from ddp_patch.sharding.sampler_states import EpochDraw, SamplerStates
from ddp_patch.sharding.saved_state import Position, States
from ddp_patch.validation import counted

T = TypeVar("T")


class SharedOrder(Generic[T]):
    """The order in which ranks share a sampler's items, and the epochs of this order.

    Args:
        sampler: The sampler.
        agreed: What the ranks agreed on.
        shuffles: Whether the whole epoch is permuted once more.
        balancer: Balances the costs of the ranks' items; None if the costs are unknown.

    Attributes:
        shuffles: As given. Users may change this attribute.
    """

    def __init__(self, sampler: Iterable[T], agreed: Agreed, *, shuffles: bool, balancer: Balancer | None) -> None:
        self.shuffles: bool = shuffles
        self._sampler, self._balancer = sampler, balancer
        self._seed, self._gives_runs = agreed.seed, agreed.options.gives_runs

    @property
    def is_drawn(self) -> bool:
        """Whether the sampler's order is drawn as a whole, then looked up. A computed order is not drawn."""
        return has_order(self._sampler) and not has_computed_order(self._sampler)

    @property
    def is_looked_up(self) -> bool:
        """Whether a pass looks its items up in the epoch's order, instead of drawing all ranks' items."""
        return has_order(self._sampler) and not (self.shuffles or self._gives_runs)

    @property
    def may_adapt(self) -> bool:
        """Whether the sampler may change within a pass, so that items must be drawn one step at a time."""
        return self._balancer is None and not has_order(self._sampler)

    def drawn(self, epoch: int) -> Callable[[], EpochOrder]:
        """Return a function that draws the sampler's own order of an epoch."""
        # The generator draws what the global one would draw from the epoch's states, and nobody else can draw from it.
        private_generator = torch.Generator().manual_seed(epoch_seed(self._seed.value, epoch))
        return partial(order_of, self._sampler, epoch, private_generator)

    def balanced(self, epoch: int, ranks: int) -> Callable[[EpochOrder, int, Digest | None], EpochOrder] | None:
        """Return a function that balances the order of an epoch that some ranks began; None to leave the order."""
        return None if self._balancer is None else partial(balanced_order, self._balancer, ranks, epoch)

    def stream(self, epoch: int, ranks: int, *, has_generators: bool) -> Iterator[T]:
        """Begin to yield an epoch's items, in the order that the ranks share.

        Args:
            epoch: The epoch.
            ranks: How many ranks began the epoch.
            has_generators: Whether the sampler draws from generators of its own.
        """
        begin: Callable[[], Iterator[T]] = partial(start_iterating, self._sampler)
        # If the sampler shares no generator, the order is drawn without beginning the sampler, which may count its
        # passes.
        if self.is_looked_up or (self.is_drawn and not has_generators):
            begin = partial(_in_order, self.drawn(epoch))
        if self.shuffles:
            begin = partial(_arranged, begin, partial(_in_permutation, self._seed.value, epoch))
        if self._gives_runs:
            begin = partial(_arranged, begin, partial(_in_runs, ranks))
        return begin() if self._balancer is None else balanced_stream(self._balancer, epoch, ranks, begin())


def _in_order(order: Callable[[], EpochOrder]) -> Iterator[Any]:
    """Draw an order when its first item is requested, as torch's samplers do, and yield its items."""
    yield from order().items()


def _arranged(begin: Callable[[], Iterator[T]], places: Callable[[int], Sequence[int]]) -> Iterator[T]:
    """Yield a sampler's epoch in another order, for which the whole epoch is drawn first.

    Args:
        begin: Begins the sampler.
        places: Returns the items' positions in the sampler's own order, for a number of items.
    """
    items = [copy_item(item) for item in begin()]
    for place in places(len(items)):
        yield items[place]


def _in_permutation(seed: int, epoch: int, n: int) -> Sequence[int]:
    """Return ``DistributedSampler(shuffle=True)``'s order."""
    places: Sequence[int] = distributed_permutation(n, seed, epoch).tolist()
    return places


def _in_runs(ranks: int, n: int) -> Sequence[int]:
    """Return the order in which a plan of rounds gives each rank a run."""
    each, more = divmod(n, ranks)  # the first ranks have one more
    starts = [rank * each + min(rank, more) for rank in range(ranks)]
    return [starts[place % ranks] + place // ranks for place in range(n)]


class SamplerPasses(Passes[T]):
    """The passes over a sampler.

    Args:
        loader: The loader that makes the passes.
        wrapper: The class that wraps the sampler.
        stream: The sampler.
        shuffles: Whether the whole epoch is permuted once more.
        agreed: What the ranks agreed on.
        batching: How the loader makes batches of its items.
        are_batches: Whether each item is a batch.
    """

    sampler_states: SamplerStates

    def __init__(
        self,
        loader: LoaderUse,
        wrapper: str,
        stream: StreamFacts,
        shuffles: bool,
        agreed: Agreed,
        batching: Batching,
        *,
        are_batches: bool,
    ) -> None:
        costs = agreed.options.costs
        balancer = None if costs is None else Balancer(costs, batching.size, are_batches, agreed.seed)
        facts = {
            "shared by": wrapper,
            "shuffle_samples_between_gpus": shuffles,
            **stream.described,
            **({} if balancer is None else balancer.described),
        }
        states = SamplerStates(stream.samplers, agreed.seed, stream.name, agreed.loaders_before)
        facts["generators"] = states.given_generators
        # Passes over different epochs lose no sample if all epochs have one order.
        has_one_order = not shuffles and balancer is None and is_always_alike(stream.source)
        rules = Rules(
            has_one_order=has_one_order,
            forgets_looks=has_one_order,
            why={
                "order": partial(_why_orders_differ, stream.name, balancer is not None),
                "data": lambda: agreed.data_named,
            },
            data_digest=partial(agreed.data_digest, stream.dataset),
        )
        super().__init__(stream.name, loader, agreed, batching, states, facts, rules, agreed.why_in_common)
        self.sampler: Iterable[T] = stream.source
        self.order: SharedOrder[T] = SharedOrder(stream.source, agreed, shuffles=shuffles, balancer=balancer)
        self._are_batches = are_batches
        self._is_one_shot = stream.is_one_shot
        self._counted_at: tuple[object, ...] | None = None  # when counting the data drew nothing
        # The loader's generator, if samplers draw from it, too.
        self._shared_generator = loader.generator if states.holds(loader.generator) else None
        # The epochs of nested samplers, as they were last set here. A user may set others, past the outer sampler.
        self._epochs_told = epochs_in(self.sampler)
        self._following = 0  # the epoch after the latest pass
        self._length_before: int | None = None  # the sampler's length when the latest pass began

    # ---- what is drawn ----

    def stream_length(self, epoch: int) -> int:
        """Return the sampler's length; raise its own TypeError if it has none.

        Some samplers or datasets draw random numbers to find their length, so the random states are put back. If
        nothing was drawn, the states are not guarded again until a pass begins or ends, or an epoch is chosen, because
        scripts ask for lengths in every step.
        """
        epochs = self.epochs
        now = (epoch, epochs.counter.passes, None if epochs.latest is None else epochs.latest.items.drawn)
        if self._counted_at == now:
            return len(cast(Any, self.sampler))
        with self._counting(epoch, random_generators(self.sampler_states.holders)) as was_moved:
            length = len(cast(Any, self.sampler))
            self._counted_at = None if was_moved() else now
        return length

    def _counting(
        self, epoch: int, generators: Sequence[RandomGenerator] = ()
    ) -> AbstractContextManager[Callable[[], bool]]:
        """Return the context in which samplers count their data. Their draws in the context are alike on all ranks."""
        return look(generators, seed=self.agreed.seed.value, epoch=epoch)

    def facts(self, latest: Pass[T] | None) -> Mapping[str, object]:
        """Return the facts by which a state is known to be of this loader, with its length in a pass or now."""
        if not self.order.is_drawn:
            return self._facts
        # Rows may have been added since the patch. A pass has the rows that were there when it began.
        length = None if latest is None or latest.is_ended else latest.source.length
        return {**self._facts, "sampler length": self.stream_length(self.epochs.upcoming) if length is None else length}

    def snapshot(self, epoch: int) -> States:
        """Return the samplers' generators, states and counters now."""
        if self._is_one_shot and self.epochs.counter.passes:
            why = (
                "the sampler is an iterator, which can be used only once, and nobody knows how many items earlier "
                "epochs took. Give the loader something that can be iterated again"
            )
            return States(unknown=why)
        return super().snapshot(epoch)

    # ---- passes ----

    def choose(self, epoch: int) -> None:
        """Make ``epoch`` the next one, and set it on every nested sampler that has a ``set_epoch``."""
        number = epoch_number(epoch)
        self._finish_latest()
        super().choose(number)
        self._counted_at = None
        self._tell_epoch(self.epochs.upcoming)

    def _tell_epoch(self, epoch: int) -> None:
        tell_epoch(self.sampler, epoch)
        self._note_epochs()

    def _note_epochs(self) -> None:
        """Record the epochs of the nested samplers. An epoch that differs later was chosen by the user."""
        self._epochs_told = epochs_in(self.sampler)

    def runs(self) -> Iterator[Iterator[T]]:
        """Begin a pass over the upcoming epoch when the first item is requested; yield this rank's items in runs."""
        require_no_failure(self)
        for now, told in zip(epochs_in(self.sampler), self._epochs_told, strict=False):
            if now != told:  # by the user
                self.choose(now)
                break
        current = self._begin_pass()
        if not current.is_ended:
            yield from current.items.runs(current.delivery)

    @contextmanager
    def iterator_context(self, loader: DataLoader[Any]) -> Iterator[None]:
        """While entered, the loader makes an iterator, whose workers copy the generators in the epoch's states."""
        states = self.sampler_states
        if not loader.num_workers or not states.has_generators:
            with super().iterator_context(loader):
                yield
            return
        with (
            super().iterator_context(loader),
            states.draw(self.epochs.upcoming, has_global=False, first_from=self._shared_generator),
        ):
            yield

    def _begin_pass(self) -> Pass[T]:
        """Begin a pass over the upcoming epoch, and return it; an ended pass if nothing is left of the epoch."""
        number, start, states = self.epochs.upcoming, self.epochs.position, self.sampler_states
        if start is None or not start.is_within_pass:
            states.begin(
                number,
                is_chosen=self.epochs.was_chosen
                and not has_order(self.sampler),  # a sampler whose order can be looked up counts nothing
                is_next=number == self._following,
                begin_iterating=partial(start_iterating, self.sampler),
            )
        # A loader with one iterator for all epochs has drawn its workers' seed already.
        first_from = None if self.loader.has_one_iterator else self._shared_generator
        draw = states.draw(number, first_from=first_from, is_watched=self.order.may_adapt, on_exit=self._note_epochs)
        with draw:  # a sampler's set_epoch may seed its generator
            self._tell_epoch(number)
        if start is not None and start.is_within_pass:
            states.load(start.states)  # a sampler that has a state may have been iterated since
        else:
            start = Position(number, (0,), states=self.snapshot(number))
        if not self.order.is_looked_up:
            self._length_before = self.length_if_any(number)
        with self.epochs.beginning(start):
            source = self._chosen_source(start, draw)
        current = Pass(
            start,
            self,
            source,
            sizes=Sizes() if self.keeps_sizes or self._are_batches or self.batch_plan is not None else None,
            divide=None if self.batch_plan is None else partial(part_of_batch, plan=self.batch_plan, name=self.name),
        )
        self.epochs.begin(current)
        self._following = number + 1
        return current

    def _finish_latest(self) -> None:
        """Draw the latest pass to its end if its loop got all batches: a loop over ``len()`` does not ask for the end.

        Batches that workers fetched ahead do not count: ranks may have fetched more or fewer.
        """
        current = self.epochs.latest
        if current is None or current.is_ended or (length := current.likely_length) is None:
            return
        share = self.plan.smallest_share(max(0, length - current.taken_before))
        if not current.items.taken or current.batches(self.batching) < self.batching.count(share):
            return
        if current.items.draw_rest(self.batching.size):
            self.sampler_states.end(current.epoch)

    # ---- how a pass gets its items ----

    def _chosen_source(self, start: Position, draw: EpochDraw) -> ItemSource[T]:
        """Return the source of a pass's items.

        Args:
            start: Where the pass begins.
            draw: The context in which the samplers draw.
        """
        if start.is_ended:
            return Nothing()
        order, keeps_sizes = self.order, self.keeps_sizes and self.batch_plan is None
        ranks = start.ranks or self.plan.num_replicas  # that began the epoch
        if order.is_looked_up:
            return Indexed(
                order.drawn(start.epoch),
                draw,
                self.plan,
                start,
                balanced=order.balanced(start.epoch, ranks),
                keeps_sizes=keeps_sizes,
                name=self.name,
                has_digest=self.monitor.is_on or order.is_drawn,
            )
        with draw:
            stream = order.stream(start.epoch, ranks, has_generators=self.sampler_states.has_generators)
        return Streamed(
            stream,
            draw,
            plan=self.plan,
            start=start,
            step=1 if self._is_one_shot else self.batching.size,
            draws_ahead=not self._is_one_shot,
            adapts=partial(self._adapts, draw) if order.may_adapt else None,
            keeps_sizes=keeps_sizes,
            name=self.name,
        )

    def _adapts(self, draw: EpochDraw, ahead: int) -> bool:
        """Return whether the samplers have changed within the pass; warn once of the consequences.

        Args:
            draw: The context in which the samplers draw.
            ahead: How many steps were drawn at once before.

        Warns:
            StreamOrderWarning: Some steps were drawn before the change; or later epochs differ from the epochs of one
                process.
        """
        had_adapted = draw.has_adapted
        if not draw.adapts():
            return False
        why = ""
        if ahead > 1 and not self.loader.batches_ahead:
            why = f"up to {ahead - 1} steps had been drawn before it changed. "
        elif self.sampler_states.has_generators:
            why = (
                "it also draws from a generator of its own, which begins every epoch with a state of that epoch: so "
                "the later epochs are those of the loader patched for one rank, and not those of the unpatched one. "
            )
        if why and not had_adapted and self.is_first("adapts") and self.plan.rank == 0:
            warnings.warn(
                f"{self.name} was changed within a pass, as samplers are that learn: from now on each step is drawn "
                f'when it is asked for, by what it has learned until then; but {why}See "Samplers that learn" in '
                "docs/samplers.md.",
                StreamOrderWarning,
                stacklevel=2,
            )
        return True

    def note_length(self, start: Position, length: int) -> None:
        """Refuse an epoch that has fewer items than were taken of it; warn once if the sampler's length is wrong.

        Args:
            start: Where the pass began.
            length: How many items the epoch has.

        Raises:
            ExhaustedSamplerError: The epoch has no items, because the sampler is an iterator that was used before.
            StateError: The resumed state counts more items than the epoch has.
        """
        if self._is_one_shot and not length and self.epochs.counter.passes > 1:
            raise ExhaustedSamplerError(
                f"Nothing is left for epoch {start.epoch}: the sampler is an iterator, which can be used only once. "
                "Give the loader something that can be iterated again (a list, or a sampler whose __iter__ starts "
                "again)."
            )
        if start.taken_of_all >= length + max(1, start.ranks, self.plan.num_replicas):  # else padding
            raise StateError(
                f"The pass cannot resume from the state: {start.taken_of_all} items were taken in it, and the "
                f"sampler ended after {counted(length, 'item')}. Restore the state of a loader with this sampler."
            )
        if self.order.is_looked_up or (told := self.length_if_any(start.epoch)) is None:
            return
        # A sampler that grows by what it has drawn has another length by now.
        if length not in {told, self._length_before} and self.is_first("length"):
            warnings.warn(
                f"{self.name} yielded {counted(length, 'item')} and its len() says {told}. All {length} were "
                "sharded, and every rank makes the same number of steps. But len() of this loader is wrong, and so "
                "are schedules and progress bars that use it. Correct the sampler's __len__.",
                StreamLengthWarning,
                stacklevel=2,
            )


def _why_orders_differ(name: str, is_balanced: bool) -> str:
    """Return why ranks may draw different orders, and what to do."""
    if is_balanced:
        return (
            f"{name} gave each its own, or cost= said something else of an item on each, and each rank keeps its shard "
            "of what should be one order, so samples would be lost. Let the cost of an item follow from the item "
            "alone, and draw the order from a generator that is seeded alike."
        )
    return (
        f"{name} gave each its own, of which each rank keeps its shard, so samples would be lost. Make its order "
        "alike on every rank: seed what it draws from, and give it the same data (weights, indices, sorted files); if "
        'it learns from losses, let it learn from all ranks\' ("Samplers that learn" in docs/samplers.md). Where only '
        "rank 0 can draw it, send all ranks its list before the patch: "
        "torch.distributed.broadcast_object_list(orders := [list(sampler)]), and pass sampler=orders[0]. If it gives "
        "each rank a part, build it for one process, or say is_ddp_aware = True in it."
    )
