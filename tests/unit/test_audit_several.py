"""Audits of several loaders, of data that each rank has of its own, and of many ranks."""

import re
from typing import Any

import audit_setups as setups
import pytest
import torch
from audit_parts import RIGHT, WORLD, WRONG, N
from audit_setups import Untouchable
from messages import missing, raises
from torch.utils.data import DataLoader, Subset
from zoo import ALL_KINDS, Kind, loader

from ddp_patch import audit
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


def test_a_function_without_arguments_is_called() -> None:
    report: Report = audit(lambda: loader(), 2)
    assert report.ok
    reports = audit(lambda: {"train": loader(), "val": loader()}, 2, patch=False)
    assert [report.problems[0].kind for report in reports.values()] == ["not_sharded"] * 2


def test_a_factory_may_return_several() -> None:
    def make(rank: int, world_size: int) -> dict[str, Any]:
        return {"train": setups.torchs(rank, world_size), "val": (setups.uneven(rank, world_size),)}

    reports = audit(make, 4)
    assert [(place, report.problems[0].kind) for place, report in reports.items()] == [
        ("train", "same_order"),
        ("val[0]", "uneven_steps"),
    ]
    assert reports["val[0]"].name == "make.val[0]"


def test_what_holds_no_loader_is_refused() -> None:
    with raises(NotALoaderError, ("holds no loader", "{}"), "one"):
        audit({}, 2)
    with raises(NotALoaderError, ("val[1] is", "7 (int)"), "loader"):
        audit({"val": [loader(), 7]}, 2)
    with raises(InvalidOptionError, "a.b", "names"):
        audit({"a.b": loader(), "a": {"b": loader()}}, 2)


def test_random_states_stay_where_loaders_are_made() -> None:
    def make() -> list[DataLoader[Any]]:
        torch.rand(3)
        return [loader()]

    before = torch.get_rng_state()
    audit(make, 2)
    assert torch.equal(before, torch.get_rng_state())


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
