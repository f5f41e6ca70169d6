"""What becomes of the loaders and samplers of other packages in worlds of 2 and 3, for ``docs/packages.md``.

``nox -s packages`` runs this. Each package is tried in a process of its own, because some change torch. What is
expected of a loader is in ``tests/third_party/cases``. Where something else is measured, that is an error, and the page
stays as it is.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

from pages import show_and_put
from third_party.base import Case
from third_party.judge import OneProcess, Verdict, described, judge
from third_party.measure import cases_of, seen_on_rank, world_by_hand

from ddp_patch.testing import run_ranks

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "packages.md"
WORLDS = (2, 3)
HEAD = ["package", "loader or sampler", "one process", "after the patch"]

Measured = tuple[list[str], list[str]]  # a row of the page, and what should not have happened


def measured(module: str) -> list[Measured]:
    """Try every loader of a package in every world."""
    cases = cases_of(module)
    in_one_process = [OneProcess(case) for case in cases]  # first, which writes the files that ranks read
    on_ranks = any(case.on_ranks for case in cases)
    ranks = {size: run_ranks(seen_on_rank, size, module) if on_ranks else [] for size in WORLDS}
    found = []
    for case, alone in zip(cases, in_one_process, strict=True):
        worlds = [
            [rank[case.name] for rank in ranks[size]] if case.on_ranks else world_by_hand(case, size) for size in WORLDS
        ]
        verdicts = [judge(case, alone, seen) for seen in worlds]
        found.append((row(case, alone, verdicts), [problem for one in verdicts for problem in one.problems]))
    return found


def row(case: Case, alone: OneProcess, verdicts: Sequence[Verdict]) -> list[str]:
    """Return the cells of one loader."""
    fates = {one.fate.value for one in verdicts if one.fate is not None}
    call = " or ".join(fates) + (f" (`{case.told}`)" if case.told else "")
    two, three = (described(case, one) for one in verdicts)
    package = f"{case.package} {version(case.package)}"
    return [package, case.name, alone.text, f"{call}: {two} on 2 ranks, {three} on 3"]


def main() -> None:
    """Try all packages, or those that are named, and write the page of all."""
    every = sorted(path.stem for path in (ROOT / "tests" / "third_party" / "cases").glob("[!_]*.py"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", default=every, metavar="package", help="a module of third_party/cases")
    named = parser.parse_args().packages
    processes = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    with processes:
        found = []
        for module, package in zip(named, processes.map(measured, named), strict=True):
            print(module, *(told for _, told in package if told), sep="\n  ", flush=True)
            found += package
    problems = [f"{cells[0]}, {cells[1]}: {problem}" for cells, told in found for problem in told]
    if problems:
        sys.exit("\n".join(["Not what tests/third_party/cases expects:", *problems]))
    rows = sorted((cells for cells, _ in found), key=lambda cells: cells[0].lower())
    if named == every:
        show_and_put(PAGE, "packages", [HEAD, *rows], grouped=True)


if __name__ == "__main__":
    main()
