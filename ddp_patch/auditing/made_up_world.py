"""All ranks of a world, and one process alone beside them, drawn epoch by epoch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch.utils.data import DataLoader

from ddp_patch.auditing.coding import Coding
from ddp_patch.auditing.drawing import Drawn, made_of_batches
from ddp_patch.auditing.judge import Epoch, signature
from ddp_patch.auditing.processes import drawn_by_processes
from ddp_patch.auditing.report import Units
from ddp_patch.auditing.simulate import Rank, ranks_of
from ddp_patch.auditing.subject import Subject, stream_of

__all__ = ["MadeUpWorld", "Progress"]

Progress: TypeAlias = Callable[[int, int], object]  # how many of how many draws are done

# Options of patch_dataloader_to_ddp() that real ranks alone can follow.
_COMMUNICATING = {"agreement", "verify", "process_group", "device_mesh", "data_parallel_dimensions"}


class MadeUpWorld:
    """Draws what is audited on every rank.

    Args:
        subject: What is audited.
        world_size: How many ranks.
        epochs: How many epochs each draws.
        processes: Whether the ranks are real ones.
        timeout: How many seconds these may take.
        progress: Called with how many of how many draws are done.

    Attributes:
        coding: Gives every item its number.
        units: What is shared.
        first: Rank 0's loader, to look at.
    """

    def __init__(
        self, subject: Subject, world_size: int, epochs: int, processes: bool, timeout: float, progress: Progress
    ) -> None:
        made_up = subject
        if processes and isinstance(subject.make, DataLoader) and subject.patch:
            # Real ranks take rank 0's seed, and one process alone must have the same.
            subject = replace(subject, options={"seed": 0, **subject.options})
            # A made-up world has nobody to communicate with.
            alone = {name: value for name, value in subject.options.items() if name not in _COMMUNICATING}
            made_up = replace(subject, options=alone)
        self._made_up = made_up
        self.subject: Subject = subject
        self.world_size: int = world_size
        self.epochs: int = epochs
        self.processes: bool = processes
        self._timeout, self._progress = timeout, progress
        self.coding: Coding = Coding()
        whole = replace(made_up, max_items=subject.max_items * world_size)
        self._alone = Rank(lambda: stream_of(whole.loader(0, 1)), whole, seeded_as=0)
        self.units: Units = "batches" if made_of_batches(self._alone.loader) else "samples"
        self.first: DataLoader[Any] = Rank(lambda: made_up.loader(0, world_size), made_up, seeded_as=0).loader

    def drawn(self) -> Iterator[Epoch]:
        """Draw every epoch."""
        ranks = self._epochs_of_ranks(alike=False)
        done, of = 0, self.epochs * (self.world_size + 1)
        for number in range(self.epochs):
            alone = self._alone.epoch(number, self.coding)
            drawn = []
            for one in ranks(number):
                drawn.append(one)
                done += 1
                self._progress(done, of)
            done += 1
            self._progress(done, of)
            yield Epoch(number, _in_step(drawn), alone, self.units)

    def alike(self, epoch: Epoch) -> Epoch:
        """Draw an epoch again with all ranks seeded alike."""
        ranks = self._epochs_of_ranks(alike=True)
        for number in range(epoch.number + 1):
            drawn = list(ranks(number))
        return Epoch(epoch.number, _in_step(drawn), epoch.alone, self.units)

    def _epochs_of_ranks(self, alike: bool) -> Callable[[int], Iterator[Drawn]]:
        if self.processes:
            by_rank = drawn_by_processes(self.subject, self.world_size, self.epochs, alike, self._timeout, self.coding)
            return lambda number: (epochs[number] for epochs in by_rank)
        ranks = ranks_of(self.subject, self.world_size, alike)
        return lambda number: (rank.epoch(number, self.coding) for rank in ranks)

    def is_changed_by_epoch(self, first: Drawn) -> bool:
        """Tell whether rank 0's first pass would be another if ``set_epoch(1)`` had been called."""
        rank = Rank(lambda: self._made_up.loader(0, self.world_size), self._made_up, seeded_as=0)
        steps = len(first.sizes)
        return signature([rank.epoch(1, self.coding, tells_epoch=True).first_steps(steps)]) != signature([first])


def _in_step(ranks: Sequence[Drawn]) -> list[Drawn]:
    """Cut what is a sample to as many steps on every rank."""
    if all(drawn.ended or drawn.error for drawn in ranks):
        return list(ranks)
    steps = min(len(drawn.sizes) for drawn in ranks if not drawn.ended)
    return [drawn if len(drawn.sizes) <= steps else drawn.first_steps(steps) for drawn in ranks]
