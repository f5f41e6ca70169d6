"""The optimizers and models that every rank has a copy of: found, made equal, and compared."""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_patch.errors import RankMismatchError
from ddp_patch.ranks.exchange import by_value, ranks_text
from ddp_patch.running.lockstep import Act, Lockstep

__all__ = ["Replicas", "models_of"]


# torch's own, and what derives from them; SyncBatchNorm does not.
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Replicas:
    """The optimizers and models that each rank has its own copy of, and that stay equal.

    Args:
        lockstep: The ranks.
        tell: Tells the user something, once.
    """

    def __init__(self, lockstep: Lockstep, tell: Callable[[str], object]) -> None:
        self._lockstep, self._tell = lockstep, tell
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._known: tuple[tuple[int, ...], list[weakref.ref[nn.Module]]] = ((), [])

    def add(self, optimizer: Optimizer, *, sync_batchnorm: bool) -> None:
        """Note an optimizer, and make what it trains equal to rank 0's.

        Args:
            optimizer: The optimizer.
            sync_batchnorm: Whether to replace batch normalisation by torch's ``SyncBatchNorm``; else the user is told.
        """
        self._optimizers.append(weakref.ref(optimizer))
        if self._lockstep.ranks == 1:
            return
        self._lockstep.meet_alike(Act.OPTIMIZER, lambda: _sizes("parameters", [*self.parameters, *self.buffers()]))
        models = self.models()
        for model in models if sync_batchnorm else ():
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        named = (pair for model in models for pair in model.named_modules(prefix=type(model).__name__))
        if names := [name for name, module in named if isinstance(module, _BATCH_NORMS)]:
            self._tell(
                f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: batch normalisation sees this "
                "rank's part of each batch, not all of it. On accelerators, --sync-batchnorm puts torch's "
                "SyncBatchNorm in its place."
            )
        self._lockstep.broadcast([*self.parameters, *self.buffers()])

    def has(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer was noted."""
        return any(ref() is optimizer for ref in self._optimizers)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters of all optimizers, in the order in which the script gave them."""
        alive = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        groups = [group["params"] for optimizer in alive for group in optimizer.param_groups]
        return list(dict.fromkeys(each for group in groups for each in group))

    def models(self) -> list[nn.Module]:
        """Return the models that hold the optimizers' parameters; those that did so last, if no optimizer is alive."""
        parameters = self.parameters
        numbers, known = tuple(map(id, parameters)), self._known
        models = [model for ref in known[1] if (model := ref()) is not None]
        if parameters and (known[0] != numbers or len(models) != len(known[1])):
            models = models_of(parameters)
            self._known = numbers, [weakref.ref(model) for model in models]
        return models

    def buffers(self) -> list[torch.Tensor]:
        """Return the models' buffers, each once."""
        return list(dict.fromkeys(buffer for model in self.models() for buffer in model.buffers()))

    @property
    def are_evaluated(self) -> bool:
        """Whether there are models, and all are in evaluation mode."""
        models = self.models()
        return bool(models) and not any(module.training for model in models for module in model.modules())

    def share_buffers(self) -> None:
        """Make buffers those of rank 0, before an evaluation."""
        if self._lockstep.ranks > 1:
            self._lockstep.meet_alike(Act.EVALUATION, lambda: _sizes("buffers", self.buffers()))
            self._lockstep.broadcast(self.buffers())

    def meet(self, act: Act) -> None:
        """Meet, and compare the parameters.

        Raises:
            RankMismatchError: The parameters differ; every rank raises it. Or as ``Lockstep.meet``.
            MissingRanksError: As ``Lockstep.meet``.
        """
        if self._lockstep.ranks == 1:
            return
        given = self.parameters
        trained = [each for model in self.models() for each in model.parameters() if each.requires_grad]
        parameters = list(dict.fromkeys([*given, *trained])) if given else []
        sums = _checksums(parameters)
        if self._lockstep.meet(act, usual=tuple(sums)):
            return
        of_ranks = self._lockstep.gathered(sums)
        if len(set(map(len, of_ranks))) > 1:  # some have not collected all garbage yet
            return
        place, found = next((at, found) for at, found in enumerate(zip(*of_ranks, strict=True)) if len(set(found)) > 1)
        names = {each: name for model in self.models() for name, each in model.named_parameters()}
        which, shape = names.get(parameters[place], f"parameter {place}"), tuple(parameters[place].shape)  # type: ignore[call-overload]  # a tensor that is none
        parties = by_value(dict(enumerate(found))).values()
        raise RankMismatchError(
            f"The ranks no longer train the same model: the parameters differ first in {which}, of shape {shape}, "
            f"between {' and '.join(map(ranks_text, parties))}, {self._lockstep.done}. Change parameters only by an "
            "optimizer's step, or alike on every rank: in loops over divided loaders, random numbers and losses differ "
            "between the ranks."
        )


def _checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return a number for each tensor that is the same where all its bits are."""
    sums = []
    with torch.no_grad():
        for tensor in tensors:
            flat = tensor.detach().contiguous().reshape(-1)
            numbers = flat.view(_WHOLE_NUMBERS.get(flat.element_size(), torch.int64))
            sums.append(numbers.sum(dtype=torch.int64).cpu())
    return torch.stack(sums).tolist() if sums else []


def _sizes(name: str, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    return {name: len(tensors), "numbers": sum(each.numel() for each in tensors)}


def models_of(parameters: Sequence[torch.Tensor]) -> list[nn.Module]:
    """Return the outermost modules alive that hold some of these parameters, in the parameters' order.

    Modules are found by the garbage collector: no hook of torch sees those that were copied or unpickled.
    """
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in vars(each)]
    inner = {id(child) for module in modules for child in module.children()}

    def first(module: nn.Module) -> int:
        """Return the number of the first parameter that it holds; a larger one if it holds none."""
        return min((numbers[each] for each in module.parameters() if each in numbers), default=len(numbers))

    found = [(first(module), module) for module in modules if id(module) not in inner]
    return [module for number, module in sorted(found, key=itemgetter(0)) if number < len(numbers)]
