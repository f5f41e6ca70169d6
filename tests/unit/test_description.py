"""What the log, and a sampler that is printed, say of a loader that is patched."""

import copy
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader
from zoo import ALL_KINDS, Kind, Source

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.sharding.sampler import describe_share


class ByClass(BatchSampler):
    pass


def of(n: int = 100, **options: Any) -> DataLoader[Any]:
    return DataLoader(range(n), **options)  # type: ignore[arg-type]  # a range is a dataset as good as any


# What the log says of a loader of rank 1 of 3, and its sampler when it is printed.
CASES: list[tuple[DataLoader[Any], dict[str, Any], str, str]] = [
    (of(batch_size=8), {}, "samples, 5 steps of 8", "samples, 34 in an epoch"),
    (of(3), {}, "samples, 1 step of 1", "samples, 1 in an epoch"),
    (of(8000), {"uneven": "keep", "seed": 5}, "samples, 2,667 steps of 1", "samples, 2,667 in an epoch"),
    (of(batch_size=8), {"share": "batches"}, "whole batches, 5 steps of 8", "whole batches, 5 in an epoch"),
    (
        of(batch_size=8),
        {"share": "within_batches"},
        "a part of each batch, 13 steps of 8",
        "a part of each batch, 13 in an epoch",
    ),
    (of(batch_sampler=ByClass(range(100), 8, False)), {}, "whole batches, 5 steps", "whole batches, 5 in an epoch"),
    (of(batch_size=None), {}, "samples, 34 steps", "samples, 34 in an epoch"),
    (DataLoader(Source(), 2), {}, "items of a stream, steps of 2, length unknown", "items of a stream, length unknown"),
    (DataLoader(Source(), None), {}, "items of a stream, length unknown", "items of a stream, length unknown"),
]


@pytest.mark.parametrize(("loader", "options", "said", "printed"), CASES)
def test_the_log_and_a_loaders_sampler_say_what_a_rank_gets(
    loader: DataLoader[Any], options: dict[str, Any], said: str, printed: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ddp_patch"):
        patched = patch_dataloader_to_ddp(loader, rank=1, num_replicas=3, **options)
    assert caplog.records[-1].getMessage() == f"DataLoader was patched: shard 1 of 3, {said}"
    assert describe_share(copy.deepcopy(patched)) == f"shard 1 of 3, {said}"
    assert repr(patched.sampler).endswith(f"(shard 1 of 3, {printed})")
    assert describe_share(loader) is None  # which is not patched


@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.name)
def test_looking_at_a_loader_draws_nothing(kind: Kind) -> None:
    torch.manual_seed(5)
    patched = patch_dataloader_to_ddp(kind.make(), rank=1, num_replicas=3, seed=1)
    state = torch.get_rng_state()
    assert "shard 1 of 3" in str(describe_share(patched))
    assert torch.equal(torch.get_rng_state(), state)
    sampler: Any = patched.sampler
    assert getattr(sampler, "latest", None) is None  # no pass has begun


def test_a_line_in_the_log_for_each_loader_that_is_patched(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ddp_patch"):
        patched = patch_dataloader_to_ddp(of(batch_size=8), rank=1, num_replicas=4)
        patch_dataloader_to_ddp(patched, rank=1, num_replicas=4)  # nothing is left to do
        patch_dataloader_to_ddp({"train": of(), "test": [patched]}, rank=1, num_replicas=4)
    assert [record.getMessage() for record in caplog.records] == [
        "DataLoader was patched: shard 1 of 4, samples, 4 steps of 8",
        "loaders['train'] was patched: shard 1 of 4, samples, 25 steps of 1",
    ]


ONE_LINE = "ddp_patch: DataLoader was patched: shard 1 of 3, samples, 17 steps of 2\n"


ASKED = [
    ("1", "", ONE_LINE),
    ("1", "logging.basicConfig()", ONE_LINE.replace("ddp_patch: ", "INFO:ddp_patch:")),  # once, not twice
]


@pytest.mark.parametrize(("asked", "first", "said"), ASKED)
def test_a_script_asks_for_the_log_by_an_environment_variable(asked: str, first: str, said: str) -> None:
    script = f"""
import logging
from torch.utils.data import DataLoader
from ddp_patch import patch_dataloader_to_ddp
{first}
list(patch_dataloader_to_ddp(DataLoader(range(100), 2), rank=1, num_replicas=3))
"""
    environment = {**os.environ, "DDP_PATCH_LOG": asked}
    ended = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stderr == said
