"""Where torch's loaders take items from a dataset."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from ddp_patch.compat.private_torch import private

__all__ = ["items_changed"]


class _Items:
    """Stands for a dataset while a batch is made of its items.

    Args:
        dataset: The dataset.
        item_of: Returns an item, by the dataset and the index.
    """

    def __init__(self, dataset: Any, item_of: Callable[[Any, Any], Any]) -> None:
        self._dataset, self._item_of = dataset, item_of

    def __getitem__(self, index: Any) -> Any:
        return self._item_of(self._dataset, index)


@contextmanager
def items_changed(item_of: Callable[[Any, Any], Any], change: Callable[[Any], Any]) -> Iterator[None]:
    """Let torch's loaders, and workers that are forked, change the items of datasets while entered.

    Args:
        item_of: Returns an item of a dataset, by the dataset and the index.
        change: Returns what is put in the place of an item.
    """
    of_map, of_stream = (
        private(f"torch.utils.data._utils.fetch.{name}", "Checking a script")
        for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher")
    )
    fetch, make = of_map.fetch, of_stream.__init__

    def fetching(self: Any, index: Any) -> Any:
        dataset = self.dataset
        self.dataset = _Items(dataset, lambda of, index: change(item_of(of, index)))
        try:
            return fetch(self, index)
        finally:
            self.dataset = dataset

    def making(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.dataset_iter = map(change, self.dataset_iter)

    with patch.object(of_map, "fetch", fetching), patch.object(of_stream, "__init__", making):
        yield
