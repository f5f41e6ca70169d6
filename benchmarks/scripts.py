"""Run scripts that others wrote as one process on 1, 2 and 3 ranks, unedited, and compare what they print and write.

``python benchmarks/scripts.py FOLDER`` takes checkouts from FOLDER, each in a folder of its repository's name; further
arguments choose some. Each script gets small data of ours, and runs as it is, and again where it stands still
(``scripts_recorder.py``): then all ranks must end with the parameters of one, and print its numbers, and write its
files. What varies between two runs on one rank is not compared.

``--json FILE`` keeps all that was found, and leaves out scripts that it has already. ``--quick`` is content with two
ranks, held still.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from scripts_list import SCRIPTS, Script
from scripts_outputs import Left, digest, fresh, left, told_apart, varying

RANKS = (2, 3)
LIMIT_S = 900.0
CLOSE = {"double": 1e-7, "single": 1e-3, "as it is": 1e-3}  # of numbers, and of the largest parameter
GIT = shutil.ignore_patterns(".git")
OURS = re.compile(r"ddp_patch\.errors\.(\w+)")
DIVIDED = re.compile(r"([\d,]+) divided over")


@dataclass
class Ran:
    """What a script did on some ranks: how it ended, what it said, what it left, and each rank's last parameters."""

    code: int
    seconds: float
    errors: str = field(repr=False)
    left: Left = field(repr=False)
    parameters: list[list[torch.Tensor]] = field(repr=False)
    steps: int


@dataclass
class Found:
    """What was found of a script.

    Attributes:
        verdict: "right", "told" if a warning says that it is not, "silent" if none does, the name of an error of the
            package, "crash" for another one, or "not run" if one process of it fails.
        why: For all but "right": what differs, or how it ended.
        differs: The largest difference of a parameter on 2 and 3 ranks, held still, as a part of the largest one.
        seconds: How long one rank took, and two, as it is.
        divided: How many calls two ranks divided.
        said: What the package said of it, on two ranks.
    """

    script: str
    verdict: str
    why: list[str] = field(default_factory=list)
    differs: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    divided: int = 0
    said: list[str] = field(default_factory=list)


class Trial:
    """A script with its data, in a folder that is laid anew for each run."""

    def __init__(self, script: Script, checkouts: Path, temporary: Path) -> None:
        self.script, self.template, self.folder = script, temporary / "template", temporary / "x"
        (self.folder / "run").mkdir(parents=True)
        (self.folder / "home").mkdir()
        recorder = Path(__file__).with_name("scripts_recorder.py").read_text()
        (self.folder / "sitecustomize.py").write_text(script.shim + recorder)
        (self.folder / "checkout").symlink_to(checkouts / script.repository)
        source = (checkouts / script.repository / script.path).parent
        shutil.copytree(source, self.folder / "code", ignore=GIT)
        script.data(self.folder)
        self.folder.rename(self.template)
        self.before = {
            str(path.relative_to(self.template)): digest(path)
            for path in self.template.rglob("*")
            if path.is_file() and not path.is_symlink()
        }

    def run(self, ranks: int, *, still: bool, options: Sequence[str] = ()) -> Ran:
        """Run the script on some ranks; 0 stands for Python alone."""
        fresh(self.template, self.folder)
        (self.folder / "record").mkdir()
        target = str(self.folder / "code" / Path(self.script.path).name)
        command = [sys.executable, "-W", "ignore"]
        if ranks:
            command += ["-m", "ddp_patch", "run", "-n", str(ranks), *options, "--seed", "0"]
        begun = time.perf_counter()
        done = subprocess.run(  # noqa: S603 - what the list names
            [*command, target, *self.script.arguments],
            cwd=self.folder / "run",
            env=self.environment(still=still),
            check=False,
            timeout=LIMIT_S,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
        )
        seconds = time.perf_counter() - begun
        kept = [torch.load(path) for path in sorted((self.folder / "record").glob("*.pt"))]
        shutil.rmtree(self.folder / "record")
        shutil.rmtree(self.folder / "home")
        return Ran(
            done.returncode,
            seconds,
            done.stderr,
            left(done.stdout, self.folder, self.before),
            [each["parameters"] for each in kept],
            max((each["steps"] for each in kept), default=0),
        )

    def environment(self, *, still: bool) -> Mapping[str, str]:
        """Return the environment of the script."""
        paths = [str(self.folder), *(str(self.folder / "checkout" / name) for name in self.script.paths)]
        own = {
            "RECORD_TO": str(self.folder / "record"),
            "STILL": str(still),
            "DOUBLE": str(still and not self.script.single),
            "STOP_AFTER": str(self.script.stop),
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
            "MPLBACKEND": "agg",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TQDM_DISABLE": "1",
            "HOME": str(self.folder / "home"),
            "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        return {**os.environ, **own}


def tried(script: Script, checkouts: Path, *, quick: bool) -> Found:
    """Run a script on one rank and on several, still and as it is, and return what was found."""
    found = Found(f"{script.repository}: {script.path}", "right")
    if not (checkouts / script.repository / script.path).exists():
        return Found(found.script, "not run", ["There is no checkout of it."])
    with tempfile.TemporaryDirectory() as temporary:
        trial = Trial(script, checkouts, Path(temporary))
        for still in (True,) if quick else (True, False):
            compare(trial, found, RANKS[:1] if quick or not still else RANKS, still=still)
            if found.verdict not in ("right", "told", "silent"):
                break
    return found


def compare(trial: Trial, found: Found, several: Sequence[int], *, still: bool) -> None:
    """Compare a script's ranks with one, and put into ``found`` what differs."""
    one, but = trial.run(1, still=still), None
    close = CLOSE["as it is" if not still else "single" if trial.script.single else "double"]
    if one.code:
        found.verdict, found.why = "not run", [f"still={still}", *one.errors.strip().splitlines()[-12:]]
        return
    for ranks in several:
        many = trial.run(ranks, still=still)
        if ranks == RANKS[0]:
            found.seconds = [one.seconds, many.seconds]  # as it is, in the end
            found.said = said(many.errors)
            numbers = DIVIDED.findall(" ".join(" ".join(found.said).split()))
            found.divided = sum(int(number.replace(",", "")) for number in numbers)
        if many.code:
            last = many.errors.strip().splitlines()[-12:]
            error = OURS.search("\n".join(last))
            found.verdict = error.group(1) if error else "crash"
            found.why = [f"{ranks} ranks, still={still}:", *last]
            return
        apart = told_apart(one.left, many.left, set(), close)
        if apart and but is None:
            but = varying(one.left, trial.run(1, still=still).left)
        if apart:
            apart = told_apart(one.left, many.left, but or set(), close)
        if still:
            apart += parameters_apart(one, many, found, close)
        if apart:
            warned = [line for line in said(many.errors) if "Warning" in line]
            if still or found.verdict == "right":
                found.verdict = "told" if warned else ("silent" if still else "right, but for what is drawn")
            found.why += [f"{ranks} ranks, still={still}: {each}" for each in apart[:6]] + warned[:3]


def said(errors: str) -> list[str]:
    """Return what the package said: its lines, and its summary."""
    before, _, summary = errors.rpartition("ddp_patch:\n")
    return [*(line for line in before.splitlines() if line.startswith("ddp_patch")), *summary.splitlines()]


def parameters_apart(one: Ran, many: Ran, found: Found, close: float) -> list[str]:
    """Compare parameters: those of all ranks with each other, and with those of one."""
    if not many.parameters or not one.parameters:
        return []
    first = many.parameters[0]
    apart = [
        f"rank {rank} ended with other parameters than rank 0"
        for rank, own in enumerate(many.parameters)
        if len(own) != len(first) or any(not torch.equal(*pair) for pair in zip(first, own, strict=True))
    ]
    if [x.shape for x in first] != [x.shape for x in one.parameters[0]]:
        return [*apart, f"{len(first)} parameters, not {len(one.parameters[0])}"]
    pairs = [pair for pair in zip(first, one.parameters[0], strict=True) if pair[0].numel()]
    if pairs:
        largest = max(float(b.abs().max()) for _, b in pairs)
        found.differs.append(max(float((a - b).abs().max()) for a, b in pairs) / (largest or 1.0))
        if not found.differs[-1] <= close:
            apart.append(f"parameters differ by {found.differs[-1]:.1e} of the largest one, after {many.steps} steps")
    return apart


def row(found: Found) -> str:
    """Return a script's row of the table."""
    differs = ", ".join(f"{each:.0e}" for each in found.differs) or "none trained"
    seconds = ", ".join(f"{each:.0f}" for each in found.seconds)
    return f"| {found.script} | {found.verdict} | {differs} | {found.divided:,} | {seconds} |"


def main() -> None:
    """Run the scripts, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("chosen", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_intermixed_args()
    has_file = options.json and options.json.exists()
    known = {json.loads(line)["script"] for line in options.json.read_text().splitlines()} if has_file else set()
    print(
        "| script | verdict | 2 and 3 ranks beside 1 | divided calls | seconds, 1 and 2 ranks |\n"
        "| --- | --- | --- | --- | --- |"
    )
    for script in SCRIPTS:
        if options.chosen and not any(one in f"{script.repository}/{script.path}" for one in options.chosen):
            continue
        if f"{script.repository}: {script.path}" in known:
            continue
        found = tried(script, options.checkouts.resolve(), quick=options.quick)
        print(row(found), flush=True)
        for line in found.why:
            print("   ", line, file=sys.stderr, flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main()
