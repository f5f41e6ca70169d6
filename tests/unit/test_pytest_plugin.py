"""The plugin, in a pytest of its own."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from messages import raises
from quick import soaked
from torch.utils.data import DataLoader

from ddp_patch.errors import NotPatchedError
from ddp_patch.testing.ranks import guarded

pytest_plugins = ["pytester"]

# What one of two ranks is told of a loader, by its class and the line below that makes it.
UNPATCHED, UNPATCHED_OWN = (
    rf"Rank \d of 2\b.*\b{name}\b.*\S+shared\.py:{line}\b.*patch_dataloader_to_ddp\(\)"
    for name, line in (("DataLoader", 10), ("Own", 23))
)

LOADERS = """
    from torch.utils.data import DataLoader
    from ddp_patch import patch_dataloader_to_ddp
    import pytest
    from ddp_patch.testing import run_ranks

    def patched(rank, world_size):
        return len(list(patch_dataloader_to_ddp(DataLoader(range(8)))))

    def unpatched(rank, world_size):
        return len(list(DataLoader(range(8))))

    class Own(DataLoader):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)

        def __iter__(self):
            return self._get_iterator()

        def __eq__(self, other):
            return self is other

    def unpatched_own(rank, world_size):
        return len(list(Own(range(8))))
"""


@pytest.fixture
def tests(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(shared=LOADERS)
    return pytester


def run(tests: pytest.Pytester, body: str, *options: str) -> pytest.RunResult:
    tests.makepyfile(f"from shared import *\n{body}")
    return tests.runpytest_subprocess("-p", "_ddp_patch_pytestplugin", *options)


def test_the_fixture_and_the_mark(tests: pytest.Pytester) -> None:
    result = run(
        tests,
        """
def test_holds(ddp_audit):
    assert ddp_audit(DataLoader(range(10), batch_size=2), world_size=4).epochs[0].padding == 2

def test_does_not(ddp_audit):
    ddp_audit(DataLoader(range(10), batch_size=2), world_size=4, padding=False)

@pytest.mark.ddp_guard
def test_patched():
    assert run_ranks(patched, 2) == [4, 4]

@pytest.mark.ddp_guard
def test_unpatched():
    run_ranks(unpatched, 2)

@pytest.mark.ddp_guard
def test_alone():
    assert len(list(DataLoader(range(8)))) == 8

def test_not_marked():
    assert run_ranks(unpatched, 2) == [8, 8]
""",
    )
    result.assert_outcomes(passed=4, failed=2)
    result.stdout.fnmatch_lines(["*DataLoader on 4 ranks: 1 problem", "*Remedy: Use gather_in_order*"])
    result.stdout.fnmatch_lines(["FAILED *::test_does_not - *", "FAILED *::test_unpatched - *"])
    assert re.search(UNPATCHED, result.stdout.str())


def test_of_a_loader_that_was_made_before_the_place_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    before: DataLoader[Any] = DataLoader(range(8))  # type: ignore[arg-type]  # a range is a dataset
    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 1}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    with guarded():
        remedy = ("patch_dataloader_to_ddp()", "is_ddp_aware = True")
        with raises(NotPatchedError, ("Rank 1 of 2", "DataLoader", "unknown line", "before the guard was on"), remedy):
            iter(before)
        with raises(NotPatchedError, ("Rank 1 of 2", "DataLoader", f"{__file__}:"), remedy):
            iter(DataLoader(range(8)))  # type: ignore[arg-type]  # as above
    assert len(list(before)) == 8


GUARDED = """
import torch.distributed as dist
from torch.multiprocessing import spawn

def rank(number, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    dist.barrier()
    assert len(list(Own(range(8)))) == 8  # of a class that is made while the guard is on

def test_spawned(tmp_path):
    spawn(rank, (str(tmp_path),), nprocs=2)

def test_unpatched():
    run_ranks(unpatched, 2)

def test_unpatched_own():
    run_ranks(unpatched_own, 2)
"""


@pytest.mark.parametrize("way", ["--ddp-guard", soaked("-oddp_guard=true")])
def test_every_test_is_guarded_where_that_is_asked_for(tests: pytest.Pytester, way: str) -> None:
    """So are ranks however they are started, and classes that iterate by themselves."""
    result = run(tests, GUARDED, way)
    result.assert_outcomes(failed=3)
    said = result.stdout.str()
    assert re.search(UNPATCHED, said)
    assert re.search(UNPATCHED_OWN, said)
    of_spawned = said.partition("test_spawned")[2].partition("test_unpatched")[0]
    assert "NotPatchedError" in of_spawned


def test_the_wheel_holds_the_plugin_and_names_it() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    (module,) = project["project"]["entry-points"]["pytest11"].values()
    assert f"{module}.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert (root / f"{module}.py").is_file()


def test_starting_pytest_imports_no_torch(pytester: pytest.Pytester) -> None:
    """What is imported before a measurement of coverage begins is not measured; and torch takes a second."""
    pytester.makeini("[pytest]\naddopts = -p _ddp_patch_pytestplugin\n")
    pytester.makepyfile("import sys\ndef test_it():\n    assert not {'torch', 'ddp_patch'} & set(sys.modules)\n")
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
    pytester.runpytest_subprocess("--ddp-guard").assert_outcomes(failed=1)  # the guard is of torch's loaders
