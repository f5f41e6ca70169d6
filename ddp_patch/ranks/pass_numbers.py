"""The numbers of this rank's passes over one loader: which passes are more than looks, and which are left."""

from ddp_patch.ranks.pass_facts import BegunPass

__all__ = ["MORE_THAN_A_LOOK", "PassNumbers"]

# A pass that was struck as a look counts again when it is given a batch, up to so many; then it is struck no more.
MORE_THAN_A_LOOK = 2


class PassNumbers:
    """Numbers the passes over a loader that are more than looks.

    A pass is left when the next one takes its second batch, or ends. A pass that a restored position cuts off may have
    any length. Looks, of at most one batch, are struck if an epoch is chosen after them, or if they move no order.

    Args:
        forgets_looks: Whether looks are struck where the next pass begins, too.
    """

    def __init__(self, *, forgets_looks: bool = False) -> None:
        self.next: int = 0  # the number that comes next
        self._forgets_looks = forgets_looks
        self._passes: list[BegunPass] = []  # the latest one that is more than a look, and those after it

    def add(self, begun: BegunPass) -> None:
        """Add a pass that begins."""
        if self._forgets_looks:
            self.strike_looks()
        for made in self._passes:
            made.report(made.progress())
        self._passes.append(begun)

    def goes_on(self, begun: BegunPass) -> None:
        """Add a pass again that was struck, and that goes on all the same."""
        if begun.number is None and begun not in self._passes:
            if self._forgets_looks:  # a look within it had struck it
                self.strike_looks()
            self._passes.append(begun)

    def strike_looks(self) -> None:
        """Strike the looks at the end: an epoch is chosen."""
        while self._passes and self._passes[-1].number is None and self._passes[-1].is_look:
            self._passes.pop()

    def cut_off(self) -> None:
        """Let the passes that run have any length: a position is restored."""
        self.strike_looks()
        for made in self._passes:
            made.word = made.word._replace(slack=None)

    def settle(self) -> tuple[list[BegunPass], list[BegunPass]]:
        """Number the passes that are more than looks; return those that have a number now, and those that are left."""
        more_than_looks = (at for at, one in enumerate(self._passes) if one.number is not None or not one.is_look)
        last = max(more_than_looks, default=-1)
        settled, self._passes = self._passes[: last + 1], self._passes[max(0, last) :]
        numbered = [begun for begun in settled if begun.number is None]
        for begun in numbered:
            begun.number, self.next = self.next, self.next + 1
        left = settled[:-1]
        for begun in left:
            begun.leave()
        return numbered, left
