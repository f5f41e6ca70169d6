"""Audit loaders: check what was given, and run every rank of a made-up world."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, SupportsIndex, TypeAlias, cast, overload

from torch.utils.data import DataLoader

from ddp_patch.auditing.epoch_report import Kind, problem_kinds
from ddp_patch.auditing.finding import leaves_of
from ddp_patch.auditing.made_up_world import Progress
from ddp_patch.auditing.report import Report, Reports
from ddp_patch.auditing.request import Request, ignore
from ddp_patch.auditing.subject import Factory
from ddp_patch.costs import Cost, CostOf
from ddp_patch.errors import InvalidOptionError
from ddp_patch.options import COST_WINDOW, check_flag, is_seconds, whole_number
from ddp_patch.running.records import unpatched

__all__ = ["Loader", "Loaders", "audit", "check_allowed", "check_both", "check_options", "check_run", "positive"]


# Refuse these options of patch_dataloader_to_ddp(): the audit says itself which rank a loader is for.
_OF_A_REAL_RANK = {"device", "rank", "num_replicas", "process_group", "device_mesh", "data_parallel_dimensions"}
# Refuse these values without real ranks: they make ranks communicate.
_COMMUNICATING = {"agreement": "leader", "verify": True}


def positive(name: str, value: SupportsIndex) -> int:
    """Return a whole number of at least 1."""
    found = whole_number(name, value)
    if found < 1:
        raise InvalidOptionError(f"audit with {name}={found} has nothing to do: pass a whole number of at least 1.")
    return found


def check_options(options: Mapping[str, Any], processes: bool) -> None:
    """Refuse options of ``patch_dataloader_to_ddp`` that need a real rank."""
    if given := sorted(_OF_A_REAL_RANK & options.keys()):
        raise InvalidOptionError(
            f"audit was given {', '.join(given)} for patch_dataloader_to_ddp(), which says where one real rank is, and "
            "audit makes all ranks itself. Leave that out; for a device mesh, pass a factory that makes it, and "
            "processes=True."
        )
    for name, value in _COMMUNICATING.items():
        if options.get(name) == value and not processes:
            raise InvalidOptionError(
                f"audit with {name}={value!r} needs ranks that communicate, and those of one process do not. Pass "
                "processes=True, too."
            )


def check_both(patch: bool, patched: bool) -> None:
    """Refuse to show what the patch changes without the patch."""
    if patched and not patch:
        raise InvalidOptionError(
            "audit with patched=True shows a loader before and after the patch, and patch=False leaves the patch out. "
            "Leave one of the two out."
        )


def check_allowed(allow: Collection[str]) -> None:
    """Refuse what names no kinds of problem."""
    if isinstance(allow, str):
        raise InvalidOptionError(f"allow={allow!r} is one string, and several may be named. Pass allow=[{allow!r}].")
    if not isinstance(cast(object, allow), Collection):
        raise InvalidOptionError(
            f"allow={allow!r} is a {type(allow).__name__}, not a list of kinds of problem. Pass some of these: "
            f"{', '.join(problem_kinds)}."
        )
    if unknown := [kind for kind in allow if kind not in problem_kinds]:
        raise InvalidOptionError(
            f"allow={unknown} names no kind of problem. Those that exist: {', '.join(problem_kinds)}."
        )


def check_run(timeout: object, progress: object) -> None:
    """Refuse a timeout that is no positive number of seconds, and a progress that cannot be called."""
    if not (is_seconds(timeout) and timeout > 0):
        raise InvalidOptionError(
            f"timeout={timeout!r} is not a positive number of seconds, and real ranks need an end. Pass one, such as "
            "120."
        )
    if progress is not None and not callable(progress):
        raise InvalidOptionError(
            f"progress={progress!r} is a {type(progress).__name__}, which cannot be called after each step of the "
            "audit. Pass a function progress(done, total), or None."
        )


# Look at this many items of all ranks together, unless the user says how many.
_MOST = 16_000_000

# One loader, and several: finished, or as a function returns them.
Loader: TypeAlias = DataLoader[Any] | Factory | Callable[[], DataLoader[Any]]
_Several: TypeAlias = Mapping[Any, Any] | list[Any] | tuple[Any, ...]
Loaders: TypeAlias = _Several | Callable[[], _Several] | Callable[[int, int], _Several]


@overload
def audit(
    loader: Loader,
    world_size: SupportsIndex,
    epochs: SupportsIndex = 2,
    *,
    patch: bool = True,
    patched: bool = False,
    set_epoch: bool = False,
    padding: bool = True,
    epochs_differ: bool = False,
    allow: Collection[Kind] = (),
    cost: Cost | None = None,
    cost_of: CostOf = "sum",
    cost_window: int = COST_WINDOW,
    max_items: SupportsIndex | None = None,
    processes: bool = False,
    timeout: float = 120.0,
    progress: Progress | None = None,
    **options: Any,
) -> Report: ...


@overload
def audit(
    loader: Loaders,
    world_size: SupportsIndex,
    epochs: SupportsIndex = 2,
    *,
    patch: bool = True,
    patched: bool = False,
    set_epoch: bool = False,
    padding: bool = True,
    epochs_differ: bool = False,
    allow: Collection[Kind] = (),
    cost: Cost | None = None,
    cost_of: CostOf = "sum",
    cost_window: int = COST_WINDOW,
    max_items: SupportsIndex | None = None,
    processes: bool = False,
    timeout: float = 120.0,
    progress: Progress | None = None,
    **options: Any,
) -> Reports: ...


@unpatched()  # the ranks that it simulates are none of a script's
def audit(
    loader: Loader | Loaders,
    world_size: SupportsIndex,
    epochs: SupportsIndex = 2,
    *,
    patch: bool = True,
    patched: bool = False,
    set_epoch: bool = False,
    padding: bool = True,
    epochs_differ: bool = False,
    allow: Collection[Kind] = (),
    cost: Cost | None = None,
    cost_of: CostOf = "sum",
    cost_window: int = COST_WINDOW,
    max_items: SupportsIndex | None = None,
    processes: bool = False,
    timeout: float = 120.0,
    progress: Progress | None = None,
    **options: Any,
) -> Report | Reports:
    """Run the sampling of every rank on this machine, and report what each rank would get of a loader.

    Args:
        loader: One of these, or a dict or list of them:

            - a loader. It is copied for every rank and not changed.
            - a function ``make()`` that returns a loader, or a dict or list of loaders.
            - a function ``make(rank, world_size)`` that returns a rank's finished loader, prepared by any library,
              or a dict or list of them. These are not patched. ``make(0, 1)`` is called, too: it shows what a single
              process would get.

            The audit reads indices from the ``batch_sampler`` or ``sampler``. It calls no dataset's ``__getitem__``,
            except where each rank holds other data in a list, array or tensor. An iterable dataset has no indices, so
            each simulated worker of each rank reads it, and so do those of one process. What a subclass adds in its
            own ``__iter__`` is not seen.
        world_size: The number of ranks.
        epochs: How many epochs to simulate.
        patch: Whether to patch a loader by ``patch_dataloader_to_ddp`` first; with False, it is audited as it is.
        patched: Whether to audit both before and after the patch. The report is that of before; ``report.patched`` is
            that of after. For a factory, that is ``make(0, 1)`` patched.
        set_epoch: Whether to call ``set_epoch(epoch)`` before each epoch. Say True if your training does.
        padding: Whether samples may be repeated to fill the last round of ranks. Say False for an evaluation.
        epochs_differ: Whether every epoch must have another order.
        allow: Kinds of problem to ignore, from ``ddp_patch.auditing.problem_kinds``. They are listed in
            ``report.allowed``.
        cost: What each sample costs, such as its length, in any unit: one number for each index of ``loader.dataset``
            (a sequence, array or tensor), or a function of an index. A factory's are indices in the dataset below
            torch's ``Subset`` layers. The report then says how long ranks wait for the slowest, in this loader and in
            the same one patched with ``cost=``, which is simulated and judged, too. Where whole batches are sharded, a
            batch costs what its samples do.
        cost_of: What a batch costs: the ``"sum"`` of its samples' costs, or where these are ``"padded"`` to the
            longest, the largest cost times their number.
        cost_window: How many steps ``patch_dataloader_to_ddp`` balances at once.
        max_items: How many items to look at in each rank's epoch, rounded up to a whole batch. If there are more, the
            report is of a sample. Without it, 16 million items of all ranks together are looked at.
        processes: Whether to use real ranks, processes of a gloo group. They differ in all that processes differ in,
            such as a hash seed. The loader or function must be picklable.
        timeout: Seconds until every real rank must have returned.
        progress: Called after each rank's epoch with how many are done, and how many there are.
        options: More options for ``patch_dataloader_to_ddp``.

    Returns:
        The report of one loader; of a dict or list of loaders, the reports by place, such as ``"val[0]"``. ``.ok``
        says whether all pass. The global random states are the same as before.

    Raises:
        NotALoaderError: ``loader`` is no loader, no function that returns one, and no dict or list of these.
        InvalidOptionError: An option has no meaning; the loader is one rank's shard already, or cannot be copied; or
            each rank has a dataset of its own, whose indices and samples cannot be compared.
        RanksFailedError: A real rank raised or did not return in time.
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
    ranks, passes = positive("world_size", world_size), positive("epochs", epochs)
    most = -(-_MOST // ranks) if max_items is None else positive("max_items", max_items)
    for name, value in {
        "patch": patch,
        "patched": patched,
        "set_epoch": set_epoch,
        "padding": padding,
        "epochs_differ": epochs_differ,
        "processes": processes,
    }.items():
        check_flag(name, value)
    check_both(patch, patched)
    check_allowed(allow)
    check_run(timeout, progress)
    check_options(options, processes)
    request = Request(
        ranks,
        passes,
        patch,
        patched,
        set_epoch,
        padding,
        epochs_differ,
        frozenset(allow),
        cost,
        cost_of,
        cost_window,
        most,
        processes,
        timeout,
        options,
    )
    show = progress or ignore
    leaves = leaves_of(loader)
    if list(leaves) == [""]:
        return request.report(leaves[""], show)
    return Reports({place: request.report(leaf, show) for place, leaf in leaves.items()})
