"""A gloo group of the ranks that gather, for one call or for all steps of a pass, and moving bytes through it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ddp_patch.compat.torch_groups import default_store, gloo_group
from ddp_patch.errors import MissingRanksError

__all__ = ["Connection", "Kept", "Members", "connected"]


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks that gather together.

    Attributes:
        ranks: Their global ranks, in the order of their shares.
        rank: This process's global rank.
        dst: The global rank that gets the result, which may be in another group of ranks; None if all get it.
        timeout: How long they wait for each other, in seconds.
        device: Where this rank's batches come, if that is known.
    """

    ranks: list[int]
    rank: int
    dst: int | None
    timeout: float
    device: torch.device | None = None

    @property
    def receives(self) -> bool:
        """Whether this rank gets the result."""
        return self.dst is None or self.rank == self.dst


@dataclass(frozen=True, slots=True)
class Connection:
    """Moves bytes from one member to those that receive.

    Attributes:
        members: The ranks that gather together.
        group: Their own gloo group; None if nothing is sent.
        name: A name that no other group has.
    """

    members: Members
    group: Any
    name: str = ""

    def move(self, source: int, size: int, data: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Move bytes, and return them on each rank that receives them from another.

        Args:
            source: The global rank that has them.
            size: How many bytes they are.
            data: Returns them; called on the source only.

        Returns:
            The bytes in the shape ``(size,)``; None on the source and on ranks that receive nothing.
        """
        rank, ranks, dst = self.members.rank, self.members.ranks, self.members.dst
        is_source = rank == source
        takes_part = dst is None or (source != dst and dst in ranks and rank in {source, dst})
        if self.group is None or not size or not takes_part:
            return None
        buffer = data() if is_source else torch.empty(size, dtype=torch.uint8)
        with _failures_told(self.members):
            if dst is None:
                self.group.broadcast(buffer, ranks.index(source)).wait()
            elif is_source:
                self.group.send([buffer], ranks.index(dst), 0).wait()
            else:
                self.group.recv([buffer], ranks.index(source), 0).wait()
        return None if is_source else buffer

    def close(self) -> None:
        """Wait until every member has all it receives, and leave."""
        if self.group is not None:
            with _failures_told(self.members):
                self.group.barrier().wait()  # a rank must not leave while others receive


class Kept:
    """The connections of passes whose steps are gathered one by one: the next step uses that of the step before."""

    def __init__(self) -> None:
        self._of_passes: WeakKeyDictionary[Any, Connection] = WeakKeyDictionary()

    def name(self, one: Any) -> str | None:
        """Return the name of a pass's connection; None where there is none."""
        kept = self._of_passes.get(one)
        return None if kept is None else kept.name

    @contextmanager
    def connected(self, one: Any, members: Members, name: str, *, is_last: bool) -> Iterator[Connection]:
        """Connect the members for a step of a pass.

        Args:
            one: The pass.
            members: The ranks that gather together.
            name: The name of the pass's connection on every rank, or a new one.
            is_last: Whether no step follows on any rank.
        """
        found = self._of_passes.pop(one, None)  # after an error, the next step begins anew
        if found is None or found.name != name:
            found = _opened(members, name)
        yield replace(found, members=members)
        if is_last:
            found.close()
        elif found.group is not None:
            self._of_passes[one] = found


@contextmanager
def connected(members: Members, name: str) -> Iterator[Connection]:
    """Connect the members for one call.

    Args:
        members: The ranks that gather together.
        name: The name of the connection, which no other has.

    Raises:
        MissingRanksError: The connection to another rank failed.
    """
    connection = _opened(members, name)
    yield connection
    connection.close()


def _opened(members: Members, name: str) -> Connection:
    """Connect the members by a gloo group of their own.

    gloo sends from CPU to CPU, whatever the training's backend is. torch's ``new_group`` will not do: it needs all
    ranks, or names a group of some by how many groups a process is in, and that number may differ between the ranks.
    """
    if len(members.ranks) == 1 or not (members.dst is None or members.dst in members.ranks):
        return Connection(members, None, name)
    place = members.ranks.index(members.rank)
    store = dist.PrefixStore(f"ddp_patch/gathering/{name}", default_store())  # type: ignore[attr-defined]  # in its __all__, not in its stubs
    with _failures_told(members):
        group = gloo_group(store, place, len(members.ranks), timedelta(seconds=members.timeout))
        group.barrier().wait()  # when all have read the addresses, nobody needs them
    with suppress(RuntimeError):
        store.delete_key(f"0/{place}")  # gloo leaves every rank's address there
    return Connection(members, group, name)


@contextmanager
def _failures_told(members: Members) -> Iterator[None]:
    """Raise MissingRanksError if the connection fails."""
    try:
        yield
    except RuntimeError as error:  # what gloo raises
        raise MissingRanksError(
            f"Gathering outputs: the connection between the ranks {list(members.ranks)} failed ({error}). Look for the "
            "error of a rank that ended. If none did, name the network interface by which they reach each other in "
            "GLOO_SOCKET_IFNAME, or pass a longer timeout=."
        ) from error
