"""QuorumLoader with torchft's own Manager, one thread for each process; benchmarks/replicas.py kills processes."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
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
            shares.load_state_dict({**shares.state_dict(), "taken": [8]})
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
