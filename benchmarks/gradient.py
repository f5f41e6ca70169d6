"""How far what ranks train is from what one process trains: this package, accelerate and Lightning.

``nox -s gradient`` runs this; it prints the table of ``docs/benchmarks.md`` and writes it there. Model, loaders and
loop are those of ``docs/examples/digits.py``. Every attempt (way, setting, loader, number of ranks) runs on real ranks
of its own, with a deadline. A library is compared with itself on one rank.
"""

import logging
import math
import multiprocessing
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import digits
import torch
from pages import show_and_put
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, Sampler, Subset

from ddp_patch import iter_with_weights, patch_dataloader_to_ddp
from ddp_patch.errors import RanksFailedError
from ddp_patch.samplers import PKBatchSampler
from ddp_patch.testing import run_ranks

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
WORLDS, LIMIT_S = (2, 3, 4), 30.0
FULL_BATCHES = 12  # which each number of ranks divides
PEERS = ("torch", "accelerate", "lightning")

Batches: TypeAlias = list[list[int]]
Make: TypeAlias = Callable[[int], Any]
Train: TypeAlias = Callable[..., "Trained"]


@dataclass(frozen=True)
class Trained:
    """What became of a training on a rank: all parameters, and which samples were in each of its batches."""

    parameters: Tensor
    batches: Batches


@dataclass
class Taught:
    """A network that notes what it is taught."""

    network: nn.Module = field(default_factory=digits.make_network)
    batches: Batches = field(default_factory=list)

    def losses(self, model: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
        """Return each sample's loss."""
        images, labels = batch
        self.batches.append([places()[image.numpy().tobytes()] for image in images])
        return cross_entropy(model(images), labels, reduction="none")

    def trained(self) -> Trained:
        """Tell what became of it."""
        return Trained(nn.utils.parameters_to_vector(self.network.parameters()).detach().cpu(), self.batches)


@cache
def places() -> dict[bytes, int]:
    """Return each image's place in the data."""
    data = digits.make_loaders()["shuffled"].dataset
    return {data[place][0].numpy().tobytes(): place for place in range(digits.SAMPLES)}


def make_loaders(wider: int = 1) -> dict[str, Any]:
    """Return the demo's loaders, and before them two with what all numbers of ranks divide."""
    loaders = digits.make_loaders(wider)
    data = loaders["shuffled"].dataset
    full = Subset(data, range(FULL_BATCHES * digits.BATCH_SIZE))
    pk_batches: Any = PKBatchSampler(data.tensors[1], 4, 3, num_batches=FULL_BATCHES)
    if wider > 1:
        pk_batches = digits.Joined(pk_batches, wider)
    return {
        "shuffled, 12 batches of 16": DataLoader(full, digits.BATCH_SIZE * wider, shuffle=True),
        "P x K, 12 batches of 12": DataLoader(data, batch_sampler=pk_batches),
        **loaders,
    }


class Declared(Sampler[list[int]]):
    """A batch sampler that says how large its batches are, whether or not they are."""

    drop_last = False

    def __init__(self, batch_sampler: Any, batch_size: int) -> None:
        self.batch_sampler, self.batch_size = batch_sampler, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)


# How each library trains, on a rank: on the loader as it is, or on so many times larger batches.


def ours(make: Make, larger: int, **options: Any) -> Trained:
    """Patch the loader, and weigh the losses; ranks are seeded differently."""
    torch.manual_seed(int(os.environ["RANK"]))
    taught = Taught()
    model = nn.parallel.DistributedDataParallel(taught.network)
    optimizer = digits.make_optimizer(taught.network)
    patched = patch_dataloader_to_ddp(make(larger), seed=digits.SEED, **options)
    for _ in range(digits.EPOCHS):
        for batch, weights in iter_with_weights(patched, dtype=torch.float64):
            optimizer.zero_grad()
            (taught.losses(model, batch) * weights).sum().backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
    return taught.trained()


def with_accelerate(make: Make, larger: int, declared: int | None = None, **settings: Any) -> Trained:
    """Have accelerate prepare all; ranks are seeded alike, as it advises.

    Args:
        make: Makes the loader.
        larger: So many batches are joined, since ranks take them in turn.
        declared: What a batch sampler that is not torch's says its batch size is.
        settings: Of accelerate's loaders.
    """
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(digits.SEED)
    taught, loader = Taught(), make(1)
    if declared is not None and type(loader.batch_sampler) is not BatchSampler:
        loader = DataLoader(loader.dataset, batch_sampler=Declared(loader.batch_sampler, declared))
    configuration = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=digits.SEED, **settings)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration, rng_types=["torch", "generator"])
    prepared = accelerator.prepare(taught.network, digits.make_optimizer(taught.network), loader)
    model, optimizer, prepared_loader = prepared
    for _ in range(digits.EPOCHS):
        for batch in joined(prepared_loader, larger):
            optimizer.zero_grad()
            accelerator.backward(taught.losses(model, batch).mean())
            optimizer.step()
    return taught.trained()


def joined(batches: Iterable[Any], count: int) -> Iterator[list[Tensor]]:
    """Yield every ``count`` consecutive batches as one."""
    iterator = iter(batches)
    while group := list(islice(iterator, count)):
        yield [torch.cat(column) for column in zip(*group, strict=True)]


def with_lightning(make: Make, larger: int) -> Trained:
    """Have Lightning's Trainer inject its sampler; ranks are seeded alike."""
    os.environ["TORCHELASTIC_RUN_ID"] = "gradient"  # this process was started by something else than the Trainer
    from lightning.pytorch import LightningModule, Trainer, seed_everything

    class Module(LightningModule):  # type: ignore[misc]  # it is not there where types are checked
        def __init__(self) -> None:
            super().__init__()
            self.taught = Taught()
            self.network = self.taught.network

        def training_step(self, batch: Any) -> Tensor:
            return self.taught.losses(self.network, batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return digits.make_optimizer(self.network)

    seed_everything(digits.SEED, verbose=False)
    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp", max_epochs=digits.EPOCHS, enable_model_summary=False, **quiet
    )
    trainer.fit(module, make(larger))
    return module.taught.trained()


@dataclass(frozen=True)
class Way:
    """A way to train, and the settings that are tried: the best of them counts."""

    train: Train
    settings: tuple[Mapping[str, Any], ...] = ({},)


# 12 can be divided by each number of ranks, as it demands of what it splits.
DISPATCH = ({}, {"dispatch_batches": True}, {"dispatch_batches": False})
SPLIT = (*DISPATCH, *({**settings, "declared": 12} for settings in DISPATCH))
WHOLE = (*DISPATCH, {"even_batches": False})
WAYS = {
    'ddp_patch, `share="within_batches"`': Way(ours, ({"share": "within_batches"},)),
    "ddp_patch, defaults": Way(ours),
    "accelerate, `split_batches=True`": Way(
        with_accelerate, tuple({"split_batches": True, **settings} for settings in SPLIT)
    ),
    "accelerate, defaults": Way(with_accelerate, WHOLE),
    "Lightning `Trainer`": Way(with_lightning),
}


def train_on_rank(rank: int, world_size: int, way: str, settings: Mapping[str, Any], loader: str, larger: int) -> Any:
    """Train on a rank; return an error by its name."""
    warnings.simplefilter("ignore")
    logging.disable()
    try:
        return WAYS[way].train(lambda wider: make_loaders(wider)[loader], larger, **settings)
    except Exception as error:  # noqa: BLE001 - whatever a library raises is its result
        return type(error).__name__


# In the parent: what became of each attempt.


def attempt(ranks: int, way: str, settings: Mapping[str, Any], loader: str, larger: int = 1) -> list[Trained] | str:
    """Return what each rank trained, or what else became of it."""
    arguments = (way, settings, loader, larger)
    try:
        found = run_ranks(train_on_rank, ranks, *arguments, timeout=LIMIT_S)
    except RanksFailedError as error:
        if "did not end" in str(error):
            return "hangs"
        raise
    return next((f"raises {rank}" for rank in found if isinstance(rank, str)), found)


def judged(ranks: list[Trained], alone: Sequence[Trained]) -> tuple[float, str]:
    """Return the largest difference to the nearer of the trainings in one process, and what it comes from."""
    if all(rank.batches == alone[0].batches for rank in ranks):
        return difference(ranks, alone[0]), "each rank trains on all data"
    least = min(difference(ranks, one) for one in alone)
    return least, "" if least < digits.TOLERANCE else min((cause(ranks, one) for one in alone), key=CAUSES.index)


def difference(ranks: list[Trained], one: Trained) -> float:
    """Return the largest difference of any parameter on any rank."""
    return max(float((rank.parameters - one.parameters).abs().max()) for rank in ranks)


CAUSES = ("means of unequal batches", "repeats", "samples lost", "other samples in a step")


def cause(ranks: list[Trained], one: Trained) -> str:
    """Say how the samples of the ranks' steps differ from those of one process."""
    steps, wanted = list(steps_of(ranks)), list(steps_of([one]))
    if len(steps) == len(wanted) and all(step >= batch for step, batch in zip(steps, wanted, strict=True)):
        return "means of unequal batches" if steps == wanted else "repeats"
    return "samples lost" if sum(wanted, Counter()) - sum(steps, Counter()) else "other samples in a step"


def steps_of(ranks: list[Trained]) -> Iterator[Counter[int]]:
    """Yield the samples of each step, of all ranks together."""
    for step in range(max(len(rank.batches) for rank in ranks)):
        yield Counter(sample for rank in ranks for batch in rank.batches[step : step + 1] for sample in batch)


def of_setting(ranks: int, way: str, loader: str, settings: Mapping[str, Any]) -> tuple[float, str]:
    """Return the difference that a setting makes, infinite where nothing is trained, and what it comes from."""
    alone = []
    for larger in (1, ranks):
        found = attempt(1, way, settings, loader, larger)
        if isinstance(found, str):
            return math.inf, found
        alone += found
    together = attempt(ranks, way, settings, loader)
    return (math.inf, together) if isinstance(together, str) else judged(together, alone)


def best(ranks: int, way: str, loader: str) -> str:
    """Return a cell: the best that any setting gives."""
    results = {str(settings): of_setting(ranks, way, loader, settings) for settings in WAYS[way].settings}
    print(loader, ranks, way, results, flush=True)
    least, why = min(results.values(), key=lambda result: result[0])
    return why if least == math.inf else ", ".join(filter(None, [f"{least:.0e}", why]))


def main() -> None:
    """Run everything, print the table and write it into the page."""
    preloaded = ["ddp_patch.testing", "torch._dynamo", "torch.nn.parallel", "accelerate", "lightning.pytorch", "digits"]
    multiprocessing.set_forkserver_preload(preloaded)
    tables = {ranks: [[f"{ranks} ranks", *WAYS]] for ranks in WORLDS}
    for loader in make_loaders():
        for ranks, rows in tables.items():
            rows.append([loader, *(best(ranks, way, loader) for way in WAYS)])
            print(ranks, *rows[-1], sep=" | ", flush=True)
    show_and_put(PAGE, "gradient", tables[WORLDS[0]])
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PEERS)
    show_and_put(PAGE, "gradient-versions", [["run with"], [versions]])


if __name__ == "__main__":
    import gradient  # by the name that other processes know it by

    gradient.main()
