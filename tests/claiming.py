"""Ranks in one process that claim facts of their passes in one store, step by step."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist

from ddp_patch.errors import RankMismatchError
from ddp_patch.orders.digest import Digest
from ddp_patch.ranks import claims
from ddp_patch.ranks.claims import Claims
from ddp_patch.ranks.pass_facts import MORE_THAN_A_LOOK, BegunPass, Progress, Stage, State, next_count
from ddp_patch.ranks.pass_monitor import PassMonitor, Rules

__all__ = ["Connection", "Rank", "connected", "new_store", "rule_of", "run_together"]

# What each rule says.
_SAYS = {
    "passes": "the ranks make different passes",
    "others": "different numbers of passes over their other loaders",
    "order": "draw different orders",
    "length": "took more of it",
    "data": "differ at the same indices",
}


def marks_of(digest: Digest) -> dict[int, tuple[int, int]]:
    """Return the marks of items that have no numbers beside their names."""
    return {count: (value, 0) for count, value in digest.marks.items()}


def new_store() -> Any:
    """Return a store in this process."""
    return dist.HashStore()  # type: ignore[attr-defined]  # torch documents it


class Connection:
    """A rank's own connection to a store, which counts what it asks.

    Attributes:
        asked: The operations, and the names of the keys.
    """

    current: "Connection | None" = None  # that of the rank that acts

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        def asking(key: str, *arguments: Any) -> Any:
            self.asked.append((name, key))
            return getattr(self._store, name)(key, *arguments)

        return asking


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each rank find its own connection."""
    monkeypatch.setattr(claims, "default_store", lambda: Connection.current)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)


class Rank:
    """A rank that makes passes over a loader.

    Args:
        store: The store of all ranks.
        rank: Its number.
        ranks: How many there are.
        slack: How many batches more one rank may have.
        has_one_order: Whether all epochs have one order.
        forgets_looks: Whether looks do not count; as ``has_one_order`` by default.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int = 2,
        *,
        slack: int = 0,
        has_one_order: bool = False,
        forgets_looks: bool | None = None,
    ) -> None:
        self.connection, self.slack = Connection(store), slack
        Connection.current = self.connection
        rules = Rules(
            has_one_order=has_one_order, forgets_looks=has_one_order if forgets_looks is None else forgets_looks
        )
        self.monitor = PassMonitor(Claims("ranks/loader", rank, range(ranks)), rules)

    def runs(self, program: Sequence[tuple[Any, ...]]) -> Iterator[None]:
        """Do what each act of a program says, which begins with its name, in steps."""
        for name, *arguments in program:
            yield from getattr(self, name)(*arguments)

    def takes(
        self, epoch: int, batches: int, over: State = State.RUNNING, how: dict[str, Any] | None = None
    ) -> Iterator[None]:
        """Take so many batches of a new pass, with what the loop is told at last."""
        options: dict[str, Any] = {
            "item": 0,
            "order": "abcdefghijklmnop",
            "others": 0,
            "data": "",
            "nested": 0,
            **(how or {}),
        }
        given, state, digest, due, is_own = 0, State.RUNNING, Digest(), 2, options["others"] is None

        def progress() -> Progress:
            return Progress(given, given, state, None if is_own else self.slack, given)

        begun = self.monitor.begin(epoch, options["item"], progress, lambda: marks_of(digest))
        assert begun is not None
        begun.word = begun.word._replace(other_passes=options["others"], data=options["data"])
        yield
        for number in range(batches):
            digest.add(options["order"][number])
            given += 1
            self._tell(begun, progress())
            if given <= MORE_THAN_A_LOOK:
                self.monitor.numbers.goes_on(begun)
            if given >= due:
                self.monitor.compare(begun, due)
                due = next_count(due)
            yield
            if not number and options["nested"]:
                yield from self.takes(epoch + 1, options["nested"])
        state = over
        if over is State.ENDED:  # of all ranks' items
            for item in options["order"][batches:]:
                digest.add(item)
            digest.end()
        self._tell(begun, progress())
        if over is State.FAILED:
            with suppress(RankMismatchError):
                self.monitor.compare(begun)
        elif over is not State.RUNNING:
            self.monitor.compare(begun)
        yield

    def _tell(self, begun: BegunPass, given: Progress) -> None:
        if begun.stage is Stage.REPORTS:
            begun.report(given)

    def sets_an_epoch(self) -> Iterator[None]:
        """Choose an epoch."""
        self.monitor.numbers.strike_looks()
        yield

    def restores(self) -> Iterator[None]:
        """Restore a position."""
        self.monitor.numbers.cut_off()
        yield

    def hears(self) -> Iterator[None]:
        """Compare once more, as at the second batch of whatever comes."""
        self.monitor.compare(None)
        yield


def rule_of(error: RankMismatchError) -> str:
    """Return which rule an error is about."""
    return next(rule for rule, said in _SAYS.items() if said in str(error))


def run_together(ranks: list[Rank], programs: list[list[tuple[Any, ...]]], turns: Any) -> list[str]:
    """Run a program on each rank, one step at a time, in the order of ``turns``; return the rules that were broken."""
    running = {number: rank.runs(program) for number, (rank, program) in enumerate(zip(ranks, programs, strict=True))}
    found = []
    while running:
        number = turns([*running])
        Connection.current = ranks[number].connection
        try:
            if next(running[number], running) is running:
                del running[number]
        except RankMismatchError as error:
            found.append(rule_of(error))
            del running[number]
    return found
