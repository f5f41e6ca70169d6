"""Audit a loader in a test. The pytest plugin imports this module when a test asks for its fixture ``ddp_audit``."""

from typing import Any, Protocol, overload

import pytest

from ddp_patch.auditing.auditing import Loader, Loaders, audit
from ddp_patch.auditing.show_report import Report, Reports

__all__ = ["DDPAudit", "audit_or_fail"]


class DDPAudit(Protocol):
    """Type the fixture ``ddp_audit``, for tests with type annotations."""

    @overload
    def __call__(self, loader: Loader, world_size: int = 2, **expect: Any) -> Report: ...
    @overload
    def __call__(self, loader: Loaders, world_size: int = 2, **expect: Any) -> Reports: ...


@overload
def audit_or_fail(loader: Loader, world_size: int = 2, **expect: Any) -> Report: ...
@overload
def audit_or_fail(loader: Loaders, world_size: int = 2, **expect: Any) -> Reports: ...
def audit_or_fail(loader: Any, world_size: int = 2, **expect: Any) -> Report | Reports:
    """Audit a loader as ``ddp_patch.audit`` does, and fail the running test with the report if it does not pass.

    Args:
        loader: A loader, a factory, or a dict or list of them, as in ``ddp_patch.audit``.
        world_size: The number of ranks.
        expect: The other arguments of ``ddp_patch.audit``.

    Returns:
        The report, or the reports of several loaders.
    """
    report: Report | Reports = audit(loader, world_size, **expect)
    if not report.verdict:
        pytest.fail(str(report), pytrace=False)
    return report
