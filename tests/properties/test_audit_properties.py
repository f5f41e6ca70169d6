"""The audit's verdict on any partition of a dataset, against a count by hand."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from audit_setups import Untouchable
from hypothesis import event, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset

from ddp_patch import audit
from ddp_patch.auditing.judge.causes import coverage_kinds

Loaded = Callable[[list[int], int, int], DataLoader[Any]]

# Ways to give a rank its samples: (its samples, how many there are to share, batch size).
WAYS: dict[str, Loaded] = {
    "sampler": lambda own, n, size: DataLoader(Untouchable(n + 2), size, sampler=own),
    "Subset": lambda own, n, size: DataLoader(Subset(Untouchable(n + 2), own), size),
    "Subset of a Subset": lambda own, n, size: DataLoader(
        Subset(Subset(Untouchable(2 * n + 2), range(n, 2 * n + 2)), own), size
    ),
    "list": lambda own, n, size: DataLoader([f"{index}.jpg" for index in own], size),  # type: ignore[arg-type]  # a list
}


@st.composite
def shares(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Draw how many samples there are, and what each rank gets of them: right, or with faults."""
    n, world = draw(st.integers(1, 30)), draw(st.integers(2, 5))
    order = draw(st.permutations(range(n)))
    parts = [order[rank::world] for rank in range(world)]
    if draw(st.booleans()):
        most = max(map(len, parts))
        parts = [part + order[: most - len(part)] for part in parts]
    for _ in range(draw(st.sampled_from([0, 0, 1, 2, 6]))):
        part = parts[draw(st.integers(0, world - 1))]
        if draw(st.booleans()):
            part.append(draw(st.integers(0, n + 1)))  # again, or one that is not to be shared
        elif part:
            part.pop()
    return n, parts


def is_right(n: int, parts: list[list[int]], batch_size: int) -> bool:
    """Count by hand: complete, nothing foreign, no repeats beyond padding, and equal steps."""
    got = Counter(sample for part in parts for sample in part)
    repeats = sum(got.values()) - len(got)
    return (
        set(got) == {*range(n)} and repeats <= -n % len(parts) and len({-(-len(p) // batch_size) for p in parts}) == 1
    )


@given(shares(), st.integers(1, 8), st.sampled_from(sorted(WAYS)))
def test_exactly_right_shares_hold(made: tuple[int, list[list[int]]], batch_size: int, way: str) -> None:
    n, parts = made

    def make(rank: int, world_size: int) -> DataLoader[Any]:
        return WAYS[way]([*range(n)] if world_size == 1 else parts[rank], n, batch_size)

    report = audit(make, len(parts), epochs=1)
    event(", ".join(problem.kind for problem in report.problems) or "holds")
    assert report.ok == is_right(n, parts, batch_size)
    (epoch,) = report.epochs
    got = Counter(sample for part in parts for sample in part)
    assert epoch.missing == len({*range(n)} - set(got))
    assert epoch.foreign == sum(times for sample, times in got.items() if sample >= n)
    assert epoch.repeated == sum(times - 1 for sample, times in got.items() if sample < n)


@given(shares(), st.integers(1, 8), st.sampled_from(["sampler", "Subset"]))
def test_of_parts_made_once_only_the_whole_dataset_holds(
    made: tuple[int, list[list[int]]], batch_size: int, way: str
) -> None:
    """The factory ignores the world's size, so the audit may approve only what is right of the dataset's own length."""
    n, parts = made

    def make(rank: int, world_size: int) -> DataLoader[Any]:
        return WAYS[way](parts[rank], n - 2, batch_size)

    report = audit(make, len(parts), epochs=1, allow=[*coverage_kinds - {"ignores_world_size"}, "error"])
    if is_right(n, parts, batch_size) and {*parts[0]} != {*range(n)}:
        assert report.ok, report
    if "ignores world_size" in report.how:
        assert is_right(n, parts, batch_size) or report.problems
