"""Audit a loader in a test. The pytest plugin imports this module when a test asks for its fixture ``ddp_audit``."""

from typing import Any, Protocol

import pytest
from torch.utils.data import DataLoader

from ddp_patch.auditing.auditing import audit
from ddp_patch.auditing.draw.subject import Factory
from ddp_patch.auditing.report import Report

__all__ = ["DDPAudit", "audit_or_fail"]


class DDPAudit(Protocol):
    """Type the fixture ``ddp_audit``, for tests with type annotations."""

    def __call__(self, loader: DataLoader[Any] | Factory, world_size: int = 2, **expect: Any) -> Report:
        """Audit a loader, and fail the test if it does not pass."""


def audit_or_fail(loader: DataLoader[Any] | Factory, world_size: int = 2, **expect: Any) -> Report:
    """Audit a loader as ``ddp_patch.audit`` does, and fail the running test with the report if it does not pass.

    Args:
        loader: A loader or a factory, as in ``ddp_patch.audit``.
        world_size: The number of ranks.
        expect: The other arguments of ``ddp_patch.audit``.

    Returns:
        The report.
    """
    report = audit(loader, world_size, **expect)
    if not report.ok:
        pytest.fail(str(report), pytrace=False)
    return report
