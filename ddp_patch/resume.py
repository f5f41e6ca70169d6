"""Save and restore a loader's place in its epochs: stop anywhere, resume with any number of ranks."""

import json
from typing import Any, SupportsIndex

from torch.utils.data import DataLoader

from ddp_patch.compat.torch_loaders import forget_iterator
from ddp_patch.errors import InvalidOptionError, StateError
from ddp_patch.options import as_index
from ddp_patch.ranks.agreement import refusals_told
from ddp_patch.shares.batches import Batches, patched_sampler, require_batches
from ddp_patch.shares.iterables.dataset import ShardedIterable
from ddp_patch.shares.place import Place
from ddp_patch.streams.fingerprint import fingerprint
from ddp_patch.streams.generators import random_generators

__all__ = ["go_on", "loader_state", "restore_loader", "state_as_found"]

_RESTORING = "Restoring a loader's state"


def loader_state(loader: DataLoader[Any], *, batches_done: SupportsIndex | None = None) -> dict[str, Any]:
    """Return where a patched loader stands in its epoch, as a small plain dict.

    The state is the same on every rank, so any one's will do, and the ranks do not communicate. Save it beside the
    model with ``torch.save`` or ``pickle``; ``json`` works unless a sampler has a ``state_dict`` of its own.

    Args:
        loader: A loader from ``patch_dataloader_to_ddp``.
        batches_done: How many batches the training loop has finished since the pass began, as ``enumerate(loader)``
            counts them. Default: those that the loader has handed out, without those that workers have prefetched. Pass
            it if something between the loader and the loop fetches ahead. After the last batch, the state is the
            beginning of the next epoch.

    Returns:
        The state. ``state["epoch"]`` is the epoch in which training resumes.

    Raises:
        NotPatchedError: The loader was not patched.
        InvalidOptionError: The pass has not yielded that many batches.
        UnsupportedLoaderError: The loader yields its batches in another order than it draws them.
        StateError: The order depends on something that no state holds (``agreement="ambient"``), or nobody counts what
            the loader hands out (its class iterates in a way of its own): pass ``batches_done``.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(12), batch_size=2), rank=0, num_replicas=2)
        >>> for step, batch in enumerate(loader):
        ...     if step == 0:
        ...         state = loader_state(loader)
        >>> state["epoch"], state["done"]
        (0, [[2, 2]])
        >>> resumed = patch_dataloader_to_ddp(DataLoader(range(12), batch_size=2), rank=0, num_replicas=1)
        >>> restore_loader(resumed, state)
        >>> len(resumed), [batch.tolist() for batch in resumed]
        (4, [[4, 5], [6, 7], [8, 9], [10, 11]])
    """
    done = None if batches_done is None else _checked(batches_done)
    batches = _known(loader)
    return batches.state_after(batches.handed_out(loader) if done is None else done)


def state_as_found(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the state after what a loader has handed out, as far as this rank knows: frameworks load that of one rank.

    They take a pass for over when as many batches were given as ``len()`` says, and would take a rest of no batches for
    the next epoch.

    Raises:
        StateError: The place is not known; see ``loader_state`` also for other errors.
    """
    batches = _known(loader)
    return batches.state_after(batches.handed_out(loader), as_found=True)


def _known(loader: DataLoader[Any]) -> Batches:
    """Return how a patched loader makes its batches; raise if its place cannot be told."""
    batches = require_batches("loader_state", loader)
    dataset = loader.dataset
    if isinstance(dataset, ShardedIterable) and loader.persistent_workers and random_generators([dataset.dataset]):
        raise StateError(
            f"The state of {type(dataset.dataset).__name__} cannot be told: it holds a random generator, which "
            "persistent workers move where it is not seen. Use persistent_workers=False."
        )
    return batches


def _checked(batches_done: SupportsIndex) -> int:
    done = as_index(batches_done)
    if done is None or done < 0:
        raise InvalidOptionError(
            f"batches_done={batches_done!r} is not a whole number of at least 0. Pass how many batches the training "
            "loop has finished since the pass began."
        )
    return done


def restore_loader(loader: DataLoader[Any], state: dict[str, Any]) -> None:
    """Make a freshly patched loader resume where ``loader_state`` was called, in any world.

    The next pass yields the rest of that epoch, and ``len(loader)`` counts that rest; later passes are whole epochs.
    In the same world, all passes match those of a run that never stopped. In another world, or with another batch size
    over the same sampler, the items from before and after make up the epoch's stream, each once except for the last
    round's padding. A loader that was patched without ``seed=`` takes the state's seed over. Restoring reads no samples
    of a map-style dataset: it only draws the skipped indices again, or jumps over them if the sampler has random
    access.

    Args:
        loader: A loader built like the saved one and then patched. Every rank must restore the same state.
        state: What ``loader_state`` returned, or a sampler's ``state_dict()``.

    Raises:
        NotPatchedError: The loader was not patched.
        StateError: The state is damaged, newer than this package, or of another loader or chosen seed. The loader
            stays as it was.
        RankMismatchError: Ranks restore different states, or some cannot restore; raised on every rank.
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
    go_on(loader, state, tells_rest=True)


def _require_left(batches: Batches, place: Place) -> None:
    """Refuse a rest of no batches where a loader asks for as many batches as len() says, and never finds the end."""
    left = batches.sampler.left(place)
    if left is not None and batches.count(left) < 1:
        raise StateError(
            f"The loader cannot go on from the state: rank {batches.sampler.rank} has no batch left in epoch "
            f"{place.epoch}, and a loader with one iterator for all epochs would never come to its end. Restore with "
            "the number of ranks that the state was taken with, or leave the rest out: call "
            f"set_epoch({place.epoch + 1}) on every rank."
        )


def go_on(loader: DataLoader[Any], state: dict[str, Any], *, tells_rest: bool) -> None:
    """Restore a loader; ``tells_rest=False`` keeps a whole epoch's length, for loops that count from its beginning."""
    sampler = patched_sampler("restore_loader", loader)
    with refusals_told(sampler.agreed.world, _RESTORING):
        place = sampler.read(state).following()
        if sampler.given is not None and place.is_begun:
            _require_left(require_batches("restore_loader", loader), place)
    sampler.agreed.compare(
        _RESTORING,
        {
            "seed": place.seed,
            "epoch to go on in": place.epoch,
            "done": json.dumps(place.done),
            "done of each part": None if place.parts is None else json.dumps([place.parts.first, *place.parts.done]),
            "held": fingerprint([place.held.generators, place.held.samplers, place.held.attributes]),
        },
    )
    sampler.go_to(place, tells_rest=tells_rest)
    forget_iterator(loader)
