"""What samplers draw from belongs to the passes of their loader, whatever others draw, count or look at meanwhile."""

import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from messages import raises
from torch.utils.data import DataLoader, Dataset, Sampler
from users import ByObject, Counts, Held, N, Shuffles, permuted, seeded
from users import loader as given
from zoo import Indices, seed_ambient

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import StateError, StreamOrderWarning
from ddp_patch.orders.random_states import generator_state, random_generators, set_generator_state


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Congruential(random.Random):
    """A generator of the user's own, with a state of its own form."""

    def seed(self, a: Any = None, version: int = 2) -> None:
        self.x = int(a or 0)

    def random(self) -> float:
        self.x = (self.x * 6364136223846793005 + 1) % 2**64
        return (self.x >> 11) / 2**53

    def getrandbits(self, k: int, /) -> int:
        return int(self.random() * 2**k)

    def getstate(self) -> tuple[Any, ...]:
        return (self.x,)

    def setstate(self, state: tuple[Any, ...]) -> None:
        (self.x,) = state


class SeededByEpoch(Shuffles):
    """Seeds its generator in ``set_epoch``, whatever kind it is."""

    def __init__(self, kind: str) -> None:
        super().__init__(GENERATORS[kind](0))
        self.kind = kind

    def set_epoch(self, epoch: int) -> None:
        set_generator_state(self.rng, generator_state(GENERATORS[self.kind](epoch)))


class CountsLate(Counts):
    """Counts a pass when it has ended."""

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(self.passes).sample(range(N), N)
        self.passes += 1


class Indirect(Counts):
    """Counts by a method, and in a function within it."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.advanced()).sample(range(N), N))

    def advanced(self) -> int:
        def advance() -> int:
            self.passes += 1
            return self.passes

        return advance()


class Again(Counts):
    """Is its own iterator, which begins anew."""

    def __iter__(self) -> Iterator[int]:
        self.left = [*super().__iter__()]
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop()


GENERATORS: dict[str, Callable[..., Any]] = {
    "torch": lambda seed=3: torch.Generator().manual_seed(seed),
    "random": lambda seed=3: random.Random(seed),
    "numpy": lambda seed=3: np.random.default_rng(seed),
    "numpy, twister": lambda seed=3: np.random.Generator(np.random.MT19937(seed)),
    "numpy, philox": lambda seed=3: np.random.Generator(np.random.Philox(seed)),
    "numpy, legacy": lambda seed=3: np.random.RandomState(seed),
}

SAMPLERS: dict[str, Callable[[], Any]] = {
    **{name: partial(lambda make: Shuffles(make()), make) for name, make in GENERATORS.items()},
    "a generator of the user's own": lambda: Shuffles(Congruential(1)),
    "counts when it begins": Counts,
    "counts when it has ended": CountsLate,
    "counts by a method": Indirect,
    "its own iterator": Again,
}


def loader_of(name: str, workers: int = 0) -> tuple[Any, Any]:
    how: Any = {"shuffle": True, "generator": seeded()} if name == "torch's own" else {"sampler": SAMPLERS[name]()}
    raw = given(num_workers=workers, **how)
    return raw, patch_dataloader_to_ddp(raw)


def draws(raw: Any) -> None:
    """Draws from whatever a sampler holds, as a crop does."""
    for generator in random_generators([raw.sampler]):
        torch.rand(3, generator=generator) if isinstance(generator, torch.Generator) else generator.random()


def nothing(raw: Any) -> None:
    pass


ALONE: dict[str, Callable[[Any], object]] = {
    "lists the sampler": lambda raw: list(raw.sampler),
    "looks at the unpatched loader": lambda raw: next(iter(raw)),
    "breaks off the unpatched loader": lambda raw: list(islice(raw, 3)),
    "draws from its generator": draws,
}
COUNTERS = ["counts when it begins", "counts when it has ended", "counts by a method", "its own iterator"]
ALL = [*SAMPLERS, "torch's own"]
DRAWN = [name for name in ALL if name not in COUNTERS]


def epochs(name: str, alone: Callable[[Any], object], number: int = 3) -> list[Any]:
    """Return what a rank is given in some epochs, with what it does alone before each of them."""
    raw, loader = loader_of(name)
    found = []
    for _ in range(number):
        alone(raw)
        found.append(list(loader))
    return found


# A counter that somebody moves counts as set by the user.
@pytest.mark.parametrize("alone", ALONE)
@pytest.mark.parametrize("name", DRAWN)
def test_what_others_do_moves_no_order(name: str, alone: str) -> None:
    seed_ambient(1)
    expected = epochs(name, nothing)
    seed_ambient(2)
    assert epochs(name, ALONE[alone]) == expected


@pytest.mark.parametrize("name", COUNTERS)
def test_another_patched_loader_of_the_same_sampler_moves_no_counter(name: str) -> None:
    expected = epochs(name, nothing)
    raw, loader = loader_of(name)
    other = patch_dataloader_to_ddp(raw)
    found = []
    for epoch in range(3):
        assert list(islice(other, epoch)) == [] or epoch
        found.append(list(loader))
    assert found == expected


@pytest.mark.parametrize("name", DRAWN)
def test_what_others_do_within_a_pass_moves_no_order(name: str) -> None:
    expected = epochs(name, nothing, number=2)
    raw, loader = loader_of(name)
    for epoch in expected:
        found = []
        for batch in loader:
            draws(raw)
            next(iter(raw.sampler))
            found.append(batch)
        assert found == epoch


@pytest.mark.parametrize("name", [name for name in ALL if name != "its own iterator"])  # torch begins it ever anew
def test_alone_a_loader_draws_what_it_would_in_one_process(name: str) -> None:
    """Also the number that a loader draws for its workers from the generator that it shares with its sampler.

    Of generators, the first epoch alone: later ones follow from their numbers, and not from what was drawn before.
    """
    raw, _ = loader_of(name)
    one_process = [[list(batch) for batch in raw] for _ in range(3)]
    seed_ambient(5)
    whole = loader_of(name)[1]
    found = [list(whole) for _ in range(3)]
    same = 3 if name in COUNTERS else 1
    assert found[:same] == one_process[:same]
    assert found[1] != found[2] != found[0] != found[1]


def look(loader: Any) -> None:
    next(iter(loader))


def longer_look(loader: Any) -> None:
    list(islice(loader, 3))


def whole_pass(loader: Any) -> None:
    list(loader)


# Epoch 1 is what follows a whole pass by itself.
@pytest.mark.parametrize(
    ("looks", "epoch"), [*product([look, longer_look], [0, 1, 4]), *product([whole_pass], [0, 2, 4])]
)
@pytest.mark.parametrize("name", ALL)
def test_an_epoch_that_is_chosen_has_one_order_however_often_somebody_looked(
    name: str, looks: Callable[[Any], None], epoch: int
) -> None:
    orders = []
    for times in range(2 if looks is whole_pass else 3):
        _, loader = loader_of(name)
        for _ in range(times):
            looks(loader)
        loader.set_epoch(epoch)
        orders.append([list(loader), list(loader)])
    assert all(order == orders[0] for order in orders)
    assert orders[0][0] != orders[0][1]


@pytest.mark.parametrize("share", ["samples", "batches"])
def test_an_epoch_may_be_chosen_before_its_iterator_is_made_or_after(share: Any) -> None:
    orders = []
    for is_late in (False, True):
        raw, _ = loader_of("torch's own")
        loader: Any = patch_dataloader_to_ddp(raw, share=share)
        next(iter(loader))
        if not is_late:
            loader.set_epoch(2)
        batches = iter(loader)
        if is_late:
            loader.set_epoch(2)
        orders.append(list(batches))
    assert orders[0] == orders[1]


def test_a_pass_of_a_sampler_that_draws_at_once_is_resumed() -> None:
    def loader() -> Any:
        return patch_dataloader_to_ddp(given(sampler=ByObject(random.Random(3))))

    expected = list(loader())
    first, second = loader(), loader()
    begun = list(islice(first, 3))
    restore_loader(second, loader_state(first))
    assert begun + list(second) == expected


@pytest.mark.parametrize("name", ALL)
def test_who_chooses_each_epoch_gets_what_follows_by_itself(name: str) -> None:
    followed = epochs(name, nothing)
    _, loader = loader_of(name)
    chosen = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        chosen.append(list(loader))
    assert chosen == followed
    loader.set_epoch(1)
    assert list(loader) == followed[1]


@pytest.mark.parametrize("name", ALL)
def test_a_chosen_epoch_is_the_same_whatever_was_drawn_before(name: str) -> None:
    followed = epochs(name, nothing, number=8)
    for first in ([], [2], [0, 3], [6]):
        _, loader = loader_of(name)
        for epoch in first:
            loader.set_epoch(epoch)
            list(islice(loader, 1 + epoch))  # breaks it off
        loader.set_epoch(7)
        assert list(loader) == followed[7]


def test_a_generator_of_torchs_that_the_user_seeds_draws_what_the_seed_says() -> None:
    raw, loader = loader_of("torch")
    found = []
    for seed in [7, 7, 8]:
        raw.sampler.rng.manual_seed(seed)
        found.append([index for batch in loader for index in batch])
    # Seeding with the same number again is not seen: the second epoch is that of a loader that was seeded once.
    assert found[0] == permuted(GENERATORS["torch"](7), N) != found[1]
    assert found[2] == permuted(GENERATORS["torch"](8), N)
    raw, loader = loader_of("torch")
    raw.sampler.rng.manual_seed(7)
    assert [[index for batch in loader for index in batch] for _ in range(2)] == found[:2]


class Warm(Shuffles):
    """Draws by a temperature that nobody but the user changes, from a place that it counts."""

    def __init__(self) -> None:
        super().__init__(None)
        self.temperature, self.cursor = 0, 0

    def __iter__(self) -> Iterator[int]:
        order = random.Random(f"{self.temperature} {self.cursor}").sample(range(N), N)
        self.cursor += 1
        yield from order


def drawn_by(temperature: int, cursor: int) -> list[int]:
    return random.Random(f"{temperature} {cursor}").sample(range(N), N)


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch]


def test_what_a_user_sets_on_a_sampler_counts_always() -> None:
    raw: Any = given(sampler=Warm())
    loader, other = patch_dataloader_to_ddp(raw), patch_dataloader_to_ddp(raw)
    assert flat(loader) == drawn_by(0, 0)
    raw.sampler.temperature = 9
    assert flat(loader) == drawn_by(9, 1)
    assert flat(other) == drawn_by(9, 0)
    raw.sampler.cursor = 7
    assert flat(loader) == drawn_by(9, 7)
    assert flat(other) == drawn_by(9, 7)
    state = loader_state(loader)
    again: Any = patch_dataloader_to_ddp(given(sampler=Warm()))
    restore_loader(again, state)
    assert (list(again), flat(again)) == ([], drawn_by(9, 8))


class ByAttribute(Sampler[int]):
    """Is told the epoch by its attribute."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(permuted(random.Random(self.epoch), N))


@pytest.mark.parametrize("epochs", [(0, 1, 2), (3, 1, 1, 7)])
def test_an_epoch_that_a_user_sets_on_a_sampler_by_attribute_is_the_one_that_it_draws(epochs: tuple[int, ...]) -> None:
    train: Any = patch_dataloader_to_ddp(given(sampler=ByAttribute()), rank=0, num_replicas=1)
    for epoch in epochs:
        train.sampler.epoch = epoch
        assert [int(index) for batch in train for index in batch] == permuted(random.Random(epoch), N)
        assert train.sampler.epoch == epoch


class Grows(Sampler[int]):
    """Is longer in each epoch."""

    def __init__(self) -> None:
        self.epochs = 0

    def __len__(self) -> int:
        return min(N, 8 * (self.epochs + 1))

    def __iter__(self) -> Iterator[int]:
        length = len(self)
        self.epochs += 1
        return iter(range(length))


def test_a_sampler_that_grows_by_what_it_has_drawn_tells_the_length_of_each_epoch() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train: Any = patch_dataloader_to_ddp(given(sampler=Grows()), rank=0, num_replicas=1)
        for epoch in range(3):
            assert len(train.sampler) == 8 * (epoch + 1) == sum(len(batch) for batch in train)


@pytest.mark.parametrize("is_counted", [False, True])
def test_a_loader_that_is_restored_counts_on_from_its_state_also_where_another_loader_has_counted(
    is_counted: bool,
) -> None:
    stopped = patch_dataloader_to_ddp(given(sampler=Warm()))
    for cursor in range(3):
        assert flat(stopped) == drawn_by(0, cursor)
    begun = list(islice(stopped, 2))
    state = loader_state(stopped)
    raw: Any = given(sampler=Warm())
    other, again = patch_dataloader_to_ddp(raw), patch_dataloader_to_ddp(raw)
    if is_counted:
        assert flat(other) == drawn_by(0, 0)
    restore_loader(again, state)
    assert flat([*begun, *again]) == drawn_by(0, 3)
    assert flat(again) == drawn_by(0, 4)
    for epoch in (3, 1, 0, 2):  # the state begins with epoch 3
        again.set_epoch(epoch)
        assert flat(again) == drawn_by(0, epoch)


def test_an_epoch_of_a_sampler_that_counts_is_refused_where_the_user_has_set_what_it_counts() -> None:
    raw: Any = given(sampler=Warm())
    loader: Any = patch_dataloader_to_ddp(raw)
    assert flat(loader) == drawn_by(0, 0)
    raw.sampler.cursor = 7
    loader.set_epoch(1)  # which comes next
    assert flat(loader) == drawn_by(0, 7)
    loader.set_epoch(5)
    with raises(StateError, "in its attributes 'cursor', and they are others", remedy="Give it a set_epoch(epoch)"):
        list(loader)


class Endless(Counts):
    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        while True:
            yield self.passes


def test_an_epoch_that_takes_too_long_to_reach_is_refused() -> None:
    loader: Any = patch_dataloader_to_ddp(given(sampler=Endless()))
    loader.set_epoch(3)
    with raises(
        StateError, "to draw the epochs before would take more than 131,072 items", remedy="Give it a set_epoch"
    ):
        next(iter(loader))


@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_that_set_epoch_seeds_draws_what_the_seed_says(kind: str, chooses: bool) -> None:
    raw = given(sampler=SeededByEpoch(kind))
    loader: Any = patch_dataloader_to_ddp(raw)
    for epoch in range(3):
        draws(raw)
        if chooses:
            look(loader)
            loader.set_epoch(epoch)
        assert [index for batch in loader for index in batch] == permuted(GENERATORS[kind](epoch), N)


def test_what_attributes_hold_directly_is_found_and_no_more() -> None:
    held, one, made = random.Random(2), np.random.default_rng(3), Held(random.Random(1))

    class Holds:
        of_class = random.Random(4)

        def __init__(self) -> None:
            self.rngs, self.by_name, self.draw, self.sample = [held], {"numpy": one}, made.permuted, held.random
            self.nested, self.closure = [[random.Random(5)]], lambda: outer.random()
            # The global ones belong to nobody.
            self.shuffle, self.permute, self.generator = random.shuffle, np.random.permutation, torch.default_generator

    outer = random.Random(6)
    assert random_generators([Holds(), Holds()]) == [held, one, made.rng]


class OfClass(Sampler[int]):
    """Draws from its class's generator, which no state holds."""

    rng = random.Random(3)

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.sample(range(N), N))


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_epoch_is_not_resumed_that_begins_with_other_items(world_size: int) -> None:
    def start() -> Any:
        return patch_dataloader_to_ddp(given(sampler=OfClass()), rank=0, num_replicas=world_size)

    running = start()
    before = OfClass.rng.getstate()
    begun = list(islice(running, 2))
    state, again = loader_state(running), start()
    restore_loader(again, state)
    with pytest.raises(StateError, match="OfClass began the epoch with other items"):
        list(again)
    OfClass.rng.setstate(before)
    restore_loader(again, state)
    assert len({tuple(batch) for batch in [*begun, *again]}) == N // 4 // world_size


class Forever(Shuffles):
    """Has attributes, counts nothing, and never ends."""

    def __init__(self) -> None:
        super().__init__(None)
        self.size, self.drawn = 7, [0]

    def __iter__(self) -> Iterator[int]:
        while True:
            self.drawn[0] += 1
            yield self.drawn[0] % self.size


class Stateful(Sampler[int]):
    """Moves on with each pass, and has that in its state."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([(index + self.passes) % 8 for index in range(8)])

    def __len__(self) -> int:
        return 8

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


class Pairs(Sampler[list[int]]):
    """Batches with a number that might be a counter."""

    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler, self.size = sampler, 2

    def __iter__(self) -> Iterator[list[int]]:
        items = iter(self.sampler)
        return iter([[next(items), next(items)] for _ in range(4)])


def test_a_sampler_that_counts_by_its_state_is_not_moved_by_finding_out_what_others_count() -> None:
    raw: Any = DataLoader(Indices(8), batch_sampler=Pairs(Stateful()))
    loader = patch_dataloader_to_ddp(raw, rank=0, num_replicas=1)
    loader.set_epoch(3)
    assert flat(loader) == [(index + 1) % 8 for index in range(8)]


def test_a_sampler_that_counts_nothing_is_drawn_once_to_see_that() -> None:
    sampler = Forever()
    loader: Any = patch_dataloader_to_ddp(given(sampler=sampler))
    for epoch in range(1, 6):
        loader.set_epoch(epoch)
        list(islice(loader, 2))
    assert 2**17 <= sampler.drawn[0] < 2**17 + 1000


class Learns(Shuffles):
    """Gives the index next that it was told to, which only the training knows."""

    def __init__(self, rng: Any = None) -> None:
        super().__init__(rng)
        self.next = torch.zeros(1, dtype=torch.int64)

    def __iter__(self) -> Iterator[int]:
        for number in range(N):
            yield (int(self.next) + number) % N


def learnt(loader: Any, sampler: Learns, after: int = 0) -> list[Any]:
    found = []
    for step, batch in enumerate(loader):
        found.append(list(batch))
        if step >= after:
            sampler.next += 1 + step  # as a script changes weights: in place
    return found


@pytest.mark.parametrize("size", [1, 4, 7])
def test_a_sampler_that_learns_in_each_step_is_drawn_by_what_it_has_learnt(size: int) -> None:
    alone, sampler = Learns(), Learns()
    loader: Any = patch_dataloader_to_ddp(given(sampler=sampler, batch_size=size))
    for _ in range(2):
        assert learnt(loader, sampler) == learnt(given(sampler=alone, batch_size=size), alone)


@pytest.mark.parametrize(
    ("rng", "after", "told"), [(None, 3, "steps had been drawn"), (1, 0, "a generator of its own")]
)
def test_what_a_sampler_that_learns_cannot_have_is_told(rng: int | None, after: int, told: str) -> None:
    sampler = Learns(None if rng is None else random.Random(rng))
    loader: Any = patch_dataloader_to_ddp(given(sampler=sampler))
    with pytest.warns(StreamOrderWarning, match=f"Learns was changed within a pass.*{told}"):
        learnt(loader, sampler, after)
    learnt(loader, sampler, after)  # and once


@pytest.mark.parametrize("persistent", [False, True])
def test_a_run_that_is_resumed_between_epochs_goes_on_as_one_that_was_never_stopped(persistent: bool) -> None:
    def start() -> Any:
        raw = given(shuffle=True, generator=seeded(), num_workers=1, persistent_workers=persistent)
        return patch_dataloader_to_ddp(raw)

    whole, stopped, again = start(), start(), start()
    expected = [list(whole) for _ in range(3)]
    assert list(stopped) == expected[0]
    restore_loader(again, loader_state(stopped))
    assert [list(again) for _ in range(3)] == [[], *expected[1:]]


class Augments(Dataset[float]):
    """Augments by the generator that its loader shuffles by."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return float(torch.rand((), generator=self.generator))


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_augmentation_by_the_loaders_own_generator_is_another_in_each_epoch(workers: int, persistent: bool) -> None:
    def start() -> Any:
        generator = seeded()
        raw = DataLoader(
            Augments(generator), 2, True, generator=generator, num_workers=workers, persistent_workers=persistent
        )
        return patch_dataloader_to_ddp(raw)

    found = [flat(batch.tolist() for batch in loader) for loader in [start()] for _ in range(3)]
    assert found[0] != found[1] != found[2] != found[0]
    if workers and not persistent:  # they begin a resumed epoch as they began that epoch
        again = start()
        again.set_epoch(2)
        assert flat(batch.tolist() for batch in again) == found[2]
