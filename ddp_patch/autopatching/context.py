"""``autopatch``: hooks that notice a loader's first use, and that are removed afterwards."""

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
    """Patch every loader when the script first uses it: a context manager and decorator.

    The first use is to iterate the loader, to call ``len()`` on it, or to pass it to a function of this package. If
    there is a process group of several ranks then, and the loader is not sharded yet, the loader itself is patched, and
    stays so. All ranks have to use it, at the same point of the script. Nothing is printed; on rank 0, the logger
    ``ddp_patch.autopatch`` reports each loader at INFO.

    Args:
        only: Patch only loaders that were made at lines that match, such as ``"train.py:41"`` or ``"data/*.py"``.
        excepted: Do not patch loaders that were made at lines that match.
        dry_run: Patch none; only report what would be done.
        options: The keywords of ``patch_dataloader_to_ddp``, for all loaders.

    Yields:
        What was done with each loader so far; ``str()`` of it is a table.

    Raises:
        InvalidOptionError: An option has a value that it does not take.
        MissingRanksError: From the use of a loader: some ranks did not use it.
        DDPPatchError: From the use of a loader: whatever ``patch_dataloader_to_ddp`` raises.

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
