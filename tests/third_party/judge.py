"""Whether the ranks of a world got together what one process gets, and how the page says so."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from third_party.base import Batch, Case, Fate
from third_party.measure import EPOCHS, Seen, one_process

__all__ = ["OneProcess", "Verdict", "judge", "judge_refusal"]


@dataclass(frozen=True)
class Verdict:
    """What happened to a loader in one world.

    Attributes:
        text: What happened, as the page says it.
        problems: What should not have happened.
    """

    text: str
    problems: list[str]


class OneProcess:
    """What the loader gives in one process, which is what the ranks have to share."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.seen, self.again = one_process(case), one_process(case, seed=7)

    def stream(self, epoch: int) -> Counter[Any]:
        """Count the samples (or batches, where these are shared) of an epoch.

        Where they are drawn at random, they are what the loader gives under the seed of the ranks.
        """
        plain, again = (units(self.case, seen.epochs[epoch]) for seen in (self.seen, self.again))
        return plain if plain == again else units(self.case, self._seeded.epochs[epoch])

    @cached_property
    def _seeded(self) -> Seen:
        return one_process(self.case, patched=True)

    @property
    def shuffles(self) -> bool:
        """Whether the second epoch has another order than the first."""
        first, second = self.seen.epochs
        return first != second

    @property
    def text(self) -> str:
        """What it gives in one process, as the page says it."""
        first = self.seen.epochs[0]
        order = ", new each epoch" if self.shuffles else ""
        if self.case.steps is not None:
            return "endless"
        return f"{sum(map(len, first))} samples in {counted(len(first), 'batch')}{order}"


def units(case: Case, batches: Sequence[Batch]) -> Counter[Any]:
    """Count what is shared: batches as they are, or samples."""
    return Counter(batches) if case.whole else Counter(item for batch in batches for item in batch)


def judge(case: Case, alone: OneProcess, ranks: Sequence[Seen]) -> Verdict:
    """Compare what the ranks got with what one process gets, and what was done with what was expected."""
    failed = [f"rank {rank}: {seen.message}" for rank, seen in enumerate(ranks) if seen.fate is None]
    if failed:
        return Verdict("failed", failed)
    problems = [
        f"rank {rank}: {seen.fate.value}, where {case.fate.value} was expected ({seen.message})"
        for rank, seen in enumerate(ranks)
        if seen.fate is not None and seen.fate is not case.fate
    ]
    problems += [f"rank {rank}: the guard does not count it" for rank, seen in enumerate(ranks) if not seen.counted]
    problems += [problem for epoch in range(EPOCHS) for problem in _epoch_problems(case, alone, ranks, epoch)]
    if case.fate is not Fate.AS_IT_IS:
        problems += _lost_abilities(case, alone, ranks)
    if case.fate is Fate.REFUSED and case.told not in ranks[0].message:
        problems += [f"the refusal does not say {case.told!r}: {ranks[0].message}"]
    return Verdict(_text(case, ranks), problems)


def judge_refusal(case: Case, ranks: Sequence[Seen]) -> Verdict:
    """Judge a refusal whose remedy is to do something else altogether."""
    said = all(seen.fate is Fate.REFUSED and case.told in seen.message for seen in ranks)
    return Verdict("refused", [] if said else [f"{seen.fate}: {seen.message}" for seen in ranks])


def _epoch_problems(case: Case, alone: OneProcess, ranks: Sequence[Seen], epoch: int) -> list[str]:
    together = sum((units(case, seen.epochs[epoch]) for seen in ranks), Counter[Any]())
    stream = alone.stream(epoch)
    lost, repeated = stream - together, together - stream
    problems = []
    if case.repeats:
        shares = [units(case, seen.epochs[epoch]) for seen in ranks]
        return [f"epoch {epoch}: all ranks get the same"] if all(share == shares[0] for share in shares) else []
    if lost:
        problems.append(f"epoch {epoch}: lost {lost.total()} of {stream.total()}, such as {sorted(lost, key=repr)[:3]}")
    if set(repeated) - set(stream):
        problems.append(f"epoch {epoch}: not in the stream: {sorted(set(repeated) - set(stream), key=repr)[:3]}")
    if repeated.total() >= len(ranks):
        problems.append(f"epoch {epoch}: repeated {repeated.total()} of {stream.total()}")
    steps = [len(seen.epochs[epoch]) for seen in ranks]
    if len(set(steps)) > 1 and case.fate is not Fate.AS_IT_IS:
        problems.append(f"epoch {epoch}: unequal steps {steps}")
    return problems


def _lost_abilities(case: Case, alone: OneProcess, ranks: Sequence[Seen]) -> list[str]:
    """Name what the loader can do in one process and the patched one cannot."""
    problems = []
    for rank, seen in enumerate(ranks):
        if alone.shuffles and seen.epochs[0] == seen.epochs[1]:
            problems.append(f"rank {rank}: the same order in both epochs")
        if alone.seen.length == len(alone.seen.epochs[0]) and seen.length != len(seen.epochs[0]):
            problems.append(f"rank {rank}: len() is {seen.length}, and there are {len(seen.epochs[0])} steps")
    return problems


def _text(case: Case, ranks: Sequence[Seen]) -> str:
    steps = [len(seen.epochs[0]) for seen in ranks]
    if case.steps is not None:
        return "endless"
    same = counted(steps[0], "step") + " each"
    return same if len(set(steps)) == 1 else f"{' and '.join(map(str, steps))} steps"


def counted(number: int, thing: str) -> str:
    """Return a number of things, in words."""
    plural = {"batch": "batches"}.get(thing, f"{thing}s")
    return f"{number} {thing if number == 1 else plural}"
