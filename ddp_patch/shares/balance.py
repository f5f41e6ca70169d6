"""Check that the user's costs fit a loader, and that its stream can be balanced by them."""

from typing import Any

from ddp_patch.compat.torch_loaders import is_torch_batch_sampler
from ddp_patch.costs import Costs
from ddp_patch.errors import InvalidOptionError
from ddp_patch.loaders.facts import Level, LoaderFacts
from ddp_patch.options import Options
from ddp_patch.streams.orders import order_parameters

__all__ = ["costs_compared", "require_costs", "require_one_of_each"]

# For at least this many samples, if there are, ranks compare what a function says that they cost.
_COMPARED = 32


def require_costs(facts: LoaderFacts[Any], costs: Costs) -> None:
    """Refuse costs that do not fit the loader's items, and a loader whose stream cannot be balanced.

    Raises:
        InvalidOptionError: They are not, or it cannot.
    """
    name = facts.stream.name
    if facts.level is Level.ITERABLE:
        raise InvalidOptionError(
            f"cost= does not work with an iterable dataset: {name} gives samples, not indices, so a whole window of "
            "them would have to be read and kept. Leave cost= out, or use a dataset with __getitem__."
        )
    if facts.stream.is_one_shot:
        raise InvalidOptionError(
            f"cost= does not work with a {name}, which is an iterator and can be used only once: a window is drawn "
            "ahead, and after a break the rest of it would be lost. Give the loader a sampler that can be iterated "
            "again, such as a list."
        )
    if costs.function is not None and costs.cost_of == "padded" and facts.level is not Level.SAMPLE:
        raise InvalidOptionError(
            f"cost_of='padded' does not work with a function if each item of {name} is sharded as a whole: the "
            "function already says what it costs. Leave cost_of out, or pass one number for each index."
        )
    require_one_of_each(facts, costs)


def require_one_of_each(facts: LoaderFacts[Any], costs: Costs) -> None:
    """Refuse more or fewer costs than the dataset has samples.

    Raises:
        InvalidOptionError: They are not.
    """
    n = facts.dataset_length
    if costs.length is not None and n is not None and costs.length != n:
        raise InvalidOptionError(
            f"cost= has {costs.length} numbers and {type(facts.dataset).__name__} has {n} samples. Pass one number for "
            "each index of loader.dataset, in order."
        )


def costs_compared(facts: LoaderFacts[Any], options: Options) -> dict[str, object]:
    """Return what must be the same on every rank about a loader's costs, by name.

    Raises:
        InvalidOptionError: A function gives a cost that is not a number of at least 0.
    """
    costs = options.costs
    if costs is None:
        return {"cost": "none"}
    some = None if costs.function is None else _of_some_samples(facts, costs, divides=options.divides_batches)
    return {
        "cost": costs.described,
        "cost_of": options.cost_of,
        "cost_window": options.cost_window,
        "cost of some samples": some,
    }


def _of_some_samples(facts: LoaderFacts[Any], costs: Costs, *, divides: bool) -> list[float] | None:
    """Return the costs of some indices, or of batches of one, by the user's function; None if it takes other items."""
    n, source = facts.dataset_length or 0, facts.stream.source
    takes_batches = (facts.level is Level.BATCH or is_torch_batch_sampler(type(source))) and not divides
    some = range(0, n, max(1, n // _COMPARED))
    try:
        found: list[float] = costs.of([[index] for index in some] if takes_batches else some).tolist()
    except Exception as error:
        if isinstance(error, InvalidOptionError) and order_parameters(source) is not None:
            raise
        return None  # of which nobody knows what keys it takes
    return found
