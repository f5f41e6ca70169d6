"""Stopped anywhere and gone on with any number of ranks, any number of times: each epoch's stream exactly once."""

from collections import Counter
from itertools import islice
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import assume, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from quick import soaked
from resumed import OF_ANY_SIZE
from zoo import seed_ambient

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader

MOST_RANKS = 6
WITHOUT_LENGTH = {"without length", "without length, by a generator", "bare", "stream", "stream with a state"}


class Resuming(RuleBasedStateMachine):
    """Ranks that step together, are stopped, and go on as others."""

    @initialize(
        n=st.integers(0, 40),
        kind=st.sampled_from([*OF_ANY_SIZE]),
        uneven=st.sampled_from(["pad", "drop", "keep"]),
        batch_size=st.integers(1, 5),
    )
    def begin(self, n: int, kind: str, uneven: Any, batch_size: int) -> None:
        # A round that nobody takes is refused where it is all there is; a stream may be 3 items shorter than n.
        assume(uneven != "drop" or n == 0 or n >= MOST_RANKS + 3)
        self.n, self.make = n, OF_ANY_SIZE[kind]
        self.is_batches, self.has_length = "batches" in kind, kind not in WITHOUT_LENGTH
        self.options: Any = {"uneven": uneven, "seed": 11}
        self.reference = patch_dataloader_to_ddp(self.make(n, 1), rank=0, num_replicas=1, seed=11)
        self.epoch = 0
        self.stream = self.next_stream()
        self.taken: Counter[Any] = Counter()
        self.most_padding = 0
        self.state: Any = None
        self.start(2, batch_size)

    def next_stream(self) -> Counter[Any]:
        return Counter(self.units(list(self.reference)))

    def units(self, batches: list[Any]) -> list[Any]:
        return [str(batch) for batch in batches] if self.is_batches else [item for batch in batches for item in batch]

    def start(self, num_replicas: int, batch_size: int) -> None:
        self.loaders: list[Any] = []
        for rank in range(num_replicas):
            seed_ambient(rank)
            loader = patch_dataloader_to_ddp(
                self.make(self.n, batch_size), rank=rank, num_replicas=num_replicas, **self.options
            )
            if self.state is not None:
                restore_loader(loader, self.state)
                if self.state["turn"] is None:
                    assert list(loader) == []
            self.loaders.append(loader)
        self.iterators: list[Any] = []
        self.done = [0] * num_replicas

    @rule(num_replicas=st.integers(1, MOST_RANKS), batch_size=st.integers(1, 5))
    def go_on_as_others(self, num_replicas: int, batch_size: int) -> None:
        self.start(num_replicas, batch_size)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        if not self.iterators:
            self.iterators = [iter(loader) for loader in self.loaders]
            self.most_padding = max(self.most_padding, len(self.loaders) - 1)
        has_ended = True
        for rank, iterator in enumerate(self.iterators):
            batches = list(islice(iterator, steps))
            self.taken.update(self.units(batches))
            self.done[rank] += len(batches)
            has_ended &= len(batches) < steps
        states = [loader_state(loader) for loader in self.loaders]
        for loader, done, state in zip(self.loaders, self.done, states, strict=True):
            assert loader_state(loader, batches_done=done) == state  # it counts as the loop does
        self.state = states[0]
        if self.options["uneven"] != "keep":
            assert all(state == states[0] for state in states)
        if has_ended or self.state["turn"] is None:
            self.end()

    def end(self) -> None:
        for iterator in self.iterators:
            assert next(iterator, None) is None
        self.iterators = []
        missing, repeated = self.stream - self.taken, self.taken - self.stream
        most = len(self.loaders) - 1
        assert missing.total() <= most if self.options["uneven"] == "drop" else not missing
        if not self.has_length:
            most = self.most_padding  # of those that reached the end: nobody knew it before, and others may follow
        assert repeated.total() <= most if self.options["uneven"] == "pad" else not repeated
        if self.state["turn"] is not None:  # whose end was not known: nothing of it is left
            self.state = loader_state(self.loaders[0], batches_done=self.done[0])
        assert (self.state["epoch"], self.state["turn"]) == (self.epoch, None)
        self.epoch += 1
        self.stream, self.taken, self.most_padding = self.next_stream(), Counter(), 0
        self.start(len(self.loaders), 2)


@pytest.mark.parametrize("examples", [12, soaked(400)])
def test_a_pass_resumes_whenever_and_on_however_many_ranks(examples: int) -> None:
    run_state_machine_as_test(Resuming, settings=settings(max_examples=examples, stateful_step_count=30))
