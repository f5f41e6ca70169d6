"""What holds for all tests, of which the code blocks of the Markdown pages are some (see tests/documented.py)."""

import gc
import os
import sys
from collections.abc import Generator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data._utils
from hypothesis import settings
from sybil import Sybil

if "DDP_PATCH_DIST" in os.environ:
    # nox has installed the package that it built, and pytest has put this folder, which holds its source, before it.
    sys.path.remove(str(Path(__file__).parent))

import quick
from compatibility import write_row
from documented import blocks  # which imports the package

from ddp_patch.testing.twins import server_of

# torch waits so long for a worker whose iterator the garbage collector ends, which may have lost the word to stop.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 1.0

settings.register_profile("untimed", deadline=None)  # the machine may be busy with something else
settings.load_profile("untimed")

pytest_collect_file = Sybil(parsers=[blocks], patterns=["*.md"]).pytest()
collect_ignore = ["docs/examples/ci"]  # a project of its own, whose tests tests/unit/test_pages.py runs


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the sessions minimum and newest keep what passed."""
    parser.addoption("--write-compatibility", metavar="SESSION", help="write what passed into docs/compatibility.md")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Once all tests are done, which under xdist is in the process that started the others."""
    session = config.getoption("--write-compatibility")
    if session and exitstatus == 0:
        write_row(session, *(len(terminalreporter.stats.get(outcome, ())) for outcome in ("passed", "skipped")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``soak`` unless ``-m`` asks for it.

    And of several processes, each of which is given a run of tests at first, let each begin with as many of real ranks.
    """
    if "soak" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.path.parent.name == "ranks"]
    short = [item for item in items if item.path.parent.name != "ranks"]
    ends = [place * len(short) // processes for place in range(processes + 1)]
    runs = [[*long[place::processes], *short[begin:end]] for place, (begin, end) in enumerate(pairwise(ends))]
    items[:] = chain.from_iterable(runs)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Leave out what is there before the first test from all garbage collections: they took a quarter of the time."""
    gc.disable()  # all that is imported now stays
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


class _OneServerForAll:
    """Lets the processes of xdist share the servers that ranks are forked from: each server imports for seconds."""

    @staticmethod
    def pytest_configure_node(node: Any) -> None:
        """Tell a process of xdist where the servers are that this process has started."""
        node.workerinput["servers"] = [(quick.address_of(rank), server_of(rank).environment) for rank in range(4)]


def pytest_configure(config: pytest.Config) -> None:
    """Start servers where whole folders are tested by several processes, or take those that are started."""
    if config.pluginmanager.hasplugin("dsession") and all(Path(arg).is_dir() for arg in config.args):
        config.pluginmanager.register(_OneServerForAll())
    for rank, (address, environment) in enumerate(getattr(config, "workerinput", {}).get("servers", ())):
        quick.take_server(rank, address, environment)
