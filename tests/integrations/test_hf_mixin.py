"""One base class has Hugging Face's Trainer train on a patched loader, and resume any within an epoch."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from messages import assert_tells, raises
from quick import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, IterableDataset, Sampler
from transformers import Trainer, TrainingArguments
from zoo import seed_ambient

from ddp_patch import autopatch, patch_dataloader_to_ddp
from ddp_patch.errors import StateError
from ddp_patch.integrations.transformers import PatchedLoadersMixin, _LoaderPlace

RANKS = 2
ROWS: Any = [{"numbers": torch.tensor([float(number)]), "labels": number} for number in range(26)]
BY_LENGTH: Any = [{**row, "input_ids": [0] * (1 + number % 5)} for number, row in enumerate(ROWS)]


class Sized(IterableDataset[Any]):
    """The rows in an order of their own for each pass."""

    def __iter__(self) -> Iterator[Any]:
        return iter([ROWS[number] for number in torch.randperm(len(ROWS)).tolist()])

    def __len__(self) -> int:
        return len(ROWS)


class Identity(torch.nn.Module):
    """A model whose outputs are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, numbers: torch.Tensor, labels: Any) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * numbers).mean(), "logits": numbers}


class Plain(Trainer):  # type: ignore[misc]  # it is not there where types are checked
    """Notes the numbers of each batch."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[list[int]] = []

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        self.seen.append(inputs["labels"].tolist())
        return super().training_step(model, inputs, *args)


class Patched(PatchedLoadersMixin, Plain):
    pass


def trained(kind: type[Any], rows: Any, folder: Path, resume_from: int | None = None, **options: Any) -> Any:
    """Return a Trainer that has trained, with a checkpoint after each step, or from one of these."""
    chosen = {"num_train_epochs": 2, "per_device_train_batch_size": 3, **options}
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="steps" if resume_from is None else "no",
        save_steps=1,
        **chosen,
    )
    trainer = kind(model=Identity(), args=arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume_from and str(folder / f"checkpoint-{resume_from}"))
    if resume_from is None and dist.is_initialized():
        dist.barrier()  # the first rank has written the checkpoints
    return trainer


def refused(rank: int, world_size: int, shared: str) -> list[Any]:
    """What resuming raises where no place was kept, and where the sampler's order is another."""
    seed_ambient(100 + rank)
    by_length: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}
    told: list[Any] = []
    cases: tuple[tuple[type[Any], dict[str, Any]], ...]
    cases = ((Plain, {}), (Patched, {**by_length, "gradient_accumulation_steps": 2}))
    for kind, now in cases:
        folder = Path(shared, kind.__name__)
        trained(kind, BY_LENGTH, folder, num_train_epochs=1, **(by_length if now else {}))
        with pytest.raises(StateError) as caught:
            trained(Patched, BY_LENGTH, folder, 2, **now)
        told.append(str(caught.value))
        # The remedy that both name.
        anew = trained(Patched, BY_LENGTH, folder, 2, num_train_epochs=1, ignore_data_skip=True)
        told.append(len(anew.seen))
    return told


def test_a_checkpoint_that_tells_no_place_is_refused(tmp_path: Path) -> None:
    for no_place, once, other_order, again in run_ranks(refused, RANKS, str(tmp_path)):
        assert_tells(no_place, ("step 2", "PatchedLoadersMixin", "patches_one_process"), "ignore_data_skip=True")
        assert_tells(other_order, ("3", "6"), ("gradient_accumulation_steps", "ignore_data_skip=True"))
        assert once == again == 3


def left_to_the_trainer(rank: int, world_size: int, folder: str) -> tuple[list[list[int]], list[float]]:
    """What is trained on with a batch sampler that is a rank's already, and what is predicted."""
    seed_ambient(100 + rank)
    strategy: dict[str, Any] = {"train_sampling_strategy": "batch_rebalance"}
    trainer = trained(Patched, BY_LENGTH, Path(folder), num_train_epochs=1, **strategy)
    return trainer.seen, trainer.predict(ROWS[:23]).predictions[:, 0].tolist()


def test_what_the_trainer_shares_rightly_is_left_to_it(tmp_path: Path) -> None:
    ranks = run_ranks(left_to_the_trainer, RANKS, str(tmp_path))
    taken = list(chain.from_iterable(chain.from_iterable(seen for seen, _ in ranks)))
    assert sorted(taken) == list(range(26))
    assert all(predicted == list(range(23)) for _, predicted in ranks)


def by_several(rank: int, world_size: int, folder: str) -> list[list[int]]:
    """Take checkpoints of several ranks; and what a mesh of ranks that share a model trains on."""
    seed_ambient(100 + rank)
    with autopatch() as summary:
        trainer = trained(Patched, ROWS, Path(folder), num_train_epochs=1)
    assert not any(record.fate == "patched" for record in summary.records)
    trainer.accelerator.state.device_mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp_shard", "tp"))
    return [batch["labels"].tolist() for batch in trainer.get_train_dataloader()]


@pytest.mark.filterwarnings("ignore")  # by accelerate, of the number of threads; and by torch, of the CPU
def test_a_mesh_and_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = run_ranks(by_several, RANKS, str(tmp_path))
    assert first == second
    assert sorted(chain.from_iterable(first)) == list(range(26))
    with raises(StateError, ("step 2", "not patched"), "ignore_data_skip=True"):
        trained(Patched, BY_LENGTH, tmp_path, 2, num_train_epochs=1, train_sampling_strategy="batch_rebalance")
    monkeypatch.setattr("ddp_patch.integrations.transformers.TRAINER_RUNS_EPOCH", "_of_another_version")
    with raises(StateError, ("step 2", "9", transformers.__version__), "transformers 5.22"):
        trained(Patched, ROWS, tmp_path, 2, num_train_epochs=1)


@pytest.mark.filterwarnings("ignore")  # as above
def test_one_process_that_counts_other_batches_is_refused(tmp_path: Path) -> None:
    trained(Patched, ROWS, tmp_path, num_train_epochs=1)
    for step in (4, 9):  # in the epoch, and after it
        with raises(StateError, (f"step {step}", "[9, 1]", "[5, 1]"), "ignore_data_skip=True"):
            trained(Patched, ROWS, tmp_path, step, per_device_train_batch_size=6)


class Counting(Sampler[int]):
    """Has a state that JSON changes."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(ROWS)))

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["state"]


@pytest.mark.parametrize(("state", "survives"), [({0: 1}, False), ((1, 2), False), ({"0": [1]}, True)])
def test_a_place_that_json_changes_is_not_kept(state: Any, survives: bool) -> None:
    kept = _LoaderPlace()
    kept.loader = patch_dataloader_to_ddp(DataLoader(ROWS, sampler=Counting(state)), rank=0, num_replicas=2)
    place = kept.state()["attributes"]["place"]
    assert ("cannot_resume" not in place) == survives


# By accelerate, of the number of threads; and by torch, of the CPU.
@pytest.mark.filterwarnings("ignore")
def test_one_process_trains_as_without_it(tmp_path: Path) -> None:
    seen = []
    for kind in (Plain, Patched):
        seed_ambient(3)
        seen.append(trained(kind, Sized(), tmp_path / kind.__name__, num_train_epochs=1).seen)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 9
    assert trained(Patched, Sized(), tmp_path / "Patched", 4, num_train_epochs=1).seen == seen[0][4:]
