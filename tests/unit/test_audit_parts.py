"""The audit of set-ups in which each rank has data of its own: right ones hold, broken ones are named truly."""

import re

import pytest
from audit_parts import RIGHT, WORLD, WRONG, N
from audit_setups import Untouchable
from messages import missing, raises
from torch.utils.data import DataLoader, Subset

from ddp_patch import audit
from ddp_patch.auditing.report import page
from ddp_patch.errors import InvalidOptionError


@pytest.mark.parametrize("name", RIGHT)
def test_ranks_whose_own_data_are_disjoint_and_complete_hold(name: str) -> None:
    report = audit(RIGHT[name], WORLD)
    report.raise_for_problems()
    assert {epoch.expected for epoch in report.epochs} <= {103, 104}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_ranks_own_data_is_named(name: str) -> None:
    make, kind, said, remedy = WRONG[name]
    report = audit(make, WORLD, allow=["wrong_length"])
    assert [problem.kind for problem in report.problems] == [kind]
    (problem,) = report.problems
    assert not missing(f"{problem.what} {problem.why}", said), problem
    assert not missing(problem.remedy, remedy), problem


def test_samples_that_are_compared_by_value_have_no_cost() -> None:
    with raises(InvalidOptionError, ("cost=", "no indices"), "cost"):
        audit(RIGHT["list"], WORLD, cost=[1] * N)


def test_subsets_are_compared_and_named_by_the_dataset_below_them() -> None:
    report = audit(RIGHT["Subset of torch's indices"], WORLD, epochs=1, cost=[1] * N)
    assert report.epochs[0].imbalance == 1
    given = DataLoader(Subset(Untouchable(N), [*range(50, 80)]), 4)
    (problem,) = audit(given, 4, uneven="drop").problems
    assert re.search(r"such as [5-7]\d; [5-7]\d", problem.what)


def test_foreign_samples_are_counted_and_shown() -> None:
    report = audit(WRONG["samples of another split"][0], WORLD, epochs=1)
    (epoch,) = report.epochs
    assert (epoch.missing, epoch.repeated, epoch.foreign) == (0, 0, 8)
    assert "104 on rank 0" in report.problems[0].what
    shown = page({"train": report})
    assert all("8 that one process never gets" in text for text in (str(report), report.to_markdown(), shown))
