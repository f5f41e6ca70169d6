"""The keyed bijection: exact for every n, and as good a shuffle as ``torch.randperm`` by the same statistics."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from quick import soaked

from ddp_patch.samplers import keyed as module
from ddp_patch.samplers.keyed import Permutation

Shuffle = Callable[[int, int], npt.NDArray[np.int64]]


def keyed(n: int, seed: int) -> npt.NDArray[np.int64]:
    return Permutation(n, np.random.SeedSequence(seed))(np.arange(n))


def torchs(n: int, seed: int) -> npt.NDArray[np.int64]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).numpy()


@pytest.fixture(params=[True, False], ids=["table", "network"])
def _either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ranges are shuffled in a table; here also by the network, which has to hold for larger ones."""
    if not request.param:
        monkeypatch.setattr(module, "_TABLE", 3)


@pytest.mark.usefixtures("_either")
def test_every_small_range_is_permuted_exactly() -> None:
    for n in range(3000):
        assert np.array_equal(np.sort(keyed(n, n)), np.arange(n))


@pytest.mark.parametrize("n", [2**16, 2**16 + 1, 99_991, 2**17 - 1, 2**17, 2**17 + 1, 2**20 + 7])
def test_larger_ranges_are_permuted_exactly(n: int) -> None:
    assert np.array_equal(np.sort(keyed(n, 0)), np.arange(n))


@pytest.mark.parametrize("n", [100, 10**6, 10**12, 2**62, 2**63 - 1])
def test_any_position_is_reached_by_itself(n: int) -> None:
    shuffled = Permutation(n, np.random.SeedSequence(5))
    positions = np.array([0, 1, n // 2, n - 2, n - 1])
    together = shuffled(positions)
    assert together.tolist() == [shuffled(np.array([position])).item() for position in positions]
    assert len(set(together.tolist())) == 5
    assert together.min() >= 0
    assert together.max() < n
    assert positions.tolist() == [0, 1, n // 2, n - 2, n - 1]  # left as they were


# Statistics over many seeds. Each is a z-score or a chi-square brought to one; the same bounds hold for torch.randperm.

AWKWARD = [7, 31, 64, 127, 128, 129, 257, 521, 1000]
MANY = 2000
BOUND = 5.0  # standard deviations: over all of these tests together, by chance about once in 10,000 runs of new seeds


def chi_square(counts: npt.NDArray[np.int64], degrees: int) -> float:
    expected = counts.mean()
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


def scores(shuffle: Shuffle, n: int) -> dict[str, float]:
    orders = np.stack([shuffle(n, seed) for seed in range(MANY)])
    columns = np.arange(n)
    fixed = (orders == columns).sum(axis=1)
    bins = min(n, 16)
    places = np.zeros((bins, bins))
    np.add.at(places, (np.broadcast_to(columns * bins // n, orders.shape), orders * bins // n), 1)
    sizes = np.bincount(columns * bins // n)
    expected = np.outer(sizes, sizes) * MANY / n
    steps = (orders[:, 1:] - orders[:, :-1]) % n  # each of 1 to n - 1 alike
    neighbours = np.bincount(steps.ravel(), minlength=n)[1:]
    centred = orders - (n - 1) / 2
    serial = (centred[:, 1:] * centred[:, :-1]).sum(axis=1) / (centred**2).sum(axis=1)  # -1/n on the average
    displacement = np.abs(orders - columns).mean(axis=1)
    return {
        "fixed points": float((fixed.mean() - 1) * np.sqrt(MANY)),
        "positions": float(((places - expected) ** 2 / expected).sum() - (bins - 1) ** 2)
        / np.sqrt(2 * (bins - 1) ** 2),
        "neighbours": chi_square(neighbours, n - 2),
        "serial correlation": float((serial + 1 / n).mean() / serial.std() * np.sqrt(MANY)),
        "displacement": float((displacement - (n * n - 1) / (3 * n)).mean() / displacement.std() * np.sqrt(MANY)),
    }


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("n", [n if place % 3 == 0 else soaked(n) for place, n in enumerate(AWKWARD)])
def test_it_shuffles_as_well_as_randperm(n: int) -> None:
    for name, score in scores(torchs, n).items():
        assert abs(score) < BOUND, ("torch.randperm", name)
    for name, score in scores(keyed, n).items():
        assert abs(score) < BOUND, name


@pytest.mark.parametrize("n", [2, 3])
def test_of_the_smallest_ranges_every_order_comes_alike(n: int) -> None:
    orders, counts = np.unique([keyed(n, seed) for seed in range(6000)], axis=0, return_counts=True)
    assert len(orders) == {2: 2, 3: 6}[n]
    assert abs(chi_square(counts, len(orders) - 1)) < BOUND
