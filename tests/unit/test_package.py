"""Which package the tests test, and what the built one holds."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
import tarfile
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

import ddp_patch
from ddp_patch.testing import run_ranks

ROOT = Path(__file__).parents[2]
DIST = os.environ.get("DDP_PATCH_DIST")
of_the_built = pytest.mark.skipif(DIST is None, reason="nox builds the package and says where; this is another run")

SCRIPT = "import importlib.util; print(importlib.util.find_spec('ddp_patch').origin)"


def built(pattern: str) -> Path:
    (path,) = Path(str(DIST)).glob(pattern)
    return path


def files(folder: str) -> set[str]:
    """The files of a folder of the checkout, without what running them leaves there."""
    found = (path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.as_posix() for path in found if not any(part.startswith((".", "__pycache__")) for part in path.parts)}


@pytest.mark.parametrize(
    "arguments", [["-c", SCRIPT], ["script.py"], ["-m", "torch.distributed.run", "--standalone", "script.py"]]
)
def test_every_process_imports_the_package_under_test(arguments: list[str], tmp_path: Path) -> None:
    """Although it starts in the checkout, and with no more settings than the tests have."""
    (tmp_path / "script.py").write_text(SCRIPT)
    given = [argument.replace("script.py", str(tmp_path / "script.py")) for argument in arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, *given], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.strip() == ddp_patch.__file__


def origin(rank: int, world_size: int) -> str | None:
    spec = importlib.util.find_spec("ddp_patch")
    return None if spec is None else spec.origin


def test_every_rank_imports_the_package_under_test() -> None:
    assert run_ranks(origin, 2) == [ddp_patch.__file__] * 2


@of_the_built
def test_the_package_under_test_is_the_wheel() -> None:
    site = Path(ddp_patch.__file__).parents[1]
    assert site.name == "site-packages"
    with zipfile.ZipFile(built("*.whl")) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/RECORD")]  # pip adds to that one
        assert [name for name in names if (site / name).read_bytes() != wheel.read(name)] == []


@of_the_built
def test_the_wheel_holds_the_package_its_types_and_its_licence_alone() -> None:
    with zipfile.ZipFile(built("*.whl")) as wheel:
        info = f"ddp_patch-{ddp_patch.__version__}.dist-info/"
        told = {name for name in wheel.namelist() if name.startswith(info)}
        others = set(wheel.namelist()) - told
    beside = {path.name for path in ROOT.glob("_ddp_patch*.py")} | {"ddp_patch/errors.md"}
    assert others == files("ddp_patch") | beside
    assert "ddp_patch/py.typed" in others
    assert {info + "METADATA", info + "licenses/LICENSE"} <= told


def test_a_release_has_a_readme_whose_links_lead_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the page of an index, there is no file beside it."""
    hatchling = types.SimpleNamespace(MetadataHookInterface=object)  # which the environment of a build has
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", hatchling)
    hook: Any = runpy.run_path(str(ROOT / "hatch_build.py"))["CustomMetadataHook"]()
    hook.root = str(ROOT)
    pages = []
    for source in (None, "https://example.com/blob/v1"):
        if source is not None:
            monkeypatch.setenv("DDP_PATCH_SOURCE", source)
        metadata: dict[str, Any] = {}
        hook.update(metadata)
        pages.append(metadata["readme"]["text"])
    plain, released = pages
    assert plain == (ROOT / "README.md").read_text()
    target = re.compile(r'\]\(([^)]*)\)|src(?:set)?="([^"]*)"')
    links, then = ([link or picture for link, picture in target.findall(page)] for page in (plain, released))
    assert {"docs/index.md", "docs/index-light.svg", "docs/index-dark.svg"} <= set(links)
    for link, now in zip(links, then, strict=True):
        is_ours = not link.startswith(("https://", "#"))
        assert now.removesuffix("?raw=true") == (f"https://example.com/blob/v1/{link}" if is_ours else link)
        assert not is_ours or (ROOT / link.partition("#")[0]).exists()


@of_the_built
def test_the_sdist_holds_what_the_tests_and_nox_need() -> None:
    with tarfile.open(built("*.tar.gz")) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    settings = ["pyproject.toml", "conftest.py", "noxfile.py", "constraints.txt", "mkdocs.yml", "hatch_build.py"]
    assert {*settings, "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"} <= held
    for part in ("ddp_patch", "tests", "docs", "benchmarks"):
        assert files(part) <= held
