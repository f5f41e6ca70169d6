"""Whose batch comes when, against a loader that asks its workers one after the other."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from ddp_patch.positions_and_padding import Batching, Part, Plan, Schedule

parts = st.lists(st.builds(Part, st.integers(0, 6), st.integers(0, 40)), min_size=1, max_size=5)


def plans(rank: int = 0) -> st.SearchStrategy[Plan]:
    return st.builds(Plan, st.just(rank), st.integers(rank + 1, 5), uneven=st.sampled_from(["pad", "drop", "keep"]))


batchings = st.builds(Batching, st.integers(1, 5), drop_last=st.booleans())


def loaded(schedule: Schedule) -> list[tuple[int, int, int, int]]:
    """Each batch as a loader gives them: it asks every worker in turn, and no more whoever came to its end."""
    waiting = []
    for part in schedule.parts:
        share = schedule.plan.share(part.length or 0)
        waiting.append(list(enumerate(share))[part.skip :])
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


@given(plans(), batchings, parts)
def test_batches_come_as_a_loader_asks_for_them(plan: Plan, batching: Batching, read: list[Part]) -> None:
    schedule = Schedule(plan, batching, read)
    expected = loaded(schedule)
    assert schedule.count == len(expected)
    assert [schedule.record(number)[:4] for number in range(len(expected))] == expected
    assert sum(record.samples for record in schedule.records()) == sum(items for _, _, items, _ in expected)
    for batches in range(len(expected) + 1):
        made = Counter(place for place, *_ in expected[:batches])
        assert schedule.made(batches) == [made[place] for place in range(len(read))]
        taken = Counter({place: part.skip for place, part in enumerate(read)})
        for place, _, items, _ in expected[:batches]:
            taken[place] += items
        assert schedule.taken(batches) == [taken[place] for place in range(len(read))]


@given(plans(), batchings, parts, st.data())
def test_going_on_after_some_batches_gives_the_others(
    plan: Plan, batching: Batching, read: list[Part], data: st.DataObject
) -> None:
    schedule = Schedule(plan, batching, read)
    expected = loaded(schedule)
    batches = data.draw(st.integers(1, max(1, len(expected))))
    if batches > len(expected):
        return
    after = expected[batches - 1][0] + 1
    order = [*range(after, len(read)), *range(after)]  # the worker after the last one begins
    taken = schedule.taken(batches)
    rest = loaded(Schedule(plan, batching, [Part(taken[place], read[place].length) for place in order]))
    assert [(order[place], *turn) for place, *turn in rest] == expected[batches:]


@given(batchings, parts, st.integers(1, 4), st.sampled_from(["pad", "drop"]), st.integers(0, 60))
def test_ranks_make_the_same_batches_of_each_part_where_all_take_equally_much(
    batching: Batching, read: list[Part], ranks: int, uneven: str, batches: int
) -> None:
    schedule = [Schedule(Plan(rank, ranks, uneven), batching, read) for rank in range(ranks)]  # type: ignore[arg-type]  # a str
    batches = min(batches, schedule[0].count or 0)
    assert all(one.made(batches) == schedule[0].made(batches) for one in schedule)
    assert schedule[-1].are_alike(batches)
