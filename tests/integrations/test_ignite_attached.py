"""ignite's engines: an attached loader resumes by their own checkpoints; a patched one, where they make it anew."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import pytest
import torch
from frameworks.kinds import Pairs
from messages import raises
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from zoo import seed_ambient

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import AlreadyPatchedError, InvalidOptionError, NotDistributedWarning, StateError

with warnings.catch_warnings():
    # Importing ignite imports parts of torch that use torch.jit, which torch 2.13 deprecates.
    warnings.filterwarnings("ignore", r"`torch.jit.\w+` is deprecated", DeprecationWarning)
    from ignite.engine import DeterministicEngine, Engine, Events

    from ddp_patch.integrations.ignite import attach_loader

N = 24
DATA: Any = range(N)


class Stream(IterableDataset[int]):
    """Has no length: an engine learns it at the end of the first epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(N).tolist())


# A loader, and after which steps to resume. In its first epoch, an engine over one without length has no state that it
# can load.
RESUMED: dict[str, tuple[Callable[[], DataLoader[Any]], Sequence[int]]] = {
    "stream": (lambda: DataLoader(Stream(), 3), (5, 8)),
    "whole batches": (lambda: DataLoader(DATA, batch_sampler=Pairs(N)), (2, 3, 5)),
    "workers": (lambda: DataLoader(DATA, 3, shuffle=True, num_workers=1, persistent_workers=True), (2, 4, 7)),
}


@pytest.mark.parametrize(("make", "steps"), RESUMED.values(), ids=RESUMED)
def test_resumed_by_the_engine_s_own_state(make: Callable[[], DataLoader[Any]], steps: Sequence[int]) -> None:
    def run(state: Any = None) -> tuple[list[Any], list[Any]]:
        seed_ambient(1 if state is None else 2)
        seen: list[Any] = []
        states: list[Any] = []
        trainer = Engine(lambda engine, batch: seen.append((engine.state.epoch, batch.tolist())))
        loader = attach_loader(trainer, make(), rank=1, num_replicas=2, seed=5)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: states.append(engine.state_dict()))
        if state is not None:
            trainer.load_state_dict(state)
        trainer.run(loader, **({"max_epochs": 3} if state is None else {}))
        return seen, states

    whole, states = run()
    for step in steps:
        assert run(states[step - 1])[0] == whole[step:]


@pytest.mark.parametrize("killed_in", [1, 2, 3])
@pytest.mark.parametrize("make", [lambda: DataLoader(DATA, 3, shuffle=True), lambda: DataLoader(Stream(), 3)])
def test_killed_while_it_validates_it_validates_and_goes_on(make: Any, killed_in: int) -> None:
    """By a handler at the end of an epoch; also of the last one. What was saved after that is not done again."""

    def run(state: Any = None, dies: bool = False) -> tuple[list[Any], list[Any], list[Any], Engine]:
        seed_ambient(1)
        seen: list[Any] = []
        states: list[Any] = []
        ended: list[Any] = []

        def validate(engine: Any) -> None:
            if dies and engine.state.epoch == killed_in:
                raise LookupError
            ended.append((engine.state.epoch, engine.state.iteration))

        def save(engine: Any) -> None:
            states.append(engine.state_dict())

        trainer: Any = Engine(lambda engine, batch: seen.append((engine.state.epoch, batch.tolist())))
        loader = attach_loader(trainer, make(), rank=0, num_replicas=2, seed=5)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, save)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, validate)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, save)
        if state is not None:
            trainer.load_state_dict(state)
        with suppress(LookupError):
            trainer.run(loader, **({"max_epochs": 3} if state is None else {}))
        return seen, ended, states, trainer

    seen, ended, states, _ = run()
    if states[0]["epoch_length"] is None and killed_in == 1:
        pytest.skip("an engine has no state that it can load before it knows how long an epoch is")
    killed = run(dies=True)
    assert killed[1] == ended[: killed_in - 1]
    rest, ended_later, _, trainer = run(killed[2][-1])
    assert killed[0] + rest == seen
    assert ended_later == ended[killed_in - 1 :]
    assert (trainer.state.epoch, trainer.state.iteration) == (3, len(seen))
    after_it = states[len(seen) // 3 * killed_in + killed_in - 1]
    if killed_in < 3:  # an engine that is done begins anew
        assert run(after_it)[1] == ended[killed_in:]


def attached(length: int | None = None, **world: Any) -> tuple[Engine, Any]:
    """Return an engine with a loader of 24 or as many samples as asked for, three in a batch."""
    trainer: Any = Engine(lambda engine, batch: None)
    data: Any = range(length or N)
    return trainer, attach_loader(trainer, DataLoader(data, 3, shuffle=True), **world)


def after_two_steps(**world: Any) -> Any:
    """Return the state of an engine within its first epoch."""
    trainer, loader = attached(**world)
    states: list[Any] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda engine: states.append(engine.state_dict()))
    trainer.run(loader, max_epochs=1)
    return states[0]


def seen_by_all(ranks: int, state: Any, length: int | None = None) -> list[list[tuple[int, int, list[int]]]]:
    """Return what each of some ranks sees after a state: the epoch, the iteration and the batch of each step."""
    seen = []
    for rank in range(ranks):
        trainer, loader = attached(length, rank=rank, num_replicas=ranks, seed=5)
        steps: list[tuple[int, int, list[int]]] = []
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED,
            lambda engine, to=steps: to.append(
                (engine.state.epoch, engine.state.iteration, engine.state.batch.tolist())
            ),
        )
        if state is None:
            trainer.run(loader, max_epochs=3)
        else:
            trainer.load_state_dict(state)
            trainer.run(loader)
        seen.append(steps)
    return seen


@pytest.mark.parametrize("length", [24, 25])
@pytest.mark.parametrize("done", [1, 2, 4, 5, 7])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_another_number_of_ranks_goes_on_within_the_epoch(ranks: int, done: int, length: int) -> None:
    """A state of two ranks: each sample of the rest comes once, and later epochs are whole."""
    states: list[Any] = []
    trainer, loader = attached(length, rank=0, num_replicas=2, seed=5)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=done), lambda engine: states.append(engine.state_dict()))
    trainer.run(loader, max_epochs=3)
    before = [step for steps in seen_by_all(2, None, length) for step in steps if step[1] <= done]
    after = seen_by_all(ranks, states[0], length)
    assert len({len(steps) for steps in after}) == 1
    for epoch in (1, 2, 3):
        parts = [batch for number, _, batch in [*before, *chain(*after)] if number == epoch]
        assert sorted(set(chain(*parts))) == list(range(length))
        rest = length - sum(len(batch) for number, _, batch in before if number == epoch)
        assert sum(map(len, parts)) - length in {0, -rest % ranks, -length % 2}
    assert after[0][-1][1] == 3 * len(attached(length, rank=0, num_replicas=ranks)[1])


@pytest.mark.filterwarnings("ignore::ddp_patch.errors.NotDistributedWarning")
def test_another_plan_is_refused() -> None:
    """On a state of two ranks with four batches each, and of one process with eight."""
    two, one = after_two_steps(rank=0, num_replicas=2), after_two_steps()
    with raises(StateError, ("batches=4", "batches=8"), ("number of ranks", "rank=0, num_replicas=1")):
        attached()[0].load_state_dict(two)
    by_iterations = {name: value for name, value in two.items() if name != "max_epochs"} | {"max_iters": 30}
    with raises(StateError, ("batches=4", "batches=2"), ("max_iters", "number of ranks", "batch size", "epoch_length")):
        attached(rank=0, num_replicas=4)[0].load_state_dict(by_iterations)
    with raises(StateError, "sampler length", "Build and patch"):
        attached(length=12, rank=0, num_replicas=2)[0].load_state_dict(two)
    with raises(StateError, "ddp_patch_loader", "set_epoch"):
        attached(rank=0, num_replicas=2)[0].load_state_dict(one)
    trainer, _ = attached()
    trainer.load_state_dict(one)
    assert trainer.state.iteration == 2


def test_another_number_of_ranks_begins_with_an_epoch() -> None:
    """By the remedy that the error names."""
    seen: list[Any] = []
    for rank in range(4):
        trainer: Any = Engine(lambda engine, batch: seen.append((engine.state.epoch, batch.tolist())))
        trainer.load_state_dict({"epoch": 1, "max_epochs": 2, "epoch_length": 2})
        loader = attach_loader(trainer, DataLoader(DATA, 3, shuffle=True), rank=rank, num_replicas=4, seed=5)
        assert isinstance(loader.sampler, DistributedSampler)
        loader.sampler.set_epoch(1)
        trainer.run(loader)
    assert {epoch for epoch, _ in seen} == {2}
    assert sorted(chain.from_iterable(batch for _, batch in seen)) == list(range(N))


@pytest.mark.filterwarnings("ignore::ddp_patch.errors.NotDistributedWarning")
def test_epochs_of_a_length_of_one_s_own_resume_on_any_number_of_ranks() -> None:
    trainer, loader = attached(rank=0, num_replicas=2)
    trainer.run(loader, max_epochs=1, epoch_length=3)
    other, rest = attached(rank=0, num_replicas=4)
    other.load_state_dict(trainer.state_dict())
    assert other.state.epoch_length == 3
    assert sum(len(batch) for batch in rest) == 2  # of 6 samples that are left, this rank's


def test_a_loader_that_something_else_shards_is_refused() -> None:
    shared = DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0))
    with raises(AlreadyPatchedError, ("attach_loader", "DistributedSampler"), "attach_loader"):
        attach_loader(Engine(lambda engine, batch: None), shared, rank=0, num_replicas=2)


def test_one_loader_is_attached_to_an_engine() -> None:
    trainer, loader = Engine(lambda engine, batch: None), DataLoader(DATA)
    plain = trainer.state_dict()
    with pytest.warns(NotDistributedWarning):
        assert attach_loader(trainer, loader) is loader
    with raises(InvalidOptionError, "attach_loader", "patch_dataloader_to_ddp()"):
        attach_loader(trainer, loader, rank=0, num_replicas=2)
    trainer.load_state_dict(plain)
    shared = Engine(lambda engine, batch: None)
    attach_loader(shared, loader, rank=0, num_replicas=2)
    with raises(StateError, "ddp_patch_loader", "set_epoch"):
        shared.load_state_dict(plain)


def as_one_of_two(**batches: Any) -> tuple[Any, Any]:
    """Return an engine, and a loader of eight samples on each of two ranks that was patched by hand."""
    seed_ambient(7)
    data: Any = range(16)
    loader: Any = DataLoader(data, **(batches or {"batch_size": 2, "shuffle": True}))
    return DeterministicEngine(lambda engine, batch: None), patch_dataloader_to_ddp(loader, rank=1, num_replicas=2)


def test_a_deterministic_engine_needs_the_loader_without_its_own_methods() -> None:
    """It makes the loader anew from the arguments that it takes the attributes for."""
    trainer, loader = as_one_of_two()
    with pytest.raises(TypeError, match=r"unexpected keyword argument '(set_epoch|load_state_dict|state_dict)'"):
        trainer.run(loader, max_epochs=2)
    batches: Any = as_one_of_two(batch_sampler=Pairs(16))[1]
    for each in (loader, batches):
        del each.set_epoch, each.state_dict, each.load_state_dict
    as_one_of_two()[0].run(loader, max_epochs=2)
    with pytest.raises(TypeError, match="batch_sampler should be torch"):
        as_one_of_two()[0].run(batches)
