"""The private names of torch that are used: of loaders, workers, process groups. A missing name is a clear error.

The names were seen in torch 2.4.0, 2.13.0 and 2.15.0, and in torchdata 0.11.0, whose loaders are copies of torch's.
"""

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, partialmethod
from itertools import count
from pkgutil import resolve_name
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, get_worker_info

from ddp_patch.compat.private_packages import full_name
from ddp_patch.errors import StreamLengthError, TorchVersionError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def _private(name: str, needed_for: str, instead: str = "") -> Any:
    """Return a private name of torch, looked up when it is needed.

    Args:
        name: The full name, such as ``torch.utils.data.dataloader._BaseDataLoaderIter``.
        needed_for: What needs the name, for the error.
        instead: A remedy other than another version of torch: a sentence.

    Raises:
        TorchVersionError: This torch does not have the name.
    """
    try:
        return resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise _lacking(name, needed_for, instead) from error


def _lacking(name: str, needed_for: str, instead: str = "") -> TorchVersionError:
    """Return the error that torch lacks a name.

    Args:
        name: The name that torch lacks.
        needed_for: What needs the name.
        instead: A remedy other than another version of torch: a sentence.
    """
    return TorchVersionError(
        f"{needed_for} needs {name}, and torch {torch.__version__} does not have it: it is a private name, which any "
        f"version may change. Use a version that docs/compatibility.md lists. {instead}".rstrip()
    )


if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.data._utils.worker import WorkerInfo as WorkerInfo
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    DispatchMode = TorchDispatchMode
else:
    DispatchMode = _private("torch.utils._python_dispatch.TorchDispatchMode", "Running scripts as one process")
    _BaseDataLoaderIter = _private("torch.utils.data.dataloader._BaseDataLoaderIter", "Counting a loader's batches")
    # The class of what ``get_worker_info()`` returns, which has no public name.
    WorkerInfo = _private("torch.utils.data._utils.worker.WorkerInfo", "Sharing an iterable dataset")


def default_store() -> "Store":
    """Return the key-value store of the default process group.

    torch has only a private name for this store. The public way is a store of one's own, which needs a free port and an
    address that all ranks know.

    Raises:
        TorchVersionError: This torch does not have the private name.
    """
    name = "torch.distributed.distributed_c10d._get_default_store"
    store: Store = _private(name, "The ranks' agreement", "Or give the world by rank= and num_replicas=.")()
    return store


def backward_in_progress() -> Callable[[], bool]:
    """Return a function that returns whether it is called within a ``backward()``.

    Raises:
        TorchVersionError: This torch does not have the private name that says so.
    """
    number: Callable[[], int] = _private("torch._C._current_graph_task_id", "Averaging gradients where backward() ends")
    return lambda: number() != -1


@contextmanager
def kept_weights(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Restore the lists of weights of recurrent modules when left, because they are replaced while entered."""
    names = ("_flat_weights", "_flat_weight_refs")
    recurrent = [vars(each) for each in modules if isinstance(each, torch.nn.RNNBase)]
    before = [{name: attributes[name] for name in names if name in attributes} for attributes in recurrent]
    try:
        yield
    finally:
        for attributes, kept in zip(recurrent, before, strict=True):
            attributes.update(kept)


def tables_of(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a module's own dicts of parameters, buffers and inner modules, in which its attributes are looked up."""
    return module._parameters, module._buffers, module._modules


def argument_names(operation: Any) -> list[str]:
    """Return the names of the arguments of an operation of torch, in their order."""
    return [each.name for each in operation._schema.arguments]


def is_within_transform() -> bool:
    """Return whether this runs within a transform of ``torch.func``, such as ``grad`` or ``vmap``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def imported_fsdp() -> Any:
    """Return the module of FSDP if the script has imported it, otherwise None; importing it takes long."""
    return sys.modules.get("torch.distributed.fsdp")


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a submesh such as ``mesh["dp"]`` is a part of, or a whole mesh itself.

    torch has no public way, and three private names: a method of the mesh (seen in 2.13 and 2.15), and methods of the
    object that keeps all meshes (seen in 2.5 to 2.9, and in 2.4, which only has parents).

    Raises:
        TorchVersionError: This torch has none of these names, and the mesh does not contain all ranks.
    """
    of_all: Any = getattr(device_mesh, "_mesh_resources", None)
    root: DeviceMesh
    if hasattr(mesh, "_get_root_mesh"):
        root = mesh._get_root_mesh()
    elif hasattr(of_all, "get_root_mesh"):
        root = of_all.get_root_mesh(mesh)
    elif hasattr(of_all, "get_parent_mesh"):
        parent = of_all.get_parent_mesh(mesh)
        root = mesh if parent is None else root_mesh(parent)
    elif mesh.size() == dist.get_world_size():
        root = mesh
    else:
        name = "torch.distributed.device_mesh.DeviceMesh._get_root_mesh"
        raise _lacking(name, "A part of a device_mesh", "Or pass the mesh of all ranks that it was cut from.")
    return root


def gloo_group(store: "Store", rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo group of these ranks alone, in which two ranks connect when they first exchange data.

    The public ``dist.new_group`` needs all ranks of the job, or ranks that are all in equally many groups, because the
    number of groups names the new group. Groups of ``dist.new_group`` connect every rank with all others, as all groups
    do in torch 2.4.

    Raises:
        TorchVersionError: This torch was built without gloo.
    """
    group = _private("torch.distributed.ProcessGroupGloo", "What ranks send each other of batches and outputs")
    try:
        options, names = group._Options(), os.environ.get("GLOO_SOCKET_IFNAME", "")
        options._devices = [
            group.create_device(interface=name, lazy_init=True) if name else group.create_default_device(lazy_init=True)
            for name in names.split(",")
        ]
        options._timeout = timeout
    except (AttributeError, TypeError):
        return group(store, rank, size, timeout)
    return group(store, rank, size, options)


def gather_in_background(group: Any, row: torch.Tensor, rows: torch.Tensor, timeout: timedelta) -> Any:
    """Begin to gather every member's row, and return the work to wait for.

    The public functions take only registered groups, and have only the group's timeout.

    Raises:
        TorchVersionError: This torch does not have these options.
    """
    needed_for = "What ranks tell each other with share='by_worker' or weight_of"
    options = _private("torch._C._distributed_c10d.AllgatherOptions", needed_for)()
    options.timeout, options.asyncOp = timeout, True
    return group.allgather([list(rows)], [row], options)


# The variables that launchers set in the environment of each rank.
_OF_RANK: Final = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID"})
# The name that ``get_rank`` and ``get_world_size`` look up, also if they were imported by name. There is no public
# hook.
_LOOKED_UP: Final = "_rank_not_in_group"


@contextmanager
def rank_noted(note: Callable[[], object]) -> Iterator[None]:
    """While entered, call ``note`` whenever code reads the rank of this process from torch or the environment.

    In a torch that looks up another name, calls of ``get_rank`` are not noticed.
    """
    environment: Any = type(os.environ)
    looked_up, read = getattr(distributed_c10d, _LOOKED_UP, None), environment.__getitem__

    def noted_look_up(*args: Any, **options: Any) -> Any:
        note()
        return looked_up(*args, **options)  # type: ignore[misc]  # only a torch that has the name calls this

    def noted_read(self: Any, name: Any) -> Any:
        if name in _OF_RANK:
            note()
        return read(self, name)

    looks = patch.object(distributed_c10d, _LOOKED_UP, noted_look_up, create=True)
    with patch.object(environment, "__getitem__", noted_read), looks:
        yield


# The class of running iterators, which `iter(loader)` returns; torch has no public name for it. Copies must not share
# one.
RunningLoader: Final = _BaseDataLoaderIter

# The attribute in which a loader with persistent workers keeps its iterator. There is no public way to start anew.
RUNNING_ITERATOR: Final = "_iterator"

# The method by which a loader makes its iterator, for `iter(loader)` and for Ultralytics' `reset()`.
MAKE_ITERATOR: Final = "_get_iterator"

# torch calls both methods. If they were missing, batches would be miscounted, so look them up at the import.
_private(f"torch.utils.data.dataloader.DataLoader.{MAKE_ITERATOR}", "Counting a loader's batches")
_private("torch.utils.data.dataloader._BaseDataLoaderIter._reset", "Counting a loader's batches")


# The method that an iterator of torch's calls for its next batch, or to find its end.
_NEXT: Final = "_next_data"


def call_at_second_batch(iterator: Any, call: Callable[[], object]) -> None:
    """Run ``call()`` when a ``RunningLoader`` is asked for its second batch, or finds its end after the first."""
    of_iterator, asked = weakref.ref(iterator), count(1)

    def next_data() -> Any:
        running: Any = of_iterator()
        if next(asked) > 1:
            vars(running).pop(_NEXT, None)
            call()
        return getattr(type(running), _NEXT)(running)

    vars(iterator)[_NEXT] = next_data


def has_own_iterators(loader_kind: type) -> bool:
    """Return whether a loader's class makes iterators other than torch's."""
    return getattr(loader_kind, MAKE_ITERATOR, None) is not getattr(DataLoader, MAKE_ITERATOR)


# The functions in which torch reads a map-style dataset's batch, and raises a worker's error again. The end of an
# iterable dataset passes through neither.
_OF_BATCHES: Final = tuple(
    _private(f"torch.{name}", "Telling a loader's end from a dataset's StopIteration").__code__
    for name in ("utils.data._utils.fetch._MapDatasetFetcher.fetch", "_utils.ExceptionWrapper.reraise")
)


def is_end(reason: BaseException) -> bool:
    """Return whether an iterator's error is its end, and not a StopIteration of a dataset or of ``collate_fn``."""
    frames = (frame for frame, _ in walk_tb(reason.__traceback__))
    return isinstance(reason, StopIteration) and not any(frame.f_code in _OF_BATCHES for frame in frames)


# Turns an iterator of a loader's class into the batches of the pass that it begins.
BatchesOf: TypeAlias = Callable[[Any], Iterator[Any]]


class AroundIterator(Iterator[Any]):
    """A base class of wrappers around an iterator of a loader. Other attributes are the wrapped iterator's.

    torch counts in its iterator, which is deleted after a ``break``, and has no hook for counting. The wrapper has the
    ``__class__`` of the wrapped iterator, so that Lightning ends its workers as it ends torch's.

    Args:
        wrapped: The iterator of the loader's class.
        batches_of: Makes the batches of each pass. Default: the batches of ``wrapped``.
    """

    _finished = False  # torchdata's loader reads this, and torch's iterators lack it

    def __init__(self, wrapped: Any, batches_of: BatchesOf | None = None) -> None:
        self.wrapped: Any = wrapped
        self._batches_of = batches_of
        self.begin()

    def begin(self) -> None:
        """Begin the pass that ``wrapped`` has begun."""
        self._batches: Iterator[Any] = self.wrapped if self._batches_of is None else self._batches_of(self.wrapped)

    def __next__(self) -> Any:
        try:
            given = next(self._batches)
        except BaseException as reason:
            self.stop(reason)
            if isinstance(reason, StopIteration) and not is_end(reason):
                raise StreamLengthError(
                    "Iterating the loader: its dataset or collate_fn raised StopIteration in place of a batch, which a "
                    "loop takes for the end. This rank's epoch would end there, and the other ranks' would go on. "
                    "Return an item for each index, or raise another error, and let the sampler or the dataset's "
                    "__len__ say how many there are."
                ) from reason
            raise
        return self.count(given)

    def count(self, given: Any) -> Any:
        """Count a batch that is delivered, and return it."""
        return given

    def stop(self, reason: BaseException) -> None:
        """Record that the pass has ended, or raised an error instead of a batch; see ``is_end``."""
        raise NotImplementedError

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin the next pass with the same workers: torch calls this if workers are persistent."""
        self._batches = iter(())  # the rest of the pass ends before the workers begin anew
        self.wrapped._reset(loader, first_iter)
        self.begin()

    @property  # type: ignore[misc]  # isinstance() reads it, no code sets it
    def __class__(self) -> Any:
        return type(self.wrapped)

    def __len__(self) -> int:
        return len(self.wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def __getstate__(self) -> Any:
        return self.wrapped.__getstate__()  # raises an error, because iterators cannot be copied


@contextmanager
def length_not_noted(loader: DataLoader[Any]) -> Iterator[None]:
    """While entered, let ``len(loader)`` be called without torch's record of it, which warns of further batches."""
    name = "_IterableDataset_len_called"
    before = vars(loader).get(name)
    try:
        yield
    finally:
        if name in vars(loader):
            setattr(loader, name, before)


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Make the next pass start new workers, because persistent workers do not see changes in the main process.

    Raises:
        TorchVersionError: This torch keeps the iterator in another attribute.
    """
    if not hasattr(loader, RUNNING_ITERATOR):
        name = f"torch.utils.data.dataloader.DataLoader.{RUNNING_ITERATOR}"
        raise _lacking(name, "Starting new workers", "Or use persistent_workers=False.")
    setattr(loader, RUNNING_ITERATOR, None)


_TORCHDATA: Final = "torchdata.stateful_dataloader"
_TORCH_BATCH_SAMPLERS: Final = {"torch.utils.data.sampler.BatchSampler", f"{_TORCHDATA}.sampler.BatchSampler"}


def is_torch_batch_sampler(kind: type) -> bool:
    """Return whether a class is exactly torch's ``BatchSampler``: a subclass may make batches in another way."""
    return full_name(kind) in _TORCH_BATCH_SAMPLERS


def is_torchdatas(loader_kind: type) -> bool:
    """Return whether a loader's class is torchdata's ``StatefulDataLoader``, whose iterators are not torch's."""
    return any(base.__module__ == f"{_TORCHDATA}.stateful_dataloader" for base in loader_kind.__mro__)


# The attribute in which torchdata's loader keeps a state that was loaded, until it is iterated.
LOADED_STATE: Final = "next_iter_state"


def has_own_iteration(loader_kind: type) -> bool:
    """Return whether a loader's class has an ``__iter__`` other than torch's and torchdata's."""
    iterates: type = next((base for base in loader_kind.__mro__ if "__iter__" in vars(base)), DataLoader)
    return iterates is not DataLoader and not iterates.__module__.startswith(f"{_TORCHDATA}.")


# The module with the variable that ``get_worker_info()`` reads.
_WORKER: Final[Any] = _private("torch.utils.data._utils.worker", "Sharing an iterable dataset")


def has_thread_workers(loader: object) -> bool:
    """Return whether a loader's attributes say that its workers are threads.

    torch 2.15.0 has fields for a ``worker_method`` in its worker info, and its development version has the attribute in
    its loader. In MONAI 1.6.1, ``use_thread_workers=True`` makes a context whose processes are threads.
    """
    process = getattr(getattr(loader, "multiprocessing_context", None), "Process", None)
    is_thread = isinstance(process, type) and issubclass(process, threading.Thread)
    return is_thread or getattr(loader, "worker_method", None) == "thread"


# The public attributes of a worker info.
_TELLING: Final = frozenset({"id", "num_workers", "seed", "dataset"})


class _NotedWorkerInfo(WorkerInfo):
    """A worker info that records which of its attributes are read."""

    def __getattribute__(self, name: str) -> Any:
        if name in _TELLING:
            object.__getattribute__(self, "note")(name)
        return object.__getattribute__(self, name)


def noted_worker_info(worker: int, workers: int, seed: int, dataset: Any, note: Callable[[str], object]) -> WorkerInfo:
    """Return a worker info that calls ``note`` with the name of each attribute that is read.

    torch has no public constructor: it makes worker infos only for its own workers.
    """
    info = _NotedWorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)
    object.__setattr__(info, "note", note)  # the value is frozen
    return info


class worker_info_told:  # noqa: N801 - it is called as a function is, and a class is entered faster
    """While entered, make ``get_worker_info()`` return ``info``. There is no public way to set its variable.

    Args:
        info: The value to return.

    Raises:
        TorchVersionError: ``get_worker_info()`` reads another variable, so datasets would not learn their part.
    """

    def __init__(self, info: object) -> None:
        self._info = info

    def __enter__(self) -> None:
        self._before = getattr(_WORKER, "_worker_info", None)
        _WORKER._worker_info = self._info
        if get_worker_info() is not self._info:
            _WORKER._worker_info = self._before
            raise _lacking("torch.utils.data._utils.worker._worker_info", "Setting get_worker_info()")

    def __exit__(self, *exc: object) -> None:
        _WORKER._worker_info = self._before


def replace_worker_seed(seed: int) -> None:
    """Set ``get_worker_info().seed``, from which datasets read their seed, although the worker info is frozen.

    Raises:
        TorchVersionError: This torch does not let the seed be replaced, so ranks would augment alike.
    """
    try:
        object.__setattr__(get_worker_info(), "seed", seed)
    except (AttributeError, TypeError) as error:
        name = "a worker info whose seed can be replaced"
        raise _lacking(name, "Seeding workers by rank", "Or use num_workers=0.") from error


def times_written(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place; 0 if torch does not count it, as in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def read_by_parts(kind: Any, reading_of: Callable[[DataLoader[Any]], Any]) -> Iterator[None]:
    """While entered, let torch's loaders, and workers that are forked, read batches in another way.

    Args:
        kind: The class of indices that read their batch by a method ``read``. Its arguments are two functions, by which
            torch reads samples and a whole batch, and the dataset.
        reading_of: Returns for a loader an object that replaces batches of indices (``indices``) and read batches
            (``batch``); or None.
    """
    of_map = _private("torch.utils.data._utils.fetch._MapDatasetFetcher", "Reading batches by parts")
    iterator: Any = _BaseDataLoaderIter
    begin, reset, following, fetch = iterator.__init__, iterator._reset, iterator.__next__, of_map.fetch

    def beginning(self: Any, loader: DataLoader[Any], *args: Any, by: Any = begin, **options: Any) -> None:
        by(self, loader, *args, **options)
        is_torchs = type(self).__module__ == iterator.__module__ and self._dataset_kind == 0 and self._auto_collation
        self.ddp_patch_reading = reading_of(loader) if is_torchs else None
        if self.ddp_patch_reading is not None:
            self._sampler_iter = self.ddp_patch_reading.indices(self._sampler_iter)

    def fetching(self: Any, index: Any) -> Any:
        if not isinstance(index, kind):
            return fetch(self, index)

        def samples_of(indices: Any) -> Any:
            made, self.collate_fn = self.collate_fn, lambda samples: samples
            try:
                return fetch(self, indices)
            finally:
                self.collate_fn = made

        return index.read(samples_of, partial(fetch, self), self.dataset)

    def follow(self: Any) -> Any:
        reading, began = getattr(self, "ddp_patch_reading", None), time.perf_counter()
        read = following(self)
        if reading is None:
            return read
        again = of_map(self._dataset, True, self._collate_fn, self._drop_last).fetch
        return reading.batch(read, time.perf_counter() - began, self._num_workers, self._collate_fn, again)

    with (
        patch.object(iterator, "__init__", beginning),
        patch.object(iterator, "_reset", partialmethod(beginning, by=reset)),
        patch.object(iterator, "__next__", follow),
        patch.object(of_map, "fetch", fetching),
    ):
        yield
