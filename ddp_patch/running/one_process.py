"""Run a script of one process on several ranks: every rank runs all of it, and the calls of its modules are divided."""

import atexit
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from ddp_patch.compat.private_torch import read_by_parts
from ddp_patch.errors import RankMismatchError, WorldError
from ddp_patch.options import Options
from ddp_patch.running import launch
from ddp_patch.running.alike import alike, folders_sorted
from ddp_patch.running.autopatching import Summary, is_left_alone, logger, made_at
from ddp_patch.running.calls import Calls
from ddp_patch.running.lockstep import GivenUp, Lockstep
from ddp_patch.running.overlay import shadowed
from ddp_patch.running.random_numbers import seed_all
from ddp_patch.running.reading import Read, Reading
from ddp_patch.validation import counted

# Functions that only a script with ranks of its own calls.
_OF_RANKS = {"spawn": torch.multiprocessing, "start_processes": torch.multiprocessing, "init_process_group": dist}
_CLOSE = 1e-3  # the largest difference of gradients of whole calls between ranks, divided by the norm


class OneProcess(Summary):
    """The run of a script as one process.

    Args:
        options: The seed, and how long a rank waits for others.
        on_error: Called with the error that ends the script, before other ranks notice.
        checked: Compare all calls and parameters, and end after so many steps; 0 to run as usual.
    """

    def __init__(
        self, options: Options, *, on_error: Callable[[BaseException], object] = lambda error: None, checked: int = 0
    ) -> None:
        super().__init__()
        self._options, self._on_error, self._checked = options, on_error, checked
        self._readings: MutableMapping[DataLoader[Any], Reading] = WeakIdKeyDictionary()
        self._read: dict[str, None] = {}  # the summary's lines on loaders
        self._stack = ExitStack()
        self._told: set[str] = set()
        self._lockstep = Lockstep()
        self._calls = Calls(self._lockstep, self._tell, compares_all=checked > 0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Join the other ranks. While entered, hook calls of modules, loaders, optimizers and process groups."""
        as_it_is: Callable[[Any], Any] = torch.compiler.disable  # a compiled step would trace what communicates
        with super().running(), self._stack as stack:
            stack.enter_context(folders_sorted())
            for name, module in _OF_RANKS.items():
                refusing = partial(self._refuse_unless_alone, name, getattr(module, name))
                stack.enter_context(patch.object(module, name, refusing))
            stack.enter_context(read_by_parts(Read, self._reading_of))
            stack.callback(register_optimizer_step_pre_hook(as_it_is(self._before_step)).remove)
            stack.enter_context(self._calls.hooked())
            self._join()
            try:
                yield
            except BaseException as error:
                if isinstance(error, SystemExit) and not error.code:
                    self._finish()
                    raise
                _explain(error)
                self._on_error(error)
                raise
            else:
                self._finish()

    def _refuse_unless_alone(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Refuse a function that is for a script with ranks of its own."""
        sees_none = launch.is_hidden() and name == "init_process_group"
        if (self._lockstep.ranks > 1 or sees_none) and os.getpid() == self._process:
            _refuse(self._lockstep.ranks, f"calls {name}()")
        return function(*args, **options)

    def wrapped(self, name: str) -> None:
        """Refuse a model that averages its gradients."""
        if self._lockstep.ranks > 1:
            _refuse(self._lockstep.ranks, f"wraps a model in {name}")

    def _reading_of(self, loader: DataLoader[Any]) -> Reading | None:
        """Return how to read the batches of a loader; None if every rank has to read all."""
        is_main = threading.current_thread() is threading.main_thread() and not self._is_off()
        starts = "fork"
        if loader.num_workers:
            starts = (loader.multiprocessing_context or multiprocessing).get_start_method()
        is_ordered = getattr(loader, "in_order", True)  # of torch 2.6 and newer
        if is_left_alone(loader) or not (is_main and starts == "fork" and is_ordered):
            return None
        if self._lockstep.ranks > 1 and loader not in self._readings:
            place = made_at(loader)
            decided = partial(self._decided, f"{place} {type(loader).__name__}: batches are read")
            named = f"the loader made at {os.path.basename(place)}"  # as on ranks whose folders differ
            self._readings[loader] = Reading(self._lockstep, named, decided)
        return self._readings.get(loader)

    def _decided(self, loader: str, how: str) -> None:
        self._read[f"{loader} {how}"] = None
        self._tell(f"{loader} {how}", logging.INFO)

    @property
    def lines(self) -> list[str]:
        """The lines of the summary: loaders, models, and the run."""
        ranks, calls = self._lockstep.ranks, self._calls.records
        found = [*self._read, *(each.line(ranks) for each in calls)]
        steps = counted(self._lockstep.steps, "optimizer step")
        found.append(f"{counted(ranks, 'rank')} trained as one process: {steps}.")
        if self._checked:
            n = counted(self._calls.compared, "call")
            found.append(f"Checked: {n} made by parts and whole were the same, but for dropout and noise.")
        if ranks > 1 and not any(each.divided for each in calls):
            found.append("No call was divided: every rank computed all, and no time was saved but in reading.")
        return found

    def _join(self) -> None:
        """Join the other ranks, and let all start alike."""
        timeout, is_made = self._options.timeout, dist.is_initialized()
        if (dist.get_world_size() if is_made else launch.ranks()) > 1:
            if not is_made:
                self._stack.enter_context(launch.group_made(launch.backend_here(), timeout=timedelta(seconds=timeout)))
                self._stack.enter_context(patch.object(dist, "is_initialized", _is_initialized))
            self._lockstep.join(timeout)
        is_first = self._lockstep.rank == 0 and self._lockstep.ranks > 1
        home = launch.shadows() or (tempfile.mkdtemp(prefix="ddp_patch-") if is_first else "")
        ranks = self._lockstep.gathered((torch.initial_seed(), hash("ddp_patch"), home))
        seed, _, of_first = ranks[0]
        if len({each for each, _, _ in ranks}) > 1:
            self._tell("The ranks were seeded differently: all go on with the seed of rank 0.")
            seed_all(seed % 2**63)
        if len({hashed for _, hashed, _ in ranks}) > 1:
            self._tell(
                "The ranks hash strings differently, so a set of strings has another order on each. Set "
                "PYTHONHASHSEED=0 before they start."
            )
        if ranks[1:]:
            world = ExitStack()
            world.enter_context(shadowed(self._lockstep.rank, home or of_first, writes=not self._checked))
            if launch.is_hidden():
                atexit.register(world.close)  # after what the script has registered, which writes, too
            else:
                self._stack.callback(world.close)
            self._stack.enter_context(alike(self._lockstep.of_rank_0))
        train = "1 rank trains" if not ranks[1:] else f"{len(ranks)} ranks train"
        self._tell(f"{train} as one process; random numbers follow from seed {seed % 2**63}", logging.INFO)

    def _tell(self, text: str, level: int = logging.WARNING) -> None:
        """Tell the user a sentence once, on rank 0."""
        if self._lockstep.rank == 0 and text not in self._told:
            self._told.add(text)
            logger.log(level, "%s", text)

    # ---- steps, and the end ----

    def _before_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        """Make gradients of whole calls bitwise the same on all ranks. In a check, compare parameters, too."""
        parameters = dict.fromkeys(each for group in optimizer.param_groups for each in group["params"])
        if self._lockstep.ranks > 1 and (self._calls.gradients_are_own or self._checked):
            self._calls.gradients_are_own = False
            grads = [each.grad for each in parameters if each.grad is not None and each.grad.layout == torch.strided]
            named = [(f"gradient {at} of {type(optimizer).__name__}", each) for at, each in enumerate(grads)]
            firsts = self._lockstep.require_alike("makes a step of an optimizer", named, _CLOSE)
            for grad, first in zip(grads, firsts, strict=False):
                grad.data.copy_(first)
        if self._checked:
            named = [(f"parameter {at} of {type(optimizer).__name__}", each) for at, each in enumerate(parameters)]
            self._lockstep.require_alike("makes a step of an optimizer", named, 0.0)
            if self._lockstep.steps == self._checked:
                sys.exit()
        self._lockstep.steps += 1

    def _finish(self) -> None:
        """Wait for the end of all ranks."""
        try:
            self._lockstep.meet("has come to its end")
        except GivenUp:
            raise RankMismatchError("A rank has come to its end, and another one calls a module.") from None


def _refuse(ranks: int, does: str) -> NoReturn:
    raise WorldError(
        f"The script {does}, and it runs on {counted(ranks, 'rank')} as one process, which needs no ranks, "
        "process group or averaging of its own. Leave that out; or pass --mode ranks, where each rank sees which "
        "one it is, and trains on its shard. A script that starts its ranks itself is started without this command."
    )


def _explain(error: BaseException) -> None:
    """Add to an error that the script does not see its rank."""
    if isinstance(error, KeyError) and launch.is_hidden() and {*error.args} & {"RANK", "LOCAL_RANK", "WORLD_SIZE"}:
        error.add_note(
            f"ddp_patch: as one process, the script sees no {error.args[0]}. If it needs that, pass --mode ranks."
        )


def _is_initialized() -> bool:
    """Return whether there is a process group, as torch and this package see it; the script sees none.

    A library that saw one would add up the counts of several ranks, and here each rank has counted all.
    """
    asks = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
    return asks in {"torch", "ddp_patch"} and dist.distributed_c10d.is_initialized()
