"""What torch tells of process groups and meshes under private names alone. Seen in torch 2.13.0."""

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "default_store",
    "gather_in_background",
    "gloo_group",
    "imported_fsdp",
    "root_mesh",
]


def default_store() -> "Store":
    """Return the key-value store that the default process group was made with.

    torch hands it out under a private name only. The public way is to make a store of our own, which takes a free port
    and an address that all ranks know.
    """
    return _get_default_store()


def imported_fsdp() -> Any:
    """Return the module of FSDP if the script has imported it, else None; importing it takes long."""
    return sys.modules.get("torch.distributed.fsdp")


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a submesh such as ``mesh["dp"]`` was cut from. torch has no public name for it."""
    return mesh._get_root_mesh()


def gloo_group(store: "Store", rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo group of these ranks alone.

    The public ``dist.new_group`` needs all ranks of the job, or that each is in as many groups as the others, because
    it names the new group by their number.
    """
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def gather_in_background(group: Any, row: torch.Tensor, rows: torch.Tensor, timeout: timedelta) -> Any:
    """Begin to gather every member's row, and return the work to wait for.

    It comes to an end by itself after ``timeout``, and may be waited for in slices before. The public functions take
    registered groups alone.
    """
    options = AllgatherOptions()
    options.timeout, options.asyncOp = timeout, True
    return group.allgather([list(rows)], [row], options)
