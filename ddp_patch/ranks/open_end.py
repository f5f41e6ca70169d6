"""Find out, at the end of a pass whose end nobody knew, whether other ranks are given more of it."""

from time import monotonic, perf_counter, sleep

from ddp_patch.ranks.mailbox import Mailbox

__all__ = ["OpenEnd"]

# The first steps of a pass are all told. Later ones may take one part in so many of the time.
_TOLD_STEPS, _STEP_TIMES = 1000, 100
# Whoever comes to the end waits at most so long for ranks that may be given more, or for so many steps if these take
# longer: with DDP the others are a step behind at most, but a step may take long to load.
_MOMENT_S, _STEPS, _MOST_S, _AGAIN_S = 1.0, 2, 60.0, 0.002
# So many batches may be given on one rank before another sees what the first one left.
_SLOTS = 8


class OpenEnd:
    """How many batches ranks are given of passes whose end nobody knows before it comes.

    A rank whose stream ends early finds that out only here: the others wait for it in their next collective, and ask
    for nothing more. All ranks leave the same value where they are given a batch, so what one reads does not grow with
    the number of ranks; to leave it takes no answer of the store's, so no step waits.

    Args:
        mailbox: Where the ranks leave records of the loader.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox, self._ends = mailbox, 0
        self._due_s = self._first_s = 0.0

    def give(self, name: str, batches: int) -> None:
        """Leave that this rank was given so many batches of the pass with this name, if that is due."""
        now_s = perf_counter()
        if batches == 1:
            self._first_s = now_s
        if now_s < self._due_s:
            return
        self._mailbox.leave(f"given/{batches % _SLOTS}", f"{name} {batches}")
        if batches >= _TOLD_STEPS:
            told_s = perf_counter()
            self._due_s = told_s + _STEP_TIMES * (told_s - now_s)

    def is_longer(self, name: str, batches: int, slack: int) -> bool:
        """Return, at the end of a pass, whether another rank was given more of it; wait a moment for the others.

        Args:
            name: The pass.
            batches: How many batches this rank was given.
            slack: How many more another may have.
        """
        self._ends += 1
        ended = self._mailbox.count("ended", 1)
        step_s = (perf_counter() - self._first_s) / max(1, batches - 1) if batches else 0.0
        until_s = monotonic() + min(max(_MOMENT_S, _STEPS * step_s), _MOST_S)
        more = batches + slack + 1
        while True:
            if self._mailbox.left(f"given/{more % _SLOTS}") == f"{name} {more}":
                return True
            # All that have come to their ends: then nobody is given more.
            if (
                ended >= self._ends * len(self._mailbox.peers.members)
                or not self._mailbox.is_open
                or monotonic() > until_s
            ):
                return False
            sleep(_AGAIN_S)
            ended = self._mailbox.count("ended", 0)
