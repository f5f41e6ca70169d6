"""What users do after the patch: no sample is lost, or a rank tells within the epoch in which the first would be."""

import random
from collections.abc import Sequence
from itertools import chain

import pytest
import torch
import user_code as user
from programs import Program, Run, run_programs, verdict
from quick import run_ranks
from user_code import N, loader

KINDS = {
    "generator": user.shuffled,
    "generator, workers": user.with_workers,
    "generator, persistent": user.persistent,
    "weighted": user.weighted,
    "own random": user.own_random,
    "counts": user.counting,
    "batch sampler": user.in_batches,
}

RIGHT: dict[str, Program] = {
    **{f"{name}: rank 0 lists": Program(make, user.lists_sampler) for name, make in KINDS.items()},
    **{f"{name}: looks, then all set": Program(make, user.looks_and_sets) for name, make in KINDS.items()},
    **{f"{name}: a long look, then all set": Program(make, user.looks_long_and_sets) for name, make in KINDS.items()},
    **{f"{name}: looks, then all set later": Program(make, user.looks_and_sets_later) for name, make in KINDS.items()},
    **{f"{name}: looks unpatched": Program(make, user.looks_unpatched) for name, make in KINDS.items()},
    **{
        f"{name}: looks unpatched, then all set": Program(make, user.looks_unpatched_and_sets)
        for name, make in KINDS.items()
    },
    "one generator for all loaders": Program(user.shuffled, user.validates),
    "one generator for all loaders, workers": Program(user.with_workers, user.validates),
    "one generator for all loaders, persistent": Program(user.persistent, user.validates),
    "the module's generator crops": Program(lambda rank: loader(user.Cropped(), sampler=user.OfModule())),
    "ranks draw from the sampler's generator": Program(user.own_random, user.draws),
    "whole batches": Program(user.own_random, user.lists_sampler, options={"share": "batches"}),
    "divided batches": Program(
        user.own_random, user.lists_sampler, options={"share": "within_batches", "uneven": "keep"}
    ),
    "costs": Program(user.own_random, user.lists_sampler, options={"cost": list(range(N))}),
    "all break": Program(user.own_random, steps=2, expected=lambda epoch: ()),
    "learns from all": Program(lambda rank: loader(sampler=user.Learning()), learn=user.learns_alike),
    "data grow alike": Program(
        lambda rank: loader(user.Rows(list(range(N))), shuffle=True),
        user.grows_alike,
        expected=lambda epoch: range(N + 12 * epoch),
    ),
    "rows are shuffled alike": Program(
        lambda rank: loader(user.Rows(list(range(N))), shuffle=True), user.shuffles_rows_alike
    ),
    "the dataset keeps losses": Program(lambda rank: loader(user.Kept(), shuffle=True), learn=user.keeps_losses),
    "one rank is slow": Program(user.shuffled, pause_s=lambda rank: 0.02 * rank),
    "an attribute of a stream": Program(
        lambda rank: loader(user.Stream(), num_workers=1), user.sets_dataset, expected=lambda epoch: range(24)
    ),
    "a stream": Program(lambda rank: loader(user.Stream(), num_workers=2)),
}

TOLD: dict[str, Program] = {
    "learns from its rank": Program(lambda rank: loader(sampler=user.Learning()), learn=user.learns),
    "weighs by its rank": Program(user.weighted, learn=user.weighs),
    "batches of alike losses": Program(lambda rank: loader(batch_sampler=user.Alike()), learn=user.learns),
    "learns, whole batches": Program(
        lambda rank: loader(sampler=user.Learning()), learn=user.learns, options={"share": "batches"}
    ),
    "learns, divided batches": Program(
        lambda rank: loader(sampler=user.Learning()),
        learn=user.learns,
        options={"share": "within_batches", "uneven": "keep"},
    ),
    "learns, costs": Program(
        lambda rank: loader(sampler=user.Learning()), learn=user.learns, options={"cost": list(range(N))}
    ),
    "entropy": Program(lambda rank: loader(sampler=user.Entropy())),
    "entropy, an iterator": Program(lambda rank: loader(sampler=user.Iterates())),
    "rows shuffled by hand": Program(lambda rank: loader(user.Rows(list(range(N)))), user.shuffles_rows),
    "rows shuffled by hand, a tensor": Program(lambda rank: loader(user.Rows(torch.arange(N) * 1)), user.shuffles_rows),
    "rows shuffled by hand, verify": Program(
        lambda rank: loader(user.Rows(list(range(N)))), user.shuffles_rows, options={"verify": True, "timeout": 5}
    ),
    "rows shuffled by hand, a leader": Program(
        lambda rank: loader(user.Rows(list(range(N)))),
        user.shuffles_rows,
        options={"agreement": "leader", "timeout": 5},
    ),
    "an order shuffled by hand": Program(lambda rank: loader(user.Permuted()), user.shuffles_order),
    "grows by more on one rank": Program(lambda rank: loader(user.Rows(list(range(N))), shuffle=True), user.grows),
    "files one object deeper": Program(lambda rank: loader(user.Annotated(random.sample(range(N), N)))),
    "files listed by the first item": Program(lambda rank: loader(user.Lazy())),
    "shards itself by torch's rank": Program(lambda rank: loader(user.ShardsItself(user.from_torch))),
    "shards itself by the environment": Program(
        lambda rank: loader(user.ShardsItself(user.from_environment), num_workers=1)
    ),
    "skips an item": Program(
        lambda rank: loader(user.Stream(960, skips=270 if rank else -1)), expected=lambda epoch: range(960), epochs=1
    ),
    "skips an item, workers": Program(
        lambda rank: loader(user.Stream(960, skips=700 if rank else -1), num_workers=2),
        expected=lambda epoch: range(960),
        epochs=1,
    ),
    "takes a lost connection for the end": Program(
        lambda rank: loader(user.Stream(960, ends=600 if rank else -1)),
        expected=lambda epoch: range(960),
        steps_together=False,
        epochs=1,
    ),
}

# A look without set_epoch is one of the passes.
EITHER: dict[str, Program] = {
    **{f"{name}: looks": Program(make, user.looks) for name, make in KINDS.items()},
    **{f"{name}: makes an iterator": Program(make, user.makes_an_iterator) for name, make in KINDS.items()},
}


def right(rank: int, world_size: int) -> dict[str, Run]:
    return run_programs(rank, world_size, RIGHT)


def told(rank: int, world_size: int) -> dict[str, Run]:
    return run_programs(rank, world_size, TOLD)


def either(rank: int, world_size: int) -> dict[str, Run]:
    return run_programs(rank, world_size, EITHER)


def judged(runs: Sequence[dict[str, Run]], programs: dict[str, Program], expected: set[str]) -> dict[str, str]:
    """Return what is not as expected."""
    found = {}
    for name, program in programs.items():
        of_ranks = [run[name] for run in runs]
        epochs = [range(N) if program.expected is None else program.expected(epoch) for epoch in range(program.epochs)]
        if program.steps is not None:  # each sample at most once
            given = ((run.epochs[epoch][0] for run in of_ranks) for epoch in range(program.epochs))
            epochs = [sorted(chain.from_iterable(epoch)) for epoch in given]
            assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
        if (said := verdict(of_ranks, epochs)) not in expected:
            found[name] = f"{said} {[run.told for run in of_ranks]}"
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_others_draw_look_at_or_set_loses_nothing(world_size: int) -> None:
    assert not judged(run_ranks(right, world_size), RIGHT, {"right"})


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_differs_between_ranks_is_told_within_the_epoch(world_size: int) -> None:
    assert not judged(run_ranks(told, world_size), TOLD, {"told"})


def test_a_look_of_one_rank_is_told_if_it_moves_anything() -> None:
    assert not judged(run_ranks(either, 2), EITHER, {"right", "told"})


def test_the_judge_sees_what_is_lost() -> None:
    whole, half = Run([([0, 1], 1)]), Run([([2, 2], 1)])
    assert verdict([whole, half], [range(4)]) == "lost in silence: 1 of 4 in epoch 0, steps [1]"
    assert verdict([whole, Run([([2, 3], 2)])], [range(4)]) == "lost in silence: 0 of 4 in epoch 0, steps [1, 2]"
    assert verdict([whole, Run([([2], 1)], told="RankMismatchError")], [range(4)]) == "told"
