"""What two ranks see of five loaders that are handed to a framework as they are, for ``docs/frameworks.md``.

``nox -s unpatched`` runs this, ``-- FRAMEWORK`` for one of ``tests/integrations/frameworks`` alone. That a patched
loader is shared once there is tested by ``nox -s integrations``.
"""

import argparse
import pickle
import warnings
from collections import Counter
from contextlib import suppress
from itertools import chain, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

from frameworks import FRAMEWORKS, framework
from frameworks.base import Epochs
from frameworks.kinds import KINDS, Kind
from pages import markdown, put
from zoo import seed_ambient

from ddp_patch.errors import RanksFailedError

PAGE = Path(__file__).parents[1] / "docs" / "frameworks.md"
RANKS, EPOCHS = 2, 3
LIMIT_S = 100.0  # for ranks to start, to import the framework, and to train; one that does not hang takes a tenth

Numbers = list[list[int]]  # the samples of each batch of an epoch
Shares = tuple[Numbers, ...]  # of each rank


def main() -> None:
    """Measure all frameworks, or those that are named, and write their tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("frameworks", nargs="*", default=FRAMEWORKS, metavar="framework")
    for module in parser.parse_args().frameworks:
        rows = [(kind.name, fate(module, kind)) for kind in KINDS]
        versions, fates = framework(module).versions, {found for _, found in rows}
        alike = f"{versions}, all five loaders: {', '.join(fates)}."
        put(PAGE, module, alike if len(fates) == 1 else markdown((versions, "unpatched"), rows))
        print(module, *rows, sep="\n  ", flush=True)


def fate(module: str, kind: Kind) -> str:
    """Return what becomes of a loader that is not patched."""
    with TemporaryDirectory() as folder:
        with suppress(RanksFailedError):  # what is missing hangs
            framework(module).launch(on_rank, RANKS, module, kind.name, folder, timeout=LIMIT_S)
        ranks = [pickle.loads(path.read_bytes()) for path in Path(folder).iterdir()]  # noqa: S301 - our own
    if len(ranks) < RANKS:
        return "hangs"
    if errors := sorted({found for found in ranks if isinstance(found, str)}):
        return f"raises `{'`, `'.join(errors)}`"
    return judged(
        kind, [tuple([batch.numbers for batch in epoch] for epoch in shares) for shares in zip(*ranks, strict=True)]
    )


def on_rank(rank: int, world_size: int, module: str, name: str, folder: str) -> None:
    """Write down what this rank's training steps see, or the error's name."""
    warnings.simplefilter("ignore")
    seed_ambient(100 + rank)
    (kind,) = (kind for kind in KINDS if kind.name == name)
    found: Epochs | str
    try:
        found = framework(module).passes(kind.make(), False, [None] * EPOCHS)
    except Exception as error:  # noqa: BLE001 - whatever a framework raises is its result
        found = type(error).__name__
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))


def judged(kind: Kind, epochs: list[Shares]) -> str:
    """Say what all ranks saw; not what is as it should be: weights and batches as given, equal steps, new orders."""
    _, worst = max(cover(kind, shares) for shares in epochs)
    facts = [worst]
    if kind.is_whole is not None:
        batches = chain.from_iterable(chain.from_iterable(epochs))
        # No rank makes more steps than one process, whose batches these should be.
        few = max(len(share) for shares in epochs for share in shares) <= len(kind.make())
        facts += [] if few and all(map(kind.is_whole, batches)) else ["batches split"]
    if kind.is_weighted is not None:
        turns = [chain.from_iterable(zip_longest(*shares, fillvalue=[])) for shares in epochs]
        facts += [] if kind.is_weighted([list(chain.from_iterable(turn)) for turn in turns]) else ["weights ignored"]
    uneven = [[len(share) for share in shares] for shares in epochs if len(set(map(len, shares))) > 1]
    facts += [f"{' and '.join(map(str, steps))} steps" for steps in uneven[:1]]
    is_new = all(len({repr(epoch) for epoch in rank}) == len(rank) for rank in zip(*epochs, strict=True))
    return ", ".join(facts if is_new else [*facts, "same order every epoch"])


def cover(kind: Kind, shares: Shares) -> tuple[int, str]:
    """Return how many samples of an epoch are amiss, and what that is."""
    taken = [Counter(chain.from_iterable(share)) for share in shares]
    together = sum(taken, Counter[int]())
    missing, repeated = kind.n - len(together), together.total() - len(together)
    if all(len(numbers) == kind.n for numbers in taken):
        return missing + repeated, "all data on every rank"
    # One unit less than there are ranks may be needed to fill the last round: a sample, or a batch of them.
    unit = 1 if kind.is_whole is None else max(len(batch) for share in shares for batch in share)
    if not missing and repeated <= (len(shares) - 1) * unit:
        return 0, "each sample once"
    parts = {f"{missing} of {kind.n} missing": missing, f"{repeated} repeat{'s' if repeated > 1 else ''}": repeated}
    return missing + repeated, ", ".join(text for text, number in parts.items() if number)


if __name__ == "__main__":
    main()
