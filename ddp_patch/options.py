"""The options of sharding, checked once."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeGuard, cast

import numpy as np

from ddp_patch.costs import CostOf, Costs
from ddp_patch.devices import Device, checked_device
from ddp_patch.errors import InvalidOptionError

__all__ = [
    "COST_WINDOW",
    "Agreement",
    "IterableSharding",
    "Layout",
    "Options",
    "Share",
    "Uneven",
    "as_index",
    "check_choice",
    "check_flag",
    "check_rank",
    "is_seconds",
    "whole_number",
]

Uneven: TypeAlias = Literal["pad", "drop", "keep"]
Layout: TypeAlias = Literal["interleaved", "contiguous"]
Agreement: TypeAlias = Literal["auto", "seeded", "ambient", "leader"]
IterableSharding: TypeAlias = Literal["exact", "by_worker"]
Share: TypeAlias = Literal["auto", "samples", "batches", "within_batches"]

# In steps; benchmarks/balance.py compares it with others.
COST_WINDOW = 256

# From the resolution of torch's stores to some years.
_TIMEOUTS_S = (0.001, 1e8)

# What the options that are chosen from a list may be, and what each choice does.
_CHOICES: Mapping[str, Mapping[str, str]] = {
    "uneven": {
        "pad": "repeats the first items to fill the last round",
        "drop": "leaves the last, incomplete round out",
        "keep": "gives some ranks one item less",
    },
    "layout": {
        "interleaved": "gives rank r every num_replicas-th item",
        "contiguous": "gives rank r the r-th run of items",
    },
    "agreement": {
        "auto": "is 'seeded', but 'leader' if the ranks would draw different orders",
        "seeded": "derives every epoch's order from (seed, epoch)",
        "ambient": "uses the global random states as they are, for ranks that are seeded alike",
        "leader": "lets rank 0 draw and send every rank its share",
    },
    "iterable_sharding": {
        "exact": "lets every rank read what one process with the same workers reads, and keep its share",
        "by_worker": "lets the dataset split itself by get_worker_info(), over the workers of all ranks",
    },
    "share": {
        "auto": "shards samples, but whole batches of a batch sampler, or of a sampler that groups samples into "
        "batches",
        "samples": "gives each rank samples, from which it makes its own batches",
        "batches": "gives each rank whole batches of one process",
        "within_batches": "divides each batch of one process over the ranks",
    },
    "cost_of": {
        "sum": "means that a batch costs the sum of its samples' costs",
        "padded": "means that it costs the largest of these times their number",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to shard a stream; ``patch_dataloader_to_ddp`` describes each option.

    Attributes:
        timeout: How many seconds ranks wait for each other.
        device: The device to which batches are moved. Ranks have different ones, so it is not compared.

    Raises:
        InvalidOptionError: An option has a value that it does not take, or two exclude each other.
    """

    uneven: Uneven = "pad"
    layout: Layout = "interleaved"
    agreement: Agreement = "auto"
    seed: int | None = None
    verify: bool = False
    timeout: float = 300.0
    iterable_sharding: IterableSharding = "exact"
    scalable_shuffle: bool = False
    share: Share = "auto"
    cost: Any = None
    cost_of: CostOf = "sum"
    cost_window: int = COST_WINDOW
    device: Device | None = None

    def __post_init__(self) -> None:
        for name in _CHOICES:
            check_choice(name, getattr(self, name))
        check_flag("verify", self.verify)
        check_flag("scalable_shuffle", self.scalable_shuffle)
        if self.scalable_shuffle and self.agreement in {"ambient", "leader"}:
            raise InvalidOptionError(
                f"scalable_shuffle=True does not work with agreement={self.agreement!r}: each rank computes its own "
                "share of an order that follows from (seed, epoch). Use agreement='auto' or 'seeded'."
            )
        if self.divides_batches:
            self._require_divisible()
        window = whole_number("cost_window", self.cost_window)
        if window < 1:
            raise InvalidOptionError(f"cost_window={window} has no step in it. Pass a whole number of at least 1.")
        costs = self._checked_costs()
        device = checked_device(self.device)
        seed = None if self.seed is None else as_index(self.seed)
        if self.seed is not None and (seed is None or seed < 0):
            raise InvalidOptionError(
                f"seed={self.seed!r} is not a whole number of at least 0, and orders are derived from one. "
                "Pass such an int, or None for one that follows from rank 0's torch.initial_seed()."
            )
        if not (is_seconds(self.timeout) and _TIMEOUTS_S[0] <= self.timeout <= _TIMEOUTS_S[1]):
            raise InvalidOptionError(
                f"timeout={self.timeout!r} must be between {_TIMEOUTS_S[0]:g} and {_TIMEOUTS_S[1]:g} seconds: ranks "
                "wait that long for each other. Pass a number of seconds."
            )
        # Each in one form, whichever the user gave it in.
        for name, value in {"cost": costs, "cost_window": window, "device": device, "seed": seed}.items():
            object.__setattr__(self, name, value)

    def _require_divisible(self) -> None:
        """Refuse options with which a divided batch would lose samples, or no process has whole batches."""
        if self.uneven == "drop":
            raise InvalidOptionError(
                "uneven='drop' does not work with share='within_batches': a batch that cannot be divided evenly would "
                "lose samples. Use uneven='pad', whose padding iter_with_weights() weighs 0, or uneven='keep'."
            )
        if self.iterable_sharding == "by_worker":
            raise InvalidOptionError(
                "iterable_sharding='by_worker' does not work with share='within_batches': the dataset then splits "
                "itself over all ranks' workers, so no process makes the batches to divide. Use "
                "iterable_sharding='exact'."
            )

    def _checked_costs(self) -> Costs | None:
        """Return what items cost, and refuse options with which steps cannot be balanced."""
        if self.cost is None:
            for name, default in (("cost_of", "sum"), ("cost_window", COST_WINDOW)):
                if (value := getattr(self, name)) != default:
                    raise InvalidOptionError(
                        f"{name}={value!r} says how costs are balanced, and there is no cost=. Pass both or neither."
                    )
            return None
        costs = self.cost if isinstance(self.cost, Costs) else Costs(self.cost, self.cost_of)
        if self.layout == "contiguous":
            raise InvalidOptionError(
                "cost= does not work with layout='contiguous', which gives each rank a run of the samples: the items "
                "of a step are far apart, so ranks cannot exchange them within a window. Use layout='interleaved'."
            )
        if self.agreement == "ambient":
            raise InvalidOptionError(
                "cost= does not work with agreement='ambient': a whole window is drawn at once, so samplers would use "
                "other global random states than without cost=. Use agreement='auto' or 'seeded'."
            )
        if self.divides_batches and self.cost_of == "padded":
            raise InvalidOptionError(
                "cost_of='padded' does not work with share='within_batches': the rank with a batch's longest sample is "
                "the slowest, however the others are divided. Use cost_of='sum', or share='samples' or 'batches'."
            )
        return costs

    @property
    def costs(self) -> Costs | None:
        """What items cost, if steps are balanced."""
        return cast("Costs | None", self.cost)

    @property
    def divides_batches(self) -> bool:
        """Whether every rank takes a part of each batch that one process makes."""
        return self.share == "within_batches"

    @property
    def needs_length(self) -> bool:
        """Whether a rank must know the stream's length to know its positions."""
        return self.layout == "contiguous" and not self.divides_batches


def as_index(value: Any) -> int | None:
    """Return a whole number, which may be numpy's or torch's, as an int; None for anything else, bools included.

    Examples:
        >>> as_index(np.int64(3)), as_index(3.0), as_index(True)
        (3, None, None)
    """
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # torch and numpy raise these for tensors and arrays of others
        return None


def whole_number(name: str, value: object) -> int:
    """Return a whole number, which may be numpy's or torch's, as an int; raise InvalidOptionError for others."""
    number = as_index(value)
    if number is None:
        raise InvalidOptionError(f"{name}={value!r} is a {type(value).__name__}, not an int. Pass a whole number.")
    return number


def is_seconds(value: object) -> TypeGuard[float]:
    """Return whether it is an int or float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_flag(name: str, value: object, hint: str = "") -> None:
    """Raise InvalidOptionError unless a value is True or False.

    Args:
        name: The option.
        value: What was given.
        hint: What to do instead, if the value is likely to have been meant for something else.
    """
    if not isinstance(value, bool | np.bool_):
        raise InvalidOptionError(
            f"{name}={value!r} is a {type(value).__name__}, neither True nor False. Pass one of these.{hint}"
        )


def check_rank(rank: int, num_replicas: int) -> None:
    """Raise InvalidOptionError unless ``num_replicas`` is at least 1 and ``rank`` in ``range(num_replicas)``."""
    if num_replicas < 1:
        raise InvalidOptionError(f"num_replicas={num_replicas} is too small: pass the number of ranks, at least 1.")
    if not 0 <= rank < num_replicas:
        raise InvalidOptionError(
            f"rank={rank} is out of range for num_replicas={num_replicas}: ranks count from 0 to {num_replicas - 1}. "
            "Pass this process's rank within the group."
        )


def check_choice(name: str, value: object) -> None:
    """Raise InvalidOptionError unless an option that is chosen from a list has one of these values."""
    meanings = _CHOICES[name]
    if not (isinstance(value, str) and value in meanings):
        listed = ", ".join(f"{choice!r} {meaning}" for choice, meaning in meanings.items())
        raise InvalidOptionError(f"{name}={value!r} does not exist. Pass one of these: {listed}.")
