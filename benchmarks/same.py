"""Run the same random programs against two trees of this package, and compare all that they give.

``python benchmarks/same.py --before FOLDER --after FOLDER --programs 200000``, where a folder holds ``ddp_patch/``.
``same_programs.py`` has the programs. Each tree runs in processes of its own. A program that gives something else is
shown with what both trees give, and the exit code is 1, unless it gives the same when it is run again. What the tree
before gives is kept for the next run.
"""

import argparse
import difflib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

PLAYER = Path(__file__).with_name("same_programs.py")
BLOCK = 2500  # programs that one process runs, so that little comes before the one that differs
MOST_SHOWN = 3
DIED = ["The process died."]
WHERE = "import importlib.util as util; print(util.find_spec('ddp_patch').origin)"
LEFT_OUT = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "DDP_PATCH_GUARD"}  # a program says itself which rank it is


class Block(NamedTuple):
    """Programs that one process runs.

    Attributes:
        seed: What they are drawn from.
        start: The first one's number.
        stop: The number after the last one's.
    """

    seed: int
    start: int
    stop: int


def process(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start a Python that imports this package from a tree."""
    kept = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    paths = os.pathsep.join(map(str, [folder, PLAYER.parent]))
    alike = {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(  # noqa: S603 - this very Python
        [sys.executable, *map(str, arguments)],
        env=kept | alike,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def lines(folder: Path, block: Block) -> Generator[str, None, None]:
    """Yield a digest for each program, and what they covered."""
    with process(folder, PLAYER, *block) as running:
        try:
            yield from running.stdout or ()
        finally:
            running.kill()


def kept_lines(folder: Path, block: Block) -> Generator[str, None, None]:
    """Yield what ``lines`` does, from the run before if the tree and the programs are the same."""
    sources = sorted([*folder.glob("ddp_patch/**/*.py"), *PLAYER.parent.glob("same_*.py")])
    name = hashlib.sha256(b"".join([sys.version.encode(), *(source.read_bytes() for source in sources)])).hexdigest()
    kept = Path(tempfile.gettempdir(), "ddp_patch_same", name[:16], "-".join(map(str, block)))
    if kept.exists():
        yield from kept.read_text().splitlines(keepends=True)
        return
    found = []
    for line in lines(folder, block):
        found.append(line)
        yield line
    if len(found) == block.stop - block.start + 1:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.with_suffix(".part").write_text("".join(found))
        kept.with_suffix(".part").rename(kept)


def compared(before: Path, after: Path, block: Block) -> tuple[list[int], Counter[str]]:
    """Return the numbers of the first programs that differ, and what was covered if none does."""
    different: list[int] = []
    covered = Counter[str]()
    number = block.start - 1
    with closing(kept_lines(before, block)) as old, closing(lines(after, block)) as new:
        for number, (one, other) in enumerate(zip_longest(old, new), block.start):
            if one != other and number < block.stop:
                different.append(number)
            if one is None or other is None or len(different) == MOST_SHOWN:  # a process died, or enough is known
                break
            if number == block.stop:
                covered.update(json.loads(one))
    if not (different or covered):  # both processes died
        different.append(number + 1)
    return different, covered


def shown(folder: Path, block: Block) -> list[str]:
    """Return the last program of a block and what it gives, as lines."""
    output, _ = process(folder, PLAYER, *block, "--show").communicate()
    if not output:
        return DIED
    program, records = json.loads(output)
    return [f"program {program}", *records]


def difference(before: Path, after: Path, block: Block, number: int) -> str | None:
    """Return a program in readable form and what it gives in both trees, alone or after what ran before it.

    None if both give the same now, or one of them something else in each run: then it was a chance, such as the moment
    at which garbage is collected.
    """
    for start in (number, block.start):
        program = Block(block.seed, start, number + 1)
        (old, new), again = ([shown(folder, program) for folder in (before, after)] for _ in range(2))
        if (old != new or old == DIED) and [old, new] == again:
            break
    else:
        return None
    listed = [line if line[0] in "+-" else line[:200] for line in difflib.ndiff(old, new) if line[0] != "?"]
    title = f"Program {number} of seed {block.seed} differs, run after {number - start} others: - before, + after"
    return "\n".join([title, *listed])


def show_covered(covered: Counter[str]) -> None:
    """Print how often each kind, act and error came."""
    for group in sorted({name.partition(": ")[0] for name in covered}):
        found = {
            name.partition(": ")[2]: times for name, times in covered.most_common() if name.startswith(group + ":")
        }
        print(f"{group}: {', '.join(f'{name} {times}' for name, times in found.items())}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two trees; return 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--programs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    given = parser.parse_args(arguments)
    before, after = given.before.resolve(), given.after.resolve()
    for folder in (before, after):
        origin, _ = process(folder, "-c", WHERE).communicate()
        if Path(origin.strip()).parent != folder / "ddp_patch":
            parser.error(f"{folder} holds no ddp_patch that is imported from there")
    starts = range(0, given.programs, BLOCK)
    blocks = [Block(given.seed, start, min(start + BLOCK, given.programs)) for start in starts]
    covered, begun = Counter[str](), time.monotonic()
    with ThreadPoolExecutor(given.jobs) as pool:
        running = {pool.submit(compared, before, after, block): block for block in blocks}
        for ended, task in enumerate(as_completed(running), 1):
            different, found = task.result()
            texts = [difference(before, after, running[task], number) for number in different]
            if any(texts):
                pool.shutdown(wait=False, cancel_futures=True)
                print(*filter(None, texts), sep="\n", flush=True)
                return 1
            if different:
                print(f"Differed by chance, not in each run: {different}", flush=True)
            covered += found
            done, seconds = ended * BLOCK, time.monotonic() - begun
            print(
                f"{min(done, given.programs)} programs, {min(done, given.programs) / seconds:.0f} a second", flush=True
            )
    show_covered(covered)
    print(f"No difference in {given.programs} programs of seed {given.seed}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
