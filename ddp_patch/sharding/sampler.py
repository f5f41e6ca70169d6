"""A sampler that gives one rank its share of another sampler's stream."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any, Self, TypeVar, cast

import torch

from ddp_patch.compat.private_torch import is_torch_batch_sampler
from ddp_patch.errors import InvalidOptionError, StreamLengthWarning
from ddp_patch.loaders.facts import StreamFacts
from ddp_patch.loaders.samples import NestedEpochs
from ddp_patch.orders.digest import Digest
from ddp_patch.orders.generators import RandomGenerator, random_generators, torch_generators
from ddp_patch.orders.orders import (
    InOrder,
    ScalableShuffle,
    has_computed_order,
    has_order,
    is_always_alike,
    is_torch_sampler,
    scalable,
)
from ddp_patch.orders.random_states import PrivateRNG, epoch_seed, look
from ddp_patch.plan import ONE_PER_STEP, Batching, Sizes
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.sharding.attributes import AttributeProxy
from ddp_patch.sharding.balancing import Balancer, BatchDivider
from ddp_patch.sharding.epoch_drawing import EpochDrawing, Permuted, require_sure_length
from ddp_patch.sharding.epoch_sampler import EpochSampler
from ddp_patch.sharding.item_sources import FromLeader, Indexed, ItemSource, Nothing, Streamed
from ddp_patch.sharding.passes import Pass
from ddp_patch.sharding.sampler_states import SamplerStates
from ddp_patch.sharding.saved_position import Position, States, split_consumed
from ddp_patch.sharding.steps import require_steps

__all__ = ["ShardedSampler"]


T = TypeVar("T")


class ShardedSampler(AttributeProxy, EpochSampler[T]):
    """Gives one rank its share of the items that another sampler yields."""

    _gives_batches: bool = False
    _inner, _kept_as = "sampler", "_wrapped_sampler"

    def __init__(self, stream: StreamFacts, shuffle: bool, agreed: Agreed, batching: Batching = ONE_PER_STEP) -> None:
        if agreed.options.is_scalable:
            stream = StreamFacts.of(scalable(stream.source, agreed.seed))
        balancer = Balancer.of(agreed, batching, are_batches=self._gives_batches)
        facts = {
            "shared by": type(self).__name__,
            "shuffle_samples_between_gpus": shuffle,
            **stream.described,
            **({} if balancer is None else balancer.described),
        }
        super().__init__(agreed, SamplerStates(stream.samplers, stream.counted), facts)
        self._wrapped_sampler: Iterable[T] = stream.source
        self._shuffles = shuffle
        self._batching, self._balancer = batching, balancer
        if not shuffle and balancer is None and is_always_alike(self._wrapped_sampler):
            self.monitor.let_epochs_be_alike()
        self._is_one_shot = stream.is_one_shot
        self.monitor.why_orders_differ = partial(_why_orders_differ, self._name)
        if (held := stream.held_data) is not None:
            self.monitor.compare_held(held)
        self._order_is_drawn = has_order(self._wrapped_sampler) and not has_computed_order(self._wrapped_sampler)
        self._draws_nothing_at: tuple[object, ...] = ()  # when counting the data was seen to draw nothing
        self._nested_epochs = NestedEpochs(self._wrapped_sampler, stream.counts_epochs)
        self._torchs_generators = self._generators_of_torchs()
        self._warned_of_length = False
        self._restored_length: int | None = None  # of the stream, when a position was restored
        self._seal()

    def _wrapped(self) -> Iterator[Any]:
        # What torch, or this package, puts between the loader and the user's sampler has none of its attributes.
        current: Any = self._wrapped_sampler
        yield current
        while is_torch_batch_sampler(type(current)) or isinstance(current, ScalableShuffle):
            current = current.sampler
            yield current

    def _user_changes(self) -> AbstractContextManager[object] | None:
        return self._sampler_states.changed_by_user() if self._sampler_states.has_counters else None

    def _set(self, name: str, value: Any) -> None:
        super()._set(name, value)
        self._draws_nothing_at = ()  # it may be another dataset

    @classmethod
    def of(cls, stream: StreamFacts, agreed: Agreed, batching: Batching = ONE_PER_STEP) -> Self:
        """Wrap a sampler that the ranks have agreed on already, and that a loader makes batches from."""
        wrapper = cls.__new__(cls)
        ShardedSampler.__init__(wrapper, stream, shuffle=False, agreed=agreed, batching=batching)
        return wrapper

    @property
    def _name(self) -> str:
        return type(self._wrapped_sampler).__name__

    @property
    def sampler(self) -> Iterable[T]:
        """The wrapped sampler's, as in one process; if it has none, that sampler."""
        outer, *inner = (one for one in self._wrapped() if not isinstance(one, ScalableShuffle))
        return cast(Iterable[T], inner[0] if inner else getattr(outer, "sampler", outer))

    @property
    def dataset(self) -> Any:
        """The wrapped sampler's; if it has none, that sampler, which is what ``DistributedSampler`` calls so."""
        return getattr(self._holder("dataset"), "dataset", self._wrapped_sampler)

    @dataset.setter
    def dataset(self, dataset: Any) -> None:
        self._set("dataset", dataset)

    @property
    def shuffle(self) -> bool:
        """The wrapped sampler's; if it has none, whether the whole epoch is permuted once more."""
        shuffle: bool = getattr(self._holder("shuffle"), "shuffle", self._shuffles)
        return shuffle

    @shuffle.setter
    def shuffle(self, shuffle: bool) -> None:
        if hasattr(self._holder("shuffle"), "shuffle"):
            self._set("shuffle", shuffle)
        else:
            self._shuffles = shuffle

    @property
    def total_size(self) -> int:  # type: ignore[override]  # torch fixes it at construction; here it is computed
        """How many items all ranks take together in an epoch, or in what is left of it, padding included."""
        epoch, before, skip = self._counted_by_len()
        left = self.plan.rest(self._stream_length(epoch), before)
        return max(0, self.plan.total(len(left)) - skip * self.plan.num_replicas)

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # as total_size
        """How many items this rank takes in an epoch, or in the rest of a resumed one."""
        epoch, before, skip = self._counted_by_len()
        return self.plan.remaining(self._stream_length(epoch), before, skip)

    def __len__(self) -> int:
        return self.num_samples

    def _stream_length(self, epoch: int) -> int:
        """The wrapped sampler's length, or its own TypeError; some samplers draw to find it."""
        with self._counting(epoch, partial(random_generators, self._sampler_states.holders)):
            return len(cast(Any, self._wrapped_sampler))

    @contextmanager
    def _counting(self, epoch: int, drawn_from: Callable[[], Sequence[RandomGenerator]] = tuple) -> Iterator[None]:
        """While entered, let samplers count their data, which may draw, guarded.

        Once it was seen to draw nothing, it is not guarded again before a pass begins or ends, or an epoch is chosen.

        Args:
            epoch: In which epoch.
            drawn_from: Tells which generators to put back, besides the global ones.
        """
        now = (epoch, self._set_epoch_calls, self.epochs.passes, None if self.latest is None else self.latest.drawn)
        if self._draws_nothing_at == now:
            yield
            return
        with look(drawn_from(), seed=self.seed, epoch=epoch) as was_moved:
            yield
            draws_nothing = not was_moved()
        if draws_nothing:
            self._draws_nothing_at = now

    def _loader_facts(self, latest: Pass[T] | None) -> Mapping[str, object]:
        if not self._order_is_drawn:
            return self._facts
        # Rows may have been added since the patch. A pass that has begun has those that were there then.
        if latest is None or latest.is_ended:
            length = None
        else:
            length = self._restored_length if latest.start.is_within_pass else latest.source.length
        return {
            **self._facts,
            "sampler length": self._stream_length(self.epochs.upcoming) if length is None else length,
        }

    def resume_at(self, position: Position, *, counts_rest: bool) -> None:
        """Make the next pass resume at a position; see the attribute ``counts_rest``."""
        super().resume_at(position, counts_rest=counts_rest)
        self._restored_length = self._stream_length(position.epoch) if self._order_is_drawn else None

    def _sure_length(self, epoch: int) -> int | None:
        if not (self._is_looked_up() or self.plan.needs_length):
            return None
        with self._nested_epochs.told(epoch, otherwise=self.epochs.upcoming):  # epochs may have different lengths
            return self._stream_length(epoch)

    def sampler_snapshot(self) -> States:
        """Return what the samplers hold now: generators, states and counters."""
        if self._is_one_shot and self.epochs.passes:
            why = (
                "the sampler is an iterator, which can be used only once, and nobody knows how many items earlier "
                "epochs took. Give the loader something that can be iterated again"
            )
            return States(unknown=why)
        return super().sampler_snapshot()

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; also call ``set_epoch`` of every nested sampler that has it.

        Calling it is optional: after each pass that draws anything, the next epoch follows.
        """
        super().set_epoch(epoch)
        self._nested_epochs.tell(self.epochs.upcoming)

    def __iter__(self) -> Iterator[T]:
        self._require_no_failure()
        # Somebody may have set the epoch of a nested sampler, past this one.
        if (epoch := self._nested_epochs.set_by_user()) is not None:
            self.set_epoch(epoch)
        return chain.from_iterable(self._runs(self._take_up_pass(), self._set_epoch_calls))

    def _runs(self, current: Pass[T], choices: int) -> Iterator[Iterator[T]]:
        """Yield this rank's items in runs, from when the first is asked for."""
        is_other = current.epoch != self.epochs.upcoming or choices != self._set_epoch_calls
        if not current.is_ended and (is_other or self._note_new_generators()):
            # Another iterator began this epoch since, or set_epoch() chose one: take the one that is next now. A
            # sampler of torch's looks at its generator now.
            current = self._take_up_pass()
        if current.is_ended:
            return
        self.epochs.begin(current.epoch)
        self._note_begun(current, takes_position=True)
        self._epoch_was_set = False
        yield from current.runs()

    def _take_up_pass(self) -> Pass[T]:
        """Make a pass over the upcoming epoch the latest one, and return it.

        If nothing is left of that epoch, it is counted here: the next pass is over the next epoch, even if nothing is
        drawn from this one.
        """
        number, start = self.epochs.upcoming, self.position
        if start is None or not start.is_within_pass:
            self._begin_sampler_states()
        with self._sampler_states.generators_in_place():  # a sampler's set_epoch may seed its generator
            self._nested_epochs.tell(number)
        if start is not None and start.is_within_pass:
            # Others may have drawn from the generators since it was loaded.
            self._sampler_states.restore_states(start.states)
        else:
            start = Position(number, states=self.sampler_snapshot())
        # Under a leader one rank draws for all, so there is nothing to compare.
        digest = Digest() if self.monitor.is_on and self.agreed.leader is None else None
        source: ItemSource[T] = Nothing() if start.is_ended else self._chosen_source(start, digest)
        costs = self.agreed.options.costs
        current = Pass(
            start,
            self._pass_context(),
            source,
            digest,
            sizes=Sizes() if self._keeps_sizes or self._gives_batches or self._batch_plan is not None else None,
            divide=None if self._batch_plan is None else BatchDivider(self._batch_plan, self._name, costs),
            require_steps=partial(self._require_steps, start),
        )
        self._note_begun(current, takes_position=start.is_ended)
        if start.is_ended:
            current.end()
            self.epochs.begin(number)
        return current

    def _generators_of_torchs(self) -> list[torch.Generator]:
        return torch_generators(holder for holder in self._sampler_states.holders if is_torch_sampler(holder))

    def _note_new_generators(self) -> bool:
        """Return whether a torch sampler has another generator than before; refuse that if ranks have agreed on it.

        Other samplers may make their own generators at any time, alike on every rank.
        """
        before, now = self._torchs_generators, self._generators_of_torchs()
        if list(map(id, now)) == list(map(id, before)):
            return False
        if now and self.agreed.world.share_of_rank is not None and self.agreed.leader is None:
            raise InvalidOptionError(
                f"A {self._name} was given a generator after it was patched. Its state may differ "
                "between ranks, because they agreed only on the generators that were there. Give the sampler its "
                "generator first and patch the loader then, or use order='leader'."
            )
        self._torchs_generators = now
        return True

    def _finish_latest(self) -> None:
        """Draw to its end a pass whose every batch was given: a loop that takes ``len()`` batches asks for no end.

        What workers fetch ahead was not: ranks that looked at another pass since would have fetched less of that.
        """
        current = self.latest
        if current is None or current.is_ended or (length := current.likely_length) is None:
            return
        count, share = self._batching.count, self.plan.smallest_share(length)
        if not current.items_taken or current.batches(self._batching) < count(max(0, share - current.skip)):
            return
        if current.draw_rest(self._batching.size):
            self._sampler_states.end(current.epoch)

    def _chosen_source(self, start: Position, digest: Digest | None) -> ItemSource[T]:
        """Choose how a pass gets its items."""
        leader, before = self.agreed.leader, split_consumed(start.consumed, self.plan.num_replicas)[0]
        # It draws what the global one would draw from these states, and nobody else can draw from it.
        private_generator = torch.Generator().manual_seed(epoch_seed(self.seed, start.epoch))
        has_rest = self._balancer is not None and any(taken for _, taken in before)
        is_looked_up = self._is_looked_up()
        draws_alone = self._order_is_drawn and not self._sampler_states.has_generators
        order = self._wrapped_sampler
        if has_rest if is_looked_up else draws_alone:  # from what nobody else draws from
            order = InOrder(order, start.epoch, private_generator)
        epoch = EpochDrawing(
            sampler=Permuted(order, self.seed, start.epoch) if self._shuffles else order,
            is_one_shot=self._is_one_shot,
            number=start.epoch,
            plan=self.plan,
            consumed_before=before,
            random_context=partial(self._drawing, start.epoch, PrivateRNG(self.seed, start.epoch)),
            private_generator=private_generator,
            length=partial(self._stream_length, start.epoch),
            check_length=partial(self._compare_length, start.epoch),
            has_earlier_pass=lambda: self.epochs.passes > 1,  # this pass counts by then
            keeps_sizes=self._keeps_sizes and self._batch_plan is None,
            balancer=self._balancer,
            digest=digest,
        )
        if leader is not None:
            plans = [self.agreed.plan(rank) for rank in (self.agreed.world.share_of_rank or {}).values()]
            has_length = leader.is_leader and self._length_if_any(start.epoch) is not None
            pass_facts = partial(self._pass_facts, start.epoch)
            return FromLeader(
                epoch, leader, pass_facts, plans, start.states, self.sampler_snapshot, has_length=has_length
            )
        if is_looked_up and not has_rest:
            return Indexed(epoch)
        return Streamed(epoch, start.states.streams[0].first if start.states.streams else None)

    @contextmanager
    def _drawing(self, epoch: int, states: AbstractContextManager[None]) -> Iterator[None]:
        """While entered, let the samplers draw an epoch: from these states, unless its order is drawn here."""
        with self._counting(epoch) if self._order_is_drawn else states, self._sampler_states.drawing():
            yield

    def _require_steps(self, start: Position, length: int) -> None:
        """Refuse an epoch without steps. The rest of one may well have none."""
        if start.is_at_epoch_start:
            require_steps(self.plan, self._batching, self._name, [length], in_batches=self._batching.size > 1)

    def _pass_facts(self, epoch: int) -> dict[str, object]:
        """Return which pass is being made, to be compared between the ranks."""
        return {"patched as": f"number {self.agreed.number}", "epoch": epoch, "pass": self.epochs.passes}

    def _is_looked_up(self) -> bool:
        """Whether a pass looks its items up in the epoch's order, instead of drawing those of all ranks."""
        return self.agreed.leader is None and not self._shuffles and has_order(self._wrapped_sampler)

    def _compare_length(self, epoch: int, drawn: int, assumed: int) -> None:
        """Raise if runs were cut from a wrong length; otherwise warn once about a wrong length."""
        require_sure_length(self.plan, "The sampler", "sampler", drawn, assumed)
        told = self._length_if_any(epoch)
        if told is not None and told != drawn and not self._warned_of_length:
            self._warned_of_length = True
            warnings.warn(
                f"{self._name} yielded {drawn} items and its len() says {told}. All {drawn} were "
                "sharded, and every rank makes the same number of steps. But len() of this loader is wrong, and so "
                "are schedules and progress bars that use it. Correct the sampler's __len__.",
                StreamLengthWarning,
                stacklevel=2,
            )


def _why_orders_differ(name: str) -> str:
    """Return what may cause that ranks draw different orders, and what to do."""
    return (
        f"{name} gave each its own, and each rank keeps its shard of what should be one order, so samples would be "
        "lost. Make the order the same on every rank: if the sampler learns from its rank's losses, let every rank "
        "learn from all ranks' (see \"Samplers that learn\" in docs/samplers.md); if it draws from the system's "
        "entropy, or another thread draws meanwhile, give it a generator of its own that is seeded alike; or patch "
        "with order='leader', and rank 0 draws for all."
    )
