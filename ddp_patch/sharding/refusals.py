"""Choose the unit of a loader that ranks share; refuse loaders that cannot be shared, with reason and remedy."""

from typing import Any, TypeVar

from torch.utils.data import DataLoader

from ddp_patch.compat.private_packages import (
    arranges_neighbours,
    asks_for_its_own_dataset,
    is_of_energon,
    is_single_node_only,
    is_split_by_node,
    webdataset_world,
)
from ddp_patch.compat.private_torch import has_thread_workers
from ddp_patch.costs import Cost
from ddp_patch.errors import AlreadyPatchedError, InvalidOptionError, UnsupportedLoaderError
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit, StreamFacts
from ddp_patch.loaders.recognition import nested_datasets, or_inside
from ddp_patch.options import Options, Share
from ddp_patch.positions_and_padding import ONE_PER_STEP, Batching, Plan, require_steps
from ddp_patch.ranks.world import World
from ddp_patch.sharding.sampler import EpochSampler
from ddp_patch.validation import counted
from ddp_patch.walks import stored

L = TypeVar("L", bound=DataLoader[Any])


def unit_shared(facts: LoaderFacts[L], share: Share) -> LoaderFacts[L]:
    """Return the facts about a loader, with the unit that is sharded.

    With ``batch_size=None``, items are sharded as they are, whatever ``share`` says: torch does not look into them.

    Raises:
        InvalidOptionError: The loader cannot be sharded in this way.
    """
    if facts.sharded_by is not None:
        return facts
    name = facts.stream.name
    match facts.unit, share:
        case ShardedUnit.BATCH, "samples":
            why_not = (
                f"a batch sampler of your own: it would split the batches that {name} makes. Use share='batches', or "
                "leave it out."
            )
        case ShardedUnit.ITERABLE, "batches" if facts.batch_size is not None:
            why_not = (
                f"an iterable dataset and batch_size={facts.batch_size}: workers read {name} item by item, and each "
                "makes its own batches. Let the dataset yield whole batches and pass batch_size=None, or leave share "
                "out."
            )
        case ShardedUnit.UNBATCHED | ShardedUnit.ITERABLE, "within_batches" if facts.batch_size is None:
            why_not = (
                f"batch_size=None: torch does not look into the items of {name}, even if each has several samples. "
                "Give the loader a batch_size or a batch_sampler, or leave share out."
            )
        case ShardedUnit.SAMPLE, "batches" | "within_batches":
            return facts.in_whole_batches()
        case ShardedUnit.SAMPLE, "auto" | "by_worker" if arranges_neighbours(facts.stream.source):
            return facts.in_whole_batches()
        case _:
            return facts
    raise InvalidOptionError(f"share={share!r} does not work with {why_not}")


def require_costs(facts: LoaderFacts[Any], costs: Cost) -> None:
    """Refuse costs that do not fit the loader's items, and a loader whose stream cannot be balanced.

    Raises:
        InvalidOptionError: The costs do not fit, or the stream cannot be balanced.
    """
    name = facts.stream.name
    if facts.unit is ShardedUnit.ITERABLE:
        raise InvalidOptionError(
            f"cost= does not work with an iterable dataset: {name} gives samples, not indices, so a whole window of "
            "them would have to be read and kept. Leave cost= out, or use a dataset with __getitem__."
        )
    if facts.stream.is_one_shot:
        raise InvalidOptionError(
            f"cost= does not work with a {name}, which is an iterator and can be used only once: a window is drawn "
            "ahead, and after a break the rest of it would be lost. Give the loader a sampler that can be iterated "
            "again, such as a list."
        )
    require_one_of_each(facts, costs)


def require_one_of_each(facts: LoaderFacts[Any], costs: Cost) -> None:
    """Refuse more or fewer costs than the dataset has samples.

    Raises:
        InvalidOptionError: The two numbers differ.
    """
    n = facts.dataset_length
    if costs.length is not None and n is not None and costs.length != n:
        raise InvalidOptionError(
            f"cost= has {counted(costs.length, 'number')} and {type(facts.dataset).__name__} has "
            f"{counted(n, 'sample')}. Pass one number for each index of loader.dataset, in order."
        )


def require_shareable(facts: LoaderFacts[Any], options: Options, world: World) -> None:
    """Refuse a loader that cannot be sharded in this world with these options.

    Raises:
        AlreadyPatchedError: The loader was patched for another world.
        UnsupportedLoaderError: The loader cannot be copied correctly, or its dataset is sharded already.
        InvalidOptionError: An option does not work with the loader.
        NoStepsError: A rank would make no step.
    """
    found = facts.sharded_by
    _require_readable(facts)
    if any(map(is_split_by_node, nested_datasets(facts.dataset))):
        raise UnsupportedLoaderError(
            f"{type(facts.dataset).__name__} was split by split_dataset_by_node() already, so sharding it again would "
            "lose samples. Patch a loader of the whole dataset, without that call."
        )
    # In a process group, ranks compare for which world another package's sampler was made.
    is_compared = world.share_of_rank is not None and not isinstance(found, EpochSampler)
    here = (world.rank, world.num_replicas)
    if found is not None and not is_compared and facts.made_for not in {None, here}:
        rank, ranks = facts.made_for
        raise AlreadyPatchedError(
            f"The loader is sharded already by a {type(found).__name__} for rank {rank} of {ranks}, and cannot be "
            f"sharded as rank {world.rank} of {world.num_replicas}: some samples would be lost or repeated. Patch the "
            f"original loader instead; or build it for rank {world.rank} of {world.num_replicas}."
        )
    if found is None:
        _require_copyable(facts)
        _require_processes(facts)
        if facts.unit is ShardedUnit.ITERABLE:
            _require_iterable_options(facts, options, world)
        if options.costs is not None:
            require_costs(facts, options.costs)
        # With "by_worker", the dataset decides what each rank reads.
        if facts.unit is not ShardedUnit.ITERABLE or not options.by_worker:
            require_steps_known(options, world, facts.stream, facts.batching)


def _require_copyable(facts: LoaderFacts[Any]) -> None:
    """Raise UnsupportedLoaderError if a copy of the loader would still give unsharded data."""
    name = type(facts.loader).__name__
    # accelerate's loaders pass isinstance() without being DataLoaders.
    if not issubclass(type(facts.loader), DataLoader):
        raise UnsupportedLoaderError(
            f"{name} cannot be patched: it is a framework's wrapper around a DataLoader. Patch the loader first, and "
            f"hand the patched one to the framework. {or_inside(facts.loader)}".rstrip()
        )
    if asks_for_its_own_dataset(type(facts.loader)):
        dataset = type(facts.dataset).__name__
        raise UnsupportedLoaderError(
            f"{name} cannot be patched: it takes only litdata's own datasets, not one that shards a {dataset}. litdata "
            f"shards a {dataset} by itself if the process group exists when it is made: make it, and the {name}, after "
            "init_process_group(). For an explicit world, patch torch's loader of it: "
            "torch.utils.data.DataLoader(loader.dataset, batch_size=loader.batch_size, "
            "num_workers=loader.num_workers, collate_fn=loader.collate_fn)."
        )
    if facts.other_loader_in is not None:
        raise UnsupportedLoaderError(
            f"{name} cannot be patched: its __iter__ may take batches from another loader (attribute "
            f"{facts.other_loader_in!r}), which would still give every rank all of its data. Patch that loader "
            f"first, and pass the patched one to {name}."
        )
    if facts.iterator_in is not None:
        raise UnsupportedLoaderError(
            f"{name} cannot be patched: it keeps a running iterator (attribute {facts.iterator_in!r}), because you "
            "have iterated it, or its class starts one when it is made. The loader may continue with it, which would "
            "yield unsharded data. Patch the loader before you iterate it, or forget the iterator: "
            f"loader.{facts.iterator_in} = None. Where the class needs it, build it with a sharded sampler, "
            f"{name}(dataset, sampler=DDPSamplerWrapper(sampler, False), ...), or use a DataLoader with "
            "persistent_workers=True."
        )


def _require_processes(facts: LoaderFacts[Any]) -> None:
    """Refuse workers that are threads: their draws advance the random states from which samplers draw."""
    if facts.num_workers > 0 and has_thread_workers(facts.loader):
        raise UnsupportedLoaderError(
            f"{type(facts.loader).__name__} with num_workers={facts.num_workers} cannot be patched: its workers are "
            "threads, which use the same random states as the sampler, so ranks would draw different orders and lose "
            "samples. Use num_workers=0, or processes: multiprocessing_context='spawn', "
            "worker_method='multiprocessing' or, with MONAI, use_thread_workers=False."
        )


def _require_readable(facts: LoaderFacts[Any]) -> None:
    """Refuse a webdataset that raises an error when several ranks read it, before its workers do in a training."""
    _, ranks = webdataset_world()
    if facts.unit is not ShardedUnit.ITERABLE or ranks == 1:
        return
    for dataset in nested_datasets(facts.dataset):
        if is_single_node_only(stored(dataset)):
            raise UnsupportedLoaderError(
                f"{type(dataset).__name__} cannot be read on {ranks} ranks: its nodesplitter is webdataset's "
                "single_node_only, the default, which raises a ValueError then. Build it with "
                "webdataset.WebDataset(..., nodesplitter=None), or leave the stage webdataset.single_node_only out of "
                "webdataset.DataPipeline(...). Every rank then reads the same shards and keeps its share of them."
            )


def _require_iterable_options(facts: LoaderFacts[Any], options: Options, world: World) -> None:
    """Refuse options that do not work with an iterable dataset, which has no indices."""
    name = facts.stream.name
    if options.by_worker and is_of_energon(type(facts.dataset)):
        raise InvalidOptionError(
            f"share='by_worker' does not work with Megatron-Energon's {name}: it takes no other numbers of workers "
            "than those of its WorkerConfig. Leave share out: with WorkerConfig(rank=0, world_size=1, ...), each rank "
            "keeps its share; with its own rank and the world's size, Energon shards it itself."
        )
    is_explicit = world.share_of_rank is None and world.num_replicas > 1
    if options.by_worker and is_explicit and options.uneven != "keep":
        raise InvalidOptionError(
            f"uneven={options.uneven!r} does not work with share='by_worker' and rank= and num_replicas=: "
            f"{name} decides how many batches each rank reads, so without a process group ranks make unequal steps. "
            "Use uneven='keep' if they may, or leave rank= and num_replicas= out, after "
            "torch.distributed.init_process_group()."
        )
    if options.gives_runs:
        raise InvalidOptionError(
            f"layout='contiguous' does not work with {name}: an iterable dataset has no indices, so each rank would "
            "have to read all of it before its first item. Use layout='interleaved'."
        )


def require_steps_known(options: Options, world: World, stream: StreamFacts, batching: Batching = ONE_PER_STEP) -> None:
    """Refuse an epoch without steps, if its length is known now; otherwise the pass refuses it at its end."""
    if (n := stream.length) is not None:
        require_steps(Plan.of_stream(options, world.rank, world.num_replicas), batching, stream.name, [n])
