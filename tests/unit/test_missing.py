"""What happens where torch lacks a private name, or has changed what it means: each is taken away in turn."""

import importlib.util
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import SpawnContext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.device_mesh
import torch.utils.data._utils.worker
from messages import raises
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from zoo import Indices, loader

import ddp_patch
from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.compat import private_torch
from ddp_patch.errors import TorchVersionError, UnsupportedLoaderError

WORLD: Any = {"rank": 0, "num_replicas": 2}
WORKER = torch.utils.data._utils.worker


def taken_away(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(f"torch.{name}")


@pytest.mark.parametrize(
    ("name", "call", "facts", "remedy"),
    [
        (
            "distributed.distributed_c10d._get_default_store",
            private_torch.default_store,
            "agreement",
            ("compatibility.md", "rank=", "num_replicas="),
        ),
        (
            "distributed.ProcessGroupGloo",
            lambda: private_torch.gloo_group(None, 0, 1, timedelta()),  # type: ignore[arg-type]  # not reached
            "send each other",
            "compatibility.md",
        ),
        (
            "_C._distributed_c10d.AllgatherOptions",
            lambda: private_torch.gather_in_background(None, torch.zeros(1), torch.zeros(1), timedelta()),
            "by_worker",
            "compatibility.md",
        ),
    ],
)
def test_what_needs_a_name_says_so(
    name: str, call: Callable[[], object], facts: str, remedy: str | tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_away(monkeypatch, name)
    before = torch.get_rng_state()
    with raises(TorchVersionError, (facts, f"torch.{name}", f"torch {torch.__version__}"), remedy):
        call()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "name",
    [
        "utils.data.dataloader._BaseDataLoaderIter",
        "utils.data.dataloader._BaseDataLoaderIter._reset",
        "utils.data.dataloader.DataLoader._get_iterator",
        "utils.data._utils.worker.WorkerInfo",
    ],
)
def test_without_these_nothing_is_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec: Any = importlib.util.spec_from_file_location("another", private_torch.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # as long as nothing is taken away
    taken_away(monkeypatch, name)
    with raises(TorchVersionError, f"torch.{name}", "compatibility.md"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_workers_that_are_kept_elsewhere_are_not_taken_for_new_ones() -> None:
    given = patch_dataloader_to_ddp(DataLoader(Indices()), **WORLD)
    del vars(given)["_iterator"]
    with raises(TorchVersionError, ("new workers", "DataLoader._iterator"), "persistent_workers=False"):
        private_torch.forget_iterator(given)


def test_a_dataset_that_would_not_hear_which_worker_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer torch looks for a thread's worker info first."""
    of_a_thread = private_torch.noted_worker_info(1, 2, 3, None, print)
    telling = private_torch.worker_info_told(private_torch.noted_worker_info(0, 2, 3, None, print))
    with monkeypatch.context() as patched, raises(TorchVersionError, "_worker_info", "compatibility.md"):
        patched.setattr(private_torch, "get_worker_info", lambda: of_a_thread)
        telling.__enter__()  # what follows would read the dataset
    assert WORKER._worker_info is None
    with private_torch.worker_info_told(of_a_thread):
        assert torch.utils.data.get_worker_info() is of_a_thread


def test_a_seed_that_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_torch, "get_worker_info", lambda: (0, 1, 2))
    with raises(TorchVersionError, ("Seeding workers by rank", "worker info"), "num_workers=0"):
        private_torch.replace_worker_seed(7)


def test_without_its_name_torch_is_asked_for_the_rank_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delattr("torch.distributed.distributed_c10d._rank_not_in_group")
    with private_torch.rank_noted(lambda: asked.append(None)):
        assert os.environ["RANK"] == "3"
        assert os.getenv("HOME_OF_NOBODY") is None
    assert len(asked) == 1
    assert os.environ.get("RANK") == "3"
    assert len(asked) == 1


class Mesh:
    """Stands for a mesh, or for a part of one; of a torch that does not tell, but in the given ways."""

    def __init__(self, ranks: int, **ways: object) -> None:
        self.size = lambda: ranks
        vars(self).update(ways)


WHOLE: Any = Mesh(4)
PART: Any = Mesh(2)


def root_of(mesh: Any, monkeypatch: pytest.MonkeyPatch, **ways: object) -> DeviceMesh:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed.device_mesh, "_mesh_resources", SimpleNamespace(**ways), raising=False)
    return private_torch.root_mesh(mesh)


def test_every_way_in_which_torch_told_what_a_mesh_was_cut_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert root_of(Mesh(2, _get_root_mesh=lambda: WHOLE), monkeypatch) is WHOLE
    assert root_of(PART, monkeypatch, get_root_mesh=lambda mesh: WHOLE) is WHOLE
    cut_from = {PART: (middle := Mesh(3)), middle: WHOLE}
    assert root_of(PART, monkeypatch, get_parent_mesh=cut_from.get) is WHOLE
    assert root_of(WHOLE, monkeypatch) is WHOLE  # it has all ranks
    with raises(TorchVersionError, ("device_mesh", "_get_root_mesh"), ("mesh of all ranks", "cut from")):
        root_of(PART, monkeypatch)


class Threaded(DataLoader[Any]):
    """A later torch's loader, whose workers may be threads."""

    def __init__(self, *args: Any, worker_method: str = "multiprocessing", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.worker_method = worker_method


class ThreadContext(SpawnContext):
    """Its processes are threads, as MONAI's are."""

    Process = threading.Thread  # type: ignore[assignment]  # which is the point


def test_workers_that_are_threads_are_refused() -> None:
    threads: list[dict[str, Any]] = [{"worker_method": "thread"}, {"multiprocessing_context": ThreadContext()}]
    for options in threads:
        remedies = ("num_workers=0", "multiprocessing_context='spawn'", "worker_method=", "use_thread_workers=False")
        with raises(UnsupportedLoaderError, ("Threaded", "num_workers=2", "threads"), remedies):
            patch_dataloader_to_ddp(Threaded(Indices(), num_workers=2, **options), **WORLD)
    spawned = Threaded(Indices(), num_workers=2, multiprocessing_context="spawn")
    for remedied in (Threaded(Indices(), worker_method="thread"), spawned):
        assert ddp_patch.extract_loader_parameters(patch_dataloader_to_ddp(remedied, **WORLD))["worker_method"]


def test_a_worker_that_turns_out_to_be_a_thread_changes_no_random_state() -> None:
    seeding: Any = patch_dataloader_to_ddp(loader(num_workers=1), **WORLD).worker_init_fn
    found: list[UnsupportedLoaderError] = []

    def work() -> None:
        with raises(UnsupportedLoaderError, ("Worker 3", "thread"), ("processes", "num_workers=0")) as caught:
            seeding(3)
        found.append(caught.value)

    before = torch.get_rng_state()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found
    assert torch.equal(torch.get_rng_state(), before)
