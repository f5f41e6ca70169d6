"""Have Lightning's Trainer share its loaders by this package, by one callback."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

from lightning.pytorch import Callback
from torch.utils.data import DataLoader, IterableDataset

from ddp_patch.compat.frameworks import LIGHTNING_TAKES_LOADERS
from ddp_patch.errors import NotDistributedWarning
from ddp_patch.patching import patch_dataloader_to_ddp
from ddp_patch.several import PatchOptions

__all__ = ["PatchDataLoaders"]

_KEEPER, _METHOD = LIGHTNING_TAKES_LOADERS
_WORLD = {"rank", "num_replicas", "process_group", "device_mesh"}


class PatchDataLoaders(Callback):  # type: ignore[misc]  # lightning is not there where types are checked
    """A callback that patches each loader which the Trainer trains, validates, tests or predicts with.

    It takes the loaders that ``trainer.fit`` and the like are given, and those of the hooks of a module or a data
    module; also in lists, dicts and a ``CombinedLoader``. The Trainer adds no sampler of its own to them, whatever
    ``use_distributed_sampler`` says, and keeps their place in its checkpoints. What is no ``DataLoader`` of torch's
    stays as it is. So does everything where there is one process.

    Args:
        options: The keywords of ``patch_dataloader_to_ddp``, for all loaders. Default of ``device_mesh``: the
            module's, which ``ModelParallelStrategy`` makes.

    Raises:
        DDPPatchError: From ``trainer.fit`` and the like, as in ``patch_dataloader_to_ddp``.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
        >>> loader = DataLoader(RandomDataset(32, 64), batch_size=4, shuffle=True)
        >>> sharing = PatchDataLoaders(rank=1, num_replicas=2)  # leave the world out where there is a process group
        >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> trainer = Trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=False, callbacks=sharing, **quiet)
        >>> trainer.fit(BoringModel(), loader)
        >>> trainer.global_step, len(loader)
        (8, 16)
    """

    def __init__(self, **options: Unpack[PatchOptions]) -> None:
        super().__init__()
        self._options = options

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have the Trainer hand its loaders over, from before it asks for them."""
        keeper = getattr(trainer, _KEEPER)
        take = partial(getattr(type(keeper), _METHOD), keeper)
        setattr(keeper, _METHOD, partial(self._take, take, pl_module))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the Trainer be as it was."""
        vars(getattr(trainer, _KEEPER)).pop(_METHOD, None)

    def _take(self, take: Callable[..., Any], module: Any, loader: object, *args: Any, **how: Any) -> Any:
        if isinstance(loader, DataLoader):
            loader = self._patched(loader, module)
            if isinstance(loader.dataset, IterableDataset):
                # It has no indices to track; to predict, the Trainer would make the loader anew, without its sampler.
                return loader
        return take(loader, *args, **how)

    def _patched(self, loader: DataLoader[Any], module: Any) -> DataLoader[Any]:
        options = self._options
        if module.device_mesh is not None and options.keys().isdisjoint(_WORLD):
            options = {**options, "device_mesh": module.device_mesh}
        with warnings.catch_warnings():
            # One process is nothing to warn of here: the group would exist by now.
            warnings.simplefilter("ignore", NotDistributedWarning)
            return patch_dataloader_to_ddp(loader, **options)
