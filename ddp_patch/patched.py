"""The type of a patched loader, for annotations and ``isinstance``."""

from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import DataLoader, DistributedSampler

from ddp_patch.loaders.recognition import sharded_by
from ddp_patch.shares.epochs import EpochSampler

__all__ = ["PatchedLoader"]

T_co = TypeVar("T_co", covariant=True)


class _TypeOfPatched(type):
    """Has ``isinstance`` tell whether a loader is patched, whatever its class: a patched loader keeps the user's."""

    if not TYPE_CHECKING:  # type checkers narrow types by the usual ``isinstance`` alone

        def __instancecheck__(cls, instance):
            if cls is not PatchedLoader:
                return super().__instancecheck__(instance)
            # A loader around a wrapper that somebody made by hand cannot be told its epoch.
            is_loader = isinstance(instance, DataLoader) and callable(getattr(instance, "set_epoch", None))
            return is_loader and isinstance(sharded_by(instance), EpochSampler)


class PatchedLoader(DataLoader[T_co], metaclass=_TypeOfPatched):
    """A loader that this package has patched: a ``DataLoader`` that can be told its epoch.

    It is a type for annotations. At run time a patched loader keeps the class of the loader that was given, and
    ``isinstance(loader, PatchedLoader)`` tells whether it is patched. If your loader's class has attributes of its own,
    ``assert isinstance(loader, YourLoader)`` shows them to a type checker, too.

    Where there is only one process, ``patch_dataloader_to_ddp`` warns and returns the loader as it is, without
    ``set_epoch``.

    Attributes:
        sampler: What shards; its ``set_epoch`` is the loader's.

    Examples:
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = DataLoader(range(4), shuffle=True)
        >>> patched = patch_dataloader_to_ddp(loader, rank=0, num_replicas=2)
        >>> patched.set_epoch(3)
        >>> isinstance(patched, PatchedLoader), isinstance(loader, PatchedLoader)
        (True, False)
    """

    # torch leaves the type of a sampler open.
    sampler: DistributedSampler[Any]  # pyright: ignore[reportIncompatibleVariableOverride]

    if not TYPE_CHECKING:  # a class that cannot be made is none to narrow to

        def __new__(cls, *args, **options):
            """Refuse to be made."""
            raise TypeError("PatchedLoader is a type for annotations. Call patch_dataloader_to_ddp(loader) to get one.")

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one. Calling it is optional: a pass is followed by the next epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, by torch's Stateful protocol; see also ``loader_state``."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass resume where a state was taken; see also ``restore_loader``."""
