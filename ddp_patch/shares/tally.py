"""Count the batches that a training loop is given; with workers, the sampler is asked for more."""

from typing import Any

from ddp_patch.errors import DDPPatchError
from ddp_patch.shares.epochs import EpochSampler
from ddp_patch.shares.passes import Pass

__all__ = ["Tally"]


class Tally:
    """Counts the batches that one iterator of a loader gives, in the pass that it makes.

    The count stays on the pass when the iterator is gone, as it is after a ``break``.

    Args:
        sampler: What shards the loader.
        begins_ahead: Whether a pass has begun before its first batch is asked for, as workers begin it; else the first
            batch begins it.
    """

    def __init__(self, sampler: EpochSampler[Any], *, begins_ahead: bool) -> None:
        self._sampler, self._begins_ahead = sampler, begins_ahead
        self._pass: Pass[Any] | None = None
        self.begin()

    def begin(self) -> None:
        """Record that a pass begins."""
        if self._pass is not None:
            self._pass.note_left()
        self._batches = 0
        self._has_failed = self._has_pass = False
        self._pass = None
        if self._begins_ahead:
            self._find_pass()

    def count(self) -> None:
        """Record that a batch is given. It is called for each, so it calls little itself."""
        if not self._has_pass:
            self._find_pass()
        self._batches += 1
        if (one := self._pass) is not None:
            # The loader continued after an error, so some batch was skipped: nobody knows the position.
            one.note_handed_out(None if self._has_failed else self._batches)
            if (latest := self._sampler.latest) is None:
                self._sampler.note_running(one)
            elif latest is not one:
                latest.note_interleaved()

    def fail(self, error: BaseException) -> None:
        """Record that an error came instead of a batch; one of this package's leaves no doubt about what is lost."""
        self._find_pass()
        self._has_failed = True
        if self._pass is not None and isinstance(error, Exception) and not isinstance(error, DDPPatchError | Warning):
            self._pass.note_failed()

    def end(self) -> None:
        """Record that the loop has seen the end."""
        self._find_pass()
        if self._pass is not None and not self._has_failed:
            self._pass.note_exhausted()

    def _find_pass(self) -> None:
        """Remember the pass, once: it is the latest one now, and another iterator may begin another."""
        if self._has_pass:
            return
        self._has_pass, self._pass = True, self._sampler.latest
        if self._pass is not None:
            self._pass.note_loop(self)
