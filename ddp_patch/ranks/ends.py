"""Where passes end on one rank: others may be given more, or may not have begun them."""

from time import monotonic, perf_counter, sleep

from ddp_patch.ranks.claims import Claims

__all__ = ["Ends"]

# The first steps of a pass whose end nobody knows are all told. Later ones may take one part in so many of the time.
_TOLD_STEPS, _STEP_TIMES = 1000, 100
# Whoever comes to such an end waits at most so long for ranks that may be given more, or for so many steps if these
# take longer: with DDP the others are a step behind at most, but a step may take long to load.
_MOMENT_S, _STEPS, _MOST_S, _AGAIN_S = 3.0, 2, 60.0, 0.002
# So many batches may be given on one rank before another sees what the first one left.
_SLOTS = 8


class Ends:
    """Compares the ends of passes that nobody knows before.

    A rank whose stream ends early finds that out only there: the others wait for it in their next collective, and ask
    for nothing more. All ranks leave the same value where they are given a batch, so what one reads does not grow with
    the number of ranks; to leave it takes no answer of the store's, so no step waits.

    Attributes:
        all_begun: The number of the latest pass that all ranks have begun, as far as this one has heard.
    """

    def __init__(self) -> None:
        self.all_begun: int = -1
        self._ends = 0  # how many passes ended
        self._first_step_s, self._due_s = 0.0, 0.0  # when the first step came, and when the next is told

    def give_step(self, claims: Claims, step: str, batches: int) -> None:
        """Leave that this rank was given so many batches of a pass, if that is due."""
        now_s = perf_counter()
        if batches == 1:
            self._first_step_s = now_s
        if now_s < self._due_s:
            return
        claims.put(f"given/{batches % _SLOTS}", f"{step} {batches}")
        if batches >= _TOLD_STEPS:
            told_s = perf_counter()
            self._due_s = told_s + _STEP_TIMES * (told_s - now_s)

    def is_short(self, claims: Claims, step: str, batches: int, slack: int) -> bool:
        """Wait a moment for ranks that may be given more of a pass; return whether one was.

        Args:
            claims: Where ranks leave what they were given.
            step: Names the pass.
            batches: How many batches this rank was given.
            slack: How many more another may be given.
        """
        self._ends += 1
        ended, more = claims.add("ended", 1), batches + slack + 1
        step_s = (perf_counter() - self._first_step_s) / max(1, batches - 1) if batches else 0.0
        until_s = monotonic() + min(max(_MOMENT_S, _STEPS * step_s), _MOST_S)
        while claims.value(f"given/{more % _SLOTS}") != f"{step} {more}":
            # All that have come to their ends: then nobody is given more.
            if ended >= self._ends * len(claims.members) or not claims.is_heard or monotonic() > until_s:
                return False
            sleep(_AGAIN_S)
            ended = claims.add("ended", 0)
        return True
