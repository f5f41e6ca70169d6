"""Replicas that come, go, fail and heal at random: each sample once in the steps that count, one place everywhere."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat, zip_longest
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, assume, given, settings
from quick import soaked
from resumed import OF_ANY_SIZE
from torch.utils.data import DataLoader
from zoo import seed_ambient

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.elastic import ElasticLoader

EPOCHS = 2
MOST = 16  # replicas


def cost_of(index: int) -> int:
    return 1 + index % 5


KINDS = ("sequential", "shuffled", "by a generator", "weighted", "without length", "stream", "stream with a state")
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in (*KINDS, "batches")),
    *((name, {"share": "within_batches"}) for name in (*KINDS, "batches")),
    *((name, {"cost": cost_of}) for name in ("sequential", "shuffled")),
]


@dataclass
class Replica:
    """A process: what it trains is the list of the steps that it has counted."""

    loader: ElasticLoader[Any]
    step: int = 0
    model: list[Any] = field(default_factory=list)


@dataclass
class Attempt:
    """What happens in one step.

    Attributes:
        alive: Who is in the quorum, of all replicas.
        fates: What each does when the gradients are there: "commits"; "fails", as it got an error; or "dies".
        heals_first: Whether a replica that joins is healed before the step, and takes part in it.
        has_gradients: Whether the exchange of gradients came to its end; else nobody commits.
        born_anew: Who was killed before, and begins with nothing.
    """

    alive: Sequence[bool]
    fates: Sequence[str]
    heals_first: bool
    has_gradients: bool
    born_anew: Sequence[bool]


def attempts(plan: random.Random, replicas: int, most: int) -> Iterator[Attempt]:
    """Yield what goes wrong in the first steps; half of them have the quorum of the one before."""
    alive = [True] * replicas
    for _ in range(plan.randint(0, most)):
        if plan.random() < 0.5:
            alive = [plan.random() < 0.75 for _ in range(replicas)]
        fates = plan.choices(["commits", "fails", "dies"], [6, 1, 1], k=replicas)
        born_anew = [plan.random() < 0.1 for _ in range(replicas)]
        yield Attempt(alive, fates, plan.random() < 0.5, plan.random() < 0.75, born_anew)


class Training:
    """Replicas that train as torchft lets them."""

    def __init__(self, make: Callable[[], DataLoader[Any]], options: Any, replicas: int) -> None:
        self.make, self.options, self.born = make, options, 0
        self.replicas = [self.replica() for _ in range(replicas)]

    def replica(self) -> Replica:
        self.born += 1
        seed_ambient(self.born)
        return Replica(ElasticLoader(self.make(), seed=11, **self.options))

    @property
    def epoch(self) -> int:
        """That of the replica which is farthest."""
        best = max(self.replicas, key=lambda one: one.step)
        return best.loader.epoch(best.step)

    def attempt(self, attempt: Attempt) -> None:
        for place, anew in enumerate(attempt.born_anew):
            if anew:
                self.replicas[place] = self.replica()
        places = [place for place, is_alive in enumerate(attempt.alive) if is_alive] or [0]
        quorum = [self.replicas[place] for place in places]
        step = max(one.step for one in quorum)
        # One that is ahead is lost: else there would be two models of one step, which numbers() tells apart.
        self.replicas = [self.replica() if one.step > step else one for one in self.replicas]
        source = next(one for one in quorum if one.step == step)
        state, epoch, model = source.loader.state(step), source.loader.epoch(step), [*source.model]
        joining = [one for one in quorum if one.step < step]
        takers = [one for one in quorum if attempt.heals_first or one.step == step]
        if attempt.heals_first:
            self.heal(joining, step, len(takers), state, model)
        assert len({one.loader.numbers(step) for one in takers}) == 1
        given = [one.loader.batch(step, rank, len(takers)) for rank, one in enumerate(takers)]
        if not attempt.heals_first:
            for one in joining:
                one.step = step  # as torchft sets it before it loads the rest
                assert one.loader.batch(step, 0, len(takers)) is not None  # something to run the model on
            self.heal(joining, step, len(takers), state, model)
        assert len({one.loader.numbers(step) for one in quorum}) == 1
        assert len({one.loader.numbers(step + 1) for one in quorum}) == 1
        for place, one in zip(places, quorum, strict=True):
            if attempt.has_gradients and attempt.fates[place] != "fails":
                one.model.append((epoch, given))
                one.step = step + 1
            if attempt.fates[place] == "dies":
                self.replicas[place] = self.replica()

    def heal(self, joining: Sequence[Replica], step: int, replicas: int, state: Any, model: Sequence[Any]) -> None:
        for one in joining:
            one.step, one.model = step, [*model]
            one.loader.load(state, step, 0, replicas)

    def trained(self, epoch: int) -> list[list[tuple[list[Any], torch.Tensor]]]:
        """Return what the farthest replica trained on in an epoch: the batches and weights of each step."""
        steps = max(self.replicas, key=lambda one: one.step).model
        return [given for number, given in steps if number == epoch]


def samples_of(given: Sequence[tuple[list[Any], torch.Tensor]], in_batches: bool) -> list[Any]:
    """Return the samples of a step that count, in the order of one process: one of each replica in turn, or batches."""
    real = [[sample for sample, weight in zip(batch, weights, strict=True) if weight] for batch, weights in given]
    turns = real if in_batches else zip_longest(*real, fillvalue=real)
    return [sample for turn in turns for sample in turn if sample is not real]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=[" ".join([name, *options]) for name, options in CASES])
@pytest.mark.parametrize(("examples", "most", "steps"), [(5, 5, 10), soaked(120, MOST, 15)])
def test_each_sample_comes_once_in_the_steps_that_count(
    kind: str, options: Any, examples: int, most: int, steps: int
) -> None:
    make_any = OF_ANY_SIZE[kind]

    @settings(max_examples=examples, phases=[Phase.generate])  # to shrink takes minutes
    @given(
        n=st.integers(1, 40),
        size=st.integers(1, 4),
        replicas=st.integers(2, most),
        last=st.integers(1, most),
        seed=st.integers(0, 2**32),
    )
    def check(n: int, size: int, replicas: int, last: int, seed: int) -> None:
        assume(kind != "without length" or n > 3)  # of which so many may be missing: an epoch needs a step
        training = Training(lambda: make_any(n, size), options, replicas)
        for attempt in attempts(random.Random(seed), replicas, steps):
            if training.epoch >= EPOCHS:
                break
            training.attempt(attempt)
        for alive in chain([[True] * replicas], repeat([place < last for place in range(replicas)])):
            if training.epoch >= EPOCHS:
                break
            # Nothing more goes wrong.
            training.attempt(Attempt(alive, ["commits"] * replicas, True, True, [False] * replicas))
        alone = patch_dataloader_to_ddp(make_any(n, size), rank=0, num_replicas=1, seed=11)
        for epoch in range(EPOCHS):
            of_steps = [samples_of(given, kind == "batches" and not options) for given in training.trained(epoch)]
            of_one = [*alone]
            if "share" in options:
                assert of_steps == of_one
            elif options:  # an order that follows from the number of replicas
                assert Counter(chain(*of_steps)) == Counter(chain(*of_one))
            else:
                assert list(chain(*of_steps)) == list(chain(*of_one))

    check()
