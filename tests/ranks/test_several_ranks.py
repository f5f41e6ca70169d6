"""Several loaders in one call, on real ranks that are seeded differently: what they give, and how often ranks meet."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from messages import assert_tells
from quick import run_ranks
from torch.utils.data import DataLoader, Subset
from zoo import Indices, N, Own, PKBatches, Source, as_it_is, loader, seed_ambient

from ddp_patch import DDPPatchError, check_loaders_is_patched, patch_dataloader_to_ddp
from ddp_patch.errors import message_of
from ddp_patch.ranks.exchange import _Meeting


def meetings() -> int:
    """How often this rank has met the others so far, as the store counts it."""
    meeting = _Meeting(range(dist.get_world_size()), "counting", 0)
    return int(meeting.store.add(f"{meeting.base}/count/{dist.get_rank()}", 0))


def of_all_kinds(rank: int) -> list[DataLoader[Any]]:
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


def drawn(rank: int, world_size: int, patch: Callable[[list[Any]], list[Any]]) -> tuple[list[Any], int]:
    """What all loaders give in two epochs, and how often the ranks met to patch."""
    seed_ambient(100 + rank)
    given = of_all_kinds(rank)
    before = meetings()
    patched = patch(given)
    met = meetings() - before
    return [[list(one) for one in patched] for _ in range(2)], met


def in_turn(given: list[Any]) -> list[Any]:
    return [patch_dataloader_to_ddp(one) for one in given]


def in_one_call(given: list[Any]) -> list[Any]:
    return patch_dataloader_to_ddp(given)


def test_in_one_call_each_gives_what_it_gives_in_turn() -> None:
    schedule, calls = (run_ranks(drawn, 2, patch) for patch in (in_turn, in_one_call))
    for (epochs, met), (expected, met_in_turn) in zip(calls, schedule, strict=True):
        assert epochs == expected
        assert (met, met_in_turn) == (1, 9)


def meeting_once(rank: int, world_size: int) -> tuple[int, int, bool]:
    before = meetings()
    nest: Any = {"train": loader(shuffle=True), "val": [loader(), loader(batch_sampler=PKBatches())], "test": None}
    patched = patch_dataloader_to_ddp(nest)
    for_three = meetings() - before
    patch_dataloader_to_ddp([])
    return for_three, meetings() - before, check_loaders_is_patched(patched)


def test_ranks_meet_once_for_three_loaders() -> None:
    assert run_ranks(meeting_once, 3) == [(1, 2, True)] * 3


def said(act: Callable[[], Any]) -> tuple[str, str]:
    """What a rank was told, and by which error."""
    try:
        act()
    except DDPPatchError as error:
        return type(error).__name__, message_of(error)
    return "nothing", ""


def differing(rank: int, world_size: int, with_errors: bool) -> tuple[list[tuple[str, str]], list[Any]]:
    """Calls in which rank 1 differs, and what two loaders give that are patched afterwards."""
    seed_ambient(100 + rank)
    odd = rank == 1
    sets: list[Callable[[], Any]] = [
        lambda: [loader()] * 2 if odd else [loader(), loader()],
        lambda: {"val": loader(), "train": loader()} if odd else {"train": loader(), "val": loader()},
        lambda: [] if odd else [loader(shuffle=True)],
        lambda: [loader(), None] if odd else [loader(), loader()],
        lambda: loader() if odd else [loader()],
        lambda: [loader(shuffle=True), {"val": loader(batch_size=3 if odd else 4, shuffle=odd)}],
        lambda: [loader(), DataLoader(Subset(Indices(), range(5 * odd, 5 * odd + 5)))],
        lambda: [loader(), loader(sampler=range(rank, 21, 3))],
        lambda: (loader(), 5 if odd else loader()),
    ]
    told = [said(lambda make=make: patch_dataloader_to_ddp(make())) for make in sets if with_errors]  # type: ignore[misc]  # a default binds it
    if with_errors:
        told.append(said(lambda: patch_dataloader_to_ddp([loader()], uneven="drop" if odd else "pad")))
    patched = patch_dataloader_to_ddp((loader(shuffle=True), loader(shuffle=True)))
    return told, [list(one) for one in patched]


def test_ranks_that_differ_are_told_in_which_loader_and_nothing_is_patched() -> None:
    ranks = run_ranks(differing, 3, True)
    errors = [told for told, _ in ranks]
    assert errors[0][:8] == errors[1][:8] == errors[2][:8]
    assert {name for name, _ in errors[0]} == {"RankMismatchError"}
    nests, (values, contents, parts) = [text.split("\n")[1:-1] for _, text in errors[0][:5]], errors[0][5:8]
    assert nests == [
        ["  loaders: loaders[0], loaders[1] (the same as loaders[0]) on rank 1; loaders[0], loaders[1] on ranks 0, 2"],
        ["  loaders: loaders['val'], loaders['train'] on rank 1; loaders['train'], loaders['val'] on ranks 0, 2"],
        ["  loaders: loaders (empty) on rank 1; loaders[0] on ranks 0, 2"],
        ["  loaders: loaders[0], loaders[1] (None) on rank 1; loaders[0], loaders[1] on ranks 0, 2"],
        ["  loaders: one on rank 1; loaders[0] on ranks 0, 2"],
    ]
    assert values[1].split("\n")[1:-1] == [
        "  loaders[1]['val'] batch_size: 3 on rank 1; 4 on ranks 0, 2",
        "  loaders[1]['val'] sampler: RandomSampler on rank 1; SequentialSampler on ranks 0, 2",
    ]
    assert contents[1].startswith("loaders[1]: ")
    functions = ("whole dataset", "split_dataset_by_node()", "shard()", "random_split()", "shuffle()", "order='seeded'")
    assert_tells(contents[1], ("datasets of ranks 0, 2 and rank 1", "indices of a Subset"), functions)
    assert parts[1].startswith("loaders[1]: ")
    assert_tells(parts[1], "rank 0 and rank 1 and rank 2 would draw different orders from range", "order='leader'")
    assert_tells(errors[0][9][1], "uneven: drop on rank 1; pad on ranks 0, 2", "same on every rank")
    (refused, why), others = errors[1][8], (errors[0][8], errors[2][8])
    assert refused == "NotALoaderError"
    assert_tells(why, ("loaders[1]", "5 (int)"), "loader itself")
    for name, text in others:
        assert name == "RankMismatchError"
        assert_tells(text, ("rank 1: NotALoaderError: loaders[1]: ", "5 (int)"), "all ranks again")
    # Seeds are counted as if those calls had not been made.
    assert [given for _, given in ranks] == [given for _, given in run_ranks(differing, 3, False)]
