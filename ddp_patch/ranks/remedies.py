"""What to do where ranks read different streams."""

from typing import Final

__all__ = ["ONE_STREAM", "SEED"]

# Where no package is known to shuffle.
SEED: Final = (
    "Give its shuffle a seed that is the same on every rank and follows from the epoch, such as random.Random(epoch) "
    "with the epoch that the dataset gets by set_epoch(), and list files in sorted order"
)

ONE_STREAM: Final = (
    "Let the dataset give every rank the same: skip an unreadable item on all of them or raise an error, and raise an "
    "error where a connection is lost."
)
