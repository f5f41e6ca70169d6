"""Every code block of the Markdown pages is a test too; tests/documented.py says of what."""

import pytest
from documented import blocks
from sybil import Sybil
from sybil.integration.pytest import SybilItem

pytest_collect_file = Sybil(parsers=[blocks], patterns=["*.md"]).pytest()
collect_ignore = ["docs/examples/ci"]  # a project of its own, whose tests tests/unit/test_ci_page.py runs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts Ray: that takes up to a minute, so it can be left out by ``-m "not ray"``."""
    for item in items:
        if isinstance(item, SybilItem) and "from_ray.py" in str(item.example.parsed):
            item.add_marker("ray")
