"""The tables of ``docs/frameworks.md`` are written from what the tests of frameworks measured."""

import multiprocessing
from typing import Any

import pytest
from frameworks.page import write_tables
from quick import OF_RANKS

# What most ranks import here, each for seconds, if the process that they are forked from has not done so.
FRAMEWORKS = ["transformers.trainer", "lightning.pytorch", "ignite.distributed", "ignite.engine", "torchdata"]
multiprocessing.set_forkserver_preload([*FRAMEWORKS, *OF_RANKS])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-frameworks", action="store_true", help="write what was measured into docs/frameworks.md")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Once all tests are done, which under xdist is in the process that started the others."""
    if not config.getoption("--write-frameworks"):
        return
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    calls = [report for report in reports if getattr(report, "when", None) == "call"]
    write_tables(dict(value for report in calls for name, value in report.user_properties if name == "frameworks"))
