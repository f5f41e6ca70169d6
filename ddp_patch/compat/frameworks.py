"""Loaders of other packages: how they mark, make, hold and take over loaders."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ddp_patch.compat.names import full_name

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
    "TAKE_LOADERS",
    "TRAINER_SHARES_ITSELF",
    "TRAINER_SKIPS",
    "AccelerateLeavesAlone",
    "accelerate_is_on",
    "asks_for_its_own_dataset",
    "held_loaders",
    "is_fastai_loader",
    "lightning_place",
    "shards_in_accelerate",
]

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
    """Return whether the script has made an ``Accelerator``, to which it will hand its loaders. It is not imported."""
    state: Any = sys.modules.get("accelerate.state")
    return state is not None and bool(state.is_initialized())


class AccelerateLeavesAlone:
    """Base of a loader that ``accelerator.prepare`` registers for ``save_state`` and does nothing else to."""

    _is_accelerate_prepared = True

    def _update_state_dict(self) -> None:
        """Do nothing: accelerate calls this before it saves, and the state follows from how many batches were given."""


def shards_in_accelerate(kind: type) -> bool:
    """Return whether a class of samplers, datasets or loaders is one that accelerate shards with."""
    return not _ACCELERATE_SHARDS.isdisjoint(map(full_name, kind.__mro__))


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
# it before its sampler is replaced. The strategy's public `process_dataloader` comes after that.
LIGHTNING_TAKES_LOADERS: Final = ("_data_connector", "_prepare_dataloader")

# The arguments that Lightning's hooks note while a loader is made, to rebuild it. They are the unpatched loader's.
LIGHTNING_ARGUMENTS: Final = frozenset({"__dataset", "__pl_saved_arg_names", "__pl_saved_args", "__pl_saved_kwargs"})

# The arguments, and no others, by which it rebuilds a batch sampler for predict and overfit_batches.
LIGHTNING_REMAKES: Final = frozenset({"batch_size", "drop_last"})


def lightning_place(checkpoint: Mapping[str, Any]) -> tuple[int, Sequence[Any]]:
    """Return how many batches of an unfinished epoch a checkpoint counts, and the states of the training loaders."""
    fitting = checkpoint.get("loops", {}).get("fit_loop", {})
    batches = fitting.get("epoch_loop.batch_progress", {"is_last_batch": True})
    done = 0 if batches["is_last_batch"] else batches["current"]["ready"]
    return done, fitting.get("state_dict", {}).get("combined_loader", ())


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
    """Return whether a class is fastai's own ``DataLoader``, which is no subclass of torch's."""
    return "fastai.data.load.DataLoader" in map(full_name, kind.__mro__)


# ---- litdata, seen in 0.2.76 ----


def asks_for_its_own_dataset(loader_kind: type) -> bool:
    """Return whether a class is litdata's ``StreamingDataLoader``, which takes only litdata's own datasets.

    Its ``__iter__`` takes any other dataset for one that mixes several, and asks it for methods that those have.
    """
    return "litdata.streaming.dataloader.StreamingDataLoader" in map(full_name, loader_kind.__mro__)


# ---- Hugging Face transformers, seen in 5.23.0 ----

# By this name its Trainer calls accelerate's function that skips batches after a checkpoint. It is given no way to
# leave it out that keeps its count of steps.
TRAINER_SKIPS: Final = "transformers.trainer.skip_first_batches"

# The arguments of a Trainer whose batch sampler shards by itself, and which has accelerate leave it alone.
TRAINER_SHARES_ITSELF: Final = {"train_sampling_strategy": "batch_rebalance"}
