"""Kill a node of a job that restarts, and measure how long it takes until the others train on; writes a table.

Run it with ``nox -s restarts``. Three nodes train on one machine, within an epoch: agents of ``torchrun --nnodes 2:4``
under ``docs/examples/resume.py``, and a Ray cluster under ``docs/examples/frameworks/ray_elastic.py``. One is killed by
SIGKILL with its rank; ``docs/torchft.md`` holds the table.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from clusters import CLUSTER, taken
from pages import show_and_put

ROUNDS, LIMIT_S = 3, 300
DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "torchft.md"
# How soon agents notice that one is gone, and how long they wait for another to come.
CONF = {"keep_alive_interval": 1, "keep_alive_max_attempt": 3, "last_call_timeout": 2}
TORCHRUN = ["-m", "torch.distributed.run", "--nnodes=2:4", "--nproc-per-node=1", "--max-restarts=3"]
TORCHRUN += ["--rdzv-backend=c10d", "--monitor-interval=0.1"]


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    until = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > until:
            sys.exit(f"it takes longer than {LIMIT_S} s")
        time.sleep(0.005)


@contextmanager
def started(*command: object, environment: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a Python process in a session of its own, and end it with all that it has started."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.PIPE}
    with subprocess.Popen(  # noqa: S603 - torchrun, Ray and our own scripts
        [sys.executable, *map(str, command)], env={**environment}, start_new_session=True, **quiet
    ) as process:
        try:
            yield process
        finally:
            process.terminate()  # upon which agents end their ranks
            try:
                process.communicate(timeout=40)
            finally:
                process.kill()


def ranks_of(agent: int) -> list[int]:
    """Return the processes that a process has started."""
    of_threads = Path(f"/proc/{agent}/task").glob("*/children")
    return [int(child) for path in of_threads for child in path.read_text().split()]


@contextmanager
def with_torchrun(folder: Path) -> Iterator[Callable[[], None]]:
    """Train with three agents; yield what kills one and its rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    where = [f"--rdzv-endpoint=localhost:{port}", f"--rdzv-id={port}"]
    conf = ",".join(f"{name}={value}" for name, value in CONF.items())
    with ExitStack() as agents:
        for number in range(3):
            options = [*where, f"--rdzv-conf={conf},is_host={number == 0}"]
            command = [*TORCHRUN, *options, DOCS / "examples" / "resume.py", folder]
            agent = agents.enter_context(started(*command, environment=environment))

        def lose() -> None:
            for process in [agent.pid, *ranks_of(agent.pid)]:
                os.kill(process, signal.SIGKILL)

        yield lose


@contextmanager
def with_ray(folder: Path) -> Iterator[Callable[[], None]]:
    """Train on a Ray cluster of three nodes; yield what kills one."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    address, lose = folder / "address", folder / "lose"
    with started("-c", CLUSTER, address, lose, environment=environment):
        wait_for(address.exists)
        environment["RAY_ADDRESS"] = address.read_text()
        with started(DOCS / "examples" / "frameworks" / "ray_elastic.py", folder, environment=environment):
            yield lose.touch


def measured(job: Callable[[Path], Any], at_step: int) -> tuple[float, int]:
    """Return how many seconds a job takes from the loss of a node to the next step, and how many steps come again."""
    with TemporaryDirectory() as kept, job(folder := Path(kept)) as lose:
        wait_for(lambda: max((line["steps"] for line in taken(folder)), default=0) >= at_step)
        lose()
        began = time.monotonic()
        wait_for(lambda: any(line["world"] == 2 for line in taken(folder)))
        took_s = time.monotonic() - began
        of_two = min(line["steps"] for line in taken(folder) if line["world"] == 2)
        again = {line["steps"] for line in taken(folder) if line["world"] == 3 and line["steps"] >= of_two}
    return took_s, len(again)


def main() -> None:
    """Run all, and write the table."""
    rows = [["job of three nodes, of which one is killed", "kills", "s from kill to the next step", "steps done again"]]
    jobs = {
        "`torchrun --nnodes 2:4`, a checkpoint every 3 steps": with_torchrun,
        "Ray Train, a checkpoint every 4 steps": with_ray,
    }
    for name, job in jobs.items():
        plan = random.Random(7)
        found = []
        for _ in range(ROUNDS):
            found.append(measured(job, plan.randint(6, 14)))
            print(f"{name}: {found[-1][0]:.1f} s, {found[-1][1]} steps", flush=True)
        stops = sorted(took_s for took_s, _ in found)
        middle = f"{stops[ROUNDS // 2]:.1f} (at most {stops[-1]:.1f})"
        rows.append([name, str(ROUNDS), middle, str(sum(again for _, again in found))])
    conf = ", ".join(f"{name}={value}" for name, value in CONF.items())
    show_and_put(PAGE, "restarts", rows, f"torchrun with {conf}")


if __name__ == "__main__":
    main()
