"""Compares the ranks' passes over one loader: claims the facts of each, and raises where two exclude each other."""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import get_ident, main_thread
from typing import Any, Literal
from weakref import WeakKeyDictionary

from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import PartialPassWarning, RankMismatchError, RankMismatchWarning, StreamLengthWarning
from ddp_patch.loaders.overlap import Sketch
from ddp_patch.ranks.claims import Claims
from ddp_patch.ranks.ends import PATIENCE_S, Ends
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.parts import Parts
from ddp_patch.ranks.pass_facts import (
    Beginning,
    BegunPass,
    Digests,
    PassNumbers,
    Progress,
    Stage,
    State,
    Word,
    next_count,
)
from ddp_patch.ranks.pass_rules import ALL_ITERATE, Rule, mismatch_text, rule_broken, shorter
from ddp_patch.validation import counted

__all__ = ["PassMonitor", "PassesMade", "Rules"]

# How many passes were made over all loaders of some ranks, by the store, who they are, and the thread that made them.
_passes_made: WeakKeyDictionary[Any, Counter[tuple[str, int]]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What holds for the passes over a loader.

    Attributes:
        name: Returns what errors call the loader.
        has_one_order: Whether all epochs have one order, so that it does not matter which one a pass is over.
        forgets_looks: Whether looks are struck where the next pass begins.
        lengths: Whether all ranks have equally many batches in a pass ("alike"); whether the user says so, and other
            lengths are a warning ("warned"); or whether each rank may have any number ("any").
        why: Says what may differ, and what to do, by the rule that is broken: "order", "numbers" and "data".
        data_digest: Returns a digest of the data when a pass begins; empty if the ranks do not compare it.
        is_begun_by_all: Whether each rank has a share of a pass, which all begin.
    """

    name: Callable[[], str] = lambda: "loader"
    has_one_order: bool = False
    forgets_looks: bool = False
    lengths: Literal["alike", "warned", "any"] = "alike"
    why: Mapping[Rule, Callable[[], str]] = field(default_factory=dict)
    data_digest: Callable[[], str] = str
    is_begun_by_all: bool = False

    def why_broken(self, rule: Rule) -> str:
        """Return what may differ where a rule is broken, and what to do; empty if that is always the same."""
        return self.why.get(rule, str)()


class PassesMade:
    """How many passes this rank has made, in one thread, over the loaders that some ranks share.

    Args:
        claims: Where these ranks claim; None if there is nobody to compare with.
    """

    def __init__(self, claims: Claims | None) -> None:
        self._claims, self._thread = claims, get_ident()
        self._over_this = self.over_all or 0  # with those over others before this loader came

    @property
    def is_own_thread(self) -> bool:
        """Whether the thread is that in which the loader was patched."""
        return get_ident() == self._thread

    @property
    def _counts(self) -> Counter[tuple[str, int]] | None:
        is_open = self._claims is not None and self._claims.store.opened() is not None
        return _passes_made.setdefault(default_store(), Counter()) if is_open else None

    @property
    def over_all(self) -> int | None:
        """How many over all loaders; None once the process group is gone."""
        counts = self._counts
        return None if counts is None or self._claims is None else counts[self._claims.group, self._thread]

    @property
    def over_others(self) -> int | None:
        """How many over other loaders, since this one was patched; None once the process group is gone."""
        made = self.over_all
        return None if made is None else made - self._over_this

    @property
    def by_main(self) -> int | None:
        """As ``over_all``; None in other threads than the main one."""
        return self.over_all if self._thread == main_thread().ident else None

    def count(self) -> None:
        """Count a pass over this loader."""
        if self._claims is not None and (counts := self._counts) is not None:
            counts[self._claims.group, self._thread] += 1
            self._over_this += 1


class PassMonitor:
    """Claims the facts of this rank's passes over one loader, and raises where another rank's word excludes them.

    Args:
        claims: Where the ranks claim; None if there is nobody to compare with.
        rules: What holds for the loader.
        parts: Compares the ranks' samples, where each has a part of the data; None if it has not.

    Attributes:
        claims, rules, parts: As given.
        numbers: Numbers the passes.
        ends: Compares where passes end.
    """

    def __init__(self, claims: Claims | None = None, rules: Rules | None = None, parts: Parts | None = None) -> None:
        self.claims: Claims | None = claims
        self.rules: Rules = Rules() if rules is None else rules
        self.parts: Parts | None = parts
        self.numbers: PassNumbers = PassNumbers(forgets_looks=self.rules.forgets_looks)
        self.ends: Ends = Ends()
        self._made = PassesMade(claims)
        self._has_warned = self._has_warned_of_numbers = False

    def __reduce__(self) -> tuple[type["PassMonitor"], tuple[()]]:
        return PassMonitor, ()  # a copy makes passes of its own, which other ranks need not know about

    @property
    def is_on(self) -> bool:
        """Whether there is anybody to compare with."""
        return self.claims is not None

    def begin(
        self,
        epoch: int,
        item: int,
        progress: Callable[[], Progress],
        digests: Digests | None = None,
        sketch: Sketch | None = None,
    ) -> BegunPass | None:
        """Note that a pass begins; return None if there is nobody to compare with.

        Args:
            epoch: The epoch that it is over.
            item: How many items of the epoch were taken before.
            progress: Returns how far it has come.
            digests: The digests of what it draws; None if the ranks do not compare that.
            sketch: What its sampler notes of it, if that does.
        """
        if self.claims is None:
            return None
        # In another thread something reads ahead, by as much as there was time for.
        is_own = self.rules.lengths == "any" or not self._made.is_own_thread
        begins = Beginning(epoch, item, None if is_own else self._made.over_others, self.rules.data_digest())
        sketch = self.parts.sketch(sketch) if self.parts is not None else None
        word = Word(self.claims.rank, begins, None if is_own else 0)
        begun = BegunPass(word, progress, digests or Digests(), sketch)
        self.numbers.add(begun)
        return begun

    # ---- passes whose end nobody knows before ----

    def give_step(self, begun: BegunPass, batches: int) -> None:
        """Report that this rank was given so many batches of such a pass, if that is due."""
        if self.claims is not None:
            self.ends.give_step(self.claims, self._step(begun), batches)

    def end_steps(self, begun: BegunPass, batches: int) -> None:
        """Compare how many batches such a pass had; wait a moment for ranks that may be given more.

        Raises:
            RankMismatchError: Another rank was given more.
        """
        slack = begun.progress().slack or 0
        if self.claims is not None and self.ends.is_short(self.claims, self._step(begun), batches, slack):
            self._raise(
                f"Iterating the {self.rules.name()}: epoch {begun.word.begins.epoch} ended after "
                f"{counted(batches, 'batch')} on rank {self.claims.rank}, and others were given more. "
                f"{self.rules.why_broken('order')}",
                is_length=True,
            )

    def end_whole(self, begun: BegunPass) -> None:
        """Compare who has begun a pass of which this rank was given all; wait a moment for those that have not.

        Raises:
            RankMismatchError: One of them never will.

        Warns:
            PartialPassWarning: Some have not, so what follows of the pass is about a part of the data.
        """
        claims, number = self.claims, begun.number
        is_compared = self.rules.is_begun_by_all and begun.word.slack == begun.progress().slack == 0
        if claims is None or number is None or not is_compared or self.ends.all_begun >= number:
            return
        if claims.store.has_failed and not claims.put(f"begun/{claims.rank}", f"{number}"):
            return  # others may know as little of this rank as it does of them
        missing, why = self.ends.missing(claims, number, self._made.by_main)
        if not missing:
            return
        seen = (
            f"Iterating the {self.rules.name()}: {ranks_text([claims.rank])} was given its whole share of epoch "
            f"{begun.word.begins.epoch}, and {ranks_text(missing)} of {len(claims.members)}"
        )
        if why:
            self._raise(f"{seen} never began that pass: {why}. So samples would be lost. {ALL_ITERATE}")
        warnings.warn(
            f"{seen} had not begun that pass {PATIENCE_S:g} s later: they iterate another loader, or nothing. So what "
            f"follows of it is about a part of the data. {ALL_ITERATE}",
            PartialPassWarning,
            stacklevel=2,
        )

    def _step(self, begun: BegunPass) -> str:
        """Return the same text for a pass on every rank."""
        number = self.numbers.next if begun.number is None else begun.number
        return f"{number}.{begun.word.begins.epoch} from {begun.word.begins.item}"

    # ---- claiming ----

    def compare(self, begun: BegunPass | None, count: int | None = None) -> None:
        """Claim what this rank knows of a pass and those before it, and hear what others have found.

        Args:
            begun: The pass.
            count: After how many batches; None where it is over.

        Raises:
            RankMismatchError: Another rank's word excludes this one's, or a rank has found that.
        """
        if self.claims is None:
            return
        numbered, left = self.numbers.settle()
        for one in numbered:
            self._count(one)
        for one in left:
            self._say_over(one)
        if begun is not None and begun.number is not None and begun.stage is not Stage.LEFT:
            if begun.progress().state is not State.RUNNING:
                self._say_over(begun)
            elif count is not None:
                self._say(begun, count, begun.said(count))
            if self.parts is not None:
                self.parts.compare(self.claims, begun.number, begun.sketch, count, self._raise)
        self.ends.all_begun = self.claims.hear()
        self.claims.forget_passes(self.ends.all_begun - 2)

    def report(self, begun: BegunPass | None) -> None:
        """Say how far this rank has come in a pass, and raise nothing: it was given an error already."""
        with suppress(RankMismatchError):
            self.compare(begun)

    def _count(self, begun: BegunPass) -> None:
        """Count a pass that has begun, for all loaders; and report it to the others."""
        claims, number, made = self.claims, begun.number, self._made
        if claims is None or number is None or made.over_all is None:
            return
        if not (begun.progress().slack or begun.word.slack is None):
            made.count()
        claims.put(f"begun/{claims.rank}", f"{number}")
        if (by_main := made.by_main) is not None:
            claims.put(f"/made/{claims.rank}", f"{by_main}")
        if claims.add(f"{number}/begun", 1) == len(claims.members):
            claims.tell(number)

    def _say(self, begun: BegunPass, count: int, word: Word) -> Word | None:
        """Claim a word of a pass at a count; return that of another rank, if that counts."""
        claims, number = self.claims, begun.number
        if claims is None or number is None:
            return None
        text = word.as_text()
        theirs = Word.of(found) if (found := claims.claim(f"{number}/{count}", text)) != text else None
        for other in (begun.over, theirs):
            if other is not None and other.rank != word.rank:
                self._judge(begun, number, word, other)
        if theirs is not None and theirs.state is not State.RUNNING:
            begun.over = theirs
        return theirs

    def _say_over(self, begun: BegunPass) -> None:
        """Claim where a pass was over, at the next count; or after that, where another may go on to there."""
        if begun.is_said:
            return
        begun.is_said, word = True, begun.said()
        count = next_count(word.batches)
        while word.slack is not None and (theirs := self._say(begun, count, word)) is not None:
            if theirs.state is not State.RUNNING:
                break
            count = next_count(count)

    def _judge(self, begun: BegunPass, number: int, mine: Word, theirs: Word) -> None:
        """Raise RankMismatchError, and leave it for all, if two ranks' words exclude each other.

        Warn, once, if two ranks' items differ in their numbers alone: harmless programs do that, too.
        """
        rule = rule_broken(mine, theirs, begun.digests.items(), has_one_order=self.rules.has_one_order)
        at, _, value = theirs.mark or (0, 0, 0)
        if rule is not None:
            is_unequal = rule == "length" and shorter(mine, theirs).state is State.ENDED
            text = mismatch_text(self.rules.name(), number, rule, (mine, theirs), self.rules.why_broken(rule))
            self._raise(text, is_length=is_unequal)
        elif not self._has_warned_of_numbers and begun.digests.numbers().get(at, value) != value:
            self._has_warned_of_numbers = True
            why = self.rules.why_broken("numbers")
            text = mismatch_text(self.rules.name(), number, "numbers", (mine, theirs), why)
            warnings.warn(text, RankMismatchWarning, stacklevel=2)

    def _raise(self, text: str, *, is_length: bool = False) -> None:
        """Raise a mismatch, and leave it for all; or only warn, once, where the user says that lengths are right."""
        if not (is_length and self.rules.lengths == "warned"):
            if self.claims is not None:
                self.claims.tell(text)
            raise RankMismatchError(text)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, StreamLengthWarning, stacklevel=2)
