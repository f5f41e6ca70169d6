"""The command that runs a script as it is: it starts the ranks, or takes those that a launcher has started."""

import argparse
import logging
import os
import runpy
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, cast, get_args
from unittest.mock import patch
from zlib import crc32

import torch

from ddp_patch.errors import InvalidOptionError, WorldError
from ddp_patch.options import Options, Order, Share, Uneven
from ddp_patch.patching import PatchOptions
from ddp_patch.running.context import HEADINGS, Summary, running
from ddp_patch.running.gradients import Loss
from ddp_patch.running.launch import OF_RANK, hidden, is_rank, told
from ddp_patch.running.loader_reports import Patterns
from ddp_patch.running.one_process import Mode, OneProcessOptions, group_made
from ddp_patch.running.random_numbers import seed_all
from ddp_patch.running.session import logger
from ddp_patch.running.shadow import shadowed
from ddp_patch.running.voice import Voice, errors_reported
from ddp_patch.validation import shown

__all__ = ["DESCRIPTION", "process_group", "run", "take_slurm"]


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
# The environment's names of: the seed that was drawn for all ranks of a run; that -n has started this process; where
# the files of ranks but the first one lie, if they begin with the script.
_SEED, _STARTED, _SHADOWS = "DDP_PATCH_SEED", "DDP_PATCH_STARTED", "DDP_PATCH_SHADOWS"


def take_slurm() -> None:
    """Set what torchrun would set, if ``srun`` has started this process as one task of several.

    Raises:
        WorldError: SLURM does not say where the first task is.

    Source:
        The environment of srun's tasks, as its manual names it.
    """
    environment = os.environ
    # A batch script has SLURM_PROCID and SLURM_NTASKS, too; the number of a step's tasks has only what srun started.
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if is_rank() or "SLURM_PROCID" not in environment or int(tasks) < 2:
        return
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", ""))
    first = environment.get("MASTER_ADDR") or (
        environment.get("SLURM_LAUNCH_NODE_IPADDR") if "[" in nodes or "," in nodes else nodes
    )
    if not first:
        raise WorldError(
            "srun has started this process as one of several tasks, and neither MASTER_ADDR nor "
            "SLURM_LAUNCH_NODE_IPADDR says where the first one is. Set MASTER_ADDR to the name of its node."
        )
    environment["RANK"], environment["WORLD_SIZE"] = environment["SLURM_PROCID"], tasks
    environment["LOCAL_RANK"], environment["MASTER_ADDR"] = environment.get("SLURM_LOCALID", "0"), first
    environment.setdefault("MASTER_PORT", str(20_000 + crc32(environment.get("SLURM_JOB_ID", "0").encode()) % 10_000))


def _started(ranks: str, handed_on: Sequence[str], arguments: Sequence[str]) -> int:
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


@contextmanager
def _made_equal(given: argparse.Namespace) -> Iterator[None]:
    """Let all that should be equal on the ranks start equal, while they run: seeds, hashes, the file system."""
    folder = tempfile.mkdtemp(prefix="ddp_patch-") if given.keep_shadows is None else str(given.keep_shadows.resolve())
    equal = {_STARTED: "1", _SHADOWS: folder, _SEED: os.environ.get(_SEED, str(secrets.randbelow(2**31)))}
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        equal["PYTHONHASHSEED"] = "0"
    alone = {name: text for name, text in os.environ.items() if name not in OF_RANK}
    try:
        with patch.dict(os.environ, {**alone, **equal}, clear=True):
            yield
    finally:
        if given.keep_shadows is None:
            shutil.rmtree(folder, ignore_errors=True)


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


@contextmanager
def process_group(backend: str) -> Iterator[None]:
    """Make a process group of the ranks that torchrun started, and destroy it at the end.

    Raises:
        WorldError: The environment does not say which rank this is.
    """
    if missing := [name for name in OF_RANK if name not in os.environ]:
        raise WorldError(
            f"--init-process-group {backend} makes a process group from torchrun's environment, which lacks "
            f"{', '.join(missing)}. Start with torchrun --nproc-per-node N -m ddp_patch run ..."
        )
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # so that "cuda" is this rank's own
    with group_made(backend):
        yield


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
    options = {name: getattr(given, name) for name in _SWITCHES if getattr(given, name) is not None}
    try:
        take_slurm()
        Options(**options)  # before ranks are started, as all that follows
        _drawn_seed()
        _require_folder(given.keep_shadows)
    except (InvalidOptionError, WorldError) as error:
        parser.error(str(error))
    handed_on = [f"--{name}={value}" for name in _HANDED_ON if (value := getattr(given, name.replace("-", "_")))]
    if given.ranks is not None and not _is_started():
        _start(parser, given, handed_on, arguments)
    if handed_on:
        parser.error(f"{', '.join(handed_on)}: a launcher's options need -n, and that no launcher has started this.")
    may_be_one = (given.mode == "one" or (given.mode == "auto" and is_rank())) and not given.dry_run
    unused = [name for name in _OF_ONE_PROCESS if getattr(given, name) != parser.get_default(name)]
    with ExitStack() as stack:
        try:
            one_process, seed = None, given.manual_seed
            if may_be_one and given.backend is None:
                one_process = _one_process(given, stack)
                seed = _drawn_seed() if seed is None else seed
            elif unused:
                listed = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
                parser.error(f"{listed}: only where ranks train as one process, which -n or --mode one asks for.")
            if given.backend is not None:
                stack.enter_context(process_group(given.backend))
            stack.enter_context(_told_on_stderr())
            if seed is not None:
                seed_all(seed)
            patterns = Patterns(given.only, given.excepted)
            patching = running(patterns, cast("PatchOptions", options), one_process, dry_run=given.dry_run)
            summary = stack.enter_context(patching)
        except (InvalidOptionError, WorldError) as error:
            parser.error(str(error))
        try:
            names = _run_target(given.target, given.arguments, given.is_module)
        finally:
            _print(summary)  # while the script's loaders, which count their passes, still exist
        del names


def _start(
    parser: argparse.ArgumentParser, given: argparse.Namespace, handed_on: Sequence[str], arguments: Sequence[str]
) -> NoReturn:
    """Start the ranks, and exit with the code of the one that failed first."""
    if is_rank() and told("WORLD_SIZE") != "1":
        parser.error(
            f"-n {given.ranks}: a launcher has started this process as rank {told('RANK')} of {told('WORLD_SIZE')}. "
            "Leave -n out, to be that rank; or unset RANK and WORLD_SIZE, to start ranks of this machine alone."
        )
    with _made_equal(given):
        sys.exit(_started(given.ranks, handed_on, arguments))


def _is_started() -> bool:
    """Return whether ``-n`` has started this process."""
    return os.environ.get(_STARTED) is not None and is_rank()


_OF_ONE_PROCESS = ("loss", "whole", "shard_evaluation", "sync_batchnorm", "keep_shadows")


def _drawn_seed() -> int:
    """Return a seed that is the same on every rank of this run."""
    if (said := os.environ.get(_SEED)) is None:
        named = [told(name) for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
        return crc32(":".join(named).encode())
    if not (said.isascii() and said.isdecimal() and len(said) < 20):
        raise InvalidOptionError(
            f"{_SEED}={shown(said)} is not a whole number of at least 0, and the script's random numbers are seeded by "
            f"it on every rank. Set it to such a number, or leave it out: unset {_SEED}."
        )
    return int(said)


def _require_folder(path: Path | None) -> None:
    """Refuse a folder that cannot be made, because it or one that it lies in is a file."""
    if path is not None and (file := next((each for each in (path, *path.parents) if each.is_file()), None)):
        raise InvalidOptionError(f"--keep-shadows {path}: {file} is a file. Pass the path of a folder.")


def _one_process(given: argparse.Namespace, stack: ExitStack) -> OneProcessOptions:
    """Return how ranks train as one process; let the first one speak, and the others write elsewhere."""
    rank, is_one_of_several = int(told("RANK", "0")), told("WORLD_SIZE", "1") != "1"
    voice = Voice(rank, given.keep_shadows)
    stack.enter_context(errors_reported(voice, sees_rank=not _is_started()))
    if _is_started():  # else the script may make a process group
        stack.enter_context(hidden())
        if is_one_of_several:
            stack.enter_context(shadowed(rank, os.environ[_SHADOWS], keep=given.keep_shadows is not None))

    def decided(mode: Mode) -> None:
        if mode is Mode.ONE_PROCESS:
            voice.silence()
            return
        voice.release()
        if told("RANK", "0") == "0":
            logger.info("The script has made a process group: each rank trains on its shard of each loader.")
        if given.manual_seed is None and torch.initial_seed() == _drawn_seed():
            seed_all(None)

    return OneProcessOptions(
        mode=Mode.ONE_PROCESS if given.mode == "one" else Mode.UNDECIDED,
        loss=given.loss,
        shard_evaluation=given.shard_evaluation,
        whole=Patterns(given.whole),
        sync_batchnorm=given.sync_batchnorm,
        on_decision=decided,
    )


# The options of sharding that a command line can give, each with its arguments for argparse.
_SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "share": {"choices": get_args(Share)},
    "uneven": {"choices": get_args(Uneven)},
    "seed": {"type": int, "metavar": "INT"},
    "order": {"choices": get_args(Order)},
    "timeout": {"type": float, "metavar": "FLOAT"},
}


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
    parser.add_argument("--dry-run", action="store_true", help="Patch nothing; only report what would be done.")
    place: dict[str, Any] = {"action": "append", "default": [], "metavar": "FILE[:LINE]"}
    parser.add_argument("--only", **place, help="Patch only loaders that are made there; may be repeated.")
    parser.add_argument("--except", dest="excepted", **place, help="Do not patch loaders made there; may be repeated.")
    parser.add_argument(
        "--init-process-group",
        dest="backend",
        choices=["gloo", "nccl"],
        help="Make a process group for a script that makes none, and let each rank train on its shard.",
    )
    parser.add_argument(
        "--manual-seed",
        type=int,
        metavar="INT",
        help="Seed Python, numpy and torch alike on every rank first. With -n, a seed is drawn if none is given.",
    )
    one = parser.add_argument_group("as one process", "Of a script that makes no process group.")
    one.add_argument(
        "--mode",
        choices=["auto", "one", "ranks"],
        default="auto",
        help="Train as one process (one), or each rank on its shard (ranks). Default: by whether the script has made a "
        "process group when it first uses a loader or makes an optimizer.",
    )
    one.add_argument("--loss", choices=get_args(Loss), default="auto", help="What the loss is of a batch's samples.")
    one.add_argument("--whole", **place, help="Never divide loaders that are made there; may be repeated.")
    one.add_argument("--shard-evaluation", action="store_true", help="Divide loaders under no_grad, too.")
    one.add_argument("--sync-batchnorm", action="store_true", help="Put SyncBatchNorm in the place of BatchNorm.")
    one.add_argument(
        "--keep-shadows", type=Path, metavar="FOLDER", help="Keep there what ranks other than 0 print and write."
    )
    several = parser.add_argument_group("several machines", "Options of torchrun, which -n hands on to it.")
    for name in _HANDED_ON:
        several.add_argument(f"--{name}", metavar="...")
    group = parser.add_argument_group("how to share", "The options of patch_dataloader_to_ddp(), for all loaders.")
    for name, how in _SWITCHES.items():
        group.add_argument(f"--{name.replace('_', '-')}", default=None, **how)
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


def _print(summary: Summary) -> None:
    """Print a summary on the first rank: as a table of rich's on a terminal, as plain text elsewhere."""
    if told("RANK", "0") != "0":
        return
    if sys.stderr.isatty() and find_spec("rich") is not None:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console(stderr=True)
        if rows := summary.rows:
            table = Table(*HEADINGS, title="ddp_patch", title_justify="left")
            for row in rows:
                table.add_row(*map(escape, row))
            console.print(table)
        for note in summary.notes:
            console.print(f"[bold]ddp_patch:[/] {escape(note)}")
    else:
        sys.stderr.write("\n".join(["ddp_patch:", *str(summary).splitlines()]) + "\n")
    sys.stderr.flush()
