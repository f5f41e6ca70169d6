"""Real ranks that iterate a loader which they have patched, and not what the patch returned."""

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from quick import run_ranks
from torch.utils.data import DataLoader
from zoo import Indices

from ddp_patch import DDPSamplerWrapper, patch_dataloader_to_ddp
from ddp_patch.errors import UnpatchedLoaderWarning


def told(program: Callable[[], Any]) -> list[str]:
    """Return what a program is warned of, after where."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program()
    assert all(one.category is UnpatchedLoaderWarning and one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Indices(), batch_size=4, shuffle=True, **options)


def as_a_statement(rank: int, ranks: int) -> Any:
    lone, kept, several = (
        loader(),
        loader(persistent_workers=True, num_workers=1),
        {"train": loader(), "val": [loader()]},
    )
    explicit = loader()
    patch_dataloader_to_ddp(lone)
    patch_dataloader_to_ddp(kept)
    patch_dataloader_to_ddp(several)
    patch_dataloader_to_ddp(explicit, rank=rank, num_replicas=ranks)
    given = [lone, kept, several["train"], several["val"][0], explicit]  # type: ignore[index]
    return [[told(partial(list, one)) for _ in range(2)] for one in given]


def test_a_result_that_is_thrown_away_is_warned_of_once_where_the_loop_begins() -> None:
    for of_rank in run_ranks(as_a_statement, 2):
        for first, second in of_rank:
            assert second == []
            (text,) = first
            assert "gives each of 2 ranks all of its data" in text
            assert "test_thrown_away_ranks.py:" in text.partition("called at ")[2]
            assert "write loader = patch_dataloader_to_ddp(loader)" in text


def honest(rank: int, ranks: int) -> Any:
    original = loader()
    attributes = set(vars(original))
    patched = patch_dataloader_to_ddp(original)
    copies = [copy.copy(original), copy.deepcopy(original), pickle.loads(pickle.dumps(original))]  # noqa: S301 - ours
    again = patch_dataloader_to_ddp(original, uneven="drop")
    by_hand = DataLoader(Indices(), batch_size=4, sampler=DDPSamplerWrapper(original.sampler, False))
    returned = patch_dataloader_to_ddp(by_hand)  # as it is
    alone, looked_at = loader(), loader(num_workers=1)
    _never_used, used = patch_dataloader_to_ddp(alone), patch_dataloader_to_ddp(looked_at)
    looks = [told(lambda: next(iter(looked_at))), told(lambda: next(iter(looked_at)))]
    silent = [*looks, *(told(partial(list, one)) for one in (patched, *copies, again, by_hand, returned, used))]
    used.set_epoch(1)
    silent.append(told(partial(list, looked_at)))
    dist.barrier()
    validated = [told(lambda: [*alone]) for _ in range(3)] if rank == 0 else []
    len(original), repr(original), next(iter(original))  # a look
    on_purpose = told(lambda: [*original])  # its copy has been used
    assert set(vars(original)) == attributes  # nothing is left
    return silent, validated, on_purpose


def test_copies_shares_and_what_shards_already_are_silent_and_rank_0_alone_is_told_once() -> None:
    (silent, validated, on_purpose), (other, *_) = run_ranks(honest, 2)
    assert silent == other == [[]] * len(silent)
    assert [len(each) for each in validated] == [1, 0, 0]
    assert "as to validate on rank 0 alone, ignore this" in validated[0][0]
    assert on_purpose == []


def alone(rank: int, ranks: int) -> Any:
    original = loader()
    patch_dataloader_to_ddp(original)
    simulated = loader()
    patch_dataloader_to_ddp(simulated, rank=1, num_replicas=4)
    return [told(partial(list, one)) for one in (original, simulated)]


def test_one_rank_has_all_data_anyhow() -> None:
    assert run_ranks(alone, 1) == [[[], []]]
