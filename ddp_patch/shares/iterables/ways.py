"""Check that workers read either one stream or a part each, and that a state fits."""

from collections.abc import Sequence

from ddp_patch.errors import InvalidOptionError, StateError, UnsupportedLoaderError
from ddp_patch.plan import Plan
from ddp_patch.shares.iterables.board import Board
from ddp_patch.shares.iterables.starts import Start

__all__ = ["require_one_way", "require_same_ends"]


def require_one_way(name: str, board: Board, start: Start, plan: Plan) -> None:
    """Refuse a dataset that can be sharded neither as one stream nor in parts.

    Args:
        name: What errors call the dataset.
        board: Where workers wrote how they read.
        start: Where the pass of this one begins.
        plan: The rank's share.

    Raises:
        UnsupportedLoaderError: Some workers read a part, others the whole stream.
        InvalidOptionError: The length of a part would have to be known.
        StateError: The state counts something else.
    """
    if board.readers == 1:
        return
    if len(ways := board.ways(start.number)) > 1:
        raise UnsupportedLoaderError(
            f"{name} cannot be sharded with {board.readers} workers: it called get_worker_info() in some workers and "
            "not in others, so it is neither one stream nor split into parts. Call it in every worker, first in "
            "__iter__, or use num_workers=0."
        )
    if ways == {"parts"} and plan.needs_length:
        raise InvalidOptionError(
            f"layout='contiguous' does not work with {name} and num_workers={board.readers}: it splits itself over its "
            "workers, and the length of each part is known only at its end. Use layout='interleaved', or num_workers=0 "
            "or 1."
        )
    if start.counts != "nothing" and {start.counts} != ways:
        counts = {"stream": "one stream, as 0 or 1 workers read it", "parts": f"the parts of {board.readers} workers"}
        raise StateError(
            f"{name} cannot resume from the state, which counts items of {counts[start.counts]}: with "
            f"num_workers={board.readers} it is read as {counts[next(iter(ways))]}. Use the num_workers that the state "
            "was taken with."
        )


def require_same_ends(name: str, board: Board, number: int) -> Sequence[int | None]:
    """Return how many items the one stream has, or each part, as far as workers came to its end.

    Raises:
        UnsupportedLoaderError: Workers that read one stream found different ends.
    """
    lengths = board.lengths(number)
    if board.ways(number) != {"stream"}:
        return lengths
    found = list({length for length in lengths if length is not None})
    if len(found) > 1:
        raise UnsupportedLoaderError(
            f"{name} cannot be sharded with {board.readers} workers: it never called get_worker_info(), but gave "
            f"{' and '.join(map(str, found))} items in two of them. Split it by get_worker_info() in __iter__, or use "
            "num_workers=0."
        )
    return found
