"""What is refused, or is not, where one thing hides another."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from ddp_patch import DDPBatchSamplerWrapper, patch_dataloader_to_ddp
from ddp_patch.errors import UnsupportedLoaderError


class Split(IterableDataset[int]):
    """As ``split_dataset_by_node()`` leaves a Hugging Face stream."""

    _distributed = "rank 0 of 2"

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class AwareOver(IterableDataset[int]):
    is_ddp_aware = True

    def __init__(self) -> None:
        self.dataset = Split()

    def __iter__(self) -> Iterator[int]:
        return iter(self.dataset)


def test_a_split_dataset_inside_one_that_shards_itself_is_refused() -> None:
    with pytest.raises(UnsupportedLoaderError, match="split_dataset_by_node"):
        patch_dataloader_to_ddp(DataLoader(AwareOver()), rank=0, num_replicas=2)


def test_a_subclass_of_the_batch_wrapper_may_take_batch_size_and_drop_last() -> None:
    class Own(DDPBatchSamplerWrapper[list[int]]):
        def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
            super().__init__(BatchSampler(sampler, batch_size, drop_last), False, rank=1, num_replicas=2)

    assert list(Own(SequentialSampler(range(8)), batch_size=2, drop_last=False)) == [[2, 3], [6, 7]]
