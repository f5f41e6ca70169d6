"""What each code block of a Markdown page must hold to; ``conftest.py`` makes every block a test.

| block | what is tested |
| --- | --- |
| ``python`` | it runs, after the earlier ones; what it prints, raises and warns of is in the ``text`` block below it |
| ``console`` | each command after ``$`` runs at the top of the checkout, and prints to stdout what stands below |
| ``sh`` | it installs something, or runs nox or pytest; other commands are for ``console`` |
| any, below ``<!-- whole: FILE -->`` | it is that file (``part``: lines of it that follow each other) |
| ``diff``, below ``<!-- whole: OLD NEW -->`` | it is the difference between the two (``part``: lines of it) |

Files are named from the page's folder. A command that fails is followed by ``$ echo $?``. In what a page shows as
printed, ``...`` stands for what varies; or a regular expression does, in ``<!-- varies: EXPRESSION -->`` right above
the block. Any other block fails.

A console block that the README has, too, is tested there alone. A command with ``torchrun`` runs twice, both at once:
as it stands, and with ranks that are as unlike as those of several machines.
"""

import ast
import contextlib
import difflib
import doctest
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from sybil import Document, Example, Region
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from ddp_patch import DDPPatchError, DDPPatchWarning

__all__ = ["CHECKOUT", "blocks"]

CHECKOUT = Path(__file__).parents[1]
README = CHECKOUT / "README.md"
LIMIT_S = 240.0  # for one command
MOST_IN_A_LINE = 76  # of an error that a page shows: a phone shows half of that, a site all
SETTINGS = {
    "OMP_NUM_THREADS": "1",  # torchrun sets it by itself where it is unset, and warns about it
    "COLUMNS": "110",
    "NO_COLOR": "1",
    "PYTHONUTF8": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home folder
    "RAY_USAGE_STATS_ENABLED": "0",  # else it reports to its makers
}
TORCHRUN = re.compile(r"torchrun .*--nproc-per-node (\d+) ")
INSTALLS_OR_TESTS = re.compile(
    r"python3 -m venv \.venv|source \.venv/bin/activate|(\S+/)?(pip install .+|nox (-r )?-s .+|pytest -n auto .*)"
)
COMMENT = re.compile(r"<!-- (?P<what>whole|part|varies): (?P<value>[^\n]+?) -->\s*\Z")  # right above a block
find_fences = RawFencedCodeBlockLexer(re.compile(r"(?P<info>[^\n]*)\n"))
run_python = PythonEvaluator()
Run: TypeAlias = Callable[[str], tuple[int, str, str]]


def blocks(document: Document) -> Iterable[Region]:
    """Find every fenced block of a page; a parser of Sybil's."""
    for region in find_fences(document):
        region.parsed = region.lexemes["source"]
        region.evaluator = evaluate
        yield region


def evaluate(example: Example) -> str | None:
    """Test a block; return what is wrong with it, if anything is."""
    region, document = example.region, example.document
    if found := _declared(document, region, "whole", "part"):
        return _quoted(example, whole=found["what"] == "whole", names=found["value"].split())
    match language(region):
        case "python":
            return _python(example)
        case "text":
            above = _neighbour(document, region, -1)
            shows = above is not None and _is_python(document, above)
            return None if shows else "A text block shows what the python block right above it prints: there is none."
        case "console":
            if Path(example.path) != README and f"```console\n{region.parsed}```" in README.read_text():
                return None  # tested there
            varies = _declared(document, region, "varies")
            return _console(region.parsed, varies["value"] if varies else None)
        case "sh":
            return _sh(region.parsed)
        case other:
            return f"Nothing tests a block of this kind: {other or 'no language'}. See tests/documented.py."


def language(region: Region) -> str:
    """Return the language that the fence names."""
    return str(region.lexemes["info"]).strip().split(" ")[0]


def _declared(document: Document, region: Region, *kinds: str) -> re.Match[str] | None:
    """Return the comment right above a block, if it is of one of these kinds."""
    found = COMMENT.search(document.text[: region.start])
    return found if found and found["what"] in kinds else None


def _is_python(document: Document, region: Region) -> bool:
    """Tell whether a block is run as Python."""
    return language(region) == "python" and _declared(document, region, "whole", "part") is None


def differs(shown: str, printed: str, varies: str | None = None) -> str | None:
    """Compare what a page shows with what was printed, but for what a regular expression says to vary."""
    texts = [text if varies is None else re.sub(varies, "(varies)", text) for text in (shown, printed)]
    want, got = ("".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines()) for text in texts)
    if doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS):
        return None
    lines = difflib.unified_diff(want.splitlines(), got.splitlines(), "shown", "printed", lineterm="")
    return "The page shows another output than is printed:\n" + "\n".join(lines)


# Python


def _python(example: Example) -> str | None:
    document, region = example.document, example.region
    # A page's blocks may be tested in any order, in several processes: those above are run first where they were not.
    printed: dict[int, str] = document.__dict__.setdefault("printed", {})
    for earlier in document.examples():
        place = earlier.region.start
        if _is_python(document, earlier.region) and place <= region.start and place not in printed:
            with contextlib.redirect_stdout(io.StringIO()) as output, fold_raised(output):
                run_python(earlier)
            printed[place] = output.getvalue()
    below = _neighbour(document, region, +1)
    shown = str(below.parsed) if below is not None and language(below) == "text" else ""
    return differs(shown, printed[region.start])


@contextlib.contextmanager
def fold_raised(output: io.StringIO) -> Iterator[None]:
    """Write what of ours is raised or warned of within; what is raised takes back what was set in the environment."""
    environment = dict(os.environ)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DDPPatchWarning)
        found: list[Exception] = []
        try:
            yield
        except DDPPatchError as error:
            found.append(error)
            os.environ.clear()
            os.environ |= environment
    warned = [warning.message for warning in caught if isinstance(warning.message, DDPPatchWarning)]
    for said in [*warned, *found]:
        lines = f"{type(said).__name__}: {said}".splitlines()
        output.writelines(f"{textwrap.fill(line, MOST_IN_A_LINE, subsequent_indent='  ')}\n" for line in lines)


def _neighbour(document: Document, region: Region, step: int) -> Region | None:
    """Return the block next to this one, if nothing but white space stands between them."""
    regions = [found for _, found in document.regions]
    place = regions.index(region) + step
    if not 0 <= place < len(regions):
        return None
    first, second = sorted([region, regions[place]], key=lambda found: found.start)
    between = document.text[first.end : second.start]
    return None if between.strip() else regions[place]


# Commands


def _console(source: str, varies: str | None) -> str | None:
    before, *parts = re.split(r"^\$ ", source.replace("\\\n", ""), flags=re.MULTILINE)
    if before.strip() or not parts:
        return "A console block begins with a command: `$ command`."
    status = 0
    for place, part in enumerate(parts):
        command, _, shown = part.partition("\n")
        runs = [(0, f"{status}\n", "")] if command == "echo $?" else run_twice(command)
        told = parts[place + 1 : place + 2] and parts[place + 1].startswith("echo $?\n")
        for how, (status, printed, error) in zip(("as it stands", "on unlike twins"), runs, strict=False):
            if status != 0 and not told:
                return f"`{command}`, {how}, ended with status {status}:\n{printed}\n{error}"
            if found := differs(shown, printed, varies):
                return f"`{command}`, {how}: {found}\n{error}"
    return None


def run_twice(command: str) -> list[tuple[int, str, str]]:
    """Run a command as it stands; and at once, if it starts ranks by torchrun, on ranks as unlike as machines."""
    ways = [run_command] if TORCHRUN.search(command) is None else [run_command, run_on_twins]
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda run: run(command), ways))


def run_on_twins(command: str) -> tuple[int, str, str]:
    """Run a command with torchrun, whose ranks are as unlike as those of several machines."""
    return run_command(command, environment=_twins(command))


# What torch prints when a rank with DistributedDataParallel and gloo exits, after the last line of its script, once in
# some forty runs: a thread is destroyed that was not joined. A script without this package prints it, too.
ABORTED = "terminate called without an active exception"


def run_command(
    command: str, limit_s: float = LIMIT_S, environment: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, str, str]:
    """Run a command as a user does, in this environment and more; return its exit status and what it wrote."""
    # A script finds the modules beside it, as for a user: the folders of scripts do not hold the package.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment = inherited | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        **SETTINGS,
        **environment,
    }
    process = subprocess.Popen(  # noqa: S603 - our own pages
        ["bash", "-o", "pipefail", "-c", command],  # noqa: S607 - the bash of the PATH, as in .ci/run
        cwd=CHECKOUT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, error = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun then ends its ranks
        output, error = process.communicate(timeout=60)
        error += f"\nIt did not end within {limit_s:g} s."
        return process.returncode or 1, output, error
    # Nothing else may have gone wrong: torchrun names a rank that aborted, and no rank shows a traceback.
    is_torchs = ABORTED in error and "failed (exitcode: -6)" in error and "[rank" not in error
    return 0 if is_torchs else process.returncode, output, error


def _twins(command: str) -> dict[str, str]:
    """Return an environment in which ranks of torchrun are forked from the servers that ``run_ranks`` keeps.

    ``on_twins/sitecustomize.py`` reads it.
    """
    from quick import address_of

    from ddp_patch.testing.twins import environment_of

    (ranks,) = TORCHRUN.findall(command)
    servers = [(address_of(rank), environment_of(rank, ())) for rank in range(int(ranks))]
    folders = [str(Path(__file__).parent / "on_twins"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"TWINS": json.dumps(servers), "PYTHONPATH": os.pathsep.join(folders)}


def _sh(source: str) -> str | None:
    for command in source.replace("\\\n", "").replace("&&", "\n").splitlines():
        if command.strip() and not INSTALLS_OR_TESTS.fullmatch(command.strip()):
            return f"`{command.strip()}` is not run, so it would not be tested: show it in a console block."
    return None


def nox_sessions() -> set[str]:
    """Return the names of the sessions of noxfile.py, which tests do not import: nox need not be there."""
    tree = ast.parse((CHECKOUT / "noxfile.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {function.name for function in functions if "nox.session" in map(_dotted, function.decorator_list)}


def _dotted(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


# Quotations of files


def _quoted(example: Example, whole: bool, names: list[str]) -> str | None:
    folder = Path(example.path).parent
    files = [folder / name for name in names]
    is_diff = language(example.region) == "diff"
    if len(files) != 1 + is_diff or not all(file.is_file() for file in files):
        return f"It quotes {' and '.join(names)}: name {'two files' if is_diff else 'one file'} of the page's folder."
    old, new = (files[0].read_text().splitlines(), files[-1].read_text().splitlines())
    lines = list(difflib.unified_diff(old, new, n=10**6, lineterm=""))[3:] if is_diff else new
    lines = [line.rstrip() for line in lines]  # an empty line is " " in a difference, and editors take that away
    shown = str(example.parsed).splitlines()
    if whole:
        same = shown == lines
    else:
        pieces = (lines[start : start + len(shown)] for start in range(len(lines) - len(shown) + 1))
        same = any(_dedented(piece) == _dedented(shown) for piece in pieces)
    if same:
        return None
    found = "\n".join(difflib.unified_diff(shown, lines, "shown", "file", lineterm=""))
    return f"It is not {'the whole' if whole else 'a piece'} of {' against '.join(names)}:\n{found}"


def _dedented(lines: list[str]) -> list[str]:
    return textwrap.dedent("\n".join(lines)).splitlines()


def regions_of(text: str, path: Path) -> list[Any]:
    """Return a page's examples, for tests of this module."""
    document = Document(text, str(path))
    for region in blocks(document):
        document.add(region)
    return list(document.examples())


WAYS: list[Run] = [run_command, run_on_twins]  # in which each command with torchrun is run
