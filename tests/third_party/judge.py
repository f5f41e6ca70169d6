"""Whether the ranks of a world got together what one process gets."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from third_party.base import Batch, Case, Fate
from third_party.measure import EPOCHS, Seen, one_process

__all__ = ["OneProcess", "Verdict", "judge"]


@dataclass(frozen=True)
class Verdict:
    """What happened to a loader in one world.

    Attributes:
        complete: Whether the ranks together got what one process gets, but for what fills up the last round.
        problems: What should not have happened.
    """

    complete: bool
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


def units(case: Case, batches: Sequence[Batch]) -> Counter[Any]:
    """Count what is shared: batches as they are, or samples."""
    return Counter(batches) if case.whole else Counter(item for batch in batches for item in batch)


def judge(case: Case, alone: OneProcess, ranks: Sequence[Seen]) -> Verdict:
    """Compare what the ranks got with what one process gets, and what was done with what was expected."""
    failed = [f"rank {rank}: {seen.message}" for rank, seen in enumerate(ranks) if seen.fate is None]
    if failed:
        return Verdict(False, failed)
    incomplete = [problem for epoch in range(EPOCHS) for problem in _incompleteness(case, alone, ranks, epoch)]
    problems = [*_other_fates(case, ranks), *([] if case.repeats else incomplete)]
    if case.fate is Fate.AS_IT_IS:
        problems += _same_on_all_ranks(ranks) if case.repeats else []
    else:
        problems += _unequal_steps(ranks) + _lost_abilities(alone, ranks)
    return Verdict(not incomplete, problems)


def _other_fates(case: Case, ranks: Sequence[Seen]) -> list[str]:
    """Name what patching did and should not have done."""
    problems = []
    for rank, seen in enumerate(ranks):
        if seen.fate is not case.fate:
            problems.append(f"rank {rank}: {case.fate.value} was expected, and it is {seen.fate}: {seen.message}")
        elif case.told not in seen.message:
            problems.append(f"rank {rank}: the refusal does not say {case.told!r}: {seen.message}")
        if not seen.counted:
            problems.append(f"rank {rank}: the guard does not count it")
    return problems


def _incompleteness(case: Case, alone: OneProcess, ranks: Sequence[Seen], epoch: int) -> list[str]:
    """Name what the ranks together lost, and what they repeated beyond the last round."""
    together = sum((units(case, seen.epochs[epoch]) for seen in ranks), Counter[Any]())
    stream = alone.stream(epoch)
    lost, repeated = stream - together, together - stream
    problems = []
    if lost:
        problems.append(f"epoch {epoch}: lost {lost.total()} of {stream.total()}, such as {sorted(lost, key=repr)[:3]}")
    if set(repeated) - set(stream):
        problems.append(f"epoch {epoch}: not in the stream: {sorted(set(repeated) - set(stream), key=repr)[:3]}")
    if repeated.total() >= len(ranks):
        problems.append(f"epoch {epoch}: repeated {repeated.total()} of {stream.total()}")
    return problems


def _same_on_all_ranks(ranks: Sequence[Seen]) -> list[str]:
    return ["all ranks get the same"] if all(seen.epochs == ranks[0].epochs for seen in ranks) else []


def _unequal_steps(ranks: Sequence[Seen]) -> list[str]:
    steps = [[len(seen.epochs[epoch]) for seen in ranks] for epoch in range(EPOCHS)]
    return [f"epoch {epoch}: unequal steps {found}" for epoch, found in enumerate(steps) if len(set(found)) > 1]


def _lost_abilities(alone: OneProcess, ranks: Sequence[Seen]) -> list[str]:
    """Name what the loader can do in one process and the patched one cannot."""
    problems = []
    has_length = alone.seen.length == len(alone.seen.epochs[0])
    for rank, seen in enumerate(ranks):
        if alone.shuffles and seen.epochs[0] == seen.epochs[1]:
            problems.append(f"rank {rank}: the same order in both epochs")
        if has_length and seen.length != len(seen.epochs[0]):
            problems.append(f"rank {rank}: len() is {seen.length}, and there are {len(seen.epochs[0])} steps")
    return problems
