"""The samplers that this package puts into a loader: with torch's API, and the attributes of the wrapped sampler."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Self, TypeVar, cast

from torch.utils.data import DataLoader, DistributedSampler

from ddp_patch.compat.private_torch import is_torch_batch_sampler
from ddp_patch.loaders.facts import StreamFacts
from ddp_patch.loaders.nested_samplers import steps_of
from ddp_patch.positions_and_padding import ONE_PER_STEP, Batching
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.sharding.loader_passes import LoaderUse, Passes
from ddp_patch.sharding.sampler_passes import SamplerPasses
from ddp_patch.sharding.saved_state import position_in, state_now
from ddp_patch.sharding.wrapper_attributes import AttributeProxy
from ddp_patch.validation import counted

T = TypeVar("T")


class EpochSampler(DistributedSampler[T]):
    """The base class of all samplers that this package puts into a loader, of samplers and of iterable datasets.

    The class derives from ``DistributedSampler``, by which every framework recognises a sharded loader.

    Args:
        passes: The passes over the loader.

    Attributes:
        agreed: What the ranks agreed on.
    """

    is_ddp_aware: bool = True
    _unit: str = "samples"  # the shared unit, in words

    def __init__(self, passes: Passes[T]) -> None:
        # Don't call DistributedSampler.__init__: it needs a length, and fixes it once.
        self.rank_passes: Passes[T] = passes
        self.agreed: Agreed = passes.agreed

    def __repr__(self) -> str:
        passes = self.rank_passes
        length = passes.length_if_any(passes.epochs.upcoming)
        count = "length unknown" if length is None else f"{len(passes.plan.share(length)):,} in an epoch"
        return f"{type(self).__name__}({self._share}, {count})"

    @property
    def _share(self) -> str:
        """The share, in words."""
        unit = self._unit if self.rank_passes.batch_plan is None else "a part of each batch"
        return f"shard {self.rank} of {self.num_replicas}, {unit}"

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

    @property
    def epoch(self) -> int:
        """The current epoch; before the first pass, the next one."""
        return self.rank_passes.epochs.counter.current

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one, also of every nested sampler that has a ``set_epoch``.

        The call is optional: the epoch advances after each pass that draws anything. A loaded position in the epoch
        stays.
        """
        self.rank_passes.choose(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, for packages that save and resume by torch's Stateful protocol.

        The state is the same on every rank, and can be loaded with any number of ranks.
        """
        return state_now(self.rank_passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass resume where a ``state_dict`` was taken, with its seed if the user chose none.

        Lengths stay those of whole epochs, as torchdata's do: callers of this protocol count from the epoch's
        beginning.

        Raises:
            StateError: The state is damaged, newer than this package, or of another loader. The sampler stays as it
                was.
        """
        self.rank_passes.resume_at(position_in(self.rank_passes, state_dict), counts_rest=False)


class ShardedSampler(AttributeProxy, EpochSampler[T]):
    """Gives one rank its share of the items that another sampler yields."""

    _gives_batches: bool = False
    _inner, _kept_as = "sampler", "_wrapped_sampler"
    rank_passes: SamplerPasses[T]

    def __init__(
        self,
        stream: StreamFacts,
        shuffle: bool,
        agreed: Agreed,
        batching: Batching = ONE_PER_STEP,
        loader: LoaderUse | None = None,
    ) -> None:
        name, are_batches = type(self).__name__, type(self)._gives_batches
        use = loader or LoaderUse(name)
        super().__init__(SamplerPasses(use, name, stream, shuffle, agreed, batching, are_batches=are_batches))
        self._wrapped_sampler: Iterable[T] = stream.source
        self._seal()

    @classmethod
    def of(cls, stream: StreamFacts, agreed: Agreed, loader: LoaderUse, batching: Batching = ONE_PER_STEP) -> Self:
        """Wrap a sampler that the ranks have agreed on already, and that a loader makes batches from."""
        wrapper = cls.__new__(cls)
        ShardedSampler.__init__(wrapper, stream, shuffle=False, agreed=agreed, batching=batching, loader=loader)
        return wrapper

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self.rank_passes.runs())

    # ---- attributes of what is wrapped ----

    @property
    def epoch(self) -> int:
        """As ``EpochSampler.epoch``. Setting it also sets the attribute of a sampler that has no ``set_epoch``."""
        return super().epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)
        if "epoch" in getattr(holder := self._holder("epoch"), "__dict__", ()) and not hasattr(holder, "set_epoch"):
            holder.epoch = epoch

    def _wrapped(self) -> Iterator[Any]:
        # Samplers that torch or this package puts between the loader and the user's sampler lack its attributes.
        current: Any = self._wrapped_sampler
        yield current
        while is_torch_batch_sampler(type(current)):
            current = current.sampler
            yield current

    @property
    def sampler(self) -> Iterable[T]:
        """The wrapped sampler's own sampler, as in one process; if it has none, the wrapped sampler."""
        outer, *inner = self._wrapped()
        return cast(Iterable[T], inner[0] if inner else getattr(outer, "sampler", outer))

    @property
    def dataset(self) -> Any:
        """The wrapped sampler's dataset; if it has none, the wrapped sampler."""
        return getattr(self._holder("dataset"), "dataset", self._wrapped_sampler)

    @dataset.setter
    def dataset(self, dataset: Any) -> None:
        self._set("dataset", dataset)

    @property
    def shuffle(self) -> bool:
        """The wrapped sampler's ``shuffle``; if it has none, whether the whole epoch is permuted once more."""
        shuffle: bool = getattr(self._holder("shuffle"), "shuffle", self.rank_passes.order.shuffles)
        return shuffle

    @shuffle.setter
    def shuffle(self, shuffle: bool) -> None:
        if hasattr(self._holder("shuffle"), "shuffle"):
            self._set("shuffle", shuffle)
        else:
            self.rank_passes.order.shuffles = shuffle

    # ---- lengths ----

    @property
    def total_size(self) -> int:  # type: ignore[override]  # torch fixes it at construction; here it is computed
        """How many items all ranks take together in an epoch, or in the rest of a resumed one, padding included."""
        epoch, taken = self.rank_passes.epochs.counted_by_len()
        return self.rank_passes.plan.total(max(0, self.rank_passes.stream_length(epoch) - taken))

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # as total_size
        """How many items this rank takes in an epoch, or in the rest of a resumed one."""
        epoch, taken = self.rank_passes.epochs.counted_by_len()
        return len(self.rank_passes.plan.share(self.rank_passes.stream_length(epoch), taken))

    def __len__(self) -> int:
        return self.num_samples


def describe_share(loader: DataLoader[Any]) -> str | None:
    """Return this rank's share of a loader, in the log's words; None if the loader is not patched.

    Shards are counted from 0, as ranks are.

    Examples:
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = DataLoader(range(100), batch_size=8)
        >>> describe_share(patch_dataloader_to_ddp(loader, rank=1, num_replicas=4))
        'shard 1 of 4, samples, 4 steps of 8'
    """
    sampler = loader.sampler
    if not isinstance(sampler, EpochSampler):
        return None
    steps, of_size = steps_of(loader), f" of {loader.batch_size}" if loader.batch_size else ""
    if steps is None:
        return f"{sampler._share}, {f'steps{of_size}, ' if of_size else ''}length unknown"
    return f"{sampler._share}, {counted(steps, 'step')}{of_size}"
