"""The models that every rank has a copy of: found, made equal, and compared."""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

import torch
from torch import nn

from ddp_patch.errors import RankMismatchError, UnsupportedLoaderError
from ddp_patch.ranks.exchange import by_value, ranks_text
from ddp_patch.running.gradients import Gradients, broadcast, checksums
from ddp_patch.running.lockstep import Act, Counts, Lockstep

__all__ = ["Replicas", "batch_norms", "models_of", "sync_batch_norms"]


# torch's own, and what derives from them; SyncBatchNorm does not.
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Replicas:
    """The models that each rank has its own copy of, and that stay equal.

    Args:
        lockstep: The ranks; None for a single one.
        gradients: Knows the parameters of the script's optimizers.
        counts: What the script has done so far.
        tell: Tells the user something, once.

    Attributes:
        may_have_changed: Whether a pass in which the script may have trained has ended since parameters were compared.
    """

    def __init__(
        self, lockstep: Lockstep | None, gradients: Gradients, counts: Counts, tell: Callable[[str], object]
    ) -> None:
        self._lockstep, self._gradients, self._counts, self._tell = lockstep, gradients, counts, tell
        self.may_have_changed: bool = False
        self._known: tuple[tuple[int, ...], list[weakref.ref[nn.Module]]] = ((), [])

    def models(self) -> list[nn.Module]:
        """Return the models that hold the optimizers' parameters; those that did so last, if no optimizer is alive."""
        parameters = self._gradients.parameters
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
        if self._lockstep is not None:
            self._lockstep.meet_alike(Act.EVALUATION, lambda: _sizes("buffers", self.buffers()))
            broadcast(self.buffers())

    def make_equal(self, *, sync_batchnorm: bool) -> None:
        """Make parameters and buffers those of rank 0, and see to batch normalisation.

        Args:
            sync_batchnorm: Whether to replace its layers by torch's ``SyncBatchNorm``; otherwise the user is told.
        """
        if self._lockstep is None:
            return
        self._lockstep.meet_alike(Act.OPTIMIZER, lambda: _sizes("parameters", self._held()))
        models = self.models()
        if sync_batchnorm:
            sync_batch_norms(models)
        elif names := batch_norms(models):
            self._tell(
                f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: batch normalisation sees this "
                "rank's part of each batch, not all of it. On accelerators, --sync-batchnorm puts torch's "
                "SyncBatchNorm in its place."
            )
        broadcast(self._held())

    def _held(self) -> list[torch.Tensor]:
        return [*self._gradients.parameters, *self.buffers()]

    def meet(self, act: Act) -> None:
        """Meet, and compare the parameters if the script may have trained them since the last time.

        Raises:
            RankMismatchError: The parameters differ; every rank raises it. Or as ``Lockstep.meet``.
            MissingRanksError: As ``Lockstep.meet``.
        """
        if self._lockstep is None:
            return
        parameters = self._trained() if self.may_have_changed or act is Act.END else []
        self.may_have_changed = False
        sums = checksums(parameters)
        if self._lockstep.meet(act, usual=hash(tuple(sums)) >> 2):
            return
        of_ranks = self._lockstep.gathered(sums)
        if len(set(map(len, of_ranks))) > 1:  # some have not collected all garbage yet
            return
        place, found = next((at, found) for at, found in enumerate(zip(*of_ranks, strict=True)) if len(set(found)) > 1)
        named = (pair for model in self.models() for pair in model.named_parameters())
        names: dict[torch.Tensor, str] = {each: name for name, each in named}
        which, shape = names.get(parameters[place], f"parameter {place}"), tuple(parameters[place].shape)
        parties = by_value(dict(enumerate(found))).values()
        raise RankMismatchError(
            f"The ranks no longer train the same model: the parameters differ first in {which}, of shape {shape}, "
            f"between {' and '.join(map(ranks_text, parties))}, {self._counts}. Change parameters only by an "
            "optimizer's step, or alike on every rank: in loops over divided loaders, random numbers and losses differ "
            "between the ranks."
        )

    def _trained(self) -> list[torch.Tensor]:
        """Return what is trained, if the script has some optimizer still: its optimizers' and models' parameters."""
        given = self._gradients.parameters
        trained = [each for model in self.models() for each in model.parameters() if each.requires_grad]
        return list(dict.fromkeys([*given, *trained])) if given else []


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


def batch_norms(models: Iterable[nn.Module]) -> list[str]:
    """Return the names of the layers that normalise by the batch that they see, as a part of a batch is not whole."""
    return [
        f"{type(model).__name__}{name and f'.{name}'}"
        for model in models
        for name, module in model.named_modules()
        if isinstance(module, _BATCH_NORMS)
    ]


def sync_batch_norms(models: Iterable[nn.Module]) -> None:
    """Put torch's ``SyncBatchNorm`` in the place of each batch normalisation layer.

    Raises:
        UnsupportedLoaderError: torch has it on accelerators only, or a layer is no part of a model.
    """
    for model in models:
        if not batch_norms([model]):
            continue
        if isinstance(model, _BATCH_NORMS):
            raise UnsupportedLoaderError(
                f"--sync-batchnorm cannot replace a {type(model).__name__} that is no part of a model. Put it into an "
                "nn.Module, or leave the option out."
            )
        device = next(iter(model.parameters())).device
        if device.type == "cpu":
            raise UnsupportedLoaderError(
                f"--sync-batchnorm cannot replace {batch_norms([model])[0]}: torch's SyncBatchNorm runs on "
                "accelerators only, and the model is on the CPU. Leave the option out, or move the model first."
            )
        nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
