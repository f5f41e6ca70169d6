"""Samplers and datasets of other packages have all of their attributes after the patch, which can be set there."""

import pytest
from third_party.base import Case, Fate, World
from third_party.measure import cases_of, quiet
from walked import read, set_elsewhere, told_otherwise, wrapped_part

from ddp_patch import patch_dataloader_to_ddp

# These do without torchvision.
MODULES = [
    "datasets",
    "lhotse",
    "mmengine",
    "pytorch_metric_learning",
    "torch_geometric",
    "transformers",
    "webdataset",
]
CASES = [case for name in MODULES for case in cases_of(name) if case.fate is Fate.SHARED and not case.on_ranks]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_are_there_and_can_be_set(case: Case) -> None:
    with quiet():
        given = case.make(World())
        part = wrapped_part(given)
        wrapped = getattr(given, part)
        before = read(wrapped)
        wrapper = getattr(patch_dataloader_to_ddp(given, rank=1, num_replicas=2), part)
        assert wrapper is not wrapped
        assert told_otherwise(before, wrapper) == []
        assert set_elsewhere(wrapped, wrapper) == []
