"""How streams begin and what they are at each mark: first items, marks in shared memory, states."""

import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from time import thread_time
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.data import IterableDataset

from ddp_patch.compat.packages import forget_loaded_state, loses_items_when_loaded
from ddp_patch.errors import StateError
from ddp_patch.options import Options
from ddp_patch.orders.fingerprint import COMPARED, ItemHashes, fingerprint, hashes_if_any
from ddp_patch.orders.generators import generator_states, is_stateful
from ddp_patch.ranks.order_verdicts import PartMarks, following
from ddp_patch.sharding.position import StreamSnapshot, StreamStart
from ddp_patch.streams.reading import Switching
from ddp_patch.streams.shared_state import shared_arrays

__all__ = ["FirstItems", "MarksInMemory", "SnapshotWriter", "can_snapshot"]


T = TypeVar("T")

# The first pass may be a mere look at a batch, so some more are recorded. Which ones depends on their numbers, not on
# how far workers have read ahead, so that it is the same on all ranks.
_PASSES = 3
# All parts together have this many notes of a pass, if that leaves each enough: ranks send them to each other.
_OF_ALL_PARTS = 2048
_FEWEST = 16
# Taking hashes may cost a reader this many seconds of a pass, and what one more item takes: items may be large.
_MOST_S = 1.0


class FirstItems:
    """Notes of the first items that the reader of each part read, in the first passes over a loader.

    Args:
        parts: How many parts there are.

    Examples:
        >>> first = FirstItems(parts=1)
        >>> first.begin(1, "epoch 0")
        >>> list(first.watching(0, 1, iter("ab")))
        ['a', 'b']
        >>> (notes,) = first.passes()["epoch 0 (1)"]
        >>> notes.count, notes.end
        (2, 2)
    """

    def __init__(self, parts: int) -> None:
        self.parts: int = parts
        self._most = min(COMPARED, max(_FEWEST, _OF_ALL_PARTS // parts))
        of_each = (_PASSES, parts)
        self._hashes, self._counts, self._ends, self._finals, self._asked, self._is_settled = shared_arrays(
            (*of_each, self._most, 3), of_each, of_each, of_each, of_each, (1,)
        )
        self._names: list[str] = []

    def begin(self, number: int, name: str) -> None:
        """Note, in the main process, that pass ``number`` begins: from 1, and named alike on all ranks."""
        if number == len(self._names) + 1 <= _PASSES:
            again = sum(known.startswith(f"{name} (") for known in self._names)
            self._names.append(f"{name} ({again + 1})")

    def settle(self) -> None:
        """Record that no more is needed."""
        self._is_settled[0] = 1

    def watching(
        self, part: int, number: int, items: Iterator[T], asked_rank: Callable[[], bool] = lambda: False
    ) -> Iterator[T]:
        """Return a part's items; the first ones are recorded as they are read.

        Args:
            part: The part.
            number: The pass.
            items: What the reader of the part reads.
            asked_rank: Tells whether the dataset has asked which rank it is on.
        """
        is_noted = 1 <= number <= _PASSES and part < self.parts and self._is_settled[0] < 0
        # Another iterator's worker may be about the same part of the same pass.
        if is_noted and self._counts[number - 1, part] < 0:
            return self._noting(part, number, items, asked_rank)
        return items

    def _noting(self, part: int, number: int, items: Iterator[T], asked_rank: Callable[[], bool]) -> Iterator[T]:
        hashes, counts, asked = self._hashes[number - 1, part], self._counts[number - 1], self._asked[number - 1]
        counts[part] = count = 0
        spent_s = 0.0
        for item in items:
            began_s = thread_time()
            asked[part] = asked_rank()
            hashes[count] = torch.tensor(hashes_if_any(item))
            counts[part] = count = count + 1
            spent_s += thread_time() - began_s
            if count == self._most or spent_s > _MOST_S:
                self._finals[number - 1, part] = 1
                yield item
                break
            yield item
        else:
            self._ends[number - 1, part] = count
            self._finals[number - 1, part] = 1
        yield from items

    def of(self, part: int, number: int) -> PartMarks:
        """Return what was recorded of a part in a pass."""
        # What is final is read first, and written last: then the rest is as it stays.
        final, end, count, asked = (
            int(noted[number - 1, part]) for noted in (self._finals, self._ends, self._counts, self._asked)
        )
        hashes = self._hashes[number - 1, part, : max(0, count)].numpy()
        return PartMarks.of(hashes, None if end < 0 else end, is_final=final > 0, asked_rank=asked > 0)

    def passes(self) -> dict[str, Sequence[PartMarks]]:
        """Return what was recorded of each pass, part by part, by what the ranks call the pass."""
        numbered = enumerate(self._names, 1)
        return {name: [self.of(part, number) for part in range(self.parts)] for number, name in numbered}


# Marks of this many passes are kept: iterators may live side by side. The latest two are compared; of so many earlier
# ones only their ends, with ranks that are epochs behind.
_KEPT, _COMPARED, _EARLIER = 4, 2, 16
# How many marks a part has at most: enough for 2**16 times the items that are all marked.
_MOST = 576


class MarksInMemory:
    """The marks of the latest passes over a loader.

    Args:
        parts: How many parts there are.

    Examples:
        >>> marks = MarksInMemory(parts=1)
        >>> marks.begin(1, "epoch 0")
        >>> list(marks.watching(0, 1, iter("ab")))
        ['a', 'b']
        >>> (part,) = marks.passes()["epoch 0 (0)"]
        >>> part.count, part.end
        (2, 2)
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        of_each = (_KEPT, parts)
        self._hashes, self._counts, self._ends, self._numbers = shared_arrays(
            (*of_each, _MOST, 3), of_each, of_each, (_KEPT,)
        )
        self._names: dict[int, str] = {}
        self._earlier: dict[str, Sequence[PartMarks]] = {}
        self._whole: Counter[str] = Counter()  # how often a pass of that name came to its end

    def begin(self, number: int, name: str) -> None:
        """Note, in the main process, that pass ``number`` begins, and its name, which is alike on all ranks."""
        for known, before in self._names.items():
            if before.startswith(f"{name} (") and None not in {part.end for part in self._of(known)}:
                self._whole[name] = max(self._whole[name], int(before.removeprefix(f"{name} (")[:-1]) + 1)
        slot = number % _KEPT
        for noted in (self._counts, self._ends):
            noted[slot] = -1
        self._numbers[slot] = number
        self._names[number] = f"{name} ({self._whole[name]})"
        for known in sorted(self._names)[:-_COMPARED]:
            self._earlier[self._names.pop(known)] = [PartMarks(end=part.end) for part in self._of(known)]
        self._earlier = dict(list(self._earlier.items())[-_EARLIER:])

    def watching(self, part: int, number: int, items: Iterator[T]) -> Iterator[T]:
        """Return a part's items, of which some are marked as they are read.

        Args:
            part: The part.
            number: The pass.
            items: What the reader of the part reads, from its first item on.
        """
        slot = number % _KEPT
        # Another iterator's worker may be about the same part of the same pass.
        is_mine = part < self._parts and self._numbers[slot] == number and self._counts[slot, part] < 0
        return self._marking(slot, part, items) if is_mine else items

    def _marking(self, slot: int, part: int, items: Iterator[T]) -> Iterator[T]:
        hashes, counts, spent_s = self._hashes[slot, part], self._counts[slot], 0.0
        counts[part] = made = place = wanted = 0
        for item in items:
            if place == wanted and made < _MOST and spent_s < _MOST_S:
                began_s = thread_time()
                hashes[made] = torch.tensor(hashes_if_any(item))
                made, wanted = made + 1, following(place)
                counts[part] = made
                spent_s += thread_time() - began_s
            place += 1
            yield item
        self._ends[slot, part] = place

    def _of(self, number: int) -> list[PartMarks]:
        slot = number % _KEPT
        ends, counts = self._ends[slot].tolist(), self._counts[slot].tolist()  # read first: marks are made before
        return [
            PartMarks.of(
                self._hashes[slot, part, : max(0, counts[part])].numpy(), None if ends[part] < 0 else ends[part]
            )
            for part in range(self._parts)
        ]

    def passes(self) -> dict[str, Sequence[PartMarks]]:
        """Return the marks of the latest passes, part by part, by what the ranks call the pass."""
        return {**self._earlier, **{name: self._of(number) for number, name in self._names.items()}}


# By how many of its first items a stream is recognised.
_FIRST = 8

# The latest iterator of each dataset in this process: a dataset may give the same one again, which continues.
_LATEST: WeakKeyDictionary[Any, Callable[[], Any]] = WeakKeyDictionary()


def can_snapshot(dataset: object, options: Options) -> bool:
    """Return whether a dataset's own state is the position of a stream that is sharded in this way."""
    return (
        options.iterable_sharding == "exact"
        and not options.needs_length  # otherwise every rank is elsewhere
        and options.agreement != "ambient"
        and is_stateful(dataset)
        and not loses_items_when_loaded(dataset)
    )


class SnapshotWriter:
    """Records how a worker's stream begins, and takes the dataset's own state.

    Args:
        dataset: The dataset that the user gave.
        states: The random states that the dataset draws from, if its own state may be taken; otherwise None.
        before: As the attribute.

    Attributes:
        start: The hashes of the first items that were read; None if the stream was not read from its beginning.
        before: The dataset's own state when its stream began, as the only element; empty if that is not known.
    """

    def __init__(self, dataset: IterableDataset[Any], states: Switching | None, before: Sequence[Any] = ()) -> None:
        self.start: StreamStart | None = None
        self.before: Sequence[Any] = before
        self._dataset, self._states = dataset, states
        self._generators = generator_states([dataset]) if states is not None else ()
        self._is_over = self._is_drawn = False

    def begin(self) -> Iterator[Any]:
        """Begin to iterate the dataset; take no states of it if its iterator has one, which is the position then."""
        dataset = cast(Any, self._dataset)
        for state in self.before:
            if not self._stands_at(state):  # it was read since
                dataset.load_state_dict(state)
        iterator: Iterator[Any] = iter(dataset)
        self._is_drawn = iterator is dataset or _is_again(dataset, iterator)
        if iterator is not dataset and is_stateful(iterator):
            self._states = None
        return iterator

    def begin_at(self, state: Any) -> Iterator[Any]:
        """Begin to iterate the dataset where its ``state_dict()`` was taken.

        One that is its own iterator may take a state before ``iter()`` or after it, as torchdata's loader gives it.

        Raises:
            StateError: It took it neither time.
        """
        dataset = cast(Any, self._dataset)
        dataset.load_state_dict(state)
        iterator: Any = iter(dataset)
        if iterator is dataset and not self._stands_at(state):
            dataset.load_state_dict(state)
            if not self._stands_at(state):
                raise StateError(
                    f"{type(dataset).__name__} cannot resume from the state: after load_state_dict() and iter(), its "
                    "state_dict() differs from the loaded one. Correct these methods, or leave them out: then its "
                    "stream is read again."
                )
        return cast(Iterator[Any], iterator)

    def _stands_at(self, state: Any) -> bool:
        return fingerprint([cast(Any, self._dataset).state_dict()]) == fingerprint([state])

    def watch(self, items: Iterator[T], mark: StreamSnapshot) -> Iterator[T]:
        """Pass the items of a stream on that is read from its beginning.

        Raises:
            StateError: It does not begin as it did when a state was taken.
        """
        seen: list[ItemHashes] = []
        for item in items:
            seen.append(hashes_if_any(item))
            first = self.start = _first(seen)
            known = mark.first
            if known is not None and known.seen == first.seen and not known.is_again(first, self._is_drawn):
                raise self._other_stream(mark)
            yield item
            if len(seen) == _FIRST:
                break
        yield from self.follow(items)

    def first(self, items: Iterator[T], mark: StreamSnapshot, count: int) -> list[T]:
        """Return this many of the first items of a stream; as ``watch``, raise StateError if it begins otherwise."""
        first = list(islice(self.watch(items, mark), count))
        if len(first) < count:
            raise self._other_stream(mark)
        return first

    def _other_stream(self, mark: StreamSnapshot) -> StateError:
        count = mark.first.seen if mark.first else 0
        return StateError(
            f"{type(self._dataset).__name__} cannot resume from the state: its first {count} items differ from those "
            "when the state was taken, so the finished ones cannot be skipped. Restore the state with the same "
            "samples in the same order; rebuild a dataset that is its own iterator."
        )

    def follow(self, items: Iterator[T]) -> Iterator[T]:
        """Pass the items of a stream on that is not read from its beginning, or no longer."""
        for item in items:
            forget_loaded_state(self._dataset)
            yield item
            break
        yield from items
        self._is_over = True

    def start_after(self, items: int) -> StreamStart | None:
        """Return the hashes of the first items, as many of these as count; None if not just so many were read."""
        start = self.start
        return start if start is not None and start.seen == min(_FIRST, items) else None

    def snapshot(self) -> bytes | None:
        """Return the dataset's own state, pickled; None if that does not contain the stream's position.

        A dataset that drew from random states may have to draw the same again when it begins, or to continue with what
        comes next: its own state does not say which, so its stream is read again. At the end many start again.
        """
        if self._states is None or self._is_over or not self._states.are_unmoved:
            return None
        try:
            if generator_states([self._dataset]) != self._generators:
                return None
            return pickle.dumps(cast(Any, self._dataset).state_dict())
        except Exception:  # noqa: BLE001 - the user's code, without which the stream is read again
            return None


def _is_again(dataset: Any, iterator: Any) -> bool:
    """Return whether a dataset gave the same iterator before; remember it, without keeping it alive if possible."""
    try:
        before = _LATEST.get(dataset)
        try:
            _LATEST[dataset] = ref(iterator)
        except TypeError:  # as some written in C
            _LATEST[dataset] = lambda: iterator
    except TypeError:  # the dataset cannot be hashed
        return False
    return before is not None and before() is iterator


def _first(seen: list[ItemHashes]) -> StreamStart:
    wholes, names, numbers = zip(*seen, strict=True)
    return StreamStart(len(seen), _digest(wholes), _digest(names), _digest(numbers), len(set(wholes)))


def _digest(hashes: Sequence[int]) -> int:
    return int(fingerprint(hashes)[:15], 16) if all(hashes) else 0
