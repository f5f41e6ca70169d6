"""For pytest: the fixture ``ddp_audit``, and a guard against unpatched loaders on several ranks.

It stands beside the package, because importing a module of a package imports the package: so pytest's start imports
neither ``ddp_patch`` nor torch, and a test that uses neither never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

__all__ = ["ddp_audit", "pytest_addoption", "pytest_configure"]


@pytest.fixture
def ddp_audit() -> Callable[..., Any]:
    """Audit a loader as ``ddp_patch.audit`` does, and fail the test with the report if it does not pass.

    ``ddp_audit(loader, world_size=8, epochs=2, padding=False)``: all options are those of ``audit``.
    """
    from ddp_patch.auditing import audit

    def audit_or_fail(loader: Any, world_size: int = 2, **expect: Any) -> Any:
        report: Any = audit(loader, world_size, **expect)
        if not report.ok:
            pytest.fail(str(report), pytrace=False)
        return report

    return audit_or_fail


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option and the setting that guard every test."""
    text = "fail a test in which an unpatched DataLoader is iterated on one of several ranks"
    parser.getgroup("ddp_patch").addoption("--ddp-guard", action="store_true", help=text)
    parser.addini("ddp_guard", text, type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Announce the marker; where every test is guarded, write down from now on where loaders are made."""
    config.addinivalue_line(
        "markers", "ddp_guard: fail if an unpatched DataLoader is iterated while several ranks are up"
    )
    if _guards_all(config):
        from ddp_patch.loaders.hooks import places_recorded

        recorded = ExitStack()
        recorded.enter_context(places_recorded())
        config.add_cleanup(recorded.close)


def _guards_all(config: pytest.Config) -> bool:
    return bool(config.getoption("--ddp-guard") or config.getini("ddp_guard"))


@pytest.fixture(autouse=True)
def _ddp_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    if _guards_all(request.config) or request.node.get_closest_marker("ddp_guard") is not None:
        from ddp_patch.testing.ranks import guarded

        with guarded():
            yield
    else:
        yield
