"""The process group's store, which may fail or be gone: a request then returns no answer, and training goes on."""

import warnings
from typing import Any
from weakref import ref

import torch.distributed as dist

from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import DDPPatchWarning

# The errors of stores that are gone, and of a fake group's store, which cannot be read.
STORE_ERRORS = (RuntimeError, ValueError)
# Each failure in a row doubles the number of requests that are left out, up to this many doublings.
_DOUBLINGS = 10


class PatientStore:
    """The store of the present process group. A later process group has another store.

    Attributes:
        ref: A weak reference to the store: a store that is kept alive keeps its port.
    """

    def __init__(self) -> None:
        self.ref: ref[Any] = ref(default_store())
        # How often in a row the store has failed (-1 if it never has), and how many requests are still left out.
        self._failures, self._left_out = -1, 0

    @property
    def has_failed(self) -> bool:
        """Whether the store has ever failed, so that ranks may have missed other ranks' values."""
        return self._failures >= 0

    @property
    def is_heard(self) -> bool:
        """Whether the store is there and has not failed lately."""
        return self.opened() is not None and self._failures <= 0

    def opened(self) -> Any:
        """Return the store, or None if it is gone."""
        store = self.ref() if dist.is_initialized() else None
        return store if store is not None and store is default_store() else None

    def ask(self, operation: str, key: str, *arguments: Any) -> Any:
        """Return the store's answer; None if the store is gone or fails."""
        if (store := self.opened()) is None or self._is_left_out():
            return None
        try:
            answer = getattr(store, operation)(key, *arguments)
        except STORE_ERRORS as error:
            self._fail(error)
            return None
        self._failures = min(self._failures, 0)
        return answer

    def set(self, key: str, value: str) -> bool:
        """Set a value in the least time, without an answer; return whether the store took it."""
        try:
            if (store := self.ref()) is None or self._is_left_out():
                return False
            store.set(key, value)
        except STORE_ERRORS as error:
            self._fail(error)
            return False
        return True

    def _is_left_out(self) -> bool:
        """Return whether to leave a request out, because the last requests failed, and failing may take long."""
        self._left_out = max(0, self._left_out - 1)
        return self._left_out > 0

    def _fail(self, error: Exception) -> None:
        """Count a failure of the store, and warn of the first one."""
        has_warned, self._failures = self._failures >= 0, max(self._failures, 0) + 1
        self._left_out = 2 ** min(self._failures, _DOUBLINGS)
        if not has_warned and self.opened() is not None:
            warnings.warn(
                "The ranks cannot compare their passes over a loader now, because the process group's store failed "
                f"({type(error).__name__}: {error}). They go on, and compare again once it answers. If it does not, "
                "look for the rank or the network that is gone.",
                DDPPatchWarning,
                stacklevel=2,
            )
