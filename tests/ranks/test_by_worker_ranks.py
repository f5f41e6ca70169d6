"""Ranks whose workers read unequally much, as real processes: equal steps, each batch once, and who is named."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from gathered import assert_same
from messages import assert_tells, raises
from quick import keys_now, run_each, run_ranks, soaked
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_patch import errors, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import NoStepsError, RankMismatchError, RanksFailedError, UnsupportedLoaderError
from ddp_patch.ranks.group import Channel, opened

BATCH = 2


class Shards(IterableDataset[Any]):
    """Reader r of n reads shards r, r + n, ...; an item tells which one it is among all, in several ways."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        for shard in range(info.id, len(self.sizes), info.num_workers):
            for item in range(self.sizes[shard]):
                yield self.item(sum(self.sizes[:shard]) + item)

    def item(self, number: int) -> Any:
        x = torch.full((3, 4), number)[:, :2]
        return {"x": x, "name": f"{number}", "deep": [(x.clone().numpy(), self.epoch)], "none": torch.empty(0)}


class Case(NamedTuple):
    sizes: Sequence[int]
    workers: int = 0
    uneven: Any = "pad"
    options: Mapping[str, Any] = {}


def made(case: Case, dataset: IterableDataset[Any] | None = None, **options: Any) -> Any:
    chosen = {"batch_size": BATCH, "collate_fn": list, "persistent_workers": case.workers > 0, **case.options}
    loader: DataLoader[Any] = DataLoader(dataset or Shards(case.sizes), num_workers=case.workers, **chosen)
    sharding = {"uneven": case.uneven, "share": "by_worker", "timeout": 60}
    return patch_dataloader_to_ddp(loader, **sharding | options)


def numbers(batch: Any, epoch: int) -> list[int]:
    items = batch if isinstance(batch, list) else [batch]
    for item in items:  # nothing of it was lost or changed on the way
        (array, told), number = item["deep"][0], int(item["name"])
        assert item["x"].tolist() == array.tolist() == [[number] * 2] * 3
        assert (told, tuple(item["none"].shape)) == (epoch, (0,))
    return [int(item["name"]) for item in items]


Epoch = list[list[int]]


def batches_alone(case: Case, ranks: int) -> list[Epoch]:
    """What each rank's workers make in one epoch, worked out by hand."""
    readers = ranks * max(1, case.workers)
    size = case.options.get("batch_size", BATCH) or 1
    made: list[Epoch] = [[] for _ in range(ranks)]
    for reader in range(readers):
        shards = range(reader, len(case.sizes), readers)
        items = [sum(case.sizes[:shard]) + item for shard in shards for item in range(case.sizes[shard])]
        whole = [items[start : start + size] for start in range(0, len(items), size)]
        kept = [batch for batch in whole if len(batch) == size or not case.options.get("drop_last")]
        made[reader // max(1, case.workers)] += kept
    return made


CASES = {
    "unequal": Case([7, 3, 12, 1, 0, 5], 2),
    "one shard": Case([25]),
    "one shard, dropped": Case([25], 2, "drop"),
    "the last has all": Case([0, 0, 0, 0, 0, 25], 2, "keep"),
    "nothing": Case([], 2),
    "unequal, kept": Case([9, 2], 0, "keep"),
    "unequal, dropped": Case([11, 4, 6], 0, "drop"),
    "without batches": Case([5, 1, 8], 2, "pad", {"batch_size": None, "collate_fn": None}),
    "drop_last": Case([7, 7, 3, 9, 2, 2], 2, "pad", {"drop_last": True}),
    "workers that start anew": Case([7, 3, 12], 2, "pad", {"persistent_workers": False}),
}


def two_epochs_of_each(rank: int, world_size: int) -> dict[str, list[Epoch]]:
    return {name: two_epochs(made(case)) for name, case in CASES.items()}


def two_epochs(loader: Any) -> list[Epoch]:
    return [[numbers(batch, epoch) for batch in loader] for epoch in range(2)]


def check_epoch(case: Case, got: Sequence[Epoch]) -> None:
    alone = [tuple(batch) for batch in chain(*batches_alone(case, len(got)))]
    together, steps = Counter(tuple(batch) for batch in chain(*got)), [len(epoch) for epoch in got]
    assert max(steps) - min(steps) <= (case.uneven == "keep"), case
    beyond = together - Counter(alone)
    if case.uneven == "drop":
        assert len(alone) - together.total() == len(alone) % len(got), case
        assert not beyond
        return
    assert not Counter(alone) - together, case
    assert beyond.total() == (-len(alone) % len(got) if case.uneven == "pad" else 0), case
    # Each repeats a batch of its own round.
    assert set(beyond) <= {tuple(epoch[-1]) for epoch in got if epoch}, case


RESUMED = ["unequal", "one shard, dropped", "without batches", "drop_last", "nothing"]


class Stopped(NamedTuple):
    before: Epoch
    rest: Epoch
    following: Epoch
    state: Any


def stopped_everywhere(rank: int, world_size: int) -> dict[str, list[Stopped]]:
    """A first epoch that is stopped after each batch, and resumed twice if there is as much left."""
    return {name: [*stops(CASES[name], world_size)] for name in RESUMED}


def stops(case: Case, ranks: int) -> Iterator[Stopped]:
    whole = sum(map(len, batches_alone(case, ranks))) // ranks  # that every rank makes
    # Half of them with two ranks and half with three, because starting workers takes long.
    for stop in sorted({0, 1, 2, whole // 2, whole - 1, whole} & set(range(whole + 1)))[ranks % 2 :: 2]:
        loader = made(case)
        before = [numbers(batch, 0) for batch in islice(iter(loader), stop)]
        state = loader_state(loader)
        assert state == loader_state(loader, batches_done=stop)
        again = made(case)
        restore_loader(again, pickle.loads(pickle.dumps(state)))  # noqa: S301 - our own
        more = [numbers(batch, 0) for batch in islice(iter(again), 1)] if stop < whole else []
        last = made(case)
        restore_loader(last, loader_state(again))
        rest = [numbers(batch, 0) for batch in last] if state["epoch"] == 0 else []
        yield Stopped(before, more + rest, [numbers(batch, 1) for batch in last], state)


@pytest.mark.parametrize("ranks", [soaked(2), 3])
def test_ranks_make_equal_steps_of_all_there_is_and_resume_wherever_they_were_stopped(ranks: int) -> None:
    """After a resume each batch comes once, too; who gets one that is handed over may change."""
    whole, said = run_each(ranks, two_epochs_of_each, stopped_everywhere)
    for name, case in CASES.items():
        for got in zip(*(rank[name] for rank in whole), strict=True):
            check_epoch(case, got)
    for name in RESUMED:
        for stop in zip(*(rank[name] for rank in said), strict=True):
            assert all(one.state == stop[0].state for one in stop)
            check_epoch(CASES[name], [one.before + one.rest for one in stop])
            check_epoch(CASES[name], [one.following for one in stop])


VALUES: Mapping[str, Any] = {
    "nothing": None,
    "small": {"x": torch.arange(3, dtype=torch.float64), "name": "a"},
    "of unlike parts": [
        torch.arange(5000),
        torch.empty(0, 3),
        torch.ones(3, dtype=torch.uint8),
        torch.arange(3.0),
        "b",
    ],
    "of many parts": [torch.zeros(number % 3) for number in range(700)],
}


def handed_over(rank: int, world_size: int) -> list[Any]:
    """Rank 0 sends each value, twice, as what comes next must not be mistaken for a rest."""
    with opened(range(world_size), "Testing", "a test", {}, 60) as channel:
        values = [*VALUES.values(), *VALUES.values()]
        came = [channel.swapped({} if rank else {1: value}, [0] if rank else []) for value in values]
        return [each[0] for each in came if each]


def borrowing(rank: int, world_size: int) -> list[str]:
    """The groups of four passes, the second and fourth of which have another within them."""
    used = []
    for nested in (False, True, False, True):
        with opened(range(world_size), "Testing", "to borrow", {}, 60) as channel:
            used.append(channel._group.name)
            if nested:
                with opened(range(world_size), "Testing", "to borrow", {}, 60) as inner:
                    used.append(inner._group.name)
                    assert inner.gathered([rank]) == [[0], [1]]
            assert channel.gathered([-rank]) == [[0], [-1]]
    return used


def test_values_of_any_size_are_handed_over() -> None:
    (_, got), borrowed = run_each(2, handed_over, borrowing)
    assert borrowed[0] == borrowed[1]
    first, second, within, third, fourth, within_again = borrowed[0]
    assert first == second == third == fourth != within == within_again
    for given, *values in zip(VALUES.values(), got[: len(VALUES)], got[len(VALUES) :], strict=True):
        for value in values:
            assert_same(value, given)


def left_and_begun_again(rank: int, world_size: int) -> list[tuple[str, object]]:
    """Passes that all ranks leave, and others after them."""
    found: list[tuple[str, object]] = []
    for workers in (0, 2):
        loader = made(Case([7, 3, 12, 1, 0, 5], workers))
        whole = [numbers(batch, 0) for batch in loader]
        loader.set_epoch(1)
        keys, threads = keys_now(), count_threads()
        left = [leave(loader, epoch) for epoch in range(1, 5)]
        # Of three passes each rank keeps what it claimed, up to seven words, and who has begun them.
        found.append(("keys are few", max(left) - keys <= 24))
        for _ in range(20):
            loader.set_epoch(4)
            left.append(leave(loader, 4))
        found.append(("and do not grow", max(left[14:]) <= max(left[4:14])))
        loader.set_epoch(5)
        found.append(("threads are gone", workers > 0 or count_threads() == threads))
        found.append(("whole after a break", [numbers(batch, 5) for batch in loader] == whole))
        iter(loader)  # is never asked
        loader.set_epoch(1)
        found.append(("the epoch that was set", [numbers(batch, 1) for batch in loader] == whole))
        if not workers:
            copies = [copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]  # noqa: S301 - our own
            found += [("a copy", len(list(one)) == len(whole)) for one in copies]
        with raises(UnsupportedLoaderError, "shallow copy", "deepcopy"):
            iter(copy.copy(loader))
    found.append(("freed with its workers", failed_loader()() is None))
    first, second = iter(made(Case([9]))), iter(made(Case([8, 9])))
    found.append(("side by side", [len(numbers(next(one), 0)) for one in (first, second, first, second)] == [2] * 4))
    late = made(Case([9]))
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="init_process_group"):  # torch's
        next(iter(late))
    return found


def failed_loader() -> Any:
    """A loader whose passes failed on all ranks, and that nobody holds any longer."""
    loader = made(Case([3], 0, "drop", {"batch_size": 4}))
    with suppress(NoStepsError):
        list(loader)
    loader.set_epoch(dist.get_rank())
    with suppress(RankMismatchError):
        list(loader)
    return weakref.ref(loader)


def leave(loader: Any, epoch: int) -> int:
    """Leave a pass after some batches; return how many keys are in the store then."""
    for step, batch in enumerate(loader):
        numbers(batch, epoch)
        if step == epoch:
            break
    return keys_now()


def count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_passes_that_all_ranks_leave_leave_nothing_behind() -> None:
    for found in run_ranks(left_and_begun_again, 2):
        assert [what for what, holds in found if not holds] == []


TIMEOUT = 30.0  # seconds that ranks wait for each other where one does not come


def breaks_off(rank: int, case: Case) -> None:
    for step, _ in enumerate(made(case)):
        if rank == 1 and step == 2:
            return


class Raises(Shards):
    """Raises on rank 1, in its item of this number."""

    def __init__(self, rank: int, at: int) -> None:
        super().__init__([20, 20, 20, 20, 20, 20])
        self.rank, self.at = rank, at

    def item(self, number: int) -> Any:
        if self.rank == 1 and number % 20 == self.at:
            raise LookupError(f"item {number} is missing")
        return super().item(number)


def raises_an_error(rank: int, at: int, workers: int, most: int) -> None:
    for step, _ in enumerate(made(Case([], workers), Raises(rank, at))):
        assert step < most


class NotPicklable(Shards):
    def item(self, number: int) -> Any:
        return lambda: number


def hands_over_what_cannot_be_pickled(rank: int) -> None:
    list(made(Case([]), NotPicklable([0, 8, 8])))


def stops_for_long(rank: int) -> None:
    for step, _ in enumerate(made(Case([40, 40, 40]), timeout=TIMEOUT)):
        if rank == 1 and step == 2:
            time.sleep(TIMEOUT + 10)


def is_in_another_epoch(rank: int) -> None:
    loader = made(Case([40, 40, 40]))
    loader.set_epoch(rank // 2)
    list(loader)


def has_other_workers(rank: int) -> None:
    list(made(Case([40, 40, 40], rank // 2)))


def drops_all_there_is(rank: int) -> None:
    list(made(Case([3], 0, "drop")))


def works_after_all_that(rank: int) -> None:
    assert len(list(made(Case([40, 40, 31])))) == 19


def dies(rank: int) -> None:
    for step, _ in enumerate(made(Case([40, 40, 40]))):
        if rank == 1 and step == 2:
            os._exit(3)


LEFT, BROKEN = "RankMismatchError: rank 1; 3 batches", "RankMismatchError: rank 1"
# Of a rank that is late, the others find that it is missing; it finds that they are there, and the connection broken.
GONE, BETWEEN_ALL = "MissingRanksError: rank 1 of [0, 1, 2]", "MissingRanksError: ranks 0 to 2"
FAILED = "RankMismatchError: rank 1; LookupError; item {} is missing"
EPOCHS, WORKERS = "RankMismatchError: over epoch 0; rank 2 at; over epoch 1", "RankMismatchError: num_workers"
# What a rank does, and what each rank says: an error with facts that its message tells, or nothing.
FAULTS: list[tuple[Callable[[int], None], list[str]]] = [
    # Where no rank hands over batches, where this one does, where it is given some; and with workers.
    (partial(breaks_off, case=Case([40, 40, 40])), [LEFT, "nothing", LEFT]),
    (partial(breaks_off, case=Case([0, 40, 0])), [LEFT, "nothing", LEFT]),
    (partial(breaks_off, case=Case([40, 0, 40])), [LEFT, "nothing", LEFT]),
    (partial(breaks_off, case=Case([40] * 6, 2)), [LEFT, "nothing", LEFT]),
    (partial(raises_an_error, at=0, workers=0, most=0), [FAILED.format(20), "LookupError", FAILED.format(20)]),
    (partial(raises_an_error, at=5, workers=0, most=2), [FAILED.format(25), "LookupError", FAILED.format(25)]),
    (partial(raises_an_error, at=5, workers=2, most=4), [FAILED.format(45), "LookupError", FAILED.format(45)]),
    (hands_over_what_cannot_be_pickled, [BROKEN, "AttributeError", BROKEN]),
    (stops_for_long, [GONE, BETWEEN_ALL, GONE]),
    (is_in_another_epoch, [EPOCHS] * 3),
    (has_other_workers, [WORKERS] * 3),
    (drops_all_there_is, ["NoStepsError: made 2; 3 ranks"] * 3),
    (works_after_all_that, ["nothing"] * 3),
    (dies, [GONE, "died", GONE]),
]


def faults(rank: int, world_size: int, folder: str) -> None:
    for number, (act, _) in enumerate(FAULTS):
        try:
            act(rank)
        except Exception as error:  # noqa: BLE001 - whatever the rank says is what is looked at
            said = f"{type(error).__name__}: {error}"
        else:
            said = "nothing"
        Path(folder, f"{number}-{rank}").write_text(said)
        if act is not dies:
            dist.barrier()


def channels_after_an_error(rank: int, world_size: int) -> int:
    gc.collect()
    gc.disable()
    with suppress(LookupError, RankMismatchError):
        raises_an_error(rank, at=5, workers=0, most=2)
    return sum(isinstance(held, Channel) for held in gc.get_objects())


def test_an_error_that_was_caught_holds_no_connection() -> None:
    """Its threads would end in the process that collects it, which may be a worker: that would be aborted."""
    first, _, last = run_ranks(channels_after_an_error, 3)  # rank 1 raises the user's own error
    assert (first, last) == (0, 0)


def test_a_rank_that_goes_its_own_way_is_named_to_the_others(tmp_path: Path) -> None:
    failed = ""
    try:
        run_ranks(faults, 3, str(tmp_path), timeout=300, grace=30)
    except RanksFailedError as error:
        failed = str(error)
    for number, (act, expected) in enumerate(FAULTS):
        for rank, word in enumerate(expected):
            path = tmp_path / f"{number}-{rank}"
            said = path.read_text() if path.exists() else "died: "
            kind, _, facts = word.partition(": ")
            assert said.startswith(kind), (act, rank, said)
            if hasattr(errors, kind):
                assert_tells(said, tuple(facts.split("; ")))
    assert "exit code 3" in failed


def columns(rank: int, world_size: int) -> list[Epoch]:
    """Ranks 0 and 1 take one share and 2 and 3 the other: each pair hands over within its column."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return two_epochs(made(Case([3, 11], 2), device_mesh=mesh))


def test_ranks_that_take_the_same_share_get_the_same_batches() -> None:
    first, same_as_first, second, same_as_second = run_ranks(columns, 4)
    assert first == same_as_first
    assert second == same_as_second
    for epoch in range(2):
        check_epoch(Case([3, 11], 2), [first[epoch], second[epoch]])


# Nothing is closed in it: a module's last line is often the last of a training.
MODULE_LEVEL = """
import torch.distributed as dist
from itertools import count
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from ddp_patch import iter_with_weights, patch_dataloader_to_ddp

class Endless(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        return count(info.id, info.num_workers)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    loader = patch_dataloader_to_ddp(DataLoader(Endless(), 2, num_workers=2), share="by_worker")
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    weighed = iter_with_weights(patch_dataloader_to_ddp(DataLoader(range(20), 2)), weight_of=lambda batch: batch)
    next(weighed)
"""


def test_a_script_that_ends_within_its_passes_raises_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MODULE_LEVEL)
    # The launcher's. torch leaves it out of what it exports.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = [
        subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, "-W", "error", str(script)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | shared | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[1] for rank in ranks] == ["", ""]
    assert [rank.returncode for rank in ranks] == [0, 0]
