"""What becomes of the loaders and samplers of other packages in worlds of 2 and 3, for ``docs/compatibility.md``.

``nox -s packages`` runs this. Each package is tried in a process of its own, because some change torch. What is
expected of a loader is in ``tests/third_party/cases``. Where something else is measured, that is an error, and the page
stays as it is.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from pages import show_and_put
from third_party.base import Fate
from third_party.judge import OneProcess, judge
from third_party.measure import cases_of, seen_on_rank, world_by_hand

from ddp_patch.testing import run_ranks

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
WORLDS = (2, 3)
COLUMNS = {Fate.SHARED: "sharded", Fate.AS_IT_IS: "its own sharding kept", Fate.REFUSED: "refused: do this"}

Measured = tuple["Tried", list[str]]  # a loader, and what should not have happened


class Tried(NamedTuple):
    """One loader, and what the page says of it."""

    package: str
    name: str
    fate: Fate
    told: str


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
        package, name = f"{case.package} {version(case.package)}", case.name.removesuffix(" with 2 workers")
        mark = "" if all(one.complete for one in verdicts) else " †"  # which the page explains
        told = f": `{case.told}`" if case.told else ""
        problems = [problem for one in verdicts for problem in one.problems]
        found.append((Tried(package, name + mark, case.fate, told), problems))
    return found


def table(tried: Iterable[Tried]) -> list[list[str]]:
    """Return the head, and a row for each package."""
    packages: dict[str, list[Tried]] = {}
    for one in tried:
        packages.setdefault(one.package, []).append(one)
    by_name = sorted(packages.items(), key=lambda item: item[0].lower())
    rows = [
        [package, *(cell(one for one in found if one.fate is fate) for fate in COLUMNS)] for package, found in by_name
    ]
    return [["package", *COLUMNS.values()], *rows]


def cell(tried: Iterable[Tried]) -> str:
    """Name loaders of one fate, once each; after those that are refused alike, say what to do."""
    names: dict[str, list[str]] = {}
    for one in tried:
        names.setdefault(one.told, []).append(one.name)
    return "<br>".join("; ".join(dict.fromkeys(alike)) + told for told, alike in names.items())


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
    problems = [f"{one.package}, {one.name}: {problem}" for one, told in found for problem in told]
    if problems:
        sys.exit("\n".join(["Not what tests/third_party/cases expects:", *problems]))
    if named == every:
        show_and_put(PAGE, "packages", table(one for one, _ in found))


if __name__ == "__main__":
    main()
