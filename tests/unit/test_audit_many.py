"""The audit of many ranks: some iterate their loaders, and the others' shares are cut from what one process gets."""

from typing import Any

import audit_setups as setups
import pytest
from audit_setups import Untouchable
from torch.utils.data import DataLoader
from zoo import ALL_KINDS, Kind

from ddp_patch import audit
from ddp_patch.auditing import Report, world
from ddp_patch.auditing.ranks import Rank
from ddp_patch.plan import Plan

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
