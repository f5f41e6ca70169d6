"""Runs docs/examples/resume.py under torch's elastic agent, with ranks that are killed.

``python elastic.py LAUNCHES`` does what ``torchrun --standalone`` does, once for each launch, in one process, because
importing torch takes longer than what is launched.
"""

import io
import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, TypedDict

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "resume.py"


class Death(TypedDict):
    """How a rank is killed.

    Attributes:
        rank: Which.
        how: "step": ``delay`` seconds after it has told the samples of its ``at``-th step. "soon": so long after its
            process began, or at that step. Or while it saves its ``at``-th checkpoint: "writing", with half of it
            written; "written", before it is in its place; "replaced", after.
    """

    rank: int
    how: str
    at: int
    delay: float


class Launch(TypedDict):
    """One start of the agent, which starts as many ranks again after each death but the last."""

    folder: str
    kind: str
    world: int
    deaths: list[Death]


def launch(planned: Launch) -> list[int]:
    """Run the example; return the exit codes of the ranks that failed last, if it did not come to its end."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=planned["world"],
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max(0, len(planned["deaths"]) - 1),
        monitor_interval=0.05,
        start_method="forkserver",
    )
    try:
        elastic_launch(config, run_rank)(planned)
    except ChildFailedError as error:
        return [failure.exitcode for failure in error.failures.values()]
    return []


def run_rank(planned: Launch) -> None:
    """What a rank's process does: the example, and it dies if it is to."""
    restart, deaths = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), planned["deaths"]
    if restart < len(deaths) and deaths[restart]["rank"] == int(os.environ["RANK"]):
        prepare(deaths[restart], partial(die, planned["folder"], deaths[restart]))
    sys.argv = [str(EXAMPLE), planned["folder"], planned["kind"]]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def die(folder: str, death: Death) -> None:
    with Path(folder, "deaths").open("a") as file:
        file.write(json.dumps(death) + "\n")
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def prepare(death: Death, die: Callable[[], None]) -> None:
    """Have this process killed at a moment that one of its calls tells."""
    import torch

    at = death["at"]
    lines = at + 1 if death["rank"] == 0 else at  # the first rank has told before that it starts
    match death["how"]:
        case "step":
            os.fsync = at_call(lines, os.fsync, then=Timer(death["delay"], die).start)
        case "soon":
            Timer(death["delay"], die).start()
            os.fsync = at_call(lines, os.fsync, then=die)
        case "writing":
            torch.save = at_call(at, torch.save, first=partial(write_half, torch.save, die))
        case "written":
            os.replace = at_call(at, os.replace, first=lambda *_: die())
        case "replaced":
            os.replace = at_call(at, os.replace, then=die)


def at_call(
    number: int,
    function: Callable[..., Any],
    first: Callable[..., None] = lambda *_: None,
    then: Callable[[], None] = lambda: None,
) -> Any:
    """The function, which at its ``number``-th call does something first and something then."""
    calls = iter(range(1, sys.maxsize))

    def counted(*arguments: Any) -> None:
        now = next(calls) == number
        if now:
            first(*arguments)
        function(*arguments)
        if now:
            then()

    return counted


def write_half(save: Callable[..., Any], die: Callable[[], None], what: Any, file: Path) -> None:
    save(what, memory := io.BytesIO())
    file.write_bytes(memory.getvalue()[: memory.tell() // 2])
    die()


def main(launches: list[Launch]) -> None:
    # Ranks are forked from a process that has imported what they need, and has no threads and no group.
    multiprocessing.set_forkserver_preload(["torch._dynamo", "torch.nn.parallel", "ddp_patch"])
    for planned in launches:
        print(json.dumps(launch(planned)), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
