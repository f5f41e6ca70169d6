"""Loaders with one iterator for all epochs, as other packages have them."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["BegunAtFirst", "Infinite", "MultiEpochs", "RepeatSampler"]


class RepeatSampler:
    """As in timm and Ultralytics: it gives what it holds, again and again."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class MultiEpochs(DataLoader[Any]):
    """As timm's MultiEpochsDataLoader: its constructor begins the one iterator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        place = "sampler" if self.batch_sampler is None else "batch_sampler"
        object.__setattr__(self, place, RepeatSampler(getattr(self, place)))
        self.iterator: Any = super().__iter__()

    def __len__(self) -> int:
        repeater: Any = self.sampler if self.batch_sampler is None else self.batch_sampler
        return len(repeater.sampler)

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


class Infinite(MultiEpochs):
    """As Ultralytics' InfiniteDataLoader: it can be reset, and ends its workers when it goes.

    There they are killed first, and one that is killed while it looks whether all is done keeps the lock that whoever
    says so then waits for, for ever.
    """

    def reset(self) -> None:
        self.iterator = self._get_iterator()

    def __del__(self) -> None:
        try:
            self.iterator._shutdown_workers()
            for worker in self.iterator._workers:
                worker.terminate()
        except Exception:  # noqa: BLE001, S110 - as there
            pass


class BegunAtFirst(DataLoader[Any]):
    """It begins the one iterator when it is first iterated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", RepeatSampler(self.batch_sampler))
        self.iterator: Any = None

    def __len__(self) -> int:
        repeater: Any = self.batch_sampler
        return len(repeater.sampler)

    def __iter__(self) -> Any:
        if self.iterator is None:
            self.iterator = super().__iter__()
        return (next(self.iterator) for _ in range(len(self)))
