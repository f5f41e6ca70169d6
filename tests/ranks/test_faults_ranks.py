"""Ranks that die, fail or stop, as real processes: what every other rank is told."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from messages import assert_tells
from quick import run_ranks
from zoo import loader

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import RankMismatchError, RanksFailedError
from ddp_patch.ranks import agreement

WORLD = 3
TIMEOUT = 4.0  # seconds that ranks wait for each other here


def killed_before_the_patch(rank: int) -> None:
    if rank == 1:
        die()
    patch_dataloader_to_ddp(loader(), timeout=TIMEOUT)


def killed_after_its_record(rank: int) -> None:
    """Rank 1 leaves its record, so that all agree; whoever needs it afterwards finds it gone."""
    if rank == 1:
        agreement.Agreed.__init__ = lambda *_, **__: die()  # type: ignore[method-assign]  # after the verdict
    patched = patch_dataloader_to_ddp(loader(), timeout=TIMEOUT)
    restore_loader(patched, loader_state(patched))


def first_rank_killed_while_it_compares_the_records(rank: int) -> None:
    if rank == 0:
        agreement.judge_reports = lambda _: die()  # type: ignore[assignment]  # where agree() looks it up
    patch_dataloader_to_ddp(loader(), timeout=TIMEOUT)


def slower_than_the_time_out(rank: int) -> None:
    if rank == 1:
        time.sleep(2 * TIMEOUT)
    patch_dataloader_to_ddp(loader(), timeout=TIMEOUT)


def patches_after_a_time_out(rank: int) -> None:
    patch_dataloader_to_ddp(loader(), timeout=TIMEOUT)


def looks_alone(rank: int) -> None:
    """Rank 0 looks at a batch; then all train in step, each with 8 steps to make."""
    patched = patch_dataloader_to_ddp(loader(1, shuffle=True), timeout=60)
    if rank == 0:
        next(iter(patched))
    batches, met = iter(patched), None
    for _ in range(8):
        try:
            next(batches if met is None else iter(()), None)
        except RankMismatchError as error:
            met = error
        dist.barrier()
    if met is not None:
        raise met


def die() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


RANK_1 = f"MissingRanksError: rank 1 of 3; {TIMEOUT:g} s"
RANK_0 = "MissingRanksError: rank 0 of 3; did not answer"
MISMATCH = "RankMismatchError: rank 0 left epoch 0 after 1 batch"
# What every rank says: "killed", an error with facts that its message tells, or nothing.
DEATHS: list[tuple[Callable[[int], None], list[str]]] = [
    (killed_before_the_patch, [RANK_1, "killed", RANK_1]),
    (killed_after_its_record, [RANK_1, "killed", RANK_1]),
    (first_rank_killed_while_it_compares_the_records, ["killed", RANK_0, RANK_0]),
]
OTHERS: list[tuple[Callable[[int], None], list[str]]] = [(looks_alone, [MISMATCH] * 3)]
# After the first, ranks may be at different calls, which must not be taken for one.
LATE: list[tuple[Callable[[int], None], list[str]]] = [
    (slower_than_the_time_out, [RANK_1] * 3),
    (patches_after_a_time_out, [RANK_1 + "; different points of the script"] * 3),
]


def word_of(case: Callable[[int], None], rank: int) -> str:
    try:
        case(rank)
    except Exception as error:  # noqa: BLE001 - whatever the rank says is what is looked at
        return f"{type(error).__name__}: {error}"
    return "nothing"


def tell(rank: int, world_size: int, case: Callable[[int], None], folder: str) -> None:
    """Run a case with a death and leave word of how it ended; end when both ranks that live have."""
    Path(folder, str(rank)).write_text(word_of(case, rank))
    while len(os.listdir(folder)) < WORLD - 1:  # nobody learns of anything by this process's end
        time.sleep(0.05)


def require(said: str, expected: str) -> None:
    error, _, facts = expected.partition(": ")
    assert said.startswith(error), said
    if error == "MissingRanksError":
        assert_tells(said, tuple(facts.split("; ")))
    else:
        assert facts in said


@pytest.mark.parametrize(("case", "expected"), DEATHS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_surviving_rank_is_told(case: Callable[[int], None], expected: list[str], tmp_path: Path) -> None:
    """Before the deadline, which is much later than the ranks' time-out."""
    with pytest.raises(RanksFailedError, match="killed by SIGKILL"):
        run_ranks(tell, WORLD, case, str(tmp_path), timeout=90, grace=30)
    for rank, word in enumerate(expected):
        assert (tmp_path / str(rank)).exists() == (word != "killed")
        if word != "killed":
            require((tmp_path / str(rank)).read_text(), word)


def one_after_the_other(rank: int, world_size: int, cases: list[Callable[[int], None]]) -> list[str]:
    told = []
    for case in cases:
        told.append(word_of(case, rank))
        dist.barrier()
    return told


@pytest.mark.parametrize("cases", [OTHERS, LATE], ids=["others", "late"])
def test_where_no_rank_dies_every_rank_is_told_the_same(cases: list[tuple[Callable[[int], None], list[str]]]) -> None:
    for number, told in enumerate(run_ranks(one_after_the_other, WORLD, [case for case, _ in cases])):
        for said, (_, expected) in zip(told, cases, strict=True):
            require(said, expected[number])


def test_the_page_lists_every_case() -> None:
    """docs/reliability.md has a row for each case, with what every rank says."""
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    for case, expected in DEATHS + OTHERS + LATE:
        cells = [case.__name__.replace("_", " "), ", ".join(word.split(":")[0] for word in expected)]
        assert "| " + " | ".join(cells) + " |" in page
