"""A loader that replicas share who come and go, without torchft; tests/properties simulates their quorums."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler

from ddp_patch import patch_dataloader_to_ddp, restore_loader
from ddp_patch.elastic import ElasticLoader
from ddp_patch.errors import StateError


def loader_of(data: Any, batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size, **options)


def of(n: int = 12, size: int = 2, **options: Any) -> ElasticLoader[Any]:
    return ElasticLoader(loader_of(range(n), size), **options)


@pytest.mark.parametrize("make", [list, SubsetRandomSampler, lambda rows: iter([*rows])])
def test_replicas_that_draw_other_orders_have_other_numbers(make: Any) -> None:
    replicas = [ElasticLoader(loader_of(range(8), sampler=make(rows))) for rows in (range(4), range(4, 8), range(4))]
    one, other, again = (replica.numbers(0)[0] for replica in replicas)
    assert one == again != other


def test_a_generator_of_a_replicas_own_is_a_matter_of_its_place() -> None:
    """A replica that joins takes it from another."""
    replicas = [
        ElasticLoader(loader_of(range(8), shuffle=True, generator=torch.Generator().manual_seed(seed)))
        for seed in (1, 2)
    ]
    (one, here), (other, there) = (replica.numbers(0) for replica in replicas)
    assert one == other
    assert here != there


def test_the_step_after_an_epochs_last_one_is_the_next_epochs() -> None:
    loader = of(4)
    loader.batch(0, 0, 2)
    assert (loader.epoch(0), loader.epoch(1)) == (0, 1)
    assert loader.batch(1, 0, 2)[0].tolist() == [0, 2]


def test_what_is_less_than_a_step_is_left_out_as_drop_last_says() -> None:
    loader = ElasticLoader(loader_of(range(5), 2, drop_last=True))
    assert loader.batch(0, 0, 1)[0].tolist() == [0, 1]
    assert loader.batch(1, 0, 1)[0].tolist() == [2, 3]
    assert loader.epoch(2) == 1
    assert loader.batch(1, 1, 3)[0].tolist() == [1, 4]  # three samples are left: no step of three replicas


def test_another_loaders_position_is_refused() -> None:
    loader = of()
    loader.load(of(13).state(0), 1, 0, 2)
    with pytest.raises(StateError, match="another loader"):
        loader.batch(1, 0, 2)


def test_a_position_is_a_state_as_any_other() -> None:
    loader = of()
    loader.batch(0, 0, 3)
    resumed = patch_dataloader_to_ddp(loader_of(range(12), 2), rank=0, num_replicas=1)
    restore_loader(resumed, loader.state(1))
    assert [batch.tolist() for batch in resumed] == [[6, 7], [8, 9], [10, 11]]


def test_what_workers_fetched_ahead_for_others_is_read_again() -> None:
    loader = ElasticLoader(loader_of(range(40), 2, num_workers=2, prefetch_factor=4))
    assert [loader.batch(step, 0, 2)[0].tolist() for step in range(2)] == [[0, 2], [4, 6]]
    assert loader.batch(2, 0, 1)[0].tolist() == [8, 9]


def test_a_replica_that_counts_a_step_alone_stands_elsewhere() -> None:
    """It has trained on a third of a step, which the others then took as halves: two models of one step."""
    alone, *others = replicas = [of(24) for _ in range(3)]
    for rank, one in enumerate(replicas):
        one.batch(0, rank, 3)
    for rank, one in enumerate(others):  # a quorum that leaves it out does the step again
        one.batch(0, rank, 2)
    assert others[0].numbers(1) == others[1].numbers(1) != alone.numbers(1)
