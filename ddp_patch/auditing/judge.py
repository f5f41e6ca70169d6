"""Judge what ranks were given: compare it with what one process is given, epoch by epoch, and make the report."""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ddp_patch.auditing.given import Coverage, EpochGiven, Numbers, RankGiven, signature
from ddp_patch.auditing.pictured import Costs, Pictured, StepCosts, imbalance, pictured
from ddp_patch.auditing.problems import SAID, Kind, Problem, sentence
from ddp_patch.auditing.report import EpochReport, Report
from ddp_patch.auditing.world import MadeUpWorld
from ddp_patch.streams.stream_sampler import faster_by_worker

__all__ = ["Judge"]


class _Counted(NamedTuple):
    """How an epoch was counted.

    Attributes:
        found: What is missing and repeated, counted in the epoch's units; None where it cannot be told.
        samples: The same, counted in samples.
        padding: How many repeated units fill the last round.
        dropped: How many missing units the loader was asked to leave out.
    """

    found: Coverage | None
    samples: Coverage | None
    padding: int = 0
    dropped: int = 0

    @property
    def is_right(self) -> bool:
        """Tell whether nothing is known to be missing or repeated but what may be, and nothing foreign."""
        return self.found is None or (self.found.extra, self.found.lacking, self.found.unexpected) == (
            self.padding,
            self.dropped,
            0,
        )


class Judge:
    """Collect what is found epoch by epoch.

    Args:
        world: Draws the epochs.
        padding: Whether samples may be repeated to fill the last round.
        epochs_differ: Whether every epoch must have another order.
        costs: Tells what steps cost, if it is known.
    """

    def __init__(self, world: MadeUpWorld, padding: bool, epochs_differ: bool, costs: StepCosts | None) -> None:
        self._world, self._pads, self._epochs_differ, self._costs = world, padding, epochs_differ, costs
        self._uneven = world.subject.options.get("uneven")
        self._problems: dict[Kind, Problem] = {}  # the first of each kind
        self._epochs: list[EpochReport] = []
        # Of the epochs in which no rank raised: hashes of their orders, and the samples that were left out rightly.
        self._orders: list[bytes] = []
        self._left_out: list[Numbers] = []
        self._is_sample = False
        self._pictured = Pictured()
        self._note: str | None = None
        self._first: RankGiven  # what rank 0 was given in epoch 0

    def report(self, allow: Collection[str]) -> Report:
        """Draw and inspect every epoch, and return the report, in which kinds of problem may be allowed."""
        for epoch in self._world.drawn():
            self._inspect(epoch)
            del epoch  # free it before the next one is drawn
        self._compare_orders()
        self._compare_left_out()
        return Report(
            name=self._world.subject.name,
            how=self._how(),
            world_size=self._world.world_size,
            units="batches" if all(epoch.units == "batches" for epoch in self._epochs) else "samples",
            epochs=tuple(self._epochs),
            epochs_differ=None if len(self._orders) < 2 else len(set(self._orders)) == len(self._orders),
            is_sample=self._is_sample,
            problems=tuple(problem for kind, problem in self._problems.items() if kind not in allow),
            allowed=tuple(problem for kind, problem in self._problems.items() if kind in allow),
            pictured=self._pictured,
            note=self._note,
        )

    def _how(self) -> str:
        world, subject = self._world, self._world.subject
        what = "patched by patch_dataloader_to_ddp" if subject.patch else "the loader as it is"
        if subject.is_made:
            what = "loaders as returned by your factory"
        what += " with cost=" * ("cost" in subject.options)
        what = f"on real ranks: {what}" if world.processes else f"simulated: {what}, in one process, each rank seeded "
        what += "differently" * (not world.processes) + ", reading the iterable dataset" * world.traits.is_iterable
        if (some := len(world.iterating)) < world.world_size:
            what += f"; {some} ranks iterate their loaders, and the others' shares are cut likewise"
        return what

    def _add(self, kind: Kind, what: str, where: str, *own_words: str) -> None:
        """Note a problem unless one of its kind was noted; ``own_words`` say why and what to do in this very case."""
        why, remedy = own_words or SAID[kind][1:]
        self._problems.setdefault(kind, Problem(kind, what, where, why, remedy))

    def _inspect(self, given: EpochGiven) -> None:
        epoch, counted = self._counted(given)
        where, had_problems = f"epoch {epoch.number}, {len(epoch.ranks)} ranks", bool(self._problems)
        if not epoch.number:
            self._first = epoch.ranks[0]
            if len(epoch.alone.parts) > 1 and not self._world.traits.divides_batches:
                self._note = faster_by_worker(self._world.subject.name, len(epoch.ranks), sum(epoch.alone.parts))
        if not self._raised(epoch):
            if self._world.traits.ignores_index[0]:
                what = "Indices are shared, but they choose no samples of the dataset."
                self._add("not_sharded", what, where, *self._world.traits.ignores_index)
            self._orders.append(signature(epoch.ranks))
            self._is_sample |= epoch.is_sample
            is_tail = counted.is_right and counted.samples is not None and not epoch.is_sample
            self._left_out.append(counted.samples.missing if is_tail and counted.samples else self._first.items[:0])
            self._compare_steps(epoch, where)
            self._compare_lengths(epoch)
            if not self._loses_of_unpatched(epoch):
                self._compare_shares(epoch, counted, where)
        costs = self._costs_of(epoch)
        if not self._epochs or (self._problems and not had_problems):
            # Picture the first epoch with a problem, or else the first.
            self._pictured = pictured(epoch, counted.found, costs)
        self._epochs.append(_epoch_report(epoch, counted, costs))

    # ---- what is counted ----

    def _counted(self, epoch: EpochGiven) -> tuple[EpochGiven, _Counted]:
        """Count an epoch, and return it in the units in which it was counted.

        Ranks with a batch sampler of their own may shard samples, and each make its own batches of them. So where whole
        batches do not match and are not in pieces either, samples are counted instead, and decide if they match.
        """
        samples = epoch.coverage("samples")
        counted = self._allowed(epoch, epoch.coverage(epoch.units), samples)
        if (
            epoch.units == "batches"
            and not counted.is_right
            and not self._world.subject.patches
            and not _is_torn(epoch)
        ):
            in_samples = replace(epoch, units="samples")
            by_sample = self._allowed(in_samples, samples, samples)
            if by_sample.is_right:
                return in_samples, by_sample
        return epoch, counted

    def _allowed(self, epoch: EpochGiven, found: Coverage | None, samples: Coverage | None) -> _Counted:
        """Count what may be repeated to fill the last round, and what the loader was asked to leave out."""
        if found is None:
            return _Counted(found, samples)
        world, traits, uneven = len(epoch.ranks), self._world.traits, self._uneven
        padding = epoch.filling if self._pads and uneven in (None, "pad") else 0
        if traits.divides_batches and uneven == "keep":  # but no rank is without a sample of a batch
            padding = sum(max(0, world - size) for size in epoch.parts if size)
        dropped = (world - 1) * max(1, len(epoch.parts)) if uneven == "drop" or traits.drops_round else 0
        if epoch.units == "samples" and traits.drops_batch:
            dropped += world * traits.readers * (epoch.largest_batch - 1)
        if not any(len(given.sizes) for given in epoch.ranks):
            dropped = 0  # a training that makes no step learns nothing
        return _Counted(
            found,
            samples,
            found.extra if found.extra <= padding else 0,
            found.lacking if found.lacking <= dropped else 0,
        )

    # ---- what is wrong ----

    def _raised(self, epoch: EpochGiven) -> bool:
        """Note that a rank raised, or the single process, and tell whether one did."""
        everyone = [*((f"Rank {rank}", given) for rank, given in enumerate(epoch.ranks)), ("One process", epoch.alone)]
        raised = [f"{who} raises {sentence(given.error)}" for who, given in everyone if given.error]
        for what in raised:
            self._add("error", what, f"epoch {epoch.number}")
        return bool(raised)

    def _compare_steps(self, epoch: EpochGiven, where: str) -> None:
        steps = [len(given.sizes) for given in epoch.ranks]
        may_differ = self._uneven == "keep" and not self._world.traits.divides_batches
        if max(steps) - min(steps) > (max(1, len(epoch.parts)) if may_differ else 0):
            fewest, most = steps.index(min(steps)), steps.index(max(steps))
            what = f"Rank {fewest} makes {min(steps)} steps and rank {most} makes {max(steps)}."
            self._add("uneven_steps", what, where)

    def _compare_lengths(self, epoch: EpochGiven) -> None:
        """Check that ``len()`` of each rank's loader is the number of its steps, before the epoch or after."""
        for rank, given in enumerate(epoch.ranks):
            lengths, steps = [length for length in given.lengths if length is not None], len(given.sizes)
            if lengths and (steps not in lengths if given.ended else steps > max(lengths)):
                what = f"len() of rank {rank}'s loader says {lengths[0]} and it makes {steps} steps"
                self._add(
                    "wrong_length", what + " and more" * (not given.ended) + ".", f"epoch {epoch.number}, rank {rank}"
                )

    def _loses_of_unpatched(self, epoch: EpochGiven) -> bool:
        """Note that a patched loader's workers leave out what the unpatched one's read, and tell whether they do."""
        world, alone = self._world, epoch.alone
        if epoch.number or not world.subject.patches or world.traits.readers == 1 or not alone.ended:
            return False
        given = world.unpatched(seed=0)
        lost = np.setdiff1d(given.items, alone.items)
        # Samples that are made at random are others each time.
        if not given.ended or not len(lost) or not given.has_same_samples(world.unpatched(seed=1)):
            return False
        self._add(
            "missing",
            f"{len(lost)} of the {len(np.unique(given.items))} samples of the unpatched loader with num_workers="
            f"{world.traits.readers} are missing{self._such(lost)}, even in a world of one rank.",
            "epoch 0, a world of one rank",
            "The dataset gives its workers other samples than in the unpatched loader.",
            "Split the dataset by torch.utils.data.get_worker_info() in __iter__, or in worker_init_fn through "
            "get_worker_info().dataset, and by nothing else; or use num_workers=0.",
        )
        return True

    def _compare_shares(self, epoch: EpochGiven, counted: _Counted, where: str) -> None:
        """Check that shares are disjoint and complete."""
        found = counted.found
        if counted.is_right:
            # Where counting cannot tell, ranks may all get the same.
            n, can_tell = len(epoch.alone.items), found is not None and not epoch.is_sample
            may_be = not epoch.is_constant if epoch.is_sample else all(len(given.items) == n for given in epoch.ranks)
            if can_tell or epoch.number or not may_be:
                return
        again = self._world.alike(epoch)
        if _is_same_on_every_rank(again):
            self._add("not_sharded", _same_text(epoch, again), where)
        elif found is not None and not counted.is_right:
            what = self._text(epoch, found, counted.samples)
            if self._counted(again)[1].is_right:
                self._add("ranks_disagree", f"{what} With all ranks seeded alike, nothing is.", where)
            else:
                self._add(self._kind(epoch, found), what, where)

    def _kind(self, epoch: EpochGiven, found: Coverage) -> Kind:
        """Return the kind of problem of shares that are wrong however ranks are seeded."""
        n, world, largest = epoch.expected, len(epoch.ranks), epoch.largest_batch if epoch.units == "samples" else 1
        if n > world**2 and all(n // world**2 <= got <= -(-n // world**2) for got in epoch.shares) and found.lacking:
            return "double_sharding"
        if epoch.units == "batches" and not self._world.subject.patches and _is_torn(epoch):
            return "split_batch"
        if found.unexpected or found.lacking:
            return "foreign" if found.unexpected else "missing"
        return "padding" if found.extra <= world * largest else "repeated"

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
            what = f"{epochs} epochs have {orders} different order{'s' * (orders > 1)}, and {seen}."
            self._add("same_order", what, f"epochs 0 to {epochs - 1}")

    # ---- what is said ----

    def _text(self, epoch: EpochGiven, found: Coverage, samples: Coverage | None) -> str:
        """Say how many are missing, repeated and foreign, with examples."""
        units, parts, in_them = epoch.units, [], samples or found
        lead = "such as" if units == "samples" else "with samples such as"
        # Those of a part of an epoch, of which only the beginning was read, are not counted against its length.
        of = "" if epoch.is_sample else f" of {epoch.expected}"
        if found.lacking:
            parts.append(f"{found.lacking}{of} {units} are missing{self._such(in_them.missing, lead)}.")
        if different := len(found.repeated):
            in_all = f", {found.extra} times too often in all" * (found.extra > different)
            such = self._such(in_them.repeated, lead, epoch)
            parts.append(f"{different}{of} {units} are seen more often than in one process{in_all}{such}.")
        if found.unexpected:
            such = self._such(in_them.foreign, lead, epoch)
            parts.append(f"Ranks get {found.unexpected} {units} that one process never gets{such}.")
        return " ".join(parts)

    def _such(self, codes: Numbers, lead: str = "such as", epoch: EpochGiven | None = None) -> str:
        """Name some samples, and the ranks of an epoch that got them."""
        shown = [self._world.coding.name(int(code)) + self._on(int(code), epoch) for code in codes[:3]]
        return f" ({lead} {'; '.join(shown)})" if shown else ""

    def _on(self, code: int, epoch: EpochGiven | None) -> str:
        ranks = [] if epoch is None else [rank for rank, given in enumerate(epoch.ranks) if (given.items == code).any()]
        if len(ranks) > 4:
            return f" on {len(ranks)} ranks"
        return f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""

    def _costs_of(self, epoch: EpochGiven) -> Costs | None:
        """Return what each rank's steps cost, shape (ranks, steps), 0 where a rank makes no such step; None if unknown.

        Samples of an iterable dataset have no indices, so what they cost cannot be looked up.
        """
        steps = max(len(given.sizes) for given in epoch.ranks)
        if self._costs is None or steps == 0 or self._world.traits.is_iterable:
            return None
        return np.array([np.pad(self._costs(given), (0, steps - len(given.sizes))) for given in epoch.ranks])


def _is_torn(epoch: EpochGiven) -> bool:
    """Tell whether several ranks hold pieces of most of the batches that one process makes."""
    wholes = {frozenset(batch.tolist()) for batch in epoch.alone.batches}
    wholes_with: dict[int, list[frozenset[int]]] = {}
    for whole in wholes:
        for item in whole:
            wholes_with.setdefault(item, []).append(whole)
    ranks_with_piece: dict[frozenset[int], set[int]] = {}
    for rank, given in enumerate(epoch.ranks):
        for batch in {frozenset(batch.tolist()) for batch in given.batches}:
            for whole in wholes_with.get(next(iter(batch), -1), []):
                if batch < whole:
                    ranks_with_piece.setdefault(whole, set()).add(rank)
    return 2 * sum(len(ranks) > 1 for ranks in ranks_with_piece.values()) > len(wholes)


def _is_same_on_every_rank(epoch: EpochGiven) -> bool:
    """Tell whether all ranks were given the same samples, and more than one, which padding could explain."""
    first, *others = epoch.ranks
    return len(first.items) > 1 and all(first.has_same_samples(other) for other in others)


def _same_text(epoch: EpochGiven, again: EpochGiven) -> str:
    """Say what ranks get that get the same where they are seeded alike."""
    same, each = again.ranks[0].items, f"Each of {len(epoch.ranks)} ranks gets"
    samples = "" if epoch.is_sample else f", {len(same)} samples"  # of a part nobody knows how many there are
    if not epoch.is_sample and np.isin(epoch.alone.items, same).all():
        return f"{each} all of the data{samples}."
    return (
        f"{each} the same samples as the others"
        + ", if seeded alike" * (not _is_same_on_every_rank(epoch))
        + f"{samples}."
    )


def _epoch_report(epoch: EpochGiven, counted: _Counted, costs: Costs | None) -> EpochReport:
    found = counted.found
    balance, worst_balance = imbalance(costs) if costs is not None else (None, None)
    return EpochReport(
        epoch=epoch.number,
        items=tuple(len(given.items) for given in epoch.ranks),
        steps=tuple(len(given.sizes) for given in epoch.ranks),
        units=epoch.units,
        expected=epoch.expected,
        distinct=epoch.expected if found is None or epoch.is_sample else found.distinct,
        missing=None if found is None or epoch.is_sample else found.lacking,
        repeated=None if found is None else found.extra,
        foreign=None if found is None else found.unexpected,
        padding=counted.padding,
        dropped=counted.dropped,
        imbalance=balance,
        worst_imbalance=worst_balance,
    )
