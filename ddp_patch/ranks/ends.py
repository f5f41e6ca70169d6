"""Compare where passes end: other ranks may get more batches, or may not have begun the pass."""

from time import monotonic, perf_counter, sleep

from ddp_patch.ranks.claims import Claims

# In a pass of unknown length, every one of the first steps is reported. Reports of later steps take at most 1/100 of
# the time.
_REPORTED_STEPS, _STEP_TIMES = 1000, 100
# At the end of such a pass, a rank waits at most 3 s, or 2 steps if these take longer, for ranks that may get more
# batches: with DDP, other ranks are one step behind at most, but a step may take long to load.
_MOMENT_S, _STEPS, _MOST_S, _AGAIN_S = 3.0, 2, 60.0, 0.002
# How many batches a rank may report before another rank reads the first report.
_SLOTS = 8
# How many seconds a rank waits, in all passes over a loader, for ranks that have not begun a pass that it has finished.
PATIENCE_S = 10.0
_CHECK_S = 0.5  # how many seconds lie between two checks of these ranks


class Ends:
    """Compares the ends of this rank's passes with the other ranks' progress.

    A stream that ends early on a rank can be noticed only by this rank: the other ranks wait for it in their next
    collective. All ranks set the same value when they get a batch, so reading it costs the same for any number of
    ranks. Setting the value needs no answer of the store, so no step waits.

    Attributes:
        all_begun: The number of the latest pass that all ranks have begun, as far as this rank knows.
    """

    def __init__(self) -> None:
        self.all_begun: int = -1
        self._ends = 0  # how many passes ended
        self._patience_s = PATIENCE_S
        self._first_step_s, self._due_s = 0.0, 0.0  # when the first step came, and when the next report is due

    def give_step(self, claims: Claims, step: str, batches: int) -> None:
        """Report how many batches of a pass this rank has got, if a report is due."""
        now_s = perf_counter()
        if batches == 1:
            self._first_step_s = now_s
        if now_s < self._due_s:
            return
        claims.put(f"given/{batches % _SLOTS}", f"{step} {batches}")
        if batches >= _REPORTED_STEPS:
            reported_s = perf_counter()
            self._due_s = reported_s + _STEP_TIMES * (reported_s - now_s)

    def is_short(self, claims: Claims, step: str, batches: int, slack: int) -> bool:
        """Wait a moment for ranks that may get more batches of a pass; return whether a rank did.

        Args:
            claims: The claims in which ranks report their batches.
            step: A name of the pass.
            batches: How many batches this rank has got.
            slack: How many more batches another rank may rightly get.
        """
        self._ends += 1
        ended, more = claims.add("ended", 1), batches + slack + 1
        step_s = (perf_counter() - self._first_step_s) / max(1, batches - 1) if batches else 0.0
        until_s = monotonic() + min(max(_MOMENT_S, _STEPS * step_s), _MOST_S)
        while claims.value(f"given/{more % _SLOTS}") != f"{step} {more}":
            # If all ranks have ended the pass, no rank gets more.
            if ended >= self._ends * len(claims.members) or not claims.store.is_heard or monotonic() > until_s:
                return False
            sleep(_AGAIN_S)
            ended = claims.add("ended", 0)
        return True

    def missing(self, claims: Claims, number: int, made: int | None) -> tuple[list[int], str]:
        """Wait for the ranks that have not begun a pass that this rank has finished; return them, and a proof.

        Args:
            claims: The claims in which ranks report the passes that they have begun.
            number: The number of the pass.
            made: How many passes this rank has begun over all loaders; None if the ranks do not compare this number.

        Returns:
            The ranks that have not begun the pass, and the fact that proves that one of them never will; empty without
            proof.
        """
        began_s = checked_s = monotonic()
        missing, why = list[int](), ""
        while self.all_begun < number and claims.store.is_heard and self._patience_s > 0:
            is_over = monotonic() - began_s > self._patience_s
            if is_over or monotonic() - checked_s > _CHECK_S:
                checked_s = monotonic()
                missing, why = _without(claims, number, made)
                if is_over or why or not missing:
                    break
            sleep(10 * _AGAIN_S)
            self.all_begun = claims.hear()
        self._patience_s -= monotonic() - began_s
        return (missing, why) if self.all_begun < number else ([], "")


def _without(claims: Claims, number: int, made: int | None) -> tuple[list[int], str]:
    """Return the ranks that have not begun a pass, and the fact that proves that one of them never will."""
    missing, why = [], ""
    for rank in claims.members:
        # Read the rank's other passes first, so that it has made these before the pass.
        has_exited, has_made = claims.value(f"exit/{rank}") is not None, int(claims.value(f"/made/{rank}") or 0)
        if int(claims.value(f"begun/{rank}") or -1) < number:
            missing.append(rank)
            if has_exited:
                why = why or f"rank {rank} has ended"
            elif made is not None and has_made > made:
                why = why or f"rank {rank} has made {has_made} passes over all loaders, and this rank {made}"
    return missing, why
