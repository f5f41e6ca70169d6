"""What becomes of every kind of loader on three real ranks: ddp_patch, accelerate and Lightning Fabric.

``nox -s peers`` runs this; it prints the table of ``docs/compatibility.md`` and writes it there. Each implementation
runs in one group of ranks, whose random states are seeded differently, and in a fresh group after each hang.
"""

import argparse
import faulthandler
import logging
import os
import pickle
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist
from pages import put
from torch.utils.data import BatchSampler, DataLoader, Sampler
from zoo import BY_NAME, KINDS, STEPS, Kind, comparable, seed_ambient

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import RanksFailedError
from ddp_patch.orders.orders import EpochOrder, order_of
from ddp_patch.orders.random_states import look, random_generators
from ddp_patch.sharding import sampler_passes
from ddp_patch.testing import run_ranks

SEED = 100
RANKS = 3
EPOCHS = 2
LIMIT_S = 6.0  # for one kind in one configuration
PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"

YES, PADDED = "yes", "yes, padded"

Unit: TypeAlias = "str | tuple[str, ...]"  # what is shared: an item, or a whole batch of them
Make: TypeAlias = Callable[[], DataLoader[Any]]
Use: TypeAlias = Callable[[Iterable[Any]], None]
Configuration: TypeAlias = Callable[[Make, Use], object]  # makes the loader, shards it and uses it


# The implementations: what each is called, and its configurations by name, the default first.


def ddp_patch_configurations() -> dict[str, Configuration]:
    """The one call, without any argument."""
    return {"defaults": lambda make, use: use(patch_dataloader_to_ddp(make()))}


def accelerate_configurations() -> dict[str, Configuration]:
    """Accelerate with each of its settings for loaders."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    def configured(rng_types: tuple[str, ...] = ("generator",), **settings: Any) -> Configuration:
        def run(make: Make, use: Use) -> None:
            configuration = DataLoaderConfiguration(**settings)
            accelerator = Accelerator(cpu=True, dataloader_config=configuration, rng_types=list(rng_types))
            use(accelerator.prepare(make()))

        return run

    return {
        "defaults": configured(),
        "even_batches=False": configured(even_batches=False),
        "use_seedable_sampler=True, data_seed": configured(use_seedable_sampler=True, data_seed=SEED),
        "rng_types=['torch', 'generator']": configured(rng_types=("torch", "generator")),
        "rng_types, even_batches=False": configured(rng_types=("torch", "generator"), even_batches=False),
        "dispatch_batches=True": configured(dispatch_batches=True),
        "dispatch_batches=False": configured(dispatch_batches=False),
        "dispatch_batches=True, split_batches=True": configured(dispatch_batches=True, split_batches=True),
        "dispatch_batches=False, split_batches=True": configured(dispatch_batches=False, split_batches=True),
    }


def fabric_configurations() -> dict[str, Configuration]:
    """Lightning Fabric, which joins the group that exists, with and without its own sampler."""
    os.environ["TORCHELASTIC_RUN_ID"] = "peers"  # this process was started by something else than Fabric
    from lightning.fabric import Fabric

    def configured(use_distributed_sampler: bool) -> Configuration:
        def run(make: Make, use: Use) -> None:
            def program(fabric: Any) -> None:
                # The loader is made where Fabric sees its arguments, which helps it to make it again.
                use(fabric.setup_dataloaders(make(), use_distributed_sampler=use_distributed_sampler))

            Fabric(accelerator="cpu", devices=RANKS, strategy="ddp").launch(program)

        return run

    return {
        "use_distributed_sampler=True": configured(use_distributed_sampler=True),
        "use_distributed_sampler=False": configured(use_distributed_sampler=False),
    }


IMPLEMENTATIONS: dict[str, Callable[[], dict[str, Configuration]]] = {
    "ddp_patch": ddp_patch_configurations,
    "accelerate": accelerate_configurations,
    "Lightning Fabric": fabric_configurations,
}
DISTRIBUTIONS = {"ddp_patch": "ddp-patch", "accelerate": "accelerate", "Lightning Fabric": "lightning"}


# On a rank: one kind in one configuration, observed.


@dataclass
class Draw:
    """What one pass over the user's own sampler gave."""

    units: list[Unit] = field(default_factory=list)
    ended: bool = False


@dataclass
class Report:
    """What one rank saw of one kind in one configuration."""

    epochs: list[list[Unit]] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    error: str = ""
    uneven: bool = False
    ended: bool = False


class UnevenStepsError(Exception):
    """Some ranks have a batch at this step and others have none, or failed: a training would hang here."""


class Meeting:
    """Where the ranks meet at each step, in a group of its own that no implementation's messages go through."""

    def __init__(self) -> None:
        self.group = dist.new_group()

    def total(self, number: int) -> int:
        """Return the sum of the ranks' numbers."""
        total = torch.tensor(number)
        dist.all_reduce(total, group=self.group)
        return int(total)

    def fail(self) -> None:
        """Tell the others, who wait at their next step, that this rank makes none."""
        self.total(-RANKS)

    def steps(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the loader's batches, one on every rank at a time."""
        nothing = object()
        iterator = iter(loader)
        while True:
            batch = next(iterator, nothing)
            with_batch = self.total(int(batch is not nothing and not is_empty(batch)))
            if with_batch == 0:
                return
            if with_batch < RANKS:
                raise UnevenStepsError
            yield batch


def is_empty(batch: Any) -> bool:
    """Tell whether there is nothing in a batch, which makes no step."""
    return batch.numel() == 0 if isinstance(batch, torch.Tensor) else isinstance(batch, list) and not batch


def observe(kind: Kind, run: Configuration, meeting: Meeting) -> Report:
    """Use the kind's loader for its epochs and report what came, whatever happens."""
    report = Report()
    try:
        run(lambda: made(kind), lambda loader: use(kind, loader, meeting, report))
    except UnevenStepsError:
        report.uneven = True
    except Exception as error:  # noqa: BLE001 - whatever an implementation raises is its result
        report.error = type(error).__name__
    return report


def made(kind: Kind) -> DataLoader[Any]:
    """Make the kind's loader, with numbers put into tensors as torch's default collation does."""
    loader = kind.make()
    loader.collate_fn = as_tensor
    return loader


def as_tensor(batch: Any) -> Any:
    """Return a batch of whole numbers as a tensor, which accelerate needs to dispatch it, and any other as it is."""
    is_numbers = isinstance(batch, list) and all(type(item) is int for item in batch)
    return torch.tensor(batch) if is_numbers else batch


def use(kind: Kind, loader: Iterable[Any], meeting: Meeting, report: Report) -> None:
    """Go through the loader's epochs step by step."""
    with recording(kind, report.draws):
        for _ in range(min(EPOCHS, kind.epochs)):
            report.epochs.append([])
            for batch in islice(meeting.steps(loader), STEPS if kind.endless else None):
                report.epochs[-1] += units(kind, batch)
    report.ended = True


def units(kind: Kind, batch: Any) -> list[Unit]:
    """Return what was shared: the batch as a whole, or each of its items."""
    if is_unbatched(kind) and not kind.batches:
        return [item_name(batch)]
    return [batch_name(batch)] if kind.batches else list(batch_name(batch))


def is_unbatched(kind: Kind) -> bool:
    """Tell whether the kind's loader yields items."""
    return kind.make().batch_sampler is None


def item_name(item: Any) -> str:
    """Name an item, so that any two can be compared and counted."""
    return repr(comparable(item))


def batch_name(batch: Any) -> tuple[str, ...]:
    """Name the items of a batch."""
    return tuple(map(item_name, batch.tolist() if isinstance(batch, torch.Tensor) else batch))


@contextmanager
def recording(kind: Kind, draws: list[Draw]) -> Iterator[None]:
    """Have the class of the kind's own sampler record what each pass over it gives."""
    sampler = users_sampler(kind.make())
    if not isinstance(sampler, Sampler) or type(sampler) is BatchSampler:
        yield
        return
    begin = type(sampler).__iter__
    name = batch_name if kind.batches else item_name

    def recorded(self: Sampler[Any]) -> Iterator[Any]:
        draws.append(Draw())
        return record(begin(self), name, draws[-1])

    # This package looks torch's own orders up instead of iterating: what iterating would give is recorded then.
    with patch.object(type(sampler), "__iter__", recorded), patch.object(sampler_passes, "order_of", iterated_first):
        yield


def iterated_first(sampler: Any, epoch: int, private_generator: torch.Generator | None = None) -> EpochOrder:
    """Iterate the sampler as torch does, put all random states back, and look the order up."""
    with look(random_generators([sampler])):
        for _ in sampler:
            pass
    return order_of(sampler, epoch, private_generator)


def users_sampler(loader: DataLoader[Any]) -> object:
    """Return the sampler that decides what is shared: below torch's own BatchSampler, or the batch sampler."""
    if loader.batch_sampler is None:
        return loader.sampler
    return loader.batch_sampler.sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler


def record(iterator: Iterator[Any], name: Callable[[Any], Unit], draw: Draw) -> Iterator[Any]:
    """Yield from the iterator, writing down what it gives."""
    for unit in iterator:
        draw.units.append(name(unit))
        yield unit
    draw.ended = True


def observe_all(rank: int, world_size: int, implementation: str, attempts: list["Attempt"], folder: Path) -> None:
    """On a rank, observe one attempt after the other and write down each report as soon as it is there."""
    warnings.simplefilter("ignore")
    logging.disable()
    configurations = IMPLEMENTATIONS[implementation]()
    meeting = Meeting()
    (folder / f"begun-{rank}").touch()
    for attempt in attempts:
        with time_limit():
            seed_ambient(SEED + rank)
            report = observe(BY_NAME[attempt.kind], configurations[attempt.configuration], meeting)
            with (folder / str(rank)).open("ab") as reports:
                pickle.dump(report, reports)
            if report.error and not report.ended:
                meeting.fail()
            meeting.total(0)  # no rank begins the next one while another is still at this one


@contextmanager
def time_limit() -> Iterator[None]:
    """End this process if the body takes too long, wherever it hangs."""
    with Path(os.devnull).open("w") as nowhere:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


# In the parent: all attempts of one implementation, in as many groups as it takes.


@dataclass(frozen=True)
class Attempt:
    """One kind in one configuration."""

    kind: str
    configuration: str


def attempt_all(implementation: str) -> dict[Attempt, list[Report]]:
    """Return every attempt's reports; of one that hangs, those of the ranks that came to an end."""
    configurations = IMPLEMENTATIONS[implementation]()
    waiting = [Attempt(kind.name, configuration) for kind in KINDS for configuration in configurations]
    found: dict[Attempt, list[Report]] = {}
    while waiting:
        ranks = reports_of_group(implementation, waiting)
        tried = min(map(len, ranks)) + 1  # that many, unless the list ends before: the last one hung
        for place, attempt in enumerate(waiting[:tried]):
            found[attempt] = [reports[place] for reports in ranks if len(reports) > place]
        waiting = waiting[tried:]
    return found


def reports_of_group(implementation: str, attempts: list[Attempt]) -> list[list[Report]]:
    """Observe attempts in a new group of ranks until one hangs, and return each rank's reports."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            run_ranks(observe_all, RANKS, implementation, attempts, folder, timeout=len(attempts) * LIMIT_S + 60)
        except RanksFailedError:
            if len(list(folder.glob("begun-*"))) < RANKS:
                raise  # not one attempt's doing
        return [list(reports_in(folder / str(rank))) for rank in range(RANKS)]


def reports_in(path: Path) -> Iterator[Report]:
    """Yield the reports that a rank wrote down."""
    if not path.exists():
        return
    with path.open("rb") as file:
        while file.peek(1):
            yield pickle.load(file)  # noqa: S301 - our own rank's


# What "handled" means: one judgement for all.


def judge(kind: Kind, reports: list[Report]) -> str:
    """Say whether the ranks' reports of a kind add up to its stream, or else what happened."""
    if errors := [report.error for report in reports if report.error]:
        return f"raises {errors[0]}"
    if len(reports) < RANKS:
        return "hangs"
    if any(report.uneven for report in reports):
        return "uneven steps"
    epochs = list(zip(*(report.epochs for report in reports), strict=True))
    if kind.shuffles and len(epochs) > 1 and epochs[0] == epochs[1]:
        return "same order each epoch"
    judged = epochs[:1] if kind.endless else epochs  # an endless epoch is as long as it is looked at
    return max((judge_epoch(kind, number, epoch, reports) for number, epoch in enumerate(judged)), key=badness)


def badness(verdict: str) -> int:
    """Order verdicts: handled, handled with padding, not handled."""
    return {YES: 0, PADDED: 1}.get(verdict, 2)


def judge_epoch(kind: Kind, number: int, shares: tuple[list[Unit], ...], reports: list[Report]) -> str:
    """Compare one epoch's shares, taken together, with every stream that could have been shared."""
    together = [unit for share in shares for unit in share]
    streams = [stream[: len(together)] if kind.endless else stream for stream in candidates(kind, number, reports)]
    if not streams:
        return "sampler replaced"
    verdict = min((compare(kind, together, stream) for stream in streams), key=badness)
    if badness(verdict) == 2 and not agree(reports):
        return "ranks disagree"
    return verdict


def candidates(kind: Kind, number: int, reports: list[Report]) -> list[list[Unit]]:
    """Return what rank 0 drew from the user's sampler, and what one process reads where that is always the same."""
    streams = [draw.units for draw in reports[0].draws if draw.ended or kind.endless]
    for workers in {0, kind.make().num_workers}:  # an iterable that does not split itself is read once by each worker
        with suppress(AttributeError):  # some can be read by workers only
            alone, again = (unpatched(kind, workers, seed)[number] for seed in (SEED, SEED + 1))
            streams += [alone] if Counter(alone) == Counter(again) else []
    return streams


@cache
def unpatched(kind: Kind, workers: int, seed: int) -> list[list[Unit]]:
    """Return the kind's epochs in one process, with no item dropped."""
    seed_ambient(seed)
    loader = made(kind)
    loader.num_workers = workers
    if isinstance(loader.batch_sampler, BatchSampler):
        loader.batch_sampler.drop_last = False
    steps = STEPS * RANKS if kind.endless else None
    return [
        [unit for batch in islice(loader, steps) for unit in units(kind, batch)]
        for _ in range(min(EPOCHS, kind.epochs))
    ]


def agree(reports: list[Report]) -> bool:
    """Tell whether all ranks that drew from the user's sampler drew the same."""
    drawn = [[draw.units for draw in report.draws if draw.ended] for report in reports]
    drawn = [streams for streams in drawn if streams]
    return all(streams == drawn[0] for streams in drawn)


def compare(kind: Kind, together: list[Unit], stream: list[Unit]) -> str:
    """Compare what all ranks got with one stream, allowing for what must be padded or may be dropped."""
    loader = kind.make()
    batch_size = 1 if kind.batches else loader.batch_size or 1
    lost, repeated = Counter(stream) - Counter(together), Counter(together) - Counter(stream)
    droppable = RANKS * batch_size - 1 if loader.drop_last else 0
    if lost.total() > droppable:
        is_lost = not kind.batches or Counter(items(stream)) - Counter(items(together))
        return "items lost" if is_lost else "batches split"
    if set(repeated) - set(stream):
        return "batches split" if kind.batches else "other items"
    if repeated.total() <= padding(kind, stream, RANKS):
        return YES
    return PADDED if repeated.total() <= padding(kind, stream, RANKS * batch_size) else "items repeated"


def padding(kind: Kind, stream: list[Unit], of: int) -> int:
    """Count what completes the last round or batch of the stream, or of each worker's part of it."""
    return sum(-length % of for length in kind.parts or [len(stream)])


def items(batches: list[Unit]) -> list[str]:
    """Return the items of batches."""
    return [item for batch in batches for item in batch]


# The table.


def best(kind: Kind, attempts: dict[Attempt, list[Report]]) -> str:
    """Return the best verdict of all configurations, or the default one's where none handles the kind."""
    verdicts = [judge(kind, reports) for attempt, reports in attempts.items() if attempt.kind == kind.name]
    return min(verdicts, key=badness)


def table(attempts: dict[str, dict[Attempt, list[Report]]]) -> str:
    """Write the best verdicts, by implementation, as a Markdown table: a row for the kinds that fare alike; totals."""
    verdicts = {name: [best(kind, found) for kind in KINDS] for name, found in attempts.items()}
    alike: dict[tuple[str, ...], list[str]] = {}
    for kind, *cells in zip(KINDS, *verdicts.values(), strict=True):
        alike.setdefault(tuple(cells), []).append(kind.name)
    rows = [["kinds of loader", *(f"{name} {version(DISTRIBUTIONS[name])}" for name in verdicts)]]
    rows += [["---"] * len(rows[0])]
    rows += [["; ".join(names), *cells] for cells, names in alike.items()]
    rows += [[f"**handled, of {len(KINDS)}**", *map(totals, verdicts.values())]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def by_configuration(attempts: dict[str, dict[Attempt, list[Report]]]) -> str:
    """Write how many kinds each configuration handles by itself as a Markdown table."""
    verdicts: dict[tuple[str, str], list[str]] = {}
    for name, found in attempts.items():
        for attempt, reports in found.items():
            verdicts.setdefault((name, attempt.configuration), []).append(judge(BY_NAME[attempt.kind], reports))
    rows = [["configuration", "handled"], ["---", "---"]]
    rows += [[f"{name}: `{configuration}`", totals(found)] for (name, configuration), found in verdicts.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def totals(verdicts: list[str]) -> str:
    """Count what is handled, and how much of it with padding."""
    padded = verdicts.count(PADDED)
    handled = f"**{verdicts.count(YES) + padded}**"
    return f"{handled} ({padded} padded)" if padded else handled


def main() -> None:
    """Run everything, print the table and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--details", action="store_true", help="print every configuration's verdict too")
    details = parser.parse_args().details
    attempts = {implementation: attempt_all(implementation) for implementation in IMPLEMENTATIONS}
    for implementation, found in attempts.items() if details else ():
        for attempt, reports in found.items():
            print(f"{implementation}, {attempt.configuration}: {attempt.kind}: {judge(BY_NAME[attempt.kind], reports)}")
    print(f"Each configuration by itself:\n\n{by_configuration(attempts)}\n\n{table(attempts)}")
    put(PAGE, "peers", table(attempts))


if __name__ == "__main__":
    main()
