"""Compare the ranks' logs of a loader: always on, and without waiting."""

import json
import warnings
from collections import Counter, deque
from collections.abc import Callable
from threading import get_ident
from time import monotonic, perf_counter, sleep
from typing import Any
from weakref import WeakKeyDictionary

from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import RankMismatchError, StreamLengthWarning
from ddp_patch.loaders.contents import HeldData
from ddp_patch.loaders.overlap import row_hashes
from ddp_patch.ranks.apart import MOST, FirstItems
from ddp_patch.ranks.exchange import digest
from ddp_patch.ranks.log import Log, LoggedPass, Marks, Progress, Record, State, record_of, text_of
from ddp_patch.ranks.mailbox import Mailbox, Peers
from ddp_patch.ranks.rules import Difference, Rule, difference, mismatch_text, shorter

__all__ = ["OpenEnd", "PassMonitor"]


# The first comparisons, this many, are made whenever they are due, to find early mistakes at once. All later ones may
# take one part in this many of the time: short epochs would have several each.
_FREE, _TIMES_THEIR_COST = 100, 200
# At a pass's end one part in this many: in the last epoch nobody would tell later.
_TIMES_AT_AN_END = 20
# Ranks compare when 2, 4, 8, ... batches were given, and then whenever so many more were.
_LARGEST_GAP = 32
# Records of a rank that is ahead are kept until this one comes as far: so many of each.
_HEARD = 8

# The first steps of a pass are all told. Later ones may take one part in so many of the time.
_TOLD_STEPS, _STEP_TIMES = 1000, 100
# Whoever comes to the end waits at most so long for ranks that may be given more, or for so many steps if these take
# longer: with DDP the others are a step behind at most, but a step may take long to load.
_MOMENT_S, _STEPS, _MOST_S, _AGAIN_S = 1.0, 2, 60.0, 0.002
# So many batches may be given on one rank before another sees what the first one left.
_SLOTS = 8

# How many passes were made over all loaders of some ranks, by the store in which they compare, and who they are.
_passes_made: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


class PassMonitor:
    """Logs this rank's passes over one loader, and compares them with the other ranks'.

    Args:
        peers: Who they are; None if there are none.
        name: What errors call the loader.
        slack: How many batches more one rank may have in a pass.

    Attributes:
        has_own_lengths: Whether ranks may have any number of batches in a pass.
        only_warns_of_lengths: Whether the user says that the loader is sharded: parts of unequal length are a warning.
        why_orders_differ: Says what differs, and what to do, where the ranks draw different orders.
    """

    def __init__(self, peers: Peers | None = None, name: str = "loader", *, slack: int = 0) -> None:
        self._name, self._slack = name, slack
        self._group = "" if peers is None else peers.group
        self._mailbox = None if peers is None else Mailbox(peers)
        self._open_end: OpenEnd | None = None
        self._log = Log()
        self._made = self._made_before = 0  # how many passes, looks apart; and over other loaders before this one came
        self._heard: dict[int, deque[Record]] = {}
        self._thread = get_ident()
        self._comparisons, self._cost_s, self._ended_s = 0, 0.0, 0.0
        self._first_items: FirstItems | None = None
        self._latest: LoggedPass | None = None
        self._held: HeldData | None = None
        if self._mailbox is not None:
            self._mailbox.post(text_of(self._log.record()))
        if (made := self._made_by_all) is not None:
            self._made_before = made[self._group]
        self._batches_in_epoch: Callable[[], int | None] = lambda: None
        self.has_own_lengths: bool = False
        self.only_warns_of_lengths: bool = False
        self._has_warned = False
        self.why_orders_differ: Callable[[], str] = lambda: ""

    def __reduce__(self) -> tuple[type["PassMonitor"], tuple[()]]:
        return PassMonitor, ()  # a copy makes passes of its own, which other ranks need not know about

    @property
    def is_on(self) -> bool:
        """Whether there is anybody to compare with."""
        return self._mailbox is not None

    def name_loader(self, name: str, readers: int) -> None:
        """Set what errors call the loader, and how many workers may each read a part, before its first pass."""
        self._name, self._slack = name, self._slack * readers

    def let_epochs_be_alike(self) -> None:
        """Let passes over different epochs count as alike: all have one order, so no sample is lost by them."""
        self._log.has_one_order = True

    def expect_parts(self, why: Callable[[], str]) -> None:
        """Compare the ranks' first samples: each has a part of the data, so they have none in common.

        Args:
            why: Says why samples may be the same, and what to do.
        """
        if self._mailbox is not None:
            self._first_items = FirstItems(self._mailbox, why)

    def note_batch(self, batch: Any, begun: LoggedPass | None = None) -> None:
        """Record a batch of this rank's part of the data, in a pass; in the latest one by default."""
        made = self._latest if begun is None else begun
        if self._first_items is not None and made is not None and len(made.first) < MOST:
            # What comes last in a pass is no first item: it may be padding, an item or a whole batch.
            made.first += made.last
            made.last = row_hashes(batch, MOST - len(made.first))

    @property
    def compares_samples(self) -> bool:
        """Whether ranks compare the first samples of each pass."""
        return self._first_items is not None

    @property
    def mailbox(self) -> Mailbox | None:
        """Where the ranks leave each other what is about this loader."""
        return self._mailbox

    def compare_held(self, held: HeldData) -> None:
        """Let ranks compare what the user changes in their datasets."""
        self._held = held if self.is_on else None

    def note_read(self, begun: LoggedPass) -> None:
        """Record that samples were read in a pass: what that has changed in the dataset is no change of the user's."""
        if self._held is not None and self._mailbox is not None:
            self._held.read()
            told = self._held.told()
            begun.held = digest(sorted(told.items()))[:8] if self._held.is_changed else ""
            self._mailbox.post(json.dumps(told), "held")

    def choose_epoch(self) -> None:
        """Record that the user chose the epoch that comes next."""
        self._log.strike_looks()

    def restore(self) -> None:
        """Record that a position is restored."""
        self._log.close()
        self._heard.clear()

    def begin(
        self,
        epoch: int,
        begins_at: str,
        progress: Callable[[], Progress],
        drawn: Marks | None,
        batches_in_epoch: Callable[[], int | None] = lambda: None,
    ) -> LoggedPass | None:
        """Log that a pass begins; return None if there is nobody to compare with.

        Args:
            epoch: The epoch that it is over.
            begins_at: Where in the epoch it begins.
            progress: Tells how far it has come.
            drawn: The digests of what it draws; None if nobody compares that.
            batches_in_epoch: Tells how many batches it has, for errors.
        """
        if not self.is_on:
            return None
        self._batches_in_epoch = batches_in_epoch
        # In another thread something reads ahead, by as much as there was time for.
        is_own = self.has_own_lengths or get_ident() != self._thread
        told = (lambda: progress()._replace(is_own=True)) if is_own else progress
        made = self._made_by_all
        others = None if is_own or made is None else made[self._group] - self._made - self._made_before
        begun = LoggedPass(epoch, begins_at, told, drawn, others)
        self._log.begin(begun)
        self._latest = begun
        if self._held is not None:
            self._held.begin()
        return begun

    @property
    def _made_by_all(self) -> Counter[str] | None:
        """How many passes this rank has made over all loaders that it compares; None once the process group is gone."""
        is_open = self._mailbox is not None and self._mailbox.is_open
        return _passes_made.setdefault(default_store(), Counter()) if is_open else None

    def next_comparison(self, batches: int) -> int:
        """Return after how many batches to compare, when so many were given."""
        return max(2, batches + min(batches, _LARGEST_GAP))

    def goes_on(self, begun: LoggedPass) -> None:
        """Record that a pass is given a batch, which may have been struck as a look."""
        self._log.goes_on(begun)

    def compare(self, *, at_end: bool = False) -> None:
        """Report to the others how far this rank has come, in this pass and before, and compare with them.

        Args:
            at_end: Whether the pass has come to its end.

        Raises:
            RankMismatchError: The ranks' logs contradict each other.
        """
        if self._mailbox is None:
            return
        self._settle()
        times = _TIMES_AT_AN_END if at_end else _TIMES_THEIR_COST
        began_s = perf_counter()
        if self._comparisons >= _FREE and began_s - self._ended_s < times * self._cost_s:
            return
        self._exchange(self._mailbox)
        if self._first_items is not None and (made := self._log.latest) is not None:
            numbers = self._log.lists, self._log.number_of(made)
            self._first_items.compare(self._name, numbers, made.first)
        self._ended_s = perf_counter()
        self._comparisons, self._cost_s = self._comparisons + 1, self._ended_s - began_s

    def _settle(self) -> None:
        if more := self._log.settle():
            self._made += more
            if not (self._slack or self.has_own_lengths) and (made := self._made_by_all) is not None:
                made[self._group] += more

    def _exchange(self, mailbox: Mailbox) -> None:
        """Leave this rank's record, and compare the log with what others have left by now."""
        mailbox.post(text_of(self._log.record()))
        if (told := mailbox.left("told")) is not None:
            raise RankMismatchError(told)
        for rank, text in mailbox.read().items():
            if (record := record_of(text)) is not None:
                heard = self._heard.setdefault(rank, deque(maxlen=_HEARD))
                if record not in heard:
                    heard.append(record)
        for rank, records in self._heard.items():
            for record in records:
                found = difference(self._log, record, self._slack)
                if found is not None:
                    self._tell(mailbox, rank, found)
        # What is of a pass that this rank has left was judged.
        self._heard = {
            rank: kept
            for rank, records in self._heard.items()
            if (kept := deque((one for one in records if self._log.may_reach(one)), maxlen=_HEARD))
        }

    def _tell(self, mailbox: Mailbox, rank: int, found: Difference) -> None:
        """Raise the mismatch, and leave it for all."""
        is_of_held = found.rule is Rule.HELD
        why = self._differing_held(mailbox, rank) if is_of_held else self.why_orders_differ()
        if is_of_held and not why:
            return  # they may hold what is their own
        peers = mailbox.peers
        others = [other for other in peers.members if other not in {peers.rank, rank}]
        records = {other: record_of(text) for other, text in mailbox.read_of(others).items()}
        alike = [
            other
            for other, record in records.items()
            if record is not None
            and (theirs := difference(self._log, record, self._slack)) is not None
            and theirs.rule is found.rule
        ]
        ranks = peers.rank, sorted([rank, *alike])
        text = mismatch_text(self._name, ranks, found, self._batches_in_epoch(), why)
        over = shorter(found)
        is_unequal = found.rule is Rule.LENGTH and over is not None and over.state is State.ENDED
        self._raise(mailbox, text, is_length=is_unequal)

    def _raise(self, mailbox: Mailbox, text: str, *, is_length: bool) -> None:
        """Raise a mismatch, and leave it for all; or only warn, once, where the user says that lengths are right."""
        if not (is_length and self.only_warns_of_lengths):
            mailbox.tell(text)
            raise RankMismatchError(text)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, StreamLengthWarning, stacklevel=2)

    def _differing_held(self, mailbox: Mailbox, rank: int) -> str:
        """Return what the user has changed in other ways in two ranks' datasets."""
        try:
            theirs = json.loads(mailbox.read_of([rank], "held").get(rank, b"{}"))
            return "" if self._held is None else ", ".join(self._held.differing(self._held.told(), theirs))
        except (ValueError, TypeError, AttributeError):  # junk
            return ""

    # ---- passes whose end nobody knows before ----

    def give_step(self, begun: LoggedPass, batches: int) -> None:
        """Leave that this rank was given so many batches of such a pass."""
        if self._mailbox is not None:
            self._open_end = self._open_end or OpenEnd(self._mailbox)
            self._open_end.give(self._name_of(begun), batches)

    def end_steps(self, begun: LoggedPass, batches: int) -> None:
        """Compare how many batches such a pass had; wait a moment for ranks that may be given more.

        Raises:
            RankMismatchError: Another rank was given more.
        """
        if self._mailbox is None:
            return
        self._open_end = self._open_end or OpenEnd(self._mailbox)
        if self._open_end.is_longer(self._name_of(begun), batches, self._slack):
            text = (
                f"Iterating the {self._name}: epoch {begun.epoch} ended after {batches} batches on rank "
                f"{self._mailbox.peers.rank}, and others were given more. {self.why_orders_differ()}"
            )
            self._raise(self._mailbox, text, is_length=True)

    def _name_of(self, begun: LoggedPass) -> str:
        return f"{self._log.lists}.{self._log.number_of(begun)}.{begun.epoch} from {begun.begins_at}"


class OpenEnd:
    """How many batches ranks are given of passes whose end nobody knows before it comes.

    A rank whose stream ends early finds that out only here: the others wait for it in their next collective, and ask
    for nothing more. All ranks leave the same value where they are given a batch, so what one reads does not grow with
    the number of ranks; to leave it takes no answer of the store's, so no step waits.

    Args:
        mailbox: Where the ranks leave records of the loader.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox, self._ends = mailbox, 0
        self._due_s = self._first_s = 0.0

    def give(self, name: str, batches: int) -> None:
        """Leave that this rank was given so many batches of the pass with this name, if that is due."""
        now_s = perf_counter()
        if batches == 1:
            self._first_s = now_s
        if now_s < self._due_s:
            return
        self._mailbox.leave(f"given/{batches % _SLOTS}", f"{name} {batches}")
        if batches >= _TOLD_STEPS:
            told_s = perf_counter()
            self._due_s = told_s + _STEP_TIMES * (told_s - now_s)

    def is_longer(self, name: str, batches: int, slack: int) -> bool:
        """Return, at the end of a pass, whether another rank was given more of it; wait a moment for the others.

        Args:
            name: The pass.
            batches: How many batches this rank was given.
            slack: How many more another may have.
        """
        self._ends += 1
        ended = self._mailbox.count("ended", 1)
        step_s = (perf_counter() - self._first_s) / max(1, batches - 1) if batches else 0.0
        until_s = monotonic() + min(max(_MOMENT_S, _STEPS * step_s), _MOST_S)
        more = batches + slack + 1
        while True:
            if self._mailbox.left(f"given/{more % _SLOTS}") == f"{name} {more}":
                return True
            # All that have come to their ends: then nobody is given more.
            if (
                ended >= self._ends * len(self._mailbox.peers.members)
                or not self._mailbox.is_open
                or monotonic() > until_s
            ):
                return False
            sleep(_AGAIN_S)
            ended = self._mailbox.count("ended", 0)
