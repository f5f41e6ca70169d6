"""The Python examples of the Markdown pages are tests too, and so is what pages say that ``ddp-patch`` prints."""

from typing import Any

import pytest
from console_blocks import ConsoleParser
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser(), ConsoleParser()], patterns=["*.md"]).pytest()
collect_ignore = ["docs/examples/ci"]  # a project of its own, whose tests tests/unit/test_ci_page.py runs


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a page's examples to one worker, in order, because later ones use what earlier ones define."""
    from xdist.scheduler import LoadScopeScheduling

    class PagesTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            page, is_page, _ = nodeid.partition(".md::")
            return page if is_page else nodeid

    return PagesTogether(config, log)
