"""Audit loaders: check the arguments, and simulate every rank on one machine."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, SupportsIndex, TypeAlias, Unpack, cast, overload

import numpy as np
from torch.utils.data import DataLoader, Subset

from ddp_patch.auditing.finding import leaves_of
from ddp_patch.auditing.judge import Judge
from ddp_patch.auditing.problems import problem_kinds
from ddp_patch.auditing.ranks import Audited, Factory, RankGiven, indexed
from ddp_patch.auditing.report import Report, Reports
from ddp_patch.auditing.world import Costs, StepCosts, World
from ddp_patch.costs import Cost, CostValues
from ddp_patch.errors import InvalidOptionError
from ddp_patch.loaders.facts import LoaderFacts, look_at
from ddp_patch.options import Options
from ddp_patch.patching import PatchOptions
from ddp_patch.running.autopatching import unpatched
from ddp_patch.sharding.refusals import require_one_of_each
from ddp_patch.validation import check_flag, whole_number

# How many items of all ranks together are drawn by default.
_MOST = 16_000_000
# The options of patch_dataloader_to_ddp() that are refused, because the audit chooses the ranks itself.
_OF_A_REAL_RANK = {"rank", "num_replicas", "process_group", "device_mesh", "timeout"}

# One loader, or several: finished, or returned by a function.
Loader: TypeAlias = DataLoader[Any] | Factory | Callable[[], DataLoader[Any]]
_Several: TypeAlias = Mapping[Any, Any] | list[Any] | tuple[Any, ...]
Loaders: TypeAlias = _Several | Callable[[], _Several] | Callable[[int, int], _Several]


class AuditOptions(PatchOptions, total=False):
    """The keywords of ``audit``: its own, and the keywords of ``patch_dataloader_to_ddp``."""

    patch: bool
    set_epoch: bool
    padding: bool
    epochs_differ: bool
    allow: Collection[str]
    max_items: SupportsIndex | None


@overload
def audit(
    loader: Loader, world_size: SupportsIndex, epochs: SupportsIndex = 2, **options: Unpack[AuditOptions]
) -> Report: ...
@overload
def audit(
    loader: Loaders, world_size: SupportsIndex, epochs: SupportsIndex = 2, **options: Unpack[AuditOptions]
) -> Reports: ...
@unpatched()  # the simulated ranks are not a script's
def audit(
    loader: Loader | Loaders,
    world_size: SupportsIndex,
    epochs: SupportsIndex = 2,
    *,
    patch: bool = True,
    set_epoch: bool = False,
    padding: bool = True,
    epochs_differ: bool = False,
    allow: Collection[str] = (),
    cost: Cost | CostValues | None = None,
    max_items: SupportsIndex | None = None,
    **options: Any,
) -> Report | Reports:
    """Run the sampling of every rank on this machine, and report what each rank would get of a loader.

    Args:
        loader: One of the following, or a dict or list of them:

            - a loader. The loader is copied for every rank, and not changed.
            - a function ``make()`` that returns a loader, or a dict or list of loaders.
            - a function ``make(rank, world_size)`` that returns a rank's finished loader, prepared by any library, or a
              dict or list of loaders. These loaders are not patched. The audit calls ``make(0, 1)``, too, to see what a
              single process would get.

            The audit iterates each rank's loader over a dataset that returns indices instead of samples. So it calls no
            dataset's ``__getitem__``, except if each rank has other data in a list, array or tensor. An iterable
            dataset has no indices, so all workers of each rank read it. The own ``__iter__`` of a loader's class is not
            run.
        world_size: The number of ranks, at least 2.
        epochs: How many epochs to simulate.
        patch: Whether to patch a loader by ``patch_dataloader_to_ddp`` first; with False, the loader is audited as it
            is.
        set_epoch: Whether to call ``set_epoch(epoch)`` before each epoch. Say True if your training does.
        padding: Whether samples may be repeated to fill the last round of ranks. Say False for an evaluation.
        epochs_differ: Whether every epoch must have another order.
        allow: Kinds of problem to ignore, from ``ddp_patch.auditing.problem_kinds``. ``report.allowed`` lists such
            problems.
        cost: What each sample costs, such as its length, in any unit: one number for each index of ``loader.dataset``
            (a sequence, array or tensor), or a function of an index. For a factory, indices are of the dataset below
            torch's ``Subset`` layers. The report then says how long ranks wait for the slowest. A loader is patched
            with ``cost=``, as with all options, and the report says how long ranks wait without it, too.
        max_items: How many items to draw in each rank's epoch, rounded up to a whole batch. If an epoch has more, the
            report is of a sample. Default: 16 million items of all ranks together.
        options: More options for ``patch_dataloader_to_ddp``.

    Returns:
        The report of one loader; for a dict or list of loaders, the reports by place, such as ``"val[0]"``. ``.ok``
        says whether all loaders pass. The global random states are not changed.

    Raises:
        NotALoaderError: ``loader`` is no loader, no function that returns one, and no dict or list of these.
        InvalidOptionError: An option has a wrong value; the loader is one rank's share already, or cannot be copied; or
            each rank has a dataset of its own, whose indices and samples cannot be compared.
        DDPPatchError: Any other error that ``patch_dataloader_to_ddp`` raises for this loader and these options.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(10), batch_size=2, shuffle=True)
        >>> report = audit(loader, world_size=4)
        >>> report.ok, report.epochs[0].items, report.epochs[0].steps, report.epochs[0].padding
        (True, (3, 3, 3, 3), (2, 2, 2, 2), 2)
        >>> [problem.kind for problem in audit(loader, world_size=4, patch=False).problems]
        ['not_sharded']
    """
    ranks, passes = _at_least("world_size", world_size, 2), _at_least("epochs", epochs, 1)
    most = -(-_MOST // ranks) if max_items is None else _at_least("max_items", max_items, 1)
    flags = {"patch": patch, "set_epoch": set_epoch, "padding": padding, "epochs_differ": epochs_differ}
    for name, value in flags.items():
        check_flag(name, value)
    kinds = allow if isinstance(cast(object, allow), Collection) else [allow]
    if unknown := [kind for kind in kinds if kind not in problem_kinds]:
        raise InvalidOptionError(
            f"allow={unknown} names no kind of problem. Pass a list of these: {', '.join(problem_kinds)}."
        )
    if given := sorted(_OF_A_REAL_RANK & options.keys()):
        raise InvalidOptionError(
            f"audit was given {', '.join(given)} for patch_dataloader_to_ddp(), which is about real ranks, and audit "
            "makes all ranks itself, in one process. Leave that out, pass a function make(rank, world_size), or test "
            "real ranks with ddp_patch.testing.run_ranks."
        )
    leaves = leaves_of(loader)
    costs = Options(cost=cost).costs

    def reported(audited: DataLoader[Any] | Factory) -> Report:
        make = look_at(audited) if isinstance(audited, DataLoader) else audited
        subject = Audited(make, patch, options, set_epoch, most)
        costs_of = None if costs is None else _costs_of(make, costs)
        unbalanced = None
        if costs is not None and subject.patches:
            unbalanced = World(subject, ranks)
            subject = Audited(make, patch, {**options, "cost": costs}, set_epoch, most)
        judge = Judge(World(subject, ranks), unbalanced, padding, epochs_differ, costs_of)
        return judge.report(passes, allow)

    if list(leaves) == [""]:
        return reported(leaves[""])
    return Reports({place: reported(leaf) for place, leaf in leaves.items()})


def _costs_of(make: LoaderFacts[Any] | Factory, costs: Cost) -> StepCosts:
    """Return a function that returns the cost of each step of a rank, from the indices that the audit compares.

    Raises:
        InvalidOptionError: The loader's dataset has more samples than there are costs, or fewer.
    """
    own: dict[int, int] | None = None
    if isinstance(make, LoaderFacts):
        require_one_of_each(make, costs)
        dataset = make.dataset
        if isinstance(dataset, Subset):  # costs are of its own indices, the audit compares the inner ones
            below: Any = indexed(dataset)
            own = {index: place for place, index in enumerate(below.__getitems__(range(len(dataset))))}

    def costs_of(given: RankGiven) -> Costs:
        names, places = np.unique(given.items, return_inverse=True)
        if len(names) and int(names[0]) < 0:
            raise InvalidOptionError(
                "audit was given cost= and a loader whose keys are no indices, so what one costs cannot be looked up. "
                "Leave cost out, or sample indices."
            )
        indices: Any = names if own is None else np.array([own[index] for index in names.tolist()])
        return costs.of_batches(costs.of(indices)[places], given.sizes)

    return costs_of


def _at_least(name: str, value: SupportsIndex, least: int) -> int:
    """Return a whole number of at least ``least``."""
    found = whole_number(name, value)
    if found < least:
        raise InvalidOptionError(
            f"audit with {name}={found} has nothing to compare: pass a whole number of at least {least}."
        )
    return found
