"""Ray Train goes on within an epoch after a node is lost: docs/examples/frameworks/ray_elastic.py."""

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from clusters import CLUSTER, taken

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "frameworks" / "ray_elastic.py"
pytestmark = pytest.mark.ray


def wait_for(is_there: Any, process: subprocess.Popen[bytes], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not is_there():
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


def test_a_node_is_lost_and_two_workers_go_on_within_the_epoch(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("PYTHONSAFEPATH", None)
    address, lose = tmp_path / "address", tmp_path / "lose"
    command = [sys.executable, "-c", CLUSTER, str(address), str(lose)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path, env=environment) as cluster:  # noqa: S603 - ours
        try:
            wait_for(address.exists, cluster, 120)
            environment["RAY_ADDRESS"] = address.read_text()
            command = [sys.executable, str(EXAMPLE), str(tmp_path)]
            with subprocess.Popen(command, cwd=tmp_path, env=environment) as job:  # noqa: S603 - ours
                try:
                    # In the middle of the first epoch, two steps after a checkpoint.
                    wait_for(lambda: max((each["steps"] for each in taken(tmp_path)), default=0) >= 10, job, 120)
                    lose.touch()
                    assert job.wait(240) == 0
                finally:
                    job.kill()
        finally:
            cluster.communicate(b"", 60)
    steps = taken(tmp_path)
    assert {each["world"] for each in steps} == {2, 3}
    # Counted from the checkpoint from which the two went on: each sample of an epoch comes once.
    first_of_two = min(each["steps"] for each in steps if each["world"] == 2)
    kept = [each for each in steps if each["world"] == 2 or each["steps"] < first_of_two]
    again = [each for each in steps if each["world"] == 3 and each["steps"] >= first_of_two]
    for epoch in range(2):
        counted = Counter(index for each in kept if each["epoch"] == epoch for index in each["indices"])
        assert counted == Counter(range(120))
    # What is trained again is what came after that checkpoint: Ray may not have kept the newest one or two.
    assert 0 < len({each["steps"] for each in again}) <= 3 * 4
