"""Run a table of remedies on two real ranks."""

from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch.distributed as dist
from jobs import Job, Run, run_job, verdict
from quick import run_ranks

from remedied import Met, left_over, rows

__all__ = ["wrong_on_two_ranks"]

NAMES: dict[str, Any] = {name: import_module(name) for name in ("copy", "users", "random", "time", "torch", "zoo")} | {
    "dist": dist
}
for module in ("torch.utils.data", "ddp_patch", "ddp_patch.testing.ranks"):
    found = import_module(module)
    NAMES |= vars(found) | {name: getattr(found, name) for name in getattr(found, "__all__", ())}


def _run(rank: int, world: int, table: str) -> list[list[Run]]:
    """Run each row's program, and each that follows a remedy, on this rank."""

    def of(program: str) -> Run:
        def call(job: Job) -> None:
            exec(program, NAMES | {"job": job})  # noqa: S102 - a table of ours

        made = run_job(rank, world, call)
        dist.monitored_barrier(timeout=timedelta(seconds=60))
        return made

    return [
        [of(row.program), *(of(again) for _, again in row.remedies if isinstance(again, str))] for row in rows(table)
    ]


def _wrong(row: Met, ranks: Sequence[list[Run]]) -> list[str]:
    """Return what did not come as a row says, given what each rank made of its programs."""
    first, *others = zip(*ranks, strict=True)
    told = [text for run in first for text in (run.error.partition(": ")[2], *run.warned) if text]
    if not told:
        return [f"no message: {[each.failed for each in first]}"]
    kept = [text for text in told if row.facts in text] or told
    # A rank that warns may raise later, or another one: the message that fits best is the one that the row is about.
    found = [why] if (why := min((left_over(text, row) for text in kept), key=len)) else []
    quotes = [quote for quote, again in row.remedies if isinstance(again, str)]
    for quote, runs in zip(quotes, others, strict=True):
        came = [verdict(runs), *(text for each in runs for text in (each.error, *each.warned) if text)]
        found += [] if came == ["complete"] else [f"{quote}: {came}"]
    return found


def wrong_on_two_ranks(table: str) -> str:
    """Return what is wrong with the rows of a table, run on two ranks: each with loaders of its own."""
    ranks = run_ranks(_run, 2, table, timeout=120)
    found = {str(row): why for row, *each in zip(rows(table), *ranks, strict=True) if (why := _wrong(row, each))}
    return "\n\n".join(f"{row}:\n" + "\n".join(why) for row, why in found.items())
