"""torchgeo's samplers of places and times, and not of indices."""

from typing import Any

import geopandas
import pandas as pd
import shapely
from torch.utils.data import DataLoader
from torchgeo.datasets import GeoDataset
from torchgeo.samplers import GridGeoSampler, PreChippedGeoSampler, RandomBatchGeoSampler, RandomGeoSampler

from third_party.base import Batch, Case, World

FILES = 7


class Fields(GeoDataset):  # type: ignore[misc]  # torchgeo is not installed where types are checked
    """Square fields side by side, without pictures: a sample is where it was taken from."""

    def __init__(self) -> None:
        times = pd.IntervalIndex.from_tuples(
            [(pd.Timestamp(2024, 1, 1), pd.Timestamp(2024, 1, 2))] * FILES, name="datetime"
        )
        squares = [shapely.box(20 * number, 0, 20 * number + 20, 20) for number in range(FILES)]
        self.index = geopandas.GeoDataFrame(index=times, geometry=squares, crs="EPSG:3857")
        self.res = 1.0

    def __getitem__(self, where: Any) -> Any:
        return repr(where)


def drawn_by(kind: Any, **options: Any) -> Any:
    return DataLoader(Fields(), 2, sampler=kind(Fields(), **options), collate_fn=list)


def batches(world: World) -> Any:
    sampler = RandomBatchGeoSampler(Fields(), size=8, batch_size=3, length=21)
    return DataLoader(Fields(), batch_sampler=sampler, collate_fn=list)


def places(batch: Any) -> Batch:
    return tuple(batch)


CASES = [
    Case("torchgeo", "`RandomGeoSampler`", lambda world: drawn_by(RandomGeoSampler, size=8, length=21), items=places),
    Case("torchgeo", "`GridGeoSampler`", lambda world: drawn_by(GridGeoSampler, size=8, stride=6), items=places),
    Case(
        "torchgeo", "`PreChippedGeoSampler`", lambda world: drawn_by(PreChippedGeoSampler, shuffle=True), items=places
    ),
    Case("torchgeo", "`RandomBatchGeoSampler`", batches, items=places, whole=True),
]
