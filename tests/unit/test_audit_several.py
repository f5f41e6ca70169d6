"""Audits of several loaders, of data that each rank has of its own, of many ranks, and of how ranks wait."""

import json
import re
from collections.abc import Callable
from typing import Any

import audit_setups as setups
import numpy as np
import pytest
import torch
from audit_parts import RIGHT, WORLD, WRONG, N
from audit_setups import Untouchable
from messages import missing, raises
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset
from zoo import ALL_KINDS, Kind, loader

from ddp_patch import Cost, audit, patch_dataloader_to_ddp
from ddp_patch.auditing import Report, Reports, world
from ddp_patch.auditing.ranks import Rank
from ddp_patch.auditing.report import page
from ddp_patch.errors import AuditError, InvalidOptionError, NotALoaderError
from ddp_patch.positions_and_padding import Plan


def test_lists_and_dicts_are_audited_one_by_one() -> None:
    reports: Reports = audit({"train": loader(), "val": [setups.torchs, loader()]}, 2)
    assert list(reports) == ["train", "val[0]", "val[1]"]
    assert [report.ok for report in reports.values()] == [True, False, True]
    assert not reports.ok
    assert len(reports) == 3
    with pytest.raises(AuditError, match="same_order"):
        reports.raise_for_problems()
    audit([loader()], 2).raise_for_problems()
    assert set(reports.to_dict()) == set(reports)
    assert "## val\\[0\\]\n" in reports.to_markdown()
    assert "val[1]: DataLoader on 2 ranks: PASS" in str(reports)


def test_what_holds_no_loader_is_refused() -> None:
    with raises(NotALoaderError, ("holds no loader", "{}"), "one"):
        audit({}, 2)
    with raises(NotALoaderError, ("val[1] is", "7 (int)"), "loader"):
        audit({"val": [loader(), 7]}, 2)
    with raises(InvalidOptionError, "a.b", "names"):
        audit({"a.b": loader(), "a": {"b": loader()}}, 2)


# Set-ups in which each rank has data of its own: right ones hold, broken ones are named truly.


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


def test_subsets_are_compared_and_named_by_the_dataset_below_them() -> None:
    report = audit(RIGHT["Subset of torch's indices"], WORLD, epochs=1, cost=[1] * N)
    assert report.epochs[0].imbalance == 1
    given = DataLoader(Subset(Untouchable(N), [*range(50, 80)]), 4)
    (problem,) = audit(given, 4, uneven="drop").problems
    assert re.search(r"such as [5-7]\d; [5-7]\d", problem.what)


# Many ranks: some iterate their loaders, and the others' shares are cut from what one process gets.


CUT = "shares are cut"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"uneven": "drop"},
    {"uneven": "keep"},
    {"share": "batches"},
    {"share": "batches", "uneven": "drop"},
]


@pytest.fixture
def cutting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut in small worlds, too."""
    monkeypatch.setattr(world, "_ALL", 4)
    monkeypatch.setattr(world, "_SOME", 3)


def both(given: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Report, Report]:
    """The reports of five ranks that are cut, and of five that all iterate."""
    cut = audit(given, 5, **options)
    with monkeypatch.context() as patched:
        patched.setattr(world, "_ALL", 5)
        return cut, audit(given, 5, **options)


MAP_STYLE = [kind for kind in ALL_KINDS if not kind.endless and not kind.name.startswith("iterable")]


@pytest.mark.usefixtures("cutting")
@pytest.mark.parametrize("kind", MAP_STYLE, ids=lambda kind: kind.name)
def test_what_is_cut_is_what_all_ranks_iterate(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    cut, iterated = both(kind.make(), monkeypatch, epochs=min(2, kind.epochs))
    assert cut.epochs == iterated.epochs
    assert [problem.kind for problem in cut.problems] == [problem.kind for problem in iterated.problems]
    assert CUT not in iterated.how


@pytest.mark.usefixtures("cutting")
@pytest.mark.parametrize(
    ("n", "options"), [(0, {}), (1, {}), (7, {}), *((n, options) for n in (103, 105) for options in OPTIONS)]
)
def test_every_plan_is_cut_alike(n: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = DataLoader(Untouchable(n), 2, shuffle=n > 0)
    cut, iterated = both(given, monkeypatch, allow=["uneven_steps"], **options)
    assert cut.epochs == iterated.epochs
    assert CUT in cut.how
    assert cut.ok == iterated.ok


@pytest.mark.usefixtures("cutting")
@pytest.mark.parametrize("name", ["a sampler", "endless"])
def test_the_beginning_of_a_long_epoch_is_cut_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = setups.WithReplacement() if name == "endless" else None
    given = DataLoader(Untouchable(1000), 4, sampler=sampler, shuffle=sampler is None)
    cut, iterated = both(given, monkeypatch, max_items=30, seed=3)
    assert cut.ok
    assert cut.is_sample
    assert CUT in cut.how
    assert {*cut.epochs[0].items} == {28}  # in whole batches
    assert {*iterated.epochs[0].items} == {32}


@pytest.mark.usefixtures("cutting")
def test_where_ranks_got_something_else_all_of_them_iterate(monkeypatch: pytest.MonkeyPatch) -> None:
    given = DataLoader(Untouchable(), 4, shuffle=True)
    right = audit(given, 5)
    assert CUT in right.how
    share = world.share_of
    monkeypatch.setattr(world, "share_of", lambda plan, *given: share(Plan((plan.rank + 1) % 5, 5), *given))
    found = audit(given, 5)
    assert found.ok
    assert CUT not in found.how
    assert found.epochs == right.epochs


def test_a_thousand_ranks_take_the_loaders_of_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(*given: Any, **options: Any) -> Any:
        made.append(given)
        return Rank(*given, **options)

    monkeypatch.setattr(world, "Rank", counted)
    report = audit(DataLoader(Untouchable(10_000), 4, shuffle=True), 1024)
    assert report.ok
    assert len(report.epochs[0].items) == 1024
    assert len(made) == 9  # eight ranks and one process
    assert {0, 1023} < {rank for _, rank, *_ in made}


# How ranks wait, without ``cost=`` and with it.

MANY = 400
COSTS = np.random.default_rng(3).lognormal(3, 0.8, MANY).round() + 1


def cost_of_index(index: int) -> float:
    return float(COSTS[index])


def plain(n: int = MANY, **options: Any) -> DataLoader[Any]:
    return DataLoader(Untouchable(n), **options)


# What is reported.


def test_imbalance_is_the_slowest_ranks_cost_over_the_mean() -> None:
    """Without cost=, rank 0 costs 2 in each of two steps, rank 1 6."""
    (epoch,) = audit(plain(8, batch_size=2), 2, epochs=1, cost=[1, 3, 1, 3, 1, 3, 1, 3]).epochs
    assert (epoch.imbalance, epoch.unbalanced) == (1, 1.5)
    assert audit(plain(8), 2, cost=torch.ones(8)).epochs[0].imbalance == 1
    assert audit(plain(8), 2).epochs[0].imbalance is None
    assert audit(plain(8), 2, cost=np.zeros(8)).epochs[0].imbalance is None


def test_of_what_is_not_patched_the_waiting_alone_is_told() -> None:
    """Rank 0 alone makes a seventh step, the last of which all others wait for."""
    (epoch,) = audit(setups.uneven, 4, epochs=1, cost=np.ones(97)).epochs
    assert epoch.steps == (7, 6, 6, 6)
    assert epoch.imbalance == pytest.approx(25 / (24 + 1 / 4))
    assert epoch.unbalanced is None
    (epoch,) = audit(plain(8, batch_size=2), 2, 1, patch=False, cost=[1, 3] * 4, allow=["not_sharded"]).epochs
    assert (epoch.imbalance, epoch.unbalanced) == (1, None)
    stream = audit(lambda rank, ranks: DataLoader(setups.Stream(rank, ranks, n=104)), 4, cost=cost_of_index)
    assert stream.epochs[0].imbalance is None  # samples have no indices


def test_both_are_shown_in_every_form() -> None:
    report = audit(plain(8, batch_size=2), 2, epochs=1, cost=[1, 3, 1, 3, 1, 3, 1, 3])
    told = "waiting 0 % (33 % without cost=)"
    assert all(told in text for text in (report.summary, str(report), report.to_markdown(), page({"train": report})))
    written = json.loads(json.dumps(report.to_dict()))
    assert (written["epochs"][0]["imbalance"], written["epochs"][0]["unbalanced"]) == (1, 1.5)


# What it costs.


def by_hand(given: DataLoader[Any], ranks: int, of_batch: Callable[[list[int]], float], **options: Any) -> NDArray[Any]:
    """What each rank's steps of the first epoch cost, shape (ranks, steps), drawn as a training does."""
    patched = [patch_dataloader_to_ddp(given, rank=rank, num_replicas=ranks, **options) for rank in range(ranks)]
    return np.array([[of_batch(np.ravel(step).tolist()) for step in loader] for loader in patched])


def ratio(costs: NDArray[Any]) -> float:
    return float(costs.max(axis=0).sum() / costs.mean(axis=0).sum())


def summed(batch: list[int]) -> float:
    return float(sum(COSTS[index] for index in batch))


def padded(batch: list[int]) -> float:
    return float(max(COSTS[index] for index in batch) * len(batch))


class OwnBatches(BatchSampler):
    """A batch sampler that is not torch's own, so that whole batches are shared."""


def batches_of_three_and_five() -> list[list[int]]:
    order: list[int] = list(range(MANY))
    found: list[list[int]] = []
    while order:
        size = 3 + 2 * (len(found) % 2)
        found.append(order[:size])
        order = order[size:]
    return found


MADE: dict[str, tuple[Callable[[], DataLoader[Any]], dict[str, Any]]] = {
    "samples": (lambda: DataLoader(range(MANY), batch_size=4, shuffle=True), {}),  # type: ignore[arg-type]  # a dataset
    "samples, no batches": (lambda: DataLoader(range(MANY), batch_size=None, shuffle=True), {}),  # type: ignore[arg-type]
    "whole batches": (lambda: DataLoader(range(MANY), batch_size=4, shuffle=True), {"share": "batches"}),  # type: ignore[arg-type]
    "batches of the sampler": (
        lambda: DataLoader(range(MANY), batch_sampler=OwnBatches(RandomSampler(range(MANY)), 4, False)),  # type: ignore[arg-type]
        {},
    ),
    "batches of other sizes": (lambda: DataLoader(range(MANY), batch_sampler=batches_of_three_and_five()), {}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("rule", ["sum", "padded"])
@pytest.mark.parametrize("name", MADE)
def test_what_is_reported_is_what_ranks_wait_in_a_training(name: str, rule: Any) -> None:
    """A function of an index tells the same as a sequence, of whole batches, too."""
    make, options = MADE[name]
    of_batch = summed if rule == "sum" else padded
    report = audit(make(), 4, epochs=1, cost=Cost(COSTS, of=rule, window=8), **options)
    assert report.ok
    (epoch,) = report.epochs
    assert epoch.unbalanced == pytest.approx(ratio(by_hand(make(), 4, of_batch, **options)))
    with_cost = {"cost": Cost(COSTS, of=rule, window=8)}
    assert epoch.imbalance == pytest.approx(ratio(by_hand(make(), 4, of_batch, **options, **with_cost)))
    assert epoch.imbalance < epoch.unbalanced  # type: ignore[operator]  # known where costs are
    (plainly,) = audit(make(), 4, epochs=1, **options).epochs
    assert epoch.steps == plainly.steps
    by_function = audit(make(), 4, epochs=1, cost=Cost(cost_of_index, of=rule, window=8), **options)
    assert by_function.epochs == report.epochs


def test_costs_are_those_of_the_loaders_own_dataset() -> None:
    """As for the patch: of a ``Subset`` one for each of its indices, in its order, however many lie below."""
    chosen = np.random.default_rng(0).permutation(1000)[:MANY]
    given = plain(batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    inner = Subset(Untouchable(1000), chosen[::-1].tolist())
    subset = DataLoader(Subset(inner, range(MANY)[::-1]), 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    whole = audit(given, 4, epochs=1, cost=COSTS)
    for cost in (COSTS, cost_of_index):
        found = audit(subset, 4, epochs=1, cost=cost)
        assert found.epochs == whole.epochs


def test_a_factorys_costs_are_those_of_the_dataset_below_subsets() -> None:
    def of_a_subset(rank: int, ranks: int) -> DataLoader[Any]:
        return DataLoader(Subset(Untouchable(104), range(rank, 104, ranks)), 4)

    report = audit(of_a_subset, 4, epochs=1, cost=np.arange(104) % 4)  # which is each index' rank
    assert report.epochs[0].imbalance == 2  # a mean of 1.5 for each sample, and 3 on rank 3


def test_the_first_steps_of_a_long_epoch_are_balanced_as_they_are_in_the_epoch() -> None:
    """A sample ends within a window, which is dealt whole all the same."""
    steps, given = 10, plain(batch_size=2, shuffle=True)
    report = audit(given, 4, epochs=1, cost=COSTS, max_items=2 * steps)
    drawn: DataLoader[Any] = DataLoader(range(MANY), batch_size=2, shuffle=True)  # type: ignore[arg-type]  # a sequence is a dataset
    first = by_hand(drawn, 4, summed, cost=COSTS)[:, :steps]
    assert report.is_sample
    (epoch,) = report.epochs
    assert epoch.steps == (steps,) * 4
    assert epoch.imbalance == pytest.approx(ratio(first))
    assert ratio(first) < 1.05 < 1.2 < epoch.unbalanced  # type: ignore[operator]  # known where costs are


# What is judged.
