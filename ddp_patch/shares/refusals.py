"""What cannot be shared rightly, refused before anything is changed."""

from typing import Any

from torch.utils.data import DataLoader

from ddp_patch.compat.datasets import is_split_by_node
from ddp_patch.compat.frameworks import asks_for_its_own_dataset
from ddp_patch.compat.torch_loaders import torchdata_batch_sampler
from ddp_patch.compat.torch_workers import THREAD_WORKERS
from ddp_patch.errors import AlreadyPatchedError, InvalidOptionError, UnsupportedLoaderError
from ddp_patch.loaders.facts import Level, LoaderFacts, StreamFacts
from ddp_patch.loaders.recognition import line_for_inner, nested_datasets
from ddp_patch.options import Options
from ddp_patch.plan import ITEMS, Batching, Plan
from ddp_patch.ranks.world import World
from ddp_patch.shares.balance import require_costs
from ddp_patch.shares.epochs import EpochSampler
from ddp_patch.shares.steps import require_steps

__all__ = ["require_length", "require_shareable", "require_shuffle", "require_steps_known"]


def require_shareable(facts: LoaderFacts[Any], options: Options, world: World) -> None:
    """Refuse a loader that cannot be shared in this world with these options.

    Raises:
        AlreadyPatchedError: It was patched for another world.
        UnsupportedLoaderError: It cannot be copied correctly, or its dataset is a share already.
        InvalidOptionError: An option cannot hold for it.
        NoStepsError: A rank would make no step.
    """
    found = facts.sharded_by
    if any(map(is_split_by_node, nested_datasets(facts.dataset))):
        raise UnsupportedLoaderError(
            f"{type(facts.dataset).__name__} was split by split_dataset_by_node() already, and sharing a share again "
            "would lose the rest of it. Patch a loader of the whole dataset, without that call."
        )
    if isinstance(found, EpochSampler) and (found.rank, found.num_replicas) != (world.rank, world.num_replicas):
        raise AlreadyPatchedError(
            f"The loader was patched for rank {found.rank} of {found.num_replicas} and cannot be patched again for "
            f"rank {world.rank} of {world.num_replicas}: it would share a share. Patch the original loader instead."
        )
    if found is not None and world.members is None and facts.made_for not in {None, (world.rank, world.num_replicas)}:
        rank, ranks = facts.made_for
        raise AlreadyPatchedError(
            f"The loader is sharded already by a {type(found).__name__} that was made for rank {rank} of {ranks}, and "
            f"cannot be shared as rank {world.rank} of {world.num_replicas}: some samples would be lost or repeated. "
            f"Build it for rank {world.rank} of {world.num_replicas}, or for one process, and patch that."
        )
    if found is None:
        _require_copyable(facts)
        _require_processes(facts)
        if facts.level is Level.ITERABLE:
            _require_iterable_options(facts, options)
            if options.iterable_sharding == "by_worker":
                _require_hand_over(facts, options, world)
        if options.costs is not None:
            require_costs(facts, options.costs)
        require_length(options, world, facts.stream)
        # With "by_worker", the dataset decides what each rank reads.
        if facts.level is not Level.ITERABLE or options.iterable_sharding == "exact":
            require_steps_known(options, world, facts.stream, facts.batching, in_batches=facts.level is Level.SAMPLE)


def _require_copyable(facts: LoaderFacts[Any]) -> None:
    """Raise UnsupportedLoaderError for a loader of which a copy would go on giving unsharded data."""
    name = type(facts.loader).__name__
    # isinstance() believes accelerate's, which say that they are one.
    if not issubclass(type(facts.loader), DataLoader):
        line = line_for_inner("patch_dataloader_to_ddp", facts.loader)
        inside = "" if line is None else f" Or, where outer is the {name}: {line}."
        raise UnsupportedLoaderError(
            f"{name} cannot be patched: it is a framework's wrapper around a DataLoader. Patch the loader first, and "
            f"hand the patched one to the framework.{inside}"
        )
    if asks_for_its_own_dataset(type(facts.loader)):
        dataset = type(facts.dataset).__name__
        raise UnsupportedLoaderError(
            f"{name} cannot be patched: it iterates litdata's own classes of datasets alone, so none that shares a "
            f"{dataset} can take its place. litdata shards by itself a {dataset} that is made when the process group "
            f"exists: make it, and the {name}, after init_process_group(). For an explicit world, patch torch's loader "
            "of it: torch.utils.data.DataLoader(loader.dataset, batch_size=loader.batch_size, "
            "num_workers=loader.num_workers, collate_fn=loader.collate_fn)."
        )
    if facts.other_loader_in is not None:
        raise UnsupportedLoaderError(
            f"{name} cannot be patched: its __iter__ may draw from another loader (attribute "
            f"{facts.other_loader_in!r}), which would go on giving every rank all of its data. Patch that loader "
            f"first, and hand the patched one to {name}."
        )
    if facts.iterator_in is not None:
        raise UnsupportedLoaderError(
            f"{name} cannot be patched: you have iterated it, or its class begins an iterator when it is made. It is "
            f"running (attribute {facts.iterator_in!r}), and the loader may go on with it, which would yield unsharded "
            "data. Patch the loader before you iterate it, or forget the iterator: "
            f"loader.{facts.iterator_in} = None. Where the class needs it, build it with a sharded sampler, "
            f"{name}(dataset, sampler=DDPSamplerWrapper(sampler, False), ...), or use a DataLoader with "
            "persistent_workers=True."
        )


def _require_processes(facts: LoaderFacts[Any]) -> None:
    """Refuse workers that are threads: what they draw moves the random states from which ranks draw their orders."""
    name, threads = THREAD_WORKERS
    if facts.num_workers > 0 and getattr(facts.loader, name, None) == threads:
        raise UnsupportedLoaderError(
            f"{type(facts.loader).__name__} with {name}={threads!r} and num_workers={facts.num_workers} cannot be "
            "patched: threads share one process's random states with the sampler, so ranks would draw different "
            "orders, and lose samples. Use worker_method='multiprocessing', or num_workers=0."
        )


def _require_iterable_options(facts: LoaderFacts[Any], options: Options) -> None:
    """Refuse what cannot hold for a dataset whose items come without indices."""
    name = facts.stream.name
    if options.needs_length and options.iterable_sharding == "by_worker":
        raise InvalidOptionError(
            f"layout='contiguous' cannot hold with iterable_sharding='by_worker': {name} itself decides what each "
            "worker reads. Use one or the other."
        )
    if options.agreement == "leader":
        raise InvalidOptionError(
            f"agreement='leader' cannot hold for {name}: rank 0 sends indices, and an iterable dataset has none. Use "
            "agreement='seeded'."
        )
    if options.agreement == "ambient" and facts.num_workers > 0:
        raise InvalidOptionError(
            f"agreement='ambient' cannot hold for {name} with num_workers={facts.num_workers}: the stream is made "
            "inside the workers, whose random states differ by rank so that augmentations do. Use agreement='seeded'."
        )


def _require_hand_over(facts: LoaderFacts[Any], options: Options, world: World) -> None:
    """Refuse to let a dataset split itself where ranks cannot even out how many batches they make."""
    name = facts.stream.name
    if world.num_replicas == 1:
        return
    if world.members is None and options.uneven != "keep":
        raise InvalidOptionError(
            f"uneven={options.uneven!r} cannot hold with iterable_sharding='by_worker' in a world given by rank= and "
            f"num_replicas=: how many batches each rank makes is up to {name}, and ranks that hand each other none "
            "make unequal steps. Use uneven='keep' if they may, or leave rank= and num_replicas= out, after "
            "torch.distributed.init_process_group()."
        )
    if world.members is not None and torchdata_batch_sampler(type(facts.loader)) is not None:
        raise UnsupportedLoaderError(
            f"{type(facts.loader).__name__} cannot be patched with iterable_sharding='by_worker': its state tells what "
            f"this rank's workers read, and ranks hand each other batches of {name}, so a resumed run would lose some. "
            "Use iterable_sharding='exact', or a torch.utils.data.DataLoader."
        )


def require_length(options: Options, world: World, stream: StreamFacts) -> None:
    """Refuse to cut a stream of unknown length into runs."""
    if options.needs_length and stream.length is None:
        raise InvalidOptionError(
            f"layout='contiguous' cuts a stream into one run for each of {world.num_replicas} ranks, for which its "
            f"length must be known, and {stream.name} has no len(). Give it a __len__, or use layout='interleaved', "
            "which needs none."
        )


def require_steps_known(
    options: Options, world: World, stream: StreamFacts, batching: Batching = ITEMS, *, in_batches: bool = False
) -> None:
    """Refuse an epoch without steps where its length is known now; else a pass does that when it comes to the end."""
    if (n := stream.length) is not None:
        plan = Plan.of_stream(options, world.rank, world.num_replicas)
        require_steps(plan, batching, stream.name, [n], in_batches=in_batches)


def require_shuffle(stream: StreamFacts) -> None:
    """Refuse a scalable shuffle of what torch does not shuffle."""
    if stream.why_not_scalable is not None:
        raise InvalidOptionError(
            "scalable_shuffle=True computes the order of a loader that torch shuffles, and this one's order comes from "
            f"{stream.name}, which {stream.why_not_scalable}. Build the loader with shuffle=True, or leave "
            "scalable_shuffle out; a sampler of your own can have items_at(positions, epoch) instead."
        )
