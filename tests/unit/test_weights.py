"""Weights with which the ranks' averaged gradient is that of one process: what they are, without real ranks."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from itertools import islice
from typing import Any

import pytest
import torch
from messages import raises
from torch.utils.data import DataLoader, Sampler
from trying import over_in_turn
from zoo import ALL_KINDS, STEPS, Bare, Indices, Kind, Source, as_it_is, comparable, loader, seed_ambient

from ddp_patch import iter_with_mask, iter_with_weights, patch_dataloader_to_ddp
from ddp_patch.errors import InvalidOptionError, NoStepsError, WorldError

pytestmark = pytest.mark.filterwarnings("ignore::ddp_patch.errors.StreamLengthWarning")  # some kinds have it

WAYS: list[dict[str, Any]] = [{"uneven": uneven} for uneven in ("pad", "drop", "keep")]


def patched(given: Any, world_size: int, rank: int, **options: Any) -> Any:
    return patch_dataloader_to_ddp(given, rank=rank, num_replicas=world_size, **{"seed": 3} | options)


def weighed(kind: Kind, world_size: int, rank: int, **options: Any) -> list[tuple[list[Any], list[float]]]:
    """The batches of an epoch, as lists, with their weights."""
    seed_ambient(1000 * world_size + rank)
    one = patched(kind.make(), world_size, rank, **options)
    steps = iter_with_weights(one, dtype=torch.float64)
    found = list(islice(steps, STEPS) if kind.endless else steps)
    assert all(weights.dtype == torch.float64 for _, weights in found)
    if one.batch_sampler is None:
        assert all(weights.shape == () for _, weights in found)
        return [([comparable(item)], [weights.item()]) for item, weights in found]
    return [([comparable(item) for item in batch], weights.tolist()) for batch, weights in found]


def masks(kind: Kind, world_size: int, rank: int, **options: Any) -> list[list[bool]]:
    seed_ambient(1000 * world_size + rank)
    steps = iter_with_mask(patched(kind.make(), world_size, rank, **options))
    return [mask.reshape(-1).tolist() for _, mask in (islice(steps, STEPS) if kind.endless else steps)]


def assert_weigh_the_mean(kind: Kind, world_size: int, **options: Any) -> None:
    """The rule, from the masks alone: a real sample weighs ranks / real samples of the step, padding 0."""
    ranks = [weighed(kind, world_size, rank, **options) for rank in range(world_size)]
    real = [masks(kind, world_size, rank, **options) for rank in range(world_size)]
    for number in range(max(map(len, ranks))):
        total = sum(sum(of_rank[number]) for of_rank in real if number < len(of_rank))
        for steps, of_rank in zip(ranks, real, strict=True):
            if number < len(steps):
                batch, weights = steps[number]
                assert len(batch) == len(weights)
                assert weights == [world_size / total if is_real else 0 for is_real in of_rank[number]], (
                    number,
                    options,
                )


@over_in_turn(ALL_KINDS, "way", WAYS)
def test_a_real_sample_weighs_the_ranks_over_the_real_samples_of_its_step(kind: Kind, way: dict[str, Any]) -> None:
    with suppress(NoStepsError):  # uneven="drop" of one item
        assert_weigh_the_mean(kind, 2 if kind.make().num_workers else 3, **way)  # starting workers takes long


DIVISIBLE = [kind for kind in ALL_KINDS if kind.make().batch_sampler is not None and not kind.make().num_workers]


@over_in_turn(DIVISIBLE, "options", [{}, {"uneven": "keep"}])
def test_the_weights_of_a_divided_batch_are_its_mean(kind: Kind, options: dict[str, Any]) -> None:
    """Whatever has it: the weights of a sample, of all ranks together, are ranks / samples of the batch."""
    alone = weighed(kind, 1, 0)
    ranks = [weighed(kind, 3, rank, share="within_batches", **options) for rank in range(3)]
    for (batch, _), *parts in zip(alone, *ranks, strict=True):
        weights: defaultdict[str, Fraction] = defaultdict(Fraction)
        for items, own in parts:
            for item, weight in zip(items, own, strict=True):
                weights[repr(item)] += Fraction(weight)
        expected = Counter(map(repr, batch))
        assert weights.keys() == expected.keys()
        assert all(abs(weights[item] - Fraction(3 * expected[item], len(batch))) < 1e-12 for item in expected)


def test_one_process_alone_needs_no_patch() -> None:
    batches = [(batch, weights.tolist()) for batch, weights in iter_with_weights(loader(batch_sampler=[[1, 2], [3]]))]
    assert batches == [([1, 2], [0.5, 0.5]), ([3], [1.0])]
    assert [weights.item() for _, weights in iter_with_weights(DataLoader(Indices(2), batch_size=None))] == [1, 1]


def test_weights_have_the_default_dtype_or_the_one_that_is_given() -> None:
    one = patched(loader(), 2, 0)
    assert next(iter_with_weights(one))[1].dtype == torch.float32
    assert next(iter_with_weights(one, dtype=torch.bfloat16))[1].dtype == torch.bfloat16
    for dtype in (torch.int64, torch.bool, "float32"):
        with raises(InvalidOptionError, f"dtype={dtype!r}", "torch.float32"):
            iter_with_weights(one, dtype=dtype)  # type: ignore[arg-type]  # the mistake


def test_weights_that_a_training_changes_are_made_anew() -> None:
    one = patched(DataLoader(Indices(16), 4), 2, 0)
    for is_inference in (False, True):
        with torch.inference_mode(is_inference):
            for _, weights in iter_with_weights(one):
                assert weights.tolist() == [0.25] * 4
                weights.zero_()


@pytest.mark.parametrize("iterate", [iter_with_weights, iter_with_mask])
def test_weights_and_masks_are_on_the_cpu_wherever_other_tensors_are(iterate: Any) -> None:
    steps = iterate(patched(loader(), 2, 0))
    next(steps)  # torch begins a loader on the CPU
    with torch.device("meta"):
        assert {told.device.type for _, told in steps} == {"cpu"}


@pytest.mark.parametrize("share", ["batches", "within_batches"])
def test_samples_of_a_batch_without_len_are_counted(share: Any) -> None:
    for rank in range(2):
        one = patched(loader(batch_sampler=[Bare([5, 3, 8]), Bare([1])]), 2, rank, share=share)
        assert all(len(weights) == len(list(batch)) for batch, weights in iter_with_weights(one))


# How much a sample counts.


def ones(batch: Any) -> list[int]:
    return [1] * len(batch)


def test_what_samples_count_is_summed_over_one_rank_too() -> None:
    one = patched(loader(), 1, 0)
    for batch, weights in iter_with_weights(one, weight_of=lambda batch: [float(item) for item in batch]):
        assert weights.tolist() == pytest.approx([1 / sum(batch)] * len(batch))
    for _, weights in iter_with_weights(loader(), weight_of=lambda batch: torch.zeros(len(batch), dtype=torch.int32)):
        assert not weights.any()  # no token, no gradient


@pytest.mark.parametrize(
    ("gives", "fact"),
    [
        (lambda batch: [1.0], "1 number for a batch of 4 samples"),
        (lambda batch: [1, 1, 1, -1], "-1.0"),
        (lambda batch: [1, 1, 1, float("nan")], "nan"),
        (lambda batch: "many", "str"),
        (lambda batch: None, "NoneType"),
    ],
)
def test_what_samples_cannot_count_is_refused(gives: Any, fact: str) -> None:
    with raises(InvalidOptionError, ("weight_of", fact), "Return"):
        next(iter_with_weights(loader(), weight_of=gives))


def test_what_is_no_function_is_refused_at_the_call() -> None:
    with raises(InvalidOptionError, ("weight_of=[1, 1]", "no function"), "Pass one"):
        iter_with_weights(loader(), weight_of=[1, 1])  # type: ignore[arg-type]  # the mistake


# Where the ranks must communicate, and cannot.


def test_a_world_given_by_hand_cannot_sum() -> None:
    ways: list[tuple[Any, dict[str, Any]]] = [(patched(loader(), 2, 0), {"weight_of": ones})]
    for given, options in ways:
        with raises(WorldError, ("iter_with_weights", "2 ranks"), "process group"):
            next(iter_with_weights(given, **options))


def test_ranks_whose_workers_may_end_at_different_steps_must_sum() -> None:
    """With ``uneven="keep"``, one rank's worker may have a batch more than another's; divided batches are alike."""

    def steps(**options: Any) -> Any:
        given = DataLoader(Source(splits=True), 2, num_workers=2, collate_fn=as_it_is)
        return iter_with_weights(patched(given, 2, 0, uneven="keep", **options))

    with raises(WorldError, ("iter_with_weights", "2 ranks"), "process group"):
        next(steps())
    assert len(list(steps(share="within_batches"))) == 12


def test_a_pass_of_which_nothing_is_left_needs_no_sums() -> None:
    ended, resumed = (patched(loader(batch_sampler=[[1, 2], [3]]), 2, 0) for _ in range(2))
    list(ended)
    resumed.sampler.load_state_dict(ended.sampler.state_dict())
    assert [len(list(iter_with_weights(resumed))) for _ in range(2)] == [0, 1]


class LookedUp(Sampler[list[int]]):
    """Very many batches, of which any can be computed."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 10**9

    def items_at(self, positions: Any, epoch: int) -> list[list[int]]:
        self.asked += len(positions)
        return [[2 * int(position), 2 * int(position) + 1] for position in positions]

    def __iter__(self) -> Iterator[list[int]]:
        return ([2 * number, 2 * number + 1] for number in range(len(self)))


def test_weights_ask_for_batches_only_as_far_as_the_loop_has_come() -> None:
    sampler = LookedUp()
    one: Any = patch_dataloader_to_ddp(DataLoader(range(2 * 10**9), batch_sampler=sampler), rank=0, num_replicas=2)  # type: ignore[arg-type]  # a sequence is a dataset
    next(iter_with_mask(one))
    assert sampler.asked < 1000
