"""Autopatch: which loaders it patches, when, and that nothing is left of it. Worlds are given by hand."""

import copy
import logging
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from messages import raises
from quick import soaked
from repeaters import BegunAtFirst, Infinite, MultiEpochs
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler
from trying import over
from zoo import BY_NAME, Indices, Kind, seed_ambient, units

import ddp_patch
from ddp_patch import autopatch, leave_alone, unpatched
from ddp_patch.errors import (
    AlreadyPatchedError,
    InvalidOptionError,
    NotALoaderError,
    NotPatchedError,
    UnsupportedLoaderError,
)

N = 10


def made(**options: Any) -> DataLoader[Any]:
    return DataLoader(Indices(N), **{"batch_size": 2, **options})


def items(loader: Any) -> list[int]:
    return [int(item) for batch in loader for item in batch]


MINE = list(range(1, N, 2))  # rank 1's of 2

LOADERS = [DataLoader, MultiEpochs, Infinite, BegunAtFirst, *DataLoader.__subclasses__()]


def attributes() -> list[dict[str, Any]]:
    # The first patch of a process gives torch's class its repr() for good.
    return [{**vars(kind), "__repr__": None} for kind in (*LOADERS, DistributedDataParallel)]


OF_EACH_SORT = {
    *("shuffle=True", "weighted, generator", "own set_epoch", "an iterator, once", "endless: shuffling for ever"),
    *("nested batch samplers", "batch_size=None", "a loader subclass", "persistent workers", "iterable, 2 workers"),
    *("iterable with set_epoch, persistent workers", "grouped, shuffled"),
}


@over([BY_NAME[name] for name in BY_NAME if name in OF_EACH_SORT])
def test_a_loader_becomes_the_patched_one(kind: Kind) -> None:
    """One of each sort, in epoch after epoch, whatever a rank's own seed."""

    def epochs_of(loader: Any) -> list[list[Any]]:
        return [units(kind, loader) for _ in range(min(kind.epochs, 2))]

    seed_ambient(1)
    patched = epochs_of(ddp_patch.patch_dataloader_to_ddp(kind.make(), rank=1, num_replicas=2, seed=7))
    seed_ambient(2)
    with autopatch(rank=1, num_replicas=2, seed=7) as summary:
        found = epochs_of(kind.make())
    assert found == patched
    assert [record.fate for record in summary.records] == ["patched"]


def test_what_is_made_before_is_patched_and_stays_so() -> None:
    loader, unused = made(shuffle=True), made()
    persistent = made(num_workers=1, persistent_workers=True)
    assert len(items(persistent)) == N
    with autopatch(rank=1, num_replicas=2):
        first, second = items(loader), items(loader)
        assert items(persistent) == items(persistent) == MINE
    assert first != second
    assert loader.sampler.epoch == 1  # type: ignore[attr-defined]  # it counts epochs
    assert ddp_patch.check_loaders_is_patched(loader)
    assert not ddp_patch.check_loaders_is_patched(unused)
    assert len(items(unused)) == N


def test_nothing_is_left_of_it() -> None:
    before = attributes()
    with autopatch(rank=0, num_replicas=2):
        assert attributes() != before

        class Defined(DataLoader[Any]):
            def __iter__(self) -> Any:
                return super().__iter__()

        inside = Defined.__iter__
    assert attributes() == before
    assert Defined.__iter__ is not inside
    with pytest.raises(LookupError), autopatch(rank=0, num_replicas=2):
        raise LookupError
    assert attributes() == before
    with pytest.raises(InvalidOptionError), autopatch(uneven="no"):  # type: ignore[arg-type]  # what is tested
        pass
    assert attributes() == before


def test_importing_it_hooks_nothing() -> None:
    code = """
from torch.utils.data import DataLoader
before = dict(vars(DataLoader))
import sys, ddp_patch
assert "ddp_patch.running" not in sys.modules
ddp_patch.autopatch, ddp_patch.autopatch()
assert dict(vars(DataLoader)) == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own script


def test_without_several_ranks_nothing_happens() -> None:
    loader = made()
    with autopatch() as summary:
        assert len(items(loader)) == N
    with autopatch(rank=0, num_replicas=1):
        assert len(items(loader)) == N
    assert not summary.records
    assert any("ddp-patch run -n 8" in note for note in summary.lines)
    assert not ddp_patch.check_loaders_is_patched(loader)


def test_what_is_used_or_made_within_unpatched_is_left_alone() -> None:
    outside, patched = made(), made()
    with autopatch(rank=1, num_replicas=2):
        assert items(patched) == MINE
        with unpatched():
            inside = made()
            assert len(items(outside)) == N
            assert len(items(inside)) == N
            assert items(patched) == MINE
        assert items(outside) == MINE
        assert len(items(inside)) == N


def test_a_loader_can_be_left_alone_for_good() -> None:
    with autopatch(rank=1, num_replicas=2) as summary:
        alone = leave_alone(made())
        assert len(items(alone)) == len(items(copy.copy(alone))) == N
        assert not ddp_patch.check_loaders_is_patched(alone)
        loader = made()
        assert items(loader) == MINE
        with raises(AlreadyPatchedError, ("leave_alone", "DataLoader", "rank 1 of 2"), "after it is made"):
            leave_alone(loader)
    assert {record.fate for record in summary.records[:2]} == {"left alone"}
    with raises(NotALoaderError, "leave_alone"):
        leave_alone(range(3))  # type: ignore[type-var]  # what is tested


HERE = Path(__file__)
LINE = made.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    ("options", "is_patched"),
    [
        ({"only": "test_autopatch.py"}, True),
        ({"only": "*/test_auto*.py:*"}, True),
        ({"only": "autopatch.py"}, False),
        ({"excepted": "test_autopatch.py"}, False),
        ({"excepted": "test_autopatch.py:1"}, True),
        ({"only": f"test_autopatch.py:{LINE}"}, True),
        ({"only": "unit/*.py", "excepted": "test_autopatch.py"}, False),
    ],
)
def test_places_are_chosen_by_patterns(options: Any, is_patched: bool) -> None:
    with autopatch(rank=1, num_replicas=2, **options) as summary:
        assert (items(made()) == MINE) is is_patched
    unused = [note for note in summary.lines if "pattern" in note]
    assert bool(unused) is any(name in str(options) for name in ("other", "'autopatch.py", ":1'", "0'"))


@pytest.mark.parametrize("patterns", [[3], ["a", ""], ""])
def test_what_is_no_pattern_or_keyword_is_refused(patterns: Any) -> None:
    with pytest.raises(TypeError, match="no_such"), autopatch(no_such=1):  # type: ignore[call-arg]  # what is tested
        pass
    with raises(InvalidOptionError, "only", "Pass"), autopatch(only=patterns):
        pass


def test_what_shards_itself_is_left_to_it() -> None:
    sampler: Any = DistributedSampler(Indices(N), num_replicas=2, rank=0)
    own = ddp_patch.patch_dataloader_to_ddp(made(), rank=0, num_replicas=2)
    with autopatch(rank=1, num_replicas=2) as summary:
        loader = made(sampler=sampler)
        assert items(loader) == list(sampler)
        assert items(own) == list(range(0, N, 2))
    assert [record.note for record in summary.records] == ["DistributedSampler", "the script has patched it"]
    assert loader.sampler is sampler


class FromLoader(IterableDataset[int]):
    """Reads by a loader of its own."""

    def __init__(self) -> None:
        self.inner = made()

    def __iter__(self) -> Iterator[int]:
        return iter(items(self.inner))


class ByLoader(Dataset[int]):
    """Looks up by a loader of its own."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return items(made(batch_size=N))[index]


class ByLoaderSampler(RandomSampler):
    """Orders by what a loader of its own gives."""

    def __iter__(self) -> Iterator[int]:
        return iter(items(made()))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_within_another_ones_is_not_shared_again(workers: int) -> None:
    loaders = [
        DataLoader(FromLoader(), batch_size=2, num_workers=workers),
        DataLoader(ByLoader(), batch_size=2, num_workers=workers),
        made(sampler=ByLoaderSampler(Indices(N)), num_workers=workers),
    ]
    with autopatch(rank=1, num_replicas=2) as summary:
        assert [sorted(items(loader)) for loader in loaders] == [MINE] * 3
    assert len(summary.records) == 3


class Entering(Dataset[int]):
    """Switches autopatch on by itself, where it is read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        with autopatch(rank=1, num_replicas=2):
            return len(items(made()))


@pytest.mark.parametrize("start", ["fork", soaked("forkserver")])
def test_a_worker_patches_nothing(start: str) -> None:
    loader = DataLoader(Entering(), num_workers=1, multiprocessing_context=start)
    assert items(loader) == [N]


class Around(DataLoader[Any]):
    """As Ray's wrapper: a loader, with the attributes of another one, whose batches it gives."""

    def __init__(self, inner: DataLoader[Any]) -> None:
        vars(self).update(vars(inner))
        self.inner = inner

    def __iter__(self) -> Any:
        yield from self.inner


def test_of_a_loader_around_another_the_inner_one_is_patched() -> None:
    with autopatch(rank=1, num_replicas=2) as summary:
        assert items(Around(made())) == MINE
    assert [record.fate for record in summary.records] == ["left alone", "patched"]


class Measuring(DataLoader[Any]):
    """Its constructor uses it before it is finished."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.first = next(super().__iter__())
        self.length = len(self)
        self.batch_sampler_too = BatchSampler(self.sampler, 2, False)

    def __iter__(self) -> Any:
        return super().__iter__()


def test_a_constructor_patches_nothing() -> None:
    with autopatch(rank=1, num_replicas=2):
        loader = Measuring(Indices(N), batch_size=2)
        assert loader.length == 5
        assert items(loader) == MINE


class Computed(DataLoader[Any]):
    """Its sampler cannot be replaced."""

    @property
    def sampler(self) -> Any:
        return RandomSampler(Indices(N))

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        pass


def test_what_cannot_be_patched_is_named_with_the_ways_out_and_stays_as_it_was() -> None:
    with autopatch(rank=1, num_replicas=2) as summary:
        loader = Computed(Indices(N))
        before = dict(vars(loader))
        line = f"{Path(__file__).name}:"
        ways = ("ddp_patch.unpatched()", "ddp_patch.leave_alone(loader)", "--except")
        for _ in range(2):
            with raises(UnsupportedLoaderError, ("Computed", "'sampler'"), ways) as caught:
                iter(loader)
            assert line in str(caught.value)
        assert vars(loader) == before
    assert not summary.records


def test_threads_patch_a_loader_once() -> None:
    with autopatch(rank=1, num_replicas=2) as summary, ThreadPoolExecutor(4) as threads:
        loader = made()
        lengths = list(threads.map(lambda _: len(loader), range(8)))
    assert lengths == [3] * 8
    assert len(summary.records) == 1


def test_every_public_function_accepts_an_autopatched_loader() -> None:
    """But for those that need a process group, which are tried on real ranks."""
    with autopatch(rank=1, num_replicas=2) as summary:
        loader = made()
        state = ddp_patch.loader_state(loader)
        batches = iter(loader)
        next(batches)
        within = ddp_patch.loader_state(loader)
        assert [item for batch in batches for item in batch.tolist()] == MINE[2:]
        ended = loader.state_dict()  # type: ignore[attr-defined]  # of torch's Stateful protocol
        assert (ended["epoch"], ended["turn"]) == (0, None)
        ddp_patch.restore_loader(loader, within)
        assert len(loader) == 2
        assert items(loader) == MINE[2:]
        loader.load_state_dict(state)  # type: ignore[attr-defined]  # as above
        assert [(batch.tolist(), mask.tolist()) for batch, mask in ddp_patch.iter_with_mask(loader)][-1] == (
            [9],
            [True],
        )
        assert len(list(ddp_patch.iter_with_weights(loader))) == 3
        loader.set_epoch(7)  # type: ignore[attr-defined]  # which a patched loader has
        loader.sampler.set_epoch(8)  # type: ignore[attr-defined]  # as above
        assert items(loader) == MINE
        assert ddp_patch.loader_state(loader)["epoch"] == 8
        ddp_patch.assert_loaders_patched({"train": [loader]})
        assert ddp_patch.patch_dataloader_to_ddp(loader, rank=1, num_replicas=2) is loader
        assert ddp_patch.patch_dataloader_to_ddp([loader], rank=1, num_replicas=2)[0] is loader
        assert ddp_patch.extract_loader_parameters(loader)["sampler"] is loader.sampler
        new = made()
        ddp_patch.restore_loader(new, within)  # before it is used in any other way
        assert items(new) == MINE[2:]
        ddp_patch.assert_loaders_patched(made())
        assert len(list(ddp_patch.iter_with_mask(made()))) == 3
    assert {record.fate for record in summary.records} == {"patched"}
    with pytest.raises(NotPatchedError):
        ddp_patch.assert_loaders_patched(made())


def test_an_audit_is_left_alone() -> None:
    with autopatch(rank=1, num_replicas=2) as summary:
        loader = made()
        assert ddp_patch.audit(loader, 2).ok
        report = ddp_patch.audit(loader, 2, patch=False)
        assert [problem.kind for problem in report.problems] == ["not_sharded"]
        assert not summary.records
        assert items(loader) == MINE
        with raises(InvalidOptionError, ("audit", "rank 1 of 2"), "before it is shared"):
            ddp_patch.audit(loader, 2)


def test_every_public_function_was_tried_above_or_on_real_ranks() -> None:
    tried = "\n".join(path.read_text() for path in (HERE, HERE.parents[1] / "ranks" / "test_autopatch_ranks.py"))
    functions = [name for name in ddp_patch.__all__ if name.islower()]
    assert [name for name in functions if f"{name}(" not in tried] == []


def test_a_summary_tells_of_each_loader_which_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ddp_patch.autopatch"), autopatch(rank=0, num_replicas=3) as summary:
        loader = made()
        items(loader)
        items(loader)
        len(leave_alone(made(batch_sampler=BatchSampler(range(4), 2, False), batch_size=1)))
    text = " ".join(str(summary).split())
    assert "DataLoader, in order, 10 samples: 3 ranks x 2 steps, 2 passes" in text
    assert "left alone (leave_alone() or unpatched())" in text
    assert "DistributedDataParallel" in text
    assert len(caplog.messages) == 2
    with caplog.at_level(logging.INFO, "ddp_patch.autopatch"), autopatch(rank=1, num_replicas=3):
        items(made())
    assert len(caplog.messages) == 2  # the first rank logs them
