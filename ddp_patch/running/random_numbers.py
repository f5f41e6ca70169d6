"""Random numbers that a rank draws within a divided call: its own there, and alike on all ranks after it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["OwnNumbers", "own_numbers"]

_APART = 0x9E3779B97F4A7C15  # between the seeds of ranks


def states() -> list[torch.Tensor]:
    """Return the states of torch's global generators."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if used else [])]


def put(of_all: list[torch.Tensor]) -> None:
    """Put states back."""
    torch.set_rng_state(of_all[0])
    if of_all[1:]:
        torch.cuda.set_rng_state_all(of_all[1:])


class OwnNumbers:
    """What a rank draws in a divided call.

    Attributes:
        has_drawn: Whether some rank has drawn numbers.
    """

    def __init__(self, rank: int) -> None:
        self.has_drawn: bool = False
        self._before = states()
        seed = (int(torch.randint(2**62, (), device="cpu")) + rank * _APART) % 2**63
        self._common = states()
        torch.default_generator.manual_seed(seed)
        if self._before[1:]:
            torch.cuda.manual_seed_all(seed)
        self._own = states()

    @property
    def are_drawn(self) -> bool:
        """Whether this rank has drawn some so far."""
        return not all(map(torch.equal, self._own, states()))

    def put_back(self) -> None:
        """Let all ranks go on alike: from where they were, or after one number, if some rank has drawn."""
        put(self._common if self.has_drawn else self._before)


@contextmanager
def own_numbers(rank: int) -> Iterator[OwnNumbers]:
    """Let a rank draw its own numbers while entered."""
    numbers = OwnNumbers(rank)
    try:
        yield numbers
    finally:
        numbers.put_back()
