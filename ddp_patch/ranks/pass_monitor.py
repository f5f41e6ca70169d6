"""Compare the ranks' passes over a loader: claim the facts of each pass, and raise an error if ranks' facts differ."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from threading import get_ident, main_thread
from time import monotonic, perf_counter, sleep
from typing import Literal, TypeAlias

from ddp_patch.errors import PartialPassWarning, RankMismatchError, RankMismatchWarning, StreamLengthWarning
from ddp_patch.loaders.overlap import Sketch
from ddp_patch.ranks.claims import Claims
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.parts import Parts
from ddp_patch.ranks.pass_facts import BegunPass, Marks, PassNumbers, Progress, Stage, State, Word, next_count
from ddp_patch.ranks.pass_rules import ALL_ITERATE, Rule, mismatch_text, rule_broken, shorter
from ddp_patch.validation import counted

# Who makes passes: the group of ranks that share the loaders, the rank, and the thread.
_Maker: TypeAlias = tuple[str, int, int]
# How many passes each has begun.
_passes_made = Counter[_Maker]()

# In a pass of unknown length, every one of the first steps is reported. Reports of later steps take at most 1/100 of
# the time.
_REPORTED_STEPS, _STEP_TIMES = 1000, 100
# How many batches a rank may report before another rank reads the first report.
_SLOTS = 8
# How many seconds a rank that has finished a pass waits for ranks that have not begun or ended it. If this was in vain
# once, the rank does not wait at later passes over the loader.
PATIENCE_S = 10.0
_BEGUN, _ENDED = "waited for beginnings", "waited for ends"
_AGAIN_S, _EACH = 0.01, 50  # how often it asks, and at which of these times for each rank


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
        parts: Compares the ranks' samples, if each rank has a part of the data; else None.
    """

    name: Callable[[], str] = lambda: "loader"
    has_one_order: bool = False
    forgets_looks: bool = False
    lengths: Literal["alike", "warned", "any"] = "alike"
    why: Mapping[Rule, Callable[[], str]] = field(default_factory=dict)
    data_digest: Callable[[], str] = str
    is_begun_by_all: bool = False
    parts: Parts | None = None

    def why_broken(self, rule: Rule) -> str:
        """Return what may differ if a rule is broken, and what to do; empty if the rule always has the same remedy."""
        return self.why.get(rule, str)()


class PassMonitor:
    """Claims facts of this rank's passes over a loader, and raises an error if another rank's claims contradict them.

    Args:
        claims: The ranks' claims; None if there are no ranks to compare with.
        rules: The rules of the comparison.

    Attributes:
        claims, rules: The arguments.
        numbers: Numbers the passes.
    """

    def __init__(self, claims: Claims | None = None, rules: Rules | None = None) -> None:
        self.claims: Claims | None = claims
        self.rules: Rules = Rules() if rules is None else rules
        self.numbers: PassNumbers = PassNumbers(forgets_looks=self.rules.forgets_looks)
        self._maker = ("", 0, 0) if claims is None else (claims.group, claims.rank, get_ident())
        self._made_here = _passes_made[self._maker]  # as if passes before the patch were over this loader
        self._all_begun = -1  # the number of the latest pass that all ranks have begun, as far as this rank knows
        self._due_s = 0.0  # when the next report of a step is due
        self._done = set[str]()  # which warnings were given, and whether this rank has waited in vain

    def __reduce__(self) -> tuple[type["PassMonitor"], tuple[()]]:
        return PassMonitor, ()  # the passes of a copy of the loader are not compared

    @property
    def is_on(self) -> bool:
        """Whether there are ranks to compare with."""
        return self.claims is not None

    def begin(
        self, epoch: int, item: int, progress: Callable[[], Progress], marks: Marks = dict, sketch: Sketch | None = None
    ) -> BegunPass | None:
        """Add a pass that begins; return None if there are no ranks to compare with.

        Args:
            epoch: The epoch of the pass.
            item: How many items of the epoch were taken before.
            progress: Returns the progress of the pass.
            marks: Returns the marks of the pass.
            sketch: The samples that its sampler records, if it does.
        """
        if self.claims is None:
            return None
        # Another thread prefetches as many batches as time allows, so its numbers of passes and batches are its own.
        is_own = self.rules.lengths == "any" or get_ident() != self._maker[-1]
        others = None if is_own else _passes_made[self._maker] - self._made_here
        word = Word(self.claims.rank, epoch, item, others, self.rules.data_digest(), None if is_own else 0)
        begun = BegunPass(word, progress, marks, None if self.rules.parts is None else sketch or Sketch())
        self.numbers.add(begun)
        return begun

    def compare(self, begun: BegunPass | None, at: int | None = None) -> None:
        """Claim this rank's words about a pass and the passes before it, and read whether a rank has found a mismatch.

        Args:
            begun: The pass.
            at: The number of batches so far; None if the pass is over.

        Raises:
            RankMismatchError: Another rank's word contradicts this rank's, or a rank has found a mismatch.
        """
        if self.claims is None:
            return
        numbered, left = self.numbers.settle()
        for one in numbered:
            self._count(self.claims, one)
        for one in left:
            self._say_over(self.claims, one)
        if begun is not None and begun.number is not None and begun.stage is not Stage.LEFT:
            if begun.progress().state is not State.RUNNING:
                self._say_over(self.claims, begun)
            elif at is not None:
                self._say(self.claims, begun, at, begun.said(at))
            if self.rules.parts is not None:
                self.rules.parts.compare(self.claims, begun.number, begun.sketch, at, self._raise)
        self._all_begun = self.claims.hear()
        self.claims.forget_passes(self._all_begun - 2)

    def _count(self, claims: Claims, begun: BegunPass) -> None:
        """Count a pass that has begun, for all loaders, and report it to the other ranks."""
        if not (begun.progress().slack or begun.word.slack is None):
            _passes_made[self._maker] += 1
            self._made_here += 1
        claims.put(f"begun/{claims.rank}", f"{begun.number}")
        if _is_main(self._maker):
            claims.put(f"/made/{claims.rank}", f"{_passes_made[self._maker]}")
        if begun.number is not None and claims.add(f"{begun.number}/begun", 1) == len(claims.members):
            claims.tell(begun.number)

    # ---- the end of a pass ----

    def report_step(self, begun: BegunPass, batches: int) -> None:
        """Report how many batches of a pass of unknown length this rank has got, if a report is due.

        A stream that ends early on a rank can be noticed only by this rank: the other ranks wait for it in their next
        collective. All ranks set the same value when they get a batch, so reading it costs the same for any number of
        ranks. Setting the value needs no answer of the store, so no step waits.
        """
        now_s = perf_counter()
        if self.claims is None or now_s < self._due_s:
            return
        self.claims.put(f"given/{batches % _SLOTS}", self._step(begun, batches))
        if batches >= _REPORTED_STEPS:
            reported_s = perf_counter()
            self._due_s = reported_s + _STEP_TIMES * (reported_s - now_s)

    def _step(self, begun: BegunPass, batches: int) -> str:
        """Return a name of a step, the same on every rank."""
        number = self.numbers.next if begun.number is None else begun.number
        return f"{number}.{begun.word.epoch} from {begun.word.item}: {batches}"

    def wait_for_beginning(self, begun: BegunPass) -> None:
        """Wait a moment for the ranks that have not begun a pass that this rank has finished.

        Raises:
            RankMismatchError: A rank will never begin the pass.

        Warns:
            PartialPassWarning: A rank has not begun the pass, so results of the pass are about a part of the data.
        """
        claims, number = self.claims, begun.number
        is_compared = self.rules.is_begun_by_all and begun.word.slack == begun.progress().slack == 0
        if claims is None or number is None or not is_compared or _BEGUN in self._done:
            return
        if self._all_begun < number:
            claims.put(f"begun/{claims.rank}", f"{number}")  # once more: the store may have failed before
        missing, why = list[int](), ""
        for turn, is_over in _turns(self._done, _BEGUN):
            if self._all_begun >= number or not claims.is_heard:
                return
            if is_over or not turn % _EACH:
                made = _passes_made[self._maker] if _is_main(self._maker) else None
                missing, why = _without(claims, number, made)
            if why:
                break
            self._all_begun = claims.hear()
        seen = (
            f"Iterating the {self.rules.name()}: {ranks_text([claims.rank])} was given its whole share of epoch "
            f"{begun.word.epoch}, and {ranks_text(missing)} of {len(claims.members)}"
        )
        if why:
            self._raise(f"{seen} never began that pass: {why}. So samples would be lost. {ALL_ITERATE}")
        if missing:
            text = (
                f"{seen} had not begun that pass {PATIENCE_S:g} s later: they iterate another loader, or nothing. So "
                f"what follows of it is about a part of the data. {ALL_ITERATE}"
            )
            self._warn(text, PartialPassWarning)

    def wait_for_end(self, begun: BegunPass, batches: int) -> None:
        """Wait a moment for the ranks that may get more batches of a pass of unknown length than this rank got.

        Raises:
            RankMismatchError: A rank got more batches.
        """
        claims, number, slack = self.claims, begun.number, begun.progress().slack or 0
        if claims is None or number is None:
            return
        ended, more = claims.add(f"{number}/ended", 1), batches + slack + 1
        for _ in _turns(self._done, _ENDED):
            if claims.value(f"given/{more % _SLOTS}") == self._step(begun, more):
                text = (
                    f"Iterating the {self.rules.name()}: epoch {begun.word.epoch} ended after "
                    f"{counted(batches, 'batch')} on rank {claims.rank}, and others were given more. "
                    f"{self.rules.why_broken('order')}"
                )
                self._raise(text, is_length=True)
                return
            if ended >= len(claims.members) or not claims.is_heard:  # if all have ended it, no rank gets more
                return
            ended = claims.add(f"{number}/ended", 0)

    # ---- words ----

    def _say(self, claims: Claims, begun: BegunPass, at: int, word: Word) -> Word | None:
        """Claim a word about a pass at a count; return another rank's word, if this word came first."""
        text = word.as_text()
        theirs = Word.of(found) if (found := claims.claim(f"{begun.number}/{at}", text)) != text else None
        for other in (begun.over, theirs):
            if other is not None and other.rank != word.rank:
                self._judge(begun, word, other)
        if theirs is not None and theirs.state is not State.RUNNING:
            begun.over = theirs
        return theirs

    def _say_over(self, claims: Claims, begun: BegunPass) -> None:
        """Claim the end of a pass at the next count; at later counts, too, as long as another rank may go on."""
        if begun.is_said:
            return
        begun.is_said, word = True, begun.said()
        at = next_count(word.batches)
        while word.slack is not None and (theirs := self._say(claims, begun, at, word)) is not None:
            if theirs.state is not State.RUNNING:
                break
            at = next_count(at)

    def _judge(self, begun: BegunPass, mine: Word, theirs: Word) -> None:
        """Raise RankMismatchError, and report it to all ranks, if two ranks' words contradict each other.

        Warn once if two ranks' items differ only in their numbers, which harmless programs do, too.
        """
        rule = rule_broken(mine, theirs, begun.marks(), has_one_order=self.rules.has_one_order)
        if rule is None or begun.number is None:
            return
        text = mismatch_text(self.rules.name(), begun.number, rule, (mine, theirs), self.rules.why_broken(rule))
        if rule == "numbers":
            self._warn(text, RankMismatchWarning)
        else:
            self._raise(text, is_length=rule == "length" and shorter(mine, theirs).state is State.ENDED)

    def _raise(self, text: str, *, is_length: bool = False) -> None:
        """Raise a mismatch, and report it to all ranks; or warn once, if the user says that lengths are right."""
        if is_length and self.rules.lengths == "warned":
            self._warn(text, StreamLengthWarning)
            return
        if self.claims is not None:
            self.claims.tell(text)
        raise RankMismatchError(text)

    def _warn(self, text: str, category: type[Warning]) -> None:
        """Warn, once of a category."""
        if category.__name__ not in self._done:
            self._done.add(category.__name__)
            warnings.warn(text, category, stacklevel=2)


def _is_main(maker: _Maker) -> bool:
    """Return whether passes are made in the main thread, which makes them in the same order on every rank."""
    return maker[-1] == main_thread().ident


def _turns(done: set[str], what: str) -> Iterator[tuple[int, bool]]:
    """Yield a number and whether to wait no longer, every moment until then; record that waiting for it was in vain."""
    until_s = monotonic() + (0 if what in done else PATIENCE_S)
    for turn in count(1):
        is_over = monotonic() >= until_s
        yield turn, is_over
        if is_over:
            break
        sleep(_AGAIN_S)
    done.add(what)


def _without(claims: Claims, number: int, made: int | None) -> tuple[list[int], str]:
    """Return the ranks that have not begun a pass, and the fact that proves that one of them never will.

    Args:
        claims: The claims in which ranks report the passes that they have begun.
        number: The number of the pass.
        made: How many passes this rank has begun over all loaders; None if the ranks do not compare this number.
    """
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
