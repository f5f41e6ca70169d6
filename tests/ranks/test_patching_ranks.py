"""Real gloo ranks, each seeded differently, over every kind of loader: the patch as users call it."""

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import assert_tells
from quick import run_ranks, soaked
from resumed import RESUMED
from torch.utils.data import DataLoader, Dataset
from zoo import (
    ALL_KINDS,
    STEPS,
    Indices,
    Kind,
    N,
    Own,
    PKBatches,
    Source,
    as_it_is,
    draw_ambient,
    loader,
    seed_ambient,
    units,
)

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import WorldError
from ddp_patch.loaders.facts import NOTHING_TO_COMPARE
from ddp_patch.positions_and_padding import Plan
from ddp_patch.ranks.exchange import digest

SEED = 100
EPOCHS = 2  # of a kind that has as many
REPEATED = [kind for kind in RESUMED if kind.name in ("one iterator for all", "one iterator for all, workers")]
WHOLE = [kind for kind in ALL_KINDS + REPEATED if not kind.make().drop_last]
# Starting workers takes long, so with them there is but one number of ranks.
IN_WORLD = {world: [kind for kind in WHOLE if world == 2 or not kind.make().num_workers] for world in (2, 3, 4)}


def epochs_on_rank(kind: Kind, rank: int) -> tuple[int, list[list[Any]]]:
    """The seed and epochs of a kind, with an all-reduce at every step, so that uneven steps would hang."""
    seed_ambient(SEED + rank)
    patched: Any = patch_dataloader_to_ddp(kind.make())
    draw_ambient(rank)
    return patched.sampler.seed, [units(kind, InStep(patched, rank)) for _ in range(min(EPOCHS, kind.epochs))]


class InStep:
    """A loader whose every step meets all ranks and draws other random numbers on each."""

    def __init__(self, loader: DataLoader[Any], rank: int) -> None:
        self.loader, self.rank = loader, rank
        self.batch_sampler = loader.batch_sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        for step, batch in enumerate(self.loader):
            draw_ambient(self.rank + step)
            meet()
            yield batch
        meet()  # a rank that makes fewer steps meets the others' next one here, and theirs at the end is missing


def meet() -> None:
    ranks = torch.ones(())
    dist.all_reduce(ranks)
    assert ranks == dist.get_world_size()


def every_kind(rank: int, world_size: int) -> dict[str, tuple[int, list[list[Any]]]]:
    warnings.simplefilter("ignore")  # what is warned of is tested in process
    shares = {kind.name: epochs_on_rank(kind, rank) for kind in IN_WORLD[world_size]}
    for batch in InStep(patch_dataloader_to_ddp(loader(drop_last=True)), rank):
        assert len(batch) == 4
    return shares


@pytest.mark.parametrize("world_size", [soaked(2), 3, soaked(4)])
@pytest.mark.filterwarnings("ignore::ddp_patch.errors.StreamLengthWarning")
def test_every_kind_is_shared_exactly(world_size: int) -> None:
    ranks = run_ranks(every_kind, world_size)
    for kind in IN_WORLD[world_size]:
        found = [rank[kind.name] for rank in ranks]
        (seed,) = {seed for seed, _ in found}
        seed_ambient(SEED)
        alone = patch_dataloader_to_ddp(kind.make(), rank=0, num_replicas=1, seed=seed)
        for epoch in range(len(found[0][1])):
            stream = units(kind, alone, STEPS * world_size)
            for rank, (_, epochs) in enumerate(found):
                assert epochs[epoch] == kind.of_rank(stream, Plan(rank, world_size)), (kind.name, epoch, rank)


def in_two_groups(rank: int, world_size: int) -> Any:
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine, other = groups[rank % 2], groups[1 - rank % 2]
    torch.manual_seed(rank)
    with pytest.raises(WorldError) as caught:
        patch_dataloader_to_ddp(loader(), process_group=other)
    patched = patch_dataloader_to_ddp(loader(shuffle=True), process_group=mine, uneven="drop")
    return [item for batch in patched for item in batch], str(caught.value)


def test_a_process_group_is_a_world_of_its_own() -> None:
    (first, said), (alone, _), (second, _) = run_ranks(in_two_groups, 3)
    assert not set(first) & set(second)
    assert (len(first), len(second), len(set(alone))) == (11, 11, 23)
    assert_tells(said, ("global rank 0 of 3", "process_group"), ("its ranks", "one that this rank belongs to"))


def meetings() -> int:
    """How often this rank has met the others so far, as the store counts it."""
    base = f"ddp_patch/{digest([*range(dist.get_world_size())])}"
    return int(default_store().add(f"{base}/count/{dist.get_rank()}", 0))


def several(rank: int) -> list[DataLoader[Any]]:
    shared = torch.Generator().manual_seed(rank)
    done: Any = patch_dataloader_to_ddp(loader(shuffle=True), seed=5)
    return [
        loader(shuffle=True),
        loader(shuffle=True),
        DataLoader(Indices(7), 2, shuffle=True, collate_fn=as_it_is),
        loader(batch_sampler=PKBatches()),
        done,
        loader(shuffle=True, generator=shared),
        loader(shuffle=True, generator=shared),
        DataLoader(Source(), 3, num_workers=2, collate_fn=as_it_is),
        loader(sampler=Own(lambda: torch.randperm(N).tolist())),
    ]


def drawn(rank: int, world_size: int, at_once: bool) -> tuple[list[Any], int]:
    """What all loaders give in two epochs, and how often the ranks met to patch."""
    seed_ambient(100 + rank)
    given = several(rank)
    before = meetings()
    patched = patch_dataloader_to_ddp(given) if at_once else [patch_dataloader_to_ddp(one) for one in given]
    met = meetings() - before
    return [[list(one) for one in patched] for _ in range(2)], met


def test_in_one_call_each_gives_what_it_gives_in_turn() -> None:
    in_turn, calls = (run_ranks(drawn, 2, at_once) for at_once in (False, True))
    for (epochs, met), (expected, met_in_turn) in zip(calls, in_turn, strict=True):
        assert epochs == expected
        assert (met, met_in_turn) == (1, 9)


class Noise(Dataset[torch.Tensor]):
    """Samples that nothing names."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


def log_of(rank: int, world: int) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddp_patch").addHandler(handler)
    logging.getLogger("ddp_patch").setLevel(logging.INFO)
    for dataset, fingerprint in [(Noise(), "auto"), (Noise(), None), (Noise(), len), ([*range(40)], "auto")]:
        loader: Any = DataLoader(dataset, 5)  # type: ignore[arg-type]  # a list is a dataset
        patch_dataloader_to_ddp(loader, fingerprint=fingerprint)  # type: ignore[arg-type]  # of several kinds
    return lines


def test_the_log_says_where_ranks_can_compare_no_data() -> None:
    for rank, lines in enumerate(run_ranks(log_of, 2)):
        share = f"DataLoader was patched: shard {rank} of 2, samples, 4 steps of 5"
        assert lines == [f"{share}, {NOTHING_TO_COMPARE}", share, share, share]
