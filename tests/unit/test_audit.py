"""The audit finds what is broken, names it with its remedy, and raises no false alarm."""

import json
import pickle
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import audit_parts as parts
import audit_setups as setups
import numpy as np
import pytest
import torch
from audit_setups import N, Untouchable
from messages import Words, missing, raises
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info
from trying import over_in_turn
from zoo import ALL_KINDS, BY_NAME, Kind, draw_ambient, loader, seed_ambient

from ddp_patch import audit, patch_dataloader_to_ddp
from ddp_patch.auditing import auditing, problem_kinds
from ddp_patch.auditing.commands import commands
from ddp_patch.auditing.report import page
from ddp_patch.errors import AuditError, InvalidOptionError, NotALoaderError
from ddp_patch.loaders.facts import NOTHING_TO_COMPARE

FINITE = [kind for kind in ALL_KINDS if not kind.endless]


def kinds(report: Any) -> list[str]:
    return [problem.kind for problem in report.problems]


# Set-up, and what the audit names: with a word of its remedy.
PATCHED = "patch_dataloader_to_ddp()"
BROKEN: list[tuple[Callable[[int, int], DataLoader[Any]], str, Words, str]] = [
    (setups.not_sharded, "not_sharded", ("Each of 4 ranks", "all of the data", "103 samples"), PATCHED),
    (setups.rank_zero_everywhere, "not_sharded", ("Each of 4 ranks", "the same samples", "26 samples"), PATCHED),
    (setups.own_draw, "not_sharded", ("Each of 4 ranks", "if seeded alike", "25 samples"), PATCHED),
    (setups.double_sharding, "double_sharding", "77 of 103 samples", "Shard once"),
    (setups.by_local_rank, "missing", ("51 of 103 samples", "on ranks 0, 2"), PATCHED),
    (setups.ambient_order, "ranks_disagree", "seeded alike", "seed every rank alike"),
    (setups.private_order, "missing", "of 100 samples are missing", "seed alike on every rank"),
    (setups.torchs, "same_order", ("2 epochs have 1 different order", "set_epoch()"), "set_epoch(epoch)"),
    (setups.torn, "split_batch", ("8 of the 8 batches", "of the 2 of one process"), "DDPBatchSamplerWrapper"),
    (setups.lost_tail, "missing", "100; 101; 102", "drop_last=False"),
    (setups.torchs_dropping, "tail_lost", ("same 3 samples", "100; 101; 102", "every epoch"), "drop_last=False"),
    (setups.uneven, "uneven_steps", ("Rank 1 makes 6 steps", "rank 0 makes 7"), "uneven='pad'"),
    (setups.wrong_length, "wrong_length", ("says 25", "7 steps"), "__len__"),
    (setups.whole_batch_padding, "padding", "9 of 103 samples", "even_batches=False"),
    (setups.failing, "error", ("Rank 1", "the index file is gone"), "Mend the sampler"),
    (setups.stream_split_by_rank_alone, "repeated", "104 of 104 samples", "get_worker_info()"),
    (setups.stream_read_by_every_worker, "not_sharded", ("all of the data", "206 samples"), PATCHED),
    (parts.validation_too, "foreign", "8 samples", "same data"),
]


@pytest.mark.parametrize(("make", "kind", "said", "remedy"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_set_up_is_found_and_named_with_its_remedy(make: Any, kind: str, said: Words, remedy: str) -> None:
    report = audit(make, world_size=4)
    assert kinds(report) == [kind]
    assert not missing(report.problems[0].what, said), report.problems[0].what
    assert remedy in report.problems[0].remedy
    assert not report.ok
    with pytest.raises(AuditError, match=kind):
        report.raise_for_problems()


def test_every_kind_of_problem_has_a_broken_set_up() -> None:
    assert {kind for _, kind, *_ in BROKEN} == set(problem_kinds)


@over_in_turn(FINITE, "world_size", (3, 2))
def test_every_patched_kind_of_loader_holds(kind: Kind, world_size: int) -> None:
    report = audit(kind.make(), world_size, epochs=min(2, kind.epochs))
    # Too short a length may round up to the right number of steps. torch's is short where workers' last batches are.
    has_wrong_length = kind.warning or "with len, 3 workers" in kind.name
    assert kinds(report) == [] or (has_wrong_length and kinds(report) == ["wrong_length"])
    assert report.epochs_differ in (None, kind.shuffles)
    assert not report.is_sample


def test_a_tail_is_lost_where_it_is_always_the_same() -> None:
    assert kinds(audit(loader(), 2, uneven="drop")) == ["tail_lost"]
    report = audit(loader(shuffle=True), 2, uneven="drop")
    assert report.ok
    assert report.epochs[0].dropped == 1
    assert kinds(audit(loader(drop_last=True), 4)) == ["tail_lost"]


def test_epochs_have_to_differ_where_that_is_demanded() -> None:
    assert audit(loader(), 2).epochs_differ is False
    assert kinds(audit(loader(), 2, epochs_differ=True)) == ["same_order"]
    assert audit(loader(shuffle=True), 2, epochs_differ=True).epochs_differ is True
    assert audit(loader(), 2, epochs=1).epochs_differ is None
    returning = audit(setups.by_turns, 2, epochs=3, epochs_differ=True, allow=["not_sharded"])
    assert "3 epochs have 2 different orders" in returning.problems[0].what
    assert audit(setups.by_turns, 2, epochs=3, allow=["not_sharded"]).ok


@pytest.mark.parametrize("name", ["persistent workers", "iterable, 2 workers", "own torch.Generator"])
def test_nothing_is_changed(name: str) -> None:
    audited, other = BY_NAME[name].make(), BY_NAME[name].make()
    seed_ambient(5)
    draws = draw_ambient(3)
    seed_ambient(5)
    audit(lambda: [draw_ambient(), audited][1:], 3)
    assert draw_ambient(3) == draws
    epochs = []
    for one in (audited, other):
        seed_ambient(4)
        epochs.append(list(one))
    assert epochs[0] == epochs[1]


def test_samples_that_cannot_be_told_apart_are_counted() -> None:
    class Same(setups.Stream):
        def __iter__(self) -> Any:
            return iter([0.5] * 6 + [1.5] * 3)

    report = audit(DataLoader(Same(), batch_size=2), 3)
    assert (report.epochs[0].expected, report.epochs[0].distinct) == (9, 2)
    assert "each of 9 samples as often as in one process" in str(report)


def test_so_many_items_of_all_ranks_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    told = f"{auditing._MOST / 10**6:g} million"
    page_of_it = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    helps = [getattr(parameter, "help", "") or "" for parameter in commands.commands["audit"].params]
    assert all(told in text for text in (str(audit.__doc__), page_of_it, " ".join(helps)))
    monkeypatch.setattr("ddp_patch.auditing.auditing._MOST", 120)
    for world_size in (3, np.int64(6)):
        report = audit(loader(sampler=setups.WithReplacement()), world_size, epochs=1)
        assert sum(report.epochs[0].items) == 120


def test_of_a_large_loader_the_first_items_are_drawn_and_the_report_says_so() -> None:
    report = audit(DataLoader(Untouchable(1000), batch_size=4, shuffle=True), 4, max_items=30)
    assert report.ok
    assert report.is_sample
    assert report.epochs[0].items == (32,) * 4
    assert report.epochs[0].missing is None
    assert "the first 128 samples" in str(report)
    broken = audit(setups.not_sharded, 4, max_items=40)
    assert kinds(broken) == ["not_sharded"]
    assert broken.is_sample


def test_a_report_is_plain_and_printable() -> None:
    report = audit(setups.not_sharded, world_size=4)
    assert pickle.loads(pickle.dumps(report)) == report  # noqa: S301 - our own
    told = json.loads(json.dumps(report.to_dict()))
    assert told["ok"] is False
    assert told["problems"][0]["kind"] == "not_sharded"
    assert "✘" in str(report)
    assert "Remedy: " in str(report)
    assert report.to_markdown().startswith("### ✘ not_sharded: FAIL\n")
    assert all(report.to_markdown().splitlines()[2:4])


def test_what_is_no_loader_is_not_audited() -> None:
    nothing: Any = 7
    with raises(NotALoaderError, ("audit", "DataLoader", "make(rank, world_size)", "7 (int)"), "loader itself"):
        audit(nothing, 2)
    with raises(NotALoaderError, ("<lambda>[0](rank=0, world_size=2)", "1 (int)", "DataLoader")):
        audit(lambda rank, world_size: [1], 2)


def test_workers_of_an_iterable_dataset_are_simulated() -> None:
    """By-worker sharding gives what the dataset gives each worker; unpatched, every rank reads all."""
    given = BY_NAME["iterable, splits itself, 2 workers"].make()
    by_worker = audit(given, 2, share="by_worker", uneven="keep", allow=["uneven_steps"])
    assert by_worker.ok
    assert by_worker.epochs[0].missing == 0
    assert "reading the iterable dataset" in by_worker.how
    assert kinds(audit(given, 2, patch=False)) == ["not_sharded"]


class Unnamed(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(3)


def test_an_audit_says_that_ranks_could_compare_no_data() -> None:
    unnamed = DataLoader(Unnamed())
    assert audit(unnamed, 2).how.endswith(NOTHING_TO_COMPARE)
    for report in (
        audit(unnamed, 2, fingerprint=None),
        audit(unnamed, 2, patch=False),
        audit(DataLoader(TensorDataset(torch.arange(9))), 2),
    ):
        assert NOTHING_TO_COMPARE not in report.how


def test_sparse_and_negative_indices_are_counted() -> None:
    assert audit(loader(sampler=[10**15, 3, -1, 2**70, 7]), 2).ok
    assert kinds(audit(loader(sampler=[10**15, 3, -1, 2**70, 7]), 2, patch=False)) == ["not_sharded"]


# Right set-ups that are easily mistaken, and broken ones that are easily missed.


class NeedsAWorker(setups.Stream):
    """Splits itself by worker, and is never read without one."""

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        return islice(super().__iter__(), info.id, None, info.num_workers)


class Constant(setups.Stream):
    """Samples that are all equal."""

    def __iter__(self) -> Iterator[Any]:
        return (0.5 for _ in super().__iter__())


def of_a_subset(rank: int, ranks: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Subset(Untouchable(104), range(rank, 104, ranks)), 4, **options)


SHUFFLED = DataLoader(Untouchable(96), 4, shuffle=True, generator=torch.Generator().manual_seed(0))
EASILY_MISTAKEN: dict[str, Callable[[int, int], DataLoader[Any]]] = {
    "a generator that all ranks' loaders reach": lambda rank, ranks: patch_dataloader_to_ddp(
        SHUFFLED, rank=rank, num_replicas=ranks
    ),
    "a Subset of each rank, shuffled by each": lambda rank, ranks: of_a_subset(rank, ranks, shuffle=True),
    "samples that are made anew": lambda rank, ranks: DataLoader(setups.Augmented(rank, ranks, n=104), 4),
    "samples that are all equal": lambda rank, ranks: DataLoader(Constant(rank, ranks, n=104), 4),
    "workers that share a rank's part": lambda rank, ranks: DataLoader(
        NeedsAWorker(rank, ranks, n=96), 4, num_workers=2
    ),
}


@pytest.mark.parametrize("name", EASILY_MISTAKEN)
def test_a_right_set_up_that_is_easily_mistaken_holds(name: str) -> None:
    audit(EASILY_MISTAKEN[name], 4).raise_for_problems()


def test_markdown_shows_names_as_they_are() -> None:
    names = ["__a__.jpg", "*b*.jpg", "c|<i>_d.jpg", *"fghij"]
    told = audit(lambda rank, ranks: loader(sampler=names if ranks == 1 else names[3 + rank :: ranks]), 2).to_markdown()
    assert told.startswith(r"### ✘ \<lambda\>: FAIL")
    assert all(name in told for name in (r"'\_\_a\_\_.jpg'", r"'\*b\*.jpg'", r"'c\|\<i\>\_d.jpg'"))


def test_what_was_allowed_stands_in_every_form() -> None:
    report = audit(DataLoader(Untouchable(N), 4), 4, patch=False, allow=["not_sharded"])
    assert report.ok
    assert all("not_sharded" in text for text in (str(report), report.to_markdown(), page({"train": report})))


# What is counted, and against what.


@pytest.mark.parametrize(
    ("make", "rank"),
    [
        (lambda rank, ranks: DataLoader(Untouchable(104 // ranks)), "rank 0 of 4"),
        (lambda rank, ranks: DataLoader(Untouchable(26 if rank == 3 else 104)), "rank 3 of 4"),
        (lambda rank, ranks: DataLoader(Subset(Untouchable(104 + ranks), range(rank, 104, ranks))), "rank 0 of 4"),
    ],
)
def test_indices_of_each_ranks_own_dataset_are_not_compared(make: Any, rank: str) -> None:
    with raises(InvalidOptionError, (rank, "has length", "rank 0 of 1"), "torch.utils.data.Subset"):
        audit(make, 4)


@pytest.mark.parametrize("name", ["samples that are made anew", "samples that are all equal"])
def test_of_samples_that_cannot_be_compared_nothing_is_told(name: str) -> None:
    report = audit(EASILY_MISTAKEN[name], 4)
    assert (report.epochs[0].missing, report.epochs[0].repeated) == (None, None)
    assert "104 samples that cannot be compared" in str(report)
    assert report.pictured.positions == 0


def test_the_rounds_of_each_workers_part_are_filled() -> None:
    # How many of the shards' 5, 7, 4 and 6 samples are repeated to fill each one's last round, and left out with it.
    world_size, items, padding, dropped = 3, 9, 5, 4
    given = DataLoader(setups.Shards(), 2, num_workers=4)
    report = audit(given, world_size, epochs=1)
    report.raise_for_problems()
    (epoch,) = report.epochs
    assert (epoch.expected, epoch.items, epoch.padding) == (22, (items,) * world_size, padding)
    (dropping,) = audit(given, world_size, epochs=1, uneven="drop", allow=["tail_lost"]).epochs
    assert (dropping.dropped, dropping.missing, dropping.repeated) == (dropped, dropped, 0)
    assert audit(given, world_size, epochs=1, uneven="keep", padding=False).ok
    padded = audit(given, world_size, epochs=1, padding=False)
    assert kinds(padded) == ["padding"]
    assert not missing(padded.problems[0].what, (f"{padding} of 22 samples",))


class ToldElsewhere(IterableDataset[int]):
    """Is told by a global which part to read, so that nobody sees it split."""

    part = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(6 * self.part, 6 * self.part + 6))


def tell_elsewhere(worker: int) -> None:
    ToldElsewhere.part = worker


def test_what_a_patched_loader_loses_of_the_unpatched_one_is_found() -> None:
    given = DataLoader(ToldElsewhere(), 2, num_workers=4, worker_init_fn=tell_elsewhere)
    assert sorted(int(item) for batch in given for item in batch) == [*range(24)]
    (problem,) = audit(given, 2, epochs=1).problems
    assert problem.kind == "missing"
    assert not missing(problem.what, ("18 of the 24 samples", "num_workers=4", "world of one rank"))
    assert not missing(problem.remedy, ("get_worker_info()", "num_workers=0"))
    ToldElsewhere.part = 0
