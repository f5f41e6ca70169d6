"""The commands of the audit, and how they say what they refuse."""

import json
import linecache
import os
import re
import shlex
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TypeAlias, get_args

import click
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.progress import Progress
from rich.table import Table

from _ddp_patch_command import INTERRUPTED
from ddp_patch.auditing.auditing import audit
from ddp_patch.auditing.finding import find, look_up
from ddp_patch.auditing.judge_problems import problem_kinds, sentence
from ddp_patch.auditing.show_report import Provenance, Report, Reports, page
from ddp_patch.errors import DDPPatchError, RanksFailedError, explain
from ddp_patch.loaders.hooks import OURS, places_recorded
from ddp_patch.options import Layout, Order, Share, Uneven
from ddp_patch.running.command import DESCRIPTION, run

__all__ = ["commands", "refusal_text"]


_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = {"site-packages", "dist-packages"}
_Line: TypeAlias = tuple[str, int, str]  # a file, a line's number, and the function

# The last line of this package's own messages.
_SECTION = re.compile(r"\nCauses and remedies: python -m ddp_patch explain \w+\Z")
_RANK = re.compile(r"^--- (rank \d+) (.+) ---$", re.MULTILINE)
_FRAME = re.compile(r'^ *File "(.+)", line (\d+),? in (.+)$', re.MULTILINE)


def refusal_text(error: BaseException, shows_traceback: bool = False) -> str:
    """Return an error's type, message and notes, where in the user's code it was raised, and where to look it up.

    Args:
        error: The error.
        shows_traceback: Whether to return the traceback instead, on lines of its own, from the user's code on.
    """
    if shows_traceback:
        return f"\n{_traceback(error)}"
    try:
        message = str(error)
    except Exception as other:  # noqa: BLE001 - the user's own class
        message = f"its message cannot be shown: its __str__ raised {type(other).__name__}"
    section = _SECTION.search(message)
    message = _SECTION.sub("", message)
    place = _place(error)
    if isinstance(error, RanksFailedError):
        lines = _of_ranks(message)
    else:
        lines = [sentence(f"{type(error).__name__}: {message}" if message else type(error).__name__)]
    lines += [*map(sentence, getattr(error, "__notes__", [])), *place]
    if place or not isinstance(error, DDPPatchError) or isinstance(error, RanksFailedError):
        lines.append("Pass --traceback to see all of it.")
    return "\n".join(lines + ([section[0].strip()] if section else []))


def _traceback(error: BaseException) -> str:
    """Return the whole traceback but for this package's own lines, which led to the first one of the user's."""
    step = error.__traceback__
    while step is not None and not _is_users(step.tb_frame.f_code.co_filename):
        step = step.tb_next
    shown = traceback.format_exception(type(error), error, step or error.__traceback__)
    return "".join(shown).rstrip()


def _place(error: BaseException) -> list[str]:
    """Return in words the line of code that raised, if it is known."""
    if isinstance(error, SyntaxError) and error.filename:
        return [f"  {error.filename}:{error.lineno}: {(error.text or '').strip()}"]
    lines = [(frame.filename, frame.lineno or 0, frame.name) for frame in _frames(error)]
    return _innermost(lines, or_installed=not isinstance(error, DDPPatchError))


def _frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """Yield an error's lines from the innermost on, then those of the error that it came from."""
    seen: set[int] = set()
    other: BaseException | None = error
    while other is not None and id(other) not in seen:
        seen.add(id(other))
        yield from reversed(traceback.extract_tb(other.__traceback__))
        other = other.__cause__ or (None if other.__suppress_context__ else other.__context__)


def _innermost(lines: Sequence[_Line], or_installed: bool = True) -> list[str]:
    """Return in words the first line of the user's own code; where there is none, of a package that is installed."""
    shown = [line for line in lines if _is_users(line[0])]
    if or_installed:
        shown += [line for line in lines if _is_installed(line[0])]
    return [f"  {file}:{number}, in {name}: {linecache.getline(file, number).strip()}" for file, number, name in shown][
        :1
    ]


def _is_installed(file: str) -> bool:
    return bool(_INSTALLED & {*Path(file).parts}) and not file.startswith(OURS)


def _is_users(file: str) -> bool:
    """Tell whether it is neither ours, torch's, Python's nor an installed package's, and stands in a file."""
    return not (file.startswith(("<", *OURS, _STANDARD)) or _is_installed(file))


def _of_ranks(message: str) -> list[str]:
    """Return how the ranks ended, and of each one's report the error and the line that raised it."""
    head, *reports = _RANK.split(message)
    lines = [f"RanksFailedError: {head.strip()}"]
    for rank, fate, report in zip(*[iter(reports)] * 3, strict=True):
        found = [(file, int(number), name) for file, number, name in _FRAME.findall(report)]
        if fate == "raised":  # a traceback, whose innermost line is its last; a stack of a rank that hangs begins there
            found.reverse()
        text = report.strip().splitlines()
        last = max((i for i, line in enumerate(text) if line.startswith(" ")), default=-1)
        said = " ".join(text[last + 1 :]) if fate in ("raised", "died") else fate
        lines += [f"{rank}: {sentence(_SECTION.sub('', said))}", *_innermost(found)]
    return lines


_PASS, _FAIL = 0, 1
_COULD_NOT = 2  # click exits with this for wrong usage, too
_STDOUT, _STDERR = 1, 2
_PASSED_ON = "Passed on to patch_dataloader_to_ddp; see docs/options.md."
_PADDING = "Whether samples may be repeated to fill the last round; use --no-padding for an evaluation."


@contextmanager
def _refusing(shows_traceback: bool) -> Iterator[None]:
    """Turn any error into a few lines and exit code 2, and an interrupt into one word and exit code 130."""
    try:
        yield
    except (click.exceptions.Exit, click.ClickException):
        raise
    except KeyboardInterrupt as error:
        raise _ended("\nInterrupted", INTERRUPTED) from error
    except (Exception, SystemExit) as error:
        between = "" if shows_traceback else " "
        raise _ended(f"Could not run:{between}{refusal_text(error, shows_traceback)}", _COULD_NOT) from error


def _ended(text: str, exit_code: int) -> SystemExit:
    """Say on stderr why the command ends, and return what ends it."""
    click.echo(text, err=True)
    return SystemExit(exit_code)


@contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Send what targets print to stderr, in the processes that they start, too: stdout is for the report."""
    sys.stdout.flush()
    kept = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, _STDOUT)
        os.close(kept)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ddp-patch")
def commands() -> None:
    """Patch the DataLoaders of a script, or show on one machine what every rank would get of a loader."""


@commands.command("run", help=DESCRIPTION, context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(arguments: tuple[str, ...]) -> None:
    """Run a script; the start of the command does so without click."""
    run(arguments)


@commands.command("explain")
@click.argument("names", nargs=-1)
def explain_command(names: tuple[str, ...]) -> None:
    """Show causes and remedies of an error or warning, such as RankMismatchError."""
    explain(names)  # the start of the command does so without click


def _one_of(values: Any) -> click.Choice[str]:
    """Return an option type that takes the values of a Literal."""
    return click.Choice(get_args(values))


@commands.command("audit")
@click.argument("target")
@click.option("--world-size", "-w", type=click.IntRange(1), required=True, help="The number of ranks.")
@click.option(
    "--epochs", "-e", type=click.IntRange(1), default=2, show_default=True, help="How many epochs to simulate."
)
@click.option("--patch/--no-patch", default=True, help="Patch loaders first (the default), or audit them as they are.")
@click.option("--patched", is_flag=True, help="Show each loader before and after the patch, side by side.")
@click.option("--set-epoch", is_flag=True, help="The training calls set_epoch(epoch) before each epoch.")
@click.option("--padding/--no-padding", default=True, help=_PADDING)
@click.option("--epochs-differ", is_flag=True, help="Fail unless every epoch has another order.")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice([*problem_kinds]),
    help="Problem kinds to ignore; give it several times.",
)
@click.option("--cost", metavar="TARGET", help="What samples cost: a sequence, a function of an index, or a Cost.")
@click.option("--max-items", type=click.IntRange(1), help="Items per rank; else 16 million of all ranks together.")
@click.option("--processes", is_flag=True, help="Use real ranks, processes of a gloo group.")
@click.option("--timeout", type=float, default=120.0, show_default=True, help="Seconds that real ranks may take.")
@click.option("--uneven", type=_one_of(Uneven), help=_PASSED_ON)
@click.option("--layout", type=_one_of(Layout), help=_PASSED_ON)
@click.option("--order", type=_one_of(Order), help=f"{_PASSED_ON} 'leader' needs --processes.")
@click.option("--seed", type=click.IntRange(0), help=_PASSED_ON)
@click.option("--share", type=_one_of(Share), help=_PASSED_ON)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "markdown"]),
    default="text",
    show_default=True,
    help="How to print the report.",
)
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with pictures, too.")
@click.option("--traceback", is_flag=True, help="Show the whole traceback of an error.")
def audit_command(
    target: str, world_size: int, cost: str | None, form: str, html: Path | None, traceback: bool, **given: Any
) -> None:
    """Show what every rank would get of TARGET: package.module:name or path/to/file.py:name.

    TARGET names a loader, a function make() that returns one, a function make(rank, world_size) that returns one rank's
    loader, or a dict or list of these.

    Exits with 0 if all pass, 1 if one fails (with --patched: once it is patched), 2 if the audit could not run, and 130
    if it was interrupted.
    """
    if html is not None and not html.parent.is_dir():  # look before the work, which may take long
        text = f"Could not run: There is no folder {html.parent} for the page. Make it, or pass another --html."
        raise _ended(text, _COULD_NOT)
    # Pass only options that are given: the others have their defaults there, and without a patch none may be passed.
    chosen = {name: value for name, value in given.items() if value is not None}
    with _refusing(traceback), _stdout_as_stderr(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries may warn while they make loaders, which is no finding
        with places_recorded():  # so that reports can say where a loader was made
            if cost is not None:
                chosen["cost"] = look_up(cost)[1]
            found = find(target)
        reports = _audited(found, world_size, chosen)
    with _refusing(traceback):
        _print_if_read(_text(reports, form))
        if html is not None:  # last, so that the report is there if the page cannot be written
            command = shlex.join(["ddp-patch", *sys.argv[1:]])
            html.write_text(page(reports, Provenance(command)), encoding="utf-8")
    sys.exit(_PASS if reports.verdict else _FAIL)


def _audited(found: Mapping[str, Any], world_size: int, options: dict[str, Any]) -> Reports:
    """Audit all loaders that were found with a progress bar, and return their reports by place."""
    reports: dict[str, Report] = {}
    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        for place, loader in found.items():
            task = bar.add_task(escape(place), total=None)

            def progress(done: int, total: int, task: Any = task) -> None:
                bar.update(task, completed=done, total=total)

            reports[place] = audit(loader, world_size, progress=progress, **options)
    return Reports(reports)


def _print_if_read(text: str) -> None:
    """Print a text; if what reads it has gone, as ``head`` does, leave the rest out."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), _STDOUT)  # Python flushes stdout at its end, too


def _text(reports: Reports, form: str) -> str:
    """Return reports in the form that was asked for."""
    if form == "json":
        return json.dumps(reports.to_dict(), indent=2)
    if form == "markdown":
        return reports.to_markdown()
    console = Console()
    with console.capture() as captured:
        for place, report in reports.items():
            for name, each in report.before_and_after(place).items():
                console.print(_table(name, each))
    return captured.get().removesuffix("\n")


def _table(place: str, report: Report) -> Group:
    """Return a report as a table with its problems below."""
    mark = "[bold green]✔ PASS[/]" if report.ok else "[bold red]✘ FAIL[/]"
    title = f"{escape(place)} on {report.world_size} ranks: {mark}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in report.facts():
        table.add_row(escape(name), escape(value))
    below: list[RenderableType] = []
    for problem in report.problems:
        text = f"{escape(problem.what)} {escape(problem.why)}\n[bold]Remedy:[/] {escape(problem.remedy)}"
        below += [f"[bold red]✘ {problem.kind}[/] ({problem.where})", Padding(text, (0, 0, 0, 2))]
    return Group(table, *below, "")
