"""The two samplers that give one rank its share of another sampler's stream."""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from difflib import get_close_matches
from inspect import signature
from typing import Any, Self, SupportsIndex, TypedDict, TypeVar, Unpack, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from ddp_patch.compat.private_packages import LIGHTNING_REMAKES
from ddp_patch.errors import AlreadyPatchedError, InvalidOptionError, UnsupportedLoaderError, WorldError
from ddp_patch.loaders.facts import StreamFacts
from ddp_patch.loaders.recognition import samplers_within, shards_itself
from ddp_patch.options import Layout, Options, Uneven
from ddp_patch.orders.orders import is_random_access
from ddp_patch.ranks.agreement import Agreed, Subject, agree, failures_broadcast
from ddp_patch.ranks.world import find_world
from ddp_patch.sharding.refusals import require_steps_known
from ddp_patch.sharding.sampler import ShardedSampler
from ddp_patch.validation import check_flag, shown

T = TypeVar("T")


# The keywords that set the rank and the number of ranks.
_WORLD = ("rank", "num_replicas", "process_group", "device_mesh")


class SharingOptions(TypedDict, total=False):
    """The keywords of both wrappers; ``DDPSamplerWrapper`` describes them."""

    num_replicas: SupportsIndex | None
    rank: SupportsIndex | None
    process_group: dist.ProcessGroup | None
    device_mesh: DeviceMesh | None
    uneven: Uneven
    layout: Layout
    seed: int | None
    timeout: float | timedelta


class DDPSamplerWrapper(ShardedSampler[T]):
    """Give this rank its share of any sampler, shuffled once more unless ``shuffle_samples_between_gpus=False``.

    This class is a ``DistributedSampler`` that wraps a sampler, not only a dataset.

    All ranks get the same order, even if they are seeded differently, and each keeps its own items. While the sampler
    draws, the global random states are replaced by states that follow from (seed, epoch). Each pass is the next epoch,
    with or without ``set_epoch``.

    Args:
        sampler: A sampler, or any iterable of indices.
        shuffle_samples_between_gpus: Shuffle the whole epoch once more, as
            ``torch.utils.data.DistributedSampler(shuffle=True)`` shuffles a dataset. The shuffling keeps one epoch's
            items in memory. Pass False to keep the sampler's own order.
        pad_data_to_num_gpus: True means ``uneven="pad"``, False means ``uneven="drop"``.
        options: Keywords that mean the same as in ``patch_dataloader_to_ddp``: ``num_replicas`` and ``rank``,
            ``process_group``, ``device_mesh``, ``uneven`` (overrides ``pad_data_to_num_gpus``), ``layout``, ``seed``
            and ``timeout``.

    Raises:
        InvalidOptionError: An option has a value that it does not take.
        NoStepsError: A rank would get no item, for example with ``uneven="drop"`` and fewer items than ranks.
        WorldError: There is no process group, and ``rank`` and ``num_replicas`` were not passed.

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
        stream = StreamFacts(sampler)
        agreed = _agreed_here(type(self), stream, shuffle_samples_between_gpus, pad_data_to_num_gpus, options)
        super().__init__(stream, shuffle_samples_between_gpus, agreed)

    @property
    def drop_last(self) -> bool:  # type: ignore[override]  # torch's is an attribute
        """Whether the last, incomplete round is left out, by ``DistributedSampler``'s name."""
        return self.rank_passes.plan.uneven == "drop"


def _of_wrapped(name: str) -> Any:
    """Return a property that reads and sets an attribute of the wrapped batch sampler."""

    def get(wrapper: "DDPBatchSamplerWrapper[Any]") -> Any:
        return getattr(wrapper._wrapped_sampler, name)

    def put(wrapper: "DDPBatchSamplerWrapper[Any]", value: Any) -> None:
        if wrapper.agreed.batch_plan is not None:
            raise InvalidOptionError(
                f"{name} cannot be set where batches are divided (share='within_batches'): how many samples each rank "
                "gets of a batch, weights and states follow from it. Build the loader with the new value and patch it "
                "again, with restore_loader() if it should resume."
            )
        setattr(wrapper._wrapped_sampler, name, value)

    return property(get, put, doc="The wrapped batch sampler's attribute; AttributeError if it has none.")


class DDPBatchSamplerWrapper(ShardedSampler[T]):
    """Give this rank whole batches of any batch sampler, shuffled unless ``shuffle_samples_between_gpus=False``.

    Batches are never split or refilled.

    Args:
        batch_sampler: A batch sampler, or any iterable of batches. Its ``batch_size`` and ``drop_last`` are used.
        shuffle_samples_between_gpus: As in ``DDPSamplerWrapper``, but for whole batches.
        pad_data_to_num_gpus: As in ``DDPSamplerWrapper``, but for whole batches.
        options: As in ``DDPSamplerWrapper``, but for whole batches.

    Raises:
        DDPPatchError: As in ``DDPSamplerWrapper``.

    Examples:
        >>> batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]]
        >>> list(DDPBatchSamplerWrapper(batches, False, num_replicas=2, rank=1))
        [[3], [6, 7, 8, 9]]
    """

    _gives_batches: bool = True
    _unit: str = "whole batches"

    def __new__(cls, batch_sampler: object = None, *_: object, **options: Any) -> Self:
        """Return the wrapper itself if a framework rebuilds it as if it were torch's batch sampler."""
        if _is_made_anew(options) and isinstance(batch_sampler, cls):
            return batch_sampler
        return super().__new__(cls)

    def __init__(
        self,
        batch_sampler: Iterable[T],
        shuffle_samples_between_gpus: bool = True,
        pad_data_to_num_gpus: bool = True,
        **options: Unpack[SharingOptions],
    ) -> None:
        if _is_made_anew(options):
            _require_itself(self, batch_sampler, drops_last=cast(Any, options)["drop_last"])
            return
        stream = StreamFacts(batch_sampler)
        agreed = _agreed_here(type(self), stream, shuffle_samples_between_gpus, pad_data_to_num_gpus, options)
        super().__init__(stream, shuffle_samples_between_gpus, agreed)

    batch_size: int = _of_wrapped("batch_size")
    drop_last: bool = _of_wrapped("drop_last")


def _is_made_anew(options: Mapping[str, object]) -> bool:
    """Return whether a framework is rebuilding a batch sampler, as Lightning does for predict and overfit_batches."""
    return options.keys() == LIGHTNING_REMAKES


def _require_itself(wrapper: DDPBatchSamplerWrapper[Any], sampler: object, *, drops_last: bool) -> None:
    """Refuse to rebuild a wrapper over another sampler, or to keep an incomplete batch that the wrapper leaves out."""
    if sampler is wrapper and (drops_last or not wrapper.drop_last):
        return
    name = type(wrapper).__name__
    given = "itself" if sampler is wrapper else f"a {type(sampler).__name__}"
    raise UnsupportedLoaderError(
        f"{name} cannot be rebuilt over {given} with batch_size and drop_last={drops_last}: it shards the batches of "
        "another batch sampler, and some would be lost, as with Lightning's overfit_batches and predict. Patch a "
        "loader of the few samples to overfit; build the one to predict on with drop_last=False. By hand, wrap a whole "
        "batch sampler."
    )


def split_options(called: str, given: Mapping[str, Any], known: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keywords into the ones that set the rank and the number of ranks, and the ones that say how to shard.

    Args:
        called: What the user called, for the error.
        given: The keywords.
        known: The ``TypedDict`` of all keywords.

    Raises:
        TypeError: A keyword does not exist.
    """
    names = known.__annotations__
    if unknown := sorted(given.keys() - names.keys()):
        raise TypeError(f"{called}() has no option {', '.join(unknown)}: {_remedy(unknown[0], given, names)}")
    where = {name: value for name, value in given.items() if name in _WORLD}
    return where, {name: value for name, value in given.items() if name not in _WORLD}


def _remedy(name: str, given: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return a remedy for a keyword that does not exist: the keyword that was probably meant."""
    if name in signature(DataLoader).parameters:
        return f"set it on the DataLoader, as in DataLoader(..., {name}={shown(given[name])}), which keeps it here."
    if close := get_close_matches(name, names, n=1):
        return f"did you mean {close[0]}? Pass {close[0]}=."
    return f"use these: {', '.join(names)}."


def with_mesh(given: Mapping[str, Any], mesh: DeviceMesh | None) -> dict[str, Any]:
    """Return the keywords with a framework's mesh, unless they set the rank or the group themselves."""
    return {**given} if mesh is None or not given.keys().isdisjoint(_WORLD) else {**given, "device_mesh": mesh}


def alone(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords with a world of one process in place of their own world."""
    return {**{name: value for name, value in given.items() if name not in _WORLD}, "rank": 0, "num_replicas": 1}


def _agreed_here(wrapper_type: type, stream: StreamFacts, shuffles: bool, pads: bool, given: SharingOptions) -> Agreed:
    """Agree with the other ranks on a sampler that the user wraps by hand."""
    wrapper = wrapper_type.__name__
    where, chosen = split_options(wrapper, given, SharingOptions)
    world = find_world(**where)
    with failures_broadcast(world):
        for name, flag in {"shuffle_samples_between_gpus": shuffles, "pad_data_to_num_gpus": pads}.items():
            # Catalyst's wrappers have the number of ranks as this argument.
            check_flag(name, flag, " Pass a number of ranks as num_replicas=, with rank=.")
        sampler = stream.source
        is_iterable = isinstance(sampler, Iterable) or hasattr(type(sampler), "__getitem__")
        if not is_iterable and not is_random_access(sampler):
            raise InvalidOptionError(
                f"{wrapper} was given {sampler!r} ({type(sampler).__name__}), which cannot be iterated. Pass a "
                "sampler, or any iterable of indices or batches."
            )
        options = Options(**{"uneven": "pad" if pads else "drop"} | chosen)
        if world is None:
            raise WorldError(
                f"{wrapper} does not know which rank of how many it is: there is no process group. Call "
                "torch.distributed.init_process_group() first, or pass rank= and num_replicas=."
            )
        if (found := next(filter(shards_itself, samplers_within(stream.source)), None)) is not None:
            raise AlreadyPatchedError(
                f"{wrapper} was given a {stream.name} that is, or contains, a sampler which is sharded already "
                f"({type(found).__name__}), so sharding it again would lose samples. Wrap the original sampler "
                f"instead, or say is_ddp_aware = False in {type(found).__name__} if it gives every rank the same."
            )
        require_steps_known(options, world, stream)
    compared = {"wrapper": wrapper, "shuffle_samples_between_gpus": shuffles, **stream.described}
    (agreed,) = agree(world, options, [Subject(compared, stream)])
    return agreed
