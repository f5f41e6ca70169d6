"""torchsampler's sampler for imbalanced data sets."""

from torchsampler import ImbalancedDatasetSampler

from third_party.base import Case, N, Numbers, drawn_by

LABELS = [int(index < 4) for index in range(N)]
CASES = [
    Case(
        "torchsampler",
        "`ImbalancedDatasetSampler`",
        lambda world: drawn_by(ImbalancedDatasetSampler(Numbers(), labels=LABELS)),
    )
]
