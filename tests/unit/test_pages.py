"""The pages: tests of their blocks find what is wrong, they make up a site, their job runs, and versions are right."""

import ast
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest
import yaml
from commands import COMMANDS, NOT_RUN, READERS, found_in_pages
from compatibility import PAGE, row, with_row
from documented import ABORTED, CHECKOUT, nox_sessions, regions_of, run_command
from torch.distributed.run import get_args_parser
from zoo import KINDS

import ddp_patch
from ddp_patch import samplers, testing

DOCS = CHECKOUT / "docs"
TOML = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
MARKDOWN = [*CHECKOUT.glob("*.md"), *DOCS.glob("*.md")]

# Code blocks.

FENCE = "```"


def found(page: str, block: int = -1) -> str | None:
    """Test one block of a page, the last one by default; return what is wrong with it."""
    example = regions_of(page, DOCS / "page.md")[block]
    result: str | None = example.region.evaluator(example)
    return result


def fenced(language: str, *lines: str) -> str:
    return "\n".join([FENCE + language, *lines, FENCE, ""])


SECTION = "Causes and remedies: python -m ddp_patch explain"
PRINTING = fenced("python", "print(1 + 1)")
RAISING = fenced("python", "from ddp_patch.errors import StateError", "raise StateError('It happened.')")
WARNING = fenced(
    "python",
    "import warnings",
    "from ddp_patch import DDPPatchWarning",
    "warnings.warn('It may happen.', DDPPatchWarning)",
)


@pytest.mark.parametrize(
    ("page", "block"),
    [
        (fenced("python", "x = 1") + fenced("python", "assert x == 1"), -1),
        (PRINTING + fenced("text", "2"), 0),
        (RAISING + fenced("text", "StateError: It happened.", f"{SECTION} StateError"), 0),
        ("<!-- varies: [0-9]+ s -->\n" + fenced("console", "$ echo took 12 s", "took 3 s"), 0),
        (fenced("sh", "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt nox", "nox -r -s tests"), 0),
        ("<!-- part: examples/single.py -->\n" + fenced("python", "import torch", "from torch import nn"), 0),
    ],
)
def test_what_holds(page: str, block: int) -> None:
    assert found(page, block) is None


@pytest.mark.parametrize(
    ("page", "block", "message"),
    [
        (PRINTING, 0, "another output"),
        (WARNING + RAISING + fenced("text", "StateError: ..."), 0, "another output"),
        (PRINTING + "words\n\n" + fenced("text", "2"), 1, "there is none"),
        (fenced("console", "$ echo a", "b"), 0, "another output"),
        (fenced("console", "a", "$ echo a"), 0, "begins with a command"),
        (fenced("sh", "torchrun docs/examples/ddp.py"), 0, "is not run"),
        (fenced("yaml", "a: 1"), 0, "Nothing tests"),
        ("<!-- whole: examples/single.py -->\n" + fenced("python", "import torch"), 0, "not the whole"),
        ("<!-- part: examples/single.py -->\n" + fenced("python", "import torch", "import os"), 0, "not a piece"),
        ("<!-- part: examples/single.py -->\n" + fenced("diff", "+import torch"), 0, "name two files"),
        ("<!-- varies: [0-9]+ s -->\n" + fenced("console", "$ echo took 12 m", "took 3 s"), 0, "another output"),
    ],
)
def test_what_does_not_hold(page: str, block: int, message: str) -> None:
    assert message in str(found(page, block))


def test_a_block_that_raises_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        found(fenced("python", "1 / 0"))


def test_a_command_that_does_not_end_is_ended() -> None:
    status, _, error = run_command("echo begun; sleep 100", limit_s=0.5)
    assert status != 0
    assert "did not end within 0.5 s" in error


def test_pages_name_extras_that_exist() -> None:
    for page in MARKDOWN:
        named = re.findall(r"(?:\.|ddp_patch|\.whl)\[([a-z,]+)\]", page.read_text())
        assert {extra for extras in named for extra in extras.split(",")} <= {*TOML["optional-dependencies"]}, page


WORKFLOWS = sorted((CHECKOUT / ".github" / "workflows").iterdir())


@pytest.mark.parametrize("page", [*MARKDOWN, *WORKFLOWS], ids=lambda page: page.name)
def test_pages_and_workflows_name_sessions_that_exist(page: Path) -> None:
    commands = re.findall(r"nox -s ((?:[a-z_]+ ?)+)", page.read_text())
    named = {name for command in commands for name in command.split()}
    assert named | set(re.findall(r"session: (\w+)", page.read_text())) <= nox_sessions()


def test_the_page_for_contributors_has_every_session_once() -> None:
    named = re.findall(r"^\| `(\w+)`", (DOCS / "contributing.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(nox_sessions())


def test_ci_runs_the_commands_of_the_readme() -> None:
    """They install from nothing, which takes minutes: here they are only compared."""
    script = (CHECKOUT / ".ci" / "run").read_text()
    prefix = re.search(r'^nox="(.*)"$', script, re.MULTILINE)
    assert prefix is not None
    called = {name.replace("$nox", prefix[1]) for name in re.findall(r'\bas_in_readme "(.*?)"', script)}
    blocks = re.findall(r"^```sh\n(.*?)\n```$", (CHECKOUT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert called == set(blocks) - {"pip install ."}


@pytest.mark.parametrize(
    "path",
    sorted(
        path
        for folder in ("", "coming_from/", "frameworks/", "recipes/")
        for path in DOCS.glob(f"examples/{folder}*.py")
    ),
    ids=lambda path: path.name,
)
def test_every_example_is_run_by_something(path: Path) -> None:
    runners = [CHECKOUT / "noxfile.py", *MARKDOWN, *(CHECKOUT / "tests").rglob("test_*.py")]
    module = rf"from {path.stem} import"
    run = any(path.name in runner.read_text() for runner in runners if runner != Path(__file__))
    imported = any(module in other.read_text() for other in path.parent.glob("*.py"))
    assert run or imported


def test_every_command_with_torchrun_is_in_the_table_of_what_runs_it() -> None:
    assert {command for command, _ in found_in_pages()} == {*COMMANDS, *READERS, *NOT_RUN}
    for command, runner in COMMANDS.items():
        text = (CHECKOUT / runner).read_text()
        if runner.endswith(".md"):  # tests/documented.py runs its console blocks
            assert f"\n$ {command}\n" in text
        elif "train.py" not in command:
            assert f'runner == "{runner}"' in text


# The site.

PAGES = sorted(DOCS.glob("*.md"))
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")


def prose(page: Path) -> str:
    """The page without its code."""
    return re.sub(r"^( *)```.*?^\1```$|`[^`\n]*`", "`code`", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What can be linked to in a page: its headings, as Python-Markdown and GitHub name them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = [re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", slug) for slug in slugs}


def links() -> Iterator[tuple[str, str, str]]:
    for page in MARKDOWN:
        for target, anchor in LINK.findall(prose(page)):
            yield page.relative_to(CHECKOUT).as_posix(), target, anchor


@pytest.mark.parametrize(("page", "target", "anchor"), sorted(set(links())))
def test_every_link_leads_somewhere(page: str, target: str, anchor: str) -> None:
    path = (CHECKOUT / page).parent / target if target else CHECKOUT / page
    if target.endswith((".svg", ".png")):  # the anchor says in which colour scheme it is shown
        assert path.is_file()
        assert anchor in {"", "only-light", "only-dark"}
    else:
        assert path.exists()
        assert anchor == "" or anchor in anchors(path)


def test_every_page_is_in_the_navigation_once() -> None:
    _, _, navigation = (CHECKOUT / "mkdocs.yml").read_text().partition("\nnav:\n")
    navigation, _, rest = navigation.partition("\nnot_in_nav:")
    left_out = re.findall(r"^  (\S+\.md)$", rest.partition("\nexclude_docs:")[0], re.MULTILINE)
    named = re.findall(r"- (?:.*: )?(\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(named + left_out) == [page.name for page in PAGES]
    assert len(named) <= 18 + 1  # and the changelog


def sections() -> Iterator[str]:
    """Each section of a page with its heading, as the site's search finds them: words alone, in lower case."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```$|\]\([^)]*\)", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
            yield " ".join(re.findall(r"[\w-]+", section.lower()))


@pytest.mark.parametrize(
    "searched",
    [
        "validate on rank 0 only",
        "early stopping",
        "two validation loaders",
        "returns a copy",
        "resampled webdataset",
        "dataset whose ranks differ on purpose",
        "several trainings in one process",
        "search k-fold",
        "guard at run time",
    ],
)
def test_what_people_look_for_has_its_section(searched: str) -> None:
    assert any(set(searched.split()) <= set(section.split()) for section in sections())


def test_every_picture_is_shown() -> None:
    shown = {target for _, target, _ in links()} | {"logo.svg"}  # the site's
    assert {path.name for path in DOCS.glob("*.svg")} <= shown


def test_the_site_knows_the_version_and_where_its_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    on_config = run_path(str(DOCS / "hooks.py"))["on_config"]
    monkeypatch.delenv("DDP_PATCH_SOURCE", raising=False)
    assert vars(on_config(SimpleNamespace(extra={}))) == {"extra": {"release": ddp_patch.__version__}}
    monkeypatch.setenv("DDP_PATCH_SOURCE", "https://a.example/b/c/blob/v1")
    config = on_config(SimpleNamespace(extra={}))
    assert (config.repo_url, config.repo_name, config.edit_uri) == ("https://a.example/b/c", "b/c", "edit/v1/docs/")


def test_every_public_name_is_in_the_reference() -> None:
    """Each has a line of its own; the errors are listed by their module."""
    described = set(re.findall(r"^::: ddp_patch\.(?:\w+\.)*(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    assert "::: ddp_patch.errors" in (DOCS / "api.md").read_text()
    public = {*ddp_patch.__all__, *samplers.__all__, *testing.__all__} - set(ddp_patch.errors.__all__)
    assert public - described == set()


def test_every_option_is_in_the_table_with_its_default_in_the_order_of_the_signature() -> None:
    _, _, section = (DOCS / "api.md").read_text().partition("\n## The keywords\n")
    told = re.findall(r"^\| `(.*?)` \| ", section.partition("\n### ")[0], re.MULTILINE)
    parameters = list(inspect.signature(ddp_patch.patch_dataloader_to_ddp).parameters.values())[
        1:-1
    ]  # without **unknown
    defaults = {parameter.name: parameter.default for parameter in parameters}
    expected = [
        name if default is None else f"{name}={default!r}".replace("'", '"') for name, default in defaults.items()
    ]
    assert told == expected


# No test runs the benchmarks: what they import is there, and where they write.

BENCHMARKS = sorted((CHECKOUT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda script: script.stem)
def test_what_a_benchmark_imports_is_there_and_what_it_writes_has_its_place(script: Path) -> None:
    text = script.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in {"ddp_patch", "zoo"}:
            module = str(node.module)
            for name in (alias.name for alias in node.names):
                assert hasattr(import_module(module), name) or find_spec(f"{module}.{name}"), f"{module} has no {name}"
    tables = re.findall(r'\b(?:show_and_)?put\(\s*PAGE,\s*"([\w-]+)"', text)
    page = re.search(r'^PAGE = .*"([\w-]+\.md)"$', text, re.MULTILINE)
    shown = (DOCS / page[1]).read_text() if page else ""
    for name in tables if page else ():
        assert [shown.count(f"<!-- {name}: {mark} -->") for mark in ("begin", "end")] == [1, 1]
    assert script.stem != "balance" or "figures" in tables  # that they are found


def test_the_page_of_what_was_tried_has_every_kind_once_and_each_is_handled_here() -> None:
    _, _, generated = PAGE.read_text().partition("<!-- peers: begin -->")
    _, _, *lines, _ = generated.strip().partition("\n\n")[0].splitlines()  # a head, and totals
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert sorted(name for names, *_ in rows for name in names.split("; ")) == sorted(kind.name for kind in KINDS)
    assert [names for names, ours, *_ in rows if ours != "yes"] == []
    assert f"all {len(KINDS)} kinds of loader" in (DOCS / "index.md").read_text()


# The job of docs/audit.md is a file whose steps run: here, in a copy of its project.

PROJECT = DOCS / "examples" / "ci"
WORKFLOW = PROJECT / ".github" / "workflows" / "loaders.yml"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy, with what the job's machine has: ``ddp-patch`` to run, and the plugin in every pytest."""
    copy = shutil.copytree(PROJECT, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, module in {"ddp-patch": "ddp_patch", "python": ""}.items():
        arguments = f"-m {module}" if module else ""
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (tools / name).chmod(0o700)
    return Path(copy)


def steps() -> dict[str, str]:
    """What the job runs, by the steps' names."""
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["shares"]
    return {step["name"]: step["run"] for step in job["steps"] if "run" in step}


def run(command: str, project: Path) -> subprocess.CompletedProcess[str]:
    """Run a step as GitHub does."""
    environment = {
        # The folder that it starts in is where it imports from, as on GitHub.
        **{name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
        "PATH": f"{project.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(ddp_patch.__path__[0]).parent),
        "PYTEST_ADDOPTS": "-p _ddp_patch_pytestplugin",
        "GITHUB_STEP_SUMMARY": str(project / "summary.md"),
    }
    arguments = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command]
    return subprocess.run(arguments, cwd=project, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - our own file's


@pytest.mark.soak  # each step starts processes of its own; the tests above hold what the steps are
def test_every_step_of_the_job_runs_and_fails_where_a_loader_is_not_patched(project: Path) -> None:
    _, audit, assertion = steps().values()
    done = run(audit, project)
    assert done.returncode == 0, done.stderr
    assert "make_loaders.val" in (project / "summary.md").read_text()
    assert "<svg" in (project / "loaders.html").read_text()  # which the last step keeps
    done = run(assertion, project)
    assert done.returncode == 0, done.stdout
    loaders = project / "my_project" / "loaders.py"
    loaders.write_text(
        loaders.read_text().replace("return patch_dataloader_to_ddp(make_loaders())", "return make_loaders()")
    )
    done = run(assertion, project)
    assert done.returncode == 1
    assert "NotPatchedError" in done.stdout


# The commands that docs/gpu.md shows for several nodes and SLURM start what they should.


FOLDER = CHECKOUT / "docs" / "examples" / "launch"
# Stand for the cluster's programs: each notes how it was called.
PROGRAMS = {
    "torchrun": 'printf "%s\\n" "$@" > called; echo "${SRUN_CPUS_PER_TASK-}" > cpus',
    "srun": 'exec "$@"',
    "scontrol": '[[ $* = "show hostnames node-[a-b]" ]] && printf "node-a\\nnode-b\\n"',
}
SLURM = {
    "SLURM_JOB_NODELIST": "node-[a-b]",
    "SLURM_JOB_ID": "123456",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_CPUS_PER_TASK": "32",
}


@pytest.mark.parametrize(
    ("script", "ranks_of_node", "job", "endpoint", "cpus"),
    [("nodes.sh", "8", "my-job", "node-a:29500", ""), ("slurm.sh", "4", "123456", "node-a:29956", "32")],
)
def test_torchrun_is_started_with_what_makes_one_job_of_the_nodes(
    script: str, ranks_of_node: str, job: str, endpoint: str, cpus: str, tmp_path: Path
) -> None:
    for name, body in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, **SLURM, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-e", str(FOLDER / script)]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60)  # noqa: S603 - our own scripts
    called = get_args_parser().parse_args((tmp_path / "called").read_text().splitlines())
    assert (called.nnodes, called.nproc_per_node, called.training_script) == ("2", ranks_of_node, "train.py")
    assert (called.rdzv_id, called.rdzv_backend, called.rdzv_endpoint) == (job, "c10d", endpoint)
    assert (tmp_path / "cpus").read_text().strip() == cpus


# The page of versions says what the project says, and what was tried.

VERSIONS = PAGE.read_text()
# Which session ran with which Python, torch and numpy.
TRIED = {name: versions for name, *versions in re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \| (\S+) \|", VERSIONS, re.M)}


def test_minimum_ran_with_the_lowest_versions_that_the_project_claims() -> None:
    lowest = dict(
        requirement.split(">=") for requirement in ["python" + TOML["requires-python"], *TOML["dependencies"]]
    )
    for (name, version), tried in zip(lowest.items(), TRIED["minimum"], strict=True):
        assert f"{tried}.".startswith(f"{version}."), name
        assert name in {"python", "torch", "numpy"}
        assert f"{name.capitalize() if name == 'python' else name} {version}" in VERSIONS
    assert TRIED["minimum"][1:] == [f"{lowest['torch']}.0", f"{lowest['numpy']}.0"]


def test_every_python_that_is_claimed_was_tried() -> None:
    claimed = {name.rpartition(" ")[2] for name in TOML["classifiers"] if "Python :: 3" in name}
    assert claimed == {python.rpartition(".")[0] for python, *_ in TRIED.values()}


def test_ci_runs_what_the_page_says() -> None:
    for name in ("torch", "numpy"):
        (version,) = re.findall(rf"^{name}==(\S+)", (CHECKOUT / "constraints.txt").read_text(), re.M)
        assert f"{name} {version}" in VERSIONS


def test_every_private_name_of_torch_has_its_line() -> None:
    code = (Path(ddp_patch.__path__[0]) / "compat" / "private_torch.py").read_text()
    found = set(re.findall(r'(?:private\(\s*|name = )"torch\.[\w.]+\.(\w+)"', code))
    assert found >= {"_get_default_store", "_reset"}
    assert [name for name in sorted(found) if not re.search(rf"^\|.*\b{name}\b", VERSIONS, re.M)] == []


def test_a_session_writes_its_own_line() -> None:
    page = "| session |\n| `minimum` | 3 |\n| `newest` | 4 |\n"
    line = row("newest", 1234, 5)
    assert with_row(page, line) == f"| session |\n| `minimum` | 3 |\n{line}\n"
    assert line.endswith(" | 1,234 | 5 |")
    with pytest.raises(ValueError, match="0 lines"):
        with_row(page, row("other", 1, 0))


ABORTS = "failed (exitcode: -6)"


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ([ABORTED, ABORTS], 0),
        ([ABORTED], 3),  # not a rank of torchrun's
        ([ABORTS], 3),  # another abort
        ([ABORTED, ABORTS, "[rank0]: Traceback (most recent call last):"], 3),
    ],
)
def test_an_abort_of_torchs_alone_is_no_failure_of_a_command(said: list[str], status: int) -> None:
    command = "; ".join([*(f"echo {shlex.quote(line)} >&2" for line in said), "exit 3"])
    assert run_command(command)[0] == status
