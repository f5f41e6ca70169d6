"""What an audit finds or refuses, and what ``run_ranks`` does; ``tell`` raises a report's first problem."""

from remedied import Met, Untried, met

__all__ = ["OF_AUDITS"]

_PATCHED = "Pass the loader through patch_dataloader_to_ddp()"


def _make(returned: str) -> str:
    return f"def make(rank, world_size):\n    return {returned}\ntell(audit(make, 2))"


_SHARDED = "patch_dataloader_to_ddp(over(), rank=rank, num_replicas=world_size)"
_TORCHS = "over({n}, sampler=DistributedSampler(range({n}), world_size, rank{more}){rest})"
_STREAM = """
class Stream(IterableDataset):
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size
    def __iter__(self):
        info = get_worker_info()
        return iter(range(24)[self.rank :: self.world_size])
"""
_PLACE = "Pass package.module:name or path/to/file.py:name"
_FACTORY = "Pass a function make(rank, world_size) that builds each rank's loader"
_MADE = "audit(lambda rank, world_size: {}, 2)"

OF_AUDITS: list[Met] = [
    met(
        _make("over()"),
        "not_sharded: Each of 2 ranks gets all of the data",
        (f"{_PATCHED} on every rank, after init_process_group()", "over()", _SHARDED),
        (
            "A factory must take its rank from its arguments: no process group is up here",
            "over()",
            _TORCHS.format(n=24, more=", shuffle=False", rest=""),
        ),
    ),
    met(
        _make(
            "over(sampler=DDPSamplerWrapper(DistributedSampler(range(24), world_size, rank, shuffle=False).__iter__(), False, rank=rank, num_replicas=world_size))"
        ),
        "double_sharding",
        (
            "Shard once: leave out the sampler wrapper",
            "DDPSamplerWrapper(DistributedSampler(range(24), world_size, rank, shuffle=False).__iter__(), False, rank=rank, num_replicas=world_size)",
            "DistributedSampler(range(24), world_size, rank, shuffle=False)",
        ),
        (
            "the framework's own (use_distributed_sampler=False)",
            "DistributedSampler(range(24), world_size, rank, shuffle=False).__iter__()",
            "range(24)",
        ),
    ),
    met(
        _make(
            "over(sampler=[*range(rank * (world_size > 1), 24, 2 if world_size > 1 else 1)] if False else [*RandomSampler(range(24))][rank::world_size])"
        ),
        "ranks_disagree",
        (
            f"{_PATCHED}, which derives the order from (seed, epoch)",
            "over(sampler=[*range(rank * (world_size > 1), 24, 2 if world_size > 1 else 1)] if False else [*RandomSampler(range(24))][rank::world_size])",
            "patch_dataloader_to_ddp(over(sampler=RandomSampler(range(24))), rank=rank, num_replicas=world_size)",
        ),
        (
            "seed every rank alike where the order is made",
            "[*RandomSampler(range(24))]",
            "[*RandomSampler(range(24), generator=seeded_generator())]",
        ),
    ),
    met(
        _make("over(20, drop_last=True, sampler=[*range(rank, 20, world_size)])"),
        "tail_lost",
        ("Use uneven='pad' and drop_last=False", "drop_last=True, ", ""),
        ("shuffle, so that others are left out in each epoch", Untried("then they are lost in some epochs")),
    ),
    met(
        _make("over(sampler=random.Random(rank if world_size > 1 else 0).sample(range(24), 24)[rank::world_size])"),
        "missing",
        (
            f"{_PATCHED}, with order='leader' if each rank draws an order of its own",
            "over(sampler=random.Random(rank if world_size > 1 else 0).sample(range(24), 24)[rank::world_size])",
            "patch_dataloader_to_ddp(over(sampler=random.Random(0).sample(range(24), 24)), rank=rank, num_replicas=world_size)",
        ),
        (
            "use a smaller batch_size, uneven='pad' and drop_last=False",
            Untried("where batches are left out: the row of tails"),
        ),
    ),
    met(
        _STREAM
        + _make("DataLoader(Stream(rank, world_size), 4, num_workers=2)").replace("make, 2", "make, 2, epochs=1"),
        "repeated",
        (
            "Pass the loader of the whole data through patch_dataloader_to_ddp(), whose shares are disjoint",
            "DataLoader(Stream(rank, world_size), 4, num_workers=2)",
            "patch_dataloader_to_ddp(DataLoader(Stream(0, 1), 4, num_workers=2), rank=rank, num_replicas=world_size)",
        ),
        (
            "If several workers read an iterable dataset, split it by torch.utils.data.get_worker_info(), too",
            "[self.rank :: self.world_size]",
            "[self.rank :: self.world_size][info.id :: info.num_workers]",
        ),
    ),
    met(
        _make("over(24 + 2 * (world_size > 1), sampler=[*range(rank, 24 + 2 * (world_size > 1), world_size)])"),
        "foreign",
        (
            "Make every rank's loader from the same data as that of one process, make(0, 1), which gets all of it",
            " + 2 * (world_size > 1)",
            "",
        ),
    ),
    met(
        "def make(rank, world_size):\n    return over(23, sampler=DistributedSampler(range(23), world_size, rank, shuffle=False))\ntell(audit(make, 2, padding=False))",
        "padding",
        ("Use gather_in_order()", "padding=False", "padding=True"),
        (
            "uneven='keep' for an evaluation",
            "over(23, sampler=DistributedSampler(range(23), world_size, rank, shuffle=False))",
            "patch_dataloader_to_ddp(over(23), rank=rank, num_replicas=world_size, uneven='keep')",
        ),
        ("no padding up to whole batches (accelerate: even_batches=False)", Untried("test_audit_peers.py does")),
    ),
    met(
        _make("over(25, sampler=[*range(rank, 25, world_size)])"),
        "uneven_steps",
        (
            "Give each rank as many items as the others, as patch_dataloader_to_ddp() with uneven='pad' or 'drop' does",
            "over(25, sampler=[*range(rank, 25, world_size)])",
            "patch_dataloader_to_ddp(over(25), rank=rank, num_replicas=world_size, uneven='pad')",
        ),
    ),
    met(
        _make(_TORCHS.format(n=24, more="", rest="")),
        "same_order",
        (
            "Call set_epoch(epoch) before each epoch (and pass set_epoch=True here if your training does)",
            "make, 2",
            "make, 2, set_epoch=True",
        ),
        (
            "pass the loader through patch_dataloader_to_ddp() instead of using a distributed sampler",
            _TORCHS.format(n=24, more="", rest=""),
            "patch_dataloader_to_ddp(over(shuffle=True), rank=rank, num_replicas=world_size)",
        ),
        ("A loader that does not shuffle needs shuffle=True", Untried("of another loader")),
    ),
    met(
        "class Own(SequentialSampler):\n    def __len__(self):\n        return 10\n"
        + _make("patch_dataloader_to_ddp(over(sampler=Own(range(24))), rank=rank, num_replicas=world_size)"),
        "wrong_length",
        ("Correct the sampler's __len__", "return 10", "return 24"),
        ("leave it out", "return 10", "return super().__len__()"),
    ),
    met(
        _make("patch_dataloader_to_ddp(over(sampler=iter(range(24))), rank=rank, num_replicas=world_size)"),
        "error",
        ("Mend the sampler", "iter(range(24))", "range(24)"),
        (
            "Give the loader something that can be iterated again (a list, or a sampler whose __iter__ starts again)",
            "iter(range(24))",
            "range(24)",
        ),
        ("pass epochs=1 if it is meant for one epoch", "make, 2", "make, 2, epochs=1"),
    ),
    met(
        _make(
            "DataLoader(range(24), batch_sampler=[[batch[rank]] if world_size > 1 else batch for batch in [[at, at + 1] for at in range(0, 24, 2)]])"
        ),
        "split_batch",
        (
            "Shard whole batches: pass the loader through patch_dataloader_to_ddp()",
            "DataLoader(range(24), batch_sampler=[[batch[rank]] if world_size > 1 else batch for batch in [[at, at + 1] for at in range(0, 24, 2)]])",
            "patch_dataloader_to_ddp(DataLoader(range(24), batch_sampler=[[at, at + 1] for at in range(0, 24, 2)]), rank=rank, num_replicas=world_size)",
        ),
        (
            "wrap the batch sampler in DDPBatchSamplerWrapper",
            "[[batch[rank]] if world_size > 1 else batch for batch in [[at, at + 1] for at in range(0, 24, 2)]]",
            "DDPBatchSamplerWrapper([[at, at + 1] for at in range(0, 24, 2)], False, rank=rank, num_replicas=world_size)",
        ),
    ),
    # ---- what it refuses ----
    met(
        "audit(over(), 2, allow=['pading'])",
        "allow=['pading'] names no kind of problem",
        ("Pass a list of these: ", "pading", "padding"),
        (", ".join(__import__("ddp_patch.auditing", fromlist=["problem_kinds"]).problem_kinds), "pading", "missing"),
    ),
    met(
        "audit(over(), 2, rank=0, num_replicas=2)",
        "audit was given num_replicas, rank for patch_dataloader_to_ddp(), which is about real ranks",
        ("Leave that out", ", rank=0, num_replicas=2", ""),
        ("pass a function make(rank, world_size)", "audit(over(), 2, rank=0, num_replicas=2)", _MADE.format(_SHARDED)),
        ("test real ranks with ddp_patch.testing.run_ranks", Untried("tests/ranks do")),
    ),
    met(
        "audit(over(), 1)",
        "audit with world_size=1 has nothing to compare",
        ("pass a whole number of at least 2", "1", "2"),
    ),
    met(
        "keys = list('abcdef')\ndata = dict.fromkeys(keys, 0)\naudit(DataLoader(data, 2, sampler=keys), 2, cost=lambda key: 1)",
        "audit was given cost= and a loader whose keys are no indices",
        ("Leave cost out", ", cost=lambda key: 1", ""),
        ("sample indices", "list('abcdef')", "[*range(6)]"),
    ),
    met(
        "audit({'a.b': over(), 'a': {'b': over()}}, 2)",
        "Two loaders have one place, a.b",
        ("Give the keys of the dicts other names", "a.b", "c"),
    ),
    met("audit([], 2)", "What audit was given holds no loader: it is []", ("Pass at least one", "[]", "[over()]")),
    met(
        "audit(lambda rank, world_size, more: over(), 2)",
        "audit calls a factory as make(rank, world_size) for every rank, and <lambda> lacks an argument or needs one more",
        ("Give it these two arguments", ", more", ""),
        ("pass the finished loader itself", "lambda rank, world_size, more: over()", "over()"),
    ),
    met(
        "audit(7, 2)",
        "audit needs a DataLoader, a function make() or make(rank, world_size) that returns one",
        ("Pass the finished loader itself", "7", "over()"),
    ),
    met(
        "audit(over(sampler=DistributedSampler(range(24), 2, 0)), 2)",
        "audit was given a loader that is one rank's share already (DistributedSampler, rank 0 of 2)",
        (
            _FACTORY,
            "audit(over(sampler=DistributedSampler(range(24), 2, 0)), 2)",
            _MADE.format(_TORCHS.format(n=24, more="", rest="")),
        ),
        ("the loader as it is before it is shared", "sampler=DistributedSampler(range(24), 2, 0)", ""),
    ),
    met(
        "audit(over(), 2, patch=False, uneven='drop')",
        "audit was given uneven for patch_dataloader_to_ddp(), which is not called: patch=False",
        ("Leave them out", ", uneven='drop'", ""),
        ("pass an unpatched loader", "patch=False, ", ""),
    ),
    met(
        "audit(over(sampler=(index for index in range(24))), 2)",
        "audit copies a loader's sampler for every rank, and copying generator raised TypeError",
        (
            _FACTORY,
            "audit(over(sampler=(index for index in range(24))), 2)",
            _MADE.format("over(sampler=(index for index in range(rank, 24, world_size)))"),
        ),
    ),
    met(
        "audit(lambda rank, world_size: DataLoader(Indices(24 // world_size + rank), 4), 2)",
        "audit compares what ranks draw with what one process does, and in <lambda>(rank, world_size) the dataset of rank",
        (
            "Make every rank's loader over the whole dataset",
            "DataLoader(Indices(24 // world_size + rank), 4)",
            "DataLoader(Indices(24), 4)",
        ),
        (
            "over a torch.utils.data.Subset of it",
            "DataLoader(Indices(24 // world_size + rank), 4)",
            "DataLoader(torch.utils.data.Subset(Indices(24), range(rank, 24, world_size)), 4)",
        ),
    ),
    # ---- the command ----
    met("look_up('torch')", "'torch' does not say where to look", (_PLACE, "torch", "torch:nn")),
    met(
        "look_up('no_such.module:x')",
        "There is no module 'no_such.module' to import from",
        (_PLACE, "no_such.module:x", "torch:nn"),
    ),
    met("look_up('no_such.py:x')", "There is no file no_such.py", (_PLACE, "no_such.py:x", "tests/zoo.py:N")),
    met(
        "_costs(['val=torch:nn'], ['train'])",
        "--cost val=torch:nn is for the loader val, of which there is none",
        ("Give one of these: train", "val=", "train="),
    ),
    # ---- run_ranks ----
    met(
        "def fails(rank, world_size):\n    return 1\nrun_ranks(fails, 0)",
        "run_ranks was called with world_size=0 and timeout=120.0",
        (
            "Pass at least 1 rank and a positive number of seconds",
            "run_ranks(fails, 0)",
            "run_ranks(operator.add, 1, start_method='forkserver')",
        ),
    ),
    met(
        "run_ranks('fn', 1)",
        "run_ranks was given 'fn' (str)",
        ("Pass a function of a module", "'fn', 1", "operator.add, 1, start_method='forkserver'"),
    ),
    met(
        "run_ranks(operator.add, 1, grace=-1, start_method='forkserver')",
        "grace=-1 is not a number of seconds",
        ("Pass one of at least 0", "-1", "0"),
    ),
    met(
        "run_ranks(operator.add, 1, start_method='thread')",
        "start_method='thread' does not exist on this machine",
        ("Pass one of these: fork, spawn, forkserver", "thread", "forkserver"),
    ),
    met(
        "run_ranks(lambda rank, world_size: 0, 1, start_method='forkserver')",
        "and its arguments to other processes, and pickling them raised",
        (
            "Pass a function of a module, by its name, and arguments that can be pickled",
            "lambda rank, world_size: 0",
            "operator.add",
        ),
    ),
    met(
        "run_ranks(operator.truediv, 1, 2, start_method='forkserver')",
        "truediv failed on 1 rank: rank 0 raised",
        ("Correct what the ranks report", "operator.truediv, 1, 2", "operator.truediv, 1"),
    ),
]
