"""What we rely on though nobody promised it: private names of torch, class names and marks of other packages.

No other module names one of these, so a new version of torch, or of another package, is tested against this module
alone. Each entry says why it is needed, in which version it was seen, and whether a public way exists.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "ACCELERATE_NON_BLOCKING",
    "ACCELERATE_PREPARED",
    "ACCELERATE_TAKES_LOADERS",
    "ACCELERATE_UNCUT",
    "ITERATORS_KEPT_FOR_STATES",
    "LIGHTNING_ARGUMENTS",
    "LIGHTNING_REMAKES",
    "LIGHTNING_TAKES_LOADERS",
    "LISTED_LOADERS",
    "MAKE_ITERATOR",
    "READERS",
    "RUNNING_ITERATOR",
    "SAMPLE_KEY",
    "TAKE_LOADERS",
    "TRAINER_SHARES_ITSELF",
    "TRAINER_SKIPS",
    "WORLD_NAMES",
    "WORLD_WORDS",
    "AccelerateLeavesAlone",
    "KeptIterator",
    "RunningLoader",
    "WorkerInfo",
    "WrappedIterator",
    "accelerate_is_on",
    "arranges_neighbours",
    "asks_for_its_own_dataset",
    "changes_of",
    "count_batches",
    "default_store",
    "forget_iterator",
    "forget_loaded_state",
    "gather_in_background",
    "gloo_group",
    "has_own_iteration",
    "has_own_iterators",
    "held_loaders",
    "imported_fsdp",
    "is_fastai_loader",
    "is_hugging_face_table",
    "is_split_by_node",
    "is_torch_batch_sampler",
    "loses_items_when_loaded",
    "made_worker_info",
    "may_hold_a_normal",
    "move_batches",
    "noted_worker_info",
    "order_remedy",
    "pinned_by",
    "replace_worker_seed",
    "root_mesh",
    "seed_as_worker",
    "shards_in_accelerate",
    "show_loaders",
    "splits_by_node",
    "torchdata_batch_sampler",
    "webdataset_world",
    "worker_info_told",
]

# ---- torch, seen in 2.13.0 ----

# A loader that runs. A copy must not share one. torch has no public name for what `iter(loader)` returns.
RunningLoader: Final = _BaseDataLoaderIter

# Where a loader with persistent workers keeps it. There is no public way to begin anew.
RUNNING_ITERATOR: Final = "_iterator"


# The method by which a loader makes it, for `iter(loader)` and for Ultralytics' `reset()`. There is no public one.
MAKE_ITERATOR: Final = "_get_iterator"


def has_own_iterators(loader_kind: type) -> bool:
    """Tell whether a class makes other iterators than torch's."""
    return getattr(loader_kind, MAKE_ITERATOR, None) is not getattr(DataLoader, MAKE_ITERATOR)


class KeptIterator:
    """Base of what a loader keeps as its running iterator: with persistent workers, torch resets it for each pass."""

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        self.drop_pass()

    def drop_pass(self) -> None:
        """Leave the running pass."""
        raise NotImplementedError


class WrappedIterator(KeptIterator):
    """Base of what stands around the iterator that a loader's class makes.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        # Of its class, because the loader itself may have an attribute of that name.
        self.wrapped: Any = getattr(type(loader), MAKE_ITERATOR)(loader)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        super()._reset(loader)
        self.wrapped._reset(loader)


class _Counted:
    """Stands before the class of a running iterator, and tells a tally what the iterator hands out."""

    tally: Any

    def __next__(self) -> Any:
        try:
            batch = super().__next__()  # type: ignore[misc]  # of torch's class, which comes next
        except StopIteration:
            self.tally.end()
            raise
        except BaseException:
            self.tally.fail()
            raise
        self.tally.count()
        return batch

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)  # type: ignore[misc]  # as above
        self.tally.begin()


class _Moved:
    """Stands before the class of an iterator, and has a mover hand out on a device what the iterator gives."""

    mover: Any

    def __next__(self) -> Any:
        return self.mover.next(super().__next__)  # type: ignore[misc]  # of the class that comes next

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)  # type: ignore[misc]  # as above
        self.mover.begin()


@cache
def _before(kind: type, first: type) -> type:
    """Return a class that is what another one is, but for the methods of ``first``."""
    return type(kind.__name__, (first, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def move_batches(iterator: Any, mover: Any) -> None:
    """Have a mover hand out what an iterator of any class gives, and be told when it is reset for another pass.

    As with ``count_batches``, nothing has to stand around it.

    Raises:
        TypeError: Its class cannot be derived from, as a generator's.
    """
    kind: Any = type(iterator)
    vars(iterator)["mover"] = mover
    iterator.__class__ = _before(kind, _Moved)


def count_batches(iterator: Any, tally: Any) -> None:
    """Have a tally told when an iterator hands a batch out, fails to, is reset for another pass, or has no more.

    torch counts in the iterator itself, which is gone after a ``break``, and calls nothing of ours. The iterator gets a
    class of its own, derived from the one that it had, so nothing has to stand around it or refer back to it. What is
    no iterator of torch's, nor around one, stays as it is.
    """
    if isinstance(iterator, RunningLoader | WrappedIterator) and not isinstance(iterator, _Counted):
        vars(iterator)["tally"] = tally
        kind: Any = type(iterator)
        iterator.__class__ = _before(kind, _Counted)


# The function that torch's class has for `repr()` before it gets one of ours: torch gives it none of its own.
_PLAIN_REPR: Final = DataLoader.__repr__


def show_loaders(text_of: Callable[[DataLoader[Any]], str | None]) -> None:
    """Have ``repr()`` of a loader say what ``text_of`` returns; where that is None, the loader looks as ever.

    Python looks the method up in the class, and a patched loader keeps its class. So torch's class gets one; a class
    derived from it that has its own keeps that.
    """

    def text(loader: DataLoader[Any]) -> str:
        found = text_of(loader)
        kind = type(loader)
        return _PLAIN_REPR(loader) if found is None else f"<{kind.__module__}.{kind.__qualname__}: {found}>"

    if DataLoader.__repr__ is _PLAIN_REPR:
        DataLoader.__repr__ = text  # type: ignore[assignment, method-assign]  # it takes loaders only


def pinned_by(iterator: Any, batch: Any) -> Any:
    """Return a batch in pinned memory if a loader's iterator gives its batches so."""
    is_pinning = getattr(iterator, "_pin_memory", False)
    return pin_memory(batch, iterator._pin_memory_device) if is_pinning else batch  # type: ignore[no-untyped-call]  # torch leaves it unannotated


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Have the next pass start new workers: persistent ones know nothing of what changed in the main process."""
    setattr(loader, RUNNING_ITERATOR, None)


def default_store() -> "Store":
    """Return the key-value store that the default process group was made with.

    torch hands it out under a private name only. The public way is to make a store of our own, which takes a free port
    and an address that all ranks know.
    """
    return _get_default_store()


def imported_fsdp() -> Any:
    """Return the module of FSDP if the script has imported it, else None; importing it takes long."""
    return sys.modules.get("torch.distributed.fsdp")


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a submesh such as ``mesh["dp"]`` was cut from. torch has no public name for it."""
    return mesh._get_root_mesh()


def gloo_group(store: "Store", rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo group of these ranks alone.

    The public ``dist.new_group`` needs all ranks of the job, or that each is in as many groups as the others, because
    it names the new group by their number.
    """
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def gather_in_background(group: Any, row: torch.Tensor, rows: torch.Tensor, timeout: timedelta) -> Any:
    """Begin to gather every member's row, and return the work to wait for.

    It comes to an end by itself after ``timeout``, and may be waited for in slices before. The public functions take
    registered groups alone.
    """
    options = AllgatherOptions()
    options.timeout, options.asyncOp = timeout, True
    return group.allgather([list(rows)], [row], options)


# Returns how often a tensor was changed in place, which no public name tells.
changes_of: Final[Callable[[torch.Tensor], int]] = attrgetter("_version")


# The class of what ``get_worker_info()`` returns, which has no public name.
WorkerInfo: TypeAlias = torch_worker.WorkerInfo


def made_worker_info(worker: int, workers: int, seed: int, dataset: Any) -> WorkerInfo:
    """Return what ``get_worker_info()`` tells a worker. torch makes such values for its own workers only."""
    return WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)


# What a worker info tells of a worker.
_TELLING: Final = frozenset({"id", "num_workers", "seed", "dataset"})


class _NotedWorkerInfo(WorkerInfo):
    """A worker info that notes which of its attributes are read."""

    def __getattribute__(self, name: str) -> Any:
        if name in _TELLING:
            object.__getattribute__(self, "note")(name)
        return object.__getattribute__(self, name)


def noted_worker_info(worker: int, workers: int, seed: int, dataset: Any, note: Callable[[str], object]) -> WorkerInfo:
    """Return what ``made_worker_info`` does, calling ``note`` with the name of each attribute that somebody reads."""
    info = _NotedWorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)
    object.__setattr__(info, "note", note)  # frozen; set last, because making it reads nothing
    return info


@contextmanager
def worker_info_told(info: object) -> Iterator[None]:
    """Have ``get_worker_info()`` return ``info``. It reads this one variable, and there is no public way to set it."""
    before = torch_worker._worker_info
    torch_worker._worker_info = info  # type: ignore[assignment]  # torch declares it as None
    try:
        yield
    finally:
        torch_worker._worker_info = before


def seed_as_worker(base_seed: int, worker: int) -> None:
    """Seed the global generators of the CPU as torch seeds those of a worker, which it does in workers only."""
    random.seed(base_seed + worker)
    torch.default_generator.manual_seed(base_seed + worker)
    np.random.seed(torch_worker._generate_state(base_seed, worker))  # type: ignore[no-untyped-call]  # torch's


def replace_worker_seed(seed: int) -> None:
    """Have ``get_worker_info().seed`` be this one. The value is frozen, and datasets read their seed nowhere else."""
    object.__setattr__(get_worker_info(), "seed", seed)


# ---- numpy, seen in 2.4.6 ----


class _Stateless:
    """Stands for a bit generator whose state nobody wants to copy."""

    @property
    def state(self) -> dict[str, object]:
        return {"bit_generator": ""}


def may_hold_a_normal() -> bool:
    """Tell whether numpy's global generator holds the second of two normal draws, or may do so.

    It lies beside the bit generator. The public ``np.random.get_state()`` tells, and copies 624 numbers one by one
    before that, which takes longer than all the rest of a swap of random states. So a stub is there meanwhile.
    """
    try:
        numpys = np.random.get_state.__self__  # type: ignore[attr-defined]  # a bound method, in numpy's stubs a function
        bit_generator = numpys._bit_generator
    except AttributeError:
        return True
    try:
        numpys._bit_generator = _Stateless()
        return bool(numpys.get_state(legacy=False)["has_gauss"])
    finally:
        numpys._bit_generator = bit_generator


# ---- torchdata, seen in 0.11.0: its classes are torch's in all but name ----

_TORCHDATA: Final = "torchdata.stateful_dataloader"
_TORCH_BATCH_SAMPLERS: Final = {"torch.utils.data.sampler.BatchSampler", f"{_TORCHDATA}.sampler.BatchSampler"}


def is_torch_batch_sampler(kind: type) -> bool:
    """Tell whether a class is torch's own ``BatchSampler``, and no subclass, which may make batches another way."""
    return _name(kind) in _TORCH_BATCH_SAMPLERS


def torchdata_batch_sampler(loader_kind: type) -> type[Any] | None:
    """Return torchdata's ``BatchSampler`` if a loader's class is a ``StatefulDataLoader``, which needs that one.

    With torch's own it could not tell its place in an epoch. torchdata is looked up, not imported.
    """
    if f"{_TORCHDATA}.stateful_dataloader" not in {base.__module__ for base in loader_kind.__mro__}:
        return None
    found: type[Any] = sys.modules[f"{_TORCHDATA}.sampler"].BatchSampler
    return found


def has_own_iteration(loader_kind: type) -> bool:
    """Tell whether a loader's class iterates in a way of its own, other than torch's and torchdata's."""
    iterates: type = next((base for base in loader_kind.__mro__ if "__iter__" in vars(base)), DataLoader)
    return iterates is not DataLoader and not iterates.__module__.startswith(f"{_TORCHDATA}.")


# ---- accelerate, seen in 1.15.0 ----

# The mark of a loader that `accelerator.prepare` leaves alone. There is no public one.
ACCELERATE_PREPARED: Final = "_is_accelerate_prepared"
# Arguments of its DataLoaderShard. By the first, gather_for_metrics cuts off nothing: it would take samples for
# padding, by the length of the unsharded dataset. The second is its setting of the same name. Neither has a public way.
ACCELERATE_UNCUT: Final = {"_drop_last": True}
ACCELERATE_NON_BLOCKING: Final = "_non_blocking"
# What shards in accelerate. None of it is a DistributedSampler, and none bears a public mark.
_ACCELERATE_SHARDS: Final = {
    "accelerate.data_loader.BatchSamplerShard",
    "accelerate.data_loader.IterableDatasetShard",
    "accelerate.data_loader.DataLoaderDispatcher",
}


# The method by which it takes a loader over: module, class and name. The method is public.
ACCELERATE_TAKES_LOADERS: Final = ("accelerate.accelerator", "Accelerator", "prepare_data_loader")


def accelerate_is_on() -> bool:
    """Tell whether the script has made an ``Accelerator``, to which it will hand its loaders. It is not imported."""
    state: Any = sys.modules.get("accelerate.state")
    return state is not None and bool(state.is_initialized())


class AccelerateLeavesAlone:
    """Base of a loader that ``accelerator.prepare`` registers for ``save_state`` and does nothing else to."""

    _is_accelerate_prepared = True

    def _update_state_dict(self) -> None:
        """Do nothing: accelerate calls this before it saves, and the state follows from how many batches were given."""


def shards_in_accelerate(kind: type) -> bool:
    """Tell whether a class of samplers, datasets or loaders is one that accelerate shards with."""
    return not _ACCELERATE_SHARDS.isdisjoint(map(_name, kind.__mro__))


# ---- Lightning, seen in 2.6.6 ----

# The methods by which it takes loaders over, by module and class. Fabric's is public. The Trainer has no public one
# that sees all loaders when the process group exists.
TAKE_LOADERS: Final[Sequence[tuple[str, str, str]]] = (
    ("lightning.pytorch.trainer.connectors.data_connector", "_DataConnector", "_prepare_dataloader"),
    ("pytorch_lightning.trainer.connectors.data_connector", "_DataConnector", "_prepare_dataloader"),
    ("lightning.fabric.fabric", "Fabric", "setup_dataloaders"),
    ("lightning_fabric.fabric", "Fabric", "setup_dataloaders"),
)

# Where a Trainer keeps the first of these, and the method: in this one Trainer, each loader of any nest passes through
# it before another sampler is in its place. The strategy's public `process_dataloader` comes after that.
LIGHTNING_TAKES_LOADERS: Final = ("_data_connector", "_prepare_dataloader")

# The arguments that Lightning's hooks note while a loader is made, to make it anew. They are the unpatched loader's.
LIGHTNING_ARGUMENTS: Final = frozenset({"__dataset", "__pl_saved_arg_names", "__pl_saved_args", "__pl_saved_kwargs"})

# The arguments, and no others, by which it makes a batch sampler anew for predict and overfit_batches.
LIGHTNING_REMAKES: Final = frozenset({"batch_size", "drop_last"})

# ---- speechbrain, seen in 1.1.2 ----

# Where its SaveableDataLoader keeps the latest iterator, to save how far it came. Iterating makes a new one.
ITERATORS_KEPT_FOR_STATES: Final = frozenset({"_speechbrain_iterator"})

# ---- wrappers that hold loaders: Lightning's CombinedLoader, seen in 2.6.6, PyG's PrefetchLoader, in 2.8.1, timm's, in
# 1.0.31, speechbrain's LoopedLoader, in 1.1.2, and webdataset's WebLoader, in 1.0.2 ----

# Where they hold them: public attributes, but no class that could be imported without the package declares them.
_HELD_LOADERS: Final[Sequence[str]] = ("iterables", "loader")
_STAGES: Final = "pipeline"

# Where a CombinedLoader lists the loaders of its nest. Setting the list puts others into the nest.
LISTED_LOADERS: Final = "flattened"


def held_loaders(wrapper: object) -> tuple[str, object] | None:
    """Return where a wrapper holds loaders, as code behind its name, and what it holds there; None if nowhere."""
    for name in _HELD_LOADERS:
        if hasattr(wrapper, name):
            return name, getattr(wrapper, name)
    stages = getattr(wrapper, _STAGES, None)
    return (f"{_STAGES}[0]", stages[0]) if isinstance(stages, list) and stages else None


# ---- fastai, seen in 2.8.12 ----


def is_fastai_loader(kind: type) -> bool:
    """Tell whether a class is fastai's own ``DataLoader``, which is no subclass of torch's."""
    return "fastai.data.load.DataLoader" in map(_name, kind.__mro__)


# ---- litdata, seen in 0.2.76 ----


def asks_for_its_own_dataset(loader_kind: type) -> bool:
    """Tell whether a class is litdata's ``StreamingDataLoader``, which raises unless its dataset is of its own classes.

    Its ``__iter__`` takes any other dataset for one that mixes several, and asks it for methods that those have.
    """
    return "litdata.streaming.dataloader.StreamingDataLoader" in map(_name, loader_kind.__mro__)


# ---- Hugging Face transformers, seen in 5.23.0 ----

# By this name its Trainer calls accelerate's function that skips batches after a checkpoint. It is given no way to
# leave it out that keeps its count of steps.
TRAINER_SKIPS: Final = "transformers.trainer.skip_first_batches"

# The arguments of a Trainer whose batch sampler shards by itself, and which has accelerate leave it alone.
TRAINER_SHARES_ITSELF: Final = {"train_sampling_strategy": "batch_rebalance"}

# ---- Hugging Face datasets, seen in 5.2.0 ----


def is_split_by_node(dataset: object) -> bool:
    """Tell whether an iterable dataset went through ``split_dataset_by_node()``, which leaves a private mark alone."""
    return isinstance(dataset, IterableDataset) and getattr(dataset, "_distributed", None) is not None


def is_hugging_face_table(dataset: object) -> bool:
    """Tell whether it is a map-style ``datasets.Dataset``, which is not imported."""
    is_table = "datasets.arrow_dataset.Dataset" in map(_name, type(dataset).__mro__)
    return is_table and not isinstance(dataset, IterableDataset)


_HUGGING_FACE: Final = "datasets.iterable_dataset"
_BUFFERS: Final = f"{_HUGGING_FACE}.BufferShuffledExamplesIterable"


def loses_items_when_loaded(dataset: object) -> bool:
    """Tell whether a dataset's ``load_state_dict`` leaves items out: what ``.shuffle(buffer_size=...)`` had buffered.

    The package warns of it. Its stages hold each other in attributes, alone or in lists; a dataset of the user's may
    hold them too.
    """
    left, seen = [dataset], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if any(_name(kind) == _BUFFERS for kind in type(one).__mro__):
            return True
        for value in getattr(one, "__dict__", {}).values():
            parts = value if isinstance(value, list | tuple) else [value]
            left += [part for part in parts if isinstance(part, IterableDataset) or _is_hugging_face_stage(part)]
    return False


def forget_loaded_state(dataset: object) -> None:
    """Have a dataset's next pass over an epoch be whole: it would begin again where the latest state was taken."""
    if getattr(dataset, "_starting_state_dict", None) is not None and _is_hugging_face_stage(dataset):
        vars(dataset)["_starting_state_dict"] = None


def _is_hugging_face_stage(value: object) -> bool:
    return any(kind.__module__ == _HUGGING_FACE for kind in type(value).__mro__)


# ---- what shuffles an iterable dataset ----

# The field by which webdataset names a sample, seen in 1.0.2. It is the name of the sample's files.
SAMPLE_KEY: Final = "__key__"

# How a package's datasets are told to shuffle alike in every process. Seen in webdataset 1.0.2, whose detshuffle=True
# alone takes its seed from Python's global generator, and in Hugging Face datasets 5.2.0.
_ORDER_REMEDIES: Final = {
    "webdataset": "Pass a seed that is the same on every rank: WebDataset(..., detshuffle=True, seed=0) for shards, "
    "and .compose(webdataset.detshuffle(1000, seed=0)) or .shuffle(1000, seed=0) in place of .shuffle(1000)",
    "datasets": "Pass a seed that is the same on every rank: .shuffle(seed=0, buffer_size=1000)",
}


def order_remedy(dataset: object) -> str | None:
    """Return how to have a dataset of another package, or one that it holds, shuffle alike on every rank."""
    for one in (dataset, *getattr(dataset, "__dict__", {}).values()):
        for kind in type(one).__mro__:
            if (remedy := _ORDER_REMEDIES.get(kind.__module__.split(".")[0])) is not None:
                return remedy
    return None


# ---- samplers that put together what belongs in one batch ----

# They give single indices, and make those of a batch as a group: so many samples of each class, a triplet, a prompt
# again and again. A rank that took every num_replicas-th index would get parts of groups. No sampler bears a mark of
# this, so they are known by name. Samplers that sort by length or only balance an epoch's classes are not among them:
# their neighbours may go to different ranks.
_ARRANGE_NEIGHBOURS: Final = {
    # pytorch-metric-learning, seen in 2.9.0
    "pytorch_metric_learning.samplers.fixed_set_of_triplets.FixedSetOfTriplets",
    "pytorch_metric_learning.samplers.m_per_class_sampler.MPerClassSampler",
    # trl, seen in 1.16.0; the others in 0.17
    "trl.trainer.utils.RepeatSampler",
    "trl.trainer.grpo_trainer.RepeatRandomSampler",
    "trl.trainer.grpo_trainer.RepeatSampler",
    # open-metric-learning's flattened batches, read in its repository of 2022; later editions have batch samplers alone
    "oml.samplers.balanced.SequentialBalanceSampler",
    "oml.samplers.balanced.SequentialCategoryBalanceSampler",
    # torchreid, read in its repository
    "torchreid.data.sampler.RandomIdentitySampler",
}


def arranges_neighbours(sampler: object) -> bool:
    """Tell whether a sampler of single indices makes those of a batch as a group, so that batches must stay whole."""
    return not _ARRANGE_NEIGHBOURS.isdisjoint(map(_name, type(sampler).__mro__))


# ---- samplers and datasets that shard themselves ----

# Attributes that hold a rank and the number of ranks, also with an underscore before each. No package promises them.
# Each pair by where it was seen:
WORLD_NAMES: Final[Sequence[tuple[str, str]]] = (
    ("rank", "num_replicas"),  # torch 2.13.0, torchvision 0.29.1, timm 1.0.31, Ultralytics 8.4.190
    ("rank", "world_size"),  # mmengine 0.10.7, lhotse 1.33.0; with underscores in detectron2 0.6
    ("rank", "num_ranks"),  # World of mosaicml-streaming 0.10.0
    ("global_rank", "world_size"),  # _DistributedEnv of litdata 0.2.76
    ("dist_rank", "dist_num_replicas"),  # the readers of timm 1.0.31
    ("rank", "dp_size"),  # BatchRebalanceSampler of transformers 5.23.0
    ("process_index", "num_processes"),  # accelerate 1.15.0, transformers 4.57.6
    ("data_parallel_rank", "data_parallel_size"),  # Megatron-LM
)

# What every attribute is called after in an object that tells of a world and of nothing else, as mosaicml's and
# litdata's do. A script's arguments may be whole numbers alone, too.
WORLD_WORDS: Final = ("rank", "world", "node", "worker", "leader")

# timm's IterableImageDataset keeps what shards in this attribute; its class is no dataset.
READERS: Final[Sequence[str]] = ("reader",)


def splits_by_node(attributes: Mapping[str, Any]) -> bool:
    """Tell whether a stage of a webdataset's pipeline is ``split_by_node``, which ``nodesplitter=`` puts there.

    The function holds no world; it asks for one when it runs. A copy of it in another package keeps its name. Seen in
    webdataset 1.0.2.
    """
    stages = attributes.get("pipeline")
    return isinstance(stages, list) and any(_function_name(stage) == "split_by_node" for stage in stages)


def webdataset_world() -> tuple[int, int]:
    """Return the rank and the number of ranks over which webdataset's ``split_by_node`` splits now."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _function_name(value: Any) -> str | None:
    return getattr(value.func if isinstance(value, partial) else value, "__name__", None)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
