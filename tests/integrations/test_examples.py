"""The examples in the docstrings of what a framework needs, run with the framework."""

import doctest
import importlib
import pkgutil
import warnings

import pytest

from ddp_patch import integrations

# These are in sessions of their own.
NAMES = sorted({module.name for module in pkgutil.iter_modules(integrations.__path__)} - {"torchft", "torchtitan"})


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_the_docstrings(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # frameworks warn of CPUs, of small data, and of what they use themselves
        module = importlib.import_module(f"{integrations.__name__}.{name}")
        failed, attempted = doctest.testmod(module)
    assert failed == 0
    assert attempted > 0
