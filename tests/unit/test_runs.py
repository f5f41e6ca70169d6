"""``layout="contiguous"``: each rank takes a run of an epoch's order, and padding, resume and lengths are as ever."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from messages import raises
from quick import run_ranks
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler
from zoo import Indices, N, Source

from ddp_patch import DDPSamplerWrapper, gather_in_order, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import InvalidOptionError, RankMismatchError, UnsupportedLoaderError


class Lazy:
    """Draws one index after the other."""

    def __iter__(self) -> Any:
        return (int(torch.randint(N, ())) for _ in range(N))


KINDS: dict[str, Callable[[], DataLoader[int]]] = {
    "in order": lambda: DataLoader(Indices(), 3),
    "shuffled": lambda: DataLoader(Indices(), 3, shuffle=True),
    "shuffled, with workers": lambda: DataLoader(Indices(), 3, shuffle=True, num_workers=1),
    "by a sampler": lambda: DataLoader(Indices(), 3, sampler=SubsetRandomSampler(range(N))),
    "without a length": lambda: DataLoader(Indices(), 3, sampler=Lazy()),
    "whole batches": lambda: DataLoader(
        Indices(), batch_sampler=BatchSampler(RandomSampler(Indices()), 3, drop_last=False)
    ),
}


def given(loaders: list[Any], most: int | None = None) -> list[list[list[int]]]:
    """Return what each rank is given, by batches."""
    return [[batch.tolist() for batch in islice(loader, most)] for loader in loaders]


def patched(kind: str, ranks: int, **options: Any) -> list[Any]:
    each = {"num_replicas": ranks, "seed": 7, **options}
    return [patch_dataloader_to_ddp(KINDS[kind](), rank=rank, **each) for rank in range(ranks)]


def items(ranks: list[list[list[int]]]) -> list[int]:
    return [item for batches in ranks for batch in batches for item in batch]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_runs_are_the_order_of_one_process(kind: str, ranks: int) -> None:
    for epoch in range(2):
        whole = patched(kind, 1)
        shares = patched(kind, ranks, layout="contiguous", uneven="keep")
        for loader in (*whole, *shares):
            loader.set_epoch(epoch)
        runs = given(shares)
        assert items(runs) == items(given(whole))
        assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_padding_comes_last() -> None:
    share = [DDPSamplerWrapper(range(7), False, layout="contiguous", rank=rank, num_replicas=3) for rank in range(3)]
    assert [list(one) for one in share] == [[0, 1, 2], [3, 4, 0], [5, 6, 3]]  # what comes first on ranks 0 and 1
    assert [len(one) for one in share] == [3, 3, 3]


@pytest.mark.parametrize("kind", ["in order", "shuffled", "without a length", "whole batches"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 2), (3, 1)])
def test_an_epoch_that_other_ranks_began_goes_on_where_they_stopped(kind: str, before: int, after: int) -> None:
    options = {"layout": "contiguous", "uneven": "keep"}
    whole = sorted(items(given(patched(kind, 1))))
    running = patched(kind, before, **options)
    done = given(running, 1)
    states = [loader_state(loader, batches_done=1) for loader in running]
    assert states[0] == states[-1]
    resumed = patched(kind, after, **options)
    for loader in resumed:
        restore_loader(loader, states[0])
    more = given(resumed, 1)
    state = loader_state(resumed[0], batches_done=1)
    again = patched(kind, before, **options)
    for loader in again:
        restore_loader(loader, state)
    assert sorted(items(done) + items(more) + items(given(again))) == whole


@pytest.mark.parametrize(
    ("loader", "options", "fact"),
    [
        (DataLoader(Source()), {}, "Source"),
        (DataLoader(Indices()), {"cost": [1.0] * N}, "cost="),
        (DataLoader(Indices()), {"share": "within_batches"}, "share='within_batches'"),
        (DataLoader(Source()), {"share": "by_worker"}, "share='by_worker'"),
    ],
)
def test_what_arranges_items_itself_gives_no_runs(loader: Any, options: Any, fact: str) -> None:
    with raises(InvalidOptionError, ("layout='contiguous'", fact), "Use"):
        patch_dataloader_to_ddp(loader, layout="contiguous", rank=0, num_replicas=2, **options)


def test_what_ranks_gave_is_not_in_the_samplers_order() -> None:
    (running,) = patched("in order", 1, layout="contiguous")
    outputs = [batch.tolist() for batch in running]
    with raises(UnsupportedLoaderError, "layout='contiguous'", "gather_step()"):
        gather_in_order(outputs, running)


def runs_on_a_rank(rank: int, ranks: int) -> tuple[list[int], str]:
    torch.manual_seed(rank)
    patched = patch_dataloader_to_ddp(DataLoader(Indices(), 3, shuffle=True), layout="contiguous", uneven="keep")
    items = [item for batch in patched for item in batch.tolist()]
    try:
        patch_dataloader_to_ddp(DataLoader(Indices()), layout="contiguous" if rank else "interleaved")
    except RankMismatchError as error:
        return items, str(error)
    return items, ""


def test_real_ranks_agree_on_it_and_draw_runs() -> None:
    ranks = run_ranks(runs_on_a_rank, 2)
    assert sorted(item for run, _ in ranks for item in run) == list(range(N))
    assert all("layout: interleaved on rank 0; contiguous on rank 1" in told for _, told in ranks)
