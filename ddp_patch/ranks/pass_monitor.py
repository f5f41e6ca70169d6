"""Compare the ranks' passes over a loader: claim the facts of each pass, and raise an error if ranks' facts differ."""

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
from ddp_patch.orders.chunks import State
from ddp_patch.ranks.claims import Claims
from ddp_patch.ranks.ends import PATIENCE_S, Ends
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.parts import Parts
from ddp_patch.ranks.pass_facts import Beginning, BegunPass, Digests, PassNumbers, Progress, Stage, Word, next_count
from ddp_patch.ranks.pass_rules import ALL_ITERATE, Rule, mismatch_text, rule_broken, shorter
from ddp_patch.validation import counted

# How many passes were begun over all loaders: by the store, the ranks' group, and the thread.
_passes_made: WeakKeyDictionary[Any, Counter[tuple[str, int]]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules for comparing passes over a loader.

    Attributes:
        name: Returns the loader's name in errors.
        has_one_order: Whether all epochs have the same order, so that ranks may be in different epochs.
        forgets_looks: Whether looks are removed when the next pass begins.
        lengths: "alike" if all ranks must have equally many batches in a pass; "warned" if only the user says so, and
            unequal lengths warn; "any" if each rank may have any number.
        why: By the rule that is broken ("order", "numbers", "data"): returns what may differ, and what to do.
        data_digest: Returns a digest of the data when a pass begins; empty if the ranks do not compare it.
        is_begun_by_all: Whether each rank has a share of a pass, so that all ranks must begin it.
    """

    name: Callable[[], str] = lambda: "loader"
    has_one_order: bool = False
    forgets_looks: bool = False
    lengths: Literal["alike", "warned", "any"] = "alike"
    why: Mapping[Rule, Callable[[], str]] = field(default_factory=dict)
    data_digest: Callable[[], str] = str
    is_begun_by_all: bool = False

    def why_broken(self, rule: Rule) -> str:
        """Return what may differ if a rule is broken, and what to do; empty if the rule always has the same remedy."""
        return self.why.get(rule, str)()


class PassesMade:
    """How many passes this rank has begun, in one thread, over the loaders that a group of ranks shares.

    Args:
        claims: The ranks' claims; None if there are no ranks to compare with.
    """

    def __init__(self, claims: Claims | None) -> None:
        self._claims, self._thread = claims, get_ident()
        self._over_this = self.over_all or 0  # including passes over other loaders before this one was patched

    @property
    def is_own_thread(self) -> bool:
        """Whether this thread is the one in which the loader was patched."""
        return get_ident() == self._thread

    @property
    def _counts(self) -> Counter[tuple[str, int]] | None:
        is_open = self._claims is not None and self._claims.store.opened() is not None
        return _passes_made.setdefault(default_store(), Counter()) if is_open else None

    @property
    def over_all(self) -> int | None:
        """How many passes were begun over all loaders; None once the process group is gone."""
        counts = self._counts
        return None if counts is None or self._claims is None else counts[self._claims.group, self._thread]

    @property
    def over_others(self) -> int | None:
        """How many passes were begun over other loaders since the patch; None once the process group is gone."""
        made = self.over_all
        return None if made is None else made - self._over_this

    @property
    def by_main(self) -> int | None:
        """``over_all`` in the main thread; None in other threads."""
        return self.over_all if self._thread == main_thread().ident else None

    def count(self) -> None:
        """Count a pass over this loader."""
        if self._claims is not None and (counts := self._counts) is not None:
            counts[self._claims.group, self._thread] += 1
            self._over_this += 1


class PassMonitor:
    """Claims facts of this rank's passes over a loader, and raises an error if another rank's claims contradict them.

    Args:
        claims: The ranks' claims; None if there are no ranks to compare with.
        rules: The rules of the comparison.
        parts: Compares the ranks' samples, if each rank has a part of the data; else None.

    Attributes:
        claims, rules, parts: The arguments.
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
        return PassMonitor, ()  # the passes of a copy of the loader are not compared

    @property
    def is_on(self) -> bool:
        """Whether there are ranks to compare with."""
        return self.claims is not None

    def begin(
        self,
        epoch: int,
        item: int,
        progress: Callable[[], Progress],
        digests: Digests | None = None,
        sketch: Sketch | None = None,
    ) -> BegunPass | None:
        """Add a pass that begins; return None if there are no ranks to compare with.

        Args:
            epoch: The epoch of the pass.
            item: How many items of the epoch were taken before.
            progress: Returns the progress of the pass.
            digests: The marks of the pass; None if the ranks do not compare drawn items.
            sketch: The samples that its sampler records, if it does.
        """
        if self.claims is None:
            return None
        # Another thread prefetches as many batches as time allows, so its numbers of passes and batches are its own.
        is_own = self.rules.lengths == "any" or not self._made.is_own_thread
        begins = Beginning(epoch, item, None if is_own else self._made.over_others, self.rules.data_digest())
        sketch = self.parts.sketch(sketch) if self.parts is not None else None
        word = Word(self.claims.rank, begins, None if is_own else 0)
        begun = BegunPass(word, progress, digests or Digests(), sketch)
        self.numbers.add(begun)
        return begun

    # ---- passes of unknown length ----

    def give_step(self, begun: BegunPass, batches: int) -> None:
        """Report how many batches of a pass of unknown length this rank has got, if a report is due."""
        if self.claims is not None:
            self.ends.give_step(self.claims, self._step(begun), batches)

    def end_steps(self, begun: BegunPass, batches: int) -> None:
        """Compare how many batches a pass of unknown length had; wait a moment for ranks that may get more.

        Raises:
            RankMismatchError: Another rank got more batches.
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
        """Compare which ranks have begun a pass that this rank has finished; wait a moment for the others.

        Raises:
            RankMismatchError: A rank will never begin the pass.

        Warns:
            PartialPassWarning: A rank has not begun the pass, so results of the pass are about a part of the data.
        """
        claims, number = self.claims, begun.number
        is_compared = self.rules.is_begun_by_all and begun.word.slack == begun.progress().slack == 0
        if claims is None or number is None or not is_compared or self.ends.all_begun >= number:
            return
        if claims.store.has_failed and not claims.put(f"begun/{claims.rank}", f"{number}"):
            return  # other ranks may not know this rank's passes either
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
        """Return a name of the pass, the same on every rank."""
        number = self.numbers.next if begun.number is None else begun.number
        return f"{number}.{begun.word.begins.epoch} from {begun.word.begins.item}"

    # ---- claiming ----

    def compare(self, begun: BegunPass | None, count: int | None = None) -> None:
        """Claim this rank's words about a pass and the passes before it, and read whether a rank has found a mismatch.

        Args:
            begun: The pass.
            count: The number of batches so far; None if the pass is over.

        Raises:
            RankMismatchError: Another rank's word contradicts this rank's, or a rank has found a mismatch.
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
        """Claim this rank's word about a pass, and raise nothing, because the rank is raising an error already."""
        with suppress(RankMismatchError):
            self.compare(begun)

    def _count(self, begun: BegunPass) -> None:
        """Count a pass that has begun, for all loaders, and report it to the other ranks."""
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
        """Claim a word about a pass at a count; return another rank's word, if this word came first."""
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
        """Claim the end of a pass at the next count; at later counts, too, as long as another rank may go on."""
        if begun.is_said:
            return
        begun.is_said, word = True, begun.said()
        count = next_count(word.batches)
        while word.slack is not None and (theirs := self._say(begun, count, word)) is not None:
            if theirs.state is not State.RUNNING:
                break
            count = next_count(count)

    def _judge(self, begun: BegunPass, number: int, mine: Word, theirs: Word) -> None:
        """Raise RankMismatchError, and report it to all ranks, if two ranks' words contradict each other.

        Warn once if two ranks' items differ only in their numbers, which harmless programs do, too.
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
        """Raise a mismatch, and report it to all ranks; or warn once, if the user says that lengths are right."""
        if not (is_length and self.rules.lengths == "warned"):
            if self.claims is not None:
                self.claims.tell(text)
            raise RankMismatchError(text)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, StreamLengthWarning, stacklevel=2)
