"""Tables that datasets hold: rows in another order on each rank show, at the patch and in a pass."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from torch.utils.data import Dataset

from ddp_patch.errors import RankMismatchError
from ddp_patch.loaders.columns import columns_digest, columns_of, compared
from ddp_patch.ranks.agreement import require_same_data

N = 40
NAMES = np.array([f"{index}.jpg" for index in range(N)])


class Holding(Dataset[Any]):
    """A user's dataset of the rows of a table."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return N


TABLES: dict[str, Callable[[Any], Any]] = {
    "pandas.DataFrame": lambda order: pd.DataFrame({"label": 0, "path": NAMES[order]}),
    "pandas.DataFrame, numbers alone": lambda order: pd.DataFrame({"x": np.arange(N)[order]}),
    "pandas.DataFrame, by its index": lambda order: pd.DataFrame({"path": NAMES}).iloc[order],
    "pandas.Series": lambda order: pd.Series(NAMES[order]),
    "polars.DataFrame": lambda order: pl.DataFrame({"label": 0, "path": NAMES[order]}),
    "polars.Series": lambda order: pl.Series(NAMES[order]),
    "pyarrow.Table": lambda order: pa.table({"path": NAMES[order]}),
    "pyarrow.ChunkedArray": lambda order: pa.table({"path": NAMES[order]})["path"],
    "pyarrow.Array": lambda order: pa.array(NAMES[order]),
}


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("is_held", [True, False], ids=["held", "the dataset itself"])
def test_rows_in_another_order_are_told(kind: str, is_held: bool) -> None:
    orders = [np.random.default_rng(rank).permutation(N) for rank in (0, 1)]
    first, other, alike = (TABLES[kind](order) for order in (*orders, orders[0]))
    told = [columns_of(Holding(table) if is_held else table) for table in (first, other, alike)]
    require_same_data({0: told[0], 1: told[2]})
    with pytest.raises(RankMismatchError, match="rows" if is_held else "the elements of a"):
        require_same_data({0: told[0], 1: told[1]})


@pytest.mark.parametrize("kind", TABLES)
def test_rows_that_one_rank_shuffles_before_an_epoch_are_told(kind: str) -> None:
    datasets = [Holding(TABLES[kind](np.arange(N))) for _ in (0, 1)]
    columns = compared(dict(enumerate(map(columns_of, datasets)))).kept
    assert columns_digest(datasets[0], columns) == columns_digest(datasets[1], columns) != ""
    datasets[1].rows = TABLES[kind](np.random.default_rng(1).permutation(N))
    assert columns_digest(datasets[0], columns) != columns_digest(datasets[1], columns) != ""
