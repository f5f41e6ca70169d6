"""The example of docs/evaluation.md, as a user starts it; the page shows what it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_shows_what_the_example_prints() -> None:
    """The example itself asserts that gathered metrics are those of one process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    run = subprocess.run(  # noqa: S603 - our own script
        [*command, "examples/evaluation.py"],
        cwd=DOCS,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    page = (DOCS / "evaluation.md").read_text()
    printed = re.findall(r"\d+\.\d{4}|^Batches.*$", run.stdout, re.MULTILINE)
    assert len(printed) == 12
    assert [found for found in printed if found not in page] == []
