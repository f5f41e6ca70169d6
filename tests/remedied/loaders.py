"""What patching and iterating refuse, or warn of, in a world that is given by hand; ``patch`` passes that."""

from remedied import Met, Untried, met

__all__ = ["KEPT", "OF_LOADERS", "OF_OPTIONS"]

GROUP = "torch.distributed.init_process_group()"

OF_OPTIONS: list[Met] = [
    *(
        met(
            f"loader = patch(over(), {name}={value})",
            f"{name}={value} does not exist",
            (f"Pass one of these: {all_of}", value, first),
        )
        for name, value, all_of, first in [
            ("uneven", "'padd'", "'pad', 'drop', 'keep'", "'pad'"),
            ("order", "['seeded']", "'auto', 'seeded', 'leader'", "'seeded'"),
            ("share", "'by_node'", "'auto', 'samples', 'batches', 'within_batches', 'by_worker'", "'samples'"),
            ("layout", "'runs'", "'interleaved', 'contiguous'", "'contiguous'"),
        ]
    ),
    met(
        "loader = patch(over(), share='within_batches', uneven='drop')",
        "uneven='drop' does not work with share='within_batches'",
        ("Use uneven='pad', whose padding iter_with_weights() weighs 0", "'drop'", "'pad'"),
        ("uneven='keep'", "'drop'", "'keep'"),
    ),
    met(
        "loader = patch(over(), share='within_batches', cost=range(24))",
        "cost= does not work with share='within_batches'",
        ("Use share='samples'", "within_batches", "samples"),
        ("'batches'", "within_batches", "batches"),
        ("leave cost= out", ", cost=range(24)", ""),
    ),
    met(
        "loader = patch(over(), layout='contiguous', cost=range(24))",
        "layout='contiguous' does not work with cost=",
        ("Use one or the other", ", cost=range(24)", ""),
        ("Use one or the other", "layout='contiguous', ", ""),
    ),
    met(
        "loader = patch(over(), seed=-1, **{'order': 'seeded'})",
        "seed=-1 is not a whole number of at least 0",
        ("Pass such an int", "-1", "1"),
        ("None for one that follows from rank 0's torch.initial_seed()", "-1", "None"),
    ),
    met(
        "from datetime import timedelta\nloader = patch(over(), timeout=0)",
        "timeout=0 must be between 0.001 and 1e+08 seconds",
        ("Pass a number of seconds", "=0", "=60"),
        ("a timedelta", "=0", "=timedelta(minutes=1)"),
    ),
    met("loader = patch(over(), rank=float(rank))", "is a float, not an int", ("Pass a whole number", "float", "int")),
    met(
        "loader = patch(over(), rank=1 + rank)",
        "rank=2 is out of range for num_replicas=2: ranks count from 0 to 1",
        ("Pass this process's rank within the group", "1 + rank", "rank"),
    ),
    met(
        "loader = patch(over(), num_replicas=0)",
        "num_replicas=0 is too small",
        ("pass the number of ranks, at least 1", "num_replicas=0", "num_replicas=num_replicas"),
    ),
    met(
        "group()\nloader = patch(over(), num_replicas=None)",
        "rank=0 was given without num_replicas",
        ("Pass both", "None", "1"),
        ("neither to read the process group", ", num_replicas=None", ", num_replicas=None, rank=None"),
    ),
    met(
        "group()\nloader = patch_dataloader_to_ddp(over(), rank=0, num_replicas=1, process_group=dist.group.WORLD)",
        "The ranks were given in 2 ways, by rank= and process_group=",
        ("Pass only one of them", "rank=0, num_replicas=1, ", ""),
        ("Pass only one of them", ", process_group=dist.group.WORLD", ""),
    ),
    met(
        "group()\nloader = patch_dataloader_to_ddp(over(), process_group='dp')",
        "process_group='dp' is a str, no ProcessGroup",
        ("Pass what torch.distributed.new_group() returned", "'dp'", "dist.new_group()"),
        ("leave it out to shard over all ranks", ", process_group='dp'", ""),
    ),
    met(
        "group()\nold = dist.new_group()\ndist.destroy_process_group()\nloader = patch_dataloader_to_ddp(over(), process_group=old)",
        "A process_group was given, and none is initialised",
        (
            f"Call {GROUP} first, and pass a group that was made after it",
            "loader =",
            "group()\nold = dist.new_group()\nloader =",
        ),
    ),
    met(
        "group()\nloader = patch_dataloader_to_ddp(over(), device_mesh='dp')",
        "device_mesh='dp' is a str, no DeviceMesh",
        ("Pass what init_device_mesh() returned", "'dp'", "init_device_mesh('cpu', (1,), mesh_dim_names=('dp',))"),
    ),
    met(
        "group()\nmesh = init_device_mesh('cpu', (1, 1), mesh_dim_names=('pp', 'tp'))\nloader = patch_dataloader_to_ddp(over(), device_mesh=mesh)",
        "The device_mesh has the dimensions ('pp', 'tp')",
        (
            'Pass the sub-mesh of those that do, as device_mesh=mesh["replicate", "shard"]',
            "('pp', 'tp')",
            "('replicate', 'shard')",
            "=mesh)",
            '=mesh["replicate", "shard"])',
        ),
        ("name them dp, dp_replicate, dp_shard or the like", "'pp'", "'dp'"),
    ),
    met(
        "environ['WORLD_SIZE'] = '2'\nloader = patch_dataloader_to_ddp(over())",
        "The environment says WORLD_SIZE=2, but no process group exists",
        (f"Call {GROUP} first", "environ['WORLD_SIZE'] = '2'", "group()"),
        ("pass rank= and num_replicas=", "(over())", "(over(), rank=rank, num_replicas=num_replicas)"),
        ("(or what does so: Fabric.launch(), Accelerator())", Untried("tests/integrations run both")),
        (
            "With Lightning's Trainer, patch in train_dataloader() of the LightningModule or LightningDataModule, which is called when the group exists",
            Untried("tests/integrations/test_lightning.py does"),
        ),
    ),
    met(
        "loader = patch_dataloader_to_ddp(over())",
        "patch_dataloader_to_ddp changed nothing: there is no process group",
        (f"Call {GROUP} first to train on several", "group()\nloader = patch_dataloader_to_ddp(over())"),
        (
            "with Lightning's Trainer, patch in train_dataloader(), which is called when the group exists",
            Untried("as above"),
        ),
    ),
    met(
        "loader = patch(over(), order='leader')",
        "order='leader' needs ranks that communicate",
        (f"Leave these out, after {GROUP}", "group()\nloader = patch_dataloader_to_ddp(over(), order='leader')"),
        ("leave that out", ", order='leader'", ""),
    ),
    met(
        "sampler = DDPSamplerWrapper(range(24), False)\nloader = over(sampler=sampler)",
        "DDPSamplerWrapper does not know which rank of how many it is: there is no process group",
        (f"Call {GROUP} first", "sampler = DDP", "group()\nsampler = DDP"),
        ("pass rank= and num_replicas=", "False)", "False, rank=rank, num_replicas=num_replicas)"),
    ),
    met(
        "sampler = DDPSamplerWrapper(7, **WORLD)",
        "DDPSamplerWrapper was given 7 (int), which cannot be iterated",
        ("Pass a sampler, or any iterable of indices or batches", "7", "range(7)"),
    ),
    met(
        "loader = over(sampler=DDPSamplerWrapper(range(24), 2, **WORLD))",
        "shuffle_samples_between_gpus=2 is a int, neither True nor False",
        ("Pass one of these", "2,", "False,"),
        ("Pass a number of ranks as num_replicas=, with rank=", "2, **WORLD", "num_replicas=2, rank=rank"),
    ),
    met(
        "class Own(SequentialSampler):\n    rank, num_replicas = 0, 2\n    is_ddp_aware = True\n    ok = 1\nloader = over(sampler=DDPSamplerWrapper(Own(range(24)), **WORLD))",
        "DDPSamplerWrapper was given a Own that is, or contains, a sampler which is sharded already (Own)",
        ("Wrap the original sampler instead", "Own(range", "SequentialSampler(range"),
        ("say is_ddp_aware = False in Own if it gives every rank the same", "= True", "= False"),
    ),
    *(
        met(
            f"loader = patch(over({{}}), {given})".replace("{}", ""),
            f"patch_dataloader_to_ddp() has no option {given.partition('=')[0]}",
            (
                f"set it on the DataLoader, as in DataLoader(..., {given}), which keeps it here",
                f"loader = patch(DataLoader(range(24), {given}))",
            ),
        )
        for given in ("shuffle=True", "drop_last=True", "batch_size=4")
    ),
    met(
        "loader = patch(over(), unevn='drop')",
        "patch_dataloader_to_ddp() has no option unevn: did you mean uneven",
        ("Pass uneven=", "unevn", "uneven"),
    ),
    met(
        "group()\nloader = patch_dataloader_to_ddp(over(), world_size=1)",
        "patch_dataloader_to_ddp() has no option world_size",
        (
            "use these: num_replicas, rank, process_group, device_mesh, uneven, layout, order, seed, timeout, share, cost",
            "world_size=1",
            "num_replicas=1, rank=0",
        ),
    ),
    # ---- costs ----
    met(
        "Cost(range(24), of='max')",
        "Cost(..., of='max') does not exist",
        (
            "Pass one of these: 'sum' means that a batch costs the sum of its samples' costs, 'padded' means that it costs the largest of these times their number",
            "max",
            "padded",
        ),
    ),
    met(
        "loader = patch(over(), cost=Cost(range(24), window=0))",
        "Cost(..., window=0) has no step in it",
        ("Pass an int of at least 1", "window=0", "window=1"),
    ),
    met(
        "loader = patch(over(), cost=dict.fromkeys(range(24), 1))",
        "cost= is a dict that cannot be read as numbers",
        (
            "Pass a sequence, array or tensor with one number of at least 0 for each index",
            "dict.fromkeys(range(24), 1)",
            "[1] * 24",
        ),
        ("a function of an index", "dict.fromkeys(range(24), 1)", "lambda index: 1"),
    ),
    met(
        "loader = patch(over(), cost=[-1, *range(23)])",
        "cost= says that item 0 costs -1.0",
        ("A cost is a finite number of at least 0: correct it", "-1", "1"),
    ),
    met(
        "loader = patch(over(), cost=lambda index: None)",
        "cost= gave a value that is not a number",
        ("Return one, at least 0", "None", "index"),
    ),
    met(
        "data = {key: int(key) for key in map(str, range(24))}\nloader = patch(DataLoader(data, 4, sampler=list(data)), cost=range(24))",
        "cost= has one number for each index of the dataset, and the sampler gives item '",
        ("Pass a function of what the sampler gives for one sample", "cost=range(24)", "cost=int"),
    ),
    met(
        "class Data(Indices):\n    __len__ = None\nloader = patch(DataLoader(Data(), 4, sampler=list(range(24))), cost=range(12))",
        "cost= has 12 numbers, and the sampler gives an index beyond them",
        ("Pass one number for each index of the dataset", "cost=range(12)", "cost=range(24)"),
    ),
    met(
        "loader = patch(over(), cost=range(12))",
        "cost= has 12 numbers and range has 24 samples",
        ("Pass one number for each index of loader.dataset, in order", "range(12)", "range(24)"),
    ),
    met(
        "loader = patch(streamed(), cost=range(24))",
        "cost= does not work with an iterable dataset: Source gives samples",
        ("Leave cost= out", ", cost=range(24)", ""),
        ("use a dataset with __getitem__", "streamed", "over"),
    ),
    met(
        "loader = patch(over(sampler=iter(range(24))), cost=range(24))",
        "cost= does not work with a range_iterator, which is an iterator",
        ("Give the loader a sampler that can be iterated again, such as a list", "iter(range(24))", "[*range(24)]"),
    ),
    # ---- shares ----
    met(
        "loader = patch(DataLoader(range(24), batch_sampler=[[*range(12)], [*range(12, 24)]]), share='samples')",
        "share='samples' does not work with a batch sampler of your own",
        ("Use share='batches'", "'samples'", "'batches'"),
        ("leave it out", ", share='samples'", ""),
    ),
    met(
        "class Batches(Source):\n    def __iter__(self):\n        return iter(range(24))\nloader = patch(DataLoader(Batches(), 4), share='batches')",
        "share='batches' does not work with an iterable dataset and batch_size=4",
        (
            "Let the dataset yield whole batches and pass batch_size=None",
            "range(24)",
            "[[*range(at, at + 4)] for at in range(0, 24, 4)]",
            "Batches(), 4",
            "Batches(), batch_size=None",
        ),
        ("leave share out", ", share='batches'", ""),
    ),
    met(
        "loader = patch(over(batch_size=None), share='within_batches')",
        "share='within_batches' does not work with batch_size=None",
        ("Give the loader a batch_size", "None", "4"),
        ("a batch_sampler", "batch_size=None", "batch_sampler=[[*range(12)], [*range(12, 24)]]"),
        ("leave share out", ", share='within_batches'", ""),
    ),
    met(
        "loader = patch(DataLoader(range(24), batch_sampler=[{index: 0 for index in range(at, at + 6)} for at in range(0, 24, 6)]), share='within_batches')",
        "share='within_batches' divides batches of indices, and list yields a dict",
        ("Let it yield lists of indices", "{index: 0 for index in range(at, at + 6)}", "[*range(at, at + 6)]"),
        ("use share='batches'", "within_batches", "batches"),
    ),
    met(
        "class Own(BatchSampler):\n    pass\nloader = patch(DataLoader(range(24), batch_sampler=[[*range(12)], [*range(12, 24)]]), share='within_batches')\nloader.batch_sampler.batch_size = 3",
        "batch_size cannot be set where batches are divided",
        (
            "Build the loader with the new value and patch it again, with restore_loader() if it should resume",
            "\nloader.batch_sampler.batch_size = 3",
            "\nstate = loader_state(loader)\nloader = patch(DataLoader(range(24), batch_sampler=[[*range(12)], [*range(12, 24)]]), share='within_batches')\nrestore_loader(loader, state)",
        ),
    ),
    met(
        "loader = patch(over())\nloader.sampler.rank = 1",
        "rank of a DDPSamplerWrapper cannot be set",
        ("Set attributes there", Untried("it is the wrapped sampler's: test_transparent.py sets them")),
        ("build the loader anew and patch that", "\nloader.sampler.rank = 1", "\nloader = patch(over())"),
    ),
    met(
        "loader = patch(streamed(), layout='contiguous')",
        "layout='contiguous' does not work with Source: an iterable dataset has no indices",
        ("Use order='seeded' and layout='interleaved'", "layout='contiguous'", "order='seeded', layout='interleaved'"),
    ),
    met(
        "loader = patch(streamed(), share='by_worker')",
        "uneven='pad' does not work with share='by_worker' and rank= and num_replicas=",
        (
            "Use uneven='keep' if they may",
            "streamed(), share='by_worker'",
            "streamed(splits=True, num_workers=1), share='by_worker', uneven='keep'",
        ),
        (
            f"leave rank= and num_replicas= out, after {GROUP}",
            "loader = patch(",
            "group()\nloader = patch_dataloader_to_ddp(",
        ),
    ),
    met(
        "loader = patch(DataLoader(range(5), 4, drop_last=True))\ndue = [0, 0, 1, 2, 3, 4]",
        "SequentialSampler has 5 items, of which 2 ranks take 3 each with uneven='pad', and drop_last=True leaves out",
        (
            "Use one of these: fewer ranks",
            "loader = patch(DataLoader(range(5), 4, drop_last=True))\ndue = [0, 0, 1, 2, 3, 4]",
            "loader = over(5, drop_last=True) if rank == 0 else []\ndue = range(4)",
        ),
        ("drop_last=False", "True)", "False)"),
        ("a batch_size of at most 3", "4, drop", "3, drop"),
    ),
    met(
        "loader = patch(over(1), uneven='drop')\ndue = [0]",
        "SequentialSampler has 1 item, of which 2 ranks take 0 each with uneven='drop'",
        ("Use one of these: fewer ranks", "patch(over(1), uneven='drop')", "over(1) if rank == 0 else []"),
        ("uneven='pad'", "'drop'", "'pad'", "[0]", "[0, 0]"),
    ),
]

# Loaders that cannot be copied, or are none.
_OWN = """
class Own(DataLoader):
    running = None
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.running = super().__iter__()
    def __iter__(self):
        return self.running
"""
KEPT = """
class Own(DataLoader):
    running = None
    def __iter__(self):
        self.running = super().__iter__() if self.running is None else self.running
        yield from self.running
        self.running = None
"""
_OUTER = """
class Outer:
    def __init__(self, loader):
        self.loader, self.batches = loader, None
    def __iter__(self):
        yield from self.loader if self.batches is None else self.batches
        self.batches = None
inner = over()
outer = Outer(inner)
"""
_BEGUN = "outer.batches = iter(outer.loader)\n"
_KNOWS = (
    "needs a torch.utils.data.DataLoader and got a Outer, which wraps one: only the loader inside knows its dataset"
)
_TORCHS = "Use a DataLoader", Untried("another class")

OF_LOADERS: list[Met] = [
    met(
        _OUTER + "loader = patch(outer)",
        "patch_dataloader_to_ddp " + _KNOWS,
        (
            "Patch it before the Outer is made of it: Outer(patch_dataloader_to_ddp(loader), ...)",
            "patch(outer)",
            "Outer(patch(inner))",
        ),
        (
            "where outer is a Outer that was not iterated yet: outer.loader = patch_dataloader_to_ddp(outer.loader)",
            "loader = patch(outer)",
            "outer.loader = patch(outer.loader)\nloader = outer",
        ),
    ),
    met(
        _OUTER + _BEGUN + "loader = patch(outer)",
        "patch_dataloader_to_ddp " + _KNOWS,
        (
            "Patch it before the Outer is made of it: Outer(patch_dataloader_to_ddp(loader), ...)",
            "patch(outer)",
            "Outer(patch(inner))",
        ),
        ("This one keeps an iterator (attribute 'batches'), which would go on with unsharded data", Untried("a fact")),
    ),
    met(
        _OUTER + "outer = Outer(patch(inner))\nloader_state(outer)",
        "loader_state " + _KNOWS,
        (
            "Pass that one, where outer is the Outer: loader_state(outer.loader, ...)",
            "loader_state(outer)",
            "loader_state(outer.loader)",
        ),
    ),
    met(
        "loader = patch(range(24))",
        "patch_dataloader_to_ddp needs a torch.utils.data.DataLoader and got range(0, 24) (range)",
        ("Pass the finished loader itself", "range(24)", "over()"),
        (
            "For a loader of another package, build torch's over the same dataset",
            "range(24)",
            "DataLoader(range(24), 4)",
        ),
        (
            "DataLoader(dataset, batch_size=None) over an IterableDataset whose __iter__ returns iter(loader)",
            "loader =",
            "class Around(IterableDataset):\n    def __iter__(self):\n        return iter(range(24))\nloader =",
            "patch(range(24))",
            "patch(DataLoader(Around(), batch_size=None))",
        ),
    ),
    met(
        "check_loaders_is_patched({'a': [None]})",
        "Found None (NoneType) at loaders['a'][0]",
        ("Leave it out", "[None]", "patch(over())"),
        ("pass the loader itself", "None", "patch(over())"),
    ),
    met(
        _OUTER + "outer = Outer(patch(inner))\nassert check_loaders_is_patched([outer])",
        "(Outer) at loaders[0] where a DataLoader or a list, tuple or dict of them was expected",
        ("Pass what it wraps: loaders[0].loader", "patched([outer])", "patched([[outer][0].loader])"),
    ),
    met(
        "check_loaders_is_patched([[], patch(over())])",
        "Found an empty list at loaders[0]",
        ("Pass the loaders", "[]", "[patch(over())]"),
        ("leave it out", "[], ", ""),
    ),
    met(
        "inner = over()\nassert_loaders_patched({'val': inner})",
        "Every rank would get all data from 1 of 1 loaders: loaders['val']",
        ("Pass each through patch_dataloader_to_ddp() on every rank", "over()", "patch(over())"),
    ),
    met(
        "PatchedLoader(range(3))",
        "PatchedLoader is a type for annotations",
        (
            "Call patch_dataloader_to_ddp(loader) to get one",
            "loader = patch(over())\nassert isinstance(loader, PatchedLoader)",
        ),
    ),
    met(
        "state_dict = patch(over()).state_dict\nstate_dict()",
        "A patched loader was used after the loader itself is gone",
        ("Keep what patch_dataloader_to_ddp() returned, and use that", "loader = patch(over())\nloader.state_dict()"),
    ),
    met(
        "class Own(DataLoader):\n    def __copy__(self):\n        raise TypeError('there is one of each')\nloader = patch(Own(range(24), 4))",
        "Own cannot be patched: copying it raised TypeError: there is one of each",
        (
            "Let its __copy__",
            "raise TypeError('there is one of each')",
            "new = object.__new__(Own)\n        vars(new).update(vars(self))\n        return new",
        ),
        (
            "__reduce_ex__ make a shallow copy",
            "__copy__(self)",
            "__reduce_ex__(self, protocol)",
            "raise TypeError('there is one of each')",
            "return object.__reduce_ex__(self, protocol)",
        ),
        (
            "build the loader with a DDPSamplerWrapper as its sampler",
            "patch(Own(range(24), 4))",
            "Own(range(24), 4, sampler=DDPSamplerWrapper(range(24), False, **WORLD))",
        ),
    ),
    met(
        "class Own(DataLoader):\n    batch_sampler = property(lambda self: BatchSampler(self.sampler, 4, False), lambda self, new: None)\nloader = patch(Own(range(24), 4))",
        "Own cannot be patched: its class computes the attribute 'batch_sampler'",
        (
            "Store it as DataLoader does",
            "    batch_sampler = property(lambda self: BatchSampler(self.sampler, 4, False), lambda self, new: None)",
            "    pass",
        ),
        (
            "build the loader with a DDPSamplerWrapper as its sampler",
            "patch(Own(range(24), 4))",
            "Own(range(24), 4, sampler=DDPSamplerWrapper(range(24), False, **WORLD))",
        ),
    ),
    met(
        _OUTER.replace("Outer:", "Outer:\n    dataset = sampler = batch_sampler = None") + "loader = patch(outer)",
        "Outer cannot be patched: it is a framework's wrapper around a DataLoader",
        ("Patch the loader first, and hand the patched one to the framework", "patch(outer)", "Outer(patch(inner))"),
        (
            "where outer is a Outer that was not iterated yet: outer.loader = patch_dataloader_to_ddp(outer.loader)",
            "loader = patch(outer)",
            "outer.loader = patch(outer.loader)\nloader = outer",
        ),
    ),
    met(
        "class Own(DataLoader):\n    def __iter__(self):\n        for start in range(0, len(self.dataset), 4):\n            yield self.dataset[start : start + 4]\n"
        "class Rows(list):\n    pass\nloader = patch(Own(torch.arange(24), 4))",
        "Own cannot be patched: its __iter__ reads Tensor without loader.sampler and loader.batch_sampler",
        (
            "Let it draw from one of these",
            "for start in range(0, len(self.dataset), 4):\n            yield self.dataset[start : start + 4]",
            "for batch in self.batch_sampler:\n            yield self.dataset[batch]",
        ),
        (
            "from super().__iter__()",
            "for start in range(0, len(self.dataset), 4):\n            yield self.dataset[start : start + 4]",
            "yield from super().__iter__()",
        ),
        ("use a DataLoader", "patch(Own(", "patch(DataLoader("),
    ),
    met(
        "class Own(DataLoader):\n    def __init__(self, inner):\n        super().__init__(inner.dataset, 4)\n        self.inner = inner\n    def __iter__(self):\n        return iter(self.inner)\n"
        "inner = over()\nloader = patch(Own(inner))",
        "Own cannot be patched: its __iter__ may take batches from another loader (attribute 'inner')",
        ("Patch that loader first, and pass the patched one to Own", "patch(Own(inner))", "Own(patch(inner))"),
    ),
    met(
        KEPT + "first = Own(range(24), 4)\nnext(iter(first))\nloader = patch(first)",
        "Own cannot be patched: it keeps a running iterator (attribute 'running')",
        ("Patch the loader before you iterate it", "next(iter(first))", ""),
        ("forget the iterator: loader.running = None", "loader =", "first.running = None\nloader ="),
        (
            "Where the class needs it, build it with a sharded sampler, Own(dataset, sampler=DDPSamplerWrapper(sampler, False), ...)",
            "patch(first)",
            "Own(range(24), 4, sampler=DDPSamplerWrapper(range(24), False, **WORLD))",
        ),
        (
            "use a DataLoader with persistent_workers=True",
            "patch(first)",
            "patch(over(num_workers=1, persistent_workers=True))",
        ),
    ),
    met(
        _OWN + "loader = patch(Own(range(24), 4))",
        "or its class starts one when it is made",
        ("Patch the loader before you iterate it", Untried("above: this one begins it when it is made")),
        ("forget the iterator: loader.running = None", Untried("as above")),
        (
            "Where the class needs it, build it with a sharded sampler, Own(dataset, sampler=DDPSamplerWrapper(sampler, False), ...)",
            "patch(Own(range(24), 4))",
            "Own(range(24), 4, sampler=DDPSamplerWrapper(range(24), False, **WORLD))",
        ),
        (
            "use a DataLoader with persistent_workers=True",
            "patch(Own(range(24), 4))",
            "patch(over(num_workers=1, persistent_workers=True))",
        ),
    ),
    met(
        "class Own(IterableDataset):\n    def __iter__(self):\n        return iter(range(24))\n"
        "class StreamingDataLoader(DataLoader):\n    __module__ = 'litdata.streaming.dataloader'\n"
        "first = StreamingDataLoader(Own(), 4)\nloader = patch(first)",
        "StreamingDataLoader cannot be patched: it takes only litdata's own datasets, not one that shards a Own",
        (
            "litdata shards a Own by itself if the process group exists when it is made: make it, and the StreamingDataLoader, after init_process_group()",
            Untried("test_sharded_by_frameworks.py does"),
        ),
        (
            "For an explicit world, patch torch's loader of it: torch.utils.data.DataLoader(loader.dataset, batch_size=loader.batch_size, num_workers=loader.num_workers, collate_fn=loader.collate_fn)",
            "loader = patch(first)",
            "loader = first\nloader = patch(torch.utils.data.DataLoader(loader.dataset, batch_size=loader.batch_size, num_workers=loader.num_workers, collate_fn=loader.collate_fn))",
        ),
    ),
    *(
        met(
            f"first = over(num_workers=1)\n{line}\nloader = patch(first)",
            "DataLoader with num_workers=1 cannot be patched: its workers are threads",
            ("Use num_workers=0", "num_workers=1", "num_workers=0"),
            ("processes: multiprocessing_context='spawn'", Untried("torch's own, and slow to start")),
            ("worker_method='multiprocessing'", line, "first.worker_method = 'multiprocessing'"),
            ("with MONAI, use_thread_workers=False", Untried("its loader is then torch's")),
        )
        for line in ("first.worker_method = 'thread'",)
    ),
    met(
        "class Part(Source):\n    _distributed = 'rank 0 of 2'\nloader = patch(DataLoader(Part(24), 4))",
        "Part was split by split_dataset_by_node() already",
        (
            "Patch a loader of the whole dataset, without that call",
            "_distributed = 'rank 0 of 2'",
            "_distributed = None",
        ),
    ),
    met(
        "first = patch(over())\nloader = patch(first, rank=0, num_replicas=3)",
        "The loader is sharded already by a DDPSamplerWrapper for rank",
        ("Patch the original loader instead", "patch(first, rank=0, num_replicas=3)", "patch(over())"),
        (
            "build it for rank 0 of 3",
            "first = patch(over())",
            "first = patch(over(), rank=0, num_replicas=3)\ndue = [*range(0, 24, 3)] * 2",
        ),
    ),
    met(
        "class Rows(Dataset):\n    def __init__(self, stream):\n        self.stream, self.items = stream, iter(stream)\n    def __len__(self):\n        return 24\n"
        "    def __getitem__(self, index):\n        return next(self.items)\ndataset = Rows(Source(24))\nloader = patch(DataLoader(dataset, 4))",
        "Rows cannot be shared by its indices: Rows.__getitem__ ignores its index, and takes what comes next from a Source",
        (
            "Give the loader the iterable dataset itself, DataLoader(dataset.stream, ...) without a sampler, and it is shared item by item",
            "DataLoader(dataset,",
            "DataLoader(dataset.stream,",
        ),
    ),
    met(
        "class Rows(Dataset):\n    def __init__(self):\n        self.items = iter(range(24))\n    def __len__(self):\n        return 24\n"
        "    def __getitem__(self, index):\n        return next(self.items)\nloader = patch(DataLoader(Rows(), 4))",
        "Rows.__getitem__ ignores its index, and takes what comes next from a range_iterator",
        (
            "Make it an IterableDataset that yields these items",
            "patch(DataLoader(Rows(),",
            "patch(DataLoader(Source(24),",
        ),
        ("let __getitem__ return the item of its index", "next(self.items)", "[*range(24)][index]"),
    ),
    met(
        "class Rows(Indices):\n    rank, world_size = 0, 2\n    def __init__(self, n):\n        self.n, self.rank, self.world_size = n, rank, 2\nloader = patch(DataLoader(Rows(24), 4))",
        "Rows stores that it is for rank 0 of 2, so it counts as sharded",
        (
            "Say is_ddp_aware = False in its class if it gives every rank the same",
            "rank, world_size = 0, 2",
            "is_ddp_aware = False",
        ),
        (
            "True if it shards",
            "rank, world_size = 0, 2",
            "is_ddp_aware = True\n    def __getitem__(self, index):\n        return 2 * index + self.rank",
            "Rows(24)",
            "Rows(12)",
        ),
    ),
    met(
        "class Own(DataLoader):\n    def __len__(self):\n        return 6\nloader = patch(Own(range(24), 4))",
        "len() of the Own says 6 after the patch, and each rank gets 3 batches",
        ("Leave __len__ out of Own", "def __len__(self):\n        return 6", "pass"),
        ("compute it from len(self.batch_sampler)", "6", "len(self.batch_sampler)"),
    ),
    met(
        "class Same:\n    def __repr__(self):\n        return 'key'\nfirst, second = Same(), Same()\npatch({first: over(), second: over()})",
        "Several loaders would be called the same in errors (loaders[key])",
        ("Use strings as keys", "first, second = Same(), Same()", "first, second = 'first', 'second'"),
    ),
    met(
        "class Nest(dict):\n    def __deepcopy__(self, memo):\n        return Nest()\nfound = patch(Nest(a=over()))\nloader = found['a']",
        "The Nest of loaders cannot be returned with patched ones in it",
        ("Pass a list, tuple or dict of the loaders", "Nest(a=over())", "dict(a=over())"),
    ),
    # ---- with replicas that come and go ----
    met(
        "Elastic(streamed(), share='by_worker')",
        "share='by_worker' does not work with replicas that come and go",
        ("Leave share out", ", share='by_worker'", ""),
    ),
    met(
        "Elastic(over(), uneven='keep')",
        "uneven='keep' does not work with replicas",
        ("Use 'pad'", "keep", "pad"),
        ("share='within_batches'", "uneven='keep'", "share='within_batches'"),
    ),
    met(
        "Elastic(over(), layout='contiguous')",
        "layout='contiguous' does not work with replicas",
        ("Leave layout out", ", layout='contiguous'", ""),
    ),
    met(
        "Elastic(over(sampler=DistributedSampler(range(24), 2, rank)))",
        "The DataLoader is sharded already, by a DistributedSampler, for a number of replicas that will change",
        ("Pass the loader without what shards it", "sampler=DistributedSampler(range(24), 2, rank)", ""),
    ),
    met(
        "from repeaters import MultiEpochs\nElastic(MultiEpochs(range(24), 4))",
        "The MultiEpochs has one iterator for all epochs",
        ("Use a DataLoader that makes a new iterator for each pass", "MultiEpochs(range", "DataLoader(range"),
    ),
    met(
        "Elastic(DataLoader(Source(3), 4, drop_last=True)).batch(0, 0, 2)",
        "An epoch of the DataLoader has no batch for 2 replicas",
        ("Give it more samples", "3", "8"),
        ("a smaller batch_size", "4", "1"),
    ),
]
