"""What readers note of the first items of an iterable dataset, in memory that workers share."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count, islice
from typing import Any
from unittest import mock

import pytest
from torch.utils.data import DataLoader
from zoo import Source, as_it_is

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import RankMismatchError
from ddp_patch.orders.fingerprint import COMPARED, hashes_of
from ddp_patch.ranks import stream_monitor
from ddp_patch.ranks.mailbox import Peers
from ddp_patch.ranks.order_verdicts import PartMarks
from ddp_patch.streams import shared_state
from ddp_patch.streams.shared_state import FirstItems


def noted(first: FirstItems, number: int = 1, part: int = 0) -> tuple[int, bool, bool]:
    notes = first.marks_of(part, number)
    return len(notes.items), notes.is_final, notes.end is not None


def read(first: FirstItems, n: int, number: int = 1, part: int = 0) -> None:
    assert list(first.watching(part, number, iter(range(n)))) == list(range(n))


@pytest.mark.parametrize("n", [0, 1, COMPARED - 1])
def test_a_short_stream_is_noted_whole(n: int) -> None:
    first = FirstItems(1)
    read(first, n)
    assert first.marks_of(0, 1) == PartMarks.of([hashes_of(item) for item in range(n)], end=n, is_final=True)


@pytest.mark.parametrize("n", [COMPARED, COMPARED + 1, 3 * COMPARED])
def test_of_a_long_stream_the_first_items_are_noted(n: int) -> None:
    first = FirstItems(1)
    read(first, n)
    assert first.marks_of(0, 1) == PartMarks.of([hashes_of(item) for item in range(COMPARED)], is_final=True)


def test_what_was_read_so_far_is_noted_and_no_item_is_read_ahead() -> None:
    first, source = FirstItems(1), count()
    assert list(islice(first.watching(0, 1, source), 5)) == list(range(5))
    assert noted(first) == (5, False, False)
    assert next(source) == 5


def test_many_parts_have_fewer_notes_each() -> None:
    sizes = {}
    for parts in (1, 8, 16, 64, 1000):
        first = FirstItems(parts)
        read(first, 300, part=parts - 1)
        sizes[parts] = noted(first, part=parts - 1)[0]
    assert sizes == {1: 256, 8: 256, 16: 128, 64: 32, 1000: 16}


def test_the_first_three_passes_are_noted_each_by_its_name() -> None:
    first = FirstItems(2)
    for number, epoch in enumerate((0, 0, 4, 5), 1):
        first.begin(number, f"epoch {epoch}")
        read(first, number, number)
    assert {name: [len(notes.items) for notes in parts] for name, parts in first.passes().items()} == {
        "epoch 0 (1)": [1, 0],
        "epoch 0 (2)": [2, 0],
        "epoch 4 (1)": [3, 0],
    }


def test_nothing_is_noted_twice_nor_where_nobody_asks() -> None:
    first = FirstItems(1)
    read(first, 3)
    read(first, 5)  # another iterator's worker, of the same pass
    assert noted(first) == (3, True, True)
    first.settle()
    read(first, 3, number=2)
    read(first, 3, part=1)  # a loader that was given more workers since
    assert noted(first, 2) == (0, False, False)


def test_the_datasets_own_error_comes_through() -> None:
    def failing() -> Iterator[int]:
        yield 0
        raise OSError("torn")

    first = FirstItems(1)
    with pytest.raises(OSError, match="torn"):
        list(first.watching(0, 1, failing()))
    assert noted(first) == (1, False, False)


class Locked(dict[Any, Any]):
    def items(self) -> Any:
        raise RuntimeError("not here")


def test_an_item_that_cannot_be_looked_into_counts_as_any_other_such() -> None:
    first, locked = FirstItems(1), Locked(a=1)
    assert list(first.watching(0, 1, iter([locked, 1]))) == [locked, 1]
    assert first.marks_of(0, 1) == PartMarks.of([(0, 0, 0), hashes_of(1)], end=2, is_final=True)


def test_large_items_are_noted_only_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(0, 0.3)  # so many seconds from one look at it to the next
    monkeypatch.setattr(shared_state, "thread_time", lambda: next(clock))
    first = FirstItems(1)
    read(first, 300)
    assert noted(first) == (4, True, False)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_note_in_memory_that_the_main_process_sees(start: str) -> None:
    loader: Any = DataLoader(
        Source(30), batch_size=2, num_workers=2, multiprocessing_context=start, collate_fn=as_it_is
    )
    patched: Any = patch_dataloader_to_ddp(loader, rank=0, num_replicas=2)
    assert patched.sampler.worker.first_items is None  # there is nobody to compare with
    patched.sampler.worker.first_items = first = FirstItems(2)
    for _ in patched:
        pass
    expected = PartMarks.of([hashes_of(item) for item in range(30)], end=30, is_final=True)
    assert [first.marks_of(part, 1) for part in range(2)] == [expected] * 2


@pytest.mark.parametrize(("items", "is_sharded"), [(16, False), (64, True)])
def test_a_stream_is_sharded_already_only_where_enough_items_have_nothing_in_common(
    items: int, is_sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shuffles over the same samples may have none in common among their first few."""
    own, other = FirstItems(1), FirstItems(1)
    for first, start in ((own, 0), (other, 10_000)):
        first.begin(1, "epoch 0")
        list(islice(first.watching(0, 1, iter(range(start, start + 1000)), lambda: True), items))

    def left(peers: object, subject: str) -> mock.Mock:
        records = {1: ("", other.passes())} if subject == "orders" else {}
        return mock.Mock(post_and_read=mock.Mock(return_value=records))

    monkeypatch.setattr(stream_monitor, "Mailbox", left)
    peers = Peers("loader", 1, 0, [1])
    guard = stream_monitor.StreamMonitor(peers, range(1), own.passes, dict, own.settle, lambda number: True, "")
    with pytest.raises(RankMismatchError, match="sharded already") if is_sharded else nullcontext():
        guard.compare(at_end=False)
