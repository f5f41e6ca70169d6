"""How to recognise datasets, samplers, arrays and worlds of other packages, by their classes' full names."""

import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch.distributed as dist
from torch.utils.data import IterableDataset

from ddp_patch.walks import held, walk


def full_name(kind: type) -> str:
    """Return a class's full name, by which the class is recognised without importing its package."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_any_of(kind: type, names: Collection[str]) -> bool:
    """Return whether a class, or one of its base classes, has one of these full names."""
    return any(full_name(base) in names for base in kind.__mro__)


def may_hold_a_normal() -> bool:
    """Return whether numpy's global generator keeps the second of two normal draws, or may do so.

    The draw is stored beside the bit generator. The public ``np.random.get_state()`` says whether there is one, but
    first copies 624 numbers one by one, which takes longer than the rest of a swap of random states. So a stub replaces
    the bit generator meanwhile.
    """
    try:
        numpys = np.random.get_state.__self__  # type: ignore[attr-defined]  # a bound method, in numpy's stubs a function
        bit_generator = numpys._bit_generator
    except AttributeError:
        return True
    try:
        numpys._bit_generator = SimpleNamespace(state={"bit_generator": ""})
        return bool(numpys.get_state(legacy=False)["has_gauss"])
    finally:
        numpys._bit_generator = bit_generator


# ---- Hugging Face datasets, seen in 5.2.0 ----


def is_split_by_node(dataset: object) -> bool:
    """Return whether ``split_dataset_by_node()`` has split an iterable dataset; only a private attribute shows it.

    With one node, as in a script that passes ``world_size=1``, the function sets the attribute and splits nothing.
    """
    split = getattr(dataset, "_distributed", None) if isinstance(dataset, IterableDataset) else None
    return split is not None and getattr(split, "world_size", None) != 1


def is_hugging_face_table(dataset: object) -> bool:
    """Return whether an object is a map-style ``datasets.Dataset``, without importing the package."""
    return _is_any_of(type(dataset), {"datasets.arrow_dataset.Dataset"}) and not isinstance(dataset, IterableDataset)


_TABLES: Final = {"pandas", "polars", "pyarrow"}
_KINDS: Final = {"DataFrame", "Series", "Table", "ChunkedArray", "Array"}
_COLUMNS: Final = 8  # how many columns of a table are read


def is_table(value: object) -> bool:
    """Return whether a value is a table or a column of pandas, polars or pyarrow, without importing them."""
    return any(kind.__name__ in _KINDS and kind.__module__.split(".")[0] in _TABLES for kind in type(value).__mro__)


def rows_at(table: Any, places: Sequence[int]) -> list[Any]:
    """Return some rows of a table, or elements of a column, as plain values."""
    rows = np.asarray(table.take(places) if hasattr(table, "take") else table[places]).tolist()
    return [row[:_COLUMNS] if isinstance(row, list) else row for row in rows]


_HUGGING_FACE: Final = "datasets.iterable_dataset"
_BUFFERS: Final = f"{_HUGGING_FACE}.BufferShuffledExamplesIterable"


def loses_items_when_loaded(dataset: object) -> bool:
    """Return whether a dataset's ``load_state_dict`` loses the items in the buffer of ``.shuffle(buffer_size=...)``.

    The package warns of this. Its stages refer to each other by attributes, or by lists in attributes; a dataset of the
    user's may refer to stages, too.
    """

    def is_stage(part: object) -> bool:
        return isinstance(part, IterableDataset) or is_hugging_face_stage(part)

    return any(_is_any_of(type(stage), {_BUFFERS}) for stage in walk(dataset, lambda stage: held(stage, is_stage)))


def forget_loaded_state(dataset: object) -> None:
    """Make a dataset's next pass over an epoch whole: otherwise it would begin where the latest state was loaded."""
    if getattr(dataset, "_starting_state_dict", None) is not None and is_hugging_face_stage(dataset):
        vars(dataset)["_starting_state_dict"] = None


def is_hugging_face_stage(value: object) -> bool:
    """Return whether a value is a stage of a Hugging Face stream; a stage by itself is no dataset."""
    return any(kind.__module__ == _HUGGING_FACE for kind in type(value).__mro__)


# The field of a webdataset sample that has its name: the name of the sample's files. Seen in 1.0.2.
SAMPLE_KEY: Final = "__key__"

# ---- accelerate, seen in 1.15.0 ----

# The attribute of a loader that `accelerator.prepare` leaves unchanged. There is no public way.
ACCELERATE_PREPARED: Final = "_is_accelerate_prepared"
# Arguments of accelerate's DataLoaderShard. With the first, gather_for_metrics cuts off nothing: otherwise it would
# take samples for padding, by the length of the unsharded dataset. The second is the setting of the same name. There is
# no public way to set them.
ACCELERATE_UNCUT: Final = {"_drop_last": True}
ACCELERATE_NON_BLOCKING: Final = "_non_blocking"
# accelerate's classes that shard. None is a DistributedSampler, and no public attribute shows that they shard.
_ACCELERATE_SHARDS: Final = {
    "accelerate.data_loader.BatchSamplerShard",
    "accelerate.data_loader.IterableDatasetShard",
    "accelerate.data_loader.DataLoaderDispatcher",
}


# The public method by which accelerate takes over a loader: module, class and name.
ACCELERATE_TAKES_LOADERS: Final = ("accelerate.accelerator", "Accelerator", "prepare_data_loader")


def accelerate_is_on() -> bool:
    """Return whether the script has made an ``Accelerator``, to which it will pass its loaders."""
    state: Any = sys.modules.get("accelerate.state")
    return state is not None and bool(state.is_initialized())


class AccelerateLeavesAlone:
    """A base class of loaders that ``accelerator.prepare`` only registers for ``save_state``."""

    _is_accelerate_prepared = True

    def _update_state_dict(self) -> None:
        """Do nothing: accelerate calls this before it saves, but the state needs no update."""


def gather_in_accelerate(gathered: Callable[[Sequence[Any], Any, Callable[[], Any]], Any]) -> None:
    """Let ``Accelerator.gather_for_metrics`` call a function for loaders that accelerate did not shard.

    Args:
        gathered: Called with the loaders that the accelerator has prepared, or with none if a loader of accelerate's
            own is iterated; with the outputs; and with a function that gathers as accelerate does.
    """
    kind: Any = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    usual = getattr(kind, "gather_for_metrics", None)
    if usual is None or getattr(usual, "__module__", "") == __name__:
        return

    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        is_own = self.num_processes == 1 or self.gradient_state.active_dataloader is not None
        loaders = () if is_own else getattr(self, "_dataloaders", ())
        return gathered(loaders, input_data, lambda: usual(self, input_data, use_gather_object))

    gather_for_metrics.__doc__ = usual.__doc__
    kind.gather_for_metrics = gather_for_metrics


def shards_in_accelerate(kind: type) -> bool:
    """Return whether a class of samplers, datasets or loaders is one of accelerate's that shard."""
    return _is_any_of(kind, _ACCELERATE_SHARDS)


# ---- Lightning, seen in 2.6.6; how it resumes, also in 2.5.6 ----

# The methods by which Lightning takes over loaders: module, class and name. Fabric's is public. The Trainer has no
# public method that sees all loaders when the process group exists.
TAKE_LOADERS: Final[Sequence[tuple[str, str, str]]] = (
    ("lightning.pytorch.trainer.connectors.data_connector", "_DataConnector", "_prepare_dataloader"),
    ("pytorch_lightning.trainer.connectors.data_connector", "_DataConnector", "_prepare_dataloader"),
    ("lightning.fabric.fabric", "Fabric", "setup_dataloaders"),
    ("lightning_fabric.fabric", "Fabric", "setup_dataloaders"),
)

# The attribute of a Trainer that has the first of these objects, and the method. Each loader of any nest passes through
# it before Lightning replaces the loader's sampler. The strategy's public `process_dataloader` is called later.
LIGHTNING_TAKES_LOADERS: Final = ("_data_connector", "_prepare_dataloader")

# The attributes in which Lightning's hooks record the unpatched loader's arguments, to rebuild the loader.
LIGHTNING_ARGUMENTS: Final = frozenset({"__dataset", "__pl_saved_arg_names", "__pl_saved_args", "__pl_saved_kwargs"})

# The only arguments with which Lightning rebuilds a batch sampler for predict and overfit_batches.
LIGHTNING_REMAKES: Final = frozenset({"batch_size", "drop_last"})

# The key of a checkpoint's states of the training loaders, in the loaders' order.
_LIGHTNING_STATES: Final = "combined_loader"


def lightning_place(checkpoint: Mapping[str, Any]) -> tuple[int, Sequence[Any]]:
    """Return how many batches of an unfinished epoch a checkpoint counts, and the states of the training loaders."""
    fitting = checkpoint.get("loops", {}).get("fit_loop", {})
    batches = fitting.get(
        "epoch_loop.batch_progress", {"is_last_batch": False, "current": {"ready": 0, "processed": 0}}
    )
    current = batches["current"]
    is_over = batches["is_last_batch"] and current["ready"] == current["processed"]
    return 0 if is_over else current["processed"], fitting.get("state_dict", {}).get(_LIGHTNING_STATES, ())


def keep_lightning_states(checkpoint: Mapping[str, Any], states: Sequence[Any]) -> None:
    """Put states of the training loaders into a checkpoint, in place of Lightning's own."""
    checkpoint["loops"]["fit_loop"]["state_dict"][_LIGHTNING_STATES] = list(states)


def saves_positions(callback: object) -> bool:
    """Return whether a Trainer's callback is this package's, which saves the positions of loaders itself."""
    return getattr(callback, "saves_positions_of_loaders", False)


def lightning_trainer_that_saves() -> Any:
    """Return the Lightning Trainer that is saving the states of its loaders now; None if there is none."""
    frame = inspect.currentframe()
    for _ in range(8):
        if frame is None:
            return None
        own: Any = frame.f_locals.get("self")
        is_saving = frame.f_code.co_name == "on_save_checkpoint"
        if is_saving and type(own).__name__ == "_FitLoop" and type(own).__module__.endswith("loops.fit_loop"):
            return own.trainer
        frame = frame.f_back
    return None


def lightning_restarts_exactly(trainer: Any) -> bool:
    """Return whether a Trainer counts all batches before a checkpoint; Lightning 2.4 counts one too few."""
    return hasattr(trainer.fit_loop, "restarted_mid_epoch")


def finish_lightning_epoch(trainer: Any, fetcher: Any, *, has_validated: bool) -> None:
    """Let a Trainer that restarts after the last batch of an epoch finish the epoch before the next one.

    Without this function, the Trainer skips the validation that was due after the checkpoint.

    Args:
        trainer: The Trainer, which has read the checkpoint and set up its loops.
        fetcher: The Trainer's fetcher of training batches.
        has_validated: Whether the Trainer had validated when the checkpoint was saved.
    """
    fitting, loop, validating = trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop
    epochs, batches = fitting.epoch_progress, loop.batch_progress
    if epochs.total.processed == epochs.total.started:  # the restart counted the epoch as finished
        for each in (epochs.current, epochs.total):
            each.processed, each.completed = each.processed - 1, each.completed - 1
    for each in (batches.current, batches.total):
        each.ready = each.started = each.completed = each.processed
    loop.update_restart_stage()  # also validation's
    fitting._restarting = False  # only the inner loops restart; the fit loop ends the epoch as usual
    if not loop._should_check_val_fx(fetcher):
        fetcher.batches, fetcher.done = [], True  # so that the Trainer makes no step
        loop._batches_that_stepped += 1
    elif not (has_validated or validating.restarted_mid_evaluation):
        validating.restarting = False
        validating._restart_stage = sys.modules[type(validating).__module__].RestartStage.RESTARTED_MID_EVALUATION


def lightning_fetcher(trainer: Any) -> Any:
    """Return the fetcher of a Trainer's training batches, which has the attributes ``fetched`` and ``combined_loader``.

    Return None outside of ``fit``, and if this Lightning has no fetcher.
    """
    return getattr(trainer.fit_loop, "_data_fetcher", None)


# ---- speechbrain, seen in 1.1.2 ----

# The attribute in which SaveableDataLoader keeps its latest iterator, to save the position. Iterating makes a new one.
ITERATORS_KEPT_FOR_STATES: Final = frozenset({"_speechbrain_iterator"})

# ---- wrappers that hold loaders: Lightning's CombinedLoader, seen in 2.6.6, PyG's PrefetchLoader, in 2.8.1, timm's, in
# 1.0.31, speechbrain's LoopedLoader, in 1.1.2, and webdataset's WebLoader, in 1.0.2 ----

# The public attributes in which wrappers hold loaders. Importing the wrappers' classes would import their packages.
_HELD_LOADERS: Final[Sequence[str]] = ("iterables", "loader")
_STAGES: Final = "pipeline"

# The attribute with the list of all loaders in a CombinedLoader's nest. Setting the list replaces the loaders.
LISTED_LOADERS: Final = "flattened"


def held_loaders(wrapper: object) -> tuple[str, object] | None:
    """Return the attribute in which a wrapper holds loaders, as code, and its value; None if there is none."""
    for name in _HELD_LOADERS:
        if hasattr(wrapper, name):
            return name, getattr(wrapper, name)
    stages = getattr(wrapper, _STAGES, None)
    return (f"{_STAGES}[0]", stages[0]) if isinstance(stages, list) and stages else None


# ---- Megatron-Energon, seen in 7.4.1 ----


def is_of_energon(kind: type) -> bool:
    """Return whether a dataset's class is Megatron-Energon's; its workers assert that their number stays the same."""
    return any(parent.__module__.startswith("megatron.energon") for parent in kind.__mro__)


# ---- litdata, seen in 0.2.76 ----


def asks_for_its_own_dataset(loader_kind: type) -> bool:
    """Return whether a class is litdata's ``StreamingDataLoader``, which takes only litdata's own datasets.

    Its ``__iter__`` takes any other dataset for a mixture of several, and calls methods that only mixtures have.
    """
    return _is_any_of(loader_kind, {"litdata.streaming.dataloader.StreamingDataLoader"})


# ---- Hugging Face transformers, seen in 5.23.0 ----

# The name by which the Trainer calls accelerate's function that skips batches after a checkpoint. There is no public
# way to leave out the call and keep the Trainer's count of steps.
TRAINER_SKIPS: Final = "transformers.trainer.skip_first_batches"

# The methods that return the epoch and batch after a checkpoint, and that run an epoch of steps_in_epoch batches. Seen
# in 5.22.2 to 5.24.0; there is no public way to set either.
TRAINER_BEGINS: Final = "_init_training_state"
TRAINER_RUNS_EPOCH: Final = "_run_epoch"

# The method that restores random states from a checkpoint's folder.
TRAINER_RESTORES_RNG: Final = "_load_rng_state"

# The file of a checkpoint with the TrainerState.
TRAINER_STATE: Final = "trainer_state.json"

# The arguments of a Trainer whose batch sampler shards by itself, so that accelerate must not shard it.
TRAINER_SHARES_ITSELF: Final = {"train_sampling_strategy": "batch_rebalance"}


# Samplers that yield single indices, but choose a batch's indices as a group: a few samples of each class, a triplet, a
# repeated prompt. A rank that took every num_replicas-th index would get parts of groups. No attribute shows this, so
# the classes are listed by name. Samplers that sort by length or only balance an epoch's classes are not listed: their
# neighbours may go to different ranks.
_ARRANGE_NEIGHBOURS: Final = {
    # pytorch-metric-learning, seen in 2.9.0
    "pytorch_metric_learning.samplers.fixed_set_of_triplets.FixedSetOfTriplets",
    "pytorch_metric_learning.samplers.m_per_class_sampler.MPerClassSampler",
    # trl; the first seen in 1.16.0, the other two in 0.17
    "trl.trainer.utils.RepeatSampler",
    "trl.trainer.grpo_trainer.RepeatRandomSampler",
    "trl.trainer.grpo_trainer.RepeatSampler",
    # open-metric-learning, read in its repository of 2022; later versions have only batch samplers
    "oml.samplers.balanced.SequentialBalanceSampler",
    "oml.samplers.balanced.SequentialCategoryBalanceSampler",
    # torchreid, read in its repository
    "torchreid.data.sampler.RandomIdentitySampler",
}


def arranges_neighbours(sampler: object) -> bool:
    """Return whether a sampler of single indices chooses a batch's indices as a group, which must stay whole."""
    return _is_any_of(type(sampler), _ARRANGE_NEIGHBOURS)


# Attributes that have a rank and the number of ranks, also with an underscore before each. No package documents them.
# Each pair with the packages where it was seen:
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

# Words in the names of all attributes of an object that describes only a world, as mosaicml's and litdata's do. The
# names are checked because a script's arguments may be only whole numbers, too.
WORLD_WORDS: Final = ("rank", "world", "node", "worker", "leader")

# Samplers that yield the same samples on several ranks, because each rank augments them in its own way.
_REPEAT_OVER_RANKS: Final = frozenset({"RASampler", "RepeatAugSampler"})


def repeats_over_ranks(kind: type) -> bool:
    """Return whether a sampler's class is one of repeated augmentation, as DeiT's, torchvision's and timm 1.0.31's."""
    return any(base.__name__ in _REPEAT_OVER_RANKS for base in kind.__mro__)


# The attribute in which timm's IterableImageDataset keeps the object that shards, which is not a dataset.
READERS: Final[Sequence[str]] = ("reader",)


def splits_by_node(attributes: Mapping[str, Any]) -> bool:
    """Return whether a stage of a webdataset's pipeline is ``split_by_node``, which ``nodesplitter=`` puts there.

    The function stores no world; it reads the world when it runs. Copies of the function in other packages keep its
    name. Seen in webdataset 1.0.2.
    """
    return _has_function(attributes, "split_by_node")


def is_single_node_only(attributes: Mapping[str, Any]) -> bool:
    """Return whether a stage of a webdataset's pipeline is ``single_node_only``, the default of ``nodesplitter=``.

    The stage raises a ValueError when it runs on several ranks, and otherwise does nothing. Seen in webdataset 1.0.2.
    """
    return _has_function(attributes, "single_node_only")


def webdataset_world() -> tuple[int, int]:
    """Return the rank and the number of ranks that webdataset's stages see now."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _has_function(attributes: Mapping[str, Any], name: str) -> bool:
    stages = attributes.get("pipeline")
    if not isinstance(stages, list):
        return False
    functions = (stage.func if isinstance(stage, partial) else stage for stage in stages)
    return any(getattr(function, "__name__", None) == name for function in functions)
