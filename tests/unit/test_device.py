"""``device=``: batches come there, and nothing else changes: neither states, nor errors, nor what a break leaves."""

import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import pytest
import quick  # noqa: F401 - so the fork server's workers find imported what they need
import torch
from messages import raises
from moving import Streams, pretend_streams
from repeaters import BegunAtFirst, Infinite, MultiEpochs
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)
from zoo import Indices

from ddp_patch import (
    audit,
    autopatch,
    devices,
    gather_in_order,
    iter_with_mask,
    iter_with_weights,
    leave_alone,
    loader_state,
    patch_dataloader_to_ddp,
    restore_loader,
)
from ddp_patch.devices import checked_device, device_here
from ddp_patch.errors import AlreadyPatchedError, InvalidOptionError, NotDistributedWarning, UnsupportedLoaderError
from ddp_patch.evaluation import gather
from ddp_patch.evaluation.outputs import Form
from ddp_patch.evaluation.row_order import Placed
from ddp_patch.evaluation.send import Column, Connection, LocalColumn, Members, gathered
from ddp_patch.options import Options

N = 23
META = torch.device("meta")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class Parts(IterableDataset[int]):
    """Split over its workers."""

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        return iter(range(info.id, N, info.num_workers))


class Stateful(IterableDataset[int]):
    """Says where it stands."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < N:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class ByClass(BatchSampler):
    """A batch sampler of the user's own."""


class Failing(Dataset[int]):
    """Has samples that cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise ValueError("sample 5")
        return index


def of(dataset: Any = None, batch_size: int | None = 2, **options: Any) -> Callable[[], DataLoader[Any]]:
    data: Any = Indices(N) if dataset is None else dataset
    return lambda: DataLoader(data, batch_size, **options)


KINDS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": of(shuffle=True),
    "workers": of(shuffle=True, num_workers=2),
    "persistent workers": of(shuffle=True, num_workers=2, persistent_workers=True),
    "whole batches": lambda: DataLoader(
        Indices(N), batch_sampler=ByClass(RandomSampler(range(N)), 2, drop_last=False), num_workers=1
    ),
    "stream": of(Stream()),
    "stream of workers": of(Stream(), num_workers=2),
    "stream that says where it stands": lambda: DataLoader(Stateful(), 2, num_workers=1, prefetch_factor=1),
    "one iterator for all": lambda: MultiEpochs(Indices(N), 2, shuffle=True),
    "one iterator for all, workers": lambda: Infinite(Indices(N), 2, num_workers=2),
}

every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


class Filtered:
    """As PyTorch Geometric's iterators: around torch's."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.iterator) + 100


class Filters(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return Filtered(super()._get_iterator())


class Generates(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        iterator = super()._get_iterator()
        return (batch for batch in iterator)


def patched(loader: Any, device: Any = META, **options: Any) -> Any:
    return patch_dataloader_to_ddp(loader, rank=0, num_replicas=2, device=device, **{"seed": 5} | options)


def states(loader: Any) -> list[Any]:
    """The states after each batch of two epochs, and the batches' devices."""
    return [(loader_state(loader), len(batch), batch.device.type) for _ in range(2) for batch in loader]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return pretend_streams(monkeypatch)


@every_kind
def test_batches_come_on_the_device_and_states_are_as_without(make: Callable[[], DataLoader[Any]]) -> None:
    found = states(patched(make()))
    assert found == [(state, size, "meta") for state, size, _ in states(patched(make(), device=None))]


@every_kind
def test_states_count_no_batch_that_was_copied_ahead(make: Callable[[], DataLoader[Any]], streams: Streams) -> None:
    found = states(patched(make()))
    assert found == [(state, size, "meta") for state, size, _ in states(patched(make(), device=None))]
    assert streams.made


@every_kind
@pytest.mark.parametrize("stop", [1, 3])
def test_a_pass_is_resumed_after_the_batches_that_the_loop_was_given(
    make: Callable[[], DataLoader[Any]], stop: int, streams: Streams
) -> None:
    """The batch that was copied ahead is read again."""
    whole = [batch.tolist() for batch in patched(make(), device="cpu")]
    stopped, resumed = patched(make()), patched(make(), device="cpu")
    list(islice(stopped, stop))
    restore_loader(resumed, loader_state(stopped))
    assert [batch.tolist() for batch in resumed] == whole[stop:]


@pytest.mark.parametrize("name", ["workers", "persistent workers", "stream of workers"])
def test_with_workers_one_batch_is_copied_ahead(name: str, streams: Streams) -> None:
    loader = patched(KINDS[name]())
    for _ in range(2):
        streams.calls.clear()
        next(iter(loader))
        assert [call.split()[0] for call in streams.calls] == ["side", "side", "loop", "(2,)"]


def by_worker(**options: Any) -> Any:
    return patched(DataLoader(Parts(), 2, num_workers=2), share="by_worker", uneven="keep", **options)


ELSEWHERE: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: patched(KINDS["shuffled"]()),
    "stream": lambda: patched(KINDS["stream"]()),
    "one iterator for all": lambda: patched(KINDS["one iterator for all"]()),
    "one iterator for all, workers": lambda: patched(KINDS["one iterator for all, workers"]()),
    "iterators of another class": lambda: patched(Filters(Indices(N), 2, num_workers=1)),
    "a dataset that splits itself": by_worker,
}


@pytest.mark.parametrize("make", ELSEWHERE.values(), ids=ELSEWHERE)
def test_elsewhere_none_is(make: Callable[[], Any], streams: Streams) -> None:
    """Without workers, a batch that was made ahead would draw its random numbers ahead, too."""
    next(iter(make()))
    assert [call.split()[0] for call in streams.calls] == ["side", "loop", "(2,)"]


class Drawing(Dataset[torch.Tensor]):
    """Draws in this process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def test_what_is_drawn_stays_the_same(streams: Streams) -> None:
    def drawn(device: Any) -> list[float]:
        loader = patched(DataLoader(Drawing(), 2), device=device)
        torch.manual_seed(3)
        return [torch.rand(()).item() for _ in loader]

    assert drawn(META) == drawn(None)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_come_where_the_batch_would_have_come(num_workers: int, streams: Streams) -> None:
    loader = patch_dataloader_to_ddp(
        DataLoader(Failing(), 2, num_workers=num_workers), rank=0, num_replicas=1, device=META
    )
    given: list[Any] = []
    with pytest.raises(ValueError, match="sample 5"):
        given.extend(loader)
    assert len(given) == 2
    assert loader_state(loader)["parts"] == [[[1, 4]]]


def test_all_passes_and_loaders_copy_in_one_stream(streams: Streams) -> None:
    """Memory that is free is kept for each stream."""
    one, other = (patched(DataLoader(Indices(4), 2, num_workers=n)) for n in (0, 1))
    for loader in (one, other) * 2:
        list(loader)
    assert streams.made == 1


@pytest.mark.parametrize("given", [2, 4])
def test_an_error_or_the_end_that_is_held_keeps_no_iterator_alive(given: int, streams: Streams) -> None:
    """Its workers would wait for the garbage collector. After so many batches, the third's error or the end is held."""
    dataset = Failing() if given == 2 else Indices(8)
    iterator = iter(patch_dataloader_to_ddp(DataLoader(dataset, 2, num_workers=1), rank=0, num_replicas=1, device=META))
    for _ in range(given):
        next(iterator)
    kept = weakref.ref(iterator)
    gc.collect()
    gc.disable()
    try:
        del iterator
        assert kept() is None
    finally:
        gc.enable()


def test_the_rank_tells_others_that_one_batch_more_is_ahead(streams: Streams) -> None:
    """How far it came is counted low: what was copied ahead is not surely taken."""
    samplers: list[Any] = [patched(KINDS["workers"](), device=device).sampler for device in ("cpu", META)]
    assert [sampler._pass_context().batches_ahead for sampler in samplers] == [4, 5]


OTHERS: dict[str, Any] = {"class of iterators": Filters, "torch's": DataLoader}


@pytest.mark.parametrize("kind", OTHERS.values(), ids=OTHERS)
def test_iterators_of_other_classes_are_moved_too(kind: Any) -> None:
    values = [batch.tolist() for batch in patched(kind(Indices(4), 2), device="cpu")]
    assert values == [batch.tolist() for batch in patched(kind(Indices(4), 2), device=None)]
    assert [batch.device for batch in patched(kind(Indices(4), 2))] == [META]


@pytest.mark.parametrize("kind", [OwnIteration, BegunAtFirst])
def test_a_class_that_iterates_in_a_way_of_its_own_is_refused(kind: Any) -> None:
    if kind is BegunAtFirst:
        assert next(iter(patched(kind(Indices(4), 2)))).device == META  # its iterator is known
        return
    with raises(InvalidOptionError, ("device='meta'", "OwnIteration", "own"), ("device=", ".to(device)")):
        patched(kind(Indices(4), 2))


class OwnState(DataLoader[Any]):
    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


def test_a_class_that_copies_in_a_way_of_its_own_is_refused() -> None:
    """A shallow copy would iterate the loader that it was copied from."""
    with raises(InvalidOptionError, ("device='meta'", "OwnState", "cop"), ("device=", ".to(device)")):
        patched(OwnState(Indices(4), 2))


def test_an_iterator_that_takes_no_other_methods_is_refused() -> None:
    loader = patched(Generates(Indices(4), 2))
    with raises(UnsupportedLoaderError, ("device=", "Generates", "generator"), ".to(device)"):
        iter(loader)


@pytest.mark.parametrize("name", ["shuffled", "workers", "persistent workers", "whole batches", "one iterator for all"])
def test_copies_have_it_too(name: str) -> None:
    loader = patched(KINDS[name]())
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):  # noqa: S301 - our own
        assert next(iter(other)).device == META


def test_a_shallow_copy_says_that_its_batches_would_come_elsewhere() -> None:
    with raises(UnsupportedLoaderError, "shallow copy", ("patch_dataloader_to_ddp()", "copy.deepcopy()")):
        iter(copy.copy(patched(DataLoader(Indices(4)))))


def test_patching_again_changes_nothing_or_is_refused() -> None:
    loader = patched(DataLoader(Indices(4), 2))
    assert patched(loader) is loader
    assert patched(loader, device=None) is loader
    with raises(AlreadyPatchedError, ("device='meta'", "device='cpu'"), ("device=", "original")):
        patched(loader, device="cpu")
    with raises(AlreadyPatchedError, ("device=None", "device='cpu'"), ("device=", "original")):
        patched(patched(DataLoader(Indices(4), 2), device=None), device="cpu")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_that_is_shared_later_keeps_its_device(num_workers: int, streams: Streams) -> None:
    with pytest.warns(NotDistributedWarning):
        moved = patch_dataloader_to_ddp(DataLoader(Indices(8), 2, num_workers=num_workers), device="meta")
    shared = patched(moved, device=None)
    assert "device='meta'" in repr(shared)
    assert {(batch.device, mask.device) for batch, mask in iter_with_mask(shared)} == {(META, META)}
    sampler: Any = shared.sampler
    assert sampler._pass_context().batches_ahead == (3 if num_workers else 0)  # the one that is copied ahead counts
    assert {batch.device for batch in moved} == {META}


def test_the_loader_says_where_its_batches_come() -> None:
    assert "device='meta'" in repr(patched(DataLoader(Indices(4), 2)))


def test_a_loader_that_is_shared_already_is_moved_and_nothing_else() -> None:
    data = Indices(8)
    loader = DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0, shuffle=False))
    moved = patched(loader)
    assert moved is not loader
    assert (type(moved), moved.sampler) == (DataLoader, loader.sampler)
    assert [batch.device for batch in moved] == [META, META]
    assert [batch.tolist() for batch in patched(loader, device="cpu")] == [batch.tolist() for batch in loader]
    assert next(iter(loader)).device.type == "cpu"


def test_in_a_single_process_batches_come_there_too() -> None:
    loader = DataLoader(Indices(4), 2)
    with pytest.warns(NotDistributedWarning, match=r"changed only the device of batches \(meta\)"):
        moved = patch_dataloader_to_ddp(loader, device="meta")
    assert [batch.device for batch in moved] == [META, META]
    with pytest.warns(NotDistributedWarning):
        (several,) = patch_dataloader_to_ddp([loader], device="meta")
    assert next(iter(several)).device == META
    for batch, weights in iter_with_weights(moved):
        assert (batch.device, weights.device) == (META, META)
    for batch, mask in iter_with_mask(copy.deepcopy(moved)):
        assert (batch.device, mask.device) == (META, META)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [MultiEpochs, Infinite, BegunAtFirst])
def test_one_iterator_for_all_epochs_comes_there_in_a_single_process(kind: Any, num_workers: int) -> None:
    given = kind(Indices(6), 2, num_workers=num_workers)
    next(iter(given))  # which stays with the given loader
    with pytest.warns(NotDistributedWarning):
        moved = patch_dataloader_to_ddp(given, device="cpu")
    assert [[batch.tolist() for batch in moved] for _ in range(2)] == [[[0, 1], [2, 3], [4, 5]]] * 2
    with pytest.warns(NotDistributedWarning):
        on_meta = patch_dataloader_to_ddp(given, device="meta")
    for one in (on_meta, copy.deepcopy(on_meta), pickle.loads(pickle.dumps(on_meta))):  # noqa: S301 - our own
        assert [batch.device for _ in range(2) for batch in one] == [META] * 6
    if isinstance(on_meta, Infinite):
        on_meta.reset()
        assert next(iter(on_meta)).device == META
    two = patched(on_meta)
    assert [len(list(two)), next(iter(two)).device] == [2, META]


@pytest.mark.parametrize("weight_of", [None, lambda batch: [1.0] * len(batch)])
def test_masks_and_weights_come_on_the_device(weight_of: Any) -> None:
    loader = patch_dataloader_to_ddp(DataLoader(Indices(5), 2), rank=0, num_replicas=1, device="meta")
    assert {weights.device for _, weights in iter_with_weights(loader, weight_of=weight_of)} == {META}
    assert {mask.device for _, mask in iter_with_mask(loader)} == {META}


def test_autopatch_takes_it() -> None:
    loader = DataLoader(Indices(4), 2)
    with autopatch(rank=0, num_replicas=2, device="meta"):
        assert [batch.device for batch in loader] == [META]


def sharded() -> DataLoader[Any]:
    data = Indices(8)
    return DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0, shuffle=False))


ONE_OR_SEVERAL: list[dict[str, int]] = [{}, {"rank": 0, "num_replicas": 1}, {"rank": 0, "num_replicas": 2}]


@pytest.mark.parametrize("make", [sharded, of(), of(num_workers=1), lambda: MultiEpochs(Indices(4), 2)])
@pytest.mark.parametrize("world", ONE_OR_SEVERAL)
def test_autopatch_moves_what_it_does_not_share(make: Callable[[], DataLoader[Any]], world: dict[str, Any]) -> None:
    """In a single process, and where a loader shards itself."""
    with autopatch(**world, device="meta") as summary:
        loader = make()
        assert {batch.device for _ in range(2) for batch in loader} == {META}
    fates = [record.fate for record in summary.records][:1]
    assert fates == (["shards itself" if make is sharded else "patched"] if world.get("num_replicas") == 2 else [])


@pytest.mark.parametrize("make", [sharded, of()])
@pytest.mark.parametrize("world", ONE_OR_SEVERAL)
def test_autopatch_moves_nothing_that_is_left_alone(make: Callable[[], DataLoader[Any]], world: dict[str, Any]) -> None:
    with autopatch(**world, device="meta"):
        left = leave_alone(make())
        assert {batch.device.type for batch in left} == {"cpu"}
    for how in ({"dry_run": True}, {"excepted": "*"}):
        with autopatch(**world, **how, device="meta"):
            assert {batch.device.type for batch in make()} == {"cpu"}


def test_autopatch_shares_what_it_has_moved_before() -> None:
    loader = DataLoader(Indices(4), 2)
    with autopatch(device="meta"):
        next(iter(loader))
    with autopatch(rank=0, num_replicas=2, device="meta"):
        assert [batch.device for batch in loader] == [META]


def test_autopatch_refuses_to_move_what_iterates_in_a_way_of_its_own() -> None:
    loader = OwnIteration(Indices(4))
    with (
        autopatch(device="meta"),
        raises(InvalidOptionError, ("device='meta'", "OwnIteration"), ("leave_alone", ".to(device)")),
    ):
        next(iter(loader))


def test_an_audit_puts_nothing_on_a_device() -> None:
    with raises(InvalidOptionError, ("device", "real rank"), "Leave"):
        audit(DataLoader(Indices(4)), 2, device="meta")


# Where the loader's batches come, where the others' rows lie, and where a rank without rows gets them.
RECEIVED: list[tuple[str | None, str, str]] = [
    ("cuda:1", "cuda", "cuda:1"),
    ("cuda:1", "cpu", "cpu"),
    (None, "cuda", "cuda"),
]


@pytest.mark.parametrize(("loaders", "theirs", "here"), RECEIVED)
def test_a_rank_without_rows_gathers_on_its_own_device(
    loaders: str | None, theirs: str, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nowhere does it say which of its kind the others mean."""
    asked: list[Any] = []
    monkeypatch.setattr(torch, "empty", lambda *args, device, **kwargs: asked.append(device))
    members = Members([0], 0, None, 1.0, None if loaders is None else torch.device(loaders))
    column = Column(Form("tensor", torch.float32, (2,), device=theirs), [(2,)], [0])
    gathered(Connection(members, None), column, Placed([0]), LocalColumn(), None)
    assert asked == [torch.device(here)]


def test_outputs_are_gathered_where_the_loaders_batches_come(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def notes(connection: Connection, *_: Any) -> Any:
        asked.append(connection.members.device)

    monkeypatch.setattr(gather, "gathered", notes)
    loader = patch_dataloader_to_ddp(DataLoader(Indices(2)), rank=0, num_replicas=1, device="meta")
    gather_in_order(torch.cat(list(loader)), loader)
    assert asked == [META]


NO_DEVICES: Mapping[str, Any] = {
    "gpu": "gpu",
    "cuda:x": "cuda:x",
    "": "",
    "a number that torch cuts off": "cuda:300",
    "number": 1,
    "flag": True,
    "fraction": 1.5,
    "list": ["cpu"],
}


@pytest.mark.parametrize("given", NO_DEVICES.values(), ids=NO_DEVICES)
def test_what_names_no_device_is_refused(given: Any) -> None:
    with raises(InvalidOptionError, (f"device={given!r}", "not a device"), ("'auto'", "'cuda:1'", "torch.device")):
        Options(device=given)


def test_devices_are_named_in_torchs_ways() -> None:
    assert [checked_device(given) for given in ("meta", META, "auto", None)] == [META, META, "auto", None]
    assert checked_device("cuda:1") == torch.device("cuda", 1)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_here(torch.device("cuda:1"), is_one_of_several=True) == torch.device("cuda:1")
    with raises(InvalidOptionError, ("device='cuda:9'", "2", "from 0 to 1"), ("device='auto'", "CUDA_VISIBLE_DEVICES")):
        device_here(torch.device("cuda:9"), is_one_of_several=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with raises(InvalidOptionError, ("device='cuda'", "0"), "device='auto'"):
        patched(DataLoader(Indices(4)), device="cuda")


def test_a_kind_of_device_that_torch_was_built_without_is_refused() -> None:
    with raises(InvalidOptionError, ("device='xla'", torch.__version__.split("+")[0]), "device='auto'"):
        device_here(torch.device("xla"), is_one_of_several=False)


# How many devices there are, LOCAL_RANK, whether there are other ranks; what "auto" means then.
AUTO: list[tuple[int, str | None, bool, str]] = [
    (0, None, True, "cpu"),
    (0, "1", True, "cpu"),
    (1, None, True, "cuda:0"),
    (1, "3", True, "cuda:0"),  # a launcher may show each rank its own one
    (4, "3", True, "cuda:3"),
    (4, "0", False, "cuda:0"),
    (4, None, False, "cuda"),
]


def local_rank(monkeypatch: pytest.MonkeyPatch, count: int, told: str | None) -> None:
    monkeypatch.setattr(devices, "_accelerators", lambda: ("cuda", count))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if told is not None:
        monkeypatch.setenv("LOCAL_RANK", told)


@pytest.mark.parametrize(("count", "told", "others", "means"), AUTO)
def test_auto_is_this_local_ranks_device(
    monkeypatch: pytest.MonkeyPatch, count: int, told: str | None, others: bool, means: str
) -> None:
    local_rank(monkeypatch, count, told)
    assert device_here("auto", is_one_of_several=others) == torch.device(means)


def test_auto_asks_torch_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Accelerator:
        def current_accelerator(self) -> torch.device:
            return torch.device("xpu")

        def is_available(self) -> bool:
            return True

        def device_count(self) -> int:
            return 1

    monkeypatch.setattr(torch, "accelerator", Accelerator(), raising=False)
    assert device_here("auto", is_one_of_several=True) == torch.device("xpu:0")
    monkeypatch.delattr(torch, "accelerator")  # as before torch 2.6
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_here("auto", is_one_of_several=True) == torch.device("cuda:0")


def test_auto_does_not_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    local_rank(monkeypatch, 4, None)
    with raises(InvalidOptionError, ("device='auto'", "4", "LOCAL_RANK"), ("device='cuda:N'", "LOCAL_RANK")):
        device_here("auto", is_one_of_several=True)
    for told in ("4", "x", "-1"):
        local_rank(monkeypatch, 4, told)
        with raises(InvalidOptionError, ("device='auto'", f"LOCAL_RANK={told}", "4", "from 0 to 3"), "device='cuda:N'"):
            device_here("auto", is_one_of_several=True)


def test_a_copy_that_fails_is_told_as_any_error_of_a_batch(streams: Streams, caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(torch.Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("out of memory")

    caplog.set_level(logging.ERROR)
    loader = patched(DataLoader(Indices(4), 2, collate_fn=lambda items: torch.tensor(items).as_subclass(Stuck)))
    with pytest.raises(RuntimeError, match="out of memory"):
        list(loader)
