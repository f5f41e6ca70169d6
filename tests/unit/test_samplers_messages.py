"""What the samplers refuse: each error tells the operation and the values that were met, and names a remedy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from messages import Words, raises
from torch.utils.data import RandomSampler, SequentialSampler
from zoo import LABELS

from ddp_patch import DDPPatchError
from ddp_patch.errors import SamplerError
from ddp_patch.samplers import (
    GroupedBatchSampler,
    IterationBatchSampler,
    LengthBucketBatchSampler,
    PKBatchSampler,
    ScalableRandomSampler,
    WeightedClassSampler,
    WindowDataset,
    WindowSampler,
    aspect_ratio_groups,
)

NAN = float("nan")
Call = Callable[[], Any]
# Arguments of other types than the signatures say are what is tested.
weighted: Any = WeightedClassSampler
pk: Any = PKBatchSampler
lengths: Any = LengthBucketBatchSampler
windows: Any = WindowSampler
grouped: Any = GroupedBatchSampler
iterations: Any = IterationBatchSampler
scalable: Any = ScalableRandomSampler
ratios: Any = aspect_ratio_groups


LISTED = ("list", "array", "tensor")
MESSAGES: list[tuple[Call, Words, Words]] = [
    (lambda: weighted([], {}, 3), ("labels", "(0,)"), "flat sequence"),
    (lambda: weighted(np.eye(3), [1, 1], 3), ("labels", "(3, 3)"), "labels.argmax(axis=1)"),
    (lambda: weighted([[1], [2]], [1, 1], 3), ("labels", "[1]", "list", "hashable"), "tuples"),
    (lambda: weighted([1.0, NAN], {1.0: 1}, 3), ("labels", "nan", "equal to itself"), "numbers"),
    (lambda: weighted(None, [1], 3), ("labels=None", "NoneType"), LISTED),
    (lambda: weighted(["a", "b"], {"a": 1}, 3), ("weights", "labels", "'b'"), ("every label", "0, 1, 2")),
    (lambda: weighted([0, 2], {0: 1, 2: 1, 7: 0}, 3), ("weights", "labels", "7"), ("leave out", "0, 1, 2")),
    *(
        (lambda odd=odd: weighted([0, 1], [1, odd], 3), ("weights", repr(odd), "finite", "0"), "proportions")
        for odd in (-0.5, NAN, float("inf"), "2", True, [1.0, 1.0], 1j)
    ),
    (lambda: weighted([0, 1], [0, 0], 3), ("weights={0: 0, 1: 0}", "above 0"), "proportions"),
    (lambda: weighted([0, 1], 1.5, 3), ("weights=1.5", "float"), ("mapping", "0, 1, 2")),
    (lambda: weighted([0, 1], [1, 1], 3, generator=7), ("generator=7", "type int"), "torch.Generator"),
    (lambda: weighted([0, 1], [1, 1], 3, seed=1, generator=torch.Generator()), ("seed=1", "generator="), "one"),
    (
        lambda: weighted([0, 1], [1, 1], 3).items_at(np.arange(2), 4),
        ("WeightedClassSampler.items_at()", "seed", "epoch 4"),
        ("seed=", "iterate"),
    ),
    (lambda: pk(LABELS, 4, 2), ("p=4", "3"), ("p", "3")),
    (lambda: lengths([3, 4]), ("max_tokens=None", "batch_size=None"), "one"),
    (lambda: lengths([3, 4], max_tokens=5, batch_size=2), ("max_tokens=5", "batch_size=2"), "one"),
    *(
        (lambda odd=odd: lengths(odd, batch_size=5), ("lengths", kind, "whole number of tokens"), LISTED)
        for odd, kind in [([], "(0,)"), ([3, 4.0], "float64"), ([1, 10**30], "object"), ([True, False], "bool")]
    ),
    (lambda: lengths([3, 0], max_tokens=5), ("lengths[1]=0", "at least 1"), "sample"),
    (lambda: lengths(np.array([2**63], np.uint64), batch_size=10), (f"lengths[0]={2**63}", "64 bits"), "sample"),
    (lambda: lengths([3, 9, 12], max_tokens=10), ("lengths[2]=12", "max_tokens=10"), ("larger max_tokens", "shorten")),
    (lambda: lengths([3], batch_size=1, max_padding=1), ("max_padding=1", "0", "1", "padding"), "0.1"),
    (lambda: windows(2**62, 1), (f"size={2**62}", "2**62 - 1", "64 bits"), "at most"),
    (lambda: windows(10, 11), ("window=11", "10 points"), "10"),
    (lambda: windows(10, 3, 11), ("stride=11", "10 points"), "10"),
    (lambda: WindowDataset([1, 2], 3), ("window=3", "2 points"), "2"),
    (lambda: scalable(2**63), (f"n={2**63}", "2**63 - 1", "64 bits"), "at most"),
    *(
        (lambda kind=kind: grouped(kind(range(5)), [0] * 7, 2), ("group_ids", "7", kind.__name__, "5 samples"), "group")
        for kind in (RandomSampler, SequentialSampler)
    ),
    *(
        (
            lambda use=use: use(grouped(pk([0, 1], 1, 1, seed=0), [0, 1], 2)),
            ("PKBatchSampler", "'list' object"),
            "indices",
        )
        for use in (list, len)
    ),
    (lambda: list(grouped([0, 0.5], [0, 0], 2)), ("list gave", "'float' object", "group_ids"), "indices"),
    *(
        (
            lambda odd=odd: list(grouped([0, odd], [0, 0], 2)),
            ("list", f"index {odd}", "group_ids", "2 entries"),
            "group",
        )
        for odd in (2, -1)
    ),
    (
        lambda: grouped([0, 1], [0, 0], 2).items_at(np.arange(1), 0),
        ("GroupedBatchSampler.items_at()", "a list"),
        ("ddp_patch.samplers", "seed=", "iterate"),
    ),
    (lambda: ratios([1, 2], [1]), ("widths", "2", "heights", "1"), "one length"),
    (lambda: ratios([1, 0], [1, 1]), ("widths[1]=0", "finite", "0"), "out"),
    (lambda: ratios([1], [1], [1, 1]), "edges=[1, 1]", "increasing order"),
    (lambda: iterations([[0]], 5, 6), ("start_iteration=6", "num_iterations=5"), ("later end", "earlier start")),
    (
        lambda: list(iterations(iter([[0]]), 2)),
        ("Epoch 1", "list_iterator", "2 iterations"),
        ("batch sampler", "not an iterator"),
    ),
]


# Every whole number that a sampler takes: its name, the least one, and what the message says it is.
WHOLES: list[tuple[Callable[[Any], Any], str, int, str]] = [
    (lambda value: weighted([0, 1], [1, 1], value), "length", 1, "indices"),
    (lambda value: WeightedClassSampler.n_per_class([0, 1], value), "n", 1, "every class"),
    (lambda value: weighted([0, 1], [1, 1], 3, seed=value), "seed", 0, "order"),
    (lambda value: weighted([0, 1], [1, 1], 3).set_epoch(value), "epoch", 0, "order"),
    (lambda value: pk(LABELS, value, 2), "p", 1, "labels"),
    (lambda value: pk(LABELS, 2, value), "k", 1, "instances"),
    (lambda value: pk(LABELS, 2, 2, num_batches=value), "num_batches", 1, "epoch"),
    (lambda value: lengths([3], max_tokens=value), "max_tokens", 1, "batch"),
    (lambda value: lengths([3], batch_size=value), "batch_size", 1, "batch"),
    (lambda value: windows(value, 1), "size", 1, "points"),
    (lambda value: windows(10, value), "window", 1, "points"),
    (lambda value: windows(10, 3, value), "stride", 1, "points"),
    (lambda value: scalable(value), "n", 0, "samples"),
    (lambda value: grouped([0, 1], [0, 0], value), "batch_size", 1, "samples"),
    (lambda value: iterations([[0]], value), "num_iterations", 1, "training"),
    (lambda value: iterations([[0]], 5, value), "start_iteration", 0, "training"),
    (lambda value: iterations([[0]], 5).set_epoch(value), "epoch", 0, "order"),
]


@pytest.mark.parametrize(("call", "name", "least", "what"), WHOLES)
def test_whole_numbers(call: Callable[[Any], Any], name: str, least: int, what: str) -> None:
    for value in (least - 1, 3.0, True, torch.tensor(2.5)):
        with raises(SamplerError, (f"{name}={value!r}", "whole number", f"{least}", what), "int"):
            call(value)


@pytest.mark.parametrize(("call", "facts", "remedy"), MESSAGES, ids=map(str, range(len(MESSAGES))))
def test_messages(call: Call, facts: Words, remedy: Words) -> None:
    with raises(SamplerError, facts, remedy) as caught:
        call()
    assert isinstance(caught.value, DDPPatchError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("start", [-1, 10])
def test_a_window_outside_of_the_series_is_an_index_error(start: int) -> None:
    """By which loops over a sequence end."""
    with raises(IndexError, (f"window {start}", "10 points", "0"), "WindowSampler(size=10, window=3)"):
        WindowDataset(range(10), 3)[start]
