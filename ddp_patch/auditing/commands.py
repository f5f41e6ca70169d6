"""The command line with click: the commands, and how their errors are shown."""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from _ddp_patch_command import INTERRUPTED
from ddp_patch.auditing.auditing import audit
from ddp_patch.auditing.finding import find, line_of, look_up
from ddp_patch.auditing.problems import problem_kinds
from ddp_patch.auditing.report import Reports, annotation, page
from ddp_patch.errors import DDPPatchError, InvalidOptionError, explain
from ddp_patch.loaders.hooks import places_recorded
from ddp_patch.options import Layout, Share, Uneven
from ddp_patch.running.command import DESCRIPTION, run

_FORMS = click.Choice(["text", "json", "markdown", "github"])
_PASSED_ON = "Passed on to patch_dataloader_to_ddp; see docs/api.md."
_COST = (
    "What samples cost: a sequence, a function of an index, or a Cost. Give it several times for several loaders, such "
    "as train=file.py:lengths."
)
_PADDING = "Whether samples may be repeated to fill the last round; use --no-padding for an evaluation."


@contextmanager
def _refusing(shows_traceback: bool) -> Iterator[None]:
    """While entered, turn an error into a few lines and exit code 2, an interrupt into one word and exit code 130."""
    try:
        yield
    except (click.exceptions.Exit, click.ClickException):
        raise
    except KeyboardInterrupt as error:
        click.echo("\nInterrupted", err=True)
        raise SystemExit(INTERRUPTED) from error
    except (Exception, SystemExit) as error:
        if shows_traceback:
            lines = ["\n", *traceback.format_exception(error)]
        else:
            more = [] if isinstance(error, DDPPatchError) else ["Pass --traceback to see where."]
            lines = traceback.format_exception_only(error) + more
        click.echo(f"Could not run: {''.join(lines).rstrip()}", err=True)
        raise SystemExit(2) from error  # click also exits with 2 for wrong usage


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ddp-patch")
def commands() -> None:
    """Patch the DataLoaders of a script, or show on one machine what every rank would get of a loader."""


@commands.command("run", help=DESCRIPTION, context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(arguments: tuple[str, ...]) -> None:
    """Run a script. ``__main__`` does the same without click."""
    run(arguments)


@commands.command("explain")
@click.argument("names", nargs=-1)
def explain_command(names: tuple[str, ...]) -> None:
    """Show causes and remedies of an error or warning, such as RankMismatchError."""
    explain(names)  # __main__ does the same without click


def _one_of(values: Any) -> click.Choice[str]:
    """Return an option type that takes the values of a Literal."""
    return click.Choice(get_args(values))


@commands.command("audit")
@click.argument("target")
@click.option("--world-size", "-w", type=click.IntRange(2), required=True, help="The number of ranks.")
@click.option("--epochs", "-e", type=click.IntRange(1), default=2, show_default=True, help="How many epochs to draw.")
@click.option("--patch/--no-patch", default=True, help="Patch loaders first (the default), or audit them as they are.")
@click.option("--set-epoch", is_flag=True, help="The training calls set_epoch(epoch) before each epoch.")
@click.option("--padding/--no-padding", default=True, help=_PADDING)
@click.option("--epochs-differ", is_flag=True, help="Fail unless every epoch has another order.")
@click.option("--allow", multiple=True, type=click.Choice(problem_kinds), help="A problem to ignore; may come again.")
@click.option("--cost", "costs", metavar="[LOADER=]TARGET", multiple=True, help=_COST)
@click.option("--max-items", type=click.IntRange(1), help="Items per rank; else 16 million of all ranks together.")
@click.option("--uneven", type=_one_of(Uneven), help=_PASSED_ON)
@click.option("--layout", type=_one_of(Layout), help=_PASSED_ON)
@click.option("--seed", type=click.IntRange(0), help=_PASSED_ON)
@click.option("--share", type=_one_of(Share), help=_PASSED_ON)
@click.option("--format", "form", type=_FORMS, default="text", show_default=True, help="How to print the report.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with pictures, too.")
@click.option("--traceback", "shows_traceback", is_flag=True, help="Show the whole traceback of an error.")
def audit_command(
    target: str,
    world_size: int,
    costs: tuple[str, ...],
    form: str,
    html: Path | None,
    shows_traceback: bool,
    **given: Any,
) -> None:
    """Show what every rank would get of TARGET: package.module:name or path/to/file.py:name.

    TARGET names a loader, a function make() that returns one, a function make(rank, world_size) that returns one rank's
    loader, or a dict or list of these.

    Exits with 0 if all pass, 1 if one fails, 2 if the audit could not run, and 130 if it was interrupted.
    """
    # Pass only the options that the user chose: audit() has defaults, and without a patch it takes no other options.
    chosen = {name: value for name, value in given.items() if value is not None}
    with _refusing(shows_traceback), redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of libraries that build loaders are no findings
        with places_recorded():
            found = find(target)
        cost_of = _costs(costs, [*found])
        reports = Reports()
        for place, loader in found.items():
            own = {"cost": cost_of[place]} if place in cost_of else {}
            try:
                reports[place] = audit(loader, world_size, **chosen, **own)
            except Exception as error:
                error.add_note(f"The loader is {place}.")
                raise
    try:
        click.echo(_text(reports, form, {place: line_of(loader) for place, loader in found.items()}))
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does, which changes no verdict
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout at its end, too
    with _refusing(shows_traceback):
        if html is not None:  # last, so that the report is printed even if the page cannot be written
            html.write_text(page(reports), encoding="utf-8")
    sys.exit(0 if reports.ok else 1)


def _costs(given: Sequence[str], places: Sequence[str]) -> dict[str, Any]:
    """Return the costs that the user passed for loaders, by the loaders' places.

    Raises:
        InvalidOptionError: A cost is for a loader that does not exist, or for several loaders of the same name.
    """
    found: dict[str, Any] = {}
    for each in given:
        name, is_named, target = each.partition("=")
        if not is_named or ":" in name:
            found |= {place: look_up(each)[1] for place in places if place not in found}
            continue
        meant = [place for place in places if place == name or place.endswith(f".{name}")]
        if len(meant) != 1:
            raise InvalidOptionError(
                f"--cost {each} is for the loader {name}, of which there {'are several' if meant else 'is none'}. "
                f"Give one of these: {', '.join(meant or places)}."
            )
        found[meant[0]] = look_up(target)[1]
    return found


def _text(reports: Reports, form: str, lines: Mapping[str, str]) -> str:
    """Return reports as text in a form; ``lines`` says where each loader was constructed."""
    if form == "json":
        return json.dumps(reports.to_dict(), indent=2)
    if form == "markdown":
        return reports.to_markdown()
    if form == "github":
        return "\n".join(
            annotation(place, found, lines[place]) for place, report in reports.items() for found in report.problems
        )
    console = Console()
    with console.capture() as captured:
        widest = max(map(len, reports))
        for place, report in reports.items():
            if report.ok:
                line = f"[bold green]✓[/] {escape(place):{widest}}  {escape(report.summary)}"
                console.print(line, soft_wrap=True, highlight=False)
            else:
                title = f"[bold red]✘[/] {escape(place)} on {report.world_size} ranks"
                console.print(Panel(escape(report.details), title=title, title_align="left"))
    return captured.get().removesuffix("\n")
