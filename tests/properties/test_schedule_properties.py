"""The records of a rank's batches, and the keys of their items, against what is counted by hand."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from ddp_patch.evaluation.shares import places_of
from ddp_patch.options import Uneven
from ddp_patch.positions_and_padding import Batching, BatchRecord, Part, Plan, Schedule, Sizes

ranks_of = st.integers(1, 5)
unevens: st.SearchStrategy[Uneven] = st.sampled_from(["pad", "drop", "keep"])
batchings = st.builds(Batching, st.integers(1, 5), drop_last=st.booleans())
batch_sizes = st.lists(st.integers(0, 7), max_size=20)


@st.composite
def parts_of(draw: st.DrawFn, batching: Batching, most: int = 4) -> list[Part]:
    """What workers read, in the order of their turns. Some batches of all ranks were taken before."""
    workers, ranks = draw(st.permutations(range(draw(st.integers(1, most))))), draw(st.integers(1, 3))
    before = [batching.size * ranks * draw(st.integers(0, 2)) for _ in workers]
    return [
        Part(min(taken, length), length, worker=worker)
        for worker, taken, length in zip(workers, before, [draw(st.integers(0, 40)) for _ in workers], strict=True)
    ]


def recorded(sizes: Sequence[int]) -> Sizes:
    found = Sizes()
    for size in sizes:
        found.add(size)
    return found


def taken(schedule: Schedule, record: BatchRecord) -> list[int]:
    """The positions of a batch's items, in its part, padding included."""
    part = schedule.parts[record.part]
    share = schedule.plan.share(part.length or 0, part.taken)
    return list(share)[record.first : record.first + record.items]


@given(st.data(), ranks_of, unevens, batchings)
def test_records_tell_what_each_batch_has_and_all_ranks_of_its_step(
    data: st.DataObject, ranks: int, uneven: Uneven, batching: Batching
) -> None:
    parts = data.draw(parts_of(batching, most=4))
    schedules = [Schedule(Plan(rank, ranks, uneven), batching, parts) for rank in range(ranks)]
    records = [[schedule.record(number) for number in range(schedule.count or 0)] for schedule in schedules]
    real_in_step = [
        sum(of_rank[number].real_items for of_rank in records if number < len(of_rank)) for number in range(99)
    ]
    for schedule, of_rank in zip(schedules, records, strict=True):
        assert [record._replace(samples_of_all=None) for record in of_rank] == list(schedule.records())
        for number, record in enumerate(of_rank):
            real = [place for place in taken(schedule, record) if place < (parts[record.part].length or 0)]
            assert (record.samples, record.real_samples) == (record.items, record.real_items)
            assert (record.real_items, record.samples_of_all) == (
                len(real),
                real_in_step[number] if schedule.knows_totals else None,
            )
        assert schedule.most_batches == max(map(len, records))


@given(st.integers(0, 40), ranks_of, unevens, batchings, st.integers(0, 2))
def test_before_the_end_is_found_batches_are_as_in_an_epoch_of_what_was_given(
    given_before: int, ranks: int, uneven: Uneven, batching: Batching, batches: int
) -> None:
    skip = batches * batching.size * ranks
    schedule = Schedule(Plan(0, ranks, uneven), batching, [Part(skip)])
    ended = Schedule(Plan(0, ranks, uneven), batching, [Part(skip, given_before * ranks)])
    whole = range(max(0, given_before * ranks - skip) // ranks // batching.size)
    assert [schedule.record(number) for number in whole] == [ended.record(number) for number in whole]


@given(batch_sizes, ranks_of, unevens, st.integers(0, 3))
def test_whole_batches_have_their_samples(sizes: list[int], ranks: int, uneven: Uneven, skip: int) -> None:
    plans = [Plan(rank, ranks, uneven) for rank in range(ranks)]
    n, in_order = len(sizes), recorded(sizes[skip:])
    shares = [list(plan.share(n, skip)) for plan in plans]
    for plan, share in zip(plans, shares, strict=True):
        own = recorded([sizes[place % n] for place in share])
        known = Schedule(plan, Batching(1, drop_last=False), [Part(skip, n)], own, in_order)
        unknown = Schedule(plan, Batching(1, drop_last=False), [Part(skip, n)], own)
        records = [known.record(number) for number in range(len(share))]
        for number, (place, record) in enumerate(zip(share, records, strict=True)):
            step = [places[number] for places in shares if number < len(places)]
            size = sizes[place % n]
            assert (record.samples, record.real_samples) == (size, size if place < n else 0)
            assert record.samples_of_all == sum(sizes[other] for other in step if other < n)
            assert unknown.record(number) == record._replace(samples_of_all=None)
        assert known.knows_totals
        assert not unknown.knows_totals


@given(batch_sizes, ranks_of, st.sampled_from(["pad", "keep"]))
def test_parts_of_divided_batches_are_all_samples_once(sizes: list[int], ranks: int, uneven: Uneven) -> None:
    one_part, batching = [Part(0, len(sizes))], Batching(1, drop_last=False)
    schedules = [
        Schedule(Plan(0, 1), batching, one_part, recorded(sizes), batch_plan=Plan(rank, ranks, uneven))
        for rank in range(ranks)
    ]
    keys = [list(chain.from_iterable(schedule.keys(schedule.records()))) for schedule in schedules]
    assert sorted(chain.from_iterable(keys)) == list(range(sum(sizes)))
    for schedule, of_rank in zip(schedules, keys, strict=True):
        records = [schedule.record(number) for number in range(len(sizes))]
        assert records == list(schedule.records())
        assert [record.samples_of_all for record in records] == sizes
        assert all(
            record.samples >= max(record.real_samples, min(size, 1))
            for record, size in zip(records, sizes, strict=True)
        )
        assert len(of_rank) == sum(record.real_samples for record in records)


@given(st.data(), ranks_of, unevens, batchings)
def test_keys_are_in_the_order_of_one_process(
    data: st.DataObject, ranks: int, uneven: Uneven, batching: Batching
) -> None:
    parts = data.draw(parts_of(batching, most=4))
    found: list[tuple[int, int, int]] = []  # which batch of a worker, which worker, which item
    keys: list[int] = []
    for rank in range(ranks):
        schedule = Schedule(Plan(rank, ranks, uneven), batching, parts)
        for record in schedule.records():
            part = parts[record.part]
            real = [place for place in taken(schedule, record) if place < (part.length or 0)]
            found += [(place // batching.size, part.worker, place % batching.size) for place in real]
            own = list(chain.from_iterable(schedule.keys([record])))
            assert [key // batching.size // len(parts) for key in own] == [place // batching.size for place in real]
            keys += own
    assert [found[place] for place in np.argsort(keys)] == sorted(found)
    assert len(set(keys)) == len(keys)


rows_of_ranks = st.sets(st.integers(0, 300)).flatmap(
    lambda keys: st.lists(st.integers(0, 3), min_size=len(keys), max_size=len(keys)).map(
        lambda ranks: [[key for key, own in zip(sorted(keys), ranks, strict=True) if own == rank] for rank in range(4)]
    )
)


@given(rows_of_ranks, st.lists(st.booleans(), min_size=4, max_size=4), st.randoms(use_true_random=False))
def test_rows_go_where_fewer_keys_are_smaller(keys: list[list[int]], are_mixed: list[bool], random: object) -> None:
    """In order, or in any other."""
    for own, is_mixed in zip(keys, are_mixed, strict=True):
        if is_mixed:
            random.shuffle(own)  # type: ignore[attr-defined]
    in_order = sorted(chain.from_iterable(keys))
    for places, own in zip(places_of([np.array(own, np.int64) for own in keys]), keys, strict=True):
        assert [in_order[place] for place in places] == own


# Whose batch comes when, against a loader that asks its workers one after the other.

plans = st.builds(Plan, st.just(0), st.integers(1, 5), uneven=unevens)
read = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 40)).map(lambda both: Part(min(both), both[1])), min_size=1, max_size=5
)


def loaded(schedule: Schedule) -> list[tuple[int, int, int, int]]:
    """Each batch as a loader gives them: it asks every worker in turn, and no more whoever came to its end."""
    waiting = [list(enumerate(schedule.plan.share(part.length or 0, part.taken))) for part in schedule.parts]
    given, asked = [], set(range(len(waiting)))
    while asked:
        for place in sorted(asked):
            size = schedule.batching.size
            batch, waiting[place] = waiting[place][:size], waiting[place][size:]
            if not batch or (schedule.batching.drop_last and len(batch) < size):
                asked.remove(place)
                continue
            real = sum(position < (schedule.parts[place].length or 0) for _, position in batch)
            given.append((place, batch[0][0], len(batch), real))
    return given


@given(plans, batchings, read)
def test_batches_come_as_a_loader_asks_for_them(plan: Plan, batching: Batching, parts: list[Part]) -> None:
    schedule = Schedule(plan, batching, parts)
    expected = loaded(schedule)
    assert schedule.count == len(expected)
    assert [schedule.record(number)[:4] for number in range(len(expected))] == expected
    assert sum(record.samples for record in schedule.records()) == sum(items for _, _, items, _ in expected)
    for batches in range(len(expected) + 1):
        made = Counter(place for place, *_ in expected[:batches])
        assert schedule.made(batches) == [made[place] for place in range(len(parts))]
        for place, (part, taken) in enumerate(zip(parts, schedule.taken(batches), strict=True)):
            of_each = plan.num_replicas * made[place] * batching.size
            assert taken == max(part.taken, min(part.taken + of_each, part.length or 0))


@given(plans, batchings, read, st.data())
def test_going_on_after_some_batches_gives_the_others(
    plan: Plan, batching: Batching, parts: list[Part], data: st.DataObject
) -> None:
    schedule = Schedule(plan, batching, parts)
    expected = loaded(schedule)
    batches = data.draw(st.integers(1, max(1, len(expected))))
    if batches > len(expected):
        return
    after = expected[batches - 1][0] + 1
    order = [*range(after, len(parts)), *range(after)]  # the worker after the last one begins
    taken, made = schedule.taken(batches), schedule.made(batches)
    rest = loaded(Schedule(plan, batching, [Part(taken[place], parts[place].length) for place in order]))
    assert [(order[place], first + made[order[place]] * batching.size, *turn) for place, first, *turn in rest] == (
        expected[batches:]
    )


@given(batchings, read, st.integers(1, 4), st.sampled_from(["pad", "drop"]), st.integers(0, 60))
def test_ranks_make_the_same_batches_of_each_part_where_all_take_equally_much(
    batching: Batching, parts: list[Part], ranks: int, uneven: str, batches: int
) -> None:
    schedule = [Schedule(Plan(rank, ranks, uneven), batching, parts) for rank in range(ranks)]  # type: ignore[arg-type]  # a str
    batches = min(batches, schedule[0].count or 0)
    assert all(one.made(batches) == schedule[0].made(batches) for one in schedule)
    assert schedule[-1].are_alike(batches)
