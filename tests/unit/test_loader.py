from typing import Any

import torch.multiprocessing
from torch.utils.data import DataLoader
from zoo import NEWER, Indices, loader

from ddp_patch import extract_loader_parameters


def test_every_argument_that_a_stock_loader_still_knows() -> None:
    context = torch.multiprocessing.get_context("spawn")
    given = DataLoader(Indices(), 5, num_workers=1, multiprocessing_context=context, prefetch_factor=3, **NEWER)
    parameters = extract_loader_parameters(given)
    assert parameters["multiprocessing_context"] is context
    assert (parameters["batch_size"], parameters["prefetch_factor"]) == (5, 3)
    assert NEWER.items() <= parameters.items()
    assert "shuffle" not in parameters
    assert all(getattr(given, name) is value for name, value in parameters.items())


def test_what_is_not_about_data_builds_another_loader() -> None:
    parameters = extract_loader_parameters(loader(num_workers=1), ignore_data_related_parameters=True)
    assert not parameters.keys() & {"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
    other = DataLoader(Indices(3), batch_size=2, **parameters)
    assert extract_loader_parameters(other, ignore_data_related_parameters=True) == parameters


class Newer(DataLoader[Any]):
    """A later torch's loader: one more argument, handing the rest on."""

    def __init__(self, *args: Any, transport: str = "pipe", forgotten: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.transport = transport


class Narrow(DataLoader[Any]):
    """A subclass that takes nothing else."""

    def __init__(self, name: str) -> None:
        super().__init__(Indices())
        self.name = name


def test_arguments_that_a_subclass_adds_come_along() -> None:
    parameters = extract_loader_parameters(Newer(Indices(), transport="queue"))
    assert parameters["transport"] == "queue"
    assert parameters["timeout"] == 0
    assert "forgotten" not in parameters


def test_a_subclass_that_hands_nothing_on_has_its_own_arguments_only() -> None:
    assert extract_loader_parameters(Narrow("x")) == {"name": "x"}
