"""Real gloo ranks whose steps cost alike: all ways to draw, and what is told of costs that differ."""

from functools import partial
from typing import Any

import numpy as np
from costed import costed
from messages import assert_tells
from quick import run_each, run_ranks, said
from torch.utils.data import DataLoader, RandomSampler
from zoo import Indices, Unequal, as_it_is, seed_ambient

from ddp_patch import Cost, loader_state, patch_dataloader_to_ddp, restore_loader

N = 53
COSTS = np.random.default_rng(0).lognormal(2, 1, N)


def makes() -> dict[str, DataLoader[Any]]:
    return {
        "looked up": DataLoader(Indices(N), 3, sampler=RandomSampler(range(N)), collate_fn=as_it_is),
        "in order": DataLoader(Indices(N), 3, collate_fn=as_it_is),
        "drawn": DataLoader(Indices(N), 3, sampler=[*range(N)], collate_fn=as_it_is),
        "whole batches": DataLoader(Indices(N), batch_sampler=Unequal(N), collate_fn=as_it_is),
    }


WAYS: list[dict[str, Any]] = [{}, {"uneven": "keep"}, {"uneven": "drop"}]


def passing(rank: int, world_size: int) -> dict[tuple[str, str], Any]:
    """A whole pass, and the rest of the next one, resumed."""
    found = {}
    for way in WAYS:
        for name, given in makes().items():
            seed_ambient(rank)
            options = costed({"seed": 3, "timeout": 60, "cost": COSTS, "window": 2, **way})
            one = patch_dataloader_to_ddp(given, **options)
            batches = list(one)
            step = 2 if len(batches) > 3 else 1
            iterator = iter(one)
            for _ in range(step):
                next(iterator)
            again = patch_dataloader_to_ddp(makes()[name], **options)
            restore_loader(again, loader_state(one, batches_done=step))
            rest = list(again)
            found[str(way), name] = (batches, rest, rest == list(iterator))
    return found


def test_each_sample_comes_once_in_equal_steps() -> None:
    world_size = 3
    ranks = run_ranks(passing, world_size)
    for way in WAYS:
        for name in makes():
            of_ranks = [found[str(way), name] for found in ranks]
            together = [index for batches, *_ in of_ranks for batch in batches for index in batch]
            if way.get("uneven") == "drop":
                assert len({*together}) == len(together)
                assert name == "whole batches" or len(together) == N // world_size * world_size
            else:
                assert {*together} == {*range(N)}, (way, name)
                assert way.get("uneven") != "keep" or "share" in way or len(together) == N
            for batches, rest, goes_on in of_ranks:
                assert 0 < len(rest) < len(batches) + 3  # whole batches are drawn anew
                assert goes_on
            steps = {len(batches) for batches, *_ in of_ranks}
            assert max(steps) - min(steps) <= (way.get("uneven") == "keep")


def refusing(rank: int, world_size: int) -> list[tuple[str, str]]:
    """What each rank is told of costs that differ, or that one rank's are wrong."""
    others: list[dict[str, Any]] = [
        {"cost": COSTS if rank else COSTS[::-1]},
        {"cost": COSTS if rank else [*COSTS[:-1], -1.0]},
        {"cost": COSTS, "window": 2 + rank},
    ]
    return [
        said(partial(patch_dataloader_to_ddp, DataLoader(Indices(N), 2), timeout=60, **costed(options)))
        for options in others
    ]


def test_costs_that_differ_are_told_at_the_patch_and_found_in_the_pass() -> None:
    at_the_patch, in_the_pass = run_each(2, refusing, disagreeing)
    for rank, heard in enumerate(at_the_patch):
        (same, costs), (wrong, cost), (other, window) = heard
        assert (same, wrong, other) == (
            "RankMismatchError",
            "RankMismatchError" if rank else "InvalidOptionError",
            "RankMismatchError",
        )
        assert "cost" in costs
        assert "-1.0" in cost
        assert_tells(window, ("cost_window", "2", "3"))
    for error, text in in_the_pass:
        assert error == "RankMismatchError"
        assert "cost= said something else of an item" in text


def disagreeing(rank: int, world_size: int) -> tuple[str, str]:
    """What ranks are told in the epoch, of a function that says another cost on each."""

    def cost(index: int) -> float:
        return float(index + 7 * rank if 0 < index % 312 < 99 else index)

    given = DataLoader(Indices(10_000), 4, shuffle=True)
    one = patch_dataloader_to_ddp(given, seed=3, timeout=60, cost=Cost(cost, window=64))
    return said(lambda: list(one))
