"""How long a rank waits, at the end of a pass whose end nobody knew, for others that may be given more."""

from types import SimpleNamespace
from typing import Any

import pytest

from ddp_patch.ranks import pass_monitor
from ddp_patch.ranks.log import LoggedPass, Progress
from ddp_patch.ranks.pass_monitor import PassMonitor


@pytest.mark.parametrize(("batches", "step_s", "waits_s"), [(0, 0, 1), (1, 0.1, 1), (3, 2.0, 4), (3, 100.0, 60)])
def test_it_waits_a_second_or_for_two_steps(
    batches: int, step_s: float, waits_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 10_000.0
    slept: list[float] = []
    monkeypatch.setattr(pass_monitor, "perf_counter", lambda: now_s)
    monkeypatch.setattr(pass_monitor, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(pass_monitor, "sleep", lambda _: slept.append(0.25))
    given: Any = SimpleNamespace(
        leave=lambda *_: None,
        count=lambda *_: 0,
        left=lambda _: None,
        is_open=False,
        post=lambda *_: None,
        members=[0, 1],
    )
    monitor, begun = PassMonitor(given), LoggedPass(0, "0", lambda: Progress(0, 0))
    given.is_open = True
    for number in range(1, batches + 1):
        monitor.give_step(begun, number)
        now_s += step_s
    now_s = 10_000.0 + max(0, batches - 1) * step_s
    monitor.end_steps(begun, batches)
    assert waits_s <= sum(slept) <= waits_s + 0.5
