import random
from itertools import product

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from zoo import draw_ambient, seed_ambient

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.orders.random_states import PrivateRNG


def test_a_private_stream_goes_on_where_it_stopped() -> None:
    seed_ambient(0)
    with PrivateRNG(3, 1):
        whole = [draw_ambient() for _ in range(4)]
    rng = PrivateRNG(3, 1)
    parts = []
    for _ in range(4):
        with rng:
            parts.append(draw_ambient())  # one normal of a pair is left over each time
        draw_ambient()
    assert parts == whole


def test_seeds_and_epochs_give_streams_of_their_own() -> None:
    firsts = set()
    for seed, epoch in product([0, 1, 2**32, 2**64 + 1], [0, 1, 2**33]):
        with PrivateRNG(seed, epoch):
            firsts |= {float(torch.rand((), dtype=torch.float64)), float(np.random.rand()), random.random()}
    assert len(firsts) == 4 * 3 * 3


def test_leaving_restores_the_ambient_states_after_an_error_too() -> None:
    seed_ambient(5)
    draw_ambient()
    expected = draw_ambient(3)
    seed_ambient(5)
    draw_ambient()
    with pytest.raises(KeyError):
        fail_inside(PrivateRNG(0, 0))
    assert draw_ambient(3) == expected


def fail_inside(rng: PrivateRNG) -> None:
    with rng:
        seed_ambient(1)
        raise KeyError


class Augmented(Dataset[tuple[float, ...]]):
    """Each item is what an augmentation would draw in a worker."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[float, ...]:
        info = get_worker_info()
        assert info is not None
        return (
            float(torch.rand((), dtype=torch.float64)),
            float(np.random.rand()),
            random.random(),
            float(np.random.default_rng(info.seed).random()),
        )


def augmentations(rank: int, seed: int, **options: object) -> list[tuple[float, ...]]:
    """Two epochs of one rank with two workers; ranks are seeded alike and share the loader's generator."""
    torch.manual_seed(0)
    loader: DataLoader[tuple[float, ...]] = DataLoader(
        Augmented(),
        batch_size=1,
        num_workers=2,
        collate_fn=lambda batch: batch[0],
        generator=torch.Generator().manual_seed(0),
        **options,  # type: ignore[arg-type]
    )
    patched = patch_dataloader_to_ddp(loader, rank=rank, num_replicas=2, seed=seed)
    return [drawn for _ in range(2) for drawn in patched]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_differ_over_rank_worker_and_epoch_and_repeat_for_the_seed(persistent: bool) -> None:
    ranks = [augmentations(rank, 1, persistent_workers=persistent) for rank in range(2)]
    for library in range(3):
        drawn = [item[library] for rank in ranks for item in rank]
        assert len(set(drawn)) == 2 * 2 * 4  # ranks x epochs x items: no draw twice
    # ranks x workers x starts
    assert len({item[3] for rank in ranks for item in rank}) == 2 * 2 * (1 if persistent else 2)
    assert ranks[0] == augmentations(0, 1, persistent_workers=persistent)
    assert not set(augmentations(0, 2)) & set(ranks[0])


def seed_numpy_from_torch(worker_id: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)


def test_the_users_worker_init_fn_runs_after_the_seeding() -> None:
    ranks = [augmentations(rank, 1, worker_init_fn=seed_numpy_from_torch) for rank in range(2)]
    assert not {item[1] for item in ranks[0]} & {item[1] for item in ranks[1]}
    assert {item[1] for item in ranks[0]} != {item[1] for item in augmentations(0, 1)}
