"""Record what a rank trains in its first steps, for ``--check``; switch off what ranks draw for themselves."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_patch.compat.private_torch import items_changed
from ddp_patch.orders.random_states import GlobalState
from ddp_patch.running.lockstep import models_of
from ddp_patch.running.overlay import open_file

__all__ = ["BATCH_NORM", "Recording", "recorded"]

_NAME = "DDP_PATCH_RECORDING"
_MOST_NUMBERS = 2**14  # of each tensor; of larger ones, so many at equal distances, and the mean of all
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
BATCH_NORM = "batch normalisation"
_save = torch.save


@dataclass(frozen=True)
class Recording:
    """What to record.

    Attributes:
        folder: Where each rank writes it.
        ranks: How many ranks there are.
        steps: How many steps of optimizers.
        double: Whether all is computed in double precision.
    """

    folder: Path
    ranks: int
    steps: int
    double: bool

    @property
    def environment(self) -> dict[str, str]:
        """What tells a process of it."""
        return {_NAME: json.dumps(asdict(self) | {"folder": str(self.folder)})}

    @property
    def files(self) -> Path:
        """Where the ranks write their files."""
        return self.folder / "files"

    @classmethod
    def here(cls) -> "Recording | None":
        """Return what this process was told."""
        told = json.loads(os.environ.get(_NAME, "null"))
        return told and cls(**{**told, "folder": Path(told["folder"])})


_ATTEND, _AUTOCAST = functional.scaled_dot_product_attention, torch.autocast.__init__


class _Recorder:
    """Records the first steps of a script, with all still that ranks draw for themselves, and ends it then.

    What it stands in the place of, it writes down: what is random, and what sees the whole batch.

    Args:
        what: What to record.

    Attributes:
        steps: What each step of an optimizer did: ``losses`` (the roots of the calls of ``backward()`` before it, as
            they were weighed), ``has_drawn`` (whether the global generator moved since the step before),
            ``is_double`` (whether all parameters are of double precision), ``gradients`` that the optimizer got, by the
            parameters' names, and ``parameters``: what it made of them.
    """

    def __init__(self, what: Recording) -> None:
        self.steps: list[dict[str, Any]] = []
        self._what = what
        self._losses: list[float] = []
        self._names: dict[torch.Tensor, str] = {}
        self._random = torch.Tensor()

    def note_losses(self, run: Callable[..., None], tensors: Any, *args: Any, **options: Any) -> None:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        self._losses += [float(root) for root in roots if isinstance(root, torch.Tensor) and root.numel() == 1]
        run(tensors, *args, **options)

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if not all(each in self._names for each in parameters):
            named = (pair for model in models_of(parameters) for pair in model.named_parameters())
            self._names |= {each: f"parameter {number}" for number, each in enumerate(parameters, len(self._names))}
            self._names |= {each: name for name, each in named}
        given = {self._names[each]: each.grad for each in parameters if each.grad is not None}
        self.steps.append(
            {
                "losses": self._losses,
                "is_double": all(each.dtype == torch.float64 for each in parameters),
                "has_drawn": bool(self.steps) and not torch.equal(torch.get_rng_state(), self._random),
                "gradients": {name: _sample(each) for name, each in given.items()},
            }
        )
        self._losses = []

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self.steps[-1]["parameters"] = {self._names[each]: _sample(each) for each in parameters}
        self._random = torch.get_rng_state()
        if len(self.steps) >= self._what.steps:
            sys.exit()

    def hold_still(self, stack: ExitStack, *, sync_batchnorm: bool) -> None:
        """Stand in the place of what is random, until the stack closes."""

        def in_one_precision(context: Any, device_type: str, *args: Any, **options: Any) -> None:
            if options.get("enabled", True):
                self._off("autocast")
            _AUTOCAST(context, device_type, *args, **{**options, "enabled": False})

        for name in _DROPOUTS if sync_batchnorm else (*_DROPOUTS, "batch_norm"):
            stack.enter_context(patch.object(functional, name, self._evaluating(getattr(functional, name))))
        stack.enter_context(patch.object(functional, "scaled_dot_product_attention", self.attend))
        stack.enter_context(patch.object(torch.autocast, "__init__", in_one_precision))
        for name, value in (("randn_like", 0.0), ("rand_like", 0.5)):
            stack.enter_context(patch.object(torch, name, partial(self.draw, value)))
        stack.callback(register_module_forward_pre_hook(self.before_forward).remove)
        change = _double if self._what.double else lambda item: item
        stack.enter_context(items_changed(self.item, change))

    def _off(self, name: str) -> None:
        with open_file(self._what.folder / f"off {name}", "w"):  # past what lies over the file system
            pass

    def _evaluating(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does in training what it does in evaluation."""
        takes = signature(function)

        def call(*args: Any, **options: Any) -> Any:
            bound = takes.bind(*args, **options)
            bound.apply_defaults()
            given = bound.arguments
            if given["training"] and given.get("p", 1):
                self._off("dropout" if "p" in given else BATCH_NORM)
                given["training"] = given.get("running_mean", 0) is None  # then there is nothing but the batch
            return function(*bound.args, **bound.kwargs)

        return call

    def attend(
        self, query: Any, key: Any, value: Any, mask: Any = None, dropout_p: float = 0.0, *args: Any, **options: Any
    ) -> Any:
        if dropout_p:
            self._off("dropout")
        return _ATTEND(query, key, value, options.pop("attn_mask", mask), 0.0, *args, **options)

    def draw(self, value: float, data: torch.Tensor, **options: Any) -> torch.Tensor:
        self._off("noise")
        return torch.full_like(data, value, **options)

    def before_forward(self, module: nn.Module, _args: Any) -> None:
        if isinstance(module, nn.RNNBase) and module.training and module.dropout:
            self._off("dropout")
            module.dropout = 0.0

    def item(self, dataset: Any, index: Any) -> Any:
        """Return an item of a dataset, whose random numbers follow from its index."""
        before, own = GlobalState.capture(), GlobalState.seeded(np.random.SeedSequence(crc32(repr(index).encode())))
        seeded = own.copied().values()
        own.install()
        try:
            return dataset[index]
        finally:
            if GlobalState.capture().values() != seeded:
                self._off("random transforms")
            before.install()


@contextmanager
def recorded(what: Recording, rank: int, *, sync_batchnorm: bool) -> Iterator[None]:
    """Record a script while entered, and end it by ``sys.exit()`` after its first steps.

    Args:
        what: What to record.
        rank: This rank.
        sync_batchnorm: Whether batch normalisation sees the whole batch; else it is switched off.
    """
    recorder = _Recorder(what)
    what.folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        recorder.hold_still(stack, sync_batchnorm=sync_batchnorm)
        if what.double:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        noting = partial(recorder.note_losses, torch.autograd.backward)
        stack.enter_context(patch.object(torch.autograd, "backward", noting))
        stack.callback(register_optimizer_step_pre_hook(recorder.before_step).remove)
        stack.callback(register_optimizer_step_post_hook(recorder.after_step).remove)
        try:
            yield
        finally:
            _save(recorder.steps, what.folder / f"rank-{rank}.pt")


@torch.no_grad()
def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return numbers of a tensor, which differ where it does."""
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    flat = dense.detach().reshape(-1).to("cpu", torch.float64)
    if len(flat) <= _MOST_NUMBERS:
        return flat.clone()
    return torch.cat([flat[:: -(-len(flat) // _MOST_NUMBERS)], flat.mean().view(1)])


def _double(item: Any) -> Any:
    """Return an item with all its numbers in double precision."""
    if isinstance(item, torch.Tensor):
        return item.double() if item.is_floating_point() else item
    if isinstance(item, np.ndarray):
        return item.astype(np.float64) if item.dtype.kind == "f" else item
    if type(item) is dict:
        return {key: _double(each) for key, each in item.items()}
    return type(item)(map(_double, item)) if type(item) in {list, tuple} else item
