"""``autopatch``: the hooks that make a loader's first use known, and nothing of which is left afterwards."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Unpack

from ddp_patch.autopatching.frameworks import Frameworks
from ddp_patch.autopatching.models import Models
from ddp_patch.autopatching.places import Patterns
from ddp_patch.autopatching.session import Session
from ddp_patch.autopatching.summary import Summary
from ddp_patch.loaders.first_use import Use, about_to_use, told_of_uses
from ddp_patch.loaders.hooks import called_before, places_recorded
from ddp_patch.options import Options
from ddp_patch.several import PatchOptions
from ddp_patch.wrappers import split_options

__all__ = ["autopatch"]


@contextmanager
def autopatch(
    *,
    only: str | Sequence[str] = (),
    excepted: str | Sequence[str] = (),
    dry_run: bool = False,
    **options: Unpack[PatchOptions],
) -> Iterator[Summary]:
    """Patch, while entered, every loader when it is first used, as ``patch_dataloader_to_ddp`` would.

    A loader of any class is first used when it is iterated, measured by ``len()``, or given to a function of this
    package. If there is a process group of several ranks then, and nothing shards the loader yet, it becomes the
    patched loader itself, and stays so. All ranks have to use it, at the same point of the script. It is a decorator,
    too. Nothing is printed; the logger ``ddp_patch.autopatch`` tells of each loader at INFO, on rank 0.

    Args:
        only: Patch only loaders that were made at a place of these patterns, as ``"train.py:41"`` or ``"data/*.py"``.
        excepted: Leave those alone that were made at a place of these patterns.
        dry_run: Patch none; only tell what would be done.
        options: The keywords of ``patch_dataloader_to_ddp``. They hold for all loaders.

    Yields:
        What became of each loader so far; ``str()`` of it is a table.

    Raises:
        InvalidOptionError: An option has no valid value.
        MissingRanksError: From the use of a loader: some ranks did not use it.
        DDPPatchError: From there, too: the loader cannot be patched, as ``patch_dataloader_to_ddp`` would say.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(10), batch_size=2)
        >>> with autopatch(rank=1, num_replicas=2):
        ...     [batch.tolist() for batch in loader]
        [[1, 3], [5, 7], [9]]
    """
    where, chosen = split_options("autopatch", options, PatchOptions)
    session = Session(where, Options(**chosen), Patterns(only, excepted), dry_run=dry_run)
    with ExitStack() as stack:
        frameworks = stack.enter_context(Frameworks(session))
        models = stack.enter_context(Models())
        stack.enter_context(places_recorded())
        for one in (frameworks, models):  # imported by now, if the script uses them
            stack.enter_context(called_before("__init__", one.find))
        stack.enter_context(called_before("__init__", session.made))
        stack.enter_context(told_of_uses(session.used))
        stack.enter_context(called_before("__iter__", partial(about_to_use, use=Use.ITERATED)))
        stack.enter_context(called_before("__len__", partial(about_to_use, use=Use.MEASURED)))
        yield Summary(session, models)
