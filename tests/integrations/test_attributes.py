"""Samplers and datasets of other packages have all of their attributes after the patch, which can be set there."""

from importlib.util import find_spec
from typing import Any

import pytest
from third_party.base import Case, Fate, World
from third_party.measure import cases_of, quiet
from walked import read, set_elsewhere, told_otherwise, wrapped_part

from ddp_patch import patch_dataloader_to_ddp

# These do without torchvision; nox's session packages installs it.
MODULES = [
    *(("timm", "torchvision") if find_spec("torchvision") else ()),
    "datasets",
    "lhotse",
    "mmengine",
    "pytorch_metric_learning",
    "torch_geometric",
    "transformers",
    "webdataset",
]
CASES = [case for name in MODULES for case in cases_of(name) if case.fate is Fate.SHARED and not case.on_ranks]


SHARES: list[dict[str, Any]] = [{}, {"share": "batches"}, {"share": "within_batches"}]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_are_there_and_can_be_set(case: Case) -> None:
    with quiet():
        for options in SHARES:
            given = case.make(World())
            part = wrapped_part(given)
            if options and (part == "dataset" or given.batch_sampler is None):
                continue  # there are no batches to share
            wrapped = getattr(given, part)
            before = read(wrapped)
            wrapper = getattr(patch_dataloader_to_ddp(given, rank=1, num_replicas=2, **options), part)
            assert wrapper is not wrapped
            assert told_otherwise(before, wrapper) == []
            assert set_elsewhere(wrapped, wrapper) == []
