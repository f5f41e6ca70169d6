"""Patch every loader that code within a context makes, as frameworks do too; and sum up what was done."""

import functools
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Unpack
from unittest.mock import patch

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_patch.compat.packages import ACCELERATE_TAKES_LOADERS, TAKE_LOADERS
from ddp_patch.compat.private_torch import imported_fsdp
from ddp_patch.errors import InvalidOptionError
from ddp_patch.loaders.facts import ShardedUnit, look_at
from ddp_patch.loaders.hooks import Use, about_to_use, called_before, places_recorded, told_of_uses
from ddp_patch.options import Options
from ddp_patch.patching import PatchOptions
from ddp_patch.running.loader_reports import Patterns, UsedLoader, counted, is_off
from ddp_patch.running.one_process import Mode, OneProcess, OneProcessOptions
from ddp_patch.running.session import Session
from ddp_patch.wrappers import split_options

__all__ = ["Frameworks", "Summary", "autopatch", "running"]


class Frameworks:
    """Sees the loaders that are passed to frameworks.

    Lightning would replace the loader's sampler, so the loader is patched before. accelerate shards all loaders
    correctly except those with a batch sampler that is not torch's own, so only these are patched before. The rest is
    left to accelerate, and to any framework that returns a loader which shards itself.

    Args:
        session: Decides on the loaders.
        used: Called with a loader that is about to be used, and how.
        stack: Closes when it sees no more.
    """

    def __init__(self, session: Session, used: Callable[[DataLoader[Any], Use], object], stack: ExitStack) -> None:
        self._session, self._used, self._stack = session, used, stack
        self._missing: dict[tuple[str, str, str], Callable[[Any], Any]] = {
            **dict.fromkeys(TAKE_LOADERS, self._patching_first),
            ACCELERATE_TAKES_LOADERS: self._for_accelerate,
        }
        self.find()

    def find(self, loader: object = None) -> None:
        """Take hold of those that were imported since."""
        for place in [place for place in self._missing if place[0] in sys.modules]:
            module, kind, method = place
            owner = getattr(sys.modules[module], kind, None)
            if owner is not None:  # else it is being imported
                wrap = self._missing.pop(place)
                self._stack.enter_context(patch.object(owner, method, wrap(getattr(owner, method))))

    def _patching_first(self, take: Any) -> Any:
        @functools.wraps(take)
        def taking(*args: Any, **options: Any) -> Any:
            for given in (*args, *options.values()):
                if isinstance(given, DataLoader):
                    self._used(given, Use.HANDED)
            return take(*args, **options)

        return taking

    def _for_accelerate(self, take: Any) -> Any:
        @functools.wraps(take)
        def taking(accelerator: Any, data_loader: Any, *args: Any, **options: Any) -> Any:
            if issubclass(type(data_loader), DataLoader) and not is_off():
                facts = look_at(data_loader)
                # accelerate would split a batch sampler's batches, or lose some.
                if facts.sharded_by is None and facts.unit is ShardedUnit.BATCH:
                    self._used(data_loader, Use.HANDED)
                if self._session.has_patched(data_loader):
                    from ddp_patch.integrations.accelerate import prepare_patched

                    return prepare_patched(accelerator, data_loader)
            return take(accelerator, data_loader, *args, **options)

        return taking


class Models:
    """Sees whether a ``DistributedDataParallel`` or an FSDP model is made: such a model registers the one it wraps.

    Args:
        about_to_make: Called with the name of its class before one is finished.
        stack: Closes when it sees no more.
    """

    def __init__(self, about_to_make: Callable[[str], object], stack: ExitStack) -> None:
        self._about_to_make = about_to_make
        self._made = False
        stack.callback(register_module_module_registration_hook(self._note).remove)

    @property
    def seen(self) -> bool:
        """Whether a model was seen."""
        # fully_shard(), of torch 2.6 and newer, gives a model a class of its own that derives from this one.
        derived = getattr(imported_fsdp(), "FSDPModule", None)
        return self._made or (derived is not None and bool(derived.__subclasses__()))

    def _note(self, model: nn.Module, name: str, part: nn.Module | None) -> None:
        fsdp = getattr(imported_fsdp(), "FullyShardedDataParallel", DistributedDataParallel)
        if isinstance(model, DistributedDataParallel | fsdp):
            self._about_to_make(type(model).__name__)
            self._made = True


_WIDTH = 100
# What follows from training as one process.
_DECIDED = {"share", "uneven", "rank", "num_replicas", "process_group", "device_mesh"}


class Summary:
    """What was done with the loaders while autopatch is, or was, on.

    Args:
        session: What decided on them.
        models: What saw the models.
        one: What runs the script as one process, if it is run so.
    """

    def __init__(self, session: Session, models: Models, one: OneProcess | None) -> None:
        self._session, self._models, self._one = session, models, one

    @property
    def records(self) -> Sequence[UsedLoader]:
        """The loaders that were used when there were several ranks, or one process of several; in that order."""
        return tuple(self._session.records if self._one is None else [*self._one.records, *self._session.records])

    @property
    def notes(self) -> list[str]:
        """What else was noticed."""
        session = self._session
        if self._one is not None and self._one.mode is not Mode.RANKS:
            return self._one.notes
        if not session.had_world:
            return [
                "No loader was used in a process group of several ranks, so none was patched. A script for one process "
                "makes no group: start it with ddp-patch run -n 8, which trains on 8 ranks as one process."
            ]
        found = [
            f"The loader made at {place} was iterated when there was no group yet: each rank took all of it."
            for place in sorted(session.early)
        ]
        found += session.patterns.notes()
        if not self._models.seen:
            found.append(
                "No DistributedDataParallel was seen, nor FSDP: unless the script averages gradients by itself, each "
                "rank trains a model of its own."
            )
        return found

    def __str__(self) -> str:
        passes = Counter[str]()  # of loaders that a script makes alike in each epoch
        for record in self.records:
            record.note_pass()
            passes[record.summary] += record.passes
        lines = [f"{text}, {counted(n, 'pass')}" for text, n in passes.items()]
        return "\n".join(textwrap.fill(line, _WIDTH, subsequent_indent="    ") for line in [*lines, *self.notes])


@contextmanager
def autopatch(
    *,
    only: str | Sequence[str] = (),
    excepted: str | Sequence[str] = (),
    dry_run: bool = False,
    as_one_process: bool = False,
    **options: Unpack[PatchOptions],
) -> Iterator[Summary]:
    """Patch every loader when the script first uses it: a context manager and decorator.

    The first use is to iterate the loader, to call ``len()`` on it, or to pass it to a function of this package. If
    there is a process group of several ranks then, and the loader is not sharded yet, the loader itself is patched, and
    stays so. All ranks have to use it, at the same point of the script. Nothing is printed; on rank 0, the logger
    ``ddp_patch.autopatch`` reports each loader at INFO.

    With ``as_one_process=True``, the ranks train the model that one process trains, as ``ddp-patch run -n`` does: each
    batch is divided over the ranks, gradients are averaged where ``backward()`` ends, and a loader that is iterated
    under ``torch.no_grad()`` is whole on every rank. Make models and optimizers inside, with the same random seeds on
    every rank.

    Args:
        only: Patch only loaders that were made at lines that match, such as ``"train.py:41"`` or ``"data/*.py"``.
        excepted: Do not patch loaders that were made at lines that match.
        dry_run: Patch none; only report what would be done.
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
    if as_one_process and (given := [*(_DECIDED & options.keys()), *(["dry_run"] if dry_run else [])]):
        raise InvalidOptionError(
            f"autopatch was given as_one_process=True and {', '.join(sorted(given))}: as one process, all ranks of the "
            "launcher divide each batch, and nothing is left out. Leave these options out, or as_one_process."
        )
    one = OneProcessOptions(Mode.ONE_PROCESS) if as_one_process else None
    with running(Patterns(only, excepted), options, one, dry_run=dry_run) as summary:
        yield summary


@contextmanager
def running(
    patterns: Patterns, options: PatchOptions, one_process: OneProcessOptions | None, *, dry_run: bool = False
) -> Iterator[Summary]:
    """Patch loaders when they are first used, or run as one process; see ``autopatch``.

    Args:
        patterns: Which loaders.
        options: The keywords of ``patch_dataloader_to_ddp``.
        one_process: How to train as one process; None to patch loaders only.
        dry_run: Patch none.
    """
    where, chosen = split_options("autopatch", options, PatchOptions)
    session = Session(where, Options(**chosen), patterns, dry_run=dry_run)
    one = None if one_process is None else OneProcess(session, Options(**chosen), one_process)
    used = session.used if one is None else one.used
    with ExitStack() as stack:
        models = Models(lambda name: None if one is None else one.require_no_wrapper(name), stack)
        frameworks = Frameworks(session, used, stack)
        stack.enter_context(places_recorded())
        stack.enter_context(called_before("__init__", frameworks.find))  # imported by now, if the script uses them
        stack.enter_context(called_before("__init__", session.made))
        stack.enter_context(told_of_uses(used))
        stack.enter_context(called_before("__iter__", partial(about_to_use, use=Use.ITERATED)))
        stack.enter_context(called_before("__len__", partial(about_to_use, use=Use.MEASURED)))
        if one is not None:
            stack.enter_context(called_before("__iter__", one.iterated))
            stack.enter_context(one.hooked())
        yield Summary(session, models, one)
