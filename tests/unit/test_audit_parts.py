"""The audit of set-ups in which each rank has data of its own: right ones hold, broken ones are named truly."""

import pytest
from audit_parts import RIGHT, WORLD, WRONG
from messages import missing

from ddp_patch import audit


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
