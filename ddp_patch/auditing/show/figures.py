"""Choose the figures of a report."""

from ddp_patch.auditing.pictured import Pictured
from ddp_patch.auditing.show.figure import Figure
from ddp_patch.auditing.show.shares import how_often_seen, who_gets_what
from ddp_patch.auditing.show.steps import batch_sizes
from ddp_patch.auditing.show.waiting import waiting_figures

__all__ = ["figures_of"]


def figures_of(pictured: Pictured, balanced: Pictured | None, world_size: int) -> list[Figure]:
    """Return how often samples are seen, who gets what, the sizes of batches, and how ranks wait if costs are known.

    Args:
        pictured: What was found.
        balanced: The same of the loader patched with ``cost=``; None where there is none.
        world_size: The number of ranks.

    Returns:
        The figures; none of an epoch without a sample.
    """
    found, epoch = [], pictured.epoch
    if pictured.shares.positions:
        found += [how_often_seen(pictured.shares, epoch), who_gets_what(pictured.shares, epoch)]
    if pictured.steps.steps:
        found.append(batch_sizes(pictured.steps, epoch))
    return found + waiting_figures(pictured, balanced, world_size)
