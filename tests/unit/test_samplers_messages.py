"""What the samplers refuse: each message word for word, with the operation, the values, the reason and the remedy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler
from zoo import LABELS, N, pk_batches

from ddp_patch import DDPPatchError, SamplerError
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


def state_of(sampler: Any, **changed: Any) -> dict[str, Any]:
    return {**sampler.state_dict(), **changed}


def resumed(sampler: Any, **changed: Any) -> Any:
    sampler.load_state_dict(state_of(sampler, **changed))
    return sampler


def in_pass(sampler: Any) -> Any:
    next(iter(sampler))
    return sampler


MESSAGES: list[tuple[Call, str]] = [
    (
        lambda: weighted([], {}, 3),
        "labels is empty: there is nothing to draw from. Pass one label for each sample.",
    ),
    (
        lambda: weighted(torch.zeros(0), {}, 3),
        "labels is empty: there is nothing to draw from. Pass one label for each sample.",
    ),
    (
        lambda: weighted(np.eye(3), [1, 1], 3),
        "labels has the shape (3, 3): one label for each sample makes a flat sequence. Pass one, say "
        "labels.argmax(axis=1) of one-hot rows.",
    ),
    (
        lambda: weighted([[1], [2]], [1, 1], 3),
        "labels[0]=[1] is a list, which is not hashable, so samples cannot be told apart by it. Pass labels "
        "that are, say tuples for lists.",
    ),
    (
        lambda: weighted([1.0, NAN], {1.0: 1}, 3),
        "labels has nan, which is not equal to itself, so no two samples share it. Give these samples a "
        "label, or leave them out.",
    ),
    (
        lambda: weighted(np.array([1.0, NAN]), {1.0: 1}, 3),
        "labels has nan, which is not equal to itself, so no two samples share it. Give these samples a "
        "label, or leave them out.",
    ),
    (
        lambda: weighted(["a", "b"], {"a": 1}, 3),
        "weights has none for the label 'b': how often that is to be drawn is unclear. Give every label a "
        "weight; with 0 it is not drawn.",
    ),
    (
        lambda: weighted(["a", "b"], {"a": 1, "b": 1, "c": 0}, 3),
        "weights has one for 'c', which is none of the labels, so there is nothing to draw for it. Leave it "
        "out; a sequence of weights is for the labels 0, 1, 2 and so on.",
    ),
    (
        lambda: weighted(["a", "b"], [1, 1], 3),
        "weights has none for the label 'a': how often that is to be drawn is unclear. Give every label a "
        "weight; with 0 it is not drawn.",
    ),
    (
        lambda: weighted([0, 2], [1, 1, 1], 3),
        "weights has one for 1, which is none of the labels, so there is nothing to draw for it. Leave it "
        "out; a sequence of weights is for the labels 0, 1, 2 and so on.",
    ),
    (
        lambda: weighted([0, 1], [1, -0.5], 3),
        "weights[1]=-0.5 is not a finite number of at least 0, and proportions are made of these. Pass one.",
    ),
    (
        lambda: weighted([0, 1], [1, NAN], 3),
        "weights[1]=nan is not a finite number of at least 0, and proportions are made of these. Pass one.",
    ),
    (
        lambda: weighted([0, 1], torch.tensor([1, float("inf")]), 3),
        "weights[1]=inf is not a finite number of at least 0, and proportions are made of these. Pass one.",
    ),
    (
        lambda: weighted([0, 1], {0: 1, 1: "2"}, 3),
        "weights[1]='2' is not a finite number of at least 0, and proportions are made of these. Pass one.",
    ),
    (
        lambda: weighted([0, 1], {0: 1, 1: True}, 3),
        "weights[1]=True is not a finite number of at least 0, and proportions are made of these. Pass one.",
    ),
    (
        lambda: weighted([0, 1], [0, 0], 3),
        "weights={0: 0, 1: 0} are all 0, so no class can be drawn. Give at least one label a weight above 0.",
    ),
    (
        lambda: weighted([0, 1], 1.5, 3),
        "weights=1.5 is a float, and every label needs a weight. Pass a mapping from label to weight, or a "
        "sequence for the labels 0, 1, 2 and so on.",
    ),
    (
        lambda: weighted([0, 1], [1, 1], 0),
        "length=0 is not a whole number of at least 1: so many indices are drawn in an epoch. Pass such an int.",
    ),
    (
        lambda: weighted([0, 1], [1, 1], 3.0),
        "length=3.0 is not a whole number of at least 1: so many indices are drawn in an epoch. Pass such an int.",
    ),
    (
        lambda: weighted([0, 1], [1, 1], True),
        "length=True is not a whole number of at least 1: so many indices are drawn in an epoch. Pass such an int.",
    ),
    (
        lambda: weighted([0, 1], [1, 1], torch.tensor(2.5)),
        "length=tensor(2.5000) is not a whole number of at least 1: so many indices are drawn in an epoch. "
        "Pass such an int.",
    ),
    (
        lambda: WeightedClassSampler.n_per_class([0, 1], 0),
        "n=0 is not a whole number of at least 1: so many indices of every class are drawn in an epoch. Pass "
        "such an int.",
    ),
    (
        lambda: weighted([0, 1], [1, 1], 3, seed=-1),
        "seed=-1 is not a whole number of at least 0: every epoch's order is derived from it. Pass such an int.",
    ),
    (
        lambda: weighted([0, 1], [1, 1], 3, seed=1.0),
        "seed=1.0 is not a whole number of at least 0: every epoch's order is derived from it. Pass such an int.",
    ),
    (
        lambda: weighted([0, 1], [1, 1], 3, generator=7),
        "generator=7 is none (type int), and orders are drawn as torch's samplers draw them. Pass a torch.Generator.",
    ),
    (
        lambda: weighted([0, 1], [1, 1], 3).set_epoch(-1),
        "epoch=-1 is not a whole number of at least 0: an epoch's order is derived from its number. Pass such an int.",
    ),
    (
        lambda: weighted([0, 1], [1, 1], 3).items_at(np.arange(2), 4),
        "WeightedClassSampler.items_at() was called without a seed: epoch 4 then follows from what the "
        "generators draw, and not from its number. Pass seed=, or iterate the sampler.",
    ),
    (
        lambda: weighted([0], [1], 3, seed=4).load_state_dict(state_of(weighted([0], [1], 3, seed=3))),
        "WeightedClassSampler.load_state_dict() was given a state of seed=3 and has seed=4: the order is another. Make "
        "the sampler with the seed of the one that was saved.",
    ),
    (
        lambda: weighted([0], [1], 3).load_state_dict(state_of(weighted([0], [1], 3), taken=-3)),
        "WeightedClassSampler cannot go on from a state with taken=-3: here that is a whole number of at least 0. Pass "
        "what the state_dict() of a sampler with the same arguments returned.",
    ),
    (
        lambda: weighted([0], [1], 3).load_state_dict(state_of(weighted([0], [1], 3), taken=99)),
        "WeightedClassSampler cannot go on from a state with taken=99: here that is a whole number of 0 to 3. Pass "
        "what the state_dict() of a sampler with the same arguments returned.",
    ),
    (
        lambda: weighted([0], [1], 3).load_state_dict(state_of(weighted([0], [1], 3), epoch=-1)),
        "WeightedClassSampler cannot go on from a state with epoch=-1: here that is a whole number of at least 0. Pass "
        "what the state_dict() of a sampler with the same arguments returned.",
    ),
    (
        lambda: weighted([0], [1], 3).load_state_dict(state_of(weighted([0], [1], 3), drawn="7")),
        "WeightedClassSampler cannot go on from a state with drawn='7': here that is a whole number of at least 0. Pass "
        "what the state_dict() of a sampler with the same arguments returned.",
    ),
    (
        lambda: weighted(None, [1], 3),
        "labels=None is no sequence (type NoneType): every sample has one. Pass a list, array or tensor with one for "
        "each sample.",
    ),
    (
        lambda: weighted(5, [1], 3),
        "labels=5 is no sequence (type int): every sample has one. Pass a list, array or tensor with one for each "
        "sample.",
    ),
    (
        lambda: weighted({0: 0, 1: 1}, [1, 1], 3),
        "labels={0: 0, 1: 1} is no sequence (type dict): every sample has one. Pass a list, array or tensor with one "
        "for each sample.",
    ),
    (
        lambda: weighted({"a"}, [1, 1], 3),
        "labels={'a'} is no sequence (type set): every sample has one. Pass a list, array or tensor with one for each "
        "sample.",
    ),
    (
        lambda: weighted(list(torch.eye(2)), [1, 1], 3),
        "labels has a tensor of the shape (2,) for a sample: every sample has one label. Pass numbers, say "
        "row.argmax() of one-hot rows.",
    ),
    (
        lambda: weighted(np.array(["2020", "NaT"], "M8[D]"), [1, 1], 3),
        f"labels has {np.datetime64('NaT', 'D')!r}, which is not equal to itself, so no two samples share it. Give these "
        "samples a label, or leave them out.",
    ),
    (
        lambda: weighted([0, 0], torch.tensor(1.0), 3),
        "weights=tensor(1.) is a Tensor, and every label needs a weight. Pass a mapping from label to weight, or a "
        "sequence for the labels 0, 1, 2 and so on.",
    ),
    (
        lambda: weighted([0, 0], torch.ones(1, 2), 3),
        "weights[0]=[1.0, 1.0] is not a finite number of at least 0, and proportions are made of these. Pass one.",
    ),
    (
        lambda: pk(LABELS, 0, 2),
        "p=0 is not a whole number of at least 1: a batch has so many labels. Pass such an int.",
    ),
    (
        lambda: pk(LABELS, 2, 0),
        "k=0 is not a whole number of at least 1: a batch has so many instances of each label. Pass such an int.",
    ),
    (
        lambda: pk(LABELS, 2, 1.5),
        "k=1.5 is not a whole number of at least 1: a batch has so many instances of each label. Pass such an int.",
    ),
    (
        lambda: pk(LABELS, 4, 2),
        "p=4 labels were asked for in a batch, and there are 3: no batch could be made. Pass p of at most 3.",
    ),
    (
        lambda: pk(LABELS, 2, 2, categories=LABELS),
        "categories was given without max_categories: it takes both to limit the categories in a batch. Pass "
        "max_categories too, or neither.",
    ),
    (
        lambda: pk(LABELS, 2, 2, max_categories=2),
        "max_categories was given without categories: it takes both to limit the categories in a batch. Pass "
        "categories too, or neither.",
    ),
    (
        lambda: pk(LABELS, 2, 2, categories=LABELS, max_categories=0),
        "max_categories=0 is not a whole number of at least 1: a batch has at most so many categories. Pass "
        "such an int.",
    ),
    (
        lambda: pk(LABELS, 2, 2, categories=LABELS[1:], max_categories=1),
        "categories has 22 entries and labels 23: every sample has one of each. Pass sequences of one length.",
    ),
    (
        lambda: pk([1, 1, 2, 2], 1, 1, categories=["a", "b", "a", "a"], max_categories=1),
        "The label 1 is in the categories 'a' and 'b': a label belongs to one. Pass labels that are told "
        "apart by their category, say pairs of both.",
    ),
    (
        lambda: pk(range(6), 4, 1, categories="aabbbb", max_categories=1),
        "The category 'a' has 2 labels, and batches of p=4 labels from at most max_categories=1 need at "
        "least 4 in each. Pass a smaller p or a larger max_categories, or join small categories.",
    ),
    (
        lambda: pk(range(9), 6, 1, categories="aabbbbccc", max_categories=2),
        "The category 'a' has 2 labels, and batches of p=6 labels from at most max_categories=2 need at "
        "least 5 in each. Pass a smaller p or a larger max_categories, or join small categories.",
    ),
    (
        lambda: lengths([], batch_size=2),
        "lengths has the shape (0,): batches are made by how many tokens a sample has. Pass a list, array or "
        "tensor with one whole number for each sample, and at least one.",
    ),
    (
        lambda: lengths([[1, 2]], batch_size=2),
        "lengths has the shape (1, 2): batches are made by how many tokens a sample has. Pass a list, array "
        "or tensor with one whole number for each sample, and at least one.",
    ),
    (
        lambda: lengths([3, 4]),
        "max_tokens=None and batch_size=None: either says how large a batch is. Pass one of them.",
    ),
    (
        lambda: lengths([3, 4], max_tokens=5, batch_size=2),
        "max_tokens=5 and batch_size=2: either says how large a batch is. Pass one of them.",
    ),
    (
        lambda: lengths([3, 4.0], max_tokens=5),
        "lengths[1]=4.0 is not a whole number: batches are made by how many tokens a sample has. Pass ints.",
    ),
    (
        lambda: lengths([3, True], max_tokens=5),
        "lengths[1]=True is not a whole number: batches are made by how many tokens a sample has. Pass ints.",
    ),
    (
        lambda: lengths(torch.tensor([3.5, 4]), max_tokens=5),
        "lengths[0]=3.5 is not a whole number: batches are made by how many tokens a sample has. Pass ints.",
    ),
    (
        lambda: lengths(["3", "4"], max_tokens=5),
        "lengths[0]='3' is not a whole number: batches are made by how many tokens a sample has. Pass ints.",
    ),
    (
        lambda: lengths([3, 0], max_tokens=5),
        "lengths[1]=0 is less than 1: batches are made by how many tokens a sample has. Correct it or leave "
        "that sample out.",
    ),
    (
        lambda: lengths(None, max_tokens=5),
        "lengths=None is no sequence (type NoneType): batches are made by how many tokens a sample has. Pass a list, "
        "array or tensor with one for each sample.",
    ),
    (
        lambda: lengths([[1], [1, 2]], max_tokens=5),
        "lengths[0]=[1] is not a whole number: batches are made by how many tokens a sample has. Pass ints.",
    ),
    (
        lambda: lengths([1, 10**30], max_tokens=5),
        f"lengths[1]={10**30} is more than 2**63 - 1: batches are made by how many tokens a sample has. Correct it or "
        "leave that sample out.",
    ),
    (
        lambda: lengths([-1, 2**63], max_tokens=5),
        "lengths[0]=-1 is less than 1: batches are made by how many tokens a sample has. Correct it or leave that "
        "sample out.",
    ),
    (
        lambda: lengths(np.array([2**63 + 5, 1], np.uint64), batch_size=10),
        f"lengths[0]={2**63 + 5} is more than 2**63 - 1: batches are made by how many tokens a sample has. Correct it or "
        "leave that sample out.",
    ),
    (
        lambda: lengths([3, 9, 12], max_tokens=10),
        "lengths[2]=12 is longer than max_tokens=10, so no batch can hold that sample. Pass a larger "
        "max_tokens, or shorten it or leave it out.",
    ),
    (
        lambda: lengths([3], max_tokens=0),
        "max_tokens=0 is not a whole number of at least 1: a batch has at most so many. Pass such an int.",
    ),
    (
        lambda: lengths([3], batch_size=0),
        "batch_size=0 is not a whole number of at least 1: a batch has so many samples. Pass such an int.",
    ),
    (
        lambda: lengths([3], batch_size=1, max_padding=1),
        "max_padding=1 is not a number from 0 to less than 1: it is the part of a batch that may be padding. "
        "Pass one, say 0.1.",
    ),
    (
        lambda: lengths([3], batch_size=1, max_padding=True),
        "max_padding=True is not a number from 0 to less than 1: it is the part of a batch that may be "
        "padding. Pass one, say 0.1.",
    ),
    (
        lambda: windows(0, 1),
        "size=0 is not a whole number of at least 1: the series has so many points. Pass such an int.",
    ),
    (
        lambda: windows(2**62, 1),
        f"size={2**62} is more than 2**62 - 1: positions are computed in 64 bits. Pass at most that.",
    ),
    (
        lambda: windows(2**64, 2**62),
        f"size={2**64} is more than 2**62 - 1: positions are computed in 64 bits. Pass at most that.",
    ),
    (
        lambda: windows(10, 11),
        "window=11 is longer than the series, which has 10 points, and would hold points twice. Pass at most 10.",
    ),
    (
        lambda: windows(10, 0),
        "window=0 is not a whole number of at least 1: it counts points of the series. Pass such an int.",
    ),
    (
        lambda: windows(10, 3, 0),
        "stride=0 is not a whole number of at least 1: it counts points of the series. Pass such an int.",
    ),
    (
        lambda: windows(10, 3, 11),
        "stride=11 is longer than the series, which has 10 points, and would leave the series behind. Pass at most 10.",
    ),
    (
        lambda: windows(10, 3.0),
        "window=3.0 is not a whole number of at least 1: it counts points of the series. Pass such an int.",
    ),
    (
        lambda: windows(10, 3, shuffle=1),
        "shuffle=1 is neither True nor False: windows come in a random order or in that of the series. Pass "
        "one of them.",
    ),
    (
        lambda: WindowDataset([1, 2], 3),
        "window=3 is longer than the series, which has 2 points, and would hold points twice. Pass at most 2.",
    ),
    (
        lambda: scalable(-1),
        "n=-1 is not a whole number of at least 0: so many samples are shuffled. Pass such an int.",
    ),
    (
        lambda: scalable(2**63),
        f"n={2**63} is more than 2**63 - 1: positions are computed in 64 bits. Pass at most that.",
    ),
    (
        lambda: scalable(5.0),
        "n=5.0 is not a whole number of at least 0: so many samples are shuffled. Pass such an int.",
    ),
    (
        lambda: grouped([0, 1], [], 2),
        "group_ids is empty: there is nothing to draw from. Pass one label for each sample.",
    ),
    (
        lambda: grouped(RandomSampler(range(5)), [0, 1, 1, 0], 2),
        "group_ids has 4 entries, and the RandomSampler is of a dataset with 5 samples: each is in one group. Pass one "
        "group for each sample of the dataset.",
    ),
    (
        lambda: grouped(SequentialSampler(range(5)), [0] * 7, 2),
        "group_ids has 7 entries, and the SequentialSampler is of a dataset with 5 samples: each is in one group. Pass "
        "one group for each sample of the dataset.",
    ),
    (
        lambda: list(grouped(pk([0, 1], 1, 1, seed=0), [0, 1], 2)),
        "PKBatchSampler gave something else than a whole number ('list' object cannot be interpreted as an integer): "
        "group_ids is looked up by index. Give GroupedBatchSampler a sampler of indices.",
    ),
    (
        lambda: len(grouped(pk([0, 1], 1, 1, seed=0), [0, 1], 2)),
        "PKBatchSampler gave something else than a whole number ('list' object cannot be interpreted as an integer): "
        "group_ids is looked up by index. Give GroupedBatchSampler a sampler of indices.",
    ),
    (
        lambda: in_pass(grouped(RandomSampler(range(8)), [0] * 8, 2)).state_dict(),
        "GroupedBatchSampler.state_dict() was called in the middle of a pass which its RandomSampler drew from the "
        "global generators, so from no state could it be drawn again. Give that sampler generator=, wrap one of "
        "ddp_patch.samplers, or ask between two passes.",
    ),
    (
        lambda: list(resumed(grouped(range(8), [0] * 8, 2), taken=5)),
        "GroupedBatchSampler cannot go on from a state with taken=5: here that is a whole number of 0 to 4. Pass what "
        "the state_dict() of a sampler with the same arguments returned.",
    ),
    (
        lambda: grouped([0, 1], [0, 0], 0),
        "batch_size=0 is not a whole number of at least 1: a batch has so many samples. Pass such an int.",
    ),
    (
        lambda: grouped([0, 1], [0, 0], 2, drop_uneven=1),
        "drop_uneven=1 is neither True nor False: batches with fewer samples are left out or come. Pass one of them.",
    ),
    (
        lambda: list(grouped([0, 2], [0, 0], 2)),
        "list gave the index 2, and group_ids has 2 entries: that sample is in no group. Pass one group for "
        "each sample of the dataset.",
    ),
    (
        lambda: list(grouped([0, -1], [0, 0], 2)),
        "list gave the index -1, and group_ids has 2 entries: that sample is in no group. Pass one group for "
        "each sample of the dataset.",
    ),
    (
        lambda: list(grouped([0, 0.5], [0, 0], 2)),
        "list gave something else than a whole number ('float' object cannot be interpreted as an integer): "
        "group_ids is looked up by index. Give GroupedBatchSampler a sampler of indices.",
    ),
    (
        lambda: grouped([0, 1], [0, 0], 2).items_at(np.arange(1), 0),
        "GroupedBatchSampler.items_at() was called over a list, which is iterated and not looked up. Give it "
        "a sampler of ddp_patch.samplers with seed=, or iterate it.",
    ),
    (
        lambda: grouped([0, 1], [0, 0], 2).load_state_dict(state_of(grouped(scalable(2), [0, 0], 2))),
        "GroupedBatchSampler.load_state_dict() was given a state over another kind of sampler than its list: "
        "one has a state_dict(), or a generator, and the other not. Wrap a sampler of the kind that was saved.",
    ),
    (
        lambda: ratios([1, 2], [1]),
        "widths has 2 entries and heights 1: a picture has one of each. Pass sequences of one length.",
    ),
    (
        lambda: ratios([1, 0], [1, 1]),
        "widths[1]=0 is not a finite number above 0, and an aspect ratio is width / height. Correct it or "
        "leave it out.",
    ),
    (
        lambda: ratios([1, 2], [1, NAN]),
        "heights[1]=nan is not a finite number above 0, and an aspect ratio is width / height. Correct it or "
        "leave it out.",
    ),
    (
        lambda: ratios(["1"], ["2"]),
        "widths has the shape (1,) and the type <U1: aspect ratios are made of numbers. Pass a flat list, "
        "array or tensor of them.",
    ),
    (
        lambda: ratios([[1]], [[2]]),
        "widths has the shape (1, 1) and the type int64: aspect ratios are made of numbers. Pass a flat "
        "list, array or tensor of them.",
    ),
    (
        lambda: ratios([1], [1], [1, 1]),
        "edges=[1.0, 1.0] do not increase, so they bound no intervals. Pass aspect ratios in increasing order.",
    ),
    (
        lambda: iterations([[0]], 0),
        "num_iterations=0 is not a whole number of at least 1: a training has so many. Pass such an int.",
    ),
    (
        lambda: iterations([[0]], 5, -1),
        "start_iteration=-1 is not a whole number of at least 0: the training begins there. Pass such an int.",
    ),
    (
        lambda: iterations([[0]], 5, 6),
        "start_iteration=6 is past num_iterations=5: nothing would be left. Pass a later end, or an earlier start.",
    ),
    (
        lambda: list(iterations(iter([[0]]), 2)),
        "Epoch 1 of list_iterator has no batch, so 2 iterations are never reached. Pass a batch sampler that "
        "gives some each time it is iterated, not an iterator.",
    ),
    (
        lambda: iterations([[0]], 5).set_epoch(1.5),
        "epoch=1.5 is not a whole number of at least 0: an epoch's order is derived from its number. Pass such an int.",
    ),
    (
        lambda: iterations([[0]], 5).load_state_dict(state_of(pk_batches(seed=1))),
        "IterationBatchSampler.load_state_dict() was given the state of PKBatchSampler: each kind of sampler "
        "stands somewhere else. Pass what the state_dict() of a IterationBatchSampler returned.",
    ),
    (
        lambda: resumed(iterations([[0]], 3), iteration=99),
        "IterationBatchSampler cannot go on from a state with iteration=99: here that is a whole number of 0 to 3. Pass "
        "what the state_dict() of a sampler with the same arguments returned.",
    ),
    (
        lambda: resumed(iterations([[0]], 5, 2), iteration=-2),
        "IterationBatchSampler cannot go on from a state with iteration=-2: here that is a whole number of at least 2. "
        "Pass what the state_dict() of a sampler with the same arguments returned.",
    ),
    (
        lambda: pk_batches(seed=1).load_state_dict(state_of(scalable(N, seed=1))),
        "PKBatchSampler.load_state_dict() was given the state of ScalableRandomSampler: each kind of sampler "
        "stands somewhere else. Pass what the state_dict() of a PKBatchSampler returned.",
    ),
    (
        lambda: scalable(N).load_state_dict([1]),
        "ScalableRandomSampler.load_state_dict() was given the state of a list: each kind of sampler stands "
        "somewhere else. Pass what the state_dict() of a ScalableRandomSampler returned.",
    ),
    (
        lambda: scalable(N).load_state_dict({"epoch": 3}),
        "ScalableRandomSampler.load_state_dict() was given the state of nothing named: each kind of sampler "
        "stands somewhere else. Pass what the state_dict() of a ScalableRandomSampler returned.",
    ),
    (
        lambda: scalable(N).load_state_dict(state_of(scalable(N), version=2)),
        "ScalableRandomSampler.load_state_dict() was given version 2 and reads 1: what an epoch holds may "
        "differ. Go on with the version of ddp_patch that saved it, or begin an epoch anew.",
    ),
    (
        lambda: scalable(N).load_state_dict(state_of(scalable(N, generator=torch.Generator()))),
        "ScalableRandomSampler.load_state_dict() was given ['drawn', 'epoch', 'generator', 'kind', 'seed', "
        "'taken', 'version'] and needs ['drawn', 'epoch', 'kind', 'seed', 'taken', 'version']: generator is in one of them "
        "alone, as where one sampler was given generator= and the other not. Make the sampler with the "
        "arguments of the one that was saved.",
    ),
    (
        lambda: scalable(N, generator=torch.Generator()).load_state_dict(state_of(scalable(N))),
        "ScalableRandomSampler.load_state_dict() was given ['drawn', 'epoch', 'kind', 'seed', 'taken', "
        "'version'] and needs ['drawn', 'epoch', 'generator', 'kind', 'seed', 'taken', 'version']: generator is in one of them "
        "alone, as where one sampler was given generator= and the other not. Make the sampler with the "
        "arguments of the one that was saved.",
    ),
]


@pytest.mark.parametrize(("call", "message"), MESSAGES, ids=[str(number) for number in range(len(MESSAGES))])
def test_messages(call: Call, message: str) -> None:
    with pytest.raises(SamplerError) as caught:
        call()
    assert str(caught.value) == message
    assert isinstance(caught.value, DDPPatchError)
    assert isinstance(caught.value, ValueError)


def test_seed_and_generator_exclude_each_other() -> None:
    given = torch.Generator()
    with pytest.raises(SamplerError) as caught:
        WindowSampler(10, 3, seed=1, generator=given)
    assert str(caught.value) == (
        f"seed=1 and generator={given!r} were both given: an order follows from one of them. Pass one, or neither to draw "
        "from torch's global generator."
    )


@pytest.mark.parametrize("start", [-1, 10])
def test_a_window_outside_of_the_series_is_an_index_error(start: int) -> None:
    """By which loops over a sequence end."""
    with pytest.raises(IndexError) as caught:
        WindowDataset(range(10), 3)[start]
    assert str(caught.value) == (
        f"window {start} begins outside of the series, whose 10 points count from 0. Take starts from "
        "WindowSampler(size=10, window=3)."
    )
