"""Iterable datasets and tables of other packages."""

from typing import Final

from torch.utils.data import IterableDataset

from ddp_patch.compat.names import full_name

__all__ = [
    "SAMPLE_KEY",
    "forget_loaded_state",
    "is_hugging_face_table",
    "is_interleaved",
    "is_split_by_node",
    "loses_items_when_loaded",
    "order_remedy",
]

# ---- Hugging Face datasets, seen in 5.2.0 ----


def is_split_by_node(dataset: object) -> bool:
    """Return whether an iterable dataset went through ``split_dataset_by_node()``, which leaves only a private mark."""
    return isinstance(dataset, IterableDataset) and getattr(dataset, "_distributed", None) is not None


def is_hugging_face_table(dataset: object) -> bool:
    """Return whether it is a map-style ``datasets.Dataset``, which is not imported."""
    is_table = "datasets.arrow_dataset.Dataset" in map(full_name, type(dataset).__mro__)
    return is_table and not isinstance(dataset, IterableDataset)


_HUGGING_FACE: Final = "datasets.iterable_dataset"
_INTERLEAVES: Final = f"{_HUGGING_FACE}.CyclingMultiSourcesExamplesIterable"
_BUFFERS: Final = f"{_HUGGING_FACE}.BufferShuffledExamplesIterable"


def loses_items_when_loaded(dataset: object) -> bool:
    """Return whether a dataset's ``load_state_dict`` leaves items out: what ``.shuffle(buffer_size=...)`` had buffered.

    The package warns of it. Its stages hold each other in attributes, alone or in lists; a dataset of the user's may
    hold them too.
    """
    return _has_stage(dataset, _BUFFERS)


def is_interleaved(dataset: object) -> bool:
    """Return whether ``interleave_datasets()`` made it, which in datasets 4.4.1 undoes a split and leaves no mark."""
    return _has_stage(dataset, _INTERLEAVES)


def _has_stage(dataset: object, name: str) -> bool:
    left, seen = [dataset], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if any(full_name(kind) == name for kind in type(one).__mro__):
            return True
        for value in getattr(one, "__dict__", {}).values():
            parts = value if isinstance(value, list | tuple) else [value]
            left += [part for part in parts if isinstance(part, IterableDataset) or _is_hugging_face_stage(part)]
    return False


def forget_loaded_state(dataset: object) -> None:
    """Make a dataset's next pass over an epoch whole: it would begin again where the latest state was taken."""
    if getattr(dataset, "_starting_state_dict", None) is not None and _is_hugging_face_stage(dataset):
        vars(dataset)["_starting_state_dict"] = None


def _is_hugging_face_stage(value: object) -> bool:
    return any(kind.__module__ == _HUGGING_FACE for kind in type(value).__mro__)


# ---- what shuffles an iterable dataset ----

# The field by which webdataset names a sample, seen in 1.0.2. It is the name of the sample's files.
SAMPLE_KEY: Final = "__key__"

# How a package's datasets are made to shuffle alike in every process. Seen in webdataset 1.0.2, whose detshuffle=True
# alone takes its seed from Python's global generator, and in Hugging Face datasets 5.2.0.
_ORDER_REMEDIES: Final = {
    "webdataset": "Pass a seed that is the same on every rank: WebDataset(..., detshuffle=True, seed=0) for shards, "
    "and .compose(webdataset.detshuffle(1000, seed=0)) or .shuffle(1000, seed=0) in place of .shuffle(1000)",
    "datasets": "Pass a seed that is the same on every rank: .shuffle(seed=0, buffer_size=1000)",
}


def order_remedy(dataset: object) -> str | None:
    """Return how to make a dataset of another package, or one inside it, shuffle alike on every rank."""
    for one in (dataset, *getattr(dataset, "__dict__", {}).values()):
        for kind in type(one).__mro__:
            if (remedy := _ORDER_REMEDIES.get(kind.__module__.split(".")[0])) is not None:
                return remedy
    return None
