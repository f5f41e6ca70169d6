"""Patch every loader that code within a context makes, as frameworks do too."""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Unpack
from unittest.mock import patch

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_patch.compat.private_packages import ACCELERATE_TAKES_LOADERS, TAKE_LOADERS
from ddp_patch.compat.private_torch import imported_fsdp
from ddp_patch.errors import InvalidOptionError
from ddp_patch.loaders.facts import ShardedUnit, look_at
from ddp_patch.loaders.hooks import Use, about_to_use, called_before, places_recorded, told_of_uses
from ddp_patch.loaders.recognition import sharded_by
from ddp_patch.options import Options
from ddp_patch.patching import PatchOptions
from ddp_patch.running.loader_reports import EachRank, Patterns, Summary, is_off, note_if_off
from ddp_patch.running.one_process import OneProcess
from ddp_patch.sharding.sampler import EpochSampler
from ddp_patch.wrappers import split_options


def _frameworks_found(used: Callable[[DataLoader[Any], Use], object], stack: ExitStack) -> Callable[[object], None]:
    """Return what takes hold of the frameworks that were imported since, until the stack closes.

    Lightning would replace the loader's sampler, so the loader is patched before. accelerate shards all loaders
    correctly except those with a batch sampler that is not torch's own, so only these are patched before. The rest is
    left to accelerate, and to any framework that returns a loader which shards itself.

    Args:
        used: Called with a loader that is about to be used, and how.
        stack: Closes when they see no more.
    """
    missing = {*TAKE_LOADERS, ACCELERATE_TAKES_LOADERS}

    def find(_loader: object) -> None:
        for place in [place for place in missing if place[0] in sys.modules]:
            module, kind, method = place
            owner = getattr(sys.modules[module], kind, None)
            if owner is not None:  # else it is being imported
                missing.remove(place)
                around = _for_accelerate if place == ACCELERATE_TAKES_LOADERS else _patching_first
                stack.enter_context(patch.object(owner, method, around(getattr(owner, method), used)))

    return find


def _patching_first(take: Any, used: Callable[[DataLoader[Any], Use], object]) -> Any:
    @functools.wraps(take)
    def taking(*args: Any, **options: Any) -> Any:
        for given in (*args, *options.values()):
            if isinstance(given, DataLoader):
                used(given, Use.HANDED)
        return take(*args, **options)

    return taking


def _for_accelerate(take: Any, used: Callable[[DataLoader[Any], Use], object]) -> Any:
    @functools.wraps(take)
    def taking(accelerator: Any, data_loader: Any, *args: Any, **options: Any) -> Any:
        if issubclass(type(data_loader), DataLoader) and not is_off():
            facts = look_at(data_loader)
            # accelerate would split a batch sampler's batches, or lose some.
            if facts.sharded_by is None and facts.unit is ShardedUnit.BATCH:
                used(data_loader, Use.HANDED)
            by = sharded_by(data_loader)
            if isinstance(by, EpochSampler) and by.num_replicas == accelerator.num_processes:  # not as one process
                from ddp_patch.integrations.accelerate import prepare_patched

                return prepare_patched(accelerator, data_loader)
        return take(accelerator, data_loader, *args, **options)

    return taking


# What follows from training as one process.
_DECIDED = {"share", "uneven", "rank", "num_replicas", "process_group", "device_mesh"}


@contextmanager
def autopatch(
    *,
    only: str | Sequence[str] = (),
    excepted: str | Sequence[str] = (),
    as_one_process: bool = False,
    **options: Unpack[PatchOptions],
) -> Iterator[Summary]:
    """Patch every loader when the script first uses it: a context manager and decorator.

    The first use is to iterate the loader, to call ``len()`` on it, or to pass it to a function of this package. If
    there is a process group of several ranks then, and the loader is not sharded yet, the loader itself is patched, and
    stays so. All ranks have to use it, at the same point of the script. Nothing is printed; on rank 0, the logger
    ``ddp_patch.autopatch`` reports each loader at INFO.

    With ``as_one_process=True``, the ranks train the model that one process trains, as ``ddp-patch run -n`` does: every
    rank has whole batches, and calls of models are divided. Make models and optimizers inside, with the same random
    seeds on every rank.

    Args:
        only: Patch only loaders that were made at lines that match, such as ``"train.py:41"`` or ``"data/*.py"``.
        excepted: Do not patch loaders that were made at lines that match.
        as_one_process: Whether the ranks train as one process. There need not be a process group: one is made of the
            ranks that a launcher has started.
        options: The keywords of ``patch_dataloader_to_ddp``, for all loaders.

    Yields:
        What was done with each loader so far; ``str()`` of it is a table.

    Raises:
        InvalidOptionError: An option has a value that it does not take.
        MissingRanksError: From the use of a loader: some ranks did not use it. As one process: also from
            ``backward()``.
        RankMismatchError: As one process: the ranks no longer do the same, or no longer train the same model.
        DDPPatchError: From the use of a loader: whatever ``patch_dataloader_to_ddp`` raises.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(10), batch_size=2)
        >>> with autopatch(rank=1, num_replicas=2):
        ...     [batch.tolist() for batch in loader]
        [[1, 3], [5, 7], [9]]
    """
    chosen_by_line = {name for name, lines in (("only", only), ("excepted", excepted)) if lines}
    if as_one_process and (given := (_DECIDED & options.keys()) | chosen_by_line):
        raise InvalidOptionError(
            f"autopatch was given as_one_process=True and {', '.join(sorted(given))}: as one process, all ranks of the "
            "launcher have whole batches, and no loader is sharded. Leave these options out, or as_one_process."
        )
    where, chosen = split_options("autopatch", options, PatchOptions)
    shards, chosen_lines = Options(**chosen), (Patterns("only", only), Patterns("excepted", excepted))
    session = OneProcess(shards) if as_one_process else EachRank(where, shards, *chosen_lines)
    with running(session):
        yield session


@contextmanager
def running(session: EachRank | OneProcess) -> Iterator[Summary]:
    """Patch loaders when they are first used, or run as one process, and yield what is done; see ``autopatch``."""

    def registered(model: nn.Module, name: str, part: nn.Module | None) -> None:
        """Tell of a ``DistributedDataParallel`` or an FSDP model that is made: it registers the one it wraps."""
        fsdp = getattr(imported_fsdp(), "FullyShardedDataParallel", DistributedDataParallel)
        if isinstance(model, DistributedDataParallel | fsdp):
            session.wrapped(type(model).__name__)

    with ExitStack() as stack:
        stack.callback(register_module_module_registration_hook(registered).remove)
        stack.enter_context(places_recorded())
        stack.enter_context(called_before("__init__", note_if_off))
        if isinstance(session, OneProcess):
            stack.enter_context(session.hooked())
        else:
            find = _frameworks_found(session.used, stack)
            find(None)
            stack.enter_context(called_before("__init__", find))  # imported by now, if the script uses them
            stack.enter_context(told_of_uses(session.used))
            stack.enter_context(called_before("__iter__", partial(about_to_use, use=Use.ITERATED)))
            stack.enter_context(called_before("__len__", partial(about_to_use, use=Use.MEASURED)))
        yield session
