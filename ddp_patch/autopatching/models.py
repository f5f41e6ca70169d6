"""Notice whether the script made a model whose gradients the ranks average."""

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

from torch.nn.parallel import DistributedDataParallel

from ddp_patch.compat.torch_groups import imported_fsdp

__all__ = ["Models"]


class Models:
    """Sees, while entered, whether a ``DistributedDataParallel`` or an FSDP model is made.

    Attributes:
        seen: Whether one was.
    """

    def __init__(self) -> None:
        self._made = False
        self._stack = ExitStack()
        self._knows_fsdp = False

    def __enter__(self) -> Self:
        self._watch(DistributedDataParallel)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    @property
    def seen(self) -> bool:
        """Whether a model was seen."""
        fsdp = imported_fsdp()
        # fully_shard(), of torch 2.6 and newer, gives a model a class of its own that derives from this one.
        derived = getattr(fsdp, "FSDPModule", None)
        return self._made or (derived is not None and bool(derived.__subclasses__()))

    def find(self, loader: object = None) -> None:
        """Hook FSDP's wrapper if it was imported since; importing it takes long, so it is not imported here."""
        fsdp = imported_fsdp()
        if not self._knows_fsdp and hasattr(fsdp, "FullyShardedDataParallel"):
            self._knows_fsdp = True
            self._watch(fsdp.FullyShardedDataParallel)

    def _watch(self, kind: Any) -> None:
        begin = kind.__init__

        def init(model: Any, *args: Any, **options: Any) -> None:
            self._made = True
            begin(model, *args, **options)

        self._stack.enter_context(patch.object(kind, "__init__", init))
