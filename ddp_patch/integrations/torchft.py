"""Share a loader by torchft's quorum: replicas come and go, and committed steps have each sample of an epoch once."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, Unpack

import torch
from torch.distributed import ReduceOp
from torch.utils.data import DataLoader
from torchft.manager import Manager

from ddp_patch.elastic import ElasticLoader
from ddp_patch.errors import InvalidOptionError, RankMismatchError
from ddp_patch.patching import PatchOptions
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.world import World, find_world
from ddp_patch.wrappers import split_options

__all__ = ["QuorumLoader"]

T = TypeVar("T")


class QuorumLoader(Generic[T]):
    """Returns each replica's share of the next global batch, among the replicas in torchft's step.

    The samples of a step that is not committed come again in the next one, for the replicas that take part then. A
    replica that joins gets the position with the rest of torchft's state. So each sample of an epoch comes once in the
    committed steps. In the last step of an epoch, padding fills the batches up, and weighs 0.

    Each replica takes batches of the loader's own size, so the global batch grows and shrinks with the quorum. With
    ``share="within_batches"``, the global batch stays the same: each batch of one process is divided over the replicas,
    and with the weights the committed steps train what one process trains.

    Args:
        manager: torchft's manager, made with ``use_async_quorum=False`` or ``init_sync=False``. Otherwise torchft
            throws away the gradients of all replicas but one in the first step.
        loader: The finished loader, which is not patched; built alike on every replica.
        name: The name of the position in torchft's state, if a manager has several loaders.
        device: Where the manager's process group reduces tensors: ``"cpu"`` with gloo, ``"cuda"`` with NCCL.
        options: The keywords of ``patch_dataloader_to_ddp``. The keywords ``device_mesh``, ``process_group``, ``rank``
            and ``num_replicas`` are about the ranks within this replica. Default: all ranks of the process group, if
            there is one.

    Raises:
        InvalidOptionError: An option cannot be kept when replicas come and go: ``share="by_worker"``,
            ``layout="contiguous"``, or ``uneven="keep"`` without ``share="within_batches"``.
        AlreadyPatchedError: Something else shards the loader.
        WorldError: The environment announces several ranks in this replica, and there is no process group.
        UnsupportedLoaderError: The loader has one iterator for all epochs, or cannot be sharded.
    """

    def __init__(
        self,
        manager: Manager,
        loader: DataLoader[T],
        *,
        name: str = "loader",
        device: torch.device | str = "cpu",
        **options: Unpack[PatchOptions],
    ) -> None:
        where, chosen = split_options("QuorumLoader", options, PatchOptions)
        self._within = find_world(**where) or World(0, 1)
        self._manager, self._device = manager, device
        self._loader: ElasticLoader[T] = ElasticLoader(loader, **chosen)
        manager.register_state_dict_fn(name, self.load_state_dict, self.state_dict)

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self._loader.epoch(self._manager.current_step())

    def next_batch(self) -> tuple[T, torch.Tensor]:
        """Return this replica's batch of the started step, and a weight for each of its samples.

        Let ``loss = (loss_per_sample * weights).sum()``: torchft averages the gradients over the replicas. On a replica
        that is healed or is a spare, all weights are 0, and torchft does not count its gradients.

        Raises:
            InvalidOptionError: No quorum was started; or torchft would throw away a replica's gradients.
            RankMismatchError: The replicas have different loaders or positions; every replica raises this error.
            DDPPatchError: Any error of ``restore_loader`` or ``iter_with_weights``.
        """
        rank, replicas = self._manager.participating_rank(), self._manager.num_participants()
        if not replicas:
            raise InvalidOptionError(
                "next_batch() was called before a quorum. Call manager.start_quorum() in each step."
            )
        self._compare(rank, replicas)
        batch, weights = self._loader.batch(self._manager.current_step(), *self._share(rank or 0, replicas))
        return batch, weights * (rank is not None)

    def _share(self, rank: int, replicas: int) -> tuple[int, int]:
        """Return the number of this process's share, and the number of shares, over all ranks of all replicas."""
        within = self._within
        return rank * within.num_replicas + within.rank, replicas * within.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the position before the current step, for a checkpoint beside ``manager.state_dict()``."""
        return self._loader.state(self._manager.current_step())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a position. torchft calls this on a replica that heals; call it to resume from a checkpoint.

        Raises:
            StateError: The state is damaged, or of another loader.
        """
        share = self._share(0, max(1, self._manager.num_participants()))
        self._loader.load(state_dict, self._manager.current_step(), *share)

    def _compare(self, rank: int | None, replicas: int) -> None:
        """Raise an error if replicas would take different batches; for a replica that is healed, torchft sums zeros."""
        manager, step = self._manager, self._manager.current_step()
        said = torch.zeros(2, replicas, dtype=torch.int64, device=self._device)
        if rank is not None:
            said[:, rank] = torch.tensor(self._loader.numbers(step), device=self._device)
        manager.allreduce(said, reduce_op=ReduceOp.SUM).wait()
        if manager.errored() is not None:  # this step is not committed
            return
        loaders, places = said.tolist()
        if not all(places):
            raise InvalidOptionError(
                f"torchft throws away the gradients of {ranks_text(_where(places, 0))} of {replicas} in step {step}, "
                "and their samples would be lost. Make the Manager with use_async_quorum=False; or with "
                "init_sync=False, and build the same model on every replica."
            )
        for what, numbers in {"loaders, datasets or options": loaders, "places in the epoch": places}.items():
            if len(set(numbers)) > 1:
                state = self.state_dict()
                kinds = "; ".join(ranks_text(_where(numbers, each)) for each in dict.fromkeys(numbers))
                raise RankMismatchError(
                    f"The replicas have other {what} in step {step}, so samples would be lost or repeated. Alike are, "
                    f"of {replicas}: {kinds}. This one is {rank}, at epoch {state['epoch']}, seed {state['seed']}, "
                    f"taken {state['taken']}. Build the loader alike on every replica, and call next_batch() once "
                    "a step."
                )


def _where(numbers: Sequence[int], value: int) -> list[int]:
    return [place for place, number in enumerate(numbers) if number == value]
