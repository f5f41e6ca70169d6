"""The command that runs a script as it is: it starts the ranks, or takes those that a launcher has started."""

import argparse
import logging
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

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
    take_slurm,
    told,
)
from ddp_patch.running.loader_reports import Patterns
from ddp_patch.running.one_process import Mode, OneProcessOptions
from ddp_patch.running.random_numbers import seed_all
from ddp_patch.running.recording import Recording, recorded
from ddp_patch.running.session import logger
from ddp_patch.running.shadow import shadowed
from ddp_patch.running.voice import Voice, errors_reported

__all__ = ["DESCRIPTION", "run"]


# Options of torchrun that are handed on to it as they are.
_HANDED_ON = (
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
DESCRIPTION = "Run a script on several ranks, unedited: as one process trains, or each loader patched at its first use."
_EPILOG = "ddp-patch run -n 8 train.py --epochs 3 starts 8 ranks on this machine."


def run(arguments: Sequence[str]) -> None:
    """Run ``ddp-patch run`` with these arguments.

    It exits with 2 if an option is not valid; what the script raises is raised here. With ``-n``, where no launcher has
    started this process, it starts the ranks, and exits with the code of the one that failed first.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    if not given.is_module and not Path(given.target).exists():
        parser.error(f"there is no {given.target}. Pass the path of a script, or -m and the name of a module.")
    try:
        take_slurm()
        Options(seed=given.seed)  # before ranks are started, as all that follows
        drawn_seed()
        _require_folder(given.keep_shadows)
    except (InvalidOptionError, WorldError) as error:
        parser.error(str(error))
    handed_on = [f"--{name}={value}" for name in _HANDED_ON if (value := getattr(given, name.replace("-", "_")))]
    if not is_started() and (given.ranks is not None or given.check):
        _start(parser, given, handed_on, arguments)
    if handed_on:
        parser.error(f"{', '.join(handed_on)}: a launcher's options need -n, and that no launcher has started this.")
    may_be_one = (given.mode == "one" or (given.mode == "auto" and is_rank())) and not given.dry_run
    if not may_be_one and (unused := [name for name in _OF_ONE_PROCESS if getattr(given, name)]):
        listed = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        parser.error(f"{listed}: only where ranks train as one process, which -n or --mode one asks for.")
    with ExitStack() as stack:
        told_last: list[str] = []
        stack.callback(lambda: sys.stderr.write("".join(told_last)))
        try:
            one_process = _one_process(given, stack) if may_be_one else None
            stack.enter_context(_told_on_stderr())
            patterns = Patterns(given.only, given.excepted)
            seed: PatchOptions = {} if given.seed is None else {"seed": given.seed}
            summary = stack.enter_context(running(patterns, seed, one_process, dry_run=given.dry_run))
        except (InvalidOptionError, WorldError) as error:
            parser.error(str(error))
        try:
            names = _run_target(given.target, given.arguments, given.is_module)
        finally:
            if told("RANK", "0") == "0":  # now, while the script's loaders, which count their passes, still exist
                told_last.append(f"ddp_patch:\n{summary}\n")
        del names


def _start(
    parser: argparse.ArgumentParser, given: argparse.Namespace, handed_on: Sequence[str], arguments: Sequence[str]
) -> None:
    """Start the ranks, and exit with the code of the one that failed first; with ``--check``, with its verdict."""
    if is_rank() and told("WORLD_SIZE") != "1":
        parser.error(
            f"-n {given.ranks}: a launcher has started this process as rank {told('RANK')} of {told('WORLD_SIZE')}. "
            "Leave -n out, to be that rank; or unset RANK and WORLD_SIZE, to start ranks of this machine alone."
        )
    recording = Recording.here()
    if given.check and recording is None:
        if not (given.ranks or "").isdecimal() or int(given.ranks) < 2 or given.mode == "ranks" or given.dry_run:
            parser.error("--check: pass the number of ranks to compare with one, as -n 4; it is for --mode one alone.")
        from ddp_patch.running.check import check

        sys.exit(check(int(given.ranks), given.steps, given.target, arguments))
    ranks, kept = given.ranks, given.keep_shadows
    if recording is not None:
        ranks, kept = str(recording.ranks), recording.folder / "files"
    with made_equal(kept):
        sys.exit(started(ranks, handed_on, arguments))


def _require_folder(path: Path | None) -> None:
    """Refuse a folder that cannot be made, because it or one that it lies in is a file."""
    if path is not None and (file := next((each for each in (path, *path.parents) if each.is_file()), None)):
        raise InvalidOptionError(f"--keep-shadows {path}: {file} is a file. Pass the path of a folder.")


_OF_ONE_PROCESS = ("whole", "sync_batchnorm", "keep_shadows")


def _one_process(given: argparse.Namespace, stack: ExitStack) -> OneProcessOptions:
    """Return how ranks train as one process; let the first one speak, and the others write elsewhere."""
    rank, ranks = int(told("RANK", "0")), int(told("WORLD_SIZE", "1"))
    recording = Recording.here()
    voice = Voice(rank, given.keep_shadows, sees_rank=not is_started())
    stack.enter_context(errors_reported(voice, at_once=is_started()))
    if is_started():  # else the script may make a process group
        end_with_launcher()
        folder = shadows()
        stack.enter_context(hidden())
        if ranks > 1 or recording is not None:
            kept = given.keep_shadows is not None or recording is not None
            stack.enter_context(shadowed(rank, folder, keep=kept, writes=recording is None))
    seed = drawn_seed() if given.seed is None else given.seed
    seed_all(seed)
    if recording is not None:
        stack.enter_context(recorded(recording, rank))

    def decided(mode: Mode) -> None:
        if mode is Mode.ONE_PROCESS:
            voice.silence()
            if rank == 0 and ranks > 1 and recording is None:
                logger.info("Nobody has compared this script's %d ranks with one: add --check to do that.", ranks)
            return
        voice.release()
        if rank == 0:
            logger.info("The script has made a process group: each rank trains on its shard of each loader.")
        if given.seed is None and torch.initial_seed() == seed:
            seed_all(None)

    return OneProcessOptions(
        mode=Mode.ONE_PROCESS if given.mode == "one" else Mode.UNDECIDED,
        whole=Patterns(given.whole),
        sync_batchnorm=given.sync_batchnorm,
        on_decision=decided,
        on_error=voice.report_error,
    )


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
        help="Start so many ranks on this machine (as torchrun takes it), where no launcher has started some.",
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
        choices=["auto", "one", "ranks"],
        default="auto",
        help="Train as one process (one), or each rank on its shard (ranks). Default: one with -n, else by whether the "
        "script has made a process group when it first uses a loader or makes an optimizer.",
    )
    place: dict[str, Any] = {"action": "append", "default": [], "metavar": "FILE[:LINE]"}
    parser.add_argument("--only", **place, help="Patch only loaders that are made there; may be repeated.")
    parser.add_argument("--except", dest="excepted", **place, help="Do not patch loaders made there; may be repeated.")
    parser.add_argument("--dry-run", action="store_true", help="Patch nothing; only report what would be done.")
    parser.add_argument("--seed", type=int, metavar="INT", help="What orders follow from; as one process, all numbers.")
    one = parser.add_argument_group("as one process", "Of a script that makes no process group.")
    one.add_argument("--whole", **place, help="Never divide loaders that are made there; may be repeated.")
    one.add_argument("--sync-batchnorm", action="store_true", help="Put SyncBatchNorm in the place of BatchNorm.")
    one.add_argument(
        "--keep-shadows", type=Path, metavar="FOLDER", help="Keep there what ranks other than 0 print and write."
    )
    several = parser.add_argument_group("several machines", "Options of torchrun, which -n hands on to it.")
    for name in _HANDED_ON:
        several.add_argument(f"--{name}", metavar="...")
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
