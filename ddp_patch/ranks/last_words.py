"""What a rank writes into the store when it stops early, so that the others can name it and say why."""

import json
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from ddp_patch.compat.torch_groups import default_store
from ddp_patch.errors import DDPPatchError, MissingRanksError, RankMismatchError
from ddp_patch.ranks.comparison import ranks_text

__all__ = ["Kind", "LastWords"]

Kind: TypeAlias = Literal["left", "failed", "missing"]


class LastWords:
    """What the members of a channel write into the store: who left it first, and who waits.

    The first word stays until its writer opens its next channel; the rest goes with the channel.

    Args:
        name: The channel's name.
        members: The global ranks that take part.
        doing: What they are doing, for errors.
        stale: Keys of earlier channels, which are deleted; this channel's come there.
    """

    def __init__(self, name: str, members: Sequence[int], doing: str, stale: list[str]) -> None:
        self.name = name
        self._members, self._doing, self._stale = members, doing, stale
        self._store: Any = default_store()
        self._first, self._waits = f"ddp_patch/words/{name}", f"ddp_patch/waits/{name}"
        self._is_waiting = False
        while stale:
            self._store.delete_key(stale.pop())

    def leave(self, place: int, kind: Kind, said: str, steps: int = 0) -> None:
        """Write why this rank leaves, unless another has written already.

        Args:
            place: This rank's number among the members.
            kind: Whether it asks for no more, cannot continue, or misses others.
            said: After which batch, why, or the whole error.
            steps: In how many steps it took part.
        """
        word = json.dumps([place, kind, said, steps])
        if self._store.compare_set(self._first, "", word).decode() == word:
            self._stale.append(self._first)

    def require_none(self, step: int | None = None) -> None:
        """Raise the error of the member that left first, if one did.

        Args:
            step: The step that this rank waits for. A member that left after its part in that step is not to blame.
        """
        if not self._store.check([self._first]):
            return
        place, kind, said, steps = json.loads(self._store.get(self._first))
        if kind != "left" or step is None or step >= steps:
            raise self._error(place, kind, said)

    def _error(self, place: int, kind: Kind, said: str) -> DDPPatchError:
        who = ranks_text([self._members[place]])
        if kind == "missing":
            return MissingRanksError(said)
        if kind == "failed":
            return RankMismatchError(
                f"{self._doing}: {who} could not continue.\n  {who}: {said}\n"
                "Correct the error above and start all ranks again."
            )
        return RankMismatchError(
            f"{self._doing}: {who} left this pass after {said}, and others ask for more. The ranks communicate in "
            "each step, so every pass needs all of them. Let every rank take equally many batches: break after the "
            "same one on all, or iterate to the end."
        )

    def wait(self, place: int, step: int) -> None:
        """Write that this rank waits for a step."""
        self._store.set(f"{self._waits}/{place}", f"{step}")
        self._is_waiting = True

    def not_waiting(self, step: int) -> list[int]:
        """Return the numbers of the members that do not wait for a step."""
        keys = [f"{self._waits}/{place}" for place in range(len(self._members))]
        said = [int(self._store.get(key)) if self._store.check([key]) else -1 for key in keys]
        return [place for place, waits_for in enumerate(said) if waits_for != step]

    def tidy(self, place: int) -> None:
        """Delete what this rank wrote about waiting."""
        if self._is_waiting:
            self._store.delete_key(f"{self._waits}/{place}")
