"""After the patch, what is not the wrapper's is read from, and set on, the sampler or dataset that it wraps."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from messages import Words, raises
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from walked import read, set_elsewhere, told_otherwise
from zoo import Indices, as_it_is

from ddp_patch import DDPSamplerWrapper, patch_dataloader_to_ddp
from ddp_patch.errors import InvalidOptionError

N = 24


class Curriculum(Sampler[int]):
    """Yields the easiest samples, and counts its passes."""

    def __init__(self) -> None:
        self.limit, self.passes, self.shuffle, self.dataset = N, 0, False, range(N)
        self.notes: dict[str, int] = {}

    def __len__(self) -> int:
        return self.limit

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from range(self.limit)

    def easier(self, by: int) -> int:
        self.limit -= by
        return self.limit

    @property
    def half(self) -> int:
        return self.limit // 2


class Tokens(Sampler[list[int]]):
    """Batches of at most so many tokens, one for each index."""

    def __init__(self) -> None:
        self.max_tokens, self.batch_size, self.drop_last = 4, 4, False

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, N, self.max_tokens):
            yield list(range(start, min(N, start + self.max_tokens)))

    def __len__(self) -> int:
        return -(-N // self.max_tokens)


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.max_len = N

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(0 if info is None else info.id, self.max_len, 1 if info is None else info.num_workers)

    def longer(self) -> None:
        self.max_len *= 2


SAMPLERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialSampler(range(N)),
    "random": lambda: RandomSampler(range(N)),
    "random, generator": lambda: RandomSampler(range(N), generator=torch.Generator()),
    "subset": lambda: SubsetRandomSampler(range(N)),
    "weighted": lambda: WeightedRandomSampler([1.0] * N, N),
    "a user's": Curriculum,
}


def sharded(**options: Any) -> list[Any]:
    """Return what two ranks get of loaders that are made anew for each."""
    how = {name: options.pop(name) for name in ("share", "order") if name in options}
    made = ({name: make() if callable(make) else make for name, make in options.items()} for _ in range(2))
    given: list[Any] = [DataLoader(collate_fn=as_it_is, **{"dataset": range(N)} | options) for options in made]
    return [patch_dataloader_to_ddp(one, rank=rank, num_replicas=2, **how) for rank, one in enumerate(given)]


def given_to(ranks: list[Any]) -> list[int]:
    """Return all samples of an epoch, after checking that ranks make equal steps."""
    batches = [list(loader) for loader in ranks]
    assert len({len(of_rank) for of_rank in batches}) == 1
    return sorted(index for of_rank in batches for batch in of_rank for index in batch)


SHARES: list[dict[str, Any]] = [{}, {"share": "batches"}, {"share": "within_batches"}]
WALKED = [(name, share) for name in SAMPLERS for share in SHARES]


@pytest.mark.parametrize(("name", "options"), WALKED)
def test_all_attributes_of_a_sampler_are_there_after_the_patch(name: str, options: dict[str, Any]) -> None:
    sampler = SAMPLERS[name]()
    before = read(sampler)
    given: Any = DataLoader(Indices(N), sampler=sampler, batch_size=4)
    wrapper = patch_dataloader_to_ddp(given, rank=0, num_replicas=2, **options).sampler
    assert told_otherwise(before, wrapper) == []
    assert set_elsewhere(sampler, wrapper) == []


def test_all_attributes_of_an_iterable_dataset_are_there_after_the_patch() -> None:
    stream = Stream()
    before = read(stream)
    wrapper: Any = sharded(dataset=stream)[0].dataset
    assert told_otherwise(before, wrapper) == []
    assert set_elsewhere(stream, wrapper) == []
    assert wrapper.max_len == N
    wrapper.longer()
    assert wrapper.dataset.max_len == wrapper.max_len == 2 * N
    for name in ("state_dict", "load_state_dict", "nothing"):
        assert not hasattr(wrapper, name)


def put(part: str, name: str, value: Any) -> Callable[[Any], object]:
    """Set an attribute of a part of a loader."""
    return lambda loader: setattr(getattr(loader, part), name, value)


def by(make: Callable[[], Any], **more: Any) -> dict[str, Any]:
    return {"sampler": make, "batch_size": 2, **more}


few = put("sampler", "weights", torch.tensor([1.0] * 4 + [0.0] * (N - 4), dtype=torch.double))
limit = put("sampler", "limit", 8)
longest = put("dataset", "max_len", 12)
stream: dict[str, Any] = {"dataset": Stream, "batch_size": 2}
# How it is changed, the loader, and below which index its samples lie from then on.
SET: dict[str, tuple[Callable[[Any], object], dict[str, Any], int]] = {
    "weights": (few, by(SAMPLERS["weighted"]), 4),
    "weights, whole batches": (few, by(SAMPLERS["weighted"], share="batches"), 4),
    "weights, divided batches": (few, by(SAMPLERS["weighted"], share="within_batches"), 4),
    "indices": (put("sampler", "indices", range(8)), by(SAMPLERS["subset"]), 8),
    "a limit": (limit, by(Curriculum), 8),
    "a method": (lambda loader: loader.sampler.easier(by=16), by(Curriculum), 8),
    "tokens": (put("batch_sampler", "max_tokens", 2), {"batch_sampler": Tokens}, N),
    "a dataset's": (longest, stream, 12),
    "a dataset's, workers": (longest, {**stream, "num_workers": 2}, 12),
}


@pytest.mark.parametrize("name", SET)
@pytest.mark.parametrize("passes", [0, 1])
def test_what_is_set_after_the_patch_takes_effect_from_the_next_pass_on(name: str, passes: int) -> None:
    change, options, end = SET[name]
    ranks = sharded(**options)
    for _ in range(passes):
        given_to(ranks)
    for loader in ranks:
        change(loader)
    for _ in range(2):
        given = given_to(ranks)
        assert max(given) < end
        assert "weights" in name or given == [*range(end)]
    if "dataset" not in options:
        assert [len(loader) for loader in ranks] == [len(list(loader)) for loader in ranks]


def test_a_wrapper_shuffles_by_the_name_of_torch_where_the_sampler_has_no_such() -> None:
    wrapper = DDPSamplerWrapper([*range(N)], False, rank=0, num_replicas=1)
    assert (wrapper.shuffle, [*wrapper]) == (False, [*range(N)])
    wrapper.shuffle = True
    assert (wrapper.shuffle, sorted(order := [*wrapper])) == (True, [*range(N)])
    assert order != [*range(N)]


class Own(BatchSampler):
    """A user's batch sampler, with a sampler within it."""


class Reads(Curriculum):
    """Its attributes are called as the wrapper's are."""

    def __init__(self) -> None:
        super().__init__()
        self.of = "linear"


def refuse(wrapper: Any, name: str, facts: Words, remedy: Words = ("Set attributes", "patch that")) -> None:
    with raises(InvalidOptionError, (name, *facts), remedy):
        setattr(wrapper, name, 3)


def test_what_follows_from_the_share_is_refused_and_the_remedy_works() -> None:
    for share in ("samples", "batches"):
        loader = sharded(**by(Reads), share=share)[0]
        for name in ("seed", "rank", "num_replicas", "total_size", "num_samples", "of"):
            refuse(loader.sampler, name, ("Reads", "'sampler'"))
            setattr(loader.sampler.sampler, name, "there")
        refuse(loader.sampler, "sampler", (type(loader.sampler).__name__, "Reads"))
        assert len([*loader]) == len(loader)
    own = sharded(batch_sampler=lambda: Own(SequentialSampler(range(N)), 2, False))[0]
    refuse(own.batch_sampler, "seed", ("Own", "the one you gave it"))
    divided = sharded(batch_size=4, share="within_batches")[0].batch_sampler
    for name in ("batch_size", "drop_last"):
        refuse(divided, name, ("within_batches",), ("patch it again", "restore_loader()"))
    refuse(sharded(**stream)[0].dataset, "dataset", ("ShardedIterable", "Stream"))
    whole = sharded(batch_sampler=Tokens)[0]
    whole.batch_sampler.batch_size = 8
    assert whole.batch_sampler.sampler.batch_size == 8


class Shouting(DDPSamplerWrapper[int]):
    """A user's subclass has attributes of its own."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler, False, rank=0, num_replicas=2)
        self.volume = 11


def test_a_users_subclass_keeps_what_it_sets_to_itself() -> None:
    own: Any = Shouting(Curriculum())
    assert own.volume == 11
    assert not hasattr(own.sampler, "volume")
    assert own.limit == N
