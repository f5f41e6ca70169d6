"""Which rank of how many this process is: given, read from a process group, or not distributed at all."""

import operator
import os
from dataclasses import dataclass
from typing import SupportsIndex

import torch.distributed as dist

from ddp_patch.errors import InvalidOptionError, WorldError

__all__ = ["World", "find_world"]


@dataclass(frozen=True, slots=True)
class World:
    """``rank`` of ``num_replicas``; ``group`` is None where the world was given and nothing may communicate."""

    rank: int
    num_replicas: int
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise InvalidOptionError(
                f"num_replicas={self.num_replicas} leaves no rank to share with: pass the number of ranks, at least 1."
            )
        if not 0 <= self.rank < self.num_replicas:
            raise InvalidOptionError(
                f"rank={self.rank} is out of range for num_replicas={self.num_replicas}: "
                f"ranks count from 0 to {self.num_replicas - 1}. Pass this process's rank within the group."
            )


def find_world(
    rank: SupportsIndex | None, num_replicas: SupportsIndex | None, process_group: dist.ProcessGroup | None
) -> World | None:
    """Return the world asked for, or that of the process group, or None where there is one process only.

    Raises:
        InvalidOptionError: ``rank`` and ``num_replicas`` are no valid pair.
        WorldError: This process is not in ``process_group``, or the environment announces several processes
            and no process group exists yet.
    """
    if rank is not None or num_replicas is not None:
        return _given_world(rank, num_replicas, process_group)
    if process_group is not None:
        return _group_world(process_group)
    if dist.is_available() and dist.is_initialized():
        return _group_world(dist.group.WORLD)
    _refuse_announced_world()
    return None


def _given_world(
    rank: SupportsIndex | None, num_replicas: SupportsIndex | None, process_group: dist.ProcessGroup | None
) -> World:
    if rank is None or num_replicas is None:
        given, missing = ("num_replicas", "rank") if rank is None else ("rank", "num_replicas")
        value = num_replicas if rank is None else rank
        raise InvalidOptionError(
            f"{given}={value!r} was given without {missing}: an explicit world needs both. "
            f"Pass {missing} too, or neither to read the process group."
        )
    if process_group is not None:
        raise InvalidOptionError(
            f"rank={rank!r} and num_replicas={num_replicas!r} were given together with process_group: "
            "an explicit world communicates with nobody. Pass one or the other."
        )
    return World(_integer("rank", rank), _integer("num_replicas", num_replicas))


def _integer(name: str, value: SupportsIndex) -> int:
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise InvalidOptionError(f"{name}={value!r} is a {type(value).__name__}, not an int. Pass a whole number.")


def _group_world(group: dist.ProcessGroup | None) -> World:
    rank = dist.get_rank(group)
    if rank < 0:
        raise WorldError(
            f"This process (global rank {dist.get_rank()} of {dist.get_world_size()}) is not in the given "
            "process_group, so it has no share. Call this only on the group's ranks, or pass the group that "
            "this rank belongs to."
        )
    return World(rank, dist.get_world_size(group), group)


def _refuse_announced_world() -> None:
    announced = os.environ.get("WORLD_SIZE", "1")
    if announced.strip() != "1":
        raise WorldError(
            f"The environment says WORLD_SIZE={announced}, but no process group exists, so every rank would train "
            "on all data. Call torch.distributed.init_process_group() first (or what does so: Fabric.launch(), "
            "Accelerator()), or pass rank= and num_replicas=."
        )
