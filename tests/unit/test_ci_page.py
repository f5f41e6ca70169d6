"""The job of ``docs/audit.md`` is a file whose steps run: here, in a copy of its project."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import ddp_patch

DOCS = Path(__file__).parents[2] / "docs"
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


def test_what_is_installed_is_the_package_with_its_extra(project: Path) -> None:
    install, *others = steps().values()
    (project / "wheels").mkdir()
    (project / "wheels" / "ddp_patch-0.1.0-py3-none-any.whl").touch()
    (project.parent / "bin" / "pip").write_text('#!/bin/sh\necho "$@"\n')
    (project.parent / "bin" / "pip").chmod(0o700)
    done = run(install, project)
    assert done.stdout == "install wheels/ddp_patch-0.1.0-py3-none-any.whl[audit] pytest\n"
    assert not any("pip install" in command for command in others)


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


def test_the_job_uses_actions_in_pinned_versions() -> None:
    job: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]["shares"]
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert [name.partition("@")[0] for name in used] == [
        "actions/checkout",
        "actions/setup-python",
        "actions/upload-artifact",
    ]
    assert all(name.partition("@")[2].startswith("v") for name in used)
