"""Numbers in files, and what the ranks get of them together."""

import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

ITEMS, FILES = 96, 8
NUMBERS = [range(start, start + ITEMS // FILES) for start in range(0, ITEMS, ITEMS // FILES)]  # what each file holds

warnings.simplefilter("ignore")  # what libraries warn of is not what is shown here
logging.disable(logging.WARNING)


def report(title: str, loader: Iterable[Any], numbers: Callable[[Any], list[int]], epochs: int = 2) -> None:
    """Go through a loader on every rank, and print on rank 0 what all ranks got together.

    Args:
        title: Printed before it.
        loader: The loader.
        numbers: Returns the numbers in a batch.
        epochs: How often to go through it.
    """
    given = [[numbers(batch) for batch in loader] for _ in range(epochs)]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, given)
    if dist.get_rank() == 0:
        for epoch, of_ranks in enumerate(zip(*ranks, strict=True)):
            seen = [number for batches in of_ranks for batch in batches for number in batch]
            steps = "+".join(str(len(batches)) for batches in of_ranks)
            print(
                f"{title}, epoch {epoch}: {steps} steps, {len(set(seen))} seen, {len(seen) - len(set(seen))} repeated"
            )
    dist.monitored_barrier()  # gloo's threads abort if they free a collective's tensors while Python shuts down
