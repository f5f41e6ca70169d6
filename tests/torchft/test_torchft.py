"""QuorumLoader with torchft's own Manager, one thread for each process; benchmarks/replicas.py kills processes."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from ddp_patch import patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import InvalidOptionError, RankMismatchError
from ddp_patch.integrations.torchft import QuorumLoader

pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")  # in torchft
LIMIT = timedelta(seconds=20)
Act = Callable[[Manager, int, int], Any]


def loader_of(data: Any, batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size, **options)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=20_000)
    yield server.address()
    server.shutdown()


def on_replicas(lighthouse: str, act: Act, *, size: int = 1, **options: Any) -> list[Any]:
    """Call ``act`` on each process of two replicas, all at once; return what it returns or raises."""
    store: Any = vars(dist)["TCPStore"]  # torch leaves it out of what it exports
    stores = [store("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(2)]

    def of(replica: int, rank: int) -> Any:
        manager = Manager(
            ProcessGroupGloo(LIMIT),
            None,
            None,
            min_replica_size=2,
            **{"use_async_quorum": False, **options},
            rank=rank,
            world_size=size,
            store_addr="localhost",
            store_port=stores[replica].port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica_{replica}",
            timeout=LIMIT,
        )
        try:
            return act(manager, replica, rank)
        except Exception as error:  # noqa: BLE001 - it is what is tested
            return error
        finally:
            manager.shutdown(wait=False)

    with ThreadPoolExecutor(2 * size) as threads:
        begun = [threads.submit(of, replica, rank) for replica in range(2) for rank in range(size)]
        return [one.result(60) for one in begun]


def taken(manager: Manager, shares: QuorumLoader[Any], steps: int) -> list[list[int]]:
    """Return this process' batches of some committed steps."""
    found = []
    for _ in range(steps):
        manager.start_quorum()
        batch, _ = shares.next_batch()
        assert manager.should_commit()
        found.append(batch.tolist())
    return found


@pytest.mark.parametrize("options", [{}, {"use_async_quorum": True, "init_sync": False}])
def test_two_replicas_take_the_batches_of_two_ranks(lighthouse: str, options: Any) -> None:
    def act(manager: Manager, replica: int, rank: int) -> Any:
        shares: QuorumLoader[Any] = QuorumLoader(manager, loader_of(range(20), 2, shuffle=True), seed=7)
        return taken(manager, shares, 6), shares.epoch, shares.state_dict()

    found = on_replicas(lighthouse, act, **options)
    loader = loader_of(range(20), 2, shuffle=True)
    two = [patch_dataloader_to_ddp(loader, seed=7, rank=rank, num_replicas=2) for rank in range(2)]
    wanted = [[batch.tolist() for batch in one] + [next(iter(one)).tolist()] for one in two]
    assert sorted(batches for batches, *_ in found) == sorted(wanted)
    assert [epoch for _, epoch, _ in found] == [1, 1]
    resumed = patch_dataloader_to_ddp(loader, seed=7, rank=0, num_replicas=1)
    restore_loader(resumed, found[0][2])  # it is a state as any other
    assert len(resumed) == 8


def test_each_replica_may_have_several_ranks(lighthouse: str) -> None:
    def act(manager: Manager, replica: int, rank: int) -> Any:
        shares: QuorumLoader[Any] = QuorumLoader(manager, loader_of(range(24), 2), rank=rank, num_replicas=2)
        return taken(manager, shares, 3)

    found = on_replicas(lighthouse, act, size=2)
    loaders = [patch_dataloader_to_ddp(loader_of(range(24), 2), rank=rank, num_replicas=4) for rank in range(4)]
    assert sorted(found) == sorted([batch.tolist() for batch in loader] for loader in loaders)


@pytest.mark.parametrize(
    ("what", "of_replica"),
    [
        ("places in the epoch", lambda replica: (loader_of(range(20), 2, shuffle=True), {"seed": replica})),
        ("loaders, datasets or options", lambda replica: (loader_of(range(20 + replica), 2), {})),
        ("loaders, datasets or options", lambda replica: (loader_of([replica, 1, 2, 3], 2), {})),
        ("loaders, datasets or options", lambda replica: (loader_of(range(9), sampler=[replica, 5]), {})),
    ],
)
def test_replicas_that_would_take_other_batches_are_told(lighthouse: str, what: str, of_replica: Any) -> None:
    def act(manager: Manager, replica: int, rank: int) -> Any:
        loader, options = of_replica(replica)
        return taken(manager, QuorumLoader(manager, loader, **options), 1)

    for error in on_replicas(lighthouse, act, use_async_quorum=True, init_sync=False):
        assert isinstance(error, RankMismatchError)
        assert str(error).startswith(f"The replicas have other {what} in step 0, so samples would be lost or repeated.")
        assert "Alike are, of 2: rank 0; rank 1. This one is " in str(error)


def test_a_replica_that_skips_a_batch_is_told(lighthouse: str) -> None:
    def act(manager: Manager, replica: int, rank: int) -> Any:
        shares: QuorumLoader[Any] = QuorumLoader(manager, loader_of(range(20), 2))
        taken(manager, shares, 1)
        if replica:
            shares.load_state_dict({**shares.state_dict(), "parts": [[[2, 4]]]})
        return taken(manager, shares, 1)

    for error in on_replicas(lighthouse, act):
        assert isinstance(error, RankMismatchError)
        assert "other places in the epoch in step 1" in str(error)


def test_gradients_that_torchft_throws_away_are_told(lighthouse: str) -> None:
    def act(manager: Manager, replica: int, rank: int) -> Any:
        return taken(manager, QuorumLoader(manager, loader_of(range(20), 2)), 1)

    for error in on_replicas(lighthouse, act, use_async_quorum=True):  # and init_sync, which is torchft's default
        assert isinstance(error, InvalidOptionError)
        assert "torchft throws away the gradients of rank 1 of 2 in step 0" in str(error)


def test_a_step_that_is_not_committed_is_given_again(lighthouse: str) -> None:
    def act(manager: Manager, replica: int, rank: int) -> Any:
        shares: QuorumLoader[Any] = QuorumLoader(manager, loader_of(range(8), 2))
        manager.start_quorum()
        batch, weights = shares.next_batch()
        manager.report_error(RuntimeError("something went wrong"))
        assert not manager.should_commit()
        assert weights.tolist() == [0.5, 0.5]
        return batch.tolist(), taken(manager, shares, 1)[0]

    assert sorted(on_replicas(lighthouse, act)) == [([0, 2], [0, 2]), ([1, 3], [1, 3])]


def test_a_batch_needs_a_quorum(lighthouse: str) -> None:
    def act(manager: Manager, replica: int, rank: int) -> Any:
        return QuorumLoader(manager, loader_of(range(8), 2)).next_batch()

    for error in on_replicas(lighthouse, act):
        assert isinstance(error, InvalidOptionError)
        assert "Call manager.start_quorum() in each step." in str(error)


def test_padding_weighs_nothing(lighthouse: str) -> None:
    def act(manager: Manager, replica: int, rank: int) -> Any:
        shares: QuorumLoader[Any] = QuorumLoader(manager, loader_of(range(5), 3), share="within_batches")
        manager.start_quorum()
        return shares.next_batch()[1]

    found = sorted(weights.tolist() for weights in on_replicas(lighthouse, act))
    assert found == [pytest.approx([2 / 3, 0]), pytest.approx([2 / 3, 2 / 3])]  # one of the two is padding


@dataclass
class Exchange:
    """Adds up what the replicas of a quorum say, in whichever order they come."""

    replicas: int
    said: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._all_said = Barrier(self.replicas)

    def add(self, said: torch.Tensor) -> None:
        self.said.append(said.clone())
        self._all_said.wait(20)
        said.copy_(torch.stack(self.said).sum(0))


class StandIn:
    """A replica's manager, whose quorums and commits a test decides."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.states: dict[str, Any] = {}
        self.rank, self.replicas = 0, 0
        manager: Any = self
        self.shares: QuorumLoader[Any] = QuorumLoader(manager, loader_of(range(24), 2, shuffle=True), seed=7)

    def register_state_dict_fn(self, name: str, load: Any, save: Any) -> None:
        self.states[name] = save, load

    def participating_rank(self) -> int:
        return self.rank

    def num_participants(self) -> int:
        return self.replicas

    def current_step(self) -> int:
        return self.step

    def allreduce(self, said: torch.Tensor, **_: Any) -> Any:
        self.exchange.add(said)
        return SimpleNamespace(wait=lambda: None)

    def errored(self) -> None:
        """Nothing went wrong."""

    def batch(self, exchange: Exchange, rank: int) -> Any:
        self.exchange, self.rank, self.replicas = exchange, rank, exchange.replicas
        try:
            return self.shares.next_batch()[0].tolist()
        except RankMismatchError as error:
            return error


def in_a_step(*quorum: StandIn) -> list[Any]:
    """Let the replicas of a quorum take their batches of a step, and return these or the errors."""
    exchange = Exchange(len(quorum))
    with ThreadPoolExecutor(len(quorum)) as threads:
        given = [threads.submit(one.batch, exchange, rank) for rank, one in enumerate(quorum)]
        return [each.result(60) for each in given]


def test_a_replica_that_commits_alone_and_lives_on_is_told() -> None:
    """It has trained on a third of a step, which the others then took as halves: two models of one step."""
    alone, *others = replicas = [StandIn() for _ in range(3)]
    in_a_step(*replicas)
    alone.step = 1
    in_a_step(*others)  # a quorum that leaves it out does the step again
    for one in others:
        one.step = 1
    for error in in_a_step(*replicas):
        assert isinstance(error, RankMismatchError)
        assert "other places in the epoch in step 1" in str(error)
        assert "Alike are, of 3: rank 0; ranks 1, 2." in str(error)


def test_a_replica_that_joins_late_is_no_mismatch() -> None:
    first, second = replicas = [StandIn() for _ in range(2)]
    taken = in_a_step(*replicas)
    for one in replicas:
        one.step = 1
    joins = StandIn(step=1)
    for name, (save, _) in first.states.items():  # as torchft heals it
        joins.states[name][1](save())
    taken += in_a_step(first, second, joins)
    one_process = patch_dataloader_to_ddp(loader_of(range(24), 2, shuffle=True), seed=7, rank=0, num_replicas=1)
    stream = [index for batch in one_process for index in batch.tolist()]
    assert taken == [[stream[0], stream[2]], [stream[1], stream[3]], *(stream[at:10:3] for at in (4, 5, 6))]
