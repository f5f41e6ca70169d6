"""Equal steps if a dataset splits itself: ranks with batches left give some to those that have none."""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.compat.private_torch import WrappedIterator, pinned_by
from ddp_patch.errors import NoStepsError, WorldError
from ddp_patch.options import Uneven
from ddp_patch.ranks.channel import Channel, opened
from ddp_patch.ranks.exchange import refuse
from ddp_patch.streams.balanced_parts import BalancedRounds, Holding, NextMove, Round, ahead_of_next, next_round
from ddp_patch.streams.stream_pass import StreamPass
from ddp_patch.streams.stream_sampler import StreamSampler

__all__ = ["EvenIterators"]


_READS, _RAN_OUT, _FAILED = range(3)


@dataclass(frozen=True)
class EvenIterators:
    """Makes the iterators of a patched loader, and knows what the ranks agree on for each pass.

    Attributes:
        sampler: What begins the loader's epochs.
        workers: How many workers it has.
        name: What errors call the loader.
        stale: Keys that earlier passes left in the store.
    """

    sampler: StreamSampler
    workers: int
    name: str
    stale: list[str] = field(default_factory=list)

    def __call__(self, loader: DataLoader[Any]) -> "EvenSteps":
        """Return the iterator of a pass."""
        return EvenSteps(loader, self)

    @property
    def uneven(self) -> Uneven:
        """What becomes of an incomplete round."""
        return self.sampler.agreed.options.uneven

    def opened(self, own: "_OwnBatches") -> AbstractContextManager[Channel]:
        """Synchronise with the other ranks when a pass begins; raise this rank's failure, and report it to them."""
        agreed, epoch = self.sampler.agreed, self.sampler.epochs.current
        doing = f"Iterating the {self.name} over epoch {epoch}"
        if not dist.is_initialized():
            raise WorldError(
                f"{doing}: the process group is gone, and with iterable_sharding='by_worker' ranks send each other "
                "batches. Call torch.distributed.init_process_group() again and patch the unpatched loader, or iterate "
                "the unpatched loader."
            )
        members = agreed.world.peer_ranks()
        if own.failure is not None:
            refuse(members, doing, own.failure)
            own.raise_failure()
        facts = {"epoch": epoch, "num_workers": self.workers, "patched as": f"number {agreed.number}"}
        return opened(members, doing, facts, agreed.options.timeout, self.stale)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "stale": []}


class EvenSteps(WrappedIterator, Iterator[Any]):
    """Stands around the iterator that a loader's class makes, and makes a pass of all ranks of it.

    Args:
        loader: The loader.
        maker: What made it, and knows what the ranks agree on.
    """

    def __init__(self, loader: DataLoader[Any], maker: EvenIterators) -> None:
        super().__init__(loader)
        self._maker = maker
        self._pass: Generator[Any] | None = None

    def drop_pass(self) -> None:
        """Leave the running pass; the next batch is a new one's first."""
        if self._pass is not None:
            self._pass.close()
        self._pass = None

    def __next__(self) -> Any:
        if self._pass is None:
            # It must not hold this: it ends when this is dropped.
            self._pass = _handed_out(_OwnBatches(self.wrapped), self._maker)
        return next(self._pass)


class _OwnBatches:
    """The batches that this rank's own workers make, read ahead.

    Args:
        wrapped: The loader's own iterator.

    Attributes:
        failure: What reading them raised.
    """

    def __init__(self, wrapped: Iterator[Any]) -> None:
        self._wrapped = wrapped
        self._held: deque[Any] = deque()
        self._ran_out = False
        self.failure: Exception | None = None

    def read_up_to(self, batches: int) -> None:
        """Read until this many are held, or there are no more."""
        while len(self._held) < batches and not self._ran_out and self.failure is None:
            try:
                self._held.append(next(self._wrapped))
            except StopIteration:
                self._ran_out = True
            except Exception as error:  # noqa: BLE001 - the user's code; raised where the others are told
                self.failure = error

    def raise_failure(self) -> None:
        """Raise what reading raised, if it did."""
        failure, self.failure = self.failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # or it would hold its own traceback, and that the loader with its workers

    def report(self, channel: Channel, ends: Sequence[int]) -> None:
        """Begin to report to the other ranks what this one holds, and where its workers end."""
        if self.failure is not None:
            channel.fail(self.failure)
        state = _FAILED if self.failure is not None else _RAN_OUT if self._ran_out else _READS
        channel.begin_gather([len(self._held), state, *ends])

    def take(self, step: Round, channel: Channel) -> list[Any]:
        """Hand to others what the round says; return the batch that this rank gets, if it gets one."""
        for place, target in step.handed_by(channel.index):
            channel.send(target, self._held[place])
        got = []
        if (source := step.gets[channel.index]) is not None:
            is_own = source.rank == channel.index
            got.append(self._held[source.place] if is_own else pinned_by(self._wrapped, channel.receive(source.rank)))
        channel.all_sent()
        for _ in range(step.taken[channel.index]):
            self._held.popleft()
        return got


def _handed_out(own: _OwnBatches, maker: EvenIterators) -> Generator[Any]:
    """Yield a rank's batches of one pass, in rounds of all ranks.

    It reports what it holds before it gives a batch, in the background of the step, and receives the reports of others
    when the next batch is asked for.
    """
    own.read_up_to(1)  # which begins the pass
    current = cast(StreamPass, maker.sampler.latest)
    rounds = current.in_rounds()
    with maker.opened(own) as channel:
        own.report(channel, current.batches_made)
        while (step := next_round(ranks := _heard(channel, own, rounds), maker.uneven)) is not NextMove.END:
            taken: Sequence[int] = [0] * len(ranks)
            got: list[Any] = []
            if isinstance(step, Round):
                taken, got = step.taken, own.take(step, channel)
                rounds.add(step.taken)
            own.read_up_to(ahead_of_next(ranks, taken))
            own.report(channel, current.batches_made)
            if got:
                channel.count_batch()
                rounds.give()
                yield got.pop()
        rounds.end()
        if current.start.is_at_epoch_start:  # the rest of an epoch may well have no step
            _require_steps(rounds, ranks, maker.uneven)


def _heard(channel: Channel, own: _OwnBatches, rounds: BalancedRounds) -> list[Holding]:
    """Return what each rank holds; raise if one failed."""
    rows = channel.gathered()
    own.raise_failure()
    if any(state == _FAILED for _, state, *_ in rows):
        channel.require_no_failure()
    rounds.hear([row[2:] for row in rows])
    return [Holding(held, state == _READS) for held, state, *_ in rows]


def _require_steps(rounds: BalancedRounds, ranks: Sequence[Holding], uneven: Uneven) -> None:
    """Refuse to leave out all that there was."""
    if (left := sum(rank.held for rank in ranks)) and not rounds.count:
        raise NoStepsError(
            f"A rank would make no step in an epoch: a step needs a batch for each of {len(ranks)} ranks, all workers "
            f"together made {left}, and uneven={uneven!r} leaves out an incomplete step. Use one of "
            f"these: uneven='pad', uneven='keep', a number of ranks of at most {left}."
        )
