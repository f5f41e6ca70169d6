"""Every documented example runs, and every public name has one."""

import doctest
import importlib

import pytest
import torch
from test_exports import MODULES

import ddp_patch
from ddp_patch import samplers


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, extraglobs={"torch": torch})
    assert failed == 0


@pytest.mark.parametrize(
    "name", [name for name in ddp_patch.__all__ if name[0] == name[0].lower() or "Wrapper" in name]
)
def test_every_public_call_has_an_example(name: str) -> None:
    assert ">>> " in (getattr(ddp_patch, name).__doc__ or "")


@pytest.mark.parametrize("name", samplers.__all__)
def test_every_sampler_has_an_example(name: str) -> None:
    assert ">>> " in (getattr(samplers, name).__doc__ or "")
