"""What the ready-made samplers refuse."""

from remedied import Met, met

__all__ = ["OF_SAMPLERS"]

_LABELS = "Pass a flat sequence of labels, such as labels.argmax(axis=1) of one-hot rows"
_HASHABLE = "Pass numbers, strings or tuples; of one-hot rows, their argmax"
_WEIGHTS = "Pass a mapping from label to weight, or a sequence for the labels 0, 1, 2 and so on"
_EVERY = "Give every label a weight, which may be 0"
_TOKENS = "Pass a flat list, array or tensor with one for each sample"
_LEAVE = "leave that sample out"

# Weights that are no proportions, as code.
_ODD = ["-0.5", "nan", "inf", "'2'", "True", "[1.0, 1.0]", "1j"]

OF_SAMPLERS: list[Met] = [
    met("Weighted([], {}, 3)", "labels has the shape (0,)", (_LABELS, "[], {}", "[0, 1], {0: 1, 1: 2}")),
    met(
        "labels = np.eye(3)\nWeighted(labels, [1, 1, 1], 3)",
        "labels has the shape (3, 3): each sample has one label",
        (_LABELS, "(labels,", "(labels.argmax(axis=1),"),
    ),
    met(
        "Weighted([[1], [2]], {}, 3)",
        "labels has [1], a list, which is not hashable",
        (_HASHABLE, "[[1], [2]], {}", "[(1,), (2,)], {(1,): 1, (2,): 1}"),
    ),
    met("Weighted([1.0, nan], {1.0: 1}, 3)", "labels has nan, a float", (_HASHABLE, "1.0, nan", "1.0, 1")),
    met(
        "Weighted(None, [1], 3)",
        "labels=None is not a sequence (type NoneType)",
        ("Pass a list, array or tensor", "None", "[0]"),
    ),
    met(
        "Weighted(['a', 'b'], {'a': 1}, 3)",
        "weights and labels differ in 'b', which is in one of them alone",
        (_EVERY, "{'a': 1}", "{'a': 1, 'b': 0}"),
        ("leave out others", "'b'", "'a'"),
        ("a sequence of weights is for the labels 0, 1, 2 and so on", "['a', 'b'], {'a': 1}", "[0, 1], [1, 2]"),
    ),
    met(
        "Weighted([0, 2], {0: 1, 2: 1, 7: 0}, 3)",
        "weights and labels differ in 7",
        (_EVERY, "[0, 2]", "[0, 2, 7]"),
        ("leave out others", ", 7: 0", ""),
        ("a sequence of weights is for the labels 0, 1, 2 and so on", "[0, 2], {0: 1, 2: 1, 7: 0}", "[0, 1], [1, 2]"),
    ),
    *(
        met(
            f"Weighted([0, 1], [1, {odd}], 3)",
            "are not finite numbers of at least 0, with one above 0",
            ("Pass such proportions", odd, "0.5"),
        )
        for odd in _ODD
    ),
    met("Weighted([0, 1], [0, 0], 3)", "weights={0: 0, 1: 0} are not", ("Pass such proportions", "[0, 0]", "[0, 1]")),
    met(
        "Weighted([0, 1], 1.5, 3)",
        "weights=1.5 is a float, and every label needs a weight",
        (_WEIGHTS, "1.5", "{0: 1, 1: 2}"),
        (_WEIGHTS, "1.5", "[1, 2]"),
    ),
    met(
        "Weighted([0, 1], [1, 1], 3, generator=7)",
        "generator=7 is not a generator (type int)",
        ("Pass a torch.Generator", "7", "torch.Generator()"),
    ),
    met(
        "Weighted([0, 1], [1, 1], 3, seed=1, generator=torch.Generator())",
        "seed=1 and generator=<torch._C.Generator",
        ("Pass one", "seed=1, ", ""),
        ("neither to draw from torch's global generator", ", seed=1, generator=torch.Generator()", ""),
    ),
    met(
        "Weighted([0, 1], [1, 1], 3).items_at(np.arange(2), 4)",
        "WeightedClassSampler.items_at() was called without a seed: the order of epoch 4",
        ("Pass seed=", "3)", "3, seed=0)"),
        ("iterate the sampler", "list(Weighted([0, 1], [1, 1], 3))"),
    ),
    met(
        "PK(LABELS, 4, 2)",
        "p=4 asks for more labels in a batch than the 3 that there are",
        ("Pass p of at most 3", "4", "3"),
    ),
    met("Lengths([3, 4])", "max_tokens=None and batch_size=None", ("Pass one of them", "4]", "4], batch_size=2")),
    met(
        "Lengths([3, 4], max_tokens=5, batch_size=2)",
        "max_tokens=5 and batch_size=2",
        ("Pass one of them", "max_tokens=5, ", ""),
    ),
    *(
        met(f"Lengths({odd}, batch_size=5)", f"lengths is an array of {kind} of shape", (_TOKENS, odd, "[3, 4]"))
        for odd, kind in [
            ("[]", "float64"),
            ("[3, 4.0]", "float64"),
            ("[3, 10**30]", "object"),
            ("[True, False]", "bool"),
        ]
    ),
    met(
        "Lengths([3, 0], max_tokens=5)",
        "lengths[1]=0 is not a whole number of tokens, at least 1, of at most 64 bits",
        ("Correct it", "0", "1"),
        (_LEAVE, ", 0", ""),
    ),
    met(
        "Lengths(np.array([2**63, 4], np.uint64), batch_size=10)",
        f"lengths[0]={2**63} is not",
        ("Correct it", "2**63", "3"),
        (_LEAVE, "2**63, ", ""),
    ),
    met(
        "Lengths([3, 9, 12], max_tokens=10)",
        "lengths[2]=12 is longer than max_tokens=10",
        ("Pass a larger max_tokens", "=10", "=12"),
        ("shorten it", "12", "10"),
        ("leave it out", ", 12", ""),
    ),
    met(
        "Lengths([3], batch_size=1, max_padding=1)",
        "max_padding=1 is not a number from 0 to less than 1",
        ("Pass one, say 0.1", "max_padding=1", "max_padding=0.1"),
    ),
    met("WindowSampler(2**62, 1)", "is more than 2**62 - 1", ("Pass at most that", "2**62", "2**62 - 1")),
    met(
        "WindowSampler(10, 11)",
        "window=11 is longer than the series, which has 10 points",
        ("Pass at most 10", "11", "10"),
    ),
    met("WindowSampler(10, 3, 11)", "stride=11 is longer", ("Pass at most 10", "11", "10")),
    met(
        "WindowDataset([1, 2], 3)",
        "window=3 is longer than the series, which has 2 points",
        ("Pass at most 2", "3", "2"),
    ),
    *(
        met(
            f"data = WindowDataset(range(10), 3)\n[data[start] for start in [{start}]]",
            f"window {start} begins outside of the series, whose 10 points count from 0",
            ("Take indices from WindowSampler(size=10, window=3)", f"[{start}]", "WindowSampler(size=10, window=3)"),
        )
        for start in (-1, 10)
    ),
    met("Scalable(2**63)", "is more than 2**63 - 1", ("Pass at most that", "2**63", "2**63 - 1")),
    *(
        met(
            f"Grouped({kind}(range(5)), [0] * 7, 2)",
            f"group_ids has 7 entries, and the {kind} is of a dataset with 5 samples",
            ("Pass one group for each sample of the dataset", "7", "5"),
        )
        for kind in ("RandomSampler", "SequentialSampler")
    ),
    *(
        met(
            f"{use}(Grouped(PK([0, 1], 1, 1, seed=0), [0, 1], 2))",
            "PKBatchSampler gave something other than a whole number ('list' object",
            ("Give GroupedBatchSampler a sampler of indices", "PK([0, 1], 1, 1, seed=0)", "RandomSampler(range(2))"),
        )
        for use in ("list", "len")
    ),
    met(
        "list(Grouped([0, 0.5], [0, 0], 2))",
        "list gave something other than a whole number ('float' object",
        ("Give GroupedBatchSampler a sampler of indices", "0.5", "1"),
    ),
    met(
        "list(Grouped([0, 2], [0, 0], 2))",
        "list gave the index 2, and group_ids has 2 entries",
        ("Pass one group for each sample of the dataset", "[0, 0]", "[0, 0, 1]"),
    ),
    met(
        "list(Grouped([0, -1], [0, 0], 2))",
        "list gave the index -1",
        ("Pass one group for each sample of the dataset", "-1", "1"),
    ),
    met(
        "Grouped([0, 1], [0, 0], 2).items_at(np.arange(1), 0)",
        "GroupedBatchSampler.items_at() was called over a list, which can only be iterated",
        ("Give it a sampler of ddp_patch.samplers with seed=", "([0, 1]", "(Scalable(2, seed=0)"),
        ("iterate it", "list(Grouped([0, 1], [0, 0], 2))"),
    ),
    met(
        "aspect_ratio_groups([1, 2], [1])",
        "widths has 2 entries and heights 1",
        ("Pass sequences of one length", "[1]", "[1, 1]"),
    ),
    met(
        "aspect_ratio_groups([1, 0], [1, 1])",
        "widths[1]=0 is not a finite number above 0",
        ("Correct it", "0", "2"),
        (_LEAVE, "[1, 0], [1, 1]", "[1], [1]"),
    ),
    met(
        "aspect_ratio_groups([1], [1], [1, 1])",
        "edges=[1, 1] do not increase",
        ("Pass aspect ratios in increasing order", "[1, 1]", "[1, 2]"),
    ),
    met(
        "Iterations([[0]], 5, 6)",
        "start_iteration=6 is past num_iterations=5: nothing would be left",
        ("Pass a later end", "5", "7"),
        ("an earlier start", "6", "4"),
    ),
    met(
        "list(Iterations(iter([[0]]), 2))",
        "Epoch 1 of list_iterator has no batch, so 2 iterations are never reached",
        ("Pass a batch sampler that gives some each time it is iterated, not an iterator", "iter([[0]])", "[[0]]"),
    ),
    met(
        "Grouped([0, 1], [0, 0], 2, drop_uneven=1)",
        "drop_uneven=1 is neither True nor False",
        ("Pass one of them", "=1", "=True"),
    ),
    met(
        "WindowSampler(10, 3, shuffle=None)",
        "shuffle=None is neither True nor False",
        ("Pass one of them", "None", "False"),
    ),
]

# Every whole number that a sampler takes: a call, its name, the least one, and what the message says that it is.
_WHOLES = [
    ("Weighted([0, 1], [1, 1], {})", "length", 1, "indices"),
    ("Weighted.n_per_class([0, 1], {})", "n", 1, "every class"),
    ("Weighted([0, 1], [1, 1], 3, seed={})", "seed", 0, "order"),
    ("Weighted([0, 1], [1, 1], 3).set_epoch({})", "epoch", 0, "order"),
    ("PK(LABELS, {}, 2)", "p", 1, "labels"),
    ("PK(LABELS, 2, {})", "k", 1, "instances"),
    ("PK(LABELS, 2, 2, num_batches={})", "num_batches", 1, "epoch"),
    ("Lengths([1], max_tokens={})", "max_tokens", 1, "batch"),
    ("Lengths([3], batch_size={})", "batch_size", 1, "batch"),
    ("WindowSampler({}, 1)", "size", 1, "points"),
    ("WindowSampler(10, {})", "window", 1, "points"),
    ("WindowSampler(10, 3, {})", "stride", 1, "points"),
    ("Scalable({})", "n", 0, "samples"),
    ("Grouped([0, 1], [0, 0], {})", "batch_size", 1, "samples"),
    ("Iterations([[0]], {})", "num_iterations", 1, "training"),
    ("Iterations([[0]], 5, {})", "start_iteration", 0, "training"),
    ("Iterations([[0]], 5).set_epoch({})", "epoch", 0, "order"),
]
for _call, _name, _least, _what in _WHOLES:
    for _odd in (str(_least - 1), "3.0", "True", "torch.tensor(2.5)"):
        _facts = f"is not a whole number of at least {_least}"
        OF_SAMPLERS.append(met(_call.format(_odd), _facts, ("Pass such an int", _call.format(_least))))
