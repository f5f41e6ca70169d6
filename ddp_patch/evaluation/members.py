"""The ranks that gather together, and what travels between them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from time import monotonic
from typing import Any, TypeAlias

import numpy as np
import torch

from ddp_patch.errors import DDPPatchError
from ddp_patch.evaluation.judging import GATHERING
from ddp_patch.evaluation.rows import Transport
from ddp_patch.ranks.exchange import MARGIN_S
from ddp_patch.ranks.group import Group, kept_groups, made_group, unreachable

__all__ = ["Members"]

Array: TypeAlias = "np.ndarray[Any, Any]"

# Rows of two calls would be taken for each other's.
_one_at_a_time = Lock()


class Members:
    """One rank for each share, in order.

    Args:
        ranks: Their global ranks.
        timeout: How many seconds they wait for each other.
    """

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        self.ranks: Sequence[int] = ranks
        self.timeout: float = timeout
        self._begun = monotonic()
        self._in_group = np.argsort(np.argsort(ranks)).tolist()  # the group has them sorted

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Let no other thread gather meanwhile. If this rank fails alone, break the connections: the others hear."""
        with _one_at_a_time:
            try:
                yield
            except DDPPatchError:  # which all ranks raise
                raise
            except BaseException:
                self._leave()
                raise

    def headers(self, own: Array) -> Array:
        """Return all shares' headers. If the kept group fails here, nothing is lost: the ranks meet for a new one."""
        data, sizes = torch.from_numpy(own).view(torch.uint8), [own.nbytes] * len(self.ranks)
        came: Sequence[torch.Tensor] | None = None
        try:
            for group in kept_groups(self.ranks)[:1]:
                came = group.all_gather(data, sizes, self.timeout)
        except RuntimeError:  # what gloo raises
            self._leave()
        if came is None:
            group = self._made()
            try:
                came = group.all_gather(data, sizes, self.timeout)
            except RuntimeError as error:
                raise self._lost(error) from error
        return np.stack([came[place].numpy().view(own.dtype) for place in self._in_group])

    def transport(self, dst: int | None) -> Transport:
        """Return what sends bytes to all members, or to one."""
        target = None if dst is None else self._in_group[self.ranks.index(dst)]

        def moved(data: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor] | None:
            (group, *_), in_group = kept_groups(self.ranks), [*sizes]
            for place, size in zip(self._in_group, sizes, strict=True):
                in_group[place] = size
            try:
                if target is None:
                    came: Sequence[torch.Tensor] | None = group.all_gather(data, in_group, self.timeout)
                else:
                    came = group.gather_on(target, data, in_group, self.timeout)
            except RuntimeError as error:
                raise self._lost(error) from error
            return None if came is None else [came[place] for place in self._in_group]

        return moved

    def _lost(self, error: RuntimeError) -> DDPPatchError:
        """Return the error of a connection that failed: who does not come to say so is missing."""
        self._leave()
        try:
            self._made(str(error))
        except DDPPatchError as told:
            return told.with_traceback(None)
        return unreachable(GATHERING, self.ranks, str(error))

    def _made(self, failure: str = "") -> Group:
        """Meet for a new group. Ranks that have waited as long as they may have a moment left for it."""
        left = max(MARGIN_S, self.timeout - (monotonic() - self._begun))
        return made_group(self.ranks, GATHERING, left, failure)

    def _leave(self) -> None:
        groups = kept_groups(self.ranks)
        while groups:
            groups.pop().close()
