"""Private names of torch about process groups and meshes. Seen in torch 2.4.0, 2.13.0 and 2.15.0."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from ddp_patch.compat.missing import lacking, private

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "default_store",
    "gather_in_background",
    "gloo_group",
    "imported_fsdp",
    "rank_noted",
    "root_mesh",
]


def default_store() -> "Store":
    """Return the key-value store that the default process group was made with.

    torch hands it out under a private name only. The public way is to make a store of our own, which takes a free port
    and an address that all ranks know.

    Raises:
        TorchVersionError: This torch does not provide it.
    """
    name = "torch.distributed.distributed_c10d._get_default_store"
    store: Store = private(name, "The ranks' agreement", "Or give the world by rank= and num_replicas=.")()
    return store


def imported_fsdp() -> Any:
    """Return the module of FSDP if the script has imported it, otherwise None; importing it takes long."""
    return sys.modules.get("torch.distributed.fsdp")


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a submesh such as ``mesh["dp"]`` was cut from, or a whole one itself.

    torch has no public name for it, and three private ones: of the mesh (seen in 2.13 and 2.15), and of what keeps
    all meshes (seen in 2.5 to 2.9, and in 2.4, which knows parents).

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
        raise lacking(name, "A part of a device_mesh", "Or pass the mesh of all ranks that it was cut from.")
    return root


def gloo_group(store: "Store", rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo group of these ranks alone.

    The public ``dist.new_group`` needs all ranks of the job, or that each is in as many groups as the others, because
    it names the new group by their number.

    Raises:
        TorchVersionError: This torch was built without gloo.
    """
    group = private("torch.distributed.ProcessGroupGloo", "What ranks send each other of batches and outputs")
    return group(store, rank, size, timeout)


def gather_in_background(group: Any, row: torch.Tensor, rows: torch.Tensor, timeout: timedelta) -> Any:
    """Begin to gather every member's row, and return the work to wait for.

    It comes to an end by itself after ``timeout``, and may be waited for in slices before. The public functions take
    registered groups alone.

    Raises:
        TorchVersionError: This torch takes no such options.
    """
    options = private("torch._C._distributed_c10d.AllgatherOptions", "iterable_sharding='by_worker'")()
    options.timeout, options.asyncOp = timeout, True
    return group.allgather([list(rows)], [row], options)


# What launchers put into the environment of each rank.
_OF_RANK: Final = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID"})
# What ``get_rank`` and ``get_world_size`` look up, also where they were imported by name. torch has no public hook.
_LOOKED_UP: Final = "_rank_not_in_group"


@contextmanager
def rank_noted(note: Callable[[], object]) -> Iterator[None]:
    """While entered, call ``note`` whenever somebody asks torch or the environment for the rank of this process.

    A torch that looks up something else is asked unseen.
    """
    environment: Any = type(os.environ)
    looked_up, read = getattr(distributed_c10d, _LOOKED_UP, None), environment.__getitem__

    def noted_look_up(*args: Any, **options: Any) -> Any:
        note()
        return looked_up(*args, **options)  # type: ignore[misc]  # None is not put there

    def noted_read(self: Any, name: Any) -> Any:
        if name in _OF_RANK:
            note()
        return read(self, name)

    environment.__getitem__ = noted_read
    if looked_up is not None:
        setattr(distributed_c10d, _LOOKED_UP, noted_look_up)
    try:
        yield
    finally:
        environment.__getitem__ = read
        if looked_up is not None:
            setattr(distributed_c10d, _LOOKED_UP, looked_up)
