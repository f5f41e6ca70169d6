"""Share a loader among replicas that come and go, step by step, so that each sample of an epoch comes once.

A position says how many samples all replicas have taken. The rest of the epoch is a stream that any number of replicas
can share. All replicas keep the same position, which moves when a step counts. A replica's batch of a step is its share
of the next global batch:

    step   replicas   batches    counts   batches taken after it
    0      3          0 1 2      yes      3
    1      3          3 4 5      no       3                        one was killed
    1      2          3 4        yes      5                        the others go on
    2      3          5 6 7      yes      8
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from ddp_patch.errors import AlreadyPatchedError, InvalidOptionError, NoStepsError, UnsupportedLoaderError
from ddp_patch.evaluation import iter_with_weights
from ddp_patch.loader import PatchedLoader
from ddp_patch.loaders.facts import LoaderFacts, data_of, look_at
from ddp_patch.loaders.nested_samplers import copy_to_draw, nested_samplers
from ddp_patch.options import Options
from ddp_patch.orders.chunks import copy_item, start_iterating
from ddp_patch.orders.digest import number_of
from ddp_patch.orders.orders import has_order, order_of
from ddp_patch.orders.random_states import look, random_generators, seeded_anew, set_generator_state
from ddp_patch.patching import patch_dataloader_to_ddp
from ddp_patch.ranks.claims import unwatched
from ddp_patch.resume import loader_state, restore_loader
from ddp_patch.sharding.saved_state import epoch_after
from ddp_patch.sharding.values_as_text import from_text

T = TypeVar("T")

# How many first items of an order the replicas compare, when they meet before drawing.
_COMPARED = 256


class ElasticLoader(Generic[T]):
    """Shares a loader among replicas that come and go: returns a replica's batch of a step, and keeps the position.

    Args:
        loader: The finished loader, which is not patched.
        options: The keywords of ``patch_dataloader_to_ddp`` that say how to share the loader.

    Raises:
        InvalidOptionError: An option cannot be kept when replicas come and go.
        AlreadyPatchedError: Something else shards the loader.
        UnsupportedLoaderError: A pass over the loader cannot begin within an epoch.

    Examples:
        >>> loader = ElasticLoader(DataLoader(range(10), batch_size=2))
        >>> [loader.batch(0, rank, 2)[0].tolist() for rank in range(2)]  # nobody commits step 0
        [[0, 2], [1, 3]]
        >>> loader.batch(0, 0, 1)[0].tolist(), loader.batch(1, 0, 1)[0].tolist()  # step 1 follows: step 0 counts
        ([0, 1], [2, 3])
        >>> loader.state(1)["taken"], loader.state(2)["taken"]
        ([2], [4])
    """

    def __init__(self, loader: DataLoader[T], **options: Any) -> None:
        chosen = Options(**options)
        if chosen.by_worker:
            raise InvalidOptionError(
                "share='by_worker' does not work with replicas that come and go: the dataset splits itself over all "
                "workers, whose number would change within the epoch. Leave share out."
            )
        if chosen.uneven == "keep" and not chosen.divides_batches:
            raise InvalidOptionError(
                "uneven='keep' does not work with replicas that come and go: in an epoch's last step some would have "
                "no batch, and the others wait for them. Use 'pad', or share='within_batches'."
            )
        if chosen.gives_runs:
            raise InvalidOptionError(
                "layout='contiguous' does not work with replicas that come and go: the runs follow from how many they "
                "are. Leave layout out."
            )
        if (sharded_by := (facts := look_at(loader)).sharded_by) is not None:
            raise AlreadyPatchedError(
                f"The {type(loader).__name__} is sharded already, by a {type(sharded_by).__name__}, for a number of "
                "replicas that will change. Pass the loader without what shards it."
            )
        if facts.repeater is not None:
            raise UnsupportedLoaderError(
                f"The {type(loader).__name__} has one iterator for all epochs, so it cannot be shared anew within one. "
                "Use a DataLoader that makes a new iterator for each pass."
            )
        self._loader, self._options = loader, options
        self._step: int | None = None  # the step whose batch was returned last
        self._shared_by: tuple[int, int] | None = None  # rank and number of replicas; None before the first batch
        self._patched = self._patch(0, 1)
        # The positions before and after that step.
        self._state = self._after = loader_state(self._patched)
        self._steps: Iterator[tuple[T, torch.Tensor]] = iter(())
        self._ahead: tuple[T, torch.Tensor] | None = None
        self._taken = 0
        self._loader_number = _number_of_loader(facts)

    def batch(self, step: int, rank: int, num_replicas: int) -> tuple[T, torch.Tensor]:
        """Return this replica's batch of a step, and the weights of its samples.

        Asking for the next step says that the latest one counts. Asking for the same step again goes back to the
        position before it.

        Args:
            step: The number of the step, which grows by one with each step that counts.
            rank: This replica's rank in the step.
            num_replicas: How many replicas take part.

        Raises:
            NoStepsError: The epoch has no step for this many replicas.
            DDPPatchError: Any error of ``restore_loader`` or ``iter_with_weights``.
        """
        self._state = self.state(step)
        shared_by, goes_on = (rank, num_replicas), self._step is not None and step == self._step + 1
        given = self._ahead if goes_on and shared_by == self._shared_by else None
        self._shared_by = None  # stays None if this call fails
        if given is None:
            given = self._begin(rank, num_replicas)
        self._taken += 1
        after = loader_state(self._patched, batches_done=self._taken)
        # Read one batch ahead, so that the position says whether the epoch has ended.
        self._ahead = next(self._steps, None)
        if self._ahead is None:
            after = loader_state(self._patched, batches_done=self._taken)
        self._step, self._after, self._shared_by = step, after, shared_by
        return given

    def state(self, step: int) -> dict[str, Any]:
        """Return the position before the latest step, or before the next one, in the format of ``loader_state``."""
        return self._after if self._step is not None and step == self._step + 1 else self._state

    def epoch(self, step: int) -> int:
        """Return the epoch of a step. The step after an epoch's last one belongs to the next epoch."""
        return epoch_after(self.state(step))

    def load(self, state: dict[str, Any], step: int, rank: int, num_replicas: int) -> None:
        """Take over another replica's position before a step, even if this replica already has a batch of the step.

        Args:
            state: What ``state`` returned on the other replica.
            step: The step.
            rank: The rank of any replica that takes part in the step: this replica's batch does not count.
            num_replicas: How many replicas take part.

        Raises:
            StateError: The state is of another loader.
        """
        was_given = self._step == step
        self._state, self._step = state, None
        if was_given:  # that batch followed from the old position: take the batch of the new position
            self.batch(step, rank, num_replicas)

    def numbers(self, step: int) -> tuple[int, int]:
        """Return two fingerprints of 60 bits, equal on all replicas: of the loader, and of the position before a step.

        Args:
            step: The step.
        """
        state = self.state(step)
        states = {name: kept for name, kept in from_text(state["states"]).items() if name != "streams"}
        position = [state[name] for name in ("epoch", "seed", "taken", "turn")]
        return number_of([self._loader_number, state["loader"]]), number_of([position, states])

    def _patch(self, rank: int, num_replicas: int) -> PatchedLoader[T]:
        with unwatched():  # the process group, if there is one, has only a part of the replicas
            return patch_dataloader_to_ddp(self._loader, **self._options, rank=rank, num_replicas=num_replicas)

    def _begin(self, rank: int, num_replicas: int) -> tuple[T, torch.Tensor]:
        """Share the rest of the epoch from the position on, and return the first batch."""
        self._ahead = None
        self._steps = iter(())  # ends the workers
        self._patched, self._taken = self._patch(rank, num_replicas), 0
        restore_loader(self._patched, self._state)
        self._steps = iter_with_weights(self._patched)
        first = next(self._steps, None)
        if first is None:  # the rest is less than one step of this many replicas: begin the next epoch
            self._steps = iter_with_weights(self._patched)
            first = next(self._steps, None)
        if first is None:
            raise NoStepsError(
                f"An epoch of the {type(self._loader).__name__} has no batch for {num_replicas} replicas. Give it more "
                "samples, or a smaller batch_size."
            )
        return first


def _number_of_loader(facts: LoaderFacts[Any]) -> int:
    """Return a fingerprint of a loader: of its facts, its first items in order, and its dataset's samples."""
    stream, first = facts.stream, list[Any]()
    # The items of an iterable dataset or of a generator are not compared: they cannot be drawn from a copy.
    with suppress(Exception), look(seed=0), copy_to_draw(stream.source, facts.dataset) as drawn:
        for generator in random_generators(nested_samplers(drawn)):  # their states are a part of the position
            set_generator_state(generator, seeded_anew(generator, None))
        items = order_of(drawn, epoch=0).items() if has_order(drawn) else start_iterating(drawn)
        first = list(map(copy_item, islice(items, _COMPARED)))
    return number_of([facts.described, first, data_of(facts.dataset)])
