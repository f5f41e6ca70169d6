"""Save and restore a loader's position: stop anywhere, resume mid-epoch with any number of ranks."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, SupportsIndex

from torch.utils.data import DataLoader

from ddp_patch.compat.private_torch import forget_iterator
from ddp_patch.errors import CannotResumeWarning, DDPPatchError, InvalidOptionError, StateError, message_of
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.loaders.recognition import sharded_by
from ddp_patch.orders.digest import fingerprint
from ddp_patch.ranks.agreement import failures_broadcast
from ddp_patch.sharding.loader_passes import items_left
from ddp_patch.sharding.patched_loaders import batches_delivered, passes_of, patched_facts, patched_sampler
from ddp_patch.sharding.sampler import EpochSampler
from ddp_patch.sharding.saved_state import Position, no_state, position_in, state_after
from ddp_patch.streams.dataset import ShardedIterable
from ddp_patch.validation import as_index

_RESTORING = "Restoring a loader's state"


def loader_state(loader: DataLoader[Any], *, batches_done: SupportsIndex | None = None) -> dict[str, Any]:
    """Save a patched loader's position in its epoch: return it as a small plain dict.

    The state is the same on every rank, so save any rank's. The ranks do not communicate. Save the state with the
    model, in any format: it has numbers, texts and lists of numbers.

    Args:
        loader: A loader from ``patch_dataloader_to_ddp``.
        batches_done: How many batches the training loop has finished in this epoch, as ``enumerate(loader)`` counts
            them. Default: the batches that the loader has delivered to the loop, without prefetched batches. Pass the
            number if something between the loader and the loop prefetches.

    Returns:
        The state. ``state["epoch"]`` is the epoch in which training resumes. After the last batch of an epoch, this is
        still the same epoch, with no batch left. The first pass after a restore then yields nothing, and the loop goes
        on with what follows an epoch, such as validation.

    Raises:
        NotPatchedError: The loader was not patched.
        InvalidOptionError: The pass has not yielded that many batches.
        UnsupportedLoaderError: The loader yields its batches in another order than it draws them.
        StateError: No state can describe the order (a sampler that is an iterator); or the loader's class has its own
            ``__iter__``, so its batches are not counted: pass ``batches_done``.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(12), batch_size=2), rank=0, num_replicas=2)
        >>> for step, batch in enumerate(loader):
        ...     if step == 0:
        ...         state = loader_state(loader)
        >>> state["epoch"], state["taken"]
        (0, [4])
        >>> resumed = patch_dataloader_to_ddp(DataLoader(range(12), batch_size=2), rank=0, num_replicas=1)
        >>> restore_loader(resumed, state)
        >>> len(resumed), [batch.tolist() for batch in resumed]
        (4, [[4, 5], [6, 7], [8, 9], [10, 11]])
    """
    done = None if batches_done is None else as_index(batches_done)
    if batches_done is not None and (done is None or done < 0):
        raise InvalidOptionError(
            f"batches_done={batches_done!r} is not a whole number of at least 0. Pass how many batches the training "
            "loop has finished since the pass began."
        )
    facts = _resumable(loader)
    return state_after(passes_of(facts), batches_delivered(facts) if done is None else done, facts.batching)


def state_on_this_rank(loader: DataLoader[Any], *, ahead: int = 0) -> dict[str, Any]:
    """Return the state after the batches that were delivered on this rank, for frameworks, which save one rank's state.

    To a framework, a pass has ended after ``len()`` batches. So the state says that the pass has ended if this rank
    knows it, even if other ranks may not know it yet.

    Args:
        loader: The loader.
        ahead: How many of the delivered batches the training loop has not finished.

    Raises:
        StateError: The position is not known; see ``loader_state`` for other errors.
    """
    facts = _resumable(loader)
    return state_after(passes_of(facts), batches_delivered(facts) - ahead, facts.batching, on_this_rank=True)


def state_or_reason(
    loader: DataLoader[Any], take: Callable[[], dict[str, Any]], *, warns: bool = True
) -> dict[str, Any]:
    """Return a state for a checkpoint that may never be restored, or a placeholder with the reason why there is none.

    Args:
        loader: The patched loader.
        take: Returns the state, or raises an error.
        warns: Whether the checkpoint would have nothing but the placeholder.

    Warns:
        CannotResumeWarning: There is no state; once for each loader.
    """
    try:
        return take()
    except DDPPatchError as error:
        why, sampler = message_of(error), sharded_by(loader)
        if warns and isinstance(sampler, EpochSampler) and sampler.rank_passes.is_first("no state"):
            warnings.warn(
                f"A checkpoint is saved from which the {type(loader).__name__} cannot resume: {why}",
                CannotResumeWarning,
                stacklevel=3,
            )
        return no_state(why)


def batches_as_here(loader: DataLoader[Any], state: dict[str, Any]) -> int | None:
    """Return how many batches of the whole epoch come before a state, counted on the present number of ranks.

    Return None if an epoch without length has ended. The loader is not changed.

    Raises:
        StateError: The state is not of this loader.
    """
    facts = patched_facts("restore_loader", loader)
    passes, batching = passes_of(facts), facts.batching
    position = position_in(passes, state)
    left, whole = (items_left(passes, place) for place in (position, Position(position.epoch)))
    if left is not None and whole is not None:
        return batching.count(whole) - batching.count(left)
    if position.is_ended:
        return None
    return position.taken_of_all // passes.agreed.world.num_replicas // batching.size


def _resumable(loader: DataLoader[Any]) -> LoaderFacts[Any]:
    """Return the facts of a patched loader; raise an error if its position cannot be saved."""
    facts, dataset = patched_facts("loader_state", loader), loader.dataset
    if isinstance(dataset, ShardedIterable) and loader.persistent_workers:
        dataset.require_no_generator()
    return facts


def restore_loader(loader: DataLoader[Any], state: dict[str, Any]) -> None:
    """Resume mid-epoch: make a newly patched loader continue where ``loader_state`` was called.

    The next pass yields the rest of the epoch, and ``len(loader)`` is the length of the rest. Later passes are whole
    epochs. On the same number of ranks, all batches are the same as in a run that never stopped. On another number of
    ranks, or with another batch size over the same sampler, each item of the epoch still comes once, except for
    padding.

    A loader that was patched without ``seed=`` gets the state's seed. Restoring reads no samples of a map-style
    dataset. The skipped indices are drawn again, or skipped at once if the sampler has random access.

    Args:
        loader: A loader that was built like the saved one and then patched. Every rank must restore the same state.
        state: What ``loader_state`` returned, or a sampler's ``state_dict()``.

    Raises:
        NotPatchedError: The loader was not patched.
        StateError: The state is damaged, newer than this package, or of another loader or ``seed=``. The loader stays
            as it was.
        RankMismatchError: Ranks restore different states, or a rank cannot restore; every rank raises this error.
        MissingRanksError: A rank did not arrive in time.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = DataLoader(range(100), batch_size=10, shuffle=True)
        >>> first = patch_dataloader_to_ddp(loader, rank=1, num_replicas=2)
        >>> whole, following = [list(first), list(first)]
        >>> stopped, resumed = [patch_dataloader_to_ddp(loader, rank=1, num_replicas=2) for _ in range(2)]
        >>> _ = next(iter(stopped))
        >>> restore_loader(resumed, loader_state(stopped))
        >>> bool((torch.stack(list(resumed)) == torch.stack(whole[1:])).all())
        True
        >>> bool((torch.stack(list(resumed)) == torch.stack(following)).all())
        True
    """
    resume_loader(loader, state, counts_rest=True)


def resume_loader(loader: DataLoader[Any], state: dict[str, Any], *, counts_rest: bool) -> None:
    """Restore a loader; ``counts_rest=False`` keeps ``len()`` of a whole epoch, for loops that count from its start."""
    passes = patched_sampler("restore_loader", loader).rank_passes
    with failures_broadcast(passes.agreed.world, _RESTORING):
        position = position_in(passes, state)
        left = items_left(passes, position) if passes.loader.has_one_iterator and position.is_within_pass else None
        if left is not None and patched_facts("restore_loader", loader).batching.count(left) < 1:
            raise StateError(
                f"The loader cannot resume from the state: rank {passes.agreed.world.rank} has no batch left in epoch "
                f"{position.epoch}, and a loader with one iterator for all epochs would never find its end. Restore it "
                "on the number of ranks that saved it, or leave the rest out: call "
                f"set_epoch({position.epoch + 1}) on every rank."
            )
        states = _compared(position)
        passes.sampler_states.require_loadable(position.states)  # now, so that all ranks refuse what one cannot load
    passes.agreed.compare(
        _RESTORING,
        {
            "seed": position.seed,
            "epoch to resume in": position.epoch,
            "steps made in it": position.steps,
            "items taken of it": _in_words(position),
            "ranks that began it": position.ranks,
            "digest of its order": position.order,
            "worker whose batch is next": position.turn,
            "samplers": states,
        },
    )
    passes.resume_at(position, counts_rest=counts_rest)
    forget_iterator(loader)


def _in_words(position: Position) -> str:
    """Return in words how many items of an epoch were taken."""
    return "all" if position.is_ended else " + ".join(map(str, position.taken)) or "none"


def _compared(position: Position) -> str:
    """Return a fingerprint of the samplers' states, for the ranks to compare."""
    try:
        return fingerprint([replace(position.states, streams=())])
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number that Python does not write
        raise StateError(
            f"The state is damaged: its field states cannot be read to its end ({type(error).__name__}). Pass what "
            "loader_state(), or state_dict(), returned, as it was saved."
        ) from error
