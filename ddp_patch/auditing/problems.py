"""Name the kinds of problem that an audit finds, and describe one that it found."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Kind", "Problem", "problem_kinds"]

Kind: TypeAlias = Literal[
    "not_sharded",
    "ignores_world_size",
    "double_sharding",
    "ranks_disagree",
    "split_batch",
    "missing",
    "tail_lost",
    "repeated",
    "foreign",
    "padding",
    "uneven_steps",
    "idle_workers",
    "same_order",
    "wrong_length",
    "error",
]
problem_kinds: Mapping[Kind, str] = {
    "not_sharded": "every rank gets all data, or ranks get the same part of it",
    "ignores_world_size": "make(0, 1) returns what rank 0 of several gets",
    "double_sharding": "data is sharded twice",
    "ranks_disagree": "the ranks use different orders",
    "split_batch": "a batch of the batch sampler reaches several ranks in pieces",
    "missing": "samples that no rank gets",
    "tail_lost": "the same few samples are left out in every epoch",
    "repeated": "samples that are seen more than once",
    "foreign": "samples that ranks get and one process never gets",
    "padding": "more samples are repeated than fill the last round",
    "uneven_steps": "ranks make different numbers of steps",
    "idle_workers": "workers of an iterable dataset get nothing to read",
    "same_order": "every epoch has the same order",
    "wrong_length": "len() of the loader is not the number of its steps",
    "error": "a rank's sampler raises",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Describe something that is wrong, and what to do about it.

    Attributes:
        kind: The kind of problem, a key of ``problem_kinds``.
        what: What was found, with its numbers.
        where: The epoch and the ranks.
        why: Why it matters, and where it comes from.
        remedy: What to do about it.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> (problem,) = audit(DataLoader(range(8)), world_size=2, patch=False).problems
        >>> problem.kind, problem.where, problem.what
        ('not_sharded', 'epoch 0, 2 ranks', 'Each of 2 ranks gets all of the data, 8 samples.')
    """

    kind: Kind
    what: str
    where: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.where}): {self.what} {self.why} {self.remedy}"
