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
# Whoever was given a whole pass waits at most so long, in all passes over a loader, for ranks that have not begun it.
PATIENCE_S = 10.0
_LOOK_S = 0.5  # between two looks at what these ranks do


class Ends:
    """Compares the ends of passes with what other ranks do.

    A rank whose stream ends early finds that out only there: the others wait for it in their next collective, and ask
    for nothing more. All ranks leave the same value where they are given a batch, so what one reads does not grow with
    the number of ranks; to leave it takes no answer of the store's, so no step waits.

    Attributes:
        all_begun: The number of the latest pass that all ranks have begun, as far as this one has heard.
    """

    def __init__(self) -> None:
        self.all_begun: int = -1
        self._ends = 0  # how many passes ended
        self._patience_s = PATIENCE_S
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
            if ended >= self._ends * len(claims.members) or not claims.store.is_heard or monotonic() > until_s:
                return False
            sleep(_AGAIN_S)
            ended = claims.add("ended", 0)
        return True

    def missing(self, claims: Claims, number: int, made: int | None) -> tuple[list[int], str]:
        """Wait for ranks that have not begun a pass, of which this one was given all; return them, and what is certain.

        Args:
            claims: Where ranks tell which passes they have begun.
            number: That of the pass.
            made: How many passes this rank has made over all loaders; None if that is not compared.

        Returns:
            The ranks that have not begun it, and what shows that one never will; empty where that is not certain.
        """
        began_s = looked_s = monotonic()
        missing, why = list[int](), ""
        while self.all_begun < number and claims.store.is_heard and self._patience_s > 0:
            is_over = monotonic() - began_s > self._patience_s
            if is_over or monotonic() - looked_s > _LOOK_S:
                looked_s = monotonic()
                missing, why = _without(claims, number, made)
                if is_over or why or not missing:
                    break
            sleep(10 * _AGAIN_S)
            self.all_begun = claims.hear()
        self._patience_s -= monotonic() - began_s
        return (missing, why) if self.all_begun < number else ([], "")


def _without(claims: Claims, number: int, made: int | None) -> tuple[list[int], str]:
    """Return the ranks that have not begun a pass, and what shows that one never will."""
    missing, why = [], ""
    for rank in claims.members:
        # First what it does, so that it had done that without the pass.
        has_exited, has_made = claims.value(f"exit/{rank}") is not None, int(claims.value(f"/made/{rank}") or 0)
        if int(claims.value(f"begun/{rank}") or -1) < number:
            missing.append(rank)
            if has_exited:
                why = why or f"rank {rank} has ended"
            elif made is not None and has_made > made:
                why = why or f"rank {rank} has made {has_made} passes over all loaders, and this rank {made}"
    return missing, why
