"""What holds for all tests, of which the Python examples of the Markdown pages are some."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from xdist.scheduler import LoadScopeScheduling

if "DDP_PATCH_DIST" in os.environ:
    # nox has installed the package that it built, and pytest has put this folder, which holds its source, before it.
    sys.path.remove(str(Path(__file__).parent))

settings.register_profile("untimed", deadline=None)  # the machine may be busy with something else
settings.load_profile("untimed")

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["*.md"]).pytest()


class PagesTogether(LoadScopeScheduling):
    """Sends a page's examples to one process, because each may use what those before it have made."""

    def _split_scope(self, nodeid: str) -> str:
        page, is_page, _ = nodeid.partition(".md::")
        return page if is_page else nodeid


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which a run may leave out
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> PagesTogether:
    """Share the tests among pytest-xdist's processes."""
    return PagesTogether(config, log)
