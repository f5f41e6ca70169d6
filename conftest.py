"""What holds for all tests, of which the code blocks of the Markdown pages are some (see tests/documented.py)."""

import os
import sys
from pathlib import Path

import pytest
from documented import blocks
from hypothesis import settings
from sybil import Sybil
from sybil.integration.pytest import SybilItem

if "DDP_PATCH_DIST" in os.environ:
    # nox has installed the package that it built, and pytest has put this folder, which holds its source, before it.
    sys.path.remove(str(Path(__file__).parent))

settings.register_profile("untimed", deadline=None)  # the machine may be busy with something else
settings.load_profile("untimed")

pytest_collect_file = Sybil(parsers=[blocks], patterns=["*.md"]).pytest()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts Ray: that takes up to a minute, so it can be left out by ``-m "not ray"``."""
    for item in items:
        if isinstance(item, SybilItem) and "from_ray.py" in str(item.example.parsed):
            item.add_marker("ray")
