"""PyTorch Forecasting's loaders of time series."""

from typing import Any

import pandas as pd
from pytorch_forecasting import TimeSeriesDataSet

from third_party.base import Batch, Case, World

SERIES, STEPS = 7, 12


def series() -> TimeSeriesDataSet:
    """Series of numbers, none of which occurs twice."""
    rows = [
        {"series": str(number), "time": time, "value": float(number * STEPS + time)}
        for number in range(SERIES)
        for time in range(STEPS)
    ]
    return TimeSeriesDataSet(
        pd.DataFrame(rows),
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=4,
        max_prediction_length=2,
        time_varying_unknown_reals=["value"],
        target_normalizer=None,
    )


def first_values(batch: Any) -> Batch:
    """The first value that each sample's decoder has to predict."""
    return tuple(batch[1][0][:, 0].round().int().tolist())


def shuffled(world: World) -> Any:
    return series().to_dataloader(train=True, batch_size=4, num_workers=0)


def synchronized(world: World) -> Any:
    return series().to_dataloader(train=True, batch_size=4, num_workers=0, batch_sampler="synchronized")


CASES = [
    Case("pytorch-forecasting", "`TimeSeriesDataSet.to_dataloader()`", shuffled, items=first_values),
    Case("pytorch-forecasting", "`TimeSynchronizedBatchSampler`", synchronized, items=first_values, whole=True),
]
