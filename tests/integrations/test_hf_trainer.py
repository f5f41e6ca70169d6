"""Hugging Face's ``Trainer`` resumes a patched loader where its checkpoint was taken: by epoch and step."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from frameworks.hf_trainer import OwnLoader, as_inputs
from frameworks.kinds import KINDS, Kind, tiny_model
from quick import run_ranks
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from zoo import seed_ambient

from ddp_patch import patch_dataloader_to_ddp

EPOCHS = 3


class EachEpoch(TrainerCallback):  # type: ignore[misc]  # it is not there where types are checked
    """Begins a new list of what is seen."""

    def __init__(self, trainer: OwnLoader) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, *positional: Any, **options: Any) -> None:
        self.trainer.seen.append([])


def trained(kind: Kind, folder: str, resume_from: str | None = None) -> tuple[list[list[int]], int]:
    """The numbers of every batch that was seen, and how many steps an epoch has."""
    loader = kind.make()
    loader.collate_fn = as_inputs
    arguments = TrainingArguments(
        folder,
        num_train_epochs=EPOCHS,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no" if resume_from else "steps",
        save_steps=1,
    )
    trainer = OwnLoader(loader, True, model=tiny_model(), args=arguments)
    trainer.add_callback(EachEpoch(trainer))
    trainer.train(resume_from_checkpoint=resume_from)
    return [batch.numbers for epoch in trainer.seen for batch in epoch], trainer.state.max_steps // EPOCHS


def on_rank(rank: int, world_size: int, shared: str) -> list[tuple[bool, bool]]:
    """Whether, of each kind of loader, training resumed in an epoch and between two goes on as it did before."""
    results = []
    for kind in KINDS:
        seed_ambient(100 + rank)
        folder = str(Path(shared, str(KINDS.index(kind))))
        whole, steps = trained(kind, folder)
        dist.barrier()  # the first rank has written the checkpoints
        resumed = []
        for done in (steps + 2, 2 * steps):
            seed_ambient(200 + rank)
            resumed.append(trained(kind, folder, str(Path(folder, f"checkpoint-{done}")))[0] == whole[done:])
        results.append((resumed[0], resumed[1]))
    return results


def test_resumed_from_checkpoints() -> None:
    with tempfile.TemporaryDirectory() as shared:
        ranks = run_ranks(on_rank, 2, shared, timeout=240)
    assert ranks == [[(True, True)] * len(KINDS)] * 2


def evaluated(rank: int, world_size: int) -> list[tuple[int, set[int]]]:
    """How many samples are predicted, and which: of a loader that is left to the Trainer, and of a patched one."""
    found = []
    for patched in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(folder, use_cpu=True, report_to=[], disable_tqdm=True)
            trainer = Evaluating(patched, model=Identity(), args=arguments)
            predicted = trainer.predict(ROWS).predictions[:, 0].tolist()
        found.append((len(predicted), set(map(int, predicted))))
    return found


ROWS: Any = [{"numbers": torch.tensor([float(number)]), "labels": number} for number in range(27)]


class Identity(torch.nn.Module):
    """A model whose outputs are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, numbers: torch.Tensor, labels: Any) -> dict[str, torch.Tensor]:
        return {"loss": numbers.mean(), "logits": numbers * self.weight}


class Evaluating(Trainer):  # type: ignore[misc]  # as above
    def __init__(self, patched: bool, **options: Any) -> None:
        self.patched = patched
        super().__init__(**options)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        loader = super().get_test_dataloader(test_dataset)
        if not self.patched:
            return loader
        return patch_dataloader_to_ddp(DataLoader(test_dataset, batch_size=8, collate_fn=self.data_collator))


def test_in_an_evaluation_the_trainer_takes_away_the_padding_of_its_own_loaders_alone() -> None:
    (own, patched), again = run_ranks(evaluated, 2, timeout=240)
    assert again == [own, patched]
    assert own == (27, set(range(27)))
    assert patched == (28, set(range(27)))
