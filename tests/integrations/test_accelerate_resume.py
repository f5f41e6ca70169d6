"""accelerate: ``save_state`` and ``load_state`` on another number of processes, and ``gather_for_metrics``."""

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from quick import run_ranks
from torch import nn
from torch.utils.data import DataLoader
from zoo import seed_ambient

from ddp_patch import patch_dataloader_to_ddp

N, BATCH, DONE = 41, 3, 2


def prepared(accelerator: Any, shuffle: bool = True, **options: Any) -> Any:
    from ddp_patch.integrations.accelerate import prepare_patched

    data: Any = torch.arange(N)
    given: DataLoader[Any] = DataLoader(data, BATCH, shuffle=shuffle, num_workers=options.pop("num_workers", 0))
    world: Any = {} if accelerator.num_processes > 1 else {"rank": 0, "num_replicas": 1}
    return prepare_patched(accelerator, patch_dataloader_to_ddp(given, **world, **options))


def accelerators(**options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True), **options)


def trained(rank: int, world_size: int, folder: Path, resumes: bool) -> tuple[list[list[int]], list[int]]:
    """The indices that a rank takes of an epoch, batch by batch, and after which batches it took an optimizer step."""
    seed_ambient(rank + 10 * resumes)
    accelerator = accelerators(gradient_accumulation_steps=2)
    loader = prepared(accelerator, num_workers=2)
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Linear(1, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    if resumes:
        accelerator.load_state(str(folder))
    taken: list[list[int]] = []
    synced = []
    for step, indices in enumerate(loader):
        taken.append(indices.tolist())
        with accelerator.accumulate(model):
            accelerator.backward(model(indices[:, None] / N).sum())
            optimizer.step()
            optimizer.zero_grad()
        synced += [step] if accelerator.sync_gradients else []
        if not resumes and step + 1 == DONE:
            accelerator.save_state(str(folder))
            break
    return taken, synced


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_rest_of_an_epoch_goes_on_on_any_number_of_processes(tmp_path: Path) -> None:
    before = list(chain(*(chain(*taken) for taken, _ in run_ranks(trained, 3, tmp_path, False))))
    assert len(set(before)) == len(before) == 3 * BATCH * DONE
    for world_size in (1, 2, 4):
        ranks = run_ranks(trained, world_size, tmp_path, True)
        rest = [index for taken, _ in ranks for batch in taken for index in batch]
        assert sorted({*before, *rest}) == list(range(N))
        assert len(before) + len(rest) - N == -(N - len(before)) % world_size
        for taken, synced in ranks:  # the last accumulation may have one batch
            assert synced == sorted({*range(1, len(taken), 2), len(taken) - 1})


def gathered(rank: int, world_size: int) -> list[Any]:
    """What is gathered of a loader that is patched alone, of prepared ones, and of one that accelerate shards."""
    seed_ambient(rank)
    accelerator = accelerators()
    found = []
    for options in ({}, {"uneven": "drop"}, {"share": "within_batches"}):
        loader = prepared(accelerator, shuffle=False, **options)
        for _ in range(2):
            steps = [accelerator.gather_for_metrics({"rows": rows, "twice": 2 * rows}) for rows in loader]
            assert all(torch.equal(2 * step["rows"], step["twice"]) for step in steps)
            found.append([step["rows"].tolist() for step in steps])
    data: Any = torch.arange(N)
    theirs = accelerator.prepare(DataLoader(data, BATCH))
    found.append([accelerator.gather_for_metrics(rows).tolist() for rows in theirs])
    plain: Any = accelerator.prepare(patch_dataloader_to_ddp(DataLoader(data, BATCH)))
    return [[accelerator.gather_for_metrics(rows).tolist() for rows in plain], *found]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_gathering_for_metrics_gives_each_sample_once_in_order(world_size: int) -> None:
    first, *others = run_ranks(gathered, world_size)
    assert all(other == first for other in others)
    plain, *patched, theirs = (list(chain(*steps)) for steps in first)
    assert plain == list(range(N))
    padded, dropped, divided = patched[:2], patched[2:4], patched[4:]
    assert padded == divided == [list(range(N))] * 2
    assert dropped == [list(range(N - N % world_size))] * 2
    assert Counter(theirs) == Counter(range(N))
