"""The command ``ddp-patch run``: it starts ranks, or is a rank of a launcher, and runs the script."""

import argparse
import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ddp_patch.errors import InvalidOptionError
from ddp_patch.options import Options
from ddp_patch.running import launch
from ddp_patch.running.autopatching import EachRank, Summary, logger
from ddp_patch.running.one_process import OneProcess
from ddp_patch.running.random_numbers import seed_all

DESCRIPTION = "Run a script on several ranks, unedited: as one process trains, or each loader patched at its first use."
_EPILOG = "ddp-patch run -n 8 train.py --epochs 3 starts 8 ranks on this machine."


def run(arguments: Sequence[str]) -> None:
    """Run ``ddp-patch run`` with these arguments.

    The exit code is 2 if an option is not valid. With ``-n``, ranks are started, and the exit code is that of the rank
    that failed first. Without, errors of the script are raised here.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    starts = not launch.is_started() and (given.nproc_per_node is not None or not _is_here(given))
    is_one = (given.mode or ("one" if starts or launch.is_started() else "ranks")) == "one"
    wrong = [*_mistakes(given, starts=starts, is_one=is_one)]
    try:
        options = Options(seed=given.seed)
        session: Summary = EachRank({}, options, {"--only": given.only}, {"--except": given.excepted})
    except InvalidOptionError as error:
        wrong.append(str(error))
    if wrong:
        parser.error(wrong[0])
    with ExitStack() as stack:
        if starts:
            stack.enter_context(_started(given, arguments, is_one=is_one))
        rank, told_last = launch.rank(), list[str]()
        stack.callback(lambda: sys.stderr.write("".join(told_last)))
        if is_one:
            show = stack.enter_context(launch.rank_zero_speaks(rank))
            session = OneProcess(options, on_error=show, checked=given.steps if given.check else 0)
            launch.hide()
            if launch.is_started():
                launch.end_with_launcher()
            seed_all(launch.drawn_seed() if given.seed is None else given.seed)
        _tell_on_stderr(stack)
        stack.enter_context(session.running())
        try:
            names = _run_target(given.training_script, given.training_script_args, given.module)
        finally:
            if rank == 0:  # now, while the script's loaders, which count their passes, still exist
                told_last.append(f"ddp_patch:\n{session}\n")
        del names


def _mistakes(given: argparse.Namespace, *, starts: bool, is_one: bool) -> Iterator[str]:
    """Yield sentences on options that do not go together."""
    launched = launch.ranks() if launch.is_rank() else 1
    tasks = "1" if launch.is_rank() else os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if not given.module and not Path(given.training_script).exists():
        yield f"there is no {given.training_script}. Pass a script's path, or -m and a module's name."
    if tasks != "1":
        yield (
            f"srun has started {tasks} tasks, which do not know of each other: let it start torchrun on each node, as "
            "docs/gpu.md shows, with -m ddp_patch run in the script's place."
        )
    if starts and launched > 1:
        yield (
            f"-n {given.nproc_per_node}: a launcher has started this process as rank {launch.rank()} of {launched}. "
            "Leave -n out, to be that rank; or unset RANK and WORLD_SIZE, to start ranks of this machine alone."
        )
    elif not (launch.is_started() or given.mode) and launched > 1:
        yield (
            f"a launcher has started {launched} ranks. Pass --mode one for a script that trains in one process, or "
            "--mode ranks for one that makes a process group: then each rank trains on its shard of each loader."
        )
    if given.check and (not is_one or given.nproc_per_node == "1"):
        yield "--check: pass the number of ranks to be checked, as -n 4; for --mode one alone."
    if is_one and (given.only or given.excepted):
        yield "--only and --except choose loaders to be sharded, and as one process none is. Pass --mode ranks, too."


def _started(given: argparse.Namespace, arguments: Sequence[str], *, is_one: bool) -> AbstractContextManager[None]:
    """Start ranks, and exit with their exit code. A single rank is this process, if strings hash as in other runs."""
    if is_one and given.nproc_per_node == "1" and launch.hashes_alike() and _is_here(given):
        return launch.alone()
    with launch.made_equal():
        sys.exit(launch.started(given, arguments))


def _is_here(given: argparse.Namespace) -> bool:
    """Return whether all ranks are on this machine."""
    return given.nnodes in launch.ONE_NODE


def _run_target(target: str, arguments: Sequence[str], is_module: bool) -> dict[str, object]:
    """Run a file as ``python target`` does, or a module as ``python -m target`` does.

    First in ``sys.path`` is the file's folder, or the current one. ``sys.argv[0]`` is the file, the module's too.

    Returns:
        The global names of what ran.
    """
    folder = Path.cwd() if is_module else Path(target).resolve().parent
    # What started this process has put the current folder, or that of its own script, first; unless it was told not to.
    path = [str(folder), *sys.path[not sys.flags.safe_path :]]
    with patch.object(sys, "argv", [target, *arguments]), patch.object(sys, "path", path):
        if is_module:
            return runpy.run_module(target, run_name="__main__", alter_sys=True)
        return runpy.run_path(target, run_name="__main__")


def _parser() -> argparse.ArgumentParser:
    """Return torchrun's parser with more options."""
    from torch.distributed.run import get_args_parser

    parser = argparse.ArgumentParser(
        "ddp-patch run",
        usage="ddp-patch run [options] [torchrun's options] [-m] training_script ...",
        description=f"{DESCRIPTION} Its own options come last, after torchrun's.",
        epilog=_EPILOG,
        parents=[get_args_parser()],
        add_help=False,  # torchrun's parser has it
        allow_abbrev=False,
    )
    add: Callable[..., Any] = parser.add_argument
    add("-n", dest="nproc_per_node", metavar="N", help="Start so many ranks on this machine: --nproc-per-node.")
    add("--check", action="store_true", help="Compare all that ranks do in the first steps, write nothing, and end.")
    add("--steps", type=int, default=20, metavar="INT", help="How many steps to check (20).")
    modes = "Train as one process, the default with -n; or each rank on its shard, of a script that makes a group."
    add("--mode", choices=["one", "ranks"], help=modes)
    place: dict[str, Any] = {"action": "append", "default": [], "metavar": "FILE[:LINE]"}
    add("--only", **place, help="With --mode ranks: patch only loaders that are made there; may be repeated.")
    add("--except", dest="excepted", **place, help="With --mode ranks: do not patch these; may be repeated.")
    seeds = "What orders follow from; as one process, all random numbers. Else DDP_PATCH_SEED."
    add("--seed", type=int, default=os.environ.get("DDP_PATCH_SEED"), metavar="INT", help=seeds)
    parser.set_defaults(nproc_per_node=None)
    return parser


def _tell_on_stderr(stack: ExitStack) -> None:
    """Print the package's log on stderr, until the stack closes."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("ddp_patch: %(message)s"))
    stack.enter_context(patch.multiple(logger, propagate=False, handlers=[handler]))
    stack.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.INFO)
