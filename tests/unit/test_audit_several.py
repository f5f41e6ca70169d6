"""Several loaders in one audit."""

from typing import Any

import audit_setups as setups
import pytest
import torch
from messages import raises
from torch.utils.data import DataLoader
from zoo import loader

from ddp_patch import audit
from ddp_patch.auditing import Report, Reports
from ddp_patch.errors import AuditError, InvalidOptionError, NotALoaderError


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
