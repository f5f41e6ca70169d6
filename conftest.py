"""The Python examples of the Markdown pages are tests too, and so is what pages say that ``ddp-patch`` prints."""

import pytest
from console_blocks import ConsoleParser
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser(), ConsoleParser()], patterns=["*.md"]).pytest()
collect_ignore = ["docs/examples/ci"]  # a project of its own, whose tests tests/unit/test_ci_page.py runs


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a page's examples on one worker, in order: later ones use what earlier ones define."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.path.suffix == ".md":
                item.add_marker(pytest.mark.xdist_group(str(item.path)))
