"""The command that runs a script as it is: it starts the ranks, or takes those that a launcher has started."""

import argparse
import logging
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ddp_patch.errors import InvalidOptionError, WorldError
from ddp_patch.options import Options
from ddp_patch.patching import PatchOptions
from ddp_patch.running.context import running
from ddp_patch.running.launch import (
    drawn_seed,
    end_with_launcher,
    hidden,
    is_rank,
    is_started,
    made_equal,
    shadows,
    started,
    told,
)
from ddp_patch.running.loader_reports import Patterns, logger
from ddp_patch.running.one_process import OneProcessOptions
from ddp_patch.running.random_numbers import seed_all
from ddp_patch.running.recording import Recording, recorded
from ddp_patch.running.shadow import Voice, errors_reported, shadowed

__all__ = ["DESCRIPTION", "run"]


DESCRIPTION = "Run a script on several ranks, unedited: as one process trains, or each loader patched at its first use."
_EPILOG = "ddp-patch run -n 8 train.py --epochs 3 starts 8 ranks on this machine."


def run(arguments: Sequence[str]) -> None:
    """Run ``ddp-patch run`` with these arguments.

    It exits with 2 if an option is not valid; what the script raises is raised here. With ``-n``, where no launcher has
    started this process, it starts the ranks, and exits with the code of the one that failed first.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    recording = Recording.here()
    starts = not is_started() and (given.ranks is not None or given.check)
    try:
        if not given.is_module and not Path(given.target).exists():
            raise InvalidOptionError(f"there is no {given.target}. Pass a script's path, or -m and a module's name.")
        Options(seed=given.seed)
        drawn_seed()
        only, excepted, whole = Patterns("--only", given.only), Patterns("--except", given.excepted), given.whole
        default = "one" if is_started() or starts else ""
        is_one = not given.dry_run and (given.mode or default or _mode_of_ranks()) == "one"
        one_process = OneProcessOptions(Patterns("--whole", whole), given.sync_batchnorm) if is_one else None
        _require_sense(given, starts=starts, is_one=is_one)
    except (InvalidOptionError, WorldError) as error:
        parser.error(str(error))
    if starts and given.check and recording is None:
        from ddp_patch.running.check import check

        sys.exit(check(int(given.ranks), given.steps, given.target, arguments))
    if starts:
        ranks, kept = given.ranks, given.keep_shadows
        if recording is not None:
            ranks, kept = str(recording.ranks), recording.folder / "files"
        with made_equal(kept):
            sys.exit(started(ranks, arguments))
    with ExitStack() as stack:
        told_last: list[str] = []
        stack.callback(lambda: sys.stderr.write("".join(told_last)))
        if one_process is not None:
            voice = _begin(given, recording, stack)
            one_process = replace(one_process, on_error=voice.report_error)
        stack.enter_context(_told_on_stderr())
        is_first = told("RANK", "0") == "0"
        if is_first and one_process is not None and int(told("WORLD_SIZE", "1")) > 1 and recording is None:
            ranks = told("WORLD_SIZE")
            logger.info("Nobody has compared this script's %s ranks with one: add --check to do that.", ranks)
        seed: PatchOptions = {} if given.seed is None else {"seed": given.seed}
        summary = stack.enter_context(running(only, excepted, seed, one_process, dry_run=given.dry_run))
        try:
            names = _run_target(given.target, given.arguments, given.is_module)
        finally:
            if is_first:  # now, while the script's loaders, which count their passes, still exist
                told_last.append(f"ddp_patch:\n{summary}\n")
        del names


def _mode_of_ranks() -> str:
    """Return the mode where none is given and this command starts no ranks.

    Raises:
        WorldError: A launcher has started several.
    """
    if (ranks := told("WORLD_SIZE", "1")) != "1" and is_rank():
        raise WorldError(
            f"a launcher has started {ranks} ranks. Pass --mode one for a script that trains in one process, or --mode "
            "ranks for one that makes a process group: then each rank trains on its shard of each loader."
        )
    return "ranks"


def _require_sense(given: argparse.Namespace, *, starts: bool, is_one: bool) -> None:
    """Refuse options that do not go together, before anything starts.

    Raises:
        InvalidOptionError: Some do not.
        WorldError: Ranks were to be started where a launcher has started some, or several tasks know of no other.
    """
    if not is_rank() and (tasks := os.environ.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
        raise WorldError(
            f"srun has started {tasks} tasks, which do not know of each other: let it start torchrun on each node, as "
            "docs/gpu.md shows, with -m ddp_patch run in the script's place."
        )
    if starts and is_rank() and told("WORLD_SIZE") != "1":
        raise WorldError(
            f"-n {given.ranks}: a launcher has started this process as rank {told('RANK')} of {told('WORLD_SIZE')}. "
            "Leave -n out, to be that rank; or unset RANK and WORLD_SIZE, to start ranks of this machine alone."
        )
    if given.check and (not (given.ranks or "").isdecimal() or int(given.ranks) < 2 or not is_one):
        raise InvalidOptionError(
            "--check: pass the number of ranks to compare with one, as -n 4; for --mode one alone."
        )
    path: Path | None = given.keep_shadows
    if path is not None and (file := next((each for each in (path, *path.parents) if each.is_file()), None)):
        raise InvalidOptionError(f"--keep-shadows {path}: {file} is a file. Pass the path of a folder.")
    if unused := [name for name in ("whole", "sync_batchnorm", "keep_shadows") if getattr(given, name) and not is_one]:
        listed = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        raise InvalidOptionError(f"{listed}: only where ranks train as one process, which -n or --mode one asks for.")


def _begin(given: argparse.Namespace, recording: Recording | None, stack: ExitStack) -> Voice:
    """Let ranks start alike, the first one speak, and the others write elsewhere, until the stack closes."""
    rank, ranks = int(told("RANK", "0")), int(told("WORLD_SIZE", "1"))
    voice = Voice(rank, given.keep_shadows, sees_rank=not is_started())
    stack.enter_context(errors_reported(voice, at_once=is_started()))
    if is_started():
        end_with_launcher()
        folder = shadows()
        stack.enter_context(hidden())
        if ranks > 1 or recording is not None:
            kept = given.keep_shadows is not None or recording is not None
            stack.enter_context(shadowed(rank, folder, keep=kept, writes=recording is None))
    seed_all(drawn_seed() if given.seed is None else given.seed)
    if recording is not None:
        stack.enter_context(recorded(recording, rank))
    return voice


def _run_target(target: str, arguments: Sequence[str], is_module: bool) -> dict[str, object]:
    """Run a file as ``python target arguments...``, or a module as ``python -m target arguments...``: as ``__main__``.

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
    parser = argparse.ArgumentParser("ddp-patch run", description=DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument(
        "-n",
        "--nproc-per-node",
        dest="ranks",
        metavar="N",
        help="Start so many ranks on this machine (as torchrun takes it). On several machines, start it by torchrun.",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="TARGET is a module, as python -m has it.")
    parser.add_argument(
        "--check",
        action="store_true",
        help="Run the script's first steps on one rank and on N, say whether they are the same, and exit with 0 or 1.",
    )
    parser.add_argument("--steps", type=int, default=20, metavar="INT", help="How many steps to check (20).")
    parser.add_argument(
        "--mode",
        choices=["one", "ranks"],
        help="Train as one process (one), the default with -n; or each rank on its shard (ranks), of a script that "
        "makes a process group.",
    )
    place: dict[str, Any] = {"action": "append", "default": [], "metavar": "FILE[:LINE]"}
    parser.add_argument("--only", **place, help="Patch only loaders that are made there; may be repeated.")
    parser.add_argument("--except", dest="excepted", **place, help="Do not patch loaders made there; may be repeated.")
    parser.add_argument("--dry-run", action="store_true", help="Patch nothing; only report what would be done.")
    parser.add_argument("--seed", type=int, metavar="INT", help="What orders follow from; as one process, all numbers.")
    one = parser.add_argument_group("as one process")
    one.add_argument("--whole", **place, help="Never divide loaders that are made there; may be repeated.")
    one.add_argument("--sync-batchnorm", action="store_true", help="Put SyncBatchNorm in the place of BatchNorm.")
    one.add_argument(
        "--keep-shadows", type=Path, metavar="FOLDER", help="Keep there what ranks other than 0 print and write."
    )
    parser.add_argument("target", metavar="TARGET", help="The script's path, or with -m the module's name.")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="The script's own arguments.")
    return parser


@contextmanager
def _told_on_stderr() -> Iterator[None]:
    """Print what is logged about loaders, whatever the script does with its own logs."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("ddp_patch: %(message)s"))
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
