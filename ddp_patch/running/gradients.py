"""The gradients of one process on several ranks: each rank's part is weighed, and averaged where backward() ends."""

import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from linecache import getline
from threading import current_thread, main_thread
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_patch.compat.private_torch import backward_in_progress, has_gradient_hooks, operation_number, operations_so_far
from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.loaders.hooks import script_line
from ddp_patch.running.lockstep import Lockstep, RandomNumbers, Replicas
from ddp_patch.running.losses import COMPILED, MEAN, SUM, UNKNOWN, WEIGHED, Losses, Reductions, is_additive
from ddp_patch.walks import nested

__all__ = ["Gradients", "PassWeights", "StepWeight"]


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
        was_divided: Whether there was a batch that is not whole.
        begins: How many operations that have a gradient were there when it was taken.
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
        self.was_divided: bool = False
        self.begins: int = 0
        self.taken: list[tuple[PassWeights, float]] = []

    @property
    def name(self) -> str:
        """What errors call the loader of the batch that was taken last."""
        return "" if self._last is None else self._last.name

    @property
    def is_over(self) -> bool:
        """Whether the pass that gave the batch that was taken last is over."""
        return self._last is not None and self._last.is_over

    def take(self, of: PassWeights, weight: float, samples: tuple[int, int], batch: object = None) -> None:
        """Note that the script took a batch of a pass.

        Args:
            of: The pass.
            weight: The weight of a loss that is a mean over samples.
            samples: How many samples this rank's part has, and the whole batch.
            batch: The batch.
        """
        self.was_divided, self.begins = True, operations_so_far()
        if not of.weights:
            tensors = (part for _, part in nested(batch) if isinstance(part, torch.Tensor))
            of.first = next(map(weakref.ref, tensors), of.first)
        of.weights.append(weight)
        self._weight, self._last, self.samples = weight, of, samples
        # The script wanted no gradient from passes that are over by now.
        self.taken = [*(each for each in self.taken if each[0] is of or not each[0].is_over), (of, weight)]

    def take_whole(self) -> None:
        """Note that the script takes a batch that every rank has whole: gradients are equal, and as they are.

        A batch of a divided pass that was taken before, and waits for its ``backward()``, keeps its weight.
        """
        self.taken = [each for each in self.taken if not each[0].is_over]
        if not self.taken:
            self._weight, self._last, self.samples = 1.0, None, None

    def of_loss(self, *, is_sum: bool) -> float:
        """Return the weight of a loss of the batch that was taken last, which is a sum over samples or a mean."""
        part, whole = self.samples or (1, 1)
        return self._weight if not is_sum else self._weight * whole / part if part else 0.0

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
            return self.of_loss(is_sum=is_sum)
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


# ---- what backward() does ----

_detach, _tolist = torch.Tensor.detach, torch.Tensor.tolist
# Methods of tensors by which a script reads numbers; those of torch and of this package that read more of them.
_READS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__format__", "__repr__")
_NOT_THE_SCRIPT = ("torch.", "ddp_patch.")
# A product with the size of a batch, in a line that reads a loss.
_BY_SAMPLES = re.compile(r"\*.*(\.size\(|\.shape\b|\blen\()|(\.size\(|\.shape\b|\blen\().*\*")
_MOST_READ = 8  # numbers of a tensor that are noted


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
        self._losses = Losses()
        self._outputs: list[torch.Tensor] = []  # of the model that ran last, while its loss is looked at
        self._is_looking = self._has_own_leaves = False
        self._samples: int | None = None
        self._looked_at: set[tuple[str, int]] = set()  # lines
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
                for name in _READS:
                    reading = as_it_is(self._reading(getattr(torch.Tensor, name)))
                    stack.enter_context(patch.object(torch.Tensor, name, reading))
                data: Any = torch.Tensor.data
                of_whole = as_it_is(lambda tensor: _detach(self._whole_of(tensor)))
                stack.enter_context(patch.object(torch.Tensor, "detach", of_whole))
                whole_data = property(lambda tensor: data.__get__(self._whole_of(tensor)), data.__set__)
                stack.enter_context(patch.object(torch.Tensor, "data", whole_data))
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
            self._samples, self._is_looking = samples, self._lockstep.ranks > 1
            kept = self._replicas.kept() if self._is_looking else {}
            try:
                yield
            finally:
                self._outputs, self._is_looking = [], False
                after = self._replicas.kept() if kept else {}
                if changed := [name for name in after if after[name] != kept.get(name)]:
                    self._want_whole(f"the model keeps something of its batches in {changed[0]}")

    def _look_at(self, loss: torch.Tensor) -> None:
        """Keep batches whole if their parts' losses would not make up the whole's."""
        samples = self._samples or (len(self._outputs[0]) if self._outputs else 0)
        if not samples:
            return
        kinds = Reductions(samples, samples, samples, {*self._replicas.parameters}).of(loss) - {COMPILED}
        if loss.numel() > 1:
            self._want_whole("backward() is called for several numbers")
        elif WEIGHED in kinds or UNKNOWN in kinds or len(kinds) > 1:
            self._want_whole(f"its loss is {' and '.join(sorted(kinds))}")
        if not all(is_additive(loss, each, samples) for each in self._outputs):
            self._want_whole("its loss does not add up over samples")
        self._has_own_leaves = self._has_own_leaves or bool(self._own_leaves([loss]))

    def _own_leaves(self, roots: Iterable[Any]) -> list[torch.Tensor]:
        """Return what gets a gradient and is no parameter, such as a batch for which the script wants one."""
        todo, seen = [root.grad_fn for root in roots if torch.is_tensor(root)], set[Any]()
        leaves = []
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                todo += [inner for inner, _ in node.next_functions]
                leaves += [node.variable] if hasattr(node, "variable") else []
        trained = {*self._replicas.parameters}
        return [each for each in leaves if each not in trained and not isinstance(each, torch.nn.Parameter)]

    def _reading(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of tensors that reads the whole batch's loss in the place of a part's, and notes the rest."""

        def reading(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            whole = self._whole_of(tensor)
            found = read(whole, *args, **options)
            frame = sys._getframe(2)  # above what keeps this from being compiled
            if whole is not tensor:
                self._look_at_line(frame)
                return found
            if not self.weight.was_divided or not self._lockstep.notes_reads:
                return found
            if not str(frame.f_globals.get("__name__")).startswith(_NOT_THE_SCRIPT):
                numbers = [*map(float, _tolist(_detach(tensor).flatten()[:_MOST_READ].real))]
                size = f"{tuple(tensor.shape)} " if tensor.dim() else ""
                self._lockstep.note_read(size + ", ".join(f"{each:.6g}" for each in numbers), frame)  # but for rounding
            return found

        return reading

    def _look_at_line(self, frame: FrameType) -> None:
        """Tell the user, where a line multiplies the whole batch's loss by how many samples a batch has."""
        place = frame.f_code.co_filename, frame.f_lineno
        if place not in self._looked_at and _BY_SAMPLES.search(getline(*place)):
            self._tell(
                f"At {script_line(frame)}, the loss of a whole batch is multiplied by the size of this rank's part: "
                "divide the sum of these by the sum of the sizes, not by the number of all samples."
            )
        self._looked_at.add(place)

    def _whole_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole batch's loss for a part's, and of all that is a mean or a sum over samples; else the tensor.

        What is proportional to the root of a ``backward()`` stands for it, as where a script divides it again.
        """
        if tensor.grad_fn is None or self.weight.samples is None or tensor.numel() != 1:
            return tensor
        whole = self._losses.whole_of(tensor)
        return self._averaged(tensor, self.weight.samples) if whole is None else whole

    def _averaged(self, tensor: torch.Tensor, samples: tuple[int, int]) -> torch.Tensor:
        """Return the whole batch's mean or sum over samples, where every rank reads its part's; else the tensor."""
        is_of_loop = current_thread() is main_thread() and not (self._lockstep.is_fetching or self._is_in_backward())
        if not is_of_loop or self.weight.is_over or not 0 <= self.weight.begins <= operation_number(tensor.grad_fn):
            return tensor
        kinds = self._losses.kinds_of(tensor, self._reductions) if samples[0] else {MEAN}
        if kinds not in ({MEAN}, {SUM}):
            return tensor
        line = script_line(sys._getframe()).rpartition(os.sep)[2]  # ranks may have the script in other folders
        own = _tolist(_detach(tensor).reshape(()))
        if self._lockstep.meet(f"reads a loss at {line}", own, may_part=True) is not False:
            return tensor  # what is the same on all is of no part
        whole = _detach(tensor) * self.weight.of_loss(is_sum=kinds == {SUM})
        self._lockstep.average([whole])
        self._losses.keep_read(tensor, whole)
        return whole

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
        for root in roots if self._is_looking and len(roots) == 1 else ():
            self._look_at(root)
        if self.weight.taken:
            self._losses.forget()
        weight = self.weight.of_backward(is_sum=self._is_sum(roots))
        with torch.enable_grad():
            weighed = [root * weight if isinstance(root, torch.Tensor) else root for root in roots]
        leaves = self._own_leaves(roots) if self._has_own_leaves and self.weight.samples is not None else []
        before = [0 if each.grad is None else each.grad.clone() for each in leaves]
        run(weighed)
        for each, grad in zip(leaves, before, strict=True):  # which no average divides by the number of ranks
            if each.grad is not None:
                each.grad.sub_(grad).div_(self._lockstep.ranks).add_(grad)
        pairs = zip(roots, weighed, strict=True)
        read = [(root, _detach(each).clone()) for root, each in pairs if torch.is_tensor(root) and root.numel() == 1]
        self._average([whole for _, whole in read])
        for root, whole in read:
            self._losses.keep_root(root, whole)

    def _is_sum(self, roots: Iterable[Any]) -> bool:
        """Return whether a loss is a sum over the samples of a divided batch; tell the user where nobody knows."""
        if self.weight.samples is None or not self.weight.samples[0]:
            return False
        kinds = self._losses.kinds_of_roots(roots, self._reductions())
        if kinds & {WEIGHED, UNKNOWN, COMPILED} or len(kinds) > 1:
            self._tell(
                f"The loss is {' and '.join(sorted(kinds))}, so its gradient may not be that of the whole batch, where "
                f"ranks have parts of it. Let the loss be a mean over samples, or pass --whole {self.weight.name}."
            )
        return kinds == {SUM}

    def _reductions(self) -> Reductions:
        """Return what tells what losses are of the samples of the batch that was taken last."""
        part, whole = self.weight.samples or (1, 1)
        return Reductions(part, whole, self._samples or 0, {*self._replicas.parameters}, self.weight.begins)

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
