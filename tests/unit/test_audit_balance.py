"""The audit of a loader whose costs are known: how ranks wait, without ``cost=`` and with it."""

import json
from collections.abc import Callable
from typing import Any

import audit_setups as setups
import numpy as np
import pytest
import torch
from audit_setups import Untouchable
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset

from ddp_patch import Cost, audit, patch_dataloader_to_ddp
from ddp_patch.auditing.report import page
from ddp_patch.sharding.balancing import Balancer

N = 400
COSTS = np.random.default_rng(3).lognormal(3, 0.8, N).round() + 1


def cost_of_index(index: int) -> float:
    return float(COSTS[index])


def plain(n: int = N, **options: Any) -> DataLoader[Any]:
    return DataLoader(Untouchable(n), **options)


# What is reported.


def test_imbalance_is_the_slowest_ranks_cost_over_the_mean() -> None:
    """Without cost=, rank 0 costs 2 in each of two steps, rank 1 6."""
    (epoch,) = audit(plain(8, batch_size=2), 2, epochs=1, cost=[1, 3, 1, 3, 1, 3, 1, 3]).epochs
    assert (epoch.imbalance, epoch.unbalanced) == (1, 1.5)
    assert audit(plain(8), 2, cost=torch.ones(8)).epochs[0].imbalance == 1
    assert audit(plain(8), 2).epochs[0].imbalance is None
    assert audit(plain(8), 2, cost=np.zeros(8)).epochs[0].imbalance is None


def test_of_what_is_not_patched_the_waiting_alone_is_told() -> None:
    """Rank 0 alone makes a seventh step, the last of which all others wait for."""
    (epoch,) = audit(setups.uneven, 4, epochs=1, cost=np.ones(97)).epochs
    assert epoch.steps == (7, 6, 6, 6)
    assert epoch.imbalance == pytest.approx(25 / (24 + 1 / 4))
    assert epoch.unbalanced is None
    (epoch,) = audit(plain(8, batch_size=2), 2, 1, patch=False, cost=[1, 3] * 4, allow=["not_sharded"]).epochs
    assert (epoch.imbalance, epoch.unbalanced) == (1, None)
    stream = audit(lambda rank, ranks: DataLoader(setups.Stream(rank, ranks, n=104)), 4, cost=cost_of_index)
    assert stream.epochs[0].imbalance is None  # samples have no indices


def test_both_are_shown_in_every_form() -> None:
    report = audit(plain(8, batch_size=2), 2, epochs=1, cost=[1, 3, 1, 3, 1, 3, 1, 3])
    told = "waiting 0 % (33 % without cost=)"
    assert all(told in text for text in (report.summary, str(report), report.to_markdown(), page({"train": report})))
    written = json.loads(json.dumps(report.to_dict()))
    assert (written["epochs"][0]["imbalance"], written["epochs"][0]["unbalanced"]) == (1, 1.5)


# What it costs.


def by_hand(given: DataLoader[Any], ranks: int, of_batch: Callable[[list[int]], float], **options: Any) -> NDArray[Any]:
    """What each rank's steps of the first epoch cost, shape (ranks, steps), drawn as a training does."""
    patched = [patch_dataloader_to_ddp(given, rank=rank, num_replicas=ranks, **options) for rank in range(ranks)]
    return np.array([[of_batch(np.ravel(step).tolist()) for step in loader] for loader in patched])


def ratio(costs: NDArray[Any]) -> float:
    return float(costs.max(axis=0).sum() / costs.mean(axis=0).sum())


def summed(batch: list[int]) -> float:
    return float(sum(COSTS[index] for index in batch))


def padded(batch: list[int]) -> float:
    return float(max(COSTS[index] for index in batch) * len(batch))


class OwnBatches(BatchSampler):
    """A batch sampler that is not torch's own, so that whole batches are shared."""


def batches_of_three_and_five() -> list[list[int]]:
    order: list[int] = list(range(N))
    found: list[list[int]] = []
    while order:
        size = 3 + 2 * (len(found) % 2)
        found.append(order[:size])
        order = order[size:]
    return found


MADE: dict[str, tuple[Callable[[], DataLoader[Any]], dict[str, Any]]] = {
    "samples": (lambda: DataLoader(range(N), batch_size=4, shuffle=True), {}),  # type: ignore[arg-type]  # a dataset
    "samples, no batches": (lambda: DataLoader(range(N), batch_size=None, shuffle=True), {}),  # type: ignore[arg-type]
    "whole batches": (lambda: DataLoader(range(N), batch_size=4, shuffle=True), {"share": "batches"}),  # type: ignore[arg-type]
    "batches of the sampler": (
        lambda: DataLoader(range(N), batch_sampler=OwnBatches(RandomSampler(range(N)), 4, False)),  # type: ignore[arg-type]
        {},
    ),
    "batches of other sizes": (lambda: DataLoader(range(N), batch_sampler=batches_of_three_and_five()), {}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("rule", ["sum", "padded"])
@pytest.mark.parametrize("name", MADE)
def test_what_is_reported_is_what_ranks_wait_in_a_training(name: str, rule: Any) -> None:
    """A function of an index tells the same as a sequence, of whole batches, too."""
    make, options = MADE[name]
    of_batch = summed if rule == "sum" else padded
    report = audit(make(), 4, epochs=1, cost=Cost(COSTS, of=rule, window=8), **options)
    assert report.ok
    (epoch,) = report.epochs
    assert epoch.unbalanced == pytest.approx(ratio(by_hand(make(), 4, of_batch, **options)))
    with_cost = {"cost": Cost(COSTS, of=rule, window=8)}
    assert epoch.imbalance == pytest.approx(ratio(by_hand(make(), 4, of_batch, **options, **with_cost)))
    assert epoch.imbalance < epoch.unbalanced  # type: ignore[operator]  # known where costs are
    (plainly,) = audit(make(), 4, epochs=1, **options).epochs
    assert epoch.steps == plainly.steps
    by_function = audit(make(), 4, epochs=1, cost=Cost(cost_of_index, of=rule, window=8), **options)
    assert by_function.epochs == report.epochs


def test_costs_are_those_of_the_loaders_own_dataset() -> None:
    """As for the patch: of a ``Subset`` one for each of its indices, in its order, however many lie below."""
    chosen = np.random.default_rng(0).permutation(1000)[:N]
    given = plain(batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    inner = Subset(Untouchable(1000), chosen[::-1].tolist())
    subset = DataLoader(Subset(inner, range(N)[::-1]), 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    whole = audit(given, 4, epochs=1, cost=COSTS)
    for cost in (COSTS, cost_of_index):
        found = audit(subset, 4, epochs=1, cost=cost)
        assert found.epochs == whole.epochs


def test_a_factorys_costs_are_those_of_the_dataset_below_subsets() -> None:
    def of_a_subset(rank: int, ranks: int) -> DataLoader[Any]:
        return DataLoader(Subset(Untouchable(104), range(rank, 104, ranks)), 4)

    report = audit(of_a_subset, 4, epochs=1, cost=np.arange(104) % 4)  # which is each index' rank
    assert report.epochs[0].imbalance == 2  # a mean of 1.5 for each sample, and 3 on rank 3


def test_the_first_steps_of_a_long_epoch_are_balanced_as_they_are_in_the_epoch() -> None:
    """A sample ends within a window, which is dealt whole all the same."""
    steps, given = 10, plain(batch_size=2, shuffle=True)
    report = audit(given, 4, epochs=1, cost=COSTS, max_items=2 * steps)
    drawn: DataLoader[Any] = DataLoader(range(N), batch_size=2, shuffle=True)  # type: ignore[arg-type]  # a sequence is a dataset
    first = by_hand(drawn, 4, summed, cost=COSTS)[:, :steps]
    assert report.is_sample
    (epoch,) = report.epochs
    assert epoch.steps == (steps,) * 4
    assert epoch.imbalance == pytest.approx(ratio(first))
    assert ratio(first) < 1.05 < 1.2 < epoch.unbalanced  # type: ignore[operator]  # known where costs are


# What is judged.


Places = np.ndarray[Any, Any]


def with_another_instead(order: Places) -> Places:
    """The first item of the window is lost, and the second one is there twice."""
    return np.where(order == 0, 1, order)


def damage(monkeypatch: pytest.MonkeyPatch, how: Callable[[Places], Places]) -> None:
    """Damage every window that is dealt, also that of one process."""
    dealt = Balancer.order_of
    monkeypatch.setattr(Balancer, "order_of", lambda *given: how(dealt(*given)))


@pytest.mark.parametrize("name", ["samples", "whole batches", "batches of the sampler", "batches of other sizes"])
def test_a_sample_that_is_lost_in_a_deal_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options = MADE[name]
    damage(monkeypatch, with_another_instead)
    report = audit(make(), 4, epochs=1, cost=COSTS, **options)
    assert report.epochs[0].missing
    assert len(report.problems) == 1
    assert audit(make(), 4, epochs=1, **options).ok
