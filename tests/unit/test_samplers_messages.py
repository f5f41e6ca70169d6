"""What the samplers refuse: each error tells the operation and the values that were met, and names a remedy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from messages import Words, raises
from torch.utils.data import RandomSampler, SequentialSampler
from zoo import LABELS, N, pk_batches

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
NAT = np.datetime64("NaT", "D")
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


def state_of(sampler: Any, **changed: Any) -> dict[str, Any]:
    return {**sampler.state_dict(), **changed}


def resumed(sampler: Any, **changed: Any) -> Any:
    sampler.load_state_dict(state_of(sampler, **changed))
    return sampler


def in_pass(sampler: Any) -> Any:
    next(iter(sampler))
    return sampler


# What several messages tell.
PLAIN = "['drawn', 'epoch', 'kind', 'seed', 'taken', 'version']"
WITH_GENERATOR = "['drawn', 'epoch', 'generator', 'kind', 'seed', 'taken', 'version']"
SAVED = ("state_dict()", "same arguments")
LISTED = ("list", "array", "tensor", "each sample")
WEIGHED = ("mapping", "0, 1, 2")
EXTRA = ("out", "0, 1, 2")
NO_INDEX = ("'list' object", "integer", "group_ids")
INDICES = ("GroupedBatchSampler", "indices")

MESSAGES: list[tuple[Call, Words, Words]] = [
    (lambda: weighted([], {}, 3), ("labels", "empty"), "each sample"),
    (lambda: weighted(torch.zeros(0), {}, 3), ("labels", "empty"), "each sample"),
    (lambda: weighted(np.eye(3), [1, 1], 3), ("labels", "(3, 3)"), "labels.argmax(axis=1)"),
    (lambda: weighted([[1], [2]], [1, 1], 3), ("labels[0]=[1]", "a list", "hashable"), "tuples"),
    (lambda: weighted([1.0, NAN], {1.0: 1}, 3), ("labels", "nan"), "label"),
    (lambda: weighted(np.array([1.0, NAN]), {1.0: 1}, 3), ("labels", "nan"), "label"),
    (lambda: weighted(["a", "b"], {"a": 1}, 3), ("weights", "'b'"), ("every label", "0")),
    (lambda: weighted(["a", "b"], {"a": 1, "b": 1, "c": 0}, 3), ("weights", "'c'"), EXTRA),
    (lambda: weighted(["a", "b"], [1, 1], 3), ("weights", "'a'"), ("every label", "0")),
    (lambda: weighted([0, 2], [1, 1, 1], 3), ("weights", "1"), EXTRA),
    (lambda: weighted([0, 1], [1, -0.5], 3), ("weights[1]=-0.5", "finite", "0"), "one"),
    (lambda: weighted([0, 1], [1, NAN], 3), ("weights[1]=nan", "finite", "0"), "one"),
    (lambda: weighted([0, 1], torch.tensor([1, float("inf")]), 3), ("weights[1]=inf", "finite", "0"), "one"),
    (lambda: weighted([0, 1], {0: 1, 1: "2"}, 3), ("weights[1]='2'", "finite", "0"), "one"),
    (lambda: weighted([0, 1], {0: 1, 1: True}, 3), ("weights[1]=True", "finite", "0"), "one"),
    (lambda: weighted([0, 1], [0, 0], 3), ("weights={0: 0, 1: 0}", "class"), ("label", "above 0")),
    (lambda: weighted([0, 1], 1.5, 3), ("weights=1.5", "float"), WEIGHED),
    (lambda: weighted([0, 1], [1, 1], 3, generator=7), ("generator=7", "type int"), "torch.Generator"),
    (
        lambda: weighted([0, 1], [1, 1], 3).items_at(np.arange(2), 4),
        ("WeightedClassSampler.items_at()", "seed", "epoch 4"),
        ("seed=", "iterate"),
    ),
    (
        lambda: weighted([0], [1], 3, seed=4).load_state_dict(state_of(weighted([0], [1], 3, seed=3))),
        ("WeightedClassSampler.load_state_dict()", "state of seed=3", "has seed=4"),
        "seed",
    ),
    (lambda: resumed(weighted([0], [1], 3), taken=-3), ("WeightedClassSampler", "taken=-3", "0"), SAVED),
    (lambda: resumed(weighted([0], [1], 3), taken=99), ("WeightedClassSampler", "taken=99", "0", "3"), SAVED),
    (lambda: resumed(weighted([0], [1], 3), epoch=-1), ("WeightedClassSampler", "epoch=-1", "0"), SAVED),
    (lambda: resumed(weighted([0], [1], 3), drawn="7"), ("WeightedClassSampler", "drawn='7'", "0"), SAVED),
    (lambda: weighted(None, [1], 3), ("labels=None", "NoneType"), LISTED),
    (lambda: weighted(5, [1], 3), ("labels=5", "int"), LISTED),
    (lambda: weighted({0: 0, 1: 1}, [1, 1], 3), ("labels={0: 0, 1: 1}", "dict"), LISTED),
    (lambda: weighted({"a"}, [1, 1], 3), ("labels={'a'}", "type set"), LISTED),
    (lambda: weighted(list(torch.eye(2)), [1, 1], 3), ("labels", "tensor", "(2,)"), "row.argmax()"),
    (lambda: weighted(np.array(["2020", "NaT"], "M8[D]"), [1, 1], 3), ("labels", repr(NAT)), "label"),
    (lambda: weighted([0, 0], torch.tensor(1.0), 3), ("weights=tensor(1.)", "Tensor"), WEIGHED),
    (lambda: weighted([0, 0], torch.ones(1, 2), 3), ("weights[0]=[1.0, 1.0]", "finite", "0"), "one"),
    (lambda: pk(LABELS, 4, 2), ("p=4", "3"), ("p", "3")),
    (lambda: pk(LABELS, 2, 2, categories=LABELS), ("categories", "max_categories"), "max_categories"),
    (lambda: pk(LABELS, 2, 2, max_categories=2), ("categories", "max_categories"), "categories"),
    (
        lambda: pk(LABELS, 2, 2, categories=LABELS[1:], max_categories=1),
        ("categories", "22", "labels", "23"),
        "one length",
    ),
    (
        lambda: pk([1, 1, 2, 2], 1, 1, categories=["a", "b", "a", "a"], max_categories=1),
        ("label 1", "categories", "'a'", "'b'"),
        ("labels", "category"),
    ),
    (
        lambda: pk(range(6), 4, 1, categories="aabbbb", max_categories=1),
        ("category 'a'", "2 labels", "p=4", "max_categories=1", "4"),
        ("smaller p", "larger max_categories"),
    ),
    (
        lambda: pk(range(9), 6, 1, categories="aabbbbccc", max_categories=2),
        ("category 'a'", "2 labels", "p=6", "max_categories=2", "5"),
        ("smaller p", "larger max_categories"),
    ),
    (lambda: lengths([], batch_size=2), ("lengths", "(0,)", "tokens"), LISTED),
    (lambda: lengths([[1, 2]], batch_size=2), ("lengths", "(1, 2)", "tokens"), LISTED),
    (lambda: lengths([3, 4]), ("max_tokens=None", "batch_size=None"), "one"),
    (lambda: lengths([3, 4], max_tokens=5, batch_size=2), ("max_tokens=5", "batch_size=2"), "one"),
    (lambda: lengths([3, 4.0], max_tokens=5), ("lengths[1]=4.0", "whole number", "tokens"), "ints"),
    (lambda: lengths([3, True], max_tokens=5), ("lengths[1]=True", "whole number", "tokens"), "ints"),
    (lambda: lengths(torch.tensor([3.5, 4]), max_tokens=5), ("lengths[0]=3.5", "whole number", "tokens"), "ints"),
    (lambda: lengths(["3", "4"], max_tokens=5), ("lengths[0]='3'", "whole number", "tokens"), "ints"),
    (lambda: lengths([3, 0], max_tokens=5), ("lengths[1]=0", "1", "tokens"), "sample"),
    (lambda: lengths(None, max_tokens=5), ("lengths=None", "NoneType", "tokens"), LISTED),
    (lambda: lengths([[1], [1, 2]], max_tokens=5), ("lengths[0]=[1]", "whole number", "tokens"), "ints"),
    (lambda: lengths([1, 10**30], max_tokens=5), (f"lengths[1]={10**30}", "2**63 - 1"), "sample"),
    (lambda: lengths([-1, 2**63], max_tokens=5), ("lengths[0]=-1", "1"), "sample"),
    (
        lambda: lengths(np.array([2**63 + 5, 1], np.uint64), batch_size=10),
        (f"lengths[0]={2**63 + 5}", "2**63 - 1"),
        "sample",
    ),
    (lambda: lengths([3, 9, 12], max_tokens=10), ("lengths[2]=12", "max_tokens=10"), ("larger max_tokens", "shorten")),
    (lambda: lengths([3], batch_size=1, max_padding=1), ("max_padding=1", "0", "1", "padding"), "0.1"),
    (lambda: lengths([3], batch_size=1, max_padding=True), ("max_padding=True", "0", "1", "padding"), "0.1"),
    (lambda: windows(2**62, 1), (f"size={2**62}", "2**62 - 1", "64 bits"), "at most"),
    (lambda: windows(2**64, 2**62), (f"size={2**64}", "2**62 - 1", "64 bits"), "at most"),
    (lambda: windows(10, 11), ("window=11", "10 points"), "10"),
    (lambda: windows(10, 3, 11), ("stride=11", "10 points"), "10"),
    (lambda: windows(10, 3, shuffle=1), ("shuffle=1", "True", "False", "random order"), "one"),
    (lambda: WindowDataset([1, 2], 3), ("window=3", "2 points"), "2"),
    (lambda: scalable(2**63), (f"n={2**63}", "2**63 - 1", "64 bits"), "at most"),
    (lambda: grouped([0, 1], [], 2), ("group_ids", "empty"), "each sample"),
    (
        lambda: grouped(RandomSampler(range(5)), [0, 1, 1, 0], 2),
        ("group_ids", "4", "RandomSampler", "5 samples"),
        ("group", "each sample"),
    ),
    (
        lambda: grouped(SequentialSampler(range(5)), [0] * 7, 2),
        ("group_ids", "7", "SequentialSampler", "5 samples"),
        ("group", "each sample"),
    ),
    (lambda: list(grouped(pk([0, 1], 1, 1, seed=0), [0, 1], 2)), ("PKBatchSampler", *NO_INDEX), INDICES),
    (lambda: len(grouped(pk([0, 1], 1, 1, seed=0), [0, 1], 2)), ("PKBatchSampler", *NO_INDEX), INDICES),
    (
        lambda: in_pass(grouped(RandomSampler(range(8)), [0] * 8, 2)).state_dict(),
        ("GroupedBatchSampler.state_dict()", "RandomSampler", "global generators"),
        ("generator=", "ddp_patch.samplers", "between two passes"),
    ),
    (
        lambda: list(resumed(grouped(range(8), [0] * 8, 2), taken=5)),
        ("GroupedBatchSampler", "taken=5", "0", "4"),
        SAVED,
    ),
    (lambda: grouped([0, 1], [0, 0], 2, drop_uneven=1), ("drop_uneven=1", "True", "False", "batches"), "one"),
    (lambda: list(grouped([0, 2], [0, 0], 2)), ("list", "index 2", "group_ids", "2 entries"), ("group", "each sample")),
    (
        lambda: list(grouped([0, -1], [0, 0], 2)),
        ("list", "index -1", "group_ids", "2 entries"),
        ("group", "each sample"),
    ),
    (lambda: list(grouped([0, 0.5], [0, 0], 2)), ("list gave", "'float' object", "integer", "group_ids"), INDICES),
    (
        lambda: grouped([0, 1], [0, 0], 2).items_at(np.arange(1), 0),
        ("GroupedBatchSampler.items_at()", "a list"),
        ("ddp_patch.samplers", "seed=", "iterate"),
    ),
    (
        lambda: grouped([0, 1], [0, 0], 2).load_state_dict(state_of(grouped(scalable(2), [0, 0], 2))),
        ("GroupedBatchSampler.load_state_dict()", "list", "state_dict()", "generator"),
        "saved",
    ),
    (lambda: ratios([1, 2], [1]), ("widths", "2", "heights", "1"), "one length"),
    (lambda: ratios([1, 0], [1, 1]), ("widths[1]=0", "finite", "0"), "out"),
    (lambda: ratios([1, 2], [1, NAN]), ("heights[1]=nan", "finite", "0"), "out"),
    (lambda: ratios(["1"], ["2"]), ("widths", "(1,)", "<U1"), ("flat list", "array", "tensor")),
    (lambda: ratios([[1]], [[2]]), ("widths", "(1, 1)", "int64"), ("flat list", "array", "tensor")),
    (lambda: ratios([1], [1], [1, 1]), "edges=[1.0, 1.0]", "increasing order"),
    (lambda: iterations([[0]], 5, 6), ("start_iteration=6", "num_iterations=5"), ("later end", "earlier start")),
    (
        lambda: list(iterations(iter([[0]]), 2)),
        ("Epoch 1", "list_iterator", "2 iterations"),
        ("batch sampler", "not an iterator"),
    ),
    (
        lambda: iterations([[0]], 5).load_state_dict(state_of(pk_batches(seed=1))),
        ("IterationBatchSampler.load_state_dict()", "state of PKBatchSampler"),
        ("state_dict()", "IterationBatchSampler"),
    ),
    (
        lambda: resumed(iterations([[0]], 3), iteration=99),
        ("IterationBatchSampler", "iteration=99", "0", "3"),
        SAVED,
    ),
    (lambda: resumed(iterations([[0]], 5, 2), iteration=-2), ("IterationBatchSampler", "iteration=-2", "2"), SAVED),
    (
        lambda: pk_batches(seed=1).load_state_dict(state_of(scalable(N, seed=1))),
        ("PKBatchSampler.load_state_dict()", "state of ScalableRandomSampler"),
        ("state_dict()", "PKBatchSampler"),
    ),
    (
        lambda: scalable(N).load_state_dict([1]),
        ("ScalableRandomSampler.load_state_dict()", "state of a list"),
        ("state_dict()", "ScalableRandomSampler"),
    ),
    (
        lambda: scalable(N).load_state_dict({"epoch": 3}),
        ("ScalableRandomSampler.load_state_dict()", "state of nothing"),
        ("state_dict()", "ScalableRandomSampler"),
    ),
    (
        lambda: resumed(scalable(N), version=2),
        ("ScalableRandomSampler.load_state_dict()", "version 2", "reads 1"),
        "version of ddp_patch",
    ),
    (
        lambda: scalable(N).load_state_dict(state_of(scalable(N, generator=torch.Generator()))),
        ("ScalableRandomSampler.load_state_dict()", f"given {WITH_GENERATOR}", f"needs {PLAIN}", "generator is"),
        "arguments",
    ),
    (
        lambda: scalable(N, generator=torch.Generator()).load_state_dict(state_of(scalable(N))),
        ("ScalableRandomSampler.load_state_dict()", f"given {PLAIN}", f"needs {WITH_GENERATOR}", "generator is"),
        "arguments",
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
    (lambda value: pk(LABELS, 2, 2, categories=LABELS, max_categories=value), "max_categories", 1, "categories"),
    (lambda value: lengths([3], max_tokens=value), "max_tokens", 1, "batch"),
    (lambda value: lengths([3], batch_size=value), "batch_size", 1, "samples"),
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


def test_seed_and_generator_exclude_each_other() -> None:
    given = torch.Generator()
    with raises(SamplerError, ("seed=1", f"generator={given!r}"), ("one", "global generator")):
        WindowSampler(10, 3, seed=1, generator=given)


@pytest.mark.parametrize("start", [-1, 10])
def test_a_window_outside_of_the_series_is_an_index_error(start: int) -> None:
    """By which loops over a sequence end."""
    with raises(IndexError, (f"window {start}", "10 points", "0"), "WindowSampler(size=10, window=3)"):
        WindowDataset(range(10), 3)[start]
