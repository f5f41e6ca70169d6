"""The audit of loaders that accelerate and Lightning prepare for a rank: no false alarm, and what they do is found."""

from typing import Any

import audit_setups as setups
import pytest
from accelerate.data_loader import prepare_data_loader
from audit_setups import LABELS, Untouchable
from lightning.fabric import Fabric
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from ddp_patch import audit
from ddp_patch.samplers import PKBatchSampler


def in_order() -> DataLoader[Any]:
    return DataLoader(Untouchable(), batch_size=4)


def batches() -> DataLoader[Any]:
    return DataLoader(Untouchable(), batch_sampler=PKBatchSampler(LABELS, p=4, k=2, seed=1))


def accelerated(make: Any, **options: Any) -> Any:
    def prepared(rank: int, world_size: int) -> DataLoader[Any]:
        loader: DataLoader[Any] = prepare_data_loader(
            make(), num_processes=world_size, process_index=rank, put_on_device=False, **options
        )
        return loader

    return prepared


def wrapped_by_lightning(sampler: Any) -> Any:
    def prepared(rank: int, world_size: int) -> DataLoader[Any]:
        wrapper = DistributedSamplerWrapper(sampler, num_replicas=world_size, rank=rank, shuffle=False)
        return setups.loader(wrapper)

    return prepared


def wrapped_by_fabric(rank: int, world_size: int) -> Any:
    """As ``setup_dataloaders`` returns it: a wrapper that is no DataLoader, which tells epochs when it is iterated."""
    fabric = Fabric(accelerator="cpu", devices=1)
    return fabric.setup_dataloaders(setups.torchs(rank, world_size), use_distributed_sampler=False)


@pytest.mark.parametrize(
    ("make", "options", "problems"),
    [
        (accelerated(in_order), {}, ["padding"]),  # up to whole batches
        (accelerated(in_order, even_batches=False), {"allow": ["uneven_steps"]}, []),
        (wrapped_by_lightning(SequentialSampler(Untouchable())), {}, []),
        (wrapped_by_lightning(RandomSampler(Untouchable())), {}, ["ranks_disagree"]),  # which Lightning seeds alike
        (wrapped_by_fabric, {"set_epoch": True}, []),
        (wrapped_by_fabric, {}, ["same_order"]),
    ],
)
def test_what_others_prepare_is_audited_as_it_stands(make: Any, options: Any, problems: list[str]) -> None:
    report = audit(make, 4, **options)
    assert [problem.kind for problem in report.problems] == problems
