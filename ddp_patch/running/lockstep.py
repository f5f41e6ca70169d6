"""Keep the ranks of a script in lockstep: what each does next, what it trains, and which random numbers it draws.

What a rank does next is the same on all, or an error says who does what. Models are copies that stay equal.
"""

import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby, zip_longest
from operator import itemgetter
from types import FrameType
from typing import Any, Literal, TypeAlias
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ddp_patch.errors import MissingRanksError, RankMismatchError
from ddp_patch.loaders.hooks import script_line
from ddp_patch.orders.random_states import GlobalState
from ddp_patch.ranks.exchange import by_value, ranks_text
from ddp_patch.validation import counted

__all__ = ["Lockstep", "RandomNumbers", "Replicas", "models_of", "seed_all"]


# As many bytes are sent at once, as in DistributedDataParallel.
_BUCKET = 25 * 2**20
_MOST_READS = 256  # that are noted until the ranks meet
_tolist = torch.Tensor.tolist
# What errors say that ranks part by.
_SAME_STEPS = (
    "let what the script decides follow from whole evaluations, not from a loss of a part of a batch, nor from random "
    "numbers that are drawn in a loop over a divided loader."
)


class Lockstep:
    """Compares what the ranks do next, each time before they communicate. A rank is alone until it joins others.

    Args:
        tell: Tells the user something, once.

    Attributes:
        rank: This rank.
        ranks: How many there are.
        backwards: How often the script called ``backward()``.
        steps: How many steps its optimizers made.
        is_fetching: Whether a batch is made now.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._reads: list[tuple[str, str]] | None = []  # since the ranks met: a number, and where; None after a report
        self.is_fetching: bool = False
        self.rank: int = 0
        self.ranks: int = 1
        self.backwards: int = 0
        self.steps: int = 0
        self._timeout = 0.0
        self._group: Any = None

    def join(self, timeout: float) -> None:
        """Join the ranks of the process group.

        Args:
            timeout: How many seconds a rank waits for the others.
        """
        self.rank, self.ranks, self._timeout = dist.get_rank(), dist.get_world_size(), timeout
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    @property
    def done(self) -> str:
        """What the script has done so far, in words."""
        return f"after {self.backwards} calls of backward() and {counted(self.steps, 'optimizer step')}"

    def meet(self, doing: str, usual: object = 0, *, may_part: bool = False) -> bool | None:
        """Wait until every rank does the same.

        Args:
            doing: What this rank does, in words.
            usual: Numbers that may differ.
            may_part: Whether this rank goes on where others do something else. They then meet without it, and it comes
                to where they are.

        Returns:
            Whether ``usual`` is the same on every rank; None if this rank may go on, and others do something else.

        Raises:
            RankMismatchError: Another rank does something else; every rank raises it.
            MissingRanksError: Another rank did not come within the timeout, or has ended.
        """
        if self.ranks == 1:
            return True
        reads = crc32(repr([value for value, _ in self._reads or ()]).encode())
        numbers = [may_part, crc32(doing.encode()), self.backwards, self.steps, hash(usual) >> 2, reads]
        own = torch.tensor(list(map(int, numbers)), device="cpu")  # whatever is the default
        largest = torch.cat([own, -own])
        self._together(lambda: dist.all_reduce(largest, dist.ReduceOp.MAX, self._group))
        _, *differ, is_unusual, is_read_apart = _tolist(largest[: len(own)] != -largest[len(own) :])
        if any(differ):
            if may_part:
                return None
            if largest[0]:  # another rank went on
                return self.meet(doing, usual)
            raise self._mismatch(doing)
        if self._reads is not None:
            if is_read_apart:
                self._tell_of_reads()
            self._reads = None if is_read_apart else []
        return not is_unusual

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """While entered, a batch is made, of other samples on each rank: what is read of these is no matter."""
        before, self.is_fetching = self.is_fetching, True
        try:
            yield
        finally:
            self.is_fetching = before

    @property
    def notes_reads(self) -> bool:
        """Whether it matters what the script reads now."""
        return self._reads is not None and len(self._reads) < _MOST_READS and not self.is_fetching

    def note_read(self, value: str, frame: FrameType) -> None:
        """Note what the script reads, which the ranks compare when they meet."""
        if self._reads is not None:
            self._reads.append((value, script_line(frame)))

    def _tell_of_reads(self) -> None:
        """Tell of the first number that the ranks have not read alike."""
        rows = enumerate(zip_longest(*self.gathered(self._reads)))
        at, row = next((at, row) for at, row in rows if len({read and read[0] for read in row}) > 1)
        value, place = (self._reads or [])[at] if at < len(self._reads or ()) else ("", "another line")
        others = sorted({read[0] for read in row if read} - {value})
        self._tell(
            f"What is read at {place} differs between the ranks ({value[:60]}{', and ' if others else ''}"
            f"{others[0][:60] if others else ''}): it is of a part of a batch, or a rank's own random number. "
            "Only means and sums over samples that have a gradient, such as losses, are made the whole batch's."
        )

    def meet_alike(self, doing: str, found: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Meet, and compare how many tensors are found alive, and of how many numbers.

        What a script has dropped in a cycle of references lives on until garbage is collected, which each rank does at
        its own time. So before ranks are said to differ, all collect it.

        Raises:
            RankMismatchError: As ``meet``, or the numbers differ.
            MissingRanksError: As ``meet``.
        """
        if not self.meet(doing, _sizes(found())):
            gc.collect()
            sizes = _sizes(found())
            if not self.meet(doing, sizes):
                raise self._mismatch(doing, " ({} tensors, {} numbers)".format(*sizes))

    def gathered(self, value: Any) -> list[Any]:
        """Return each rank's value."""
        values = [value] * self.ranks
        self._together(lambda: dist.all_gather_object(values, value, self._group))
        return values

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put the mean over all ranks into each of some dense tensors.

        The tensors have the same shapes, dtypes and order on every rank. What is equal on all ranks stays as it is, but
        for rounding.
        """
        for flat in _flattened(tensors):
            dist.all_reduce(flat.div_(self.ranks))

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make tensors of any dtypes those of rank 0. They have the same shapes, dtypes and order on every rank."""
        for flat in _flattened(tensors):
            dist.broadcast(flat.view(torch.uint8), 0)

    def _together(self, communicate: Callable[[], object]) -> None:
        try:
            communicate()
        except RuntimeError as error:
            raise MissingRanksError(
                f"At {script_line(sys._getframe())}, {self.done}, rank {self.rank} waited for the others, at most "
                f"{self._timeout:g} s, and some did not come ({str(error).splitlines()[0]}). If one has ended, its own "
                f"error says why. If not: {_SAME_STEPS}"
            ) from None

    def _mismatch(self, doing: str, also: str = "") -> RankMismatchError:
        rows = by_value(dict(enumerate(self.gathered(f"{doing} at {script_line(sys._getframe())}, {self.done}{also}"))))
        listed = "".join(f"\n  {ranks_text(ranks)} {row}" for row, ranks in rows.items())
        return RankMismatchError(
            f"The ranks no longer do the same:{listed}\nEvery rank runs the whole script: {_SAME_STEPS}"
        )


def _sizes(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    return len(tensors), sum(each.numel() for each in tensors)


@torch.no_grad()
def _flattened(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield flat copies of several tensors each, and put what becomes of each into these tensors."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for alike in kinds.values():
        ends = np.cumsum([tensor.nbytes for tensor in alike])
        for _, bucket in groupby(zip((ends - 1) // _BUCKET, alike, strict=True), key=itemgetter(0)):
            held = [tensor for _, tensor in bucket]
            flat = torch.cat([tensor.reshape(-1) for tensor in held])
            yield flat
            for tensor, part in zip(held, torch.split(flat, [tensor.numel() for tensor in held]), strict=True):
                tensor.copy_(part.view_as(tensor))


# ---- optimizers and models ----

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
            sync_batchnorm: Whether to replace batch normalisation by torch's ``SyncBatchNorm``.
        """
        self._optimizers.append(weakref.ref(optimizer))
        if self._lockstep.ranks == 1:
            return
        self._lockstep.meet_alike("makes an optimizer", lambda: [*self.parameters, *self.buffers()])
        for model in self.models() if sync_batchnorm else ():
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._lockstep.broadcast([*self.parameters, *self.buffers()])

    def tell_of_parts(self) -> None:
        """Tell the user of models that see no more than a part of each batch, because a loader is divided now."""
        modules = (module for model in self.models() for module in model.modules())
        if self._lockstep.ranks > 1 and any(isinstance(module, _BATCH_NORMS) for module in modules):
            self._tell(
                "Batch normalisation sees this rank's part of each batch, not all of it. On accelerators, "
                "--sync-batchnorm puts torch's SyncBatchNorm in its place."
            )

    def has(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer was noted."""
        return any(ref() is optimizer for ref in self._optimizers)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters of all optimizers, in the order in which the script gave them."""
        alive = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        groups = [group["params"] for optimizer in alive for group in optimizer.param_groups]
        return list(dict.fromkeys(each for group in groups for each in group))

    def _trained(self) -> list[torch.Tensor]:
        """Return the optimizers' parameters, and all that are trained of their models."""
        given = self.parameters
        of_models = (each for model in self.models() for each in model.parameters() if given and each.requires_grad)
        return list(dict.fromkeys([*given, *of_models]))

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

    def kept(self) -> dict[str, int]:
        """Return checksums of what models keep of what they see: their buffers of real numbers, by name.

        Batch normalisation's are not among them, which the user is told of, nor those of spectral normalisation, which
        follow from weights.
        """
        named = (pair for model in self.models() for pair in model.named_modules(prefix=type(model).__name__))
        found = {
            f"{at}.{name}": buffer
            for at, module in named
            if not isinstance(module, _BATCH_NORMS) and "SpectralNorm" not in type(module).__name__
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and not name.endswith(("_u", "_v"))
        }
        return dict(zip(found, _checksums(found.values()), strict=True))

    @property
    def are_evaluated(self) -> bool:
        """Whether there are models, and all are in evaluation mode."""
        models = self.models()
        return bool(models) and not any(module.training for model in models for module in model.modules())

    def share_buffers(self) -> None:
        """Make buffers those of rank 0, before an evaluation."""
        if self._lockstep.ranks > 1:
            self._lockstep.meet_alike("begins to iterate a loader that is whole on every rank", self.buffers)
            self._lockstep.broadcast(self.buffers())

    def meet(self, doing: str) -> None:
        """Meet, and compare the parameters.

        Raises:
            RankMismatchError: The parameters differ; every rank raises it. Or as ``Lockstep.meet``.
            MissingRanksError: As ``Lockstep.meet``.
        """
        if self._lockstep.ranks == 1:
            return
        self._lockstep.meet_alike(doing, self._trained)
        parameters = self._trained()
        sums = _checksums(parameters)
        if self._lockstep.meet(doing, tuple(sums)):
            return
        of_ranks = self._lockstep.gathered(sums)
        place, found = next((at, found) for at, found in enumerate(zip(*of_ranks, strict=True)) if len(set(found)) > 1)
        names = {each: name for model in self.models() for name, each in model.named_parameters()}
        which, shape = names.get(parameters[place], f"parameter {place}"), tuple(parameters[place].shape)  # type: ignore[call-overload]  # a tensor that is none
        parties = by_value(dict(enumerate(found))).values()
        raise RankMismatchError(
            f"The ranks no longer train the same model: the parameters differ first in {which}, of shape {shape}, "
            f"between {' and '.join(map(ranks_text, parties))}, {self._lockstep.done}. Change parameters only by an "
            f"optimizer's step, or alike on every rank: {_SAME_STEPS}"
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


# ---- random numbers ----

# The states of the CPU's global generators, and of those of CUDA devices, where they are used.
_States: TypeAlias = tuple[GlobalState, list[torch.Tensor]]


def seed_all(seed: int | None) -> None:
    """Seed the global generators of Python, numpy and torch; None for a seed of the system's entropy."""
    random.seed(seed)
    np.random.seed(None if seed is None else seed % 2**32)
    if seed is None:
        torch.seed()
    else:
        torch.manual_seed(seed)


# Whose numbers are drawn: those of the script outside of training; those of this rank in it; and those that all ranks
# draw alike where each trains on whole batches, as one process draws its own.
Draws: TypeAlias = Literal["common", "own", "whole"]


class RandomNumbers:
    """Swaps what the global generators draw: numbers that are the same on every rank, and numbers of this rank's own.

    A rank draws its own from the first optimizer step on, in passes over divided loaders: dropout and augmentation
    differ between the samples of a batch, and so between the ranks. All else that a script draws is the same on every
    rank: how it splits data, the first weights of its next model, what it draws in an evaluation.
    """

    def __init__(self) -> None:
        self._keys: dict[Draws, tuple[int, int]] = {}
        self._passes: dict[object, Draws] = {}  # those that run, the innermost last
        self._draws: Draws = "common"
        self._others: dict[Draws, _States] = {}  # the states that are not drawn from, once the rank draws its own

    def seed(self, seed: int, rank: int) -> None:
        """Let this rank's own numbers follow from a seed and its number."""
        self._keys = {"own": (seed, rank), "whole": (seed, 0)}

    def begin_own(self) -> None:
        """Let passes that train draw other numbers than the common ones from now on."""
        if self._others:
            return
        now = _of_cuda()
        for draws, key in self._keys.items():
            sequence = np.random.SeedSequence(key)
            if now:
                torch.cuda.manual_seed_all(int(sequence.generate_state(1)[0]))
            self._others[draws] = GlobalState.seeded(sequence), _of_cuda()
        _put_on_cuda(now)
        self._swap()

    def enter(self, key: object, draws: Draws) -> None:
        """Note that a pass begins or goes on, and what it draws."""
        self._passes[key] = draws
        self._swap()

    def end(self) -> None:
        """Draw common numbers from now on, also when a pass is left that is alive by now."""
        self._passes.clear()
        self._swap()

    def leave(self, key: object) -> None:
        """Note that a pass has ended, or was left."""
        self._passes.pop(key, None)
        self._swap()

    def _swap(self) -> None:
        draws: Draws = next(reversed(self._passes.values()), "common")
        if self._others and draws != self._draws:
            self._others[self._draws] = GlobalState.capture(), _of_cuda()
            of_cpu, of_cuda = self._others.pop(draws)
            of_cpu.install()
            _put_on_cuda(of_cuda)
            self._draws = draws


def _of_cuda() -> list[torch.Tensor]:
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return torch.cuda.get_rng_state_all() if used else []


def _put_on_cuda(states: list[torch.Tensor]) -> None:
    if states:
        torch.cuda.set_rng_state_all(states)
