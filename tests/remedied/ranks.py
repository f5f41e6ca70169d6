"""What two real ranks tell each other; ``job`` is a rank, as tests/jobs.py has it, of 48 samples."""

from remedied import Met, Untried, met

__all__ = ["OF_RANKS"]

_TRAIN = "\njob.train(loader)"
_OWN_ROWS = (
    "class Own(users.Rows):\n    pass\nloader = job.patch(DataLoader(Own(range({}, 48, job.world)), 4))" + _TRAIN
)
_STREAM = """
class Stream(IterableDataset):
    shift = 0
    def __iter__(self):
        rows = [*range(48)]
        yield from rows
"""
_SPLITS = """
class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        rows = [*range(48)]
        yield from rows[info.id :: info.num_workers]
"""
_BY_WORKER = "loader = job.patch(DataLoader(Stream(), 4, num_workers=1), share='by_worker')" + _TRAIN
_LOOKS = (
    "Look at a batch on every rank",
    "iterate the unpatched loader",
    "call loader.set_epoch(N) with the same N on every rank before the epoch",
)
_AT_ONE_POINT = "Every rank must get here, at the same point of the script"
_FAILS = """
class Own(users.Rows):
    is_bad = True
    def __getitem__(self, index):
        if index == 9 and self.is_bad:
            raise LookupError('unreadable')
        return index
loader = job.patch(DataLoader(Own(), 4))
"""
_TOLD = (
    _FAILS
    + """
epoch = job.begin(is_part=True, is_uneven=True)
told, batches = torch.zeros(1), iter(loader)
while not told:
    try:
        epoch.take(next(batches))
    except LookupError:
        told += 1
    dist.all_reduce(told)
Own.is_bad = False
loader.set_epoch(1)
job.train(loader)
"""
)
_MISSING = "tests/ranks/test_faults_ranks.py ends ranks"
_ELSEWHERE = "another program: see {}"

OF_RANKS: list[Met] = [
    # ---- at the patch ----
    met(
        _OWN_ROWS.format("job.rank"),
        "have different samples at the same indices: they differ in",
        (
            "Patch a loader of the whole dataset: without split_dataset_by_node(), shard() or data[rank::world_size]",
            "job.rank, 48, job.world",
            "48",
        ),
        (
            "with random_split(), shuffle(), listed files and random data made alike on every rank",
            "job.rank, 48, job.world",
            "48",
        ),
        (
            "If you want each rank to have its own part, leave out a DistributedSampler, and say is_ddp_aware = True in the dataset's class: its loader is left as it is",
            "pass",
            "is_ddp_aware = True",
        ),
        (
            "If only the content differs, order='seeded' does not compare it",
            "job.rank, 48, job.world)), 4",
            "48), job.rank), 4, collate_fn=list",
            "(users.Rows)",
            "(users.Rows)",
            "pass",
            "def __init__(self, rows, seed):\n        super().__init__(rows)\n        self.noise = [seed] * 48",
            "4, collate_fn=list)",
            "4), order='seeded'",
        ),
    ),
    met(
        "loader = job.patch(DataLoader(users.Rows(range(48 + job.rank)), 4))" + _TRAIN,
        "have different lengths",
        (
            "Patch a loader of the whole dataset: without split_dataset_by_node(), shard() or data[rank::world_size]",
            "48 + job.rank",
            "48",
        ),
        (
            "with random_split(), shuffle(), listed files and random data made alike on every rank",
            "48 + job.rank",
            "48",
        ),
        (
            "If you want each rank to have its own part, leave out a DistributedSampler, and say is_ddp_aware = True in the dataset's class: its loader is left as it is",
            Untried("above"),
        ),
        ("If only the content differs, order='seeded' does not compare it", Untried("above")),
    ),
    met(
        "data = users.Rows()\nloader = job.patch(DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0, shuffle=False)))"
        + _TRAIN,
        "the loaders are sharded already, but not for these 2 ranks",
        ("Build each rank's sampler or dataset for its own rank", "2, 0", "2, job.rank"),
        (
            "pass the process_group= or device_mesh= that it was made for",
            Untried("that takes four ranks: test_sharded_already_ranks.py"),
        ),
    ),
    met(
        "class Own(users.Rows):\n    def __len__(self):\n        return 24\nloader = job.patch(DataLoader(users.Rows(), 4, sampler=[*range(48)], drop_last=job.rank == 1))"
        + _TRAIN,
        "the ranks differ, so their shards would overlap or their steps would not be equal",
        ("Make these the same on every rank", "job.rank == 1", "False"),
        ("call and iterate the same loaders on each", "job.rank == 1", "True"),
    ),
    met(
        "loader = job.patch(DataLoader(users.Rows(), 4), uneven='pad' if job.rank == 0 else 'padd')" + _TRAIN,
        "not every rank could continue",
        ("Correct the error above and start all ranks again", "'padd'", "'pad'"),
        ("Pass one of these: 'pad', 'drop', 'keep'", "'padd'", "'pad'"),
    ),
    met(
        "loader = job.patch(DataLoader(users.Rows(), 4))\nif job.rank == 0:\n    job.patch(DataLoader(users.Rows(), 4))\n"
        "restore_loader(loader, loader_state(loader))" + _TRAIN,
        'rank 1 at "Restoring a loader\'s state". Every rank must get here, at the same point of the script',
        ("Look for what these ranks do instead (a caught error, an if rank == 0)", "if job.rank == 0", "if True"),
    ),
    met(
        "class Own(SequentialSampler):\n    def __iter__(self):\n        raise LookupError('gone')\nloader = job.patch(DataLoader(users.Rows(), 4, sampler=Own(users.Rows())), order='leader')"
        + _TRAIN,
        "Rank 0 draws for all ranks, and its sampler raised LookupError('gone')",
        ("See the error of that rank", "raise LookupError('gone')", "return iter(range(48))"),
    ),
    met(
        "pair = dist.new_group([0])\nloader = job.patch(DataLoader(users.Rows(), 4), process_group=pair)\njob.train(loader) if job.rank == 0 else job.begin(range(48)) and None",
        "is not in the given process_group, so it has no shard",
        ("Call this on its ranks only", Untried("the other rank has no loader then")),
        (
            "pass one that this rank belongs to",
            "pair = dist.new_group([0])\nloader = job.patch(DataLoader(users.Rows(), 4), process_group=pair)\njob.train(loader) if job.rank == 0 else job.begin(range(48)) and None",
            "loader = job.patch(DataLoader(users.Rows(), 4), process_group=dist.new_group([0, 1]))" + _TRAIN,
        ),
    ),
    met(
        "loader = job.patch(DataLoader(users.Rows(), 4), rank=0, num_replicas=2)" + _TRAIN,
        "rank= and num_replicas= contradict the process group",
        ("Leave rank= and num_replicas= out", ", rank=0, num_replicas=2", ""),
        (
            "pass torch.distributed.get_rank() and get_world_size()",
            "rank=0, num_replicas=2",
            "rank=torch.distributed.get_rank(), num_replicas=torch.distributed.get_world_size()",
        ),
        ("LOCAL_RANK repeats on every node", Untried("a fact")),
    ),
    met(
        "loader = job.patch(DataLoader(users.Rows(), 4), rank=job.rank, num_replicas=3)" + _TRAIN,
        "num_replicas=3 was given in a process group of 2 ranks",
        ("Leave rank= and num_replicas= out", ", rank=job.rank, num_replicas=3", ""),
        ("simulate other worlds without a process group", Untried("as all tables but this one do")),
    ),
    met(
        _SPLITS
        + "first = job.patch(DataLoader(Stream(), 4, num_workers=1), share='by_worker')\nloader = copy.copy(first)"
        + _TRAIN,
        "A shallow copy of this patched loader cannot be iterated",
        ("Iterate what patch_dataloader_to_ddp() returned", "copy.copy(first)", "first"),
        ("use copy.deepcopy()", "copy.copy", "copy.deepcopy"),
    ),
    # ---- passes ----
    met(
        "class Own(SequentialSampler):\n    pass\n    def __len__(self):\n        return 48\n    rng = random.Random(time.time_ns())\n    def __iter__(self):\n        return iter(self.rng.sample(range(48), 48))\n"
        "loader = job.patch(DataLoader(users.Rows(), 4, sampler=Own(range(48))), order='seeded')\njob.train(loader, epochs=3)",
        "gave each its own, of which each rank keeps its shard",
        ("Make its order alike on every rank: seed what it draws from", "time.time_ns()", "5"),
        ("give it the same data (weights, indices, sorted files)", Untried("that is the same as to seed it")),
        (
            'if it learns from losses, let it learn from all ranks\' ("Samplers that learn" in docs/samplers.md)',
            Untried("the page's code is a test"),
        ),
        ("patch with order='leader', and rank 0 draws for all", "order='seeded'", "order='leader'"),
        ("If it gives each rank a part, build it for one process", "random.Random(time.time_ns())", "random.Random(5)"),
        (
            "say is_ddp_aware = True in it",
            "pass",
            "is_ddp_aware = True",
            "iter(self.rng.sample(range(48), 48))",
            "iter(range(job.rank, 48, 2))",
            "return 48",
            "return 24",
        ),
    ),
    met(
        "costs = random.Random(job.rank).sample(range(48), 48)\nloader = job.patch(DataLoader(users.Rows(), 4, shuffle=True), cost=lambda index: costs[index])\njob.train(loader, epochs=2)",
        "or cost= said something else of an item on each",
        ("Let the cost of an item follow from the item alone", "costs[index]", "index"),
        ("draw the order from a generator that is seeded alike", "random.Random(job.rank)", "random.Random(0)"),
    ),
    met(
        "loader = job.patch(DataLoader(users.Rows(), 4, shuffle=True))\njob.train(loader)\nloader.set_epoch(job.rank + 1)\njob.train(loader)\njob.train(loader)",
        "the ranks make different passes: pass 1 is over epoch",
        (_LOOKS[0], "loader.set_epoch(job.rank + 1)", "next(iter(loader))"),
        (_LOOKS[1], "loader.set_epoch(job.rank + 1)", "next(iter(DataLoader(users.Rows(), 4)))"),
        (_LOOKS[2], "job.rank + 1", "1"),
        (
            "Restore a state on every rank or on none",
            "loader.set_epoch(job.rank + 1)",
            "restore_loader(loader, loader_state(loader))",
        ),
    ),
    met(
        "loader = job.patch(DataLoader(users.Rows(), 4))\nfor _ in range(2):\n    for _ in job.step(job.begin(is_part=True, is_uneven=True), loader, 3 if job.rank == 1 else 6):\n        pass",
        "rank 1 left epoch 0 after 3 batches",
        (
            "Let every rank break after the same batch: all-reduce the decision to stop",
            "3 if job.rank == 1 else 6",
            "3",
        ),
        (_LOOKS[0], "3 if job.rank == 1 else 6", "1"),
        (
            _LOOKS[1],
            "loader, 3 if job.rank == 1 else 6",
            "loader, 3",
            "for _ in range(2)",
            "next(iter(DataLoader(users.Rows(), 4)))\nfor _ in range(2)",
        ),
        (_LOOKS[2], "3 if job.rank == 1 else 6", "3", "    for _ in job", "    loader.set_epoch(0)\n    for _ in job"),
    ),
    met(
        "first, loader = job.patch([DataLoader(users.Rows(), 4), DataLoader(users.Rows(), 4)])\nif job.rank == 0:\n    [*first]\njob.train(loader, epochs=2)",
        "the ranks had made different numbers of passes over their other loaders",
        ("Iterate each patched loader on every rank", "if job.rank == 0:\n    [*first]", "[*first]"),
        ("on one rank, the loader that was not patched", "    [*first]", "    [*DataLoader(users.Rows(), 4)]"),
    ),
    met(
        "data = users.Rows()\nloader = job.patch(DataLoader(data, 4))\nfor epoch in range(3):\n    random.Random(job.rank).shuffle(data.rows)\n    job.train(loader)",
        "differ at the same indices, in",
        (
            "Make changes of the data alike on every rank: seed shuffles by the epoch",
            "Random(job.rank)",
            "Random(epoch)",
        ),
        ("sort files", "random.Random(job.rank).shuffle(data.rows)", "data.rows.sort()"),
        (
            "If only the content differs, order='seeded' does not compare it",
            "DataLoader(data, 4)",
            "DataLoader(data, 4), order='seeded'",
            "Random(job.rank)",
            "Random(epoch)",
        ),
    ),
    met(
        _STREAM
        + "loader = job.patch(DataLoader(Stream(), 4))\nif job.rank == 1:\n    Stream.__iter__ = lambda self: iter([*range(40)])"
        + _TRAIN,
        "Stream",
        (
            "Give each of its shuffles a seed, the same on every rank, and sort files (webdataset's shards: detshuffle=True, seed=0; its samples: .shuffle(1000, seed=0))",
            Untried("below, and in tests/integrations"),
        ),
        (
            "Let it give every rank everything, and skip unreadable items on every rank or none",
            "range(40)",
            "range(48)",
        ),
        ("If only augmentation, or the folder of the files, differs, give items a string '__key__'", Untried("below")),
        (
            "If it gives each rank its own part on purpose, set is_ddp_aware = True in its class: its loader is left as it is",
            Untried("below"),
        ),
    ),
    met(
        _STREAM.replace("yield from", "random.Random(job.rank).shuffle(rows)\n        yield from")
        + "loader = job.patch(DataLoader(Stream(), 4))"
        + _TRAIN,
        "Each rank keeps its shard of what should be one stream of Stream, so samples are lost",
        (
            "Give each of its shuffles a seed, the same on every rank, and sort files (webdataset's shards: detshuffle=True, seed=0; its samples: .shuffle(1000, seed=0))",
            "Random(job.rank)",
            "Random(0)",
        ),
        (
            "Let it give every rank everything, and skip unreadable items on every rank or none",
            "random.Random(job.rank).shuffle(rows)",
            "pass",
        ),
        (
            "If only augmentation, or the folder of the files, differs, give items a string '__key__'",
            "yield from rows",
            "yield from ({'__key__': str(row), 'id': row} for row in rows)",
            "Random(job.rank)",
            "Random(0)",
        ),
        (
            "If it gives each rank its own part on purpose, set is_ddp_aware = True in its class: its loader is left as it is",
            "shift = 0",
            "is_ddp_aware = True",
            "[*range(48)]",
            "[*range(job.rank, 48, 2)]",
        ),
    ),
    met(
        _SPLITS.replace("    def __iter__", "    part = 0\n    def __iter__").replace(
            "rows = [*range(48)]", "rows = [*range(48)]\n        dist.get_rank()"
        )
        + _BY_WORKER,
        "Stream cannot be read with share='by_worker': it asked for its rank by its first item",
        (
            "Let it split itself by get_worker_info() alone, which counts the workers of all ranks",
            "dist.get_rank()",
            "pass",
        ),
        (
            "If it asks for another reason, such as a log, say is_ddp_aware = False in its class",
            "part = 0",
            "is_ddp_aware = False",
        ),
        (
            "if it should go on to shard itself, say True: its loader is left as it is",
            "part = 0",
            "is_ddp_aware = True",
            "rows[info.id :: info.num_workers]",
            "rows[job.rank :: 2]",
        ),
    ),
    met(
        _SPLITS.replace("rows[info.id :: info.num_workers]", "rows[info.id // 2 :: info.num_workers // 2]")
        + "loader = job.patch(DataLoader(Stream(), 4, num_workers=1), share='by_worker')\njob.train(loader, epochs=3)",
        "splits itself by get_worker_info(), which counts the workers of all ranks",
        (
            "Let it take what its worker's id and num_workers say, of one list in the same order on every rank",
            "rows[info.id // 2 :: info.num_workers // 2]",
            "rows[info.id :: info.num_workers]",
        ),
        (
            "leave share out, and each rank keeps its share of one stream",
            ", share='by_worker'",
            "",
            "rows[info.id // 2 :: info.num_workers // 2]",
            "rows",
        ),
    ),
    met(
        _SPLITS.replace("48", "1")
        + "loader = job.patch(DataLoader(Stream(), 4, num_workers=1), share='by_worker', uneven='drop')\njob.train(loader, range(1), is_uneven=True, padding=1)",
        "A rank would make no step in an epoch: a step needs a batch for each of 2 ranks, all workers together made 1",
        ("Use one of these: uneven='pad'", "'drop'", "'pad'"),
        ("uneven='keep'", Untried("then the ranks make unequal steps, and these meet in each")),
        ("a number of ranks of at most 1", Untried("these are two")),
    ),
    met(
        "loader = job.patch(DataLoader(users.Rows(), 4))\nepoch = job.begin(is_part=True)\nfor step, (batch, _) in enumerate(iter_with_weights(loader, weight_of=torch.ones_like)):\n"
        "    epoch.take(batch)\n    if step == 1 and job.rank == 1:\n        break",
        "rank 1 left this pass after 2 batches, and others ask for more",
        ("Let every rank take equally many batches: break after the same one on all", " and job.rank == 1", ""),
        ("iterate to the end", "break", "pass"),
    ),
    met(
        _FAILS + "try:\n    job.train(loader)\nexcept LookupError:\n    job.train(loader)",
        "ended by an error, raised in place of batch 1 (from 0). The script caught it",
        ("Correct what raised the error", "raise LookupError('unreadable')", "return index"),
        (
            "let it end the training: all ranks then resume from a checkpoint",
            Untried("tests/ranks/test_checkpoints_ranks.py does"),
        ),
        (
            "tell the other ranks of it in that step, and call loader.set_epoch(N) with the same N on every rank, which leaves out the rest of the epoch",
            _TOLD,
        ),
    ),
    met(
        _FAILS
        + "epoch = job.begin(is_part=True)\ntry:\n    for _ in job.step(epoch, loader):\n        pass\nexcept LookupError:\n    pass\nOwn.is_bad = False\nloader.set_epoch(3)\njob.train(loader, epochs=2)",
        "rank 1 was given an error in epoch 0 after 1 batch; rank 0 took more of it",
        ("Let the error end the training", Untried("then it has ended")),
        ("tell all ranks of it", _TOLD),
    ),
    met(
        _STREAM
        + "class Aware(Stream):\n    is_ddp_aware = True\n    def __iter__(self):\n        for row in range(job.rank, 48, 2)[: 24 - 12 * job.rank]:\n            time.sleep(0.01)\n            yield row\n"
        "loader = job.patch(DataLoader(Aware(), 4))\nepoch = job.begin(is_part=True, is_uneven=True)\n[epoch.take(batch) for batch in loader]",
        "The loader counts as sharded already by Aware. Ranks that synchronise in each step would wait for each other forever",
        ("Give every rank equally many batches", "- 12 * job.rank", ""),
        ("pass uneven='keep', if ranks may make unequal steps", "4))\nepoch", "4), uneven='keep')\nepoch"),
    ),
    met(
        "class Own(SequentialSampler):\n    pass\n    def __init__(self):\n        self.rank, self.world_size, self.taken = job.rank, job.world, range(48)\n    def __len__(self):\n        return len(self.taken)\n"
        "    def __iter__(self):\n        return iter(self.taken)\nsampler = Own()\nloader = job.patch(DataLoader(users.Rows(), 4, sampler=sampler))\njob.train(loader, epochs=2)",
        "The loader counts as sharded already by Own",
        (
            "Give it this rank, the number of ranks, and the same seed and epoch on every rank",
            "sampler = Own()",
            "sampler = Own()\nsampler.taken = range(job.rank, 48, job.world)",
        ),
        (
            "If Own gives every rank the same, say is_ddp_aware = False in its class, and this package shards it",
            "pass",
            "is_ddp_aware = False",
        ),
    ),
    met(
        "with guarded():\n    loader = DataLoader(users.Rows(), 4)\n    job.train(loader)",
        "that is not sharded, so every rank gets all of its data. It was made at",
        (
            "Pass it through patch_dataloader_to_ddp() there",
            "DataLoader(users.Rows(), 4)",
            "job.patch(DataLoader(users.Rows(), 4))",
        ),
        (
            "If its sampler or dataset shards by itself, set is_ddp_aware = True in that class",
            "DataLoader(users.Rows(), 4)",
            "DataLoader(users.Rows(), 4, sampler=Own(range(48)))",
            "with",
            "class Own(SequentialSampler):\n    is_ddp_aware = True\n    def __iter__(self):\n        return iter(range(job.rank, 48, 2))\n    def __len__(self):\n        return 24\nwith",
        ),
    ),
]
