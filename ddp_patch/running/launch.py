"""Start the ranks of a script by torch's own launcher, or take those that a launcher or SLURM has started."""

import logging
import os
import sys
from collections.abc import Sequence
from zlib import crc32

from ddp_patch.errors import WorldError

__all__ = ["HANDED_ON", "OF_RANK", "is_rank", "started", "take_slurm"]


# Options of torchrun that are handed on to it as they are.
HANDED_ON = (
    "nnodes",
    "node-rank",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "master-addr",
    "master-port",
    "max-restarts",
    "local-addr",
)
OF_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_rank() -> bool:
    """Return whether a launcher has started this process as one of several, or as the only one."""
    return all(name in os.environ for name in OF_RANK)


def take_slurm() -> None:
    """Set what torchrun would set, if ``srun`` has started this process as one task of several.

    Raises:
        WorldError: SLURM does not say where the first task is.

    Source:
        The environment of srun's tasks, as its manual names it.
    """
    told = os.environ
    # A batch script has SLURM_PROCID and SLURM_NTASKS, too; the number of a step's tasks has only what srun started.
    tasks = told.get("SLURM_STEP_NUM_TASKS", "1")
    if is_rank() or "SLURM_PROCID" not in told or int(tasks) < 2:
        return
    nodes = told.get("SLURM_STEP_NODELIST", told.get("SLURM_NODELIST", ""))
    first = told.get("MASTER_ADDR") or (told.get("SLURM_LAUNCH_NODE_IPADDR") if "[" in nodes or "," in nodes else nodes)
    if not first:
        raise WorldError(
            "srun has started this process as one of several tasks, and neither MASTER_ADDR nor "
            "SLURM_LAUNCH_NODE_IPADDR says where the first one is. Set MASTER_ADDR to the name of its node."
        )
    told["RANK"], told["WORLD_SIZE"] = told["SLURM_PROCID"], tasks
    told["LOCAL_RANK"], told["MASTER_ADDR"] = told.get("SLURM_LOCALID", "0"), first
    told.setdefault("MASTER_PORT", str(20_000 + crc32(told.get("SLURM_JOB_ID", "0").encode()) % 10_000))


def started(ranks: str, handed_on: Sequence[str], arguments: Sequence[str]) -> int:
    """Start ranks that run ``ddp-patch run`` with these arguments, and wait for them.

    Args:
        ranks: How many on this machine, as ``--nproc-per-node`` takes it.
        handed_on: Options of torchrun; all ranks are on this machine if none says where others are.
        arguments: Those of each rank's command.

    Returns:
        The exit code of the rank that failed first; 0 if none did, and 128 and its number if a signal ended it.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import run as run_ranks

    logging.disable(logging.ERROR)  # the launcher's own words about what the ranks have said
    cores = os.cpu_count() or 1
    if ranks.isdecimal():
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // max(1, int(ranks)))))
    is_alone = not any(each.startswith(("--nnodes", "--rdzv", "--master")) for each in handed_on)
    where = [*handed_on, *(["--standalone"] if is_alone else [])]
    command = [f"--nproc-per-node={ranks}", *where, "-m", "ddp_patch", "run", *arguments]
    try:
        run_ranks(get_args_parser().parse_args(command))  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code: int = failure.exitcode
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        sys.stderr.write(f"ddp_patch: rank {rank} ended first, by {how}.\n")
        return code if code >= 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
