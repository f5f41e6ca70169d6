"""A patched or autopatched loader is shared once in every framework, whatever becomes of loaders that are not."""

import pickle
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from frameworks import FRAMEWORKS, framework
from frameworks.base import Epochs, Seen, measure
from frameworks.kinds import BATCH_SIZE, KINDS, Batch, Kind, tiny_model
from frameworks.loops import train
from quick import run_ranks
from torch.utils.data import DataLoader
from zoo import seed_ambient

from ddp_patch import autopatch

RANKS = 2
SHUFFLED, WEIGHTED, _, _, ITERABLE = (kind.name for kind in KINDS)
# What autopatch leaves to the framework.
LEFT = {
    "with_accelerate": {SHUFFLED, WEIGHTED, ITERABLE},
    "hf_trainer": {SHUFFLED, WEIGHTED, ITERABLE},
    "with_ignite": {SHUFFLED, WEIGHTED},
}
# Starting Ray takes most of a minute.
MODULES = [pytest.param(name, marks=pytest.mark.ray) if name.startswith("ray_") else name for name in FRAMEWORKS]


# By parts of torch that ignite imports.
@pytest.mark.filterwarnings(r"ignore:.torch.jit.\w+. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("module", MODULES)
def test_a_patched_loader_is_shared_once(module: str) -> None:
    ranks = measure(module, RANKS)
    for kind in KINDS:
        patched = [rank[kind.name, "patched"].epochs for rank in ranks]
        assert_shared_once(kind, patched)
        for first, second, third, second_again in patched:
            assert numbers(first) != numbers(second) != numbers(third) != numbers(first)
            assert numbers(second_again) == numbers(second)
        if framework(module).moves:
            assert all(batch.moved_to == ("cpu",) for epochs in patched for epoch in epochs for batch in epoch)
        if not module.startswith("ray_"):
            found = [rank[kind.name, "autopatched"] for rank in ranks]
            is_left = kind.name in LEFT.get(module, ())
            assert [rank.fates for rank in found] == [{"shards itself"} if is_left else {"patched"}] * RANKS
            # accelerate fills up the last batches, too.
            assert_shared_once(kind, [rank.epochs for rank in found], BATCH_SIZE if is_left else 1)


def assert_shared_once(kind: Kind, ranks: list[Epochs], most_padding: int = 1) -> None:
    """Every sample is one rank's, but for the last round's padding; steps are equal, weights and batches are kept."""
    turns = []
    for shares in zip(*ranks, strict=True):
        assert len({len(share) for share in shares}) == 1
        batches = [batch.numbers for turn in zip(*shares, strict=True) for batch in turn]
        turns.append(list(chain.from_iterable(batches)))
        taken = Counter(turns[-1])
        assert set(taken) == set(range(kind.n))
        if kind.is_whole is None:
            assert taken.total() - kind.n < RANKS * most_padding
        else:
            assert all(map(kind.is_whole, batches))
            assert len(batches) - len({tuple(sorted(batch)) for batch in batches}) < RANKS
    assert kind.is_weighted is None or kind.is_weighted(turns)


def numbers(epoch: list[Batch]) -> list[list[int]]:
    return [batch.numbers for batch in epoch]


def measured_first(rank: int, world_size: int) -> tuple[str, list[str]]:
    """As many scripts for accelerate plan their steps, before they prepare the loader."""
    from accelerate import Accelerator

    with autopatch() as summary:
        accelerator = Accelerator(cpu=True)
        loader: DataLoader[Any] = DataLoader(range(8), batch_size=2)  # type: ignore[arg-type]  # a range is a dataset
        assert len(loader) == 4
        prepared = accelerator.prepare(loader)
        assert len(list(prepared)) == len(prepared) == 2
        never_prepared: DataLoader[Any] = DataLoader(range(8), batch_size=2)  # type: ignore[arg-type]  # as above
        assert len(list(never_prepared)) == 2
    return type(prepared).__name__, [record.fate for record in summary.records]


def test_a_length_that_is_taken_before_accelerate_prepares_patches_nothing() -> None:
    assert run_ranks(measured_first, RANKS) == [("DataLoaderShard", ["shards itself", "patched"])] * RANKS


def by_ray(rank: int, world_size: int, folder: str) -> None:
    from frameworks import tensors
    from ray.train.torch import prepare_data_loader, prepare_model  # before the loader is made, as scripts do

    found = {}
    for kind in KINDS:
        seed_ambient(100 + rank)
        with autopatch() as summary:
            loader = kind.make()
            loader.collate_fn = tensors.NotedTensor.of
            prepared = tensors.Seen(prepare_data_loader(loader))
            epochs = train(prepare_model(tiny_model()), prepared, [None] * 3)
        found[kind.name] = Seen(epochs, {record.fate for record in summary.records})
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))


@pytest.mark.ray
def test_ray_keeps_what_it_shards_of_a_script_under_autopatch(tmp_path: Path) -> None:
    """It makes a loader anew, without batch samplers and weights; docs/frameworks.md says what to do."""
    from frameworks.ray_launch import launch

    launch(by_ray, RANKS, str(tmp_path), timeout=200)
    first, second = (pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(RANKS))  # noqa: S301 - ours
    for kind in KINDS:
        assert first[kind.name].fates == ({"left alone", "patched"} if kind.name == ITERABLE else {"shards itself"})
        if kind.name in {SHUFFLED, ITERABLE}:
            assert_shared_once(kind, [first[kind.name].epochs, second[kind.name].epochs])
