"""A meeting of ranks: what it costs, what it reads, what its errors say; values on their way; threads are the ranks."""

import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from messages import assert_tells

from ddp_patch import DDPPatchError
from ddp_patch.errors import MissingRanksError, RankMismatchError, StateError, message_of
from ddp_patch.ranks import exchange
from ddp_patch.ranks.exchange import packed, ranks_text, refuse, require_same, unpacked

HERE = threading.local()


class Counting:
    """A store that counts what the rank of this thread asks."""

    def __init__(self) -> None:
        self.store = dist.HashStore()  # type: ignore[attr-defined]  # torch documents it
        self.asked: Counter[tuple[int, str]] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.asked[HERE.rank, name] += 1
        return getattr(self.store, name)

    def of(self, rank: int) -> int:
        return sum(count for (one, _), count in self.asked.items() if one == rank)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Counting:
    made = Counting()
    monkeypatch.setattr(exchange, "default_store", lambda: made)
    monkeypatch.setattr(dist, "get_rank", lambda: HERE.rank)
    monkeypatch.setattr(exchange, "_missed", {})
    monkeypatch.setattr(exchange, "MARGIN_S", 1.0)
    return made


def on_ranks(world: int, act: Callable[[int], Any]) -> list[Any]:
    """What each rank's call returns, or the error that it raises."""

    def on_rank(rank: int) -> Any:
        HERE.rank = rank
        try:
            return act(rank)
        except DDPPatchError as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(on_rank, range(world)))


def meet(world: int, record: Any = "said", judge: Any = list, timeout: float = 20) -> Any:
    return exchange.exchange(range(world), "Trying", record, judge, timeout)


def test_a_meeting_costs_each_rank_as_many_requests_whatever_the_number_of_ranks(store: Counting) -> None:
    costs = []
    for world in (2, 16):
        on_ranks(world, lambda _, world=world: meet(world))  # type: ignore[misc]  # a default binds it
        store.asked.clear()
        assert on_ranks(world, lambda _, world=world: meet(world)) == [list(range(world))] * world  # type: ignore[misc]
        costs.append({rank: store.of(rank) for rank in range(world)})
    assert costs[0] == {0: 7, 1: 5}
    assert costs[1] == {0: 7} | dict.fromkeys(range(1, 16), 5)


def test_records_come_as_json_and_are_deleted_at_the_next_meeting(store: Counting) -> None:
    records = ["x" * 101, "é" * 25, {"z": [1, 2.5, None]}]
    answers = on_ranks(3, lambda rank: meet(3, records[rank], lambda came: [repr(came[one]) for one in came]))
    assert answers == [[repr(record) for record in records]] * 3
    left = on_ranks(1, lambda _: store.num_keys())
    on_ranks(3, lambda rank: meet(3, records[rank], lambda came: [repr(came[one]) for one in came]))
    assert on_ranks(1, lambda _: store.num_keys()) == left


class Ran:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


JUNK = [b"", b"1", b"\x80junk", b"null", b"null\nx", b"{}", b"[]", b"[" * 100_000]


@pytest.mark.parametrize("number", range(len(JUNK) + 1))
def test_junk_instead_of_a_record_is_an_error_on_every_rank_and_never_run(
    store: Counting, tmp_path: Path, number: int
) -> None:
    ran = tmp_path / "ran"
    junk = [*JUNK, pickle.dumps(Ran(ran))][number]

    def act(rank: int) -> Any:
        if rank != 1:
            return meet(3, timeout=1)
        store.set(f"ddp_patch/{exchange.digest([0, 1, 2])}/1/record/1", junk)
        return None

    first, _, third = on_ranks(3, act)
    for error in (first, third):
        assert type(error) in {RankMismatchError, MissingRanksError}
        assert "Trying" in message_of(error)
    assert not ran.exists()


def test_errors_of_the_judge_come_as_their_class_and_text(store: Counting) -> None:
    class MineError(StateError):
        """Of nobody else's knowing."""

    def judge(records: Any) -> Any:
        raise MineError("It cannot. Stop.")

    first, second = on_ranks(2, lambda rank: meet(2, judge=judge))
    assert type(first) is MineError
    assert type(second) is StateError
    assert message_of(second) == "It cannot. Stop."


def test_what_all_refuse_alike_is_told_once(store: Counting) -> None:
    told = on_ranks(20, lambda rank: meet(20) if rank < 2 else refuse(range(20), "Trying", ValueError("no")))
    assert [type(error) for error in told[:2]] == [RankMismatchError] * 2
    assert "  ranks 2 to 19: ValueError: no\n" in str(told[1])


def test_a_missing_first_rank_costs_each_of_many_as_much_as_one(store: Counting) -> None:
    on_ranks(16, lambda rank: meet(16))
    store.asked.clear()
    told = on_ranks(16, lambda rank: meet(16, timeout=0.1) if rank else None)
    for error in told[1:]:
        assert type(error) is MissingRanksError
        assert_tells(message_of(error), ("Trying: rank 0 of 16 did not answer within 1.1 s"), "timeout=")
    assert max(store.of(rank) for rank in range(1, 16)) <= 6


def test_the_first_rank_tells_all_who_is_missing(store: Counting) -> None:
    told = on_ranks(16, lambda rank: meet(16, timeout=3) if rank not in {5, 11, 12, 13} else None)
    assert_tells(message_of(told[0]), ("ranks 5, 11 to 13 of 16", "ranks 0 to 4, 6 to 10, 14, 15 did"), "timeout=")
    assert message_of(told[15]) == message_of(told[0])


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([1], "rank 1"),
        ([2, 0], "ranks 0, 2"),
        ([0, 1], "ranks 0, 1"),
        (range(6), "ranks 0 to 5"),
        ([*range(512), *range(513, 1024)], "ranks 0 to 511, 513 to 1023"),
        (range(0, 100, 2), f"ranks {', '.join(map(str, range(0, 32, 2)))} and 34 others"),
    ],
)
def test_ranks_are_told_as_ranges(numbers: Any, text: str) -> None:
    assert ranks_text(numbers) == text


def row(values: Mapping[int, object]) -> str:
    with pytest.raises(RankMismatchError) as caught:
        require_same("Trying", {rank: {"dataset length": value} for rank, value in values.items()})
    return message_of(caught.value).splitlines()[1].strip()


def test_of_many_ranks_the_smallest_party_is_told_first_and_the_largest_is_the_others() -> None:
    odd = {rank: 20000 if rank == 512 else 10000 for rank in range(1024)}
    assert row(odd) == "dataset length: 20000 on rank 512; 10000 on the other 1023"
    assert row({0: 3, 1: 4}) == "dataset length: 3 on rank 0; 4 on rank 1"
    seeds = row({rank: rank for rank in range(1024)})
    assert seeds.startswith("dataset length: 0 on rank 0; 1 on rank 1; ")
    assert seeds.endswith("; 1009 other values on the other 1009")
    assert seeds.count(";") == 15


def test_a_first_rank_that_comes_or_answers_after_others_have_given_up_does_not_go_on_alone(store: Counting) -> None:
    def late(rank: int) -> Any:
        time.sleep(0 if rank else 1.5)
        return meet(3, timeout=0.1)

    def slow(records: Any) -> Any:
        time.sleep(1.5)
        return records

    for act in (late, lambda rank: meet(3, judge=slow, timeout=0.1)):
        first, *others = on_ranks(3, act)
        assert [type(error) for error in (first, *others)] == [MissingRanksError] * 3
        assert_tells(message_of(first), ("Trying", "rank 0 of 3 did not answer", "another has given up"), "timeout=")


def test_ranks_that_meet_for_something_else_are_told_at_what_the_others_are(store: Counting) -> None:
    told = on_ranks(3, lambda rank: exchange.exchange(range(3), "Here" if rank else "There", 1, list, 20))
    for error in told:
        assert_tells(message_of(error), ("There", "ranks 1, 2 at 'Here'"), "Look for")


# Values as bytes for other ranks: what comes is what was sent.


def sent(value: Any) -> Any:
    """A value as it comes at another rank, which receives it into memory of its own."""
    return unpacked(np.frombuffer(bytearray(packed(value)), np.uint8).data)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(12).reshape(3, 4).t(),
        torch.ones(1, 3)[:, 0],
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.empty(0, 3),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
    ],
    ids=str,
)
def test_tensors_come_as_they_were_sent(tensor: torch.Tensor) -> None:
    came = sent({"x": tensor})["x"]
    assert (came.dtype, came.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(came, tensor)


def test_whatever_else_a_batch_holds() -> None:
    frozen = np.arange(4)
    frozen.flags.writeable = False
    batch = [{"name": "é", "n": 3, "none": None}, (frozen, np.arange(6).reshape(2, 3)[:, ::2], np.array(["a", "b"]))]
    came = sent(batch)
    assert came[0] == batch[0]
    for one, other in zip(came[1], batch[1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_view_comes_without_the_storage_behind_it() -> None:
    view = torch.arange(100_000)[:3]
    assert unpacked(packed(view)).tolist() == [0, 1, 2]
    assert len(packed(view)) < 1000
