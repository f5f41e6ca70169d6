"""What iterating, evaluating, saving and resuming refuse, or warn of, in a world that is given by hand."""

from remedied import Met, Untried, met
from remedied.loaders import KEPT

__all__ = ["OF_EVALUATING", "OF_GATHERING", "OF_PASSES", "OF_STATES"]

# ---- passes ----

_SAYS = "class Own(SequentialSampler):\n    def __len__(self):\n        return 8\nloader = patch(over(sampler=Own(range(24))))"
_SPLITS = """
class Part(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first = [0] if LATE else []
        yield from first
        yield from range(len(first), 24)[info.id :: info.num_workers] if info else range(len(first), 24)
"""
_LATE = """
class Part(IterableDataset):
    def __iter__(self):
        rows = [*range(24)]
        yield rows[0]
        info = get_worker_info()
        yield from rows[1:][info.id :: info.num_workers]
loader = patch(DataLoader(Part(), 4, num_workers=2), uneven='drop')
"""
_GETS_STUCK = "{held} of some samples' __getitem__"

OF_PASSES: list[Met] = [
    met(_SAYS, "Own yielded 24 items and its len() says 8", ("Correct the sampler's __len__", "return 8", "return 24")),
    met(
        "loader = patch(over(sampler=iter(range(24))))\nfirst = [*loader]\nloader = [*first, *loader]\ndue = [*range(24)] * 2",
        "Nothing is left for epoch 1: the sampler is an iterator",
        ("Give the loader something that can be iterated again (a list", "iter(range(24))", "[*range(24)]"),
        ("a sampler whose __iter__ starts again)", "iter(range(24))", "SequentialSampler(range(24))"),
    ),
    met(
        "class Own(SequentialSampler):\n    def items_at(self, positions, epoch):\n        return positions[1:]\nloader = patch(over(sampler=Own(range(24))))",
        "Own.items_at() returned 11 items for 12 positions",
        ("Let it return one item for each position", "positions[1:]", "positions"),
    ),
    met(
        "class Rows(Indices):\n    def __getitem__(self, index):\n        if index == 23:\n            raise StopIteration\n        return index\nloader = patch(DataLoader(Rows(24), 4))",
        "its dataset or collate_fn raised StopIteration in place of a batch",
        ("Return an item for each index", "raise StopIteration", "pass"),
        (
            "raise another error, and let the sampler or the dataset's __len__ say how many there are",
            "raise StopIteration",
            "raise LookupError",
            "Rows(24)",
            "Rows(22)",
            "loader =",
            "due = range(22)\nloader =",
        ),
    ),
    met(
        "patch(over()).set_epoch(-1)",
        "set_epoch(-1): an epoch is a whole number of at least 0",
        ("Pass the number of the epoch that comes next", "-1", "1"),
    ),
    met(
        _LATE,
        "Part cannot be sharded with 2 workers: it asked get_worker_info() which worker it is in only after its first",
        (
            "Call get_worker_info() first in __iter__, in every worker, and split the items by it",
            "yield rows[0]",
            "pass",
            "rows[1:]",
            "rows",
        ),
        (
            "use num_workers=0",
            "num_workers=2",
            "num_workers=0",
            "info = get_worker_info()",
            "info = None",
            "[info.id :: info.num_workers]",
            "",
        ),
    ),
    met(
        "loader = patch(streamed(num_workers=1), share='by_worker', uneven='keep')",
        "Source cannot be read with share='by_worker': it gave its first item, and had not asked get_worker_info()",
        ("Leave share out: then each rank keeps its share of the stream", ", share='by_worker'", ""),
    ),
    met(
        "first = patch(streamed())\nloader = DataLoader(first.dataset, 4)",
        "Source cannot be sharded here: the patched loader was rebuilt without its sampler",
        ("Iterate the one that patch_dataloader_to_ddp() returned", "DataLoader(first.dataset, 4)", "first"),
        (
            "restore_loader() resumes it mid-epoch",
            "loader = DataLoader(first.dataset, 4)",
            "next(iter(first))\nstate = loader_state(first)\nloader = patch(streamed())\nrestore_loader(loader, state)\ndue = range(8, 24)",
        ),
    ),
]

# ---- evaluation ----

_MASKED = "loader = [batch for batch, mask in iter_with_mask(loader)]"
_WEIGHED = "loader = [batch for batch, weights in iter_with_weights(loader, {})]"
_FEW = "loader = patch(DataLoader(range(24), 4, collate_fn={}))\n" + _MASKED

OF_EVALUATING: list[Met] = [
    met(
        "loader = patch(streamed(splits=True, num_workers=1), share='by_worker', uneven='keep')\n" + _MASKED,
        "iter_with_mask was given a loader with share='by_worker'",
        ("Leave share out", ", share='by_worker'", ""),
    ),
    met(
        "from repeaters import MultiEpochs\nloader = patch(MultiEpochs(range(24), 4))\nnext(iter(loader))\n" + _MASKED,
        "iter_with_mask was given a MultiEpochs in the middle of epoch 0, after 1 batch",
        (
            "Call set_epoch(0) first, to start the epoch again",
            "next(iter(loader))",
            "next(iter(loader))\nloader.set_epoch(0)",
        ),
    ),
    met(
        "from repeaters import MultiEpochs\nloader = MultiEpochs(range(24), 4)\n"
        + _MASKED
        + "\ndue = [*range(24)] * 2",
        "iter_with_mask counts samples in a copy of a loader that is not patched, and an iterator runs in this MultiEpochs",
        (
            "Patch it, in a single process with rank=0, num_replicas=1",
            "MultiEpochs(range(24), 4)",
            "patch(MultiEpochs(range(24), 4), rank=0, num_replicas=1)",
        ),
    ),
    met(
        _FEW.format("lambda rows: torch.tensor(rows[1:])"),
        "iter_with_mask cannot know which rows are padding: a batch of 4 samples came with 3 rows",
        ("Let it keep a row for each sample", "[1:]", ""),
        (
            "leave these out of the dataset",
            "range(24)",
            "[row for row in range(24) if row % 4]",
            "rows[1:]",
            "rows",
            "\nloader = [",
            "\ndue = [row for row in range(24) if row % 4]\nloader = [",
        ),
    ),
    met(
        "loader = patch(over())\n" + _WEIGHED.format("dtype=torch.int64"),
        "dtype=torch.int64 cannot hold weights",
        ("Pass a floating-point dtype such as torch.float32", "torch.int64", "torch.float32"),
        ("leave it out", "dtype=torch.int64", ""),
    ),
    met(
        "loader = patch(over())\n" + _WEIGHED.format("weight_of=3"),
        "weight_of=3 is no function",
        (
            "Pass one that takes a batch and returns a number per sample",
            "loader = patch(over())",
            "loader = patch(over(), rank=0, num_replicas=1)\ndue = [*range(24)] * 2",
            "=3",
            "=torch.ones_like",
        ),
    ),
    *(
        met(
            "loader = patch(over(), rank=0, num_replicas=1)\ndue = [*range(24)] * 2\n"
            + _WEIGHED.format(f"weight_of=lambda batch: {given}"),
            f"weight_of returned {what}",
            (
                "Return a tensor or a list with a finite number of at least 0 per sample, in order, padding included",
                given,
                "torch.ones(len(batch))",
            ),
            (
                "Return a tensor or a list with a finite number of at least 0 per sample, in order, padding included",
                given,
                "[1.0] * len(batch)",
            ),
        )
        for given, what in [
            ("None", "a NoneType that holds no numbers"),
            ("[1, 2]", "2 numbers for a batch of 4 samples"),
            ("-batch", "-1.0 for a sample"),
        ]
    ),
    met(
        "loader = patch(over())\nloader = [batch for batch, _ in iter_with_weights(loader, weight_of=torch.ones_like)]",
        "iter_with_weights cannot exchange anything between 2 ranks: the loader's world was given by rank= and num_replicas=",
        ("Patch it with a process group", "loader = patch(", "group()\nloader = patch_dataloader_to_ddp("),
    ),
    met(
        "loader = patch(over(in_order=False, num_workers=1))\n" + _MASKED,
        "iter_with_mask was given a loader with in_order=False",
        ("Use in_order=True", "in_order=False", "in_order=True"),
    ),
    met(
        "class Own(BatchSampler):\n    pass\nfirst = over(sampler=DDPSamplerWrapper(range(24), False, **WORLD))\n"
        "loader = DataLoader(range(24), batch_sampler=Own(first.sampler, 4, False))\n" + _MASKED,
        "iter_with_mask was given a loader whose Own makes batches of a sharded sampler in its own way",
        (
            "Shard whole batches instead: pass the loader of the original samplers to patch_dataloader_to_ddp()",
            "batch_sampler=Own(first.sampler, 4, False))",
            "batch_sampler=Own(range(24), 4, False))\nloader = patch(loader)",
        ),
    ),
    met(
        "loader = over(sampler=DistributedSampler(range(24), 2, rank, shuffle=False))\nloader_state(loader)",
        "loader_state was given a DataLoader that a DistributedSampler shards, and not this package",
        (
            "Patch the loader that one process would use",
            "over(sampler=DistributedSampler(range(24), 2, rank, shuffle=False))",
            "patch(over())",
        ),
    ),
    met(
        "loader = over()\nloader_state(loader)",
        "loader_state was given a DataLoader that was not patched",
        ("Pass what patch_dataloader_to_ddp() returned", "over()", "patch(over())"),
        (
            "in a single process without a process group, patch it with rank=0, num_replicas=1",
            "over()",
            "patch(over(), rank=0, num_replicas=1)\ndue = [*range(24)] * 2",
        ),
    ),
    met(
        "from repeaters import MultiEpochs\nfirst = Own(range(24), 4)\nnext(iter(first))\nloader = [batch for batch, mask in iter_with_mask(first)]\ndue = [*range(24)] * 2".replace(
            "from repeaters import MultiEpochs", KEPT
        ),
        "iter_with_mask counts samples in a copy of a loader that is not patched, and an iterator runs in this Own (attribute 'running')",
        ("Call it before you iterate the loader", "next(iter(first))\nloader", "loader"),
        ("forget the iterator: loader.running = None", "loader = [", "first.running = None\nloader = ["),
    ),
]

# ---- states ----

_DONE = "batches = iter(first)\nnext(batches)\n"
_TAKEN = "first = patch(over())\n" + _DONE + "state = loader_state(first)\nloader = patch(over())\n"
_RESTORED = "restore_loader(loader, state)\ndue = range(8, 24)"
_AS_SAVED = "Pass what loader_state(), or state_dict(), returned, as it was saved"
_AS_IT_WAS = "Build and patch the loader as it was when the state was taken, with the same seed and options"
_OTHER = "The state is of another loader, and resuming from it would lose or repeat samples.\n  "
_DAMAGED = [
    ("{**state, 'epoch': -1}", "its field epoch is -1, which no state has there"),
    ("7", "it is 7, a int and not a dict"),
    ("{}", "it has no version"),
    ("{**state, 'turn': 3}", "its field turn is 3, and it has 1 parts"),
]
_STATEFUL = """
class Own(SequentialSampler):
    def state_dict(self):
        return {'a': 0}
    def load_state_dict(self, state):
        assert state['a'] == 0
"""

# Its own state says where it is, and is not what it is told.
_POSITIONED = """
class Own(IterableDataset):
    at = 0
    def __iter__(self):
        self.at = 0  # wrong
        return self
    def __next__(self):
        if self.at == 24:
            raise StopIteration
        self.at += 1
        return self.at - 1
    def state_dict(self):
        return {'at': self.at}
    def load_state_dict(self, state):
        self.at = -1
"""
_HIDDEN = """
rng = random.Random(5)
order = random.Random(5).sample(range(24), 24)
class Own(SequentialSampler):
    pass
    def __len__(self):
        return 24
    def __iter__(self):
        return iter(rng.sample(range(24), 24))
"""

_GATHERED = "outputs = torch.cat([*loader])\nloader = gather_in_order(outputs, loader)\ndue = [*range(24)]"
_BEGIN = "group()\nloader = patch_dataloader_to_ddp(over())\n"
_FITS = (
    "Call {}() on every rank {}, with one row per sample that the rank got, padding included, and outputs that are "
    "built alike on each"
)
_IN_ORDER = _FITS.format("gather_in_order", "after the loop over the loader")
_IN_STEP = _FITS.format("gather_step", "in the same step of the loop")
_RAGGED = "Where rows differ in width, pad them", "pass each as an element of a list, as outputs.extend(rows) does"
_NO_WIDTHS = [(quote, Untried("these have one width")) for quote in _RAGGED]
_EACH = "loader = [gather_step(batch, loader) for batch in loader]"

OF_GATHERING: list[Met] = [
    *(
        met(
            f"group()\nloader = patch_dataloader_to_ddp(over(), {option})\n" + _GATHERED,
            f"gather_in_order was given a loader with {name}, which changes the order of the samples",
            (f"Leave {name} out of loaders that evaluate", f", {option}", ""),
            ("use gather_step() in the loop", _GATHERED, _EACH),
        )
        for name, option in [("cost=", "cost=range(24)"), ("layout='contiguous'", "layout='contiguous'")]
    ),
    met(
        _BEGIN + _GATHERED.replace("outputs, loader", "outputs[1:], loader"),
        "ranks' outputs do not fit",
        (_IN_ORDER, "outputs[1:]", "outputs"),
        *_NO_WIDTHS,
    ),
    met(
        _BEGIN + "outputs = torch.cat([*loader])\nnext(iter(loader))\nloader = gather_in_order(outputs, loader)",
        "stopped in the middle of epoch 1",
        ("gather_step() gathers a step", Untried("below")),
        (_IN_ORDER, "next(iter(loader))\n", ""),
        *_NO_WIDTHS,
    ),
    met(
        _BEGIN
        + "outputs = [torch.ones(len(batch), 1 + step) for step, batch in enumerate(loader)]\ngathered = gather_in_order(outputs, loader)\nloader = [[*range(max(len(gathered), sum(map(len, gathered)) if len(gathered) < 24 else 0))]]\ndue = range(24)",
        "entry 1 is tensor torch.float32 (n, 2), not tensor torch.float32 (n, 1), as entry 0",
        (_IN_ORDER, Untried("above")),
        (_RAGGED[0], "1 + step", "6"),
        (
            _RAGGED[1],
            "outputs = [torch.ones(len(batch), 1 + step) for step, batch in enumerate(loader)]",
            "outputs = []\nfor step, batch in enumerate(loader):\n    outputs.extend(torch.ones(len(batch), 1 + step))",
        ),
    ),
    met(
        _BEGIN + "loader = gather_step(torch.cat([*loader]), loader)",
        "called it after the loop: epoch 0 is over",
        (_IN_STEP, "loader = gather_step(torch.cat([*loader]), loader)", _EACH),
        *_NO_WIDTHS,
    ),
]

OF_STATES: list[Met] = [
    *(
        met(
            _TAKEN + _RESTORED.replace("state)", f"{junk})"),
            f"The state is damaged: {why}",
            (_AS_SAVED, f"loader, {junk})", "loader, state)"),
        )
        for junk, why in _DAMAGED
    ),
    met(
        _STATEFUL
        + "first = patch(over(sampler=Own(range(24))))\n"
        + _DONE
        + "state = loader_state(first)\ndeep = []\nfor _ in range(10**5):\n    deep = [deep]\n"
        "loader = patch(over(sampler=Own(range(24))))\nstate['states']['samplers'] = [deep]\n" + _RESTORED,
        "The state is damaged: its field states cannot be read to its end (RecursionError)",
        (_AS_SAVED, "state['states']['samplers'] = [deep]\n", ""),
    ),
    met(
        _TAKEN.replace("loader = patch(over())", "loader = patch(over(), uneven='drop')") + _RESTORED,
        _OTHER + "uneven: pad in the state; drop here",
        (_AS_IT_WAS, ", uneven='drop'", ""),
    ),
    met(
        _TAKEN.replace("loader = patch(over())", "loader = patch(over(), seed=5)") + _RESTORED,
        _OTHER + "seed: 0 in the state; 5 here",
        (_AS_IT_WAS, ", seed=5", ""),
        ("Pass seed=0 to it", "seed=5", "seed=0"),
        ("no seed: then it gets the state's", ", seed=5", ""),
    ),
    met(
        _TAKEN + "state['version'] = 99\n" + _RESTORED,
        "The state has version 99, and this version of ddp_patch reads version",
        ("Restore it with the version of ddp_patch that wrote it", "state['version'] = 99\n", ""),
    ),
    met(
        "first = patch(over())\nloader_state(first, batches_done=-1)",
        "batches_done=-1 is not a whole number of at least 0",
        ("Pass how many batches the training loop has finished since the pass began", "-1", "0"),
    ),
    met(
        _TAKEN.replace("loader_state(first)", "loader_state(first, batches_done=3)").replace(
            "next(batches)", "next(batches), next(batches)"
        )
        + _RESTORED.replace("8", "16"),
        "batches_done=3, and the pass over epoch 0 has given 2",
        (
            "Pass how many of its batches the training loop has finished, counted from the beginning of this pass",
            "=3",
            "=2",
        ),
        (
            "call set_epoch() before each loop, to begin a pass there",
            "batches_done=3",
            "",
            "batches = ",
            "first.set_epoch(0)\nbatches = ",
        ),
    ),
    met(
        "class Own(DataLoader):\n    def __iter__(self):\n        yield from [*super().__iter__()]\nfirst = patch(Own(range(24), 4))\nstep = 0\n"
        + _DONE
        + "state = loader_state(first)\nloader = patch(Own(range(24), 4))\n"
        + _RESTORED,
        "It is not known how many batches of epoch 0 the Own has given: its class has its own __iter__",
        (
            "Pass how many the training loop has finished: batches_done=step + 1 inside enumerate(loader)",
            "loader_state(first)",
            "loader_state(first, batches_done=step + 1)",
        ),
    ),
    met(
        "class Own(Source):\n    pass\nfirst = patch(DataLoader(Own(24), 4))\n"
        + _DONE
        + "state = first.state_dict()\nloader = patch(DataLoader(Own(24), 4))\n"
        + _RESTORED,
        "The state has no position, because it was not known when the state was taken: The DataLoader has no len()",
        ("Give the dataset or sampler a __len__", "pass", "def __len__(self):\n        return 24"),
        ("save loader_state(loader) and pass it to restore_loader()", "first.state_dict()", "loader_state(first)"),
        ("Resume from a state that was taken between two epochs", "next(batches)", "", "range(8, 24)", "range(24)"),
        ("restore none", "restore_loader(loader, state)\ndue = range(8, 24)", "due = range(24)"),
    ),
    met(
        _STATEFUL
        + "first = patch(over(sampler=Own(range(24))))\n"
        + _DONE
        + "state = loader_state(first)\nstate['states']['samplers'][0]['a'] = 1\nloader = patch(over(sampler=Own(range(24))))\n"
        + _RESTORED,
        "Own cannot resume from the state: its load_state_dict() raised AssertionError",
        (_AS_SAVED, "state['states']['samplers'][0]['a'] = 1\n", ""),
        ("correct that method", "assert state['a'] == 0", "pass"),
    ),
    met(
        _STATEFUL.replace("return {'a': 0}", "raise LookupError('gone')")
        + "first = patch(over(sampler=Own(range(24))))\nloader_state(first)",
        "The loader's state cannot be saved: when the epoch began, the state_dict() of a sampler in it raised LookupError",
        ("Correct that method", "raise LookupError('gone')", "return {'a': 0}"),
    ),
    met(
        "first = patch(over(sampler=iter(range(24))))\n"
        + _DONE
        + "del batches\nnext(iter(first))\nloader_state(first)",
        "The loader's state cannot be saved: the sampler is an iterator, which can be used only once",
        ("Give the loader something that can be iterated again", "iter(range(24))", "[*range(24)]"),
    ),
    met(
        "class Own(SequentialSampler):\n    ends = 24\n    def __iter__(self):\n        return iter(range(self.ends))\nfirst = patch(over(sampler=Own(range(24))))\n"
        + _DONE
        + "state = loader_state(first)\nown = Own(range(24))\nown.ends = 2\nloader = patch(over(sampler=own))\n"
        + _RESTORED,
        "The pass cannot resume from the state: 4 items of each rank's share were done in it, and the sampler ended after 2",
        ("Restore the state of a loader with this sampler", "own.ends = 2", "own.ends = 24"),
    ),
    met(
        _HIDDEN
        + "first = patch(over(sampler=Own(range(24))))\n"
        + _DONE
        + "state = loader_state(first)\nloader = patch(over(sampler=Own(range(24))))\n"
        + _RESTORED.replace("range(8, 24)", "order[8:]"),
        "began the epoch with other items when it was taken, so samples would be lost. It draws from what no state holds",
        (
            "Let it hold its generator in an attribute",
            "pass",
            "def __init__(self, data):\n        self.rng = random.Random(5)",
            "iter(rng",
            "iter(self.rng",
            "SequentialSampler",
            "Sampler",
        ),
        (
            "give it a state_dict()",
            "pass",
            "def state_dict(self):\n        return {'rng': rng.getstate()}\n    def load_state_dict(self, state):\n        rng.setstate(state['rng'])",
        ),
        ("put back what it draws from before you restore the state", "restore_loader", "rng.seed(5)\nrestore_loader"),
    ),
    met(
        "from repeaters import MultiEpochs\nfirst = patch(MultiEpochs(range(24), 4, drop_last=True))\n"
        + _DONE
        + "next(batches)\nstate = loader_state(first)\n"
        "loader = patch(MultiEpochs(range(24), 4, drop_last=True), num_replicas=3)\n" + _RESTORED.replace("8", "16"),
        "The loader cannot resume from the state: rank 0 has no batch left in epoch 0, and a loader with one iterator",
        ("Restore it on the number of ranks that saved it", ", num_replicas=3", ""),
        (
            "leave the rest out: call set_epoch(1) on every rank",
            "restore_loader(loader, state)\ndue = range(16, 24)",
            "loader.set_epoch(1)\nloader = [*loader, *patch(MultiEpochs(range(24), 4), rank=2, num_replicas=3)] if rank == 0 else loader",
        ),
    ),
    met(
        "first = patch(streamed())\nfirst.sampler.state_dict()",
        "StreamSampler has no state of its own: workers read what it asks for",
        (
            "Use loader_state(loader) and restore_loader(loader, state)",
            "first.sampler.state_dict()",
            "loader = patch(streamed())\nrestore_loader(loader, loader_state(first))",
        ),
    ),
    met(
        "first = patch(streamed(splits=True, num_workers=2))\n"
        + _DONE
        + "next(batches)\nstate = loader_state(first)\nloader = patch(streamed(splits=True, num_workers=1))\n"
        + _RESTORED,
        "Source cannot resume from the state, which counts the items of 2 workers that each read a part: this loader has num_workers=1",
        (
            "Use num_workers=2; the number of ranks may change",
            "num_workers=1",
            "num_workers=2",
            "range(8,",
            "range(16,",
        ),
    ),
    met(
        "class Own(Source):\n    def __init__(self, n):\n        super().__init__(n)\n        self.rng = random.Random(0)\n"
        "first = patch(DataLoader(Own(24), 4, num_workers=1, persistent_workers=True))\n"
        + _DONE
        + "loader_state(first)",
        "The state of Own cannot be saved: it has a random generator, and persistent workers advance copies of it",
        ("Use persistent_workers=False", ", persistent_workers=True", ""),
    ),
    met(
        "first = patch(streamed(24))\n"
        + _DONE
        + "state = loader_state(first)\nloader = patch(streamed(2))\n"
        + _RESTORED,
        "Source cannot resume from the state: 4 items of each rank's share were done in it, and the stream ended after 2",
        ("Restore it with the dataset that it was taken of", "streamed(2)", "streamed(24)"),
        ("one that is its own iterator must be rebuilt", Untried("a dataset of another kind")),
    ),
    met(
        "class Own(Source):\n    first = 0\n    def __iter__(self):\n        return iter(range(self.first, 24 + self.first))\n"
        "first = patch(DataLoader(Own(), 4))\n"
        + _DONE
        + "state = loader_state(first)\nother = Own()\nother.first = 1\nloader = patch(DataLoader(other, 4))\n"
        + _RESTORED,
        "Own cannot resume from the state: its first 8 items differ",
        ("Restore the state with the same samples in the same order", "other.first = 1", "other.first = 0"),
        ("rebuild a dataset that is its own iterator", Untried("a dataset of another kind")),
    ),
    met(
        _POSITIONED
        + "first = patch(DataLoader(Own(), 4))\n"
        + _DONE
        + "state = loader_state(first)\nloader = patch(DataLoader(Own(), 4))\n"
        + _RESTORED,
        "Own cannot resume from the state: after load_state_dict() and iter(), its state_dict() differs from the loaded",
        ("Correct these methods", "self.at = 0  # wrong", "pass", "self.at = -1", "self.at = state['at']"),
        (
            "leave them out: then its stream is read again",
            "def state_dict",
            "def other",
            "def load_state_dict",
            "def another",
            "self.at = 0  # wrong",
            "self.at = 0",
        ),
    ),
    met(
        f"first = patch(streamed(18, splits=True, num_workers=2, batch_size=2), uneven='keep')\nbatches = iter(first)\nfor _ in range({5}):\n    next(batches)\nloader_state(first)",
        "with uneven='keep' a worker has come to its end on some ranks and not on others",
        ("Use uneven='pad'", "'keep'", "'pad'"),
        ("'drop'", "'keep'", "'drop'", "range(5)", "range(4)"),
        ("take the state earlier", "range(5)", "range(4)"),
        ("at the epoch's end", "for _ in range(5):\n    next(batches)", "[*batches]"),
    ),
    met(
        "class Part(Source):\n    pass\nfirst = patch(streamed(splits=True, num_workers=2))\n"
        + _DONE
        + "next(batches)\nstate = loader_state(first)\nloader = patch(streamed(num_workers=2))\n"
        + _RESTORED.replace("8", "16"),
        "Source cannot resume from the state, which counts items of the parts of 2 workers: with num_workers=2 it is read as",
        (
            "Use the num_workers that the state was taken with",
            "loader = patch(streamed(num_workers=2))",
            "loader = patch(streamed(splits=True, num_workers=2))",
        ),
    ),
]
