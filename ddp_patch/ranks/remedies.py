"""What to do where ranks read different streams."""

from typing import Final

__all__ = ["ONE_STREAM", "SEED"]

# Where no package is known to shuffle.
SEED: Final = (
    "Give its shuffle a seed that is the same on every rank, such as random.Random(epoch) with the epoch of its "
    "set_epoch(), and sort lists of files"
)

ONE_STREAM: Final = "Skip an unreadable item on every rank, or raise an error."
