"""The gradients of one process on several ranks: each rank's part is weighed, and averaged where backward() ends."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_patch.compat.private_torch import backward_in_progress, has_gradient_hooks
from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.loaders.hooks import script_line
from ddp_patch.running.lockstep import Act, Counts, Lockstep
from ddp_patch.running.losses import Reduction, reduction_of
from ddp_patch.walks import nested

__all__ = ["Gradients", "PassWeights", "StepWeight", "average", "broadcast", "checksums"]


# As many bytes are averaged at once, as in DistributedDataParallel.
_BUCKET = 25 * 2**20
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def average(tensors: Sequence[torch.Tensor], ranks: int) -> int:
    """Put the mean over all ranks into each of some dense tensors; return how many bytes this rank sent for that.

    The tensors have the same shapes, dtypes and order on every rank. What is equal on all ranks stays as it is, but for
    rounding.
    """
    sent_bytes = 0
    for flat in _flattened(tensors):
        dist.all_reduce(flat.div_(ranks))
        sent_bytes += flat.nbytes
    return sent_bytes


def broadcast(tensors: Sequence[torch.Tensor]) -> None:
    """Make tensors of any dtypes those of rank 0. They have the same shapes, dtypes and order on every rank."""
    for flat in _flattened(tensors):
        dist.broadcast(flat.view(torch.uint8), 0)


@torch.no_grad()
def _flattened(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield flat copies of several tensors each, and put what becomes of each into these tensors."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        yield flat
        for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of one device and dtype together, up to a number of bytes."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for alike in kinds.values():
        ends = np.cumsum([tensor.nbytes for tensor in alike])
        for _, bucket in groupby(zip((ends - 1) // _BUCKET, alike, strict=True), key=itemgetter(0)):
            yield [tensor for _, tensor in bucket]


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return a number for each tensor that is the same where all its bits are."""
    sums = []
    with torch.no_grad():
        for tensor in tensors:
            dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
            flat = dense.detach().contiguous().reshape(-1)
            numbers = flat.view(_WHOLE_NUMBERS.get(flat.element_size(), torch.int64))
            sums.append(numbers.sum(dtype=torch.int64))
    return [int(value) for value in torch.stack([value.cpu() for value in sums])] if sums else []


@dataclass(frozen=True)
class _Whole:
    """The loss of a whole batch, of which this rank has computed a part.

    Attributes:
        root: The operation that computed the part.
        multiplied: What the root is a multiple of, if it is that.
        part: The part's loss.
        whole: The whole batch's.
    """

    root: Any
    multiplied: Any
    part: torch.Tensor
    whole: torch.Tensor

    @classmethod
    def of(cls, root: torch.Tensor, whole: torch.Tensor) -> "_Whole":
        """Return it for the root of a ``backward()``."""
        node: Any = root.grad_fn
        is_multiple = type(node).__name__.startswith(("Mul", "Div"))
        inner = [each for each, _ in node.next_functions if each is not None] if is_multiple else []
        return cls(node, inner[0] if len(inner) == 1 else node, root.detach(), whole)

    def instead(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole batch's value of the root, or of what that is a multiple of."""
        if tensor.grad_fn is self.root or not self.part:
            return self.whole.view(tensor.shape)
        return tensor.detach() * (self.whole / self.part).view(tensor.shape)


# What gradient a parameter has on this rank.
_NONE, _DENSE, _SPARSE = range(3)


@dataclass(eq=False)
class PassWeights:
    """The weights of the batches that one pass over a loader gave.

    Attributes:
        name: What errors call the loader.
        length: How many batches it has; None if that is not known.
        backwards: How often ``backward()`` was called before it.
        given: How many batches it gave.
        is_over: Whether it came to its end.
        weights: All weights that its batches had.
        first: The first tensor of its first batch, while that is alive.
    """

    name: str
    length: int | None
    backwards: int
    given: int = 0
    is_over: bool = False
    weights: set[float] = field(default_factory=set)
    first: Callable[[], torch.Tensor | None] = lambda: None


class StepWeight:
    """Knows which weight the gradient of a ``backward()`` has: that of the batch that the script took last.

    A weight is ranks x samples of this rank's part / samples of the whole batch, so that the mean over the ranks is the
    gradient of the mean over the whole batch.

    Args:
        on_unused: Called with a pass of which all was taken without a ``backward()``.

    Attributes:
        samples: How many samples this rank's part of that batch has, and the whole; None where batches are whole.

    Examples:
        >>> step = StepWeight()
        >>> train = step.begin("train")
        >>> step.take(train, 0.8)
        >>> step.of_backward()
        0.8
    """

    def __init__(self, on_unused: Callable[[PassWeights], object] = lambda of: None) -> None:
        self._on_unused = on_unused
        self._backwards = 0
        self._weight = self._weight_of_sum = 1.0
        self._last: PassWeights | None = None
        self.samples: tuple[int, int] | None = None
        self._taken: list[tuple[PassWeights, float]] = []  # since the last backward()

    def begin(self, name: str, length: int | None = None) -> PassWeights:
        """Return what is known of a pass that begins."""
        return PassWeights(name, length, self._backwards)

    @property
    def name(self) -> str:
        """What errors call the loader whose batch was taken last."""
        return "" if self._last is None else self._last.name

    @property
    def has_taken(self) -> bool:
        """Whether the script took a batch since the last ``backward()``."""
        return bool(self._taken)

    def take(
        self,
        of: PassWeights,
        weight: float,
        batch: Any = None,
        *,
        weight_of_sum: float = 1.0,
        samples: tuple[int, int] | None = None,
    ) -> None:
        """Note that the script took a batch of a pass.

        Args:
            of: The pass.
            weight: The weight of a loss that is a mean over samples.
            batch: The batch.
            weight_of_sum: The weight of a loss that is their sum.
            samples: How many samples this rank's part has, and the whole batch.
        """
        of.given += 1
        if of.given == 1:
            tensors = (part for _, part in nested(batch) if isinstance(part, torch.Tensor))
            of.first = next(map(weakref.ref, tensors), of.first)
        of.weights.add(weight)
        self._weight, self._weight_of_sum, self._last, self.samples = weight, weight_of_sum, of, samples
        if self._taken and self._taken[-1][0] is not of:
            self._leave_out_what_is_over(of)
        self._taken.append((of, weight))

    def take_whole(self) -> None:
        """Note that the script takes a batch that every rank has whole: gradients are equal, and as they are.

        A batch of a divided pass that was taken before, and waits for its ``backward()``, keeps its weight.
        """
        if not self._taken:
            self._weight, self._weight_of_sum, self._last, self.samples = 1.0, 1.0, None, None

    def end(self, of: PassWeights) -> None:
        """Note that a pass came to its end."""
        of.is_over = True
        if of.given and of.backwards == self._backwards:
            self._on_unused(of)

    def _leave_out_what_is_over(self, current: PassWeights) -> None:
        """Forget batches of other passes that are over: of those the script wanted no gradient.

        A loop that takes as many batches as there are never asks for the end.
        """
        for other in dict.fromkeys(each for each, _ in self._taken if each is not current):
            if not other.is_over and other.given == other.length and other.backwards == self._backwards:
                self.end(other)
        self._taken = [each for each in self._taken if each[0] is current or not each[0].is_over]

    def of_backward(self, *, is_sum: bool = False) -> float:
        """Return the weight of the gradient that ``backward()`` is about to compute.

        Args:
            is_sum: Whether the loss is a sum over samples, so that parts of any size have one weight.

        Raises:
            UnsupportedLoaderError: The script took batches since the last one of which this rank's parts differ, so
                that no weight is right.
        """
        taken, self._taken = self._taken, []
        self._backwards += 1
        if is_sum:
            return self._weight_of_sum
        counted = [(of, weight) for of, weight in taken if of is self._last or of.given > 1]  # not mere looks
        if len({weight for _, weight in counted}) > 1:
            names = " and ".join(dict.fromkeys(of.name for of, _ in counted))
            why = f"several batches of {names} were taken since the last backward()"
            self._refuse(why, [weight for _, weight in counted])
        last = self._last
        is_again = last is not None and last.is_over and not taken and len(last.weights) > 1
        if last is not None and is_again and last.first() is not None:  # as itertools.cycle() keeps them
            why = f"the batches of {last.name} are kept, and used again after its pass"
            self._refuse(why, last.weights, "iterate the loader again instead")
        return self._weight

    def _refuse(self, why: str, weights: Iterable[float], way: str = "call backward() for each batch") -> None:
        listed = ", ".join(f"{weight:.4g}" for weight in sorted(set(weights)))
        raise UnsupportedLoaderError(
            f"The gradient cannot be that of one process: {why}, and this rank's parts of them have different weights "
            f"({listed}), because not all ranks have equally many samples of each. Use batches of a multiple of the "
            f"number of ranks, and drop_last=True; or {way}."
        )


class Gradients:
    """Weighs and averages what ``backward()`` computes, for the parameters of the script's optimizers.

    Args:
        lockstep: Compares what the ranks do; None for a single rank.
        counts: What the script has done so far; the calls and steps are counted here.
        tell: Tells the user something, once.
        on_first_step: Called after the first step of an optimizer.
        on_unused: Called with a divided pass of which all was taken without a ``backward()``.

    Attributes:
        weight: Knows the weight of a ``backward()``.
        why_whole: Why batches cannot be divided; empty if they can.
        sent_bytes: How many bytes this rank has sent.
        averaging_s: How many seconds that took.
        began_s: When the first ``backward()`` began; None before.
    """

    def __init__(
        self,
        lockstep: Lockstep | None,
        counts: Counts,
        tell: Callable[[str], object],
        on_first_step: Callable[[], object],
        on_unused: Callable[[PassWeights], object],
    ) -> None:
        self.weight: StepWeight = StepWeight(on_unused)
        self.why_whole: str = ""
        self._wholes: list[_Whole] = []  # the losses of this step
        self.sent_bytes: int = 0
        self.averaging_s: float = 0.0
        self.began_s: float | None = None
        self._lockstep, self._counts, self._tell, self._on_first_step = lockstep, counts, tell, on_first_step
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._was_loaded = False
        self._is_in_backward = backward_in_progress()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook ``backward()``, ``torch.autograd.grad`` and the steps of optimizers while entered."""
        before, grad = torch.autograd.backward, torch.autograd.grad
        as_it_is: Callable[[Any], Any] = torch.compiler.disable  # a compiled step would trace what communicates

        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> None:
            def run(roots: Any, gradients: Any) -> None:
                before(roots, gradients, retain_graph, create_graph, grad_variables, inputs=inputs)

            if self._is_in_backward():  # as checkpointing calls it
                run(tensors, grad_tensors)
            else:
                self._backward(run, tensors, grad_tensors, create_graph=create_graph)

        def telling_grad(*args: Any, **options: Any) -> Any:
            self.why_whole = self.why_whole or "torch.autograd.grad() is used"
            if self._lockstep is not None and self.weight.samples is not None and not self._is_in_backward():
                self._tell(
                    "torch.autograd.grad() is used: what it returns is of this rank's part of a batch, and is not "
                    "averaged."
                )
            return grad(*args, **options)

        with ExitStack() as stack:
            stack.enter_context(patch.object(torch.autograd, "backward", as_it_is(backward)))
            stack.enter_context(patch.object(torch.autograd, "grad", telling_grad))
            if self._lockstep is not None:
                for name in ("item", "__float__", "__format__"):
                    reading = as_it_is(self._reading(getattr(torch.Tensor, name)))
                    stack.enter_context(patch.object(torch.Tensor, name, reading))
            stack.callback(register_optimizer_step_pre_hook(as_it_is(self._before_step)).remove)
            stack.callback(register_optimizer_step_post_hook(as_it_is(self._after_step)).remove)
            yield

    def _reading(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of tensors that reads the whole batch's loss in the place of a part's."""

        def reading(tensor: torch.Tensor, *args: Any) -> Any:
            if tensor.grad_fn is None or self.weight.samples is None or tensor.numel() != 1:
                return read(tensor, *args)
            for whole in self._wholes:
                if tensor.grad_fn in {whole.root, whole.multiplied}:
                    return read(whole.instead(tensor), *args)
            self._tell(
                f"What is read at {script_line(sys._getframe(1))} may be of this rank's part of a batch: only a loss "
                "that is read after its own backward() is surely the whole batch's."
            )
            return read(tensor, *args)

        return reading

    def add(self, optimizer: Optimizer) -> None:
        """Note an optimizer, whose parameters' gradients are averaged from now on."""
        self._optimizers.append(weakref.ref(optimizer))
        optimizer.register_load_state_dict_post_hook(self._note_loaded)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters of all optimizers, in the order in which the script gave them."""
        alive = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        groups = [group["params"] for optimizer in alive for group in optimizer.param_groups]
        return list(dict.fromkeys(each for group in groups for each in group))

    def _note_loaded(self, optimizer: Optimizer) -> None:
        self._was_loaded = True

    def _backward(self, run: Callable[[Any, Any], None], tensors: Any, gradients: Any, *, create_graph: bool) -> None:
        self._counts.backwards += 1
        if self._lockstep is None:
            run(tensors, gradients)
            return
        if self.began_s is None:
            self.began_s = perf_counter()
        if create_graph and self.weight.samples is None:
            self.why_whole = "backward(create_graph=True) is called"
            run(tensors, gradients)  # of whole batches, so the same on every rank
            return
        if create_graph:
            raise UnsupportedLoaderError(
                "backward(create_graph=True) cannot be averaged over the ranks: what is computed of these gradients "
                "later would be of this rank's part alone. Use torch.autograd.grad(..., create_graph=True) for the "
                "term that needs it, and backward() for their sum."
            )
        if self.weight.samples is not None and self.weight.has_taken and not self.parameters:
            raise UnsupportedLoaderError(
                "backward() is called for a batch that is divided over the ranks, and there is no optimizer, so it is "
                "not known which gradients to average. Let an optimizer of torch.optim change what is trained; where "
                "nothing is, pass --whole with the line that makes the loader."
            )
        roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if self.weight.has_taken:
            self._wholes = []
        weight = self.weight.of_backward(is_sum=self._is_sum(roots))
        with torch.enable_grad():
            weighed = [root * weight if isinstance(root, torch.Tensor) else root for root in roots]
        run(weighed, gradients)
        began_s = perf_counter()
        pairs = zip(roots, weighed, strict=True)
        read = [(root, each.detach().clone()) for root, each in pairs if torch.is_tensor(root) and root.numel() == 1]
        self._average(self._lockstep, [whole for _, whole in read])
        self._wholes += [_Whole.of(*pair) for pair in read]
        self.averaging_s += perf_counter() - began_s

    def _is_sum(self, roots: Any) -> bool:
        """Return whether a loss is a sum over the samples of a divided batch; tell the user where nobody knows."""
        if self.weight.samples is None:
            return False
        part, whole = self.weight.samples
        kinds = {reduction_of(root, part, whole) for root in roots if isinstance(root, torch.Tensor)}
        if kinds & {Reduction.BOTH, Reduction.WEIGHED} or len(kinds - {Reduction.UNKNOWN}) > 1:
            self._tell(
                f"The loss is {' and '.join(sorted(kind.value for kind in kinds))}, so its gradient is not that of the "
                "whole batch: each rank has its own sum, or sum of weights. Let the loss be a mean over samples."
            )
        return kinds == {Reduction.SUM}

    def _average(self, lockstep: Lockstep, more: Sequence[torch.Tensor]) -> None:
        parameters = self.parameters
        kinds = _kinds(parameters)
        if not lockstep.meet(Act.BACKWARD, usual=hash(kinds) >> 2, state=self._loaded_state()):
            lockstep.meet_alike(Act.BACKWARD, lambda: {"parameters": len(self.parameters)})
            parameters = self.parameters
            kinds = tuple(map(max, zip(*lockstep.gathered(_kinds(parameters)), strict=True)))
        for parameter, kind in zip(parameters, kinds, strict=True):
            if parameter.grad is None and kind != _NONE:
                parameter.grad = torch.zeros_like(parameter) if kind == _DENSE else _no_rows(parameter)
        if any(map(has_gradient_hooks, parameters)):
            self.why_whole = "a parameter has a hook for its gradient"
            if self.weight.samples is not None:
                self._tell(
                    "A parameter has a hook for its gradient: the hook sees the gradient of this rank's part of a "
                    "batch, before it is averaged. Change gradients after backward() instead, as clip_grad_value_() "
                    "does."
                )
        dense = [each.grad for each in parameters if each.grad is not None and not each.grad.is_sparse]
        self.sent_bytes += average([*dense, *more], lockstep.ranks)
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = self._sparse_mean(lockstep, parameter.grad)

    def _loaded_state(self) -> int:
        """Return a checksum of what the optimizers hold if a state was loaded since the last call, otherwise 0."""
        if not self._was_loaded:
            return 0
        self._was_loaded = False
        alive = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        states = [optimizer.state[each] for optimizer in alive for each in self.parameters if each in optimizer.state]
        held = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        options = [value for optimizer in alive for group in optimizer.param_groups for value in group.values()]
        numbers = hash(tuple(value for value in options if isinstance(value, int | float)))  # alike in every process
        return (sum(checksums(held)) + numbers) % 2**62 or 1

    def _sparse_mean(self, lockstep: Lockstep, gradient: torch.Tensor) -> torch.Tensor:
        own = gradient.coalesce()
        parts = lockstep.gathered((own.indices().cpu(), own.values().cpu()))
        indices = torch.cat([part for part, _ in parts], dim=1).to(own.device)
        values = torch.cat([part for _, part in parts]).to(own.device)
        self.sent_bytes += own.values().nbytes
        return torch.sparse_coo_tensor(indices, values / lockstep.ranks, own.shape).coalesce()

    def _before_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        if self._lockstep is None:
            return
        is_whole = self.weight.samples is None
        if not any(ref() is optimizer for ref in self._optimizers):
            raise UnsupportedLoaderError(
                f"The {type(optimizer).__name__} was made before its script ran as one process, so nobody has averaged "
                "its gradients. Make it within autopatch(as_one_process=True)."
            )
        if self._is_in_backward() and not is_whole:
            raise UnsupportedLoaderError(
                f"The {type(optimizer).__name__} makes a step while backward() runs, as hooks of parameters do, and "
                "gradients are averaged when backward() has ended. Make the step after it."
            )
        has_closure = any(map(callable, [*args, options.get("closure")]))
        if not self._counts.backwards and not has_closure and not is_whole:
            raise UnsupportedLoaderError(
                f"The {type(optimizer).__name__} makes a step, and no backward() was called, so its gradients are of "
                "this rank's part of the data and nobody has averaged them. torch.autograd.grad() and gradients that "
                "are set by hand cannot be averaged: call backward(), or start the script in one process."
            )

    def _after_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        self._counts.steps += 1
        if self._counts.steps == 1:
            self._on_first_step()


def _kinds(parameters: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return what gradient each parameter has."""
    return tuple(_NONE if each.grad is None else _SPARSE if each.grad.is_sparse else _DENSE for each in parameters)


def _no_rows(parameter: torch.Tensor) -> torch.Tensor:
    """Return the sparse gradient of an embedding of which no row was used."""
    rows = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(rows, parameter.new_zeros(0, *parameter.shape[1:]), parameter.shape)
