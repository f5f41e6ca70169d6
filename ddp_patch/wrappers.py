"""The two samplers that give one rank its share of another sampler's stream."""

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Self, SupportsIndex, TypedDict, TypeVar, Unpack, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ddp_patch.agreement import Agreed, Proposal, agree, describe, refusals_told, require_length
from ddp_patch.epoch_sampler import EpochSampler
from ddp_patch.errors import (
    AlreadyPatchedError,
    ExhaustedSamplerError,
    StreamLengthError,
    StreamLengthWarning,
    WorldError,
)
from ddp_patch.fingerprint import COMPARED, fingerprint, fingerprinted
from ddp_patch.leader import FIRST_PIECE, LARGEST_PIECE
from ddp_patch.loader import generators, is_ddp_aware, nested_samplers, random_generators
from ddp_patch.nesting import epoch_holders, tell_epoch
from ddp_patch.options import Agreement, Layout, Options, Uneven
from ddp_patch.orders import MOST_RANKS, ScalableShuffle, blocks, has_order, is_random_access, order_of
from ddp_patch.plan import Plan
from ddp_patch.progress import Progress
from ddp_patch.seeding import PrivateRNG, distributed_permutation, unmoved
from ddp_patch.sharing import share
from ddp_patch.streams import MOST_AHEAD, draw
from ddp_patch.world import find_world

__all__ = ["DDPBatchSamplerWrapper", "DDPSamplerWrapper", "SharingOptions"]

T = TypeVar("T")


class SharingOptions(TypedDict, total=False):
    """What both wrappers take as keywords; described at ``DDPSamplerWrapper``."""

    num_replicas: SupportsIndex | None
    rank: SupportsIndex | None
    process_group: dist.ProcessGroup | None
    device_mesh: DeviceMesh | None
    data_parallel_dimensions: Sequence[str] | None
    uneven: Uneven
    layout: Layout
    agreement: Agreement
    seed: int | None
    verify: bool
    timeout: float


class _ShardedSampler(EpochSampler[T]):
    """One rank's share of the items that another sampler yields.

    Attributes:
        sampler: The wrapped sampler.
    """

    def __init__(self, sampler: Iterable[T], shuffle: bool, agreed: Agreed) -> None:
        super().__init__(agreed)
        self.sampler = sampler
        self.dataset = cast(Any, sampler)  # DistributedSampler's name for it
        self.shuffle = shuffle
        self._warned_of_length = False
        self._progress: Progress | None = None
        self._resumed: dict[str, Any] | None = None
        self._nested_epochs = self._read_nested_epochs()
        self._known_end: dict[str, object] = {}

    @classmethod
    def of(cls, sampler: Iterable[T], agreed: Agreed) -> Self:
        """Wrap a sampler on whose sharing the ranks have agreed already."""
        wrapper = cls.__new__(cls)
        _ShardedSampler.__init__(wrapper, sampler, shuffle=False, agreed=agreed)
        return wrapper

    @property
    def total_size(self) -> int:  # type: ignore[override]  # torch fixes it at construction; here it is computed
        """How many items all ranks take together in an epoch, padding included."""
        return self.plan.total(self._stream_length(self.epochs.current))

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # as total_size
        """How many items this rank takes in an epoch."""
        return len(self.plan.share(self._stream_length(self.epochs.current)))

    def __len__(self) -> int:
        return self.num_samples

    def _stream_length(self, epoch: int) -> int:
        """The wrapped sampler's length, or its own TypeError; some samplers draw to tell it."""
        with self._rng(epoch), unmoved(random_generators(nested_samplers(self.sampler))):
            return len(cast(Any, self.sampler))

    def _length_if_any(self, epoch: int) -> int | None:
        try:
            return self._stream_length(epoch)
        except Exception:  # noqa: BLE001 - the user's code, which an unpatched loader may never call
            return None

    def _rng(self, epoch: int) -> AbstractContextManager[None]:
        return nullcontext() if self.agreed.options.agreement == "ambient" else PrivateRNG(self.seed, epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be drawn; every nested sampler that has a ``set_epoch`` is told too.

        Calling it is optional: each pass that draws anything is followed by the next epoch.
        """
        before = self.epochs.upcoming
        super().set_epoch(epoch)
        if self.epochs.upcoming != before:
            self._resumed = None  # a resume was for the other epoch
        self._progress = None
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
        if self.plan.num_replicas > MOST_RANKS:
            return False
        # All that is drawn is compared, where it can be drawn.
        sampler: object = self.sampler
        is_computed = type(sampler) is ScalableShuffle or is_random_access(sampler)
        return is_computed or not self.agreed.options.verify

    def _start(self) -> tuple[Iterator[T], AbstractContextManager[None], Progress]:
        """Begin the wrapped sampler's upcoming epoch."""
        epoch = self.epochs.upcoming
        self._tell_nested(epoch)
        resumed = self._resumed
        if resumed is not None:
            self._set_generators(resumed["now" if resumed["ended"] else "generators"])
        progress = self._progress = Progress(epoch, self._generator_states(), resumed)
        if self._meets_unevenly and progress.skip and progress.skip == self._rounds(epoch):
            progress.ended = True  # as it is on ranks with an item less, which must not be waited for
        if progress.ended:
            # Nothing of this epoch is left; the next pass, even if this one is never drawn from, is the next epoch's.
            self.epochs.begin(epoch)
            self._resumed = None
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
        self, stream: Iterator[T], rng: AbstractContextManager[None], progress: Progress
    ) -> Iterator[Iterator[T]]:
        """Yield this rank's items in runs, from when the first is asked for."""
        if progress.ended:
            return
        again = self.epochs.passes > 0
        if progress.resumed is None and progress.epoch != self.epochs.upcoming:
            # Another iterator has begun this epoch since: this one is the next epoch's.
            stream, rng, progress = self._start()
        self._begin(progress.epoch, {"position": progress.skip}, self._known_end)
        self._known_end = {}
        self._progress, self._resumed = progress, None
        runs = self._looked_up(rng, progress) if self._is_looked_up() else self._drawn(stream, rng, again, progress)
        yield from runs
        progress.ended = True

    def _looked_up(self, rng: AbstractContextManager[None], progress: Progress) -> Iterator[Iterator[T]]:
        """Yield this rank's items from an order that is known as a whole."""
        with rng:
            order = order_of(self.sampler, progress.epoch)
        if progress.resumed is not None and progress.resumed["given"]:
            self._set_generators(progress.resumed["now"])  # when the state was taken the order was drawn
        progress.resumed, progress.given = None, progress.skip
        real, repeated = self.plan.sources(order.length)
        # The items that every rank has come first. Whoever asks for more finds the end, at the same step.
        rounds = order.length // self.plan.num_replicas
        for positions in blocks(real[progress.skip : rounds]):
            yield progress.begin(order.at(positions))
        if self.agreed.options.verify and progress.skip <= rounds:
            told = range(0, order.length, max(1, order.length // COMPARED))
            self._compare_end(progress.epoch, order.length, fingerprint(order.at(told)))
        last = real[max(progress.skip, rounds) :], repeated[max(0, progress.skip - len(real)) :]
        for positions in chain.from_iterable(map(blocks, last)):
            yield progress.begin(order.at(positions))
        order.finish()

    def _drawn(
        self, stream: Iterator[T], rng: AbstractContextManager[None], again: bool, progress: Progress
    ) -> Iterator[Iterator[T]]:
        """Yield this rank's items of a stream that is drawn chunk by chunk."""
        one_shot = isinstance(self.sampler, Iterator)  # which no pass begins anew
        # Of an iterator nothing is drawn ahead: after a break the next pass goes on where this one stopped.
        most = 1 if one_shot or self.agreed.options.agreement == "ambient" else MOST_AHEAD
        chunks = draw(stream, rng, round_size=self.plan.num_replicas, most=most)
        if one_shot and again:
            chunks = _not_empty(chunks, progress.epoch)
        self._catch_up(progress)
        for part in self._parts(chunks, progress.epoch):
            run = progress.begin(part)
            self._catch_up(progress)
            yield run

    def _rounds(self, epoch: int) -> int | None:
        """How many items the ranks with most of them take; None where that is not known."""
        length = self._length_if_any(epoch)
        return None if length is None else -(-self.plan.total(length) // self.plan.num_replicas)

    def _led(self) -> Iterator[T]:
        """The sampler's stream, begun with its first item: an error then is one that the leader can tell of."""
        yield from self.sampler

    def _catch_up(self, progress: Progress) -> None:
        """Once as much is drawn as when a resumed state was taken, give the generators their states of then.

        Others draw from them too: a DataLoader its workers' seed.
        """
        resumed = progress.resumed
        if resumed is not None and progress.given >= resumed["given"]:
            self._set_generators(resumed["now"])
            progress.resumed = None

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(generators(nested_samplers(self.sampler)), states, strict=True):
            generator.set_state(state)

    def _parts(self, chunks: Iterator[list[T]], epoch: int) -> Iterator[list[T]]:
        """Yield this rank's items: cut from what it draws, or as rank 0 sends them."""
        leader = self.agreed.leader
        if leader is None:
            return (part for (part,) in self._shares(self._verified(chunks, epoch), [self.plan], epoch))
        turn = {"patched as": f"number {self.agreed.number}", "epoch": epoch, "pass": self.epochs.passes}
        if not leader.draws:
            return leader.receive(turn)
        plans = [self.agreed.plan(rank) for rank in (self.agreed.world.members or {}).values()]
        first_piece = LARGEST_PIECE if self._length_if_any(epoch) is not None else FIRST_PIECE
        if self.plan.layout == "contiguous":
            first_piece = sys.maxsize  # all at once: a rank whose run comes late must not wait for steps of the others
        largest_piece = max(first_piece, LARGEST_PIECE)
        if isinstance(self.sampler, Iterator):
            first_piece = largest_piece = 1  # which is a round; see _pass
        return leader.send(self._shares(chunks, plans, epoch), turn, first_piece, largest_piece)

    def _shares(self, chunks: Iterator[list[T]], plans: Sequence[Plan], epoch: int) -> Iterator[list[list[T]]]:
        if self.shuffle:
            return _shuffled_shares(plans, chunks, self.seed, epoch)
        length = self._stream_length(epoch) if self.plan.layout == "contiguous" else 0
        return share(plans, chunks, length, lambda drawn: self._compare_length(drawn, length, epoch))

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

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in generators(nested_samplers(self.sampler))]

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank stands: the epoch, how many of its items it took, and its generators' states then.

        torch's Stateful protocol, by which ``torchdata``'s ``StatefulDataLoader`` resumes in the middle of an epoch.
        """
        progress, now = self._progress, self._generator_states()
        if progress is None:
            if self._resumed is not None:
                return self._resumed
            progress = Progress(self.epochs.upcoming, now)
        return {
            "epoch": progress.epoch,
            "taken": progress.taken,
            "given": progress.given,
            "ended": progress.ended,
            "generators": progress.generators,
            "now": now,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass go on where a ``state_dict`` was taken."""
        self.set_epoch(state_dict["epoch"])
        self._set_generators(state_dict["generators"])
        self._resumed = state_dict
        self._progress = None

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


def _shuffled_shares(
    plans: Sequence[Plan], chunks: Iterable[list[T]], seed: int, epoch: int
) -> Iterator[list[list[T]]]:
    """Yield each plan's items of the stream in ``DistributedSampler(shuffle=True)``'s order, which needs all of it."""
    items = [item for chunk in chunks for item in chunk]
    order = distributed_permutation(len(items), seed, epoch)
    yield [[items[int(order[position % len(items)])] for position in plan.share(len(items))] for plan in plans]


class DDPSamplerWrapper(_ShardedSampler[T]):
    """One rank's share of any sampler: a ``DistributedSampler`` for samplers, not only for datasets.

    Every rank draws the whole stream of ``sampler``, a few thousand items at a time, and keeps its own. The ranks'
    streams are the same although the ranks may be seeded differently, because the global random states are replaced,
    while the sampler is drawn, by ones derived from (seed, epoch). Epochs differ with and without ``set_epoch``.

    Args:
        sampler: A sampler, or any iterable of indices.
        shuffle_samples_between_gpus: Permute the whole epoch once more, as
            ``torch.utils.data.DistributedSampler(shuffle=True)`` does with a dataset. This holds one epoch's items
            in memory.
        pad_data_to_num_gpus: True means ``uneven="pad"`` and False ``uneven="drop"``.
        options: As keywords, each meaning what it means in ``patch_dataloader_to_ddp``: ``num_replicas`` and ``rank``,
            ``process_group``, ``device_mesh``, ``data_parallel_dimensions``, ``uneven`` (outranks
            ``pad_data_to_num_gpus``), ``layout``, ``agreement``, ``seed``, ``verify`` and ``timeout``.

    Raises:
        InvalidOptionError: An option has no meaning.
        WorldError: Neither a world nor a process group is there.
        StreamLengthError: While iterating with ``layout="contiguous"``, if the sampler's length was wrong.

    Examples:
        >>> sampler = torch.utils.data.WeightedRandomSampler([1.0, 1.0, 8.0], num_samples=6)
        >>> ranks = [DDPSamplerWrapper(sampler, False, num_replicas=2, rank=rank) for rank in range(2)]
        >>> [len(rank) for rank in ranks], [len(list(rank)) for rank in ranks]
        ([3, 3], [3, 3])

    Source:
        The first three arguments mean what they mean in open-metric-learning's ``DDPSamplerWrapper``.
    """

    def __init__(
        self,
        sampler: Iterable[T],
        shuffle_samples_between_gpus: bool = True,
        pad_data_to_num_gpus: bool = True,
        **options: Unpack[SharingOptions],
    ) -> None:
        agreed = _agree_alone(type(self), sampler, shuffle_samples_between_gpus, pad_data_to_num_gpus, options)
        super().__init__(sampler, shuffle_samples_between_gpus, agreed)

    @property
    def drop_last(self) -> bool:  # type: ignore[override]  # torch's is an attribute
        """Whether the last, incomplete round is left out, as ``DistributedSampler`` has it."""
        return self.plan.uneven == "drop"


class DDPBatchSamplerWrapper(_ShardedSampler[T]):
    """One rank's share of any batch sampler: whole batches, never torn apart or refilled.

    Args:
        batch_sampler: A batch sampler, or any iterable of batches; ``batch_size`` and ``drop_last`` are read from it.
        shuffle_samples_between_gpus: As in ``DDPSamplerWrapper``, with batches for items; so all that follow.
        pad_data_to_num_gpus: See there.
        options: See there.

    Raises:
        DDPPatchError: As in ``DDPSamplerWrapper``.

    Examples:
        >>> batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]]
        >>> list(DDPBatchSamplerWrapper(batches, False, num_replicas=2, rank=1))
        [[3], [6, 7, 8, 9]]
    """

    def __init__(
        self,
        batch_sampler: Iterable[T],
        shuffle_samples_between_gpus: bool = True,
        pad_data_to_num_gpus: bool = True,
        **options: Unpack[SharingOptions],
    ) -> None:
        agreed = _agree_alone(type(self), batch_sampler, shuffle_samples_between_gpus, pad_data_to_num_gpus, options)
        super().__init__(batch_sampler, shuffle_samples_between_gpus, agreed)

    @property
    def batch_size(self) -> int:
        """The wrapped batch sampler's; AttributeError where it has none."""
        batch_size: int = cast(Any, self.sampler).batch_size
        return batch_size

    @property
    def drop_last(self) -> bool:  # type: ignore[override]  # torch's is an attribute; here the wrapped one's counts
        """The wrapped batch sampler's; AttributeError where it has none."""
        drop_last: bool = cast(Any, self.sampler).drop_last
        return drop_last


def _agree_alone(
    wrapper_type: type, sampler: Iterable[Any], shuffles: bool, pads: bool, given: SharingOptions
) -> Agreed:
    """Agree with the other ranks on a sampler that is wrapped by hand."""
    wrapper = wrapper_type.__name__
    if unknown := sorted(given.keys() - SharingOptions.__annotations__.keys()):
        known = ", ".join(SharingOptions.__annotations__)
        raise TypeError(f"{wrapper}() has no option {', '.join(unknown)}. Pass some of these: {known}.")
    names = ("rank", "num_replicas", "process_group", "device_mesh", "data_parallel_dimensions")
    where: dict[str, Any] = {name: given[name] for name in names if name in given}  # type: ignore[literal-required]
    chosen: dict[str, Any] = {name: value for name, value in given.items() if name not in names}
    world = find_world(**where)
    with refusals_told(world):
        options = Options(**{"uneven": "pad" if pads else "drop"} | chosen)
        if world is None:
            raise WorldError(
                f"{wrapper} does not know which rank of how many it is: there is no process group. Call "
                "torch.distributed.init_process_group() first, or pass rank= and num_replicas=."
            )
        if any(map(is_ddp_aware, nested_samplers(sampler))):
            raise AlreadyPatchedError(
                f"{wrapper} was given a {type(sampler).__name__} that is, or holds, a sampler which shards already, "
                "and would share a share. Wrap the original sampler instead."
            )
        facts = {"wrapper": wrapper, "shuffle_samples_between_gpus": shuffles, **describe(sampler)}
        require_length(options, world, type(sampler).__name__, facts["stream length"])
    return agree(world, options, Proposal(facts, sampler, holders=list(nested_samplers(sampler))), stacklevel=4)
