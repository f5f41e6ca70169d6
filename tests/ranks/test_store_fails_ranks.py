"""Real ranks whose store fails for a while: told once, and compared again when it answers."""

import warnings
from typing import Any

import pytest
from quick import run_ranks
from torch.utils.data import DataLoader
from zoo import Indices

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import DDPPatchWarning, RankMismatchError
from ddp_patch.ranks import claims


class Failing:
    """A store that fails while nobody has mended it."""

    def __init__(self, store: Any) -> None:
        self.store, self.fails, self.asked = store, False, 0

    def __getattr__(self, name: str) -> Any:
        if self.fails:
            self.asked += 1
            raise RuntimeError("Broken pipe")
        return getattr(self.store, name)


def failing() -> Any:
    """Return this process's store, which fails when it is told to."""
    module: Any = claims
    store = Failing(default_store())
    module.default_store = lambda: store
    return store


def read_on(loader: Any) -> None:
    for _ in range(20):
        list(loader)


def in_an_outage(rank: int, ranks: int) -> Any:
    """In the second epoch no rank's store answers; after the third, rank 1 chooses an epoch of its own."""
    store = failing()
    loader: Any = patch_dataloader_to_ddp(DataLoader(Indices(), batch_size=2, shuffle=True))
    told: list[str] = []
    for epoch in range(3):
        store.fails = epoch == 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert list(loader)
        assert all(one.category is DDPPatchWarning for one in caught)
        told += [f"{epoch}: {one.message}" for one in caught]
    if rank == 1:
        loader.set_epoch(7)
    with pytest.raises(RankMismatchError, match="epoch") as found:
        read_on(loader)
    return told, store.asked > 1, str(found.value)


def test_a_store_that_fails_for_an_epoch_is_told_once_and_asked_again() -> None:
    for told, is_asked_again, found in run_ranks(in_an_outage, 2):
        (text,) = told
        assert text.startswith("1: The ranks cannot compare their passes over a loader now")
        assert "RuntimeError: Broken pipe" in text
        assert is_asked_again
        assert "epoch 7" in found


def at_a_patch_with_rank(rank: int, ranks: int) -> Any:
    """Rank 0's store does not answer while its first loader is patched; the second looks like it."""
    store = failing()

    def patch() -> Any:
        return patch_dataloader_to_ddp(DataLoader(Indices(), batch_size=2, shuffle=True), rank=rank, num_replicas=ranks)

    store.fails = rank == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = patch()
    store.fails = False
    second = patch()
    if rank == 1:
        first.set_epoch(5)  # which the loader that is patched next is not compared with
        second.set_epoch(7)
    assert list(first)
    with pytest.raises(RankMismatchError, match="epoch 7"):
        read_on(second)
    return [f"{one.category.__name__}: {one.message}" for one in caught]


def test_a_store_that_fails_at_a_patch_with_rank_is_told_and_later_loaders_are_compared() -> None:
    (text,), others = run_ranks(at_a_patch_with_rank, 2)
    assert text.startswith("DDPPatchWarning: The ranks cannot compare their passes over a loader now")
    assert "but for loaders that were patched with rank= meanwhile" in text
    assert "RuntimeError: Broken pipe" in text
    assert not others
