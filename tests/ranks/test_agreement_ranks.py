"""Real gloo ranks that disagree, are late, ahead or gone: found at once, or made to agree."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.data import DataLoader, Sampler
from zoo import KINDS, STEPS, Forever, Indices, N, Own, as_it_is, loader, seed_ambient, units

from ddp_patch import DDPPatchError, DDPSamplerWrapper, LeaderWarning, patch_dataloader_to_ddp
from ddp_patch.plan import Plan
from ddp_patch.testing import run_ranks

SEED = 100


def said(act: Callable[[], Any]) -> tuple[str, str]:
    """What a rank was told, and by which error."""
    try:
        return "nothing", repr(act())
    except DDPPatchError as error:
        return type(error).__name__, str(error)


# Ranks that differ.


def differing(rank: int, world_size: int) -> list[tuple[str, str]]:
    odd = rank == 1
    return [
        said(lambda: patch_dataloader_to_ddp(loader(sampler=range(9 if odd else 10)))),
        said(lambda: patch_dataloader_to_ddp(DataLoader(Indices(20 + odd)))),
        said(lambda: patch_dataloader_to_ddp(loader(batch_size=3 if odd else 4))),
        said(lambda: patch_dataloader_to_ddp(loader(shuffle=odd))),
        said(lambda: patch_dataloader_to_ddp(loader(), uneven="drop" if odd else "pad", seed=rank)),
        said(lambda: DDPSamplerWrapper(range(9 if odd else 10))),
    ]


def test_ranks_that_differ_are_told_so_on_every_rank_at_once() -> None:
    start = time.monotonic()
    ranks = run_ranks(differing, 3)
    assert time.monotonic() - start < 60  # and not at any time-out
    assert ranks[0] == ranks[1] == ranks[2]
    assert {name for name, _ in ranks[0]} == {"RankMismatchError"}
    tables = [message.split("\n")[1:-1] for _, message in ranks[0]]
    assert tables == [
        ["  stream length: 10 on ranks 0, 2; 9 on rank 1"],
        ["  dataset length: 20 on ranks 0, 2; 21 on rank 1", "  stream length: 20 on ranks 0, 2; 21 on rank 1"],
        ["  batch_size: 4 on ranks 0, 2; 3 on rank 1"],
        ["  sampler: SequentialSampler on ranks 0, 2; RandomSampler on rank 1"],
        ["  uneven: pad on ranks 0, 2; drop on rank 1", "  seed: 0 on rank 0; 1 on rank 1; 2 on rank 2"],
        ["  stream length: 10 on ranks 0, 2; 9 on rank 1"],
    ]
    assert ranks[0][0][1].startswith("Agreeing on how data is shared: the ranks differ, so their shares would overlap")
    assert ranks[0][0][1].endswith("Make these the same on every rank.")


class OfASet(Sampler[str]):
    """Follows the order of a set of strings, which each process hashes in its own way."""

    names = frozenset(f"{index}.jpg" for index in range(N))

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)


def disagreeing(rank: int, world_size: int) -> Any:
    dist.new_group([0, 1])  # ranks need not be in the same number of groups
    makers: dict[str, Callable[[], DataLoader[Any]]] = {
        "own generator, seeded by nobody": lambda: loader(sampler=Own(partial_permutation(np.random.default_rng()))),
        "own generator, seeded by rank": lambda: loader(sampler=Own(partial_permutation(np.random.default_rng(rank)))),
        "a set of strings": lambda: loader(sampler=OfASet()),
        "files listed in another order": lambda: loader(sampler=[f"{(i + rank) % N}.jpg" for i in range(N)]),
    }
    told: dict[str, Any] = {}
    for name, make in makers.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patched = patch_dataloader_to_ddp(make())
        messages = [str(warning.message) for warning in caught if warning.category is LeaderWarning]
        told[name] = messages, [[item for batch in patched for item in batch] for _ in range(2)]
    return told


def partial_permutation(generator: np.random.Generator) -> Callable[[], Any]:
    return lambda: generator.permutation(N)


def test_ranks_that_would_draw_different_orders_are_led(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)  # each rank's own, as it is unless somebody sets it
    ranks = run_ranks(disagreeing, 3)
    for name in ranks[0]:
        for rank, told in enumerate(ranks):
            assert len(told[name][0]) == (rank == 0), (name, told[name][0])
        for epoch in range(2):
            together = Counter(item for told in ranks for item in told[name][1][epoch])
            assert len(together) == N, (name, epoch)
            assert together.total() == 24
    (message,) = ranks[0]["own generator, seeded by rank"][0]
    assert message == (
        "Rank 0 and rank 1 and rank 2 would draw different orders, whatever the global random states: the sampler has "
        "a random generator of its own that is seeded by rank, or follows the order of a set or of files. From now on "
        "rank 0 draws each epoch and sends every rank its share, about 1 / num_replicas of the indices, at the "
        "epoch's start. Make the sampler's order the same on every rank to do without."
    )


# The leader.

LED = [kind for kind in KINDS if "iterable" not in kind.name and not kind.make().drop_last]


def led(rank: int, world_size: int) -> dict[str, list[list[Any]]]:
    warnings.simplefilter("ignore")  # what is warned of is tested in process
    shares = {}
    for kind in LED:
        seed_ambient(SEED + rank)
        patched = patch_dataloader_to_ddp(kind.make(), agreement="leader")
        shares[kind.name] = [units(kind, patched) for _ in range(kind.epochs)]
    return shares


@pytest.mark.filterwarnings("ignore:.*yielded 23 items and its len")
def test_every_kind_can_be_led() -> None:
    ranks = run_ranks(led, 3, timeout=240)
    for kind in LED:
        seed_ambient(SEED)
        alone = patch_dataloader_to_ddp(kind.make(), rank=0, num_replicas=1, seed=SEED)
        for epoch in range(1 if kind.endless else kind.epochs):
            stream = units(kind, alone, STEPS * 3)
            for rank in range(3):
                share = [stream[p % len(stream)] for p in Plan(rank, 3).share(len(stream))]
                assert ranks[rank][kind.name][epoch] == share, (kind.name, epoch, rank)


class HardFirst(Sampler[int]):
    """Orders by a loss that only rank 0 has measured."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.losses = list(range(N))

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        if self.rank > 0:
            raise AssertionError("only rank 0 draws")
        return iter(sorted(range(N), key=self.losses.__getitem__, reverse=True))


def mining(rank: int, world_size: int) -> list[list[int]]:
    sampler = HardFirst(rank)
    patched = patch_dataloader_to_ddp(loader(sampler=sampler), agreement="leader")
    epochs = [[item for batch in patched for item in batch]]
    if rank == 0:
        sampler.losses.reverse()
    epochs.append([item for batch in patched for item in batch])
    for _ in patched:  # an epoch that is left early leaves nothing behind
        break
    epochs.append([item for batch in patched for item in batch])
    return epochs


def test_a_sampler_that_follows_rank_0s_training_is_led() -> None:
    first, second = run_ranks(mining, 2)
    for epoch, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        stream = sorted(range(N), reverse=epoch == 0)
        assert [item for pair in zip(ours, theirs, strict=True) for item in pair] == [*stream, stream[0]]


class Breaking(Forever):
    """Breaks after some pieces were sent."""

    def __iter__(self) -> Iterator[int]:
        for drawn, item in enumerate(super().__iter__()):
            if drawn == 10_000:
                raise KeyError("broken shard")
            yield item


def failing_leader(rank: int, world_size: int) -> tuple[int, str]:
    patched = patch_dataloader_to_ddp(loader(sampler=Breaking()), agreement="leader")
    steps = 0
    try:
        for _ in patched:
            steps += 1
    except (KeyError, DDPPatchError) as error:
        return steps, f"{type(error).__name__}: {error}"
    return steps, "nothing"


def test_an_error_in_the_leaders_sampler_ends_every_rank() -> None:
    first, second = run_ranks(failing_leader, 2)
    assert first == (
        1023,
        "KeyError: 'broken shard'",
    )  # 8190 of the 10,000 items were sent, 4 a step on each of 2 ranks
    assert second == (
        1023,
        "LeaderError: Rank 0, which draws for all, could not: its sampler raised KeyError('broken shard'). See its "
        "error; no other rank can go on.",
    )


class FailsAtOnce(Sampler[int]):
    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        raise KeyError("no losses yet")


def failing_at_once(rank: int, world_size: int) -> list[tuple[str, str]]:
    told = []
    for sampler in (FailsAtOnce(), [open for _ in range(3)], [lambda: None]):
        patched = patch_dataloader_to_ddp(loader(sampler=sampler), agreement="leader", timeout=30)
        try:
            told.append(("nothing", str(len(list(patched)))))
        except Exception as error:  # noqa: BLE001 - what each rank says is looked at
            told.append((type(error).__name__, str(error)))
    return told


def test_the_other_ranks_are_told_at_once_what_the_leader_cannot_draw_or_send() -> None:
    start = time.monotonic()
    first, second = run_ranks(failing_at_once, 2)
    assert time.monotonic() - start < 25  # and not at any time-out
    assert first[0] == ("KeyError", "'no losses yet'")
    assert second[0][0] == second[2][0] == "LeaderError"
    assert "KeyError('no losses yet')" in second[0][1]
    assert "pickle" in second[2][1]
    assert first[1] == second[1] == ("nothing", "1")


def led_in_runs(rank: int, world_size: int) -> list[int]:
    given = DataLoader(Indices(), sampler=range(300), batch_size=1, collate_fn=as_it_is)
    share = []
    for batch in patch_dataloader_to_ddp(given, agreement="leader", layout="contiguous", timeout=20):
        dist.barrier()
        share += batch
    return share


def test_a_leader_sends_contiguous_runs_at_once() -> None:
    assert run_ranks(led_in_runs, 3) == [list(range(start, start + 100)) for start in (0, 100, 200)]


def beginning_different_loaders(rank: int, world_size: int) -> tuple[str, str]:
    loaders = [patch_dataloader_to_ddp(loader(shuffle=True), verify=True, timeout=20) for _ in range(2)]
    return said(lambda: list(loaders[rank]))


def test_ranks_that_begin_different_loaders_are_told() -> None:
    for name, told in run_ranks(beginning_different_loaders, 2):
        assert name == "RankMismatchError"
        assert "patched as: number 1 on rank 0; number 2 on rank 1" in told


def led_from_elsewhere(rank: int, world_size: int) -> tuple[str, str]:
    patched: Any = patch_dataloader_to_ddp(loader(sampler=Own(lambda: range(N))), agreement="leader", timeout=20)
    if rank == 1:
        patched.sampler.set_epoch(4)
    return said(lambda: list(patched))


def test_a_rank_that_begins_another_epoch_than_the_leader_is_told() -> None:
    ranks = run_ranks(led_from_elsewhere, 2)
    assert ranks[1] == (
        "RankMismatchError",
        "Rank 1 begins pass 1 over epoch 4 and rank 0, which draws for all, is in pass 1 over epoch 0: one of them has "
        "iterated the loader where the other has not. Iterate it on every rank alike.",
    )


# Ranks that do not come.


def one_does_not_patch(rank: int, world_size: int) -> tuple[tuple[str, str], float]:
    start = time.monotonic()
    told = said(lambda: patch_dataloader_to_ddp(loader(), timeout=3)) if rank != 1 else ("nothing", "")
    elapsed = time.monotonic() - start
    dist.barrier()  # the store is rank 0's
    return told, elapsed


def test_the_ranks_that_never_patch_are_named() -> None:
    ranks = run_ranks(one_does_not_patch, 3)
    for rank in (0, 2):
        (name, message), elapsed = ranks[rank]
        assert name == "MissingRanksError"
        assert message == (
            "Agreeing on how data is shared: rank 1 of 3 did not come within 3 s; ranks 0, 2 did. Every rank must come "
            "here, at the same point of the script. Look for what the missing ranks do instead (an error, an if rank "
            "== 0, slow preparation), or pass a longer timeout=."
        )
        assert elapsed < 30


def slow(rank: int, world_size: int) -> bool:
    time.sleep(2 * rank)
    return patch_dataloader_to_ddp(loader(), timeout=30) is not None


def test_slow_ranks_are_waited_for() -> None:
    assert run_ranks(slow, 3) == [True] * 3


# Every epoch.


def verified(rank: int, world_size: int) -> list[list[int]]:
    seed_ambient(rank)
    patched = patch_dataloader_to_ddp(loader(shuffle=True), verify=True)
    return [[item for batch in patched for item in batch] for _ in range(3)]


def test_epochs_that_agree_are_verified_in_passing() -> None:
    first, second = run_ranks(verified, 2)
    for ours, theirs in zip(first, second, strict=True):
        assert set(ours) | set(theirs) == set(range(N))


def peeking(rank: int, world_size: int) -> tuple[str, str]:
    patched = patch_dataloader_to_ddp(loader(shuffle=True), verify=True, timeout=5)
    if rank == 0:
        next(iter(patched))
    told = said(lambda: [batch for _ in range(2) for batch in patched])
    dist.barrier()
    return told


def test_a_rank_that_peeked_is_named_instead_of_hanging_the_others() -> None:
    ranks = run_ranks(peeking, 3)
    for name, told in ranks:
        assert name == "RankMismatchError"
        assert told.split("\n")[1:3] == [
            "  meeting: Beginning an epoch on rank 0; Ending an epoch on ranks 1, 2",
            "  epoch: 1 on rank 0; 0 on ranks 1, 2",
        ]


class DriftsApart(Sampler[int]):
    """Agrees on its first items and not on its last."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[int]:
        return (index + (self.rank if index == 900 else 0) for index in range(1000))


def drifting(rank: int, world_size: int) -> tuple[str, str]:
    patched = patch_dataloader_to_ddp(DataLoader(Indices(), sampler=DriftsApart(rank)), verify=True)
    return said(lambda: list(patched))


def test_orders_that_part_after_the_compared_items_are_found_at_the_epochs_end() -> None:
    for name, told in run_ranks(drifting, 2):
        assert name == "RankMismatchError"
        assert "\n  order: " in told


# Topology.


def on_a_mesh(rank: int, world_size: int, shape: tuple[int, ...], names: tuple[str, ...]) -> list[int]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if "tp" in names and len(shape) == 2:
        mesh = mesh["dp"]  # as many write it
    seed_ambient(SEED + rank)
    patched = patch_dataloader_to_ddp(loader(shuffle=True), device_mesh=mesh)
    return [item for batch in patched for item in batch]


@pytest.mark.parametrize(
    ("shape", "names", "sharing"),
    [
        ((2, 2), ("dp", "tp"), [{0, 2}, {1, 3}]),
        ((2, 2), ("pp", "fsdp"), [{0, 1}, {2, 3}]),
        ((2, 2, 2), ("dp_replicate", "dp_shard", "tp"), [{0, 2, 4, 6}, {1, 3, 5, 7}]),
        ((2, 2, 2), ("pp", "dp", "cp"), [{0, 2}, {1, 3}, {4, 6}, {5, 7}]),
    ],
)
def test_data_is_shared_over_the_data_parallel_dimensions_of_a_mesh(
    shape: tuple[int, ...], names: tuple[str, ...], sharing: list[set[int]]
) -> None:
    ranks = run_ranks(on_a_mesh, int(np.prod(shape)), shape, names, timeout=180)
    shares = [[ranks[rank] for rank in sorted(group)] for group in sharing]
    assert all(group == shares[0] for group in shares)  # ranks that differ elsewhere get the same batches
    together = Counter(item for share in shares[0] for item in share)
    assert set(together) == set(range(N))
    assert together.total() == 24


def on_a_mesh_of_other_names(rank: int, world_size: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    return [
        said(lambda: patch_dataloader_to_ddp(loader(), device_mesh=mesh)),
        said(lambda: patch_dataloader_to_ddp(loader(), device_mesh=mesh, data_parallel_dimensions=["lines"])),
        [
            i
            for batch in patch_dataloader_to_ddp(loader(), device_mesh=mesh, data_parallel_dimensions=["rows"])
            for i in batch
        ],
    ]


def test_dimensions_of_other_names_are_given() -> None:
    ranks = run_ranks(on_a_mesh_of_other_names, 4)
    assert ranks[0][0][1] == (
        "The device_mesh has the dimensions ('rows', 'columns'), and none of them is known to split the data. Pass "
        "those that do as data_parallel_dimensions=[...]."
    )
    assert ranks[0][1][1] == (
        "The device_mesh has the dimensions ('rows', 'columns'), but not ['lines']. Pass those that do as "
        "data_parallel_dimensions=[...]."
    )
    assert ranks[0][2] == ranks[1][2] == list(range(0, N, 2))
    assert ranks[2][2] == ranks[3][2] == [*range(1, N, 2), 0]


def keys(rank: int, world_size: int) -> int:
    """How much the meetings leave in the store."""
    for _ in range(5):
        patch_dataloader_to_ddp(loader())
    dist.barrier()
    store: Any = _get_default_store()
    return sum("ddp_patch" in key for key in store.list_keys()) if hasattr(store, "list_keys") else -1


def test_meetings_leave_next_to_nothing_behind() -> None:
    left = run_ranks(keys, 2)
    assert 0 <= max(left) <= 2 + 1  # a count for each rank, and the last verdict
