"""Show how large each rank's batches are."""

from ddp_patch.auditing.pictured import StepMap
from ddp_patch.auditing.show.figure import Figure, Fill, Row, columns_of, ticks_of
from ddp_patch.auditing.show.shares import MANY, by_rank, row_height, width_text

__all__ = ["batch_sizes"]

# Write sizes into cells up to this many columns; a narrow screen has room for fewer.
_TEXTS, _FEW = 40, 12


def batch_sizes(steps: StepMap, epoch: int) -> Figure:
    """Return a row for each rank, filled by how large its batches are."""
    ranks, columns = len(steps.sizes), len(steps.sizes[0])
    is_short = any(map(any, steps.lacking))
    has_texts = steps.width == 1 and columns <= _TEXTS and ranks <= MANY
    spans = [min(steps.width, steps.steps - at * steps.width) for at in range(columns)]
    rows = []
    for rank, (sizes, lacking) in enumerate(zip(steps.sizes, steps.lacking, strict=True)):
        full = [(0.0, size / max(1, steps.largest)) for size in sizes]
        # The empty part is drawn over the whole height: no batch is there, however small.
        none = [(1 - lacks / span, lacks / span) for lacks, span in zip(lacking, spans, strict=True)]
        texts = [f"{size:g}" if not lacks else "" for size, lacks in zip(sizes, lacking, strict=True)]
        bars = [
            *columns_of(full, "once", steps.width, steps.steps, texts if has_texts else ()),
            *columns_of(none, "never", steps.width, steps.steps),
        ]
        rows.append(Row(f"rank {rank}", tuple(bars)))
    told = by_rank("makes", [steps.steps - sum(lacking) for lacking in steps.lacking], "steps")
    told.append(f"the largest batch has {steps.largest} samples")
    missing: tuple[tuple[Fill, str], ...] = (("never", "no step"),) if is_short else ()
    return Figure(
        f"Batch sizes in epoch {epoch}",
        f"Left to right: the steps. {width_text(steps.width, 'step')} The taller the bar, the larger the batch.",
        "; ".join(told) + ".",
        (("once", f"a batch; full: {steps.largest} samples"), *missing),
        tuple(rows),
        ticks_of(steps.steps, steps.width),
        height=row_height(ranks),
        is_dense=columns > _FEW,
    )
