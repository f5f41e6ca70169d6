"""The judge of users' programs sees what is lost."""

import pytest
from jobs import Epoch, Run, verdict


def epoch(*samples: int, steps: int = 1) -> Epoch:
    return Epoch([*range(4)], samples=[*samples], steps=steps)


WHOLE, LOST, UNEVEN = [epoch(0, 1), epoch(2, 3)], [epoch(0, 1), epoch(2, 2)], [epoch(0, 1), epoch(2, 3, steps=2)]
OF_EPOCH_0 = "lost in silence: epoch 0: 0 of 4 lost, 0 too many, steps [1, 2]"


@pytest.mark.parametrize(
    ("epochs", "error", "came"),
    [
        ([WHOLE], "", "complete"),
        ([WHOLE, LOST], "", "lost in silence: epoch 1: 1 of 4 lost, 1 too many, steps [1, 1]"),
        ([UNEVEN], "", OF_EPOCH_0),
        ([WHOLE, LOST], "RankMismatchError", "error"),
        ([UNEVEN, WHOLE], "RankMismatchError", f"{OF_EPOCH_0}; error in epoch 1"),
    ],
)
def test_the_judge_sees_what_is_lost(epochs: list[list[Epoch]], error: str, came: str) -> None:
    runs = [Run([ranks[rank] for ranks in epochs], error=error if rank else "") for rank in range(2)]
    assert verdict(runs) == came


def test_the_judge_sees_ranks_that_wait() -> None:
    stuck, ended = Run([epoch(0, 1)], is_stuck=True), Run([epoch(2, 3)])
    assert verdict([stuck, ended]) == "lost in silence: ranks wait for others that have ended"
    assert verdict([Run(failed="KeyError: 1"), ended]) == "failed: KeyError: 1"


def test_the_judge_sees_what_somebody_must_raise() -> None:
    alone, other = Run([epoch(0, 1)], owed="rank 0 validated alone"), Run([epoch(2, 3)])
    assert verdict([alone, other]) == "lost in silence: rank 0 validated alone"
    assert verdict([alone, Run([epoch(2, 3)], error="RankMismatchError")]) == "error"
