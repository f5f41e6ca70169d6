"""Compare the ranks' samples with the samples of one process, epoch by epoch, and make the report."""

from collections.abc import Collection
from dataclasses import asdict

import numpy as np

from ddp_patch.auditing.picture import Pictured, imbalance, pictured
from ddp_patch.auditing.problems import SAID, Problem
from ddp_patch.auditing.ranks import Numbers, RankGiven
from ddp_patch.auditing.report import EpochReport, Report, SamplesGot
from ddp_patch.auditing.world import Costs, Coverage, EpochGiven, StepCosts, World, signature
from ddp_patch.loaders.facts import NOTHING_TO_COMPARE, LoaderFacts, has_nothing_to_compare
from ddp_patch.loaders.recognition import streams_in
from ddp_patch.validation import counted


class Judge:
    """Collects the problems of a loader, epoch by epoch, and makes the report.

    Args:
        world: Draws the epochs.
        unbalanced: Draws the epochs of the same loader without ``cost=``, if ``cost=`` balances it.
        padding: Whether samples may be repeated to fill the last round.
        epochs_differ: Whether every epoch must have another order.
        costs: Returns the costs of a rank's steps; None if costs are not known.
    """

    def __init__(
        self, world: World, unbalanced: World | None, padding: bool, epochs_differ: bool, costs: StepCosts | None
    ) -> None:
        self._world, self._unbalanced, self._costs = world, unbalanced, costs
        self._pads, self._epochs_differ = padding, epochs_differ
        self._uneven = world.subject.options.get("uneven")
        self._problems: dict[str, Problem] = {}  # the first problem of each kind
        self._epochs: list[EpochReport] = []
        # Of the epochs without an error: hashes of their orders, and the samples that were rightly left out.
        self._orders: list[bytes] = []
        self._left_out: list[Numbers] = []
        self._is_sample = False
        self._pictured = Pictured()
        self._first: RankGiven  # rank 0's samples in epoch 0

    def report(self, epochs: int, allow: Collection[str]) -> Report:
        """Draw and inspect some epochs, and return the report, in which problems of some kinds are allowed."""
        for number in range(epochs):
            self._inspect(self._world.epoch(number))  # an epoch is freed before the next one is drawn
        self._compare_orders()
        self._compare_left_out()
        return Report(
            name=self._world.subject.name,
            how=_how(self._world),
            epochs=tuple(self._epochs),
            epochs_differ=None if len(self._orders) < 2 else len(set(self._orders)) == len(self._orders),
            is_sample=self._is_sample,
            problems=tuple(problem for kind, problem in self._problems.items() if kind not in allow),
            allowed=tuple(problem for kind, problem in self._problems.items() if kind in allow),
            pictured=self._pictured,
        )

    def _add(self, kind: str, what: str, where: str, *own_words: str) -> None:
        """Add a problem unless there is one of its kind; ``own_words`` say why and what to do in this special case."""
        why, remedy = own_words or SAID[kind]
        self._problems.setdefault(kind, Problem(kind, what, where, why, remedy))

    def _inspect(self, epoch: EpochGiven) -> None:
        where, had_problems = f"epoch {epoch.number}, {len(epoch.ranks)} ranks", bool(self._problems)
        found, costs, others = epoch.coverage(), self._costs_of(epoch), None
        if self._unbalanced is not None:
            others = self._costs_of(self._unbalanced.epoch(epoch.number))
        counts = EpochReport(
            epoch=epoch.number,
            items=tuple(len(given.items) for given in epoch.ranks),
            steps=tuple(len(given.sizes) for given in epoch.ranks),
            expected=len(epoch.alone.items),
            distinct=len(epoch.alone.items if found is None or epoch.is_sample else np.unique(epoch.alone.items)),
            imbalance=None if costs is None else imbalance(costs),
            unbalanced=None if others is None else imbalance(others),
            **asdict(self._samples_got(epoch, found)),
        )
        if not epoch.number:
            self._first = epoch.ranks[0]
        errors = _errors(epoch)
        for what in errors:
            self._add("error", what, f"epoch {epoch.number}")
        if not errors:
            self._orders.append(signature(epoch.ranks))
            self._is_sample |= epoch.is_sample
            is_tail = counts.is_right and found is not None and not epoch.is_sample
            self._left_out.append(found[0] if is_tail and found else self._first.items[:0])
            self._compare_steps(epoch, where)
            self._compare_lengths(epoch)
            if not self._loses_of_unpatched(epoch):
                self._compare_shares(epoch, found, counts, where)
        self._epochs.append(counts)
        if len(self._epochs) == 1 or (self._problems and not had_problems):
            # Picture the first epoch with a problem, or else the first.
            self._pictured = pictured(epoch, found is not None or epoch.is_sample, costs, others)

    def _samples_got(self, epoch: EpochGiven, found: Coverage | None) -> SamplesGot:
        """Count the missing and repeated samples of an epoch, and how many of them are allowed."""
        missing, repeated, foreign = (None,) * 3 if found is None else map(len, found)
        fills, may_drop = _allowed(self._world, epoch, self._pads)
        return SamplesGot(
            missing=None if epoch.is_sample else missing,
            repeated=repeated,
            foreign=foreign,
            padding=repeated if repeated is not None and repeated <= fills else 0,
            dropped=missing if missing is not None and missing <= may_drop else 0,
        )

    def _costs_of(self, epoch: EpochGiven) -> Costs | None:
        """Return the costs of each rank's steps, shape (ranks, steps), 0 if a rank has no such step; None if unknown.

        Samples of an iterable dataset have no indices, so their costs cannot be looked up.
        """
        steps = max(len(given.sizes) for given in epoch.ranks)
        if self._costs is None or steps == 0 or epoch.is_iterable:
            return None
        return np.array([np.pad(self._costs(given), (0, steps - len(given.sizes))) for given in epoch.ranks])

    # ---- what is wrong ----

    def _compare_steps(self, epoch: EpochGiven, where: str) -> None:
        steps = [len(given.sizes) for given in epoch.ranks]
        may_differ = self._uneven == "keep" and not self._world.rank0.divides_batches
        if max(steps) - min(steps) > (max(1, len(epoch.parts)) if may_differ else 0):
            fewest, most = steps.index(min(steps)), steps.index(max(steps))
            what = f"Rank {fewest} makes {counted(min(steps), 'step')} and rank {most} makes {max(steps)}."
            self._add("uneven_steps", what, where)

    def _compare_lengths(self, epoch: EpochGiven) -> None:
        """Check that ``len()`` of each rank's loader, before or after the epoch, is the number of its steps."""
        for rank, given in enumerate(epoch.ranks):
            lengths, steps = [length for length in given.lengths if length is not None], len(given.sizes)
            if lengths and (steps not in lengths if given.ended else steps > max(lengths)):
                made = f"{counted(steps, 'step')}{' and more' * (not given.ended)}"
                what = f"len() of rank {rank}'s loader says {lengths[0]} and it makes {made}."
                self._add("wrong_length", what, f"epoch {epoch.number}, rank {rank}")

    def _loses_of_unpatched(self, epoch: EpochGiven) -> bool:
        """Return whether a patched loader's workers leave out samples of the unpatched loader, and add this problem."""
        world, alone, workers = self._world, epoch.alone, self._world.rank0.readers
        if epoch.number or not world.subject.patches or workers == 1 or not alone.ended:
            return False
        given = world.unpatched(seeded_as=0)
        lost = np.setdiff1d(given.items, alone.items)
        # Random samples differ each time.
        if not given.ended or not len(lost) or not given.has_same_samples(world.unpatched(seeded_as=1)):
            return False
        self._add(
            "missing",
            f"{len(lost)} of the {len(np.unique(given.items))} samples of the unpatched loader with num_workers="
            f"{workers} are missing{self._such(lost)}, even in a world of one rank.",
            "epoch 0, a world of one rank",
            "The dataset gives its workers other samples than in the unpatched loader.",
            "Split the dataset by torch.utils.data.get_worker_info() in __iter__, or in worker_init_fn through "
            "get_worker_info().dataset, and by nothing else; or use num_workers=0.",
        )
        return True

    def _compare_shares(self, epoch: EpochGiven, found: Coverage | None, counts: EpochReport, where: str) -> None:
        """Check that shares are disjoint and complete, and that each batch reaches a rank as a whole."""
        rank0 = self._world.rank0
        if counts.is_right:
            if found is not None and not epoch.is_sample and rank0.makes_batches:
                self._compare_batches(epoch, where)
            # If samples cannot be counted, all ranks may still get the same samples.
            n, can_tell = len(epoch.alone.items), found is not None and not epoch.is_sample
            may_be = not epoch.is_constant if epoch.is_sample else all(len(given.items) == n for given in epoch.ranks)
            if can_tell or epoch.number or not may_be:
                return
        again = self._world.alike(epoch)
        if _is_same_on_every_rank(again):
            self._add("not_sharded", _same_text(epoch, again), where)
        elif found is not None and not counts.is_right:
            what = self._text(epoch, found)
            if self._samples_got(again, again.coverage()).is_right:
                self._add("ranks_disagree", f"{what} With all ranks seeded alike, nothing is.", where)
            else:
                self._add(_kind(epoch, counts), what, where)

    def _compare_batches(self, epoch: EpochGiven, where: str) -> None:
        """Check that ranks get the batches that one process makes.

        Ranks of a factory may make batches of their own from their shares of samples, but not from pieces of the
        batches of one process.
        """
        found = epoch.foreign_batches()
        if found and (self._world.subject.patches or epoch.has_torn_batches()):
            every, own = sum(len(given.sizes) for given in epoch.ranks), len(epoch.alone.sizes)
            such = self._such(found[0], "one holds samples such as")
            what = f"{len(found)} of the {every} batches that ranks get are none of the {own} of one process{such}."
            self._add("split_batch", what, where)

    def _compare_left_out(self) -> None:
        """Check whether every epoch leaves out the same samples."""
        first, *others = self._left_out or [np.empty(0, np.int64)]
        if others and len(first) and all(np.array_equal(first, other) for other in others):
            what = f"The same {len(first)} samples{self._such(first)} are left out in every epoch."
            self._add("tail_lost", what, f"epochs 0 to {len(others)}")

    def _compare_orders(self) -> None:
        """Check whether epochs repeat an order that ``set_epoch()`` would change, or that the user wants to change."""
        orders, epochs, is_told = len(set(self._orders)), len(self._orders), self._world.subject.set_epoch
        if orders == epochs or not len(self._first.items):
            return
        tells = orders == 1 and not is_told and self._world.is_changed_by_epoch(self._first)
        if tells or self._epochs_differ:
            seen = "set_epoch() would change it" if tells else "epochs_differ=True says that they should differ"
            what = f"{epochs} epochs have {counted(orders, 'different order')}, and {seen}."
            self._add("same_order", what, f"epochs 0 to {epochs - 1}")

    # ---- what is said ----

    def _text(self, epoch: EpochGiven, found: Coverage) -> str:
        """Return in words how many samples are missing, repeated and foreign, with examples."""
        missing, repeated, foreign = found
        parts, different = [], np.unique(repeated)
        # If only the beginning of an epoch was drawn, do not compare with its length.
        of = "" if epoch.is_sample else f" of {len(epoch.alone.items)}"
        if len(missing):
            parts.append(f"{len(missing)}{of} samples are missing{self._such(np.unique(missing))}.")
        if len(repeated):
            in_all = f", {counted(len(repeated), 'time')} too often in all" * (len(repeated) > len(different))
            such = self._such(different, epoch=epoch)
            parts.append(f"{len(different)}{of} samples are seen more often than in one process{in_all}{such}.")
        if len(foreign):
            such = self._such(np.unique(foreign), epoch=epoch)
            parts.append(f"Ranks get {counted(len(foreign), 'sample')} that one process never gets{such}.")
        return " ".join(parts)

    def _such(self, codes: Numbers, lead: str = "such as", epoch: EpochGiven | None = None) -> str:
        """Name some samples, and the ranks of an epoch that got them."""
        shown = [self._world.coding.name(int(code)) + _on_ranks(int(code), epoch) for code in codes[:3]]
        return f" ({lead} {'; '.join(shown)})" if shown else ""


def _how(world: World) -> str:
    """Return in words how the loader was sharded and simulated."""
    subject = world.subject
    what = "patched by patch_dataloader_to_ddp" if subject.patch else "the loader as it is"
    if subject.is_made:
        what = "loaders as returned by your factory"
    what += ", each rank seeded differently" + ", reading the iterable dataset" * world.rank0.is_iterable
    if (some := len(world.iterating)) < world.world_size:
        what += f"; {some} ranks iterate their loaders, and the others' shares are cut likewise"
    if not world.rank0.is_iterable and (held := next(streams_in(world.rank0.base), None)) is not None:
        part, attribute = held
        kind = type(getattr(part, attribute)).__name__
        what += f"; indices may not name samples: {type(part).__name__} holds a {kind} (attribute {attribute!r})"
    if isinstance(subject.make, LoaderFacts) and subject.patch and not world.rank0.is_iterable:
        fingerprint = subject.options.get("fingerprint", "auto")
        if has_nothing_to_compare(subject.make.dataset, fingerprint):
            what += f"; {NOTHING_TO_COMPARE}"
    return what


def _allowed(world: World, epoch: EpochGiven, pads: bool) -> tuple[int, int]:
    """Return how many samples may be repeated to fill the last round, and how many may be left out.

    If ranks share samples and each makes its own batches, a round has a sample for each rank. Otherwise, a round
    has a batch for each rank.
    """
    rank0, ranks, largest = world.rank0, len(epoch.ranks), epoch.largest_batch
    uneven = world.subject.options.get("uneven")
    in_batches = rank0.makes_batches and (epoch.is_sample or not epoch.foreign_batches())
    of_unit = largest if in_batches else 1
    lengths = (len(epoch.alone.sizes),) if in_batches else epoch.parts or (len(epoch.alone.items),)
    fills = of_unit * sum(-length % ranks for length in lengths)
    if not pads or uneven not in (None, "pad"):
        fills = 0
    if rank0.divides_batches and uneven == "keep":  # every rank gets at least one sample of a batch
        fills = sum(max(0, ranks - size) for size in epoch.parts if size)
    may_drop = 0
    if uneven == "drop" or rank0.drops_round:
        may_drop = of_unit * (ranks - 1) * len(lengths)
    if rank0.drops_batch and not in_batches:
        may_drop += ranks * rank0.readers * (largest - 1)
    if not any(len(given.sizes) for given in epoch.ranks):
        may_drop = 0  # a training that makes no step learns nothing
    return fills, may_drop


def _errors(epoch: EpochGiven) -> list[str]:
    """Return what each rank, and the single process, raises."""
    everyone = [*((f"Rank {rank}", given) for rank, given in enumerate(epoch.ranks)), ("One process", epoch.alone)]
    return [f"{who} raises {given.error.rstrip().removesuffix('.')}." for who, given in everyone if given.error]


def _on_ranks(code: int, epoch: EpochGiven | None) -> str:
    ranks = [] if epoch is None else [rank for rank, given in enumerate(epoch.ranks) if (given.items == code).any()]
    if len(ranks) > 4:
        return f" on {len(ranks)} ranks"
    return f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""


def _kind(epoch: EpochGiven, counts: EpochReport) -> str:
    """Return the kind of problem of shares that are wrong even if all ranks are seeded alike."""
    n, world = counts.expected, len(epoch.ranks)
    share_of_share = n // world**2, -(-n // world**2)
    if n > world**2 and counts.missing and all(share_of_share[0] <= got <= share_of_share[1] for got in counts.items):
        return "double_sharding"
    if counts.foreign or counts.missing:
        return "foreign" if counts.foreign else "missing"
    return "padding" if (counts.repeated or 0) <= world * epoch.largest_batch else "repeated"


def _is_same_on_every_rank(epoch: EpochGiven) -> bool:
    """Return whether all ranks got the same samples, and more than one sample, which could be padding."""
    first, *others = epoch.ranks
    return len(first.items) > 1 and all(first.has_same_samples(other) for other in others)


def _same_text(epoch: EpochGiven, again: EpochGiven) -> str:
    """Describe the samples of ranks that all get the same samples if they are seeded alike."""
    same, each = again.ranks[0].items, f"Each of {len(epoch.ranks)} ranks gets"
    # The number is not known if only a part was drawn.
    samples = "" if epoch.is_sample else f", {counted(len(same), 'sample')}"
    if not epoch.is_sample and np.isin(epoch.alone.items, same).all():
        return f"{each} all of the data{samples}."
    alike = ", if seeded alike" * (not _is_same_on_every_rank(epoch))
    return f"{each} the same samples as the others{alike}{samples}."
