"""What workers mark of a stream in shared memory, and the one digest of a pass that ranks compare."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import quick  # noqa: F401 - so the fork server's workers find imported what they need
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import assert_tells
from quick import soaked
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from zoo import Source, as_it_is

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import StreamOrderWarning
from ddp_patch.orders.digest import END, mark_counts
from ddp_patch.streams.item_names import marked
from ddp_patch.streams.reports import BEGUN, NUMBERS, PARTS, STREAM, ReportedPass, SharedReports

COUNTS = list(islice(mark_counts(), 60))


def read(*streams: Iterable[Any], upto: int | None = None, are_parts: bool = True) -> ReportedPass:
    """Return what the readers of a pass report that read these, or the first items of these."""
    shared = SharedReports(len(streams))
    for part, stream in enumerate(streams):
        report = shared.report(1, part)
        items, most = [*stream], upto
        for _ in islice(marked(iter(items), report), most):
            pass
        if most is None or most > len(items):  # what is asked for beyond the end shows the end
            report["length"] = len(items)
        report["way"] = PARTS if are_parts and len(streams) > 1 else STREAM
    return shared.reported(1)


def named(number: int) -> dict[str, Any]:
    return {"file": f"{number}.png", "x": torch.rand(2), "cut": torch.rand(()).item()}


def labelled(number: int) -> tuple[torch.Tensor, int]:
    return torch.rand(2), number % 7


def unnamed(number: int) -> torch.Tensor:
    return torch.rand(2)


def opaque(number: int) -> Any:
    return {"x": {number}}


def one_name(number: int) -> Any:
    return torch.rand(2), "cat"


def differ(mine: ReportedPass, theirs: ReportedPass) -> bool | None:
    """Return what ranks see when each has what the other left last; None if they have no count in common."""
    seen = []
    for one, other in ((mine, theirs), (theirs, mine)):
        if (at := latest_count(one)) in other.digests():
            seen.append(other.digests()[at] != one.digests()[at])
    return any(seen) if seen else None


def latest_count(digest: ReportedPass) -> int | None:
    return next(reversed(digest.digests()), None)


SKIPPED = [*range(500), *range(501, 1001)]
OTHER_LAST = [*range(998), 999, 998]

# One reads 1000 items, the other these, or so many of them.
CASES: dict[str, tuple[Callable[[int], Any], Iterable[int], int | None, bool | None]] = {
    "the same": (named, range(1000), None, False),
    "the same, of which there are no names": (unnamed, range(1000), None, False),
    "as far as it came": (named, range(1000), 777, False),
    "nothing yet": (named, range(1000), 0, None),
    "one is skipped": (named, SKIPPED, None, True),
    "one is skipped, and it goes on": (named, SKIPPED, 800, True),
    "the last two": (named, OTHER_LAST, None, True),
    "others from the beginning": (named, range(5000, 6000), 1, True),
    "it ends early": (named, range(600), None, True),
    "it goes on": (named, range(2000), None, True),
    "nothing": (named, [], None, True),
}


@pytest.mark.parametrize("case", CASES)
def test_two_digests_at_one_count_are_equal_or_not(case: str) -> None:
    make, numbers, upto, expected = CASES[case]
    assert differ(read(map(make, range(1000))), read(map(make, numbers), upto=upto)) is expected


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_latest_mark_is_the_last_count_that_was_reached(length: int, upto: int) -> None:
    reached = [each for each in COUNTS if each <= min(length, upto)]
    expected = END if upto > length else reached[-1] if reached else None
    assert latest_count(read(range(length), upto=upto)) == expected


@settings(max_examples=30)
@given(st.lists(st.integers(0, 40), min_size=2, max_size=3), st.lists(st.integers(0, 40), min_size=2, max_size=3))
def test_parts_have_one_digest_which_tells_their_lengths(mine: list[int], theirs: list[int]) -> None:
    one, other = (read(*map(range, lengths)) for lengths in (mine, theirs))
    assert differ(one, other) is (mine != theirs)


def test_parts_are_marked_at_the_counts_that_all_have_reached_or_ended_before() -> None:
    shared = SharedReports(2)
    reports = [shared.report(1, part) for part in range(2)]
    readers = [marked(iter(range(length)), report) for report, length in zip(reports, (3, 100), strict=True)]
    assert len([*islice(readers[1], 10)]) == 10
    assert shared.reported(1).digests() == {}  # nobody knows yet whether they are parts
    for report in reports:
        report["way"] = PARTS
    assert shared.reported(1).digests() == {}
    assert len([*islice(readers[0], 3)]) == 3
    assert latest_count(shared.reported(1)) == 3  # the first one may go on
    assert next(readers[0], None) is None
    reports[0]["length"] = 3
    assert latest_count(shared.reported(1)) == 8
    assert len([*readers[1]]) == 90
    reports[1]["length"] = 100
    assert latest_count(shared.reported(1)) == END


@pytest.mark.parametrize("place", [0, 1, 60, 99])
def test_readers_of_one_stream_that_differ_are_told(place: int) -> None:
    others = [*map(str, range(place)), "other", *map(str, range(place + 1, 100))]
    digest = read(map(str, range(100)), map(str, range(100)), others, are_parts=False)
    found = digest.readers_differ()
    assert found is not None
    assert found[1] == 2
    assert place < found[0] <= max(100, 2 * place)
    assert read(map(str, range(100)), others).readers_differ() is None  # of parts nobody expects that


@pytest.mark.parametrize("place", [0, 1, 62, 63, 64, 65, 198])
def test_numbers_have_a_digest_of_their_own(place: int) -> None:
    order = [*range(200)]
    other = [*order[:place], order[place + 1], order[place], *order[place + 2 :]]
    one, two = (read([("cat", item) for item in items]) for items in (order, other))
    assert one.digests() == two.digests()
    assert one.digests(NUMBERS) != two.digests(NUMBERS)
    assert one.digests(NUMBERS).keys() == one.digests().keys()


def test_readers_of_one_stream_whose_numbers_differ_are_told_apart() -> None:
    digest = read(range(100), [*range(99), 0], are_parts=False)
    assert digest.readers_differ() is None
    assert digest.readers_differ(NUMBERS) == (100, 1)


def compare(patched: Any) -> None:
    """Let a loader's readers report digests, though there are no other ranks."""
    reader = patched.sampler.rank_passes.reader
    reader.share = replace(reader.share, is_compared=True)


class Made(IterableDataset[Any]):
    def __init__(self, make: Callable[[int], Any], splits: bool) -> None:
        self.make, self.splits = make, splits

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info() if self.splits else None
        for number in range(0 if info is None else info.id, 40, 1 if info is None else info.num_workers):
            yield self.make(number)


@pytest.mark.parametrize("start", ["fork", soaked("forkserver")])
def test_workers_mark_in_memory_that_the_main_process_sees(start: str) -> None:
    loader: Any = DataLoader(
        Source(30), batch_size=2, num_workers=2, multiprocessing_context=start, collate_fn=as_it_is
    )
    patched: Any = patch_dataloader_to_ddp(loader, rank=0, num_replicas=2)
    assert not patched.sampler.rank_passes.reader.share.is_compared  # there is nobody to compare with
    compare(patched)
    for _ in patched:
        pass
    marks, alone = patched.sampler.rank_passes.epochs.latest.source.marks(), read(range(30))
    assert {count: names for count, (names, _) in marks.items()} == alone.digests()
    assert {count: numbers for count, (_, numbers) in marks.items()} == alone.digests(NUMBERS)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize(
    ("make", "told"), [(opaque, True), (one_name, True), (unnamed, False), (named, False), (labelled, False)]
)
def test_that_items_have_no_names_is_said_once_on_one_rank(
    make: Callable[[int], Any], told: bool, splits: bool, workers: int, recwarn: pytest.WarningsRecorder
) -> None:
    for rank in range(2):
        recwarn.clear()
        loader: Any = DataLoader(Made(make, splits), batch_size=2, num_workers=workers, collate_fn=as_it_is)
        patched: Any = patch_dataloader_to_ddp(loader, rank=rank, num_replicas=2)
        compare(patched)
        for _ in range(2):
            for _ in patched:
                pass
        warned = [str(each.message) for each in recwarn if each.category is StreamOrderWarning]
        assert len(warned) == (told and rank == 0)
        for message in warned:
            fact = "no string, number or tensor" if make is opaque else "the same strings and numbers"
            assert_tells(message, ("Made", fact), ("seed", "give each item"))


def test_what_is_half_written_counts_only_once_it_is_whole() -> None:
    """A processor may show another process what was written last before what was written first."""
    shared = SharedReports(readers=2)
    shared.begin(1, epoch=4)
    report = shared.report(1, reader=0)
    report["length"] = 7
    assert (shared.reported(1).lengths, shared.begun(1)) == ([7, None], (1, 4))
    report["names"][3] = 5  # and not yet what says so
    assert shared.reported(1).lengths == [None, None]
    report["marks"] = 4
    assert (shared.reported(1).lengths, shared.reported(1).column("marks")) == ([7, None], [4, -1])
    report.store_state(BEGUN, b'"here"')
    assert [shared.reported(1).state_of(reader, BEGUN) for reader in range(2)] == [("here",), ()]
    shared._states[0, BEGUN, 1] = 0
    assert shared.reported(1).state_of(0, BEGUN) == ()
    shared._begun["epochs"][1, 0] = 5
    assert shared.begun() is None
