"""Loaders and samplers of other packages, as their users use them. ``nox -s packages`` tries many more."""

from functools import cache

import pytest
from quick import run_ranks
from third_party.base import Case
from third_party.judge import OneProcess, judge
from third_party.measure import Seen, cases_of, seen_on_rank, world_by_hand

# These do without torchvision.
MODULES = ["datasets", "lhotse", "mmengine", "pytorch_metric_learning", "torch_geometric", "torchdata", "webdataset"]
CASES = [(module, case) for module in MODULES for case in cases_of(module)]
BY_HAND = [case for _, case in CASES if not case.on_ranks]
ON_RANKS = sorted({module for module, case in CASES if case.on_ranks})


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("case", BY_HAND, ids=str)
def test_in_a_world_given_by_hand(case: Case, num_replicas: int) -> None:
    assert judge(case, in_one_process(case), world_by_hand(case, num_replicas)).problems == []


@cache
def in_one_process(case: Case) -> OneProcess:
    return OneProcess(case)


@pytest.mark.parametrize("module", ON_RANKS)
def test_on_real_ranks(module: str) -> None:
    cases = [case for case in cases_of(module) if case.on_ranks]
    alone = {case.name: OneProcess(case) for case in cases}  # first, which writes the files that ranks read
    ranks: list[dict[str, Seen]] = run_ranks(seen_on_rank, 2, module)
    for case in cases:
        assert judge(case, alone[case.name], [rank[case.name] for rank in ranks]).problems == []
