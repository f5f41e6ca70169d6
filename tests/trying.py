"""Which kinds of loader a test tries, each in which of several ways, and which of these only the session soak does."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from zoo import Kind

__all__ = ["SEED", "WORLDS", "over", "over_in_turn"]

SEED = 7
WORLDS = (3, 2, 5)

# One of each sort: workers that all read the same, that read a part each, unequal ones, without an end, and kept.
WITH_WORKERS = {
    "iterable, 2 workers",
    "iterable, splits itself, 2 workers",
    "iterable, unequal shards, 2 workers",
    "iterable, endless",
    "iterable with set_epoch, persistent workers",
    "persistent workers",
    # Of ``resumed``, one of each sort.
    "workers",
    "whole batches",
    "single items of parts",
    "one iterator for all, workers",
    "a generator shared with the sampler, workers",
    "a generator shared with the dataset, worker",
    "seeds its generator in set_epoch, workers",
    *(f"{kind}, 2 workers" for kind in ("OwnCountsEpochs", "OwnFromIter", "BothHave", "CountsEpochs")),
}


def over(kinds: list[Kind], every: bool = False) -> pytest.MarkDecorator:
    """Try kinds; where ``every`` is not asked for, those with workers, which take long to start, mostly in the soak."""
    later = [not every and kind.make().num_workers > 0 and kind.name not in WITH_WORKERS for kind in kinds]
    marks = [[pytest.mark.soak] * is_later for is_later in later]
    cases = [pytest.param(kind, id=kind.name, marks=mark) for kind, mark in zip(kinds, marks, strict=True)]
    return pytest.mark.parametrize("kind", cases)


def over_in_turn(
    kinds: list[Kind],
    name: str,
    ways: Sequence[Any],
    every: bool = False,
    suits: Callable[[Kind, Any], bool] = lambda kind, way: True,
) -> pytest.MarkDecorator:
    """Try kinds as ``over`` does, each in one of the ways that suit it, in turn; the session soak tries the others.

    Those with workers are tried in the first way only.
    """
    cases = []
    for number, kind in enumerate(kinds):
        has_workers = kind.make().num_workers > 0
        is_later = has_workers and not every and kind.name not in WITH_WORKERS
        suitable = ways[:1] if has_workers else [way for way in ways if suits(kind, way)]
        for place, way in enumerate(suitable):
            told = " ".join(map(str, way.values() if isinstance(way, dict) else [way]))
            marks = [pytest.mark.soak] * (is_later or number % len(suitable) != place)
            cases.append(pytest.param(kind, way, id=f"{kind.name}-{told}", marks=marks))
    return pytest.mark.parametrize(("kind", name), cases)
