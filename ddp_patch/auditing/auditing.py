"""Run the audit: check what the user asks for, then draw, judge and report."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, cast

from torch.utils.data import DataLoader

from ddp_patch.auditing.balancing import balanced, costs_of_samples
from ddp_patch.auditing.draw.made_up_world import MadeUpWorld, Progress
from ddp_patch.auditing.draw.subject import Factory, Subject
from ddp_patch.auditing.inspection import Expectations, Inspection
from ddp_patch.auditing.report import Kind, Report, problem_kinds
from ddp_patch.autopatching.exempt import unpatched
from ddp_patch.costs import Cost, CostOf, Costs
from ddp_patch.errors import InvalidOptionError
from ddp_patch.loaders.facts import look_at
from ddp_patch.options import COST_WINDOW, Options, check_flag, is_seconds, whole_number

__all__ = ["audit"]

# Draw this many items of all ranks together, unless the user says how many.
_MOST = 16_000_000

# Refuse these options of patch_dataloader_to_ddp(): the audit says itself which rank a loader is for.
_OF_A_REAL_RANK = {"device", "rank", "num_replicas", "process_group", "device_mesh", "data_parallel_dimensions"}
# Refuse these values without real ranks: they make ranks communicate.
_COMMUNICATING = {"agreement": "leader", "verify": True}


@unpatched()  # the ranks that it makes up are none of a script's
def audit(
    loader: DataLoader[Any] | Factory,
    world_size: SupportsIndex,
    epochs: SupportsIndex = 2,
    *,
    patch: bool = True,
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
) -> Report:
    """Run the sampling of every rank on this machine, and report what each rank would get of a loader.

    Args:
        loader: A loader, which is copied for every rank and not changed; or a function ``make(rank, world_size)`` that
            returns a rank's finished loader, prepared by any library, which is not patched. ``make(0, 1)`` is called,
            too: it shows what a single process would get. Indices are drawn from the ``batch_sampler`` or ``sampler``,
            and no dataset's ``__getitem__`` is called, but that of lists, arrays and tensors of which every rank has
            others. An iterable dataset has no indices, so each simulated worker of each rank reads it, and so do those
            of one process. What a subclass adds in its own ``__iter__`` is not seen.
        world_size: The number of ranks.
        epochs: How many epochs each rank draws.
        patch: Whether to patch a loader by ``patch_dataloader_to_ddp`` first; with False, it is audited as it is.
        set_epoch: Whether to call ``set_epoch(epoch)`` before each epoch. Say True if your training does.
        padding: Whether samples may be repeated to fill the last round of ranks. Say False for an evaluation.
        epochs_differ: Whether every epoch must have another order.
        allow: Kinds of problem that do not make the audit fail, from ``ddp_patch.auditing.problem_kinds``. They are
            listed in ``report.allowed``.
        cost: What each sample costs, such as its length, in any unit: one number for each index of ``loader.dataset``
            (a sequence, array or tensor), or a function of an index. A factory's are indices in the dataset below
            torch's ``Subset`` layers. The report then says how ranks wait for the slowest, in this loader and in the
            same one patched with ``cost=``, which is drawn and judged, too. Where whole batches are shared, a batch
            costs what its samples do.
        cost_of: What a batch costs: the ``"sum"`` of its samples' costs, or where these are ``"padded"`` to the
            longest, the largest cost times their number.
        cost_window: How many steps ``patch_dataloader_to_ddp`` deals at once.
        max_items: How many items to draw of each rank's epoch, rounded up to a whole batch. If there are more, the
            report is of a sample. Without it, 16 million items of all ranks together are drawn.
        processes: Whether to draw on real ranks, processes of a gloo group, which differ in all that processes differ
            in, such as a hash seed. The loader or function must be picklable.
        timeout: Seconds until every real rank must have returned.
        progress: Called after each draw with how many draws are done, and how many there are.
        options: More options for ``patch_dataloader_to_ddp``.

    Returns:
        The report. ``report.ok`` says whether the loader passes. The global random states are the same as before.

    Raises:
        NotALoaderError: ``loader`` is neither a loader nor a function that returns one.
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
    ranks, passes = _positive("world_size", world_size), _positive("epochs", epochs)
    most = -(-_MOST // ranks) if max_items is None else _positive("max_items", max_items)
    for name, value in {
        "patch": patch,
        "set_epoch": set_epoch,
        "padding": padding,
        "epochs_differ": epochs_differ,
        "processes": processes,
    }.items():
        check_flag(name, value)
    _check_allowed(allow)
    _check_run(timeout, progress)
    _check_options(options, processes)
    make = look_at(loader) if isinstance(loader, DataLoader) else loader
    subject = Subject(make, patch, options, set_epoch, most)
    costs = _costs(subject, cost, cost_of, cost_window)
    expect = Expectations(padding, epochs_differ, frozenset(allow), costs_of_samples(subject, costs))
    draws = _Draws(progress or _ignore)

    def world_of(subject: Subject) -> MadeUpWorld:
        return MadeUpWorld(subject, ranks, passes, processes, timeout, draws)

    given = world_of(subject)
    if costs is None:
        return Inspection(given, expect).report()
    again = balanced(subject, costs, cost_window, ranks, processes)
    if isinstance(again, str):
        return replace(Inspection(given, expect).report(), why_not_balanced=again)
    draws.worlds = 2
    report = Inspection(given, expect).report()
    del given  # free its ranks, before the others are made
    draws.before = 1
    return report.beside(Inspection(world_of(again), expect).report())


def _costs(subject: Subject, cost: Cost | None, cost_of: CostOf, cost_window: int) -> Costs | None:
    """Check what samples cost, and what is said of it."""
    options = Options(cost=cost, cost_of=cost_of, cost_window=cost_window)
    if options.cost_window != COST_WINDOW and not subject.patches:
        raise InvalidOptionError(
            f"audit was given cost_window={cost_window} for patch_dataloader_to_ddp(), which is not called. Leave it "
            "out, or pass an unpatched loader."
        )
    return options.costs


@dataclass(slots=True)
class _Draws:
    """Show how many draws are done, of one world or of two.

    Attributes:
        show: Called after each draw with how many are done, and how many there are.
        worlds: How many worlds are drawn.
        before: How many of them are done.
    """

    show: Progress
    worlds: int = 1
    before: int = 0

    def __call__(self, done: int, total: int) -> None:
        self.show(self.before * total + done, self.worlds * total)


def _positive(name: str, value: SupportsIndex) -> int:
    found = whole_number(name, value)
    if found < 1:
        raise InvalidOptionError(f"audit with {name}={found} can draw nothing: pass a whole number of at least 1.")
    return found


def _check_options(options: Mapping[str, Any], processes: bool) -> None:
    if given := sorted(_OF_A_REAL_RANK & options.keys()):
        raise InvalidOptionError(
            f"audit was given {', '.join(given)} for patch_dataloader_to_ddp(), which says where one real rank is, and "
            "makes a world of its own. Leave that out; for a device mesh, pass a factory that makes it, and "
            "processes=True."
        )
    for name, value in _COMMUNICATING.items():
        if options.get(name) == value and not processes:
            raise InvalidOptionError(
                f"audit with {name}={value!r} needs ranks that communicate, and those of one process do not. Pass "
                "processes=True, too."
            )


def _check_allowed(allow: Collection[str]) -> None:
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


def _check_run(timeout: object, progress: object) -> None:
    if not (is_seconds(timeout) and timeout > 0):
        raise InvalidOptionError(
            f"timeout={timeout!r} is not a positive number of seconds, and real ranks need an end. Pass one."
        )
    if progress is not None and not callable(progress):
        raise InvalidOptionError(
            f"progress={progress!r} is a {type(progress).__name__}, which cannot be called after each draw. Pass a "
            "function progress(done, total), or None."
        )


def _ignore(done: int, total: int) -> None:
    pass
