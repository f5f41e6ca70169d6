"""A patched loader in every framework is shared once, whatever the framework does to loaders that are not patched."""

from collections import Counter
from collections.abc import Callable
from itertools import chain

import pytest
from frameworks import FRAMEWORKS, framework
from frameworks.base import Epochs, Raised, measure
from frameworks.judge import judge
from frameworks.kinds import KINDS, Batch, Kind
from frameworks.page import AS_PATCHED, Row, read_table, table

RANKS = 2
# Starting Ray takes most of a minute.
MODULES = [pytest.param(name, marks=pytest.mark.ray) if name.startswith("ray_") else name for name in FRAMEWORKS]


# By parts of torch that ignite imports.
@pytest.mark.filterwarnings(r"ignore:.torch.jit.\w+. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("module", MODULES)
def test_a_patched_loader_is_shared_once(module: str, record_property: Callable[[str, object], None]) -> None:
    described = framework(module)
    ranks = measure(module, RANKS)
    for kind in KINDS:
        assert_shared_once(kind, [require(rank[kind.name, True]) for rank in ranks], described.moves)
    rows: list[Row] = []
    for kind in KINDS:
        unpatched, patched = (judge(kind, [rank[kind.name, fate] for rank in ranks]) for fate in (False, True))
        assert patched == AS_PATCHED
        rows.append((kind.name, unpatched))
    measured = table(described.versions, rows)
    record_property("frameworks", (module, measured))
    assert read_table(module) == measured, "docs/frameworks.md says otherwise: `nox -s integrations` writes it"


def require(measured: Epochs | Raised) -> Epochs:
    assert not isinstance(measured, Raised), measured.report
    return measured


def assert_shared_once(kind: Kind, ranks: list[Epochs], moves: bool) -> None:
    """Every sample is one rank's, but for what fills the last round; steps are equal; ``set_epoch`` works."""
    for shares in zip(*ranks, strict=True):
        assert len({len(share) for share in shares}) == 1
        batches = [batch.numbers for share in shares for batch in share]
        taken = Counter(chain.from_iterable(batches))
        assert set(taken) == set(range(kind.n))
        if kind.is_whole is None:
            assert taken.total() - kind.n < RANKS
        else:
            assert all(map(kind.is_whole, batches))
            times = Counter(tuple(sorted(batch)) for batch in batches)
            assert times.total() - len(times) < RANKS
    for first, second, third, second_again in ranks:
        assert numbers(first) != numbers(second) != numbers(third) != numbers(first)
        assert numbers(second_again) == numbers(second)
    if moves:
        assert all(batch.moved_to == ("cpu",) for epochs in ranks for epoch in epochs for batch in epoch)


def numbers(epoch: list[Batch]) -> list[list[int]]:
    return [batch.numbers for batch in epoch]
