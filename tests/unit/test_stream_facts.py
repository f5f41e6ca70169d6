"""What follows from where a pass over a stream began, and from what its readers have reported: arithmetic."""

import re
from typing import Any

import pytest

from ddp_patch.errors import StateError
from ddp_patch.orders.random_states import Seed
from ddp_patch.positions_and_padding import Batching, Part, Plan, Schedule
from ddp_patch.sharding.saved_state import NotedBatch, Position, States, StreamSnapshot, StreamStart
from ddp_patch.streams import reports as protocol
from ddp_patch.streams.dataset import StreamReader
from ddp_patch.streams.dataset_reading import PartStart, StreamShare
from ddp_patch.streams.even_steps import BalancedRounds, rounds_ahead
from ddp_patch.streams.reports import (
    BEGUN,
    PARTS,
    STREAM,
    ReportedPass,
    SharedReports,
    blank_reports,
    position_of_parts,
)
from ddp_patch.streams.stream_passes import StreamSource

BATCHING = Batching(2, drop_last=False)
KNOWN = [StreamSnapshot(StreamStart(1, part, part)) for part in range(3)]


def share(*, rank: int = 0, ranks: int = 2, readers: int = 3, splits_itself: bool = False) -> StreamShare:
    plan, seed = Plan(rank, ranks), Seed(0, is_chosen=True)
    return StreamShare(plan, None, BATCHING, seed, readers, splits_itself=splits_itself)


def reported(readers: int = 1, **columns: Any) -> ReportedPass:
    """Return what readers report; a column has a number for each of them, or one for all."""
    reports = blank_reports(readers)
    for name, values in columns.items():
        reports[name] = values
    return ReportedPass(reports)


# ---- where readers begin ----

# A position, and where each of three readers begins there.
BEGINNINGS: list[tuple[Position | None, list[PartStart]]] = [
    (None, [PartStart(0), PartStart(1), PartStart(2)]),
    (Position(4), [PartStart(0), PartStart(1), PartStart(2)]),
    (Position(0, (8,)), [PartStart(part, 8, STREAM) for part in range(3)]),
    (Position(0, (8, 4, 2)), [PartStart(0, 8, PARTS), PartStart(1, 4, PARTS), PartStart(2, 2, PARTS)]),
    (Position(0, (8, 8, 4), 2), [PartStart(2, 4, PARTS), PartStart(0, 8, PARTS), PartStart(1, 8, PARTS)]),
    (
        Position(0, (8, 8, 4), 2, states=States(streams=KNOWN)),
        [PartStart(part, taken, PARTS, KNOWN[part]) for part, taken in ((2, 4), (0, 8), (1, 8))],
    ),
]


@pytest.mark.parametrize(("position", "starts"), BEGINNINGS)
def test_a_reader_goes_on_with_the_part_whose_turn_is_next(position: Position | None, starts: list[PartStart]) -> None:
    assert [share().start(position, reader) for reader in range(3)] == starts


# Of a dataset that splits itself over 2 ranks of 3 readers: the position, and where each reader of rank 1 begins.
OWN_PARTS: list[tuple[Position, list[PartStart]]] = [
    (Position(0), [PartStart(0), PartStart(1), PartStart(2)]),
    # The first numbers are of rank 0. In batches, rank 1's readers made 2, 2 and 1: the third one is next.
    (Position(0, (2, 2, 2, 4, 4, 2)), [PartStart(2, 2), PartStart(0, 4), PartStart(1, 4)]),
    # In an explicit world the number is of both ranks: 4 batches of each, which its readers made in turn.
    (Position(0, (16,)), [PartStart(1, 2), PartStart(2, 2), PartStart(0, 4)]),
]


@pytest.mark.parametrize(("position", "starts"), OWN_PARTS)
def test_a_reader_of_a_dataset_that_splits_itself_goes_on_by_batches(
    position: Position, starts: list[PartStart]
) -> None:
    found = [share(rank=1, splits_itself=True).start(position, reader) for reader in range(3)]
    assert found == starts


# ---- what readers report ----


def test_readers_are_known_to_read_parts_once_one_of_them_does() -> None:
    assert not reported(2).is_in_parts
    assert reported(2, way=[-1, PARTS]).is_in_parts
    assert not reported(2, way=[STREAM, PARTS]).is_in_parts
    assert not reported(2, way=STREAM).is_in_parts
    assert not reported(1, way=PARTS).is_in_parts


def test_the_length_of_one_stream_is_known_once_a_reader_found_it_and_of_parts_each_by_itself() -> None:
    assert reported(3, way=STREAM).lengths_found == [None]
    assert reported(3, way=STREAM, length=[-1, 9, -1]).lengths_found == [9]
    assert reported(3, way=PARTS, length=[-1, 9, 0]).lengths_found == [None, 9, 0]


def test_turns_follow_from_any_reader_that_has_reported_its_part() -> None:
    assert reported(3).turns == [0, 1, 2]
    assert reported(3, part=[-1, 0, -1]).turns == [2, 0, 1]


def test_parts_that_were_not_counted_by_themselves_begin_at_zero() -> None:
    in_parts = reported(2, way=PARTS, part=[1, 0], length=[5, -1])
    assert in_parts.parts(6, [4, 2]) == [Part(2, 5, 1), Part(4, None, 0)]
    assert in_parts.parts(0, ()) == [Part(0, 5, 1), Part(0, None, 0)]
    assert reported(2, way=STREAM, length=[5, 5]).parts(6, [6]) == [Part(6, 5)]


def test_a_start_describes_no_more_items_than_were_read() -> None:
    starts = [[[10 * items, -1] for items in range(1, 9)]]
    seen = reported(seen=8, starts=starts)
    assert seen.start_of(0, 3) == (3, 30, None)
    assert seen.start_of(0, 100) == (8, 80, None)
    assert seen.start_of(0, 0) is None
    assert reported().start_of(0, 3) is None


def test_items_without_names_are_told_from_items_of_one_name() -> None:
    facts = [(reported(marks=2, length=3, identities=count)) for count in range(3)]
    assert [each.names_nothing for each in facts] == [True, False, False]
    assert [each.names_all_alike for each in facts] == [False, True, False]
    assert not reported(marks=0, identities=0).names_nothing  # nothing was read yet
    assert not reported(marks=1, length=1, identities=1).names_all_alike  # one item is like itself


def test_a_report_is_forgotten_where_a_later_pass_has_its_memory() -> None:
    shared = SharedReports(readers=1)
    first = shared.report(1, 0)
    first["length"] = 7
    assert shared.report(1, 0)["length"] == 7
    shared.report(33, 0)["length"] = 9
    assert (shared.reported(1).lengths, shared.reported(33).lengths) == ([None], [9])


# ---- positions ----


def position_after(batches: int, facts: ReportedPass, start: Position, plan: Plan, **noted: Any) -> Position:
    schedule = Schedule(plan, BATCHING, facts.parts(start.taken_of_all, start.taken))
    return position_of_parts(Position(0), start, batches, schedule, facts, noted.get("notes", {}), "Shards")


def test_after_two_batches_of_one_stream_all_ranks_have_taken_two_batches_each() -> None:
    facts = reported(2, way=STREAM, seen=[1, 1], starts=[[[5, 6]] * 8, [[7, 8]] * 8])
    found = position_after(2, facts, Position(0), Plan(1, 3))
    assert (found.taken, found.turn) == ([12], 0)
    assert found.states.streams == [StreamSnapshot(StreamStart(1, 7, 8))]  # the second reader made the second batch


def test_after_three_batches_of_two_parts_the_second_ones_turn_is_next() -> None:
    facts = reported(2, way=PARTS, part=[0, 1])
    found = position_after(3, facts, Position(0), Plan(0, 2))
    assert (found.taken, found.turn) == ([8, 4], 1)


def test_a_resumed_pass_keeps_the_numbers_of_its_parts() -> None:
    facts = reported(2, way=PARTS, part=[1, 0], length=[-1, 5])
    found = position_after(2, facts, Position(0, (4, 4), 1, states=States(streams=KNOWN[:2])), Plan(0, 2))
    assert (found.taken, found.turn) == ([5, 8], 1)  # of part 0, one item was left


def test_a_part_without_a_batch_in_the_pass_is_known_as_where_it_began() -> None:
    facts = reported(2, way=PARTS, part=[0, 1])
    found = position_after(1, facts, Position(0, (4, 4), states=States(streams=KNOWN[:2])), Plan(0, 2))
    assert (found.taken, list(found.states.streams)[1]) == ([8, 4], KNOWN[1])


def test_the_state_counts_that_was_noted_with_the_latest_batch_of_a_reader() -> None:
    shared = SharedReports(readers=2)
    shared.report(1, 0).store_state(BEGUN, b"[0]")
    for part in range(2):
        shared.report(1, part)["part"], shared.report(1, part)["way"] = part, PARTS
    facts = shared.reported(1)
    notes = {0: [NotedBatch(0, 1, b"[1]"), NotedBatch(0, 2, b"[2]")]}
    states = [
        position_after(batches, facts, Position(0), Plan(0, 2), notes=notes).states.streams[0] for batches in (2, 3)
    ]
    assert states == [StreamSnapshot(None, ([count],), ([0],)) for count in (1, 2)]


def test_no_state_counts_parts_that_have_ended_on_some_ranks_alone() -> None:
    facts = reported(2, way=PARTS, part=[0, 1], length=[5, 20])  # 3 items of the first part for rank 0, 2 for rank 1
    plan = Plan(0, 2, uneven="keep")
    assert position_after(2, facts, Position(0), plan).taken == [4, 4]
    with pytest.raises(StateError, match=r"Shards .* 3 batches.*uneven='keep'.*Use uneven='pad' or 'drop'"):
        position_after(3, facts, Position(0), plan)


def test_after_rounds_the_items_of_each_part_of_all_ranks_are_counted() -> None:
    rounds = BalancedRounds()
    rounds.note_ends([(1, -1), (2, 0)])
    for step in rounds_ahead([3, 2], [True, False], "keep"):
        rounds.add(step)
    assert rounds.items_taken(2, [8, 0, 8, 8], size=8) == [16, 8, 24, 8]


# ---- the interface of the two processes ----


def test_six_calls_are_all_that_the_main_process_and_readers_have_in_common() -> None:
    rows = re.findall(r"^\| ``(\w+)\.(\w+)`` \|", protocol.__doc__ or "", re.MULTILINE)
    kinds = {kind.__name__: kind for kind in (SharedReports, StreamReader, StreamSource)}
    assert [callable(getattr(kinds[kind], name)) for kind, name in rows] == [True] * 6
    of_memory = {name for name in vars(SharedReports) if not name.startswith("_")}
    assert {name for kind, name in rows if kind == "SharedReports"} == of_memory
