"""What docs/questions.md says of several trainings in one process, and of the guard outside of pytest."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from quick import run_ranks
from torch.utils.data import DataLoader, Subset

from ddp_patch import gather_in_order, patch_dataloader_to_ddp
from ddp_patch.errors import NotPatchedError

DATA: Any = torch.arange(60)


def validate_in_three_folds(rank: int, world_size: int) -> list[list[int]]:
    """Return what was validated in each fold, of which the second is given up early, on all ranks."""
    validated = []
    for fold in range(3):
        of_training, of_validation = ([i for i in range(60) if (i % 3 == fold) is wanted] for wanted in (False, True))
        training = DataLoader(Subset(DATA, of_training), 4, shuffle=True)
        validation = DataLoader(Subset(DATA, of_validation), 4)
        training, validation = patch_dataloader_to_ddp((training, validation), seed=7)
        for _ in range(2):
            for step, _ in enumerate(training):
                if fold == 1 and step == 2:
                    break
        validated.append(gather_in_order(torch.cat(list(validation)), validation).tolist())
    return validated


def try_settings_in_two_groups(rank: int, world_size: int) -> list[int]:
    """Ranks 0 and 1 make one training, ranks 2 and 3 two; return how many samples each epoch of this rank had."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    seen = []
    for _ in range(1 + rank // 2):
        loader = patch_dataloader_to_ddp(DataLoader(DATA, 4, shuffle=True), process_group=groups[rank // 2])
        seen += [sum(map(len, loader)) for _ in range(2)]
    return seen


def try_settings_alone(rank: int, world_size: int) -> int:
    """Each rank makes a training of its own, in a group of its own."""
    group = [dist.new_group([one]) for one in range(world_size)][rank]
    loader = patch_dataloader_to_ddp(DataLoader(DATA, 4), process_group=group)
    return sum(len(batch) for _ in range(1 + rank) for batch in loader)


@pytest.mark.parametrize(
    ("trainings", "world_size", "expected"),
    [
        (validate_in_three_folds, 2, [[[*range(fold, 60, 3)] for fold in range(3)]] * 2),
        (try_settings_in_two_groups, 4, [[30] * 2] * 2 + [[30] * 4] * 2),
        (try_settings_alone, 2, [60, 120]),
    ],
)
def test_several_trainings_in_one_process(
    trainings: Callable[[int, int], object], world_size: int, expected: list[object]
) -> None:
    assert run_ranks(trainings, world_size) == expected


def iterate_what_nobody_patched(rank: int, world_size: int) -> str:
    try:
        return f"{len(list(DataLoader(DATA)))} batches"
    except NotPatchedError as error:
        return str(error)


def test_a_variable_of_the_environment_guards_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(iterate_what_nobody_patched, 2) == ["60 batches"] * 2
    monkeypatch.setenv("DDP_PATCH_GUARD", "1")
    for rank, told in enumerate(run_ranks(iterate_what_nobody_patched, 2)):
        assert f"Rank {rank} of 2 iterates a DataLoader that is not sharded" in told
