"""A loader that a script hands to a framework under autopatch is shared once: by the framework, or before it."""

import faulthandler
import pickle
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from frameworks import FRAMEWORKS, framework
from frameworks.base import EPOCHS, Epochs
from frameworks.judge import judge
from frameworks.kinds import KINDS, tiny_model
from frameworks.loops import train
from frameworks.tensors import NotedTensor, Seen
from quick import run_ranks
from zoo import seed_ambient

from ddp_patch import autopatch

RANKS = 2
LIMIT_S = 200.0
NUMBERS = EPOCHS[: EPOCHS.index(1)]
# Ray's modules ask whether loaders are patched, which under autopatch patches them.
MODULES = [name for name in FRAMEWORKS if not name.startswith("ray_")]
SHUFFLED, WEIGHTED, _, _, ITERABLE = (kind.name for kind in KINDS)
# What is left to the framework.
LEFT = {
    "with_accelerate": {SHUFFLED, WEIGHTED, ITERABLE},
    "hf_trainer": {SHUFFLED, WEIGHTED, ITERABLE},
    "with_ignite": {SHUFFLED, WEIGHTED},
}


def on_rank(rank: int, world_size: int, folder: str, module: str) -> None:
    """Write down what the training steps saw of each kind of loader, and what became of the loaders."""
    warnings.simplefilter("ignore")  # frameworks warn of small data, of CPUs and of their own deprecations
    passes = through_ray() if module == "ray" else framework(module).passes
    seen = {}
    for kind in KINDS:
        seed_ambient(100 + rank)
        faulthandler.dump_traceback_later(LIMIT_S / 2, exit=True)
        with autopatch() as summary:
            epochs = passes(kind.make(), False, NUMBERS)
        faulthandler.cancel_dump_traceback_later()
        seen[kind.name] = epochs, {record.fate for record in summary.records}
    Path(folder, str(rank)).write_bytes(pickle.dumps(seen))


def through_ray() -> Callable[..., Epochs]:
    from ray.train.torch import prepare_data_loader, prepare_model  # before the loader is made, as scripts do

    def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
        loader.collate_fn = NotedTensor.of
        return train(prepare_model(tiny_model()), Seen(prepare_data_loader(loader)), epochs)

    return passes


def assert_shared_once(launch: Callable[..., object], folder: Path, module: str) -> None:
    launch(on_rank, RANKS, str(folder), module, timeout=LIMIT_S)
    ranks = [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(RANKS)]  # noqa: S301 - our own ranks'
    for kind in KINDS:
        verdict = judge(kind, [rank[kind.name][0] for rank in ranks])
        is_left = kind.name in LEFT.get(module, ())
        assert [rank[kind.name][1] for rank in ranks] == [{"shards itself"} if is_left else {"patched"}] * RANKS
        # accelerate fills up the last batches, too.
        assert verdict.startswith("each sample once") or (is_left and "repeats" in verdict), (kind.name, verdict)
        assert not any(word in verdict for word in ("missing", "all data", "split", "ignored", " and ")), verdict


# By parts of torch that ignite imports.
@pytest.mark.filterwarnings(r"ignore:.torch.jit.\w+. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("module", MODULES)
def test_it_is_shared_once(module: str, tmp_path: Path) -> None:
    assert_shared_once(run_ranks, tmp_path, module)


def measured_first(rank: int, world_size: int) -> tuple[str, list[str]]:
    """As many scripts for accelerate plan their steps, before they prepare the loader."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    with autopatch() as summary:
        accelerator = Accelerator(cpu=True)
        loader: DataLoader[Any] = DataLoader(range(8), batch_size=2)  # type: ignore[arg-type]  # a range is a dataset
        assert len(loader) == 4
        prepared = accelerator.prepare(loader)
        assert len(list(prepared)) == len(prepared) == 2
        never_prepared: DataLoader[Any] = DataLoader(range(8), batch_size=2)  # type: ignore[arg-type]  # as above
        assert len(list(never_prepared)) == 2
    return type(prepared).__name__, [record.fate for record in summary.records]


def test_a_length_that_is_taken_before_accelerate_prepares_patches_nothing() -> None:
    assert run_ranks(measured_first, RANKS) == [("DataLoaderShard", ["shards itself", "patched"])] * RANKS


@pytest.mark.ray
def test_ray_keeps_what_it_shards(tmp_path: Path) -> None:
    """It makes a loader anew, without batch samplers and weights; docs/frameworks.md says what to do."""
    from frameworks.ray_launch import launch

    launch(on_rank, RANKS, str(tmp_path), "ray", timeout=LIMIT_S)
    first, second = (pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(RANKS))  # noqa: S301 - as above
    for kind in KINDS:
        assert first[kind.name][1] == ({"left alone", "patched"} if kind.name == ITERABLE else {"shards itself"})
        if kind.name in {SHUFFLED, ITERABLE}:
            assert judge(kind, [first[kind.name][0], second[kind.name][0]]).startswith("each sample once")
