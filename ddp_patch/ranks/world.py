"""Find this process's rank and the number of ranks: from arguments, from a process group, or none."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ddp_patch.compat.private_torch import root_mesh
from ddp_patch.errors import InvalidOptionError, WorldError
from ddp_patch.validation import check_rank, whole_number

# Names of mesh dimensions that split the data, in small letters, as torch, torchtitan, Megatron, veScale, accelerate,
# transformers, Lightning and torchprime use them.
_DATA_PARALLEL = (
    *("dp", "dp_replicate", "dp_shard", "dp_shard_mod_ep", "dp_shard_in_ep", "dp_outer", "dp_inner", "ddp", "fsdp"),
    *("hsdp", "replicate", "replica", "shard", "batch", "data", "data_parallel"),
)

# Names of mesh dimensions that never split the data. Dimensions of experts (ep, expert, efsdp) are in neither list:
# their ranks mostly have data of their own, but in some meshes the same data. The same goes for names that join both
# kinds (dp_cp, dp_shard_cp).
_MODEL_PARALLEL = (
    *("tp", "cp", "sp", "pp", "mp", "etp", "ulysses", "ring", "tensor", "context", "sequence", "pipeline", "pipe"),
    *("stage", "model", "tensor_parallel", "context_parallel", "sequence_parallel", "pipeline_parallel"),
    "model_parallel",
)


@dataclass(frozen=True, slots=True)
class World:
    """This rank among the ranks that share the data.

    Attributes:
        rank: This rank's number, in ``range(num_replicas)``.
        num_replicas: How many shares there are.
        share_of_rank: The share of each global rank, sorted, for all ranks that must agree. Ranks that differ only in
            another kind of parallelism take the same share. None in an explicit world, where ranks do not communicate.
    """

    rank: int
    num_replicas: int
    share_of_rank: Mapping[int, int] | None = None

    def __post_init__(self) -> None:
        check_rank(self.rank, self.num_replicas)

    @property
    def replicas(self) -> list[int]:
        """The global ranks that take the same share as this rank."""
        return [rank for rank, share in (self.share_of_rank or {}).items() if share == self.rank]

    def peer_ranks(self, operation: str) -> list[int]:
        """Return the ranks with which this rank exchanges data, one for each share, in order.

        If several ranks take the same share, the first ranks of all shares exchange data, then the second ranks, and so
        on.

        Args:
            operation: The operation that needs the ranks, for the error.

        Raises:
            WorldError: The world is an explicit one.
        """
        if self.share_of_rank is None:
            raise WorldError(
                f"{operation} cannot exchange anything between {self.num_replicas} ranks: the loader's world was given "
                "by rank= and num_replicas=, and nothing says which processes these are. Patch it with a process group."
            )
        takers: list[list[int]] = [[] for _ in range(self.num_replicas)]
        for rank, share in self.share_of_rank.items():
            takers[share].append(rank)
        mine = takers[self.rank].index(dist.get_rank())
        return [ranks[mine] for ranks in takers]


def find_world(
    rank: SupportsIndex | None = None,
    num_replicas: SupportsIndex | None = None,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
) -> World | None:
    """Return the world of the arguments, or else of the process group; None if there is only one process.

    Args:
        rank: This rank, in an explicit world.
        num_replicas: The number of ranks of an explicit world.
        process_group: The group whose ranks shard the data.
        device_mesh: A mesh whose data-parallel dimensions shard the data, or the sub-mesh of these dimensions. Ranks
            that differ only in other dimensions get the same data.

    Raises:
        InvalidOptionError: The arguments are not valid, or set the world in two ways.
        WorldError: This process is not in ``process_group`` or ``device_mesh``, or the environment announces several
            processes and there is no process group yet.
    """
    explicit = rank is not None or num_replicas is not None
    ways = {"rank=": explicit, "process_group=": process_group is not None, "device_mesh=": device_mesh is not None}
    given = [name for name, is_given in ways.items() if is_given]
    if len(given) > 1:
        raise InvalidOptionError(
            f"The ranks were given in {len(given)} ways, by {' and '.join(given)}, which may contradict each other. "
            "Pass only one of them."
        )
    if explicit:
        return _given_world(rank, num_replicas)
    if device_mesh is not None:
        return _mesh_world(device_mesh)
    if process_group is not None or (dist.is_available() and dist.is_initialized()):
        return _group_world(process_group)
    _refuse_announced_world()
    return None


def _given_world(rank: SupportsIndex | None, num_replicas: SupportsIndex | None) -> World:
    if rank is None or num_replicas is None:
        given, missing = ("num_replicas", "rank") if rank is None else ("rank", "num_replicas")
        raise InvalidOptionError(
            f"{given}={num_replicas if rank is None else rank!r} was given without {missing}. Pass both, or neither to "
            "read the process group."
        )
    return World(whole_number("rank", rank), whole_number("num_replicas", num_replicas))


def _group_world(group: dist.ProcessGroup | None) -> World:
    if group is not None:
        _require_group(group)
    rank = dist.get_rank(group)
    if rank < 0:
        raise _outside("process_group")
    known = dist.group.WORLD if group is None else group  # torch 2.4 takes None for no group here
    members = {member: place for place, member in enumerate(dist.get_process_group_ranks(known))}
    return World(rank, len(members), dict(sorted(members.items())))


def _outside(given: str) -> WorldError:
    return WorldError(
        f"This process (global rank {dist.get_rank()} of {dist.get_world_size()}) is not in the given {given}, so it "
        "has no shard. Call this on its ranks only, or pass one that this rank belongs to."
    )


def _require_group(group: object) -> None:
    # On the ranks that new_group() leaves out, it returns an object that is no group.
    if not (isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER):
        raise InvalidOptionError(
            f"process_group={group!r} is a {type(group).__name__}, no ProcessGroup. Pass what "
            "torch.distributed.new_group() returned, or leave it out to shard over all ranks."
        )
    if not dist.is_initialized():
        raise WorldError(
            "A process_group was given, and none is initialised. Call torch.distributed.init_process_group() first, "
            "and pass a group that was made after it."
        )


def _mesh_world(mesh: DeviceMesh) -> World:
    if not isinstance(mesh, DeviceMesh):
        raise InvalidOptionError(
            f"device_mesh={mesh!r} is a {type(mesh).__name__}, no DeviceMesh. Pass what init_device_mesh() returned."
        )
    names, whole = tuple(mesh.mesh_dim_names or map(str, range(mesh.ndim))), root_mesh(mesh)
    chosen = _dimensions_that_split(mesh, names, is_part=mesh.ndim < whole.ndim or mesh.ndim == 1)
    if whole.mesh_dim_names is not None and set(chosen) <= set(whole.mesh_dim_names):
        # Even with mesh["dp"] alone, ranks that differ in other dimensions must agree, too.
        mesh, names = whole, whole.mesh_dim_names
    if mesh.get_coordinate() is None:
        raise _outside("device_mesh")
    # Move the dimensions that split the data to the front, so that each row lists the ranks of one share.
    first = sorted(range(len(names)), key=lambda dimension: names[dimension] not in chosen)
    num_replicas = math.prod(mesh.mesh.shape[names.index(name)] for name in chosen)
    rows = mesh.mesh.permute(first).reshape(num_replicas, -1).tolist()
    members = {member: share for share, row in enumerate(rows) for member in row}
    return World(members[dist.get_rank()], num_replicas, dict(sorted(members.items())))


def _dimensions_that_split(mesh: DeviceMesh, names: Sequence[str], *, is_part: bool) -> Sequence[str]:
    """Return the names of a mesh's dimensions that split the data.

    Dimensions with known names split the data. If the user passes a part of a mesh, all of its dimensions split the
    data, unless a known name contradicts.
    """
    known = [name for name in names if name.lower() in _DATA_PARALLEL]
    others = [name for name in names if name.lower() not in _DATA_PARALLEL + _MODEL_PARALLEL]
    unknown = {name: size for name, size in zip(names, mesh.mesh.shape, strict=True) if name in others and size > 1}
    if is_part and len(known) + len(others) == len(names):
        return names
    if known and not unknown:
        return known
    why = "none of them is known to split the data"
    if known:
        told = " and ".join(f"{name!r} (of size {size})" for name, size in unknown.items())
        why = f"nothing says whether {told} splits the data, as {' and '.join(map(repr, known))} does"
    raise InvalidOptionError(
        f"The device_mesh has the dimensions {tuple(names)}, and {why}. Pass the sub-mesh of all that do, as "
        'device_mesh=mesh["replicate", "shard"]; if every dimension does, leave device_mesh= out; or name them dp, '
        "dp_replicate, dp_shard or the like where the mesh is made."
    )


def _refuse_announced_world() -> None:
    announced = os.environ.get("WORLD_SIZE", "").strip()
    if announced not in {"", "0", "1"}:
        raise WorldError(
            f"The environment says WORLD_SIZE={announced}, but no process group exists, so every rank would train "
            "on all data. Call torch.distributed.init_process_group() first (or what does so: Fabric.launch(), "
            "Accelerator()), or pass rank= and num_replicas=. With Lightning's Trainer, patch in train_dataloader() of "
            "the LightningModule or LightningDataModule, which is called when the group exists."
        )
