"""Compare what a patched loader gives one process with what the unpatched one gives it."""

from collections.abc import Callable

from ddp_patch.auditing.draw.alone import same_items
from ddp_patch.auditing.draw.coding import Coding
from ddp_patch.auditing.draw.drawn import Drawn, Epoch
from ddp_patch.auditing.judge.about import EXAMPLES
from ddp_patch.auditing.judge.counting import coverage
from ddp_patch.auditing.problems import Problem

__all__ = ["unpatched_problem"]


def unpatched_problem(epoch: Epoch, again: Callable[[], Drawn], coding: Coding, workers: int) -> Problem | None:
    """Check that a patched loader leaves out nothing that the unpatched one gives; None if it does not.

    Args:
        epoch: What was drawn.
        again: Draws the same epoch of the unpatched loader, seeded otherwise.
        coding: Gives samples their names.
        workers: The loader's workers.
    """
    given, alone = epoch.unpatched, epoch.alone
    if given is None or not (given.ended and alone.ended):
        return None
    found = coverage(given.items, [alone.items])
    if not found.lacking:
        return None
    if not same_items(given, other := again()):
        # Samples are made at random: as many of others will do, where there are always as many.
        found = found.counts_alone()
        if not found.lacking or len(other.items) != len(given.items):
            return None
    such = "; ".join(coding.name(int(code)) for code in found.missing[:EXAMPLES])
    return Problem(
        "missing",
        f"{found.lacking} of the {len(given.items)} samples of the unpatched loader with num_workers={workers} are "
        f"missing{f' (such as {such})' if such else ''}, even in a world of one rank.",
        f"epoch {epoch.number}, a world of one rank",
        "The dataset gives its workers other samples than in the unpatched loader.",
        "Split the dataset by torch.utils.data.get_worker_info() in __iter__, or in worker_init_fn through "
        "get_worker_info().dataset, and by nothing else; or use num_workers=0.",
    )
