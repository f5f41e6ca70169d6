"""The Python examples of the Markdown pages are tests too, and so is what pages say that ``ddp-patch`` prints."""

from console_blocks import ConsoleParser
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser(), ConsoleParser()], patterns=["*.md"]).pytest()
collect_ignore = ["docs/examples/ci"]  # a project of its own, whose tests tests/unit/test_ci_page.py runs
