"""Every code block of the Markdown pages is a test too; tests/documented.py says of what."""

from documented import blocks
from sybil import Sybil

pytest_collect_file = Sybil(parsers=[blocks], patterns=["*.md"]).pytest()
