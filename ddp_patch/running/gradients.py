"""The gradients of one process on several ranks: each rank's part is weighed, and averaged where backward() ends."""

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_patch.compat.private_torch import backward_in_progress, has_gradient_hooks
from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.loaders.hooks import script_line
from ddp_patch.running.lockstep import Lockstep, RandomNumbers, Replicas
from ddp_patch.walks import nested

__all__ = ["MEAN", "SUM", "WEIGHED", "Gradients", "PassWeights", "StepWeight", "is_additive", "reductions_of"]


# ---- what weight a gradient has ----


@dataclass(eq=False)
class PassWeights:
    """The weights of the batches that one pass over a divided loader gave.

    Attributes:
        name: What errors call the loader.
        has_trained: Whether ``backward()`` was called after one of them.
        is_over: Whether it came to its end, or the next one over its loader began.
        weights: Those of its batches.
        first: The first tensor of its first batch, while that is alive.
    """

    name: str
    has_trained: bool = False
    is_over: bool = False
    weights: list[float] = field(default_factory=list)
    first: Callable[[], torch.Tensor | None] = lambda: None


class StepWeight:
    """Knows which weight the gradient of a ``backward()`` has: that of the batch that the script took last.

    A weight is ranks x samples of this rank's part / samples of the whole batch, so that the mean over the ranks is the
    gradient of the mean over the whole batch.

    Attributes:
        samples: How many samples this rank's part of that batch has, and the whole; None where batches are whole.
        taken: The passes and weights of the batches that were taken since the last ``backward()``.

    Examples:
        >>> step, train = StepWeight(), PassWeights("train")
        >>> step.take(train, 0.8, (2, 5))
        >>> step.of_backward()
        0.8
    """

    def __init__(self) -> None:
        self._weight = 1.0
        self._last: PassWeights | None = None
        self.samples: tuple[int, int] | None = None
        self.taken: list[tuple[PassWeights, float]] = []

    @property
    def name(self) -> str:
        """What errors call the loader of the batch that was taken last."""
        return "" if self._last is None else self._last.name

    def take(self, of: PassWeights, weight: float, samples: tuple[int, int], batch: object = None) -> None:
        """Note that the script took a batch of a pass.

        Args:
            of: The pass.
            weight: The weight of a loss that is a mean over samples.
            samples: How many samples this rank's part has, and the whole batch.
            batch: The batch.
        """
        if not of.weights:
            tensors = (part for _, part in nested(batch) if isinstance(part, torch.Tensor))
            of.first = next(map(weakref.ref, tensors), of.first)
        of.weights.append(weight)
        self._weight, self._last, self.samples = weight, of, samples
        # Of what is over by now, the script wanted no gradient.
        self.taken = [*(each for each in self.taken if each[0] is of or not each[0].is_over), (of, weight)]

    def take_whole(self) -> None:
        """Note that the script takes a batch that every rank has whole: gradients are equal, and as they are.

        A batch of a divided pass that was taken before, and waits for its ``backward()``, keeps its weight.
        """
        if not self.taken:
            self._weight, self._last, self.samples = 1.0, None, None

    def of_backward(self, *, is_sum: bool = False) -> float:
        """Return the weight of a ``backward()``.

        Args:
            is_sum: Whether the loss is a sum over samples, not a mean.

        Raises:
            UnsupportedLoaderError: The script took batches since the last one of which this rank's parts differ, so
                that no weight is right.
        """
        taken, self.taken = self.taken, []
        for of, _ in taken:
            of.has_trained = True
        if is_sum and self.samples is not None:
            part, whole = self.samples
            return self._weight * whole / part if part else 0.0
        last = self._last
        wanted = [(of, weight) for of, weight in taken if of is last or len(of.weights) > 1]  # not mere looks
        names = " and ".join(dict.fromkeys(of.name for of, _ in wanted))
        self._refuse(f"several batches of {names} were taken since the last backward()", {w for _, w in wanted})
        if last is not None and last.is_over and not taken and last.first() is not None:  # as itertools.cycle() keeps
            self._refuse(f"the batches of {last.name} are kept, and used again after its pass", {*last.weights})
        return self._weight

    def _refuse(self, why: str, weights: set[float]) -> None:
        if len(weights) > 1:
            listed = ", ".join(f"{weight:.4g}" for weight in sorted(weights))
            raise UnsupportedLoaderError(
                f"The gradient cannot be that of one process: {why}, and this rank's parts of them have different "
                f"weights ({listed}). Use batches of a multiple of the number of ranks, and drop_last=True; or iterate "
                "the loader again for each pass, and call backward() for each batch."
            )


# ---- what a loss is of the samples of a batch ----

MEAN, SUM, WEIGHED = "a mean", "a sum", "a mean by weights of the samples"
# Operations that change nothing of what a loss is of its samples.
_PASSED_ON = ("Neg", "ToCopy", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Clone", "Alias", "Mul")
_ADDED = ("Add", "Sub")
_MOST_OPERATIONS = 32  # above the reductions: a loss is a short expression of them
_SAVED = {1: MEAN, 2: SUM}  # as torch saves them
_ROUNDING = 1e-6  # of the largest derivative: below it, one is zero
_grad = torch.autograd.grad


def reductions_of(loss: torch.Tensor, part: int, whole: int) -> set[str]:
    """Return what the terms of a loss are of the samples of this rank's part of a batch, where that is known.

    A sum that is divided by the number of samples is a mean; one that is divided by the number of samples of the whole
    batch is a sum. A term that is of no batch, such as a penalty of weights, does not count.

    Args:
        loss: The root of a ``backward()``.
        part: How many samples this rank's part has.
        whole: How many the whole batch has.

    Examples:
        >>> x = torch.ones(4, requires_grad=True)
        >>> [*map(str, (*reductions_of(x.sum() / 4, 4, 8), *reductions_of(x.sum() / 8, 4, 8)))]
        ['a mean', 'a sum']
        >>> reductions_of(x.norm(), 4, 8)
        set()
    """
    return {*_terms(loss.grad_fn, 1.0, part, whole, [_MOST_OPERATIONS])}


def _terms(node: Any, by: float, part: int, whole: int, left: list[int]) -> Iterator[str]:
    """Yield what the terms are that an operation gives, and that constants divide after it."""
    left[0] -= 1
    if node is None or left[0] < 0:
        return
    name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
    inner = [each for each, _ in node.next_functions]
    reduction = _SAVED.get(getattr(node, "_saved_reduction", 0), MEAN if name == "Mean" else "")
    if name == "Sum" and (*getattr(node, "_saved_self_sym_sizes", ()), 0)[0] == part:
        reduction = SUM
    if reduction == MEAN:
        yield WEIGHED if getattr(node, "_saved_weight", None) is not None and name.startswith("Nll") else MEAN
    elif reduction == SUM:
        yield from [SUM] if math.isclose(by, 1) or math.isclose(by, whole) else [MEAN] if math.isclose(by, part) else []
    elif name == "Div" and inner[1:] in ([], [None]):
        divisor = getattr(node, "_saved_other", None)
        constant = float(divisor) if isinstance(divisor, torch.Tensor) and divisor.numel() == 1 else 1.0
        yield from _terms(inner[0], by * constant, part, whole, left)
    elif name in _ADDED or (name in _PASSED_ON and sum(each is not None for each in inner) == 1):
        for each in inner:
            yield from _terms(each, by, part, whole, left)


def is_additive(loss: torch.Tensor, outputs: torch.Tensor, samples: int) -> bool:
    """Return whether a loss adds up what its samples give, as far as a model's outputs for these show.

    A mixed second derivative by the outputs of two samples is zero then. It is computed between two halves of them.

    Args:
        loss: The loss.
        outputs: What the loss was computed from, with a row for each sample, or several such tables after each other.
        samples: How many samples there are.

    Examples:
        >>> x = torch.arange(4.0, requires_grad=True)
        >>> is_additive(x.square().mean(), x, 4), is_additive(x.square().mean().sqrt(), x, 4)
        (True, False)
    """
    table = samples if len(outputs) % samples == 0 else len(outputs)
    is_first = (torch.arange(len(outputs), device=outputs.device) % table) < table // 2
    try:
        (slopes,) = _grad(loss, outputs, create_graph=True)
        some = slopes[is_first]
        numbers = torch.arange(some.numel(), dtype=some.dtype, device=some.device)
        (changes,) = _grad((some * numbers.cos().view_as(some)).sum(), outputs, retain_graph=True)
    except Exception:  # noqa: BLE001 - the loss is not of these, or is linear; or its operations cannot be derived twice
        return True
    return not changes[~is_first].abs().max() > _ROUNDING * changes.abs().max()


# ---- what backward() does ----


class Gradients:
    """Weighs and averages what ``backward()`` computes, for the parameters of the script's optimizers.

    Args:
        lockstep: The ranks; the calls and steps are counted there.
        replicas: The script's optimizers.
        numbers: Which random numbers it draws: this rank's own from the first step on.
        tell: Tells the user something, once.

    Attributes:
        weight: Knows the weight of a ``backward()``.
    """

    def __init__(
        self, lockstep: Lockstep, replicas: Replicas, numbers: RandomNumbers, tell: Callable[[str], object]
    ) -> None:
        self.weight: StepWeight = StepWeight()
        self._why_whole = ""
        # By the operation that computed a part's loss: that, and the whole batch's; of this step.
        self._wholes: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._outputs: list[torch.Tensor] = []  # of the model that ran last, while its loss is looked at
        self._samples: int | None = None
        self._lockstep, self._replicas, self._numbers, self._tell = lockstep, replicas, numbers, tell
        self._is_in_backward = backward_in_progress()

    @property
    def why_whole(self) -> str:
        """Why batches cannot be divided; empty if they can."""
        return self._why_whole if self._replicas.parameters else "no optimizer of torch.optim"

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook ``backward()``, ``torch.autograd.grad``, reading a loss and steps of optimizers while entered."""
        before, grad = torch.autograd.backward, torch.autograd.grad
        as_it_is: Callable[[Any], Any] = torch.compiler.disable  # a compiled step would trace what communicates

        def backward(tensors: Any, *args: Any, **options: Any) -> None:
            if self._is_in_backward():  # as checkpointing calls it
                before(tensors, *args, **options)
            else:
                create_graph = options.get("create_graph", args[2] if len(args) > 2 else False)
                self._backward(lambda roots: before(roots, *args, **options), tensors, create_graph=create_graph)

        def telling_grad(*args: Any, **options: Any) -> Any:
            if not self._is_in_backward() and not torch.compiler.is_compiling():  # which calls it itself
                self._want_whole("torch.autograd.grad() is used")
            return grad(*args, **options)

        with ExitStack() as stack:
            stack.enter_context(patch.object(torch.autograd, "backward", as_it_is(backward)))
            stack.enter_context(patch.object(torch.autograd, "grad", as_it_is(telling_grad)))
            if self._lockstep.ranks > 1:
                for name in ("item", "__float__", "__format__"):
                    reading = as_it_is(self._reading(getattr(torch.Tensor, name)))
                    stack.enter_context(patch.object(torch.Tensor, name, reading))
            stack.callback(register_optimizer_step_pre_hook(as_it_is(self._before_step)).remove)
            stack.callback(register_optimizer_step_post_hook(as_it_is(self._after_step)).remove)
            yield

    @contextmanager
    def looking(self, samples: int | None) -> Iterator[None]:
        """Look, while entered, at what a loss is of the samples of a batch that every rank has whole.

        Args:
            samples: How many these are; None if that is not known.
        """

        def note(_model: object, _args: object, output: object) -> None:
            parts = (part for _, part in nested(output) if torch.is_tensor(part) and part.requires_grad)
            self._outputs = [part for part in parts if part.dim() and len(part) > 1] or self._outputs

        with ExitStack() as stack:
            for model in self._replicas.models() if self._lockstep.ranks > 1 else ():
                stack.callback(model.register_forward_hook(note).remove)
            self._samples = samples
            try:
                yield
            finally:
                self._outputs = []

    def _look_at(self, loss: torch.Tensor) -> None:
        """Keep batches whole if their parts' losses would not make up the whole's."""
        samples = self._samples or len(self._outputs[0])
        if WEIGHED in reductions_of(loss, samples, samples):
            self._want_whole(f"its loss is {WEIGHED}")
        if not all(is_additive(loss, each, samples) for each in self._outputs):
            self._want_whole("its loss does not add up over samples")

    def _reading(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of tensors that reads the whole batch's loss in the place of a part's."""

        def reading(tensor: torch.Tensor, *args: Any) -> Any:
            if tensor.grad_fn is None or self.weight.samples is None or tensor.numel() != 1:
                return read(tensor, *args)
            if (found := self._wholes.get(tensor.grad_fn)) is not None:
                part, whole = (each.view(tensor.shape) for each in found)
                is_root = not part or torch.equal(tensor.detach(), part)
                return read(whole if is_root else tensor.detach() * (whole / part), *args)
            self._tell(
                f"What is read at {script_line(sys._getframe(1))} may be of this rank's part of a batch: only a loss "
                "that is read after its own backward() is surely the whole batch's."
            )
            return read(tensor, *args)

        return reading

    def _want_whole(self, why: str, *, is_error: bool = False) -> None:
        """Keep batches whole because of what the script does; tell it, or refuse it, where they are divided already."""
        self._why_whole = self._why_whole or why
        if self.weight.samples is None or self._lockstep.ranks == 1:
            return
        text = (
            f"The batches of {self.weight.name} are divided over the ranks, and {why}: what that gives is of a part "
            f"of a batch, and is not averaged. Pass --whole {self.weight.name}: then every rank gets all."
        )
        if is_error:
            raise UnsupportedLoaderError(text)
        self._tell(text)

    def _backward(self, run: Callable[[Any], None], tensors: Any, *, create_graph: bool) -> None:
        self._lockstep.backwards += 1
        if self._lockstep.ranks == 1:
            run(tensors)
            return
        if create_graph:
            self._want_whole("backward(create_graph=True) is called", is_error=True)
            run(tensors)  # of whole batches, so the same on every rank
            return
        if self.weight.samples is not None and self.weight.taken and not self._replicas.parameters:
            self._want_whole("there is no optimizer of torch.optim", is_error=True)
        roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        for root in roots if self._outputs and len(roots) == 1 else ():
            self._look_at(root)
        if self.weight.taken:
            self._wholes = {}
        weight = self.weight.of_backward(is_sum=self._is_sum(roots))
        with torch.enable_grad():
            weighed = [root * weight if isinstance(root, torch.Tensor) else root for root in roots]
        run(weighed)
        pairs = zip(roots, weighed, strict=True)
        read = [(root, each.detach().clone()) for root, each in pairs if torch.is_tensor(root) and root.numel() == 1]
        self._average([whole for _, whole in read])
        for root, whole in read:
            node: Any = root.grad_fn
            of_one = [each for each, _ in getattr(node, "next_functions", ()) if each is not None]
            is_multiple = type(node).__name__.startswith(("Mul", "Div")) and len(of_one) == 1
            for each in [node, *of_one] if is_multiple else [node]:
                self._wholes[each] = root.detach(), whole

    def _is_sum(self, roots: Iterable[Any]) -> bool:
        """Return whether a loss is a sum over the samples of a divided batch; tell the user where nobody knows."""
        if self.weight.samples is None:
            return False
        kinds = {kind for root in roots if torch.is_tensor(root) for kind in reductions_of(root, *self.weight.samples)}
        if WEIGHED in kinds or len(kinds) > 1:
            self._tell(
                f"The loss is {' and '.join(sorted(kinds))}, so its gradient is not that of the whole batch: each rank "
                "has its own sum, or sum of weights. Let the loss be a mean over samples."
            )
        return kinds == {SUM}

    def _average(self, more: Sequence[torch.Tensor]) -> None:
        parameters = self._replicas.parameters
        have = [each.grad is not None for each in parameters]
        if not self._lockstep.meet("calls backward()", tuple(have)):
            self._lockstep.meet_alike("calls backward()", lambda: self._replicas.parameters)
            parameters = self._replicas.parameters
            of_ranks = self._lockstep.gathered([each.grad is not None for each in parameters])
            have = list(map(any, zip(*of_ranks, strict=True)))
        if any(map(has_gradient_hooks, parameters)):
            self._want_whole("a parameter has a hook for its gradient")
        used = [each for each, is_used in zip(parameters, have, strict=True) if is_used]
        for each in used:
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        dense = [each.grad for each in used if each.grad is not None and not each.grad.is_sparse]
        if len(dense) < len(used):
            self._want_whole("a gradient is sparse", is_error=True)
        self._lockstep.average([*more, *dense])

    def _before_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        if self._lockstep.ranks == 1:
            return
        name = type(optimizer).__name__
        if not self._replicas.has(optimizer):
            raise UnsupportedLoaderError(
                f"The {name} was made before its script ran as one process, so nobody has averaged its gradients. Make "
                "it within autopatch(as_one_process=True)."
            )
        if self._is_in_backward():
            self._want_whole(f"the {name} makes a step while backward() runs", is_error=True)

    def _after_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        self._lockstep.steps += 1
        self._numbers.begin_own()
