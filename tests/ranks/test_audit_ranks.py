"""The audit on real ranks finds what differs between processes only."""

import audit_setups as setups
import pytest
from zoo import loader

from ddp_patch import InvalidOptionError, audit


def test_a_patched_loader_holds_on_real_ranks() -> None:
    report = audit(loader(shuffle=True), 2, processes=True)
    assert report.ok
    assert report.seeds_agree
    assert "on real ranks" in report.how


def test_the_order_of_a_set_of_strings_differs_between_processes_only() -> None:
    assert audit(setups.by_set, 2, epochs=1).ok
    report = audit(setups.by_set, 2, epochs=1, processes=True)
    assert [problem.kind for problem in report.problems] == ["ranks_disagree"]
    assert "agreement='leader'" in report.problems[0].remedy


def test_what_a_leader_sends_is_audited_on_real_ranks() -> None:
    report = audit(loader(shuffle=True), 2, processes=True, agreement="leader")
    assert report.ok
    assert report.epochs_differ


def test_what_cannot_be_sent_to_other_processes_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="processes=True sends what it audits"):
        audit(lambda rank, world_size: setups.torchs(rank, world_size), 2, processes=True)
