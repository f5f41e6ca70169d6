"""Messages about streams that cannot be shared, or that may lose samples: facts, and what to do."""

from collections.abc import Iterable
from typing import Final

from ddp_patch.compat.private_packages import SAMPLE_KEY
from ddp_patch.errors import StateError, UnsupportedLoaderError
from ddp_patch.validation import counted

# What to do where ranks read different streams.
_SEED: Final = (
    "Give each of its shuffles a seed, the same on every rank, and sort files (webdataset's shards: detshuffle=True, "
    "seed=0; its samples: .shuffle(1000, seed=0))"
)


# ---- what ranks, or the readers of one rank, have read ----


def why_streams_differ(name: str, *, is_in_parts: bool) -> str:
    """Return why ranks may read different streams, and what to do."""
    by_worker = " If each worker shuffles its own part, share='by_worker' will do." if is_in_parts else ""
    return (
        f"Each rank keeps its shard of what should be one stream of {name}, so samples are lost. "
        f"{_SEED}.{by_worker} Let it give every rank everything, and skip unreadable items on every rank or none. "
        f"If only augmentation, or the folder of the files, differs, give items a string {SAMPLE_KEY!r}. If it "
        "gives each rank its own part on purpose, set is_ddp_aware = True in its class: its loader is left as it is."
    )


def why_numbers_differ(name: str) -> str:
    """Return the two explanations of items that differ in numbers alone, and how to tell which is right."""
    return (
        "Either each augments or masks its items by itself, and nothing is lost; or each reads its own order, of "
        f"which each rank keeps its shard, and samples are lost. Give each item of {name} a string "
        f"{SAMPLE_KEY!r} that names it, to know which: it alone counts then, and another order is an error. "
        f"{_SEED}. "
        "If nothing is lost, ignore this RankMismatchWarning, or seed the augmentation alike."
    )


def why_parts_overlap(name: str) -> str:
    """Return why two ranks may read the same samples with share="by_worker", and what to do."""
    return (
        f"With share='by_worker', {name} splits itself by get_worker_info(), which counts the workers of all ranks; so "
        "it splits by something else besides, or its parts are the same. Let it take what its worker's id and "
        "num_workers say, of one list in the same order on every rank; or leave share out, and each rank keeps its "
        "share of one stream."
    )


def readers_differ(name: str, what: str, items: int, reader: int, why: str) -> str:
    """Return the message that two readers of one stream differ: in their orders, or in numbers."""
    return (
        f"{name} is read {what} by worker 0 and worker {reader} of one rank: they differ within the first {items} "
        f"items. {why}"
    )


def cannot_be_named(name: str, why: str) -> str:
    """Return the message that the ranks cannot compare the items that they read."""
    return (
        f"The ranks cannot compare in which order they read {name}: {why}. If each rank reads its own order, samples "
        f"are lost. {_SEED}. To let the ranks compare, give each item a string that names it. If they read one order, "
        "ignore this StreamOrderWarning."
    )


def reads_too_much(name: str, ranks: int, items: int, spent_s: float, took_s: float) -> str:
    """Return the message that every rank has read all items, and that reading took most of a pass."""
    return (
        f"{name}: each of {ranks} ranks read all {items:,} items, and waited for them for {spent_s:.1f} of "
        f"{took_s:.1f} s. The dataset splits itself over workers, so patch_dataloader_to_ddp(loader, "
        "share='by_worker') reads each item once. It costs: a saved state is then restored on as many ranks and "
        "workers only, and every pass needs all ranks."
    )


# ---- datasets that cannot be shared ----


def no_pass_begun(name: str) -> UnsupportedLoaderError:
    """Return the error for a reader for which the main process begins no pass."""
    return UnsupportedLoaderError(
        f"{name} cannot be sharded here: the patched loader was rebuilt without its sampler, which begins each epoch, "
        "or with another number of workers. Lightning's predict and overfit_batches and accelerate's "
        "skip_first_batches do this. Iterate the one that patch_dataloader_to_ddp() returned; restore_loader() resumes "
        "it mid-epoch."
    )


ASKED_LATE: Final = (
    "it asked get_worker_info() which worker it is in only after its first items, so these came from every worker and "
    "later ones from one"
)
ASKED_IN_SOME: Final = "it called get_worker_info() in some of them and not in others"


def ends_differ(lengths: Iterable[int | None]) -> str:
    """Return the message that a dataset's one stream has different lengths in some readers."""
    return f"it never called get_worker_info(), but gave {' and '.join(map(str, lengths))} items in two"


def split_in_part(name: str, readers: int, what: str) -> UnsupportedLoaderError:
    """Return the error for a dataset that neither gives all readers one stream, nor splits itself over them.

    Args:
        name: The class of the dataset.
        readers: How many readers there are.
        what: What the dataset did.
    """
    return UnsupportedLoaderError(
        f"{name} cannot be sharded with {readers} workers: {what}. Call get_worker_info() first in __iter__, in every "
        "worker, and split the items by it; or use num_workers=0."
    )


def asked_for_rank(name: str) -> UnsupportedLoaderError:
    """Return the error for a dataset that must split itself by its worker alone, and asked for its rank."""
    return UnsupportedLoaderError(
        f"{name} cannot be read with share='by_worker': it asked for its rank by its first item, so it is sharded "
        "already, and sharding it by workers again would lose samples. Let it split itself by get_worker_info() "
        "alone, which counts the workers of all ranks. If it asks for another reason, such as a log, say "
        "is_ddp_aware = False in its class; if it should go on to shard itself, say True: its loader is left as it is."
    )


def asked_for_too_little(name: str) -> UnsupportedLoaderError:
    """Return the error for a dataset that must split itself by its worker, and did not ask for the worker's number."""
    return UnsupportedLoaderError(
        f"{name} cannot be read with share='by_worker': it gave its first item, and had not asked get_worker_info() "
        "which worker it is in (id or num_workers), so each rank would read all of it. Leave share out: then each rank "
        "keeps its share of the stream."
    )


# ---- states ----


def of_other_readers(name: str, parts: int, workers: int) -> StateError:
    """Return the error for a state that counts the items of another number of readers."""
    return StateError(
        f"{name} cannot resume from the state, which counts the items of {parts} workers that each read a part: this "
        f"loader has num_workers={workers}. Use num_workers={parts}; the number of ranks may change."
    )


def counted_otherwise(name: str, readers: int, *, are_parts: bool) -> StateError:
    """Return the error for a state that counts items of parts where the dataset is one stream, or the reverse."""
    ways = ["one stream, as 0 or 1 workers read it", f"the parts of {readers} workers"]
    counts, reads = ways[are_parts], ways[not are_parts]
    return StateError(
        f"{name} cannot resume from the state, which counts items of {counts}: with num_workers={readers} it is read "
        f"as {reads}. Use the num_workers that the state was taken with."
    )


def other_stream(name: str, items: int) -> StateError:
    """Return the error for a stream whose first items differ from the first items when the state was taken."""
    return StateError(
        f"{name} cannot resume from the state: its first {items} items differ from those when the state was taken, so "
        "the finished ones cannot be skipped. Restore the state with the same samples in the same order; rebuild a "
        "dataset that is its own iterator."
    )


def ended_before_state(name: str, taken: int, length: int) -> StateError:
    """Return the error for a stream that has fewer items than the state counts."""
    return StateError(
        f"{name} cannot resume from the state: {counted(taken, 'item')} of the stream were taken in it, and the stream "
        f"ended after {counted(length, 'item')}. Restore it with the dataset that it was taken of; one that is its own "
        "iterator must be rebuilt."
    )


def part_ended_before_state(name: str, part: int, readers: int, length: int) -> StateError:
    """Return the error for a reader's part that has fewer batches than the state counts turns."""
    return StateError(
        f"{name} cannot resume from the state: worker {part} of {readers} had only {counted(length, 'item')} before "
        "its end, so the workers no longer took turns, and nobody knows which batches were done. Begin the epoch "
        "again, or leave share out."
    )


def turns_differ(name: str, batches: int) -> StateError:
    """Return the error for readers whose turns differ between ranks, so that no state can count them."""
    return StateError(
        f"The state of {name} cannot be saved after {counted(batches, 'batch')}: with uneven='keep' a worker has come "
        "to its end on some ranks and not on others, so the ranks' workers no longer take the same turns. Use "
        "uneven='pad' or 'drop', or take the state earlier, or at the epoch's end."
    )


def unknown_ends(name: str, batches: int, readers: int, waited_s: int) -> StateError:
    """Return the error for readers that may have come to their ends, and have not all reported their ends."""
    return StateError(
        f"{name} may have ended after {counted(batches, 'batch')}, but not all of its {readers} workers, which read a "
        f"part each, have reported that within {waited_s} s. Take the state a step earlier, or after the pass."
    )
