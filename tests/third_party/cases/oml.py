"""OpenMetricLearning's batch samplers."""

from typing import Any

from oml.samplers.balance import BalanceSampler
from oml.samplers.category_balance import CategoryBalanceSampler
from oml.samplers.distinct_category_balance import DistinctCategoryBalanceSampler
from torch.utils.data import DataLoader

from third_party.base import Case, Numbers, World

N = 60
LABELS = [index % 10 for index in range(N)]
CATEGORIES = {label: label % 3 for label in range(10)}
PACKAGE = "open-metric-learning"


def drawn_by(sampler: Any) -> DataLoader[int]:
    return DataLoader(Numbers(N), batch_sampler=sampler)


def balanced(world: World) -> Any:
    return drawn_by(BalanceSampler(LABELS, n_labels=2, n_instances=3))


def by_category(world: World) -> Any:
    return drawn_by(CategoryBalanceSampler(LABELS, CATEGORIES, n_categories=2, n_labels=2, n_instances=2))


def by_distinct_category(world: World) -> Any:
    sampler = DistinctCategoryBalanceSampler(
        LABELS, CATEGORIES, n_categories=2, n_labels=2, n_instances=2, epoch_size=7
    )
    return drawn_by(sampler)


CASES = [
    Case(PACKAGE, "`BalanceSampler`", balanced, whole=True),
    Case(PACKAGE, "`CategoryBalanceSampler`", by_category, whole=True),
    Case(PACKAGE, "`DistinctCategoryBalanceSampler`", by_distinct_category, whole=True),
]
