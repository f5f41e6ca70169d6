"""What the pytest plugin's fixture ``ddp_audit`` does; the plugin imports it when a test asks for the fixture."""

from typing import Any, Protocol

import pytest
from torch.utils.data import DataLoader

from ddp_patch.auditing.auditing import audit
from ddp_patch.auditing.draw.subject import Factory
from ddp_patch.auditing.report import Report

__all__ = ["DDPAudit", "audit_or_fail"]


class DDPAudit(Protocol):
    """What the fixture ``ddp_audit`` is, for tests that are typed."""

    def __call__(self, loader: DataLoader[Any] | Factory, world_size: int = 2, **expect: Any) -> Report:
        """Audit a loader; fail the test if something does not hold."""


def audit_or_fail(loader: DataLoader[Any] | Factory, world_size: int = 2, **expect: Any) -> Report:
    """Audit a loader as ``ddp_patch.audit`` does, and fail the running test with the report if something does not hold.

    Args:
        loader: As there.
        world_size: As there.
        expect: Its other arguments.

    Returns:
        The report.
    """
    report = audit(loader, world_size, **expect)
    if not report.ok:
        pytest.fail(str(report), pytrace=False)
    return report
