"""Compare the ranks' logs of a loader: always on, and without waiting."""

import warnings
from collections import Counter
from collections.abc import Callable, Collection
from threading import get_ident
from time import monotonic, perf_counter, sleep
from typing import Any
from weakref import WeakKeyDictionary

from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import RankMismatchError, RankMismatchWarning, StreamLengthWarning
from ddp_patch.loaders.overlap import Sketch, are_no_chance, common_items, row_hashes
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.log import (
    Difference,
    Entry,
    LoggedPass,
    Marks,
    Progress,
    Record,
    State,
    have_other_numbers,
    mismatch_text,
    record_of,
    rule_broken,
    shorter,
    text_of,
)
from ddp_patch.ranks.mailbox import Mailbox
from ddp_patch.validation import counted

__all__ = ["PassMonitor"]


# So many passes before the latest one are kept.
_KEPT = 16
# Others are told so many passes before the latest one, too: a rank may still be in one of these.
_TOLD = 4

# The first comparisons, this many, are made whenever they are due, to find early mistakes at once. All later ones may
# take one part in this many of the time: short epochs would have several each.
_FREE, _TIMES_THEIR_COST = 100, 200
# At a pass's end one part in this many: in the last epoch nobody would tell later.
_TIMES_AT_AN_END = 20
# Ranks compare when 2, 4, 8, ... batches were given, and then whenever so many more were.
_LARGEST_GAP = 32

# Where each rank has a part of the data, and no sampler says of which samples, so many first ones are looked at.
_SAMPLES = 256

# The first steps of a pass whose end nobody knows are all told. Later ones may take one part in so many of the time.
_TOLD_STEPS, _STEP_TIMES = 1000, 100
# Whoever comes to such an end waits at most so long for ranks that may be given more, or for so many steps if these
# take longer: with DDP the others are a step behind at most, but a step may take long to load.
_MOMENT_S, _STEPS, _MOST_S, _AGAIN_S = 3.0, 2, 60.0, 0.002
# So many batches may be given on one rank before another sees what the first one left.
_SLOTS = 8

# How many passes were made over all loaders of some ranks, by the store in which they compare, and who they are.
_passes_made: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


class PassMonitor:
    """Logs this rank's passes over one loader, and compares them with the other ranks'.

    Args:
        mailbox: Where they leave each other records; None if there is nobody to compare with.
        slack: How many batches more one rank may have in a pass.

    Attributes:
        mailbox: As given.
        has_one_order: Whether all epochs have one order, so that it does not matter which one a pass is over.
        forgets_looks: Whether looks are struck where the next pass begins.
        has_own_lengths: Whether ranks may have any number of batches in a pass.
        only_warns_of_lengths: Whether the user says that the loader is sharded: parts of unequal length are a warning.
        why_orders_differ: Says what differs, and what to do, where the ranks draw different orders.
        why_in_common: Says why samples may be the same, and what to do, where each rank has a part of the data, so that
            the ranks' samples are compared; None where they are not.
        knows_all: Whether it is known of all samples that a rank was given, not of the first ones alone.
        replicas: The ranks that have the same part as this one.
        data_digest: Returns a digest of the data when a pass begins; empty if nobody compares that.
        data_named: What that is of, for errors.
        why_numbers_differ: Says what may differ, and how to tell, where items have the same names and other numbers.
    """

    def __init__(self, mailbox: Mailbox | None = None, *, slack: int = 0) -> None:
        self._name, self._slack = "loader", slack
        self.mailbox: Mailbox | None = mailbox
        self.has_one_order: bool = False
        self.forgets_looks: bool = False
        self._passes: list[LoggedPass] = []  # from number ``_first`` on
        self._first = 0
        self._settled = 0  # how many passes are more than looks, or come before one that is
        self._made_before = 0  # how many were made over other loaders before this one came
        self._thread = get_ident()
        self._comparisons, self._cost_s, self._ended_s = 0, 0.0, 0.0
        self._latest: LoggedPass | None = None
        self.data_digest: Callable[[], str] = str
        self.data_named: str = ""
        self.why_numbers_differ: Callable[[], str] = lambda: ""
        self._has_warned_of_numbers = False
        if mailbox is not None:
            mailbox.post(text_of(self.record()), "passes")
            if (made := self._made_by_all) is not None:
                self._made_before = made[mailbox.group]
        self.has_own_lengths: bool = False
        self.only_warns_of_lengths: bool = False
        self._has_warned = False
        self.why_orders_differ: Callable[[], str] = lambda: ""
        self.why_in_common: Callable[[], str] | None = None
        self.knows_all: bool = False
        self.replicas: Collection[int] = ()
        # How many items were in common, and how many repeated, by pass and rank.
        self._in_common: dict[tuple[int, int], tuple[int, int]] = {}
        # Passes whose end nobody knows before: how many ended, when the first step came, and when the next is told.
        self._ends, self._first_step_s, self._due_s = 0, 0.0, 0.0

    def __reduce__(self) -> tuple[type["PassMonitor"], tuple[()]]:
        return PassMonitor, ()  # a copy makes passes of its own, which other ranks need not know about

    @property
    def is_on(self) -> bool:
        """Whether there is anybody to compare with."""
        return self.mailbox is not None

    def name_loader(self, name: str, readers: int) -> None:
        """Set what errors call the loader, and how many workers may each read a part, before its first pass."""
        self._name, self._slack = name, self._slack * readers

    def note_batch(self, batch: Any, begun: LoggedPass | None = None) -> None:
        """Record a batch of this rank's part of the data, in a pass; in the latest one by default."""
        made = self._latest if begun is None else begun
        sketch = None if made is None else made.sketch
        if sketch is not None and sketch.seen < _SAMPLES:
            sketch.add(row_hashes(batch, _SAMPLES - sketch.seen))

    @property
    def compares_samples(self) -> bool:
        """Whether ranks compare the samples that each was given; of several explicit worlds, nobody knows whose."""
        return self.why_in_common is not None and self.mailbox is not None and self.mailbox.read_one_stream

    def begin(
        self,
        epoch: int,
        begins_at: str,
        progress: Callable[[], Progress],
        marks: Marks = dict,
        sketch: Sketch | None = None,
        number_marks: Marks = dict,
    ) -> LoggedPass | None:
        """Log that a pass begins; return None if there is nobody to compare with.

        Args:
            epoch: The epoch that it is over.
            begins_at: Where in the epoch it begins.
            progress: Tells how far it has come.
            marks: Tells the digests of what it draws; none if nobody compares that.
            sketch: What its sampler notes of it, if that does.
            number_marks: Tells the digests of the numbers in what it draws, beside names.
        """
        if self.mailbox is None:
            return None
        # In another thread something reads ahead, by as much as there was time for.
        is_own = self.has_own_lengths or get_ident() != self._thread
        made = self._made_by_all
        others = None if is_own or made is None else made[self.mailbox.group] - self._settled - self._made_before
        if sketch is None and self.compares_samples:
            sketch = Sketch()
        held = self.data_digest()
        begun = LoggedPass(epoch, begins_at, progress, marks, others, sketch, is_own, held, number_marks)
        self.add(begun)
        self._latest = begun
        return begun

    # ---- the log ----

    def add(self, begun: LoggedPass) -> None:
        """Add a pass that begins to the log."""
        if self.forgets_looks:
            self.strike_looks()
        for made in self._passes[self._settled - self._first - 1 :]:
            made.tell(made.progress())
        self._passes.append(begun)

    def goes_on(self, begun: LoggedPass) -> None:
        """Add a pass again that was struck, and that goes on all the same."""
        if not any(known is begun for known in self._passes):
            if self.forgets_looks:  # a look within it had struck it
                self.strike_looks()
            self._passes.append(begun)

    def strike_looks(self) -> None:
        """Strike the looks at the end: an epoch is chosen."""
        while self._first + len(self._passes) > self._settled and self._passes[-1].is_look:
            self._passes.pop()

    def cut_off(self) -> None:
        """Let the passes that run have any length: a position is restored."""
        self.strike_looks()
        for made in self._passes[max(0, self._settled - self._first - 1) :]:
            made.is_own = True

    def settle(self) -> None:
        """Find out which passes are left, and which are more than looks; count these."""
        before, count = self._settled, len(self._passes)
        last = next((place for place in reversed(range(count)) if not self._passes[place].is_look), -1)
        self._settled = max(before, self._first + last + 1)
        for number in range(max(before - 1, self._first), self._settled - 1):
            self._passes[number - self._first].leave()
        surplus = max(0, self._settled - self._first - _KEPT)
        self._first += surplus
        del self._passes[:surplus]
        more, has_own_lengths = self._settled - before, self._slack or self.has_own_lengths
        if more and self.mailbox is not None and not has_own_lengths and (made := self._made_by_all) is not None:
            made[self.mailbox.group] += more

    def entry(self, number: int) -> Entry | None:
        """Return a pass as others are told of it; None if it is no longer kept, or may be a look."""
        return self._passes[number - self._first].entry(number) if self._first <= number < self._settled else None

    def record(self) -> Record:
        """Return what the others are told; no sketches but those of the latest two passes."""
        numbers = range(max(0, self._settled - 1 - _TOLD), self._settled)
        told = [entry for number in numbers if (entry := self.entry(number)) is not None]
        return [*(entry._replace(sketch=()) for entry in told[:-2]), *told[-2:]]

    def difference(self, theirs: Record) -> Difference | None:
        """Return how another rank's record contradicts this log; None if one rank may only be faster than the other."""
        likely: Difference | None = None
        for other in theirs:
            if (own := self.entry(other.number)) is None:
                continue
            made = self._passes[own.number - self._first]
            rule = rule_broken(own, other, made.marks, self._slack, has_one_order=self.has_one_order)
            if rule is not None:
                return Difference(rule, own, other)
            if have_other_numbers(other, made.number_marks):
                likely = Difference("numbers", own, other)
        return likely

    # ---- comparing ----

    @property
    def _made_by_all(self) -> Counter[str] | None:
        """How many passes this rank has made over all loaders that it compares; None once the process group is gone."""
        is_open = self.mailbox is not None and self.mailbox.is_open
        return _passes_made.setdefault(default_store(), Counter()) if is_open else None

    def next_comparison(self, batches: int) -> int:
        """Return after how many batches to compare, when so many were given."""
        return max(2, batches + min(batches, _LARGEST_GAP))

    def compare(self, *, at_end: bool = False) -> None:
        """Report to the others how far this rank has come, in this pass and before, and compare with them.

        Args:
            at_end: Whether the pass has come to its end.

        Raises:
            RankMismatchError: The ranks' logs contradict each other.
        """
        if self.mailbox is None:
            return
        self.settle()
        times = _TIMES_AT_AN_END if at_end else _TIMES_THEIR_COST
        began_s = perf_counter()
        is_limited = self._comparisons >= _FREE or self.mailbox.has_failed  # it may have been waited for
        if is_limited and began_s - self._ended_s < times * self._cost_s:
            return
        self._exchange(self.mailbox)
        self._ended_s = perf_counter()
        self._comparisons, self._cost_s = self._comparisons + 1, self._ended_s - began_s

    def report(self) -> None:
        """Report how far this rank has come, and compare nothing."""
        if self.mailbox is not None:
            self.settle()
            self.mailbox.post(text_of(self.record()), "passes")

    def _exchange(self, mailbox: Mailbox) -> None:
        """Leave this rank's record, and compare the log with what others have left by now."""
        mailbox.post(text_of(self.record()), "passes")
        if (told := mailbox.left("told")) is not None:
            raise RankMismatchError(told)
        for rank, text in mailbox.read().items():
            if (record := record_of(text)) is None:
                continue
            if (found := self.difference(record)) is not None:
                self._tell(mailbox, rank, found)
            if (why := self.why_in_common) is not None and mailbox.read_one_stream and rank not in self.replicas:
                self._compare_samples(mailbox, rank, record, why)

    def _tell(self, mailbox: Mailbox, rank: int, found: Difference) -> None:
        """Raise a mismatch, and leave it for all."""
        if found.rule == "numbers":
            self._warn_of_numbers((mailbox.rank, rank), found)
            return
        why = self.data_named if found.rule == "held" else self.why_orders_differ()
        is_unequal = found.rule == "length" and shorter(found).state is State.ENDED
        self._raise(mailbox, mismatch_text(self._name, (mailbox.rank, rank), found, why), is_length=is_unequal)

    def _compare_samples(self, mailbox: Mailbox, rank: int, record: Record, why: Callable[[], str]) -> None:
        """Raise RankMismatchError if another rank's part of the data has more in common with this one's than chance."""
        for theirs in record:
            mine = self.entry(theirs.number)
            if mine is None or not theirs.sketch or not any(found := common_items(mine.sketch, theirs.sketch)):
                continue
            if self.knows_all:
                are_same = are_no_chance(*found, of=len(mine.sketch))
            else:  # each pass shows little
                self._in_common[mine.number, rank] = found
                are_same = are_no_chance(*map(sum, zip(*self._in_common.values(), strict=True)))
            if found[0] and are_same:
                text = (
                    f"Iterating the {self._name}: of {len({*mine.sketch})} samples of {ranks_text([mailbox.rank])} "
                    f"that were looked at, {found[0]} are also {ranks_text([rank])}'s, though each rank should have a "
                    f"part of its own. {why()}"
                )
                self._raise(mailbox, text, is_length=False)

    def _raise(self, mailbox: Mailbox, text: str, *, is_length: bool) -> None:
        """Raise a mismatch, and leave it for all; or only warn, once, where the user says that lengths are right."""
        if not (is_length and self.only_warns_of_lengths):
            mailbox.tell(text)
            raise RankMismatchError(text)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, StreamLengthWarning, stacklevel=2)

    def _warn_of_numbers(self, ranks: tuple[int, int], found: Difference) -> None:
        """Warn, once, of what harmless programs do, too."""
        if not self._has_warned_of_numbers:
            self._has_warned_of_numbers = True
            text = mismatch_text(self._name, ranks, found, self.why_numbers_differ())
            warnings.warn(text, RankMismatchWarning, stacklevel=2)

    # ---- passes whose end nobody knows before ----
    #
    # A rank whose stream ends early finds that out only there: the others wait for it in their next collective, and ask
    # for nothing more. All ranks leave the same value where they are given a batch, so what one reads does not grow
    # with the number of ranks; to leave it takes no answer of the store's, so no step waits.

    def give_step(self, begun: LoggedPass, batches: int) -> None:
        """Leave that this rank was given so many batches of such a pass, if that is due."""
        now_s = perf_counter()
        if batches == 1:
            self._first_step_s = now_s
        if self.mailbox is None or now_s < self._due_s:
            return
        self.mailbox.leave(f"given/{batches % _SLOTS}", self._step(begun, batches))
        if batches >= _TOLD_STEPS:
            told_s = perf_counter()
            self._due_s = told_s + _STEP_TIMES * (told_s - now_s)

    def end_steps(self, begun: LoggedPass, batches: int) -> None:
        """Compare how many batches such a pass had; wait a moment for ranks that may be given more.

        Raises:
            RankMismatchError: Another rank was given more.
        """
        if (mailbox := self.mailbox) is None:
            return
        self._ends += 1
        ended, more = mailbox.count("ended", 1), batches + self._slack + 1
        step_s = (perf_counter() - self._first_step_s) / max(1, batches - 1) if batches else 0.0
        until_s = monotonic() + min(max(_MOMENT_S, _STEPS * step_s), _MOST_S)
        while mailbox.left(f"given/{more % _SLOTS}") != self._step(begun, more):
            # All that have come to their ends: then nobody is given more.
            is_heard = mailbox.is_open and not mailbox.has_failed
            if ended >= self._ends * len(mailbox.members) or not is_heard or monotonic() > until_s:
                return
            sleep(_AGAIN_S)
            ended = mailbox.count("ended", 0)
        text = (
            f"Iterating the {self._name}: epoch {begun.epoch} ended after {counted(batches, 'batch')} on rank "
            f"{mailbox.rank}, and others were given more. {self.why_orders_differ()}"
        )
        self._raise(mailbox, text, is_length=True)

    def _step(self, begun: LoggedPass, batches: int) -> str:
        """Return the same text for a step of a pass on every rank."""
        # -1 if it is no longer kept.
        number = next((number for number, made in enumerate(self._passes, self._first) if made is begun), -1)
        return f"{number}.{begun.epoch} from {begun.begins_at} {batches}"
