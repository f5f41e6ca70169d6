"""The options of sharding, checked once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

from ddp_patch.costs import Cost, CostValues
from ddp_patch.errors import InvalidOptionError
from ddp_patch.validation import as_index, seconds

Uneven: TypeAlias = Literal["pad", "drop", "keep"]
Layout: TypeAlias = Literal["interleaved", "contiguous"]
Share: TypeAlias = Literal["auto", "samples", "batches", "within_batches", "by_worker"]

# A function of the dataset returns what identifies its data.
Fingerprint: TypeAlias = Literal["auto"] | Callable[[Any], object] | None

# The shortest timeout is the resolution of torch's stores, the longest some years.
_TIMEOUTS_S = (0.001, 1e8)

# The options that are chosen from a list; ``patch_dataloader_to_ddp`` says what each choice does.
_CHOICES: Mapping[str, Sequence[str]] = {
    name: get_args(choices) for name, choices in {"uneven": Uneven, "layout": Layout, "share": Share}.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of sharding a stream; ``patch_dataloader_to_ddp`` describes each option.

    Attributes:
        cost: What items cost, if steps are balanced.
        fingerprint: What identifies the data.
        timeout: How many seconds ranks wait for each other; a ``timedelta`` is converted.

    Raises:
        InvalidOptionError: An option has a value that it does not take, or two options exclude each other.
    """

    share: Share = "auto"
    uneven: Uneven = "pad"
    seed: int | None = None
    cost: Cost | CostValues | None = None
    layout: Layout = "interleaved"
    fingerprint: Fingerprint = "auto"
    timeout: float = 300.0

    def __post_init__(self) -> None:
        for name in _CHOICES:
            check_choice(name, getattr(self, name))
        if self.divides_batches and self.uneven == "drop":
            raise InvalidOptionError(
                "uneven='drop' does not work with share='within_batches': a batch that cannot be divided evenly would "
                "lose samples. Use uneven='pad', whose padding iter_with_weights() weighs 0, or uneven='keep'."
            )
        if self.cost is not None and self.divides_batches:
            raise InvalidOptionError(
                "cost= does not work with share='within_batches': which samples a step has is decided before, so "
                "little could be balanced. Use share='samples' or 'batches', or leave cost= out."
            )
        arranges = "cost=" if self.cost is not None else f"share={self.share!r}"
        if self.gives_runs and (self.cost is not None or self.share in {"within_batches", "by_worker"}):
            raise InvalidOptionError(
                f"layout='contiguous' does not work with {arranges}, which decides itself which items a rank takes. "
                "Use one or the other."
            )
        cost = self.cost if self.cost is None or isinstance(self.cost, Cost) else Cost(self.cost)
        seed = None if self.seed is None else as_index(self.seed)
        if self.seed is not None and (seed is None or seed < 0):
            raise InvalidOptionError(
                f"seed={self.seed!r} is not a whole number of at least 0, and orders are derived from one. "
                "Pass such an int, or None for one that follows from rank 0's torch.initial_seed()."
            )
        is_auto = isinstance(self.fingerprint, str) and self.fingerprint == "auto"
        if not (is_auto or self.fingerprint is None or callable(self.fingerprint)):
            raise InvalidOptionError(
                f"fingerprint={self.fingerprint!r} is no function, and what identifies data is a function's to say. "
                "Pass one that takes the dataset and returns what names its samples, such as "
                "lambda dataset: dataset.files; or 'auto', or None to compare no data."
            )
        timeout = seconds(self.timeout)
        if timeout is None or not _TIMEOUTS_S[0] <= timeout <= _TIMEOUTS_S[1]:
            raise InvalidOptionError(
                f"timeout={self.timeout!r} must be between {_TIMEOUTS_S[0]:g} and {_TIMEOUTS_S[1]:g} seconds: ranks "
                "wait that long for each other. Pass a number of seconds, or a timedelta."
            )
        # Store each option in one form, whatever form the user chose.
        for name, value in {"cost": cost, "seed": seed, "timeout": timeout}.items():
            object.__setattr__(self, name, value)

    @property
    def costs(self) -> Cost | None:
        """``cost`` after the checks."""
        return cast("Cost | None", self.cost)

    @property
    def divides_batches(self) -> bool:
        """Whether every rank takes a part of each batch that one process makes."""
        return self.share == "within_batches"

    @property
    def by_worker(self) -> bool:
        """Whether iterable datasets split themselves over the workers of all ranks."""
        return self.share == "by_worker"

    @property
    def gives_runs(self) -> bool:
        """Whether each rank takes a run of an epoch's items."""
        return self.layout == "contiguous"


def check_choice(name: str, value: object) -> None:
    """Raise InvalidOptionError unless the value is one of the option's choices."""
    choices = _CHOICES[name]
    if not (isinstance(value, str) and value in choices):
        raise InvalidOptionError(
            f"{name}={value!r} does not exist. Pass one of these: {', '.join(map(repr, choices))}."
        )
