"""Draw pictures, before and after: how often four ranks see each sample, and how long they wait for each other.

``nox -s pictures`` runs this. It prints counts, and writes ``docs/index-light.svg`` and ``docs/index-dark.svg``.
It also writes figures of audits of ``docs/examples/loaders.py``: ``docs/audit-*.svg`` and ``docs/audit-seen-*.svg``.
``--audit`` draws these alone.
"""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from runpy import run_path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from torch.utils.data import DataLoader, Sampler

from ddp_patch import audit, patch_dataloader_to_ddp
from ddp_patch.auditing.picture import alternative, svg
from ddp_patch.testing import run_ranks

SAMPLES, RANKS, COLUMNS = 40, 4, 20
CONDITION = """Four ranks, seeded differently, and a custom sampler.
How often they see each sample in an epoch (it should be once):"""
DOCS = Path(__file__).parents[1] / "docs"
# From a colour-blind safe palette: never seen, once, more than once. The number in each cell says it without colour.
NEVER, ONCE, OFTEN = "#d55e00", "#56b4e9", "#e69f00"
INK = {"light": "#222222", "dark": "#e6e6e6"}


class OwnSampler(Sampler[int]):
    """Every sample once, in a new order in each epoch, drawn from torch's global random state."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())


def epochs(rank: int, world_size: int) -> dict[str, list[int]]:
    """Return what this rank sees in an epoch, by what became of the loader."""
    warnings.simplefilter("ignore")
    os.environ["TORCHELASTIC_RUN_ID"] = "pictures"  # this process was started by something else than Fabric
    from lightning.fabric import Fabric

    torch.manual_seed(rank)  # as for augmentations
    loader = DataLoader(range(SAMPLES), batch_size=5, sampler=OwnSampler())  # type: ignore[arg-type]  # a range will do
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="ddp")
    fabric.launch()
    loaders: dict[str, Any] = {
        "the loader as it is": loader,
        f"Lightning Fabric {version('lightning')}": fabric.setup_dataloaders(loader),
        "patch_dataloader_to_ddp": patch_dataloader_to_ddp(loader),
    }
    return {name: torch.cat(list(made)).tolist() for name, made in loaders.items()}


def picture(counts: dict[str, Counter[int]], ink: str) -> Any:
    """Draw a panel for each loader, with a cell for each sample."""
    rows = SAMPLES // COLUMNS
    figure, panels = plt.subplots(len(counts), 1, figsize=(8, 5.2), layout="constrained")
    figure.suptitle(CONDITION, x=0.01, ha="left", color=ink, fontsize=15)
    for panel, (name, seen) in zip(panels, counts.items(), strict=True):
        for index in range(SAMPLES):
            column, row = index % COLUMNS, index // COLUMNS
            number = seen[index]
            colour = NEVER if number == 0 else ONCE if number == 1 else OFTEN
            panel.add_patch(plt.Rectangle((column + 0.05, row + 0.05), 0.9, 0.9, color=colour))
            panel.text(column + 0.5, row + 0.54, number, ha="center", va="center", color="#000000", fontsize=16)
        panel.set(xlim=(0, COLUMNS), ylim=(rows, 0), aspect="equal")
        panel.axis("off")
        panel.set_title(name, loc="left", color=ink, fontsize=15, fontweight="bold")
        panel.set_title(summary(seen), loc="right", color=ink, fontsize=15)
    return figure


def summary(seen: Counter[int]) -> str:
    """Put the counts into words."""
    return f"{SAMPLES - len(seen)} never, {seen.total() - len(seen)} repeated"


def draw_audits() -> None:
    """Write pictures of audits: who gets which samples, and how long four ranks wait."""
    made = run_path(str(DOCS / "examples" / "loaders.py"))
    seen = audit(made["by_slices"], RANKS, epochs=1)
    waiting = audit(made["texts"], RANKS, epochs=1, cost=made["tokens"])
    for name, report, part in (("audit-seen", seen, "shares"), ("audit", waiting, "waits")):
        print(alternative(report.pictured))
        for scheme in INK:
            drawn = svg(report.pictured, scheme, [part])
            (DOCS / f"{name}-{scheme}.svg").write_text(drawn, encoding="utf-8")


def main() -> None:
    """Run the ranks, print the counts and draw them."""
    ranks = run_ranks(epochs, RANKS)
    counts = {name: Counter(index for rank in ranks for index in rank[name]) for name in ranks[0]}
    for name, seen in counts.items():
        print(f"{name}: {summary(seen)}")
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "ddp_patch"
    for scheme, ink in INK.items():
        figure = picture(counts, ink)
        # The light one brings its paper: it is what is shown where nothing chooses by the reader's scheme.
        paper = "white" if scheme == "light" else "none"
        figure.savefig(DOCS / f"index-{scheme}.svg", metadata={"Date": None}, facecolor=paper)
        plt.close(figure)
    draw_audits()


if __name__ == "__main__":
    draw_audits() if sys.argv[1:] == ["--audit"] else main()
