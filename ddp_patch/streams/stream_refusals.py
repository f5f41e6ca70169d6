"""Streams that cannot be shared: how their datasets are split, and where they end, which workers see as they read."""

from typing import Any, cast

from ddp_patch.errors import StateError, UnsupportedLoaderError
from ddp_patch.loaders.recognition import may_ask_rank
from ddp_patch.plan import require_steps
from ddp_patch.streams.worker import StreamWorker, WorkerPosition

__all__ = ["require_ends", "require_one_way", "require_split_by_worker"]


def require_split_by_worker(worker: StreamWorker[Any], *, asked: bool) -> None:
    """Refuse a dataset that is to split itself over all ranks' workers, and does not, or not by its worker alone.

    One whose class says ``is_ddp_aware = False`` may ask for its rank, as for a log.

    Args:
        worker: What reads it.
        asked: Whether it asked which worker it is in, by its first item.

    Raises:
        UnsupportedLoaderError: It does not split itself, or by its rank.
    """
    if worker.has_asked_rank and not may_ask_rank(worker.dataset):
        raise UnsupportedLoaderError(
            f"{worker.name} cannot be read with share='by_worker': it asked for its rank by its first item, so it is "
            "sharded already, and sharding it by workers again would lose samples. Let its class say is_ddp_aware "
            "= True, and its loader is left as it is; or False, if it asks for another reason, such as a log."
        )
    if not asked:
        raise UnsupportedLoaderError(
            f"{worker.name} cannot be read with share='by_worker': it gave its first item, and had not asked "
            "get_worker_info() which worker it is in (id, num_workers or seed), so each rank would read all of it. "
            "Leave share out: then each rank keeps its share of the stream."
        )


def require_one_way(worker: StreamWorker[Any], number: int, start: WorkerPosition) -> None:
    """Refuse a dataset that can be sharded neither as one stream nor in parts.

    Raises:
        UnsupportedLoaderError: Some workers read a part, others the whole stream.
        StateError: The state counts something else.
    """
    name, readers = worker.name, worker.shared.readers
    if len(ways := worker.shared.ways(number)) > 1:
        raise UnsupportedLoaderError(
            f"{name} cannot be sharded with {readers} workers: it called get_worker_info() in some workers and "
            "not in others, so it is neither one stream nor split into parts. Call it in every worker, first in "
            "__iter__, or use num_workers=0."
        )
    if start.counts != "nothing" and {start.counts} != ways:
        counts = {"stream": "one stream, as 0 or 1 workers read it", "parts": f"the parts of {readers} workers"}
        raise StateError(
            f"{name} cannot resume from the state, which counts items of {counts[start.counts]}: with "
            f"num_workers={readers} it is read as {counts[next(iter(ways))]}. Use the num_workers that the "
            "state was taken with."
        )


def require_ends(worker: StreamWorker[Any], number: int, start: WorkerPosition, drawn: int) -> None:
    """Refuse an end that contradicts the other workers' or a state, and an epoch without steps."""
    shared = worker.shared
    lengths = shared.lengths(number)
    if shared.ways(number) == {"stream"}:
        lengths = list({length for length in lengths if length is not None})
        if len(lengths) > 1:
            raise UnsupportedLoaderError(
                f"{worker.name} cannot be sharded with {shared.readers} workers: it never called "
                f"get_worker_info(), but gave {' and '.join(map(str, lengths))} items in two of them. Split it by "
                "get_worker_info() in __iter__, or use num_workers=0."
            )
    if start.is_at_epoch_start and None not in lengths:
        require_steps(worker.plan, worker.batching, worker.name, cast("list[int]", lengths), in_batches=False)
    if start.items_consumed > worker.plan.largest_share(drawn):
        raise StateError(
            f"{worker.name} cannot resume from the state: {start.items_consumed} items of each rank's share were "
            f"done in it, and the stream ended after {drawn} items of all ranks. Restore it with the dataset that "
            "it was taken of; one that is its own iterator must be rebuilt."
        )
