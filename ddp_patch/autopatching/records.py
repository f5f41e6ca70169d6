"""What autopatch records about each loader: where it was made, what was done with it, how often it was iterated."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from ddp_patch.errors import DDPPatchError
from ddp_patch.loaders.facts import Level, LoaderFacts
from ddp_patch.loaders.samples import length_of
from ddp_patch.plan import Plan
from ddp_patch.shares.batches import patched_sampler, require_batches
from ddp_patch.shares.turns import Turns

__all__ = ["Fate", "Record", "counted", "what_it_is", "with_share"]

Fate: TypeAlias = Literal["patched", "would be patched", "would be refused", "left alone", "shards itself"]


@dataclass
class Record:
    """A loader that was used.

    Attributes:
        place: Where it was made.
        what: What it is.
        fate: What was done with it.
        note: Why, or what else to report.
        samples: How many items a rank gets in a pass, in words.
        padding: How many items of a pass are repeated over all ranks, or left out, in words.
        steps: How many steps a rank makes; None if that is not known.
        ranks: How many ranks share.
        passes: How often it was iterated.
        loader: The loader, if it was patched and still lives.
    """

    place: str
    what: str
    fate: Fate
    note: str = ""
    samples: str = ""
    padding: str = ""
    steps: int | None = None
    ranks: int = 1
    passes: int = 0
    loader: "weakref.ref[DataLoader[Any]] | None" = None

    def note_pass(self) -> None:
        """Fill in what its latest pass has shown of a loader without a length, if that came to its end."""
        loader = None if self.loader is None else self.loader()
        turns = None if loader is None or self.samples else _whole_pass(loader)
        if turns is not None:
            lengths = [part.length or 0 for part in turns.parts]
            self.steps = turns.count
            self.note_shares(turns.plan, lengths, "sample" if turns.batching.size > 1 else "item")

    def note_shares(self, plan: Plan, lengths: Sequence[int], unit: str) -> None:
        """Fill in what a rank gets of streams of these lengths."""
        self.samples = counted(sum(len(plan.share(n)) for n in lengths), unit)
        more = sum(plan.total(n) - n for n in lengths)
        self.padding = f"{abs(more):,} {'left out' if more < 0 else 'repeated'}" if more else "none"

    @property
    def line(self) -> str:
        """What the log says."""
        steps = "unknown steps" if self.steps is None else counted(self.steps, "step")
        share = f"{self.ranks} ranks x {steps}"
        told = {"patched": share, "would be patched": f"would be {share}"}.get(self.fate, self.fate)
        return f"{self.place} {self.what}: {told}" + (f" ({self.note})" if self.note else "")


def what_it_is(facts: LoaderFacts[Any]) -> str:
    """Return what a loader is, in words: ``DataLoader, shuffled, 50,000 samples``."""
    n = facts.stream.length if facts.sharded_by is None else None
    length = "" if n is None else f", {counted(n, _unit(facts))}"
    return f"{type(facts.loader).__name__}, {_order(facts)}{length}"


def _unit(facts: LoaderFacts[Any]) -> str:
    return "batch" if facts.level is Level.BATCH else "sample"


def _order(facts: LoaderFacts[Any]) -> str:
    source = facts.stream.source
    if type(source) is RandomSampler:
        return "shuffled" if not source.replacement else "drawn with replacement"
    return "in order" if type(source) is SequentialSampler else type(source).__name__


def counted(number: int, unit: str) -> str:
    """Return a number of things, in words."""
    plural = {"batch": "batches"}.get(unit, f"{unit}s")
    return f"{number:,} {unit if number == 1 else plural}"


def with_share(record: Record, facts: LoaderFacts[Any], patched: DataLoader[Any]) -> Record:
    """Fill in what a rank gets of a patched loader."""
    sampler = patched_sampler("autopatch", patched)
    n, plan = facts.stream.length, sampler.plan
    record.steps, record.ranks, record.loader = length_of(patched, ()), sampler.num_replicas, weakref.ref(patched)
    if sampler.agreed.options.divides_batches:
        record.samples = "a part of each batch"
    elif n is not None and (facts.level is not Level.ITERABLE or facts.num_workers < 2):  # else each worker has a share
        record.note_shares(plan, [n], _unit(facts))
    if sampler.agreed.leader is not None:
        record.note = "rank 0 draws for all"
    return record


def _whole_pass(loader: DataLoader[Any]) -> Turns | None:
    """Return the batches of a loader's latest pass, if it came to its end."""
    try:
        batches = require_batches("autopatch", loader)
    except DDPPatchError:
        return None
    sampler = batches.sampler
    options = sampler.agreed.options
    # A rank may get other items than it reads.
    if sampler.latest is None or options.divides_batches or options.iterable_sharding == "by_worker":
        return None
    return sampler.turns_of_whole(sampler.latest, batches)
