"""Hugging Face's ``Trainer`` resumes a patched loader where its checkpoint was taken: by epoch and step."""

import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from frameworks.base import Epochs
from frameworks.hf_trainer import EachEpoch, OwnLoader, as_inputs
from frameworks.kinds import KINDS, Kind, tiny_model
from quick import run_ranks
from transformers import TrainerCallback, TrainingArguments
from zoo import seed_ambient

from ddp_patch import loader_state, restore_loader
from ddp_patch.errors import UnsupportedLoaderError

EPOCHS = 3
TRIED = [KINDS[0], KINDS[3], KINDS[4]]  # a sampler, whole batches, a stream


class Recorder(EachEpoch):
    """Notes where the loader stands after each step, too."""

    def __init__(self, trainer: OwnLoader) -> None:
        super().__init__(trainer)
        self.states: list[Any] = []

    def on_step_end(self, *positional: Any, train_dataloader: Any, **options: Any) -> None:
        state = loader_state(train_dataloader)
        assert state == loader_state(train_dataloader, batches_done=len(self.trainer.seen[-1]))
        self.states.append(state)


class Restoring(TrainerCallback):  # type: ignore[misc]  # as above
    """Lets the loader go on where a state says; after the Trainer has asked how long it is."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def on_train_begin(self, *positional: Any, train_dataloader: Any, **options: Any) -> None:
        restore_loader(train_dataloader, self.state)


def trained(kind: Kind, folder: str, resume_from: str | None = None, state: Any = None) -> tuple[Epochs, list[Any]]:
    """Train, and return what was seen, and where the loader stood after each step that began the training."""
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
        ignore_data_skip=state is not None,
    )
    trainer = OwnLoader(loader, True, model=tiny_model(), args=arguments)
    recorder = Recorder(trainer)
    trainer.add_callback(recorder if resume_from is None else EachEpoch(trainer))
    if state is not None:
        trainer.add_callback(Restoring(state))
    trainer.train(resume_from_checkpoint=resume_from)
    return trainer.seen, recorder.states


def numbers(epochs: Epochs) -> list[list[int]]:
    return [batch.numbers for epoch in epochs for batch in epoch]


def on_rank(rank: int, world_size: int, shared: str) -> list[tuple[bool, ...]]:
    """Whether training goes on as it did before: resumed in an epoch, between two, and in one by the loader's state."""
    results = []
    for kind in TRIED:
        seed_ambient(100 + rank)
        folder = str(Path(shared, str(KINDS.index(kind))))
        seen, states = trained(kind, folder)
        whole, steps = numbers(seen), len(seen[0])
        dist.barrier()  # the first rank has written the checkpoints
        resumed = []
        for done, state in ((steps + 2, None), (2 * steps, None), (steps + 2, states[steps + 1])):
            seed_ambient(200 + rank)
            try:
                rest, _ = trained(kind, folder, str(Path(folder, f"checkpoint-{done}")), state)
            except UnsupportedLoaderError:
                rest = []
            resumed.append(numbers(rest) == whole[done:])
        results.append(tuple(resumed))
    return results


def test_resumed_from_checkpoints() -> None:
    with tempfile.TemporaryDirectory() as shared:
        ranks = run_ranks(on_rank, 2, shared)
    # To skip batches of an iterable dataset, accelerate makes a loader anew; that is refused, and a state does it.
    assert ranks == [[(True, True, True)] * (len(TRIED) - 1) + [(False, True, True)]] * 2
