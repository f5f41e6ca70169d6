"""After the patch, what is not the wrapper's is read from, and set on, the sampler or dataset that it wraps."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from messages import raises
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from walked import read, set_elsewhere, told_otherwise
from zoo import as_it_is

from ddp_patch import DDPSamplerWrapper, patch_dataloader_to_ddp
from ddp_patch.errors import InvalidOptionError

N = 24


class Curriculum(Sampler[int]):
    """Yields the easiest samples, and counts its passes."""

    def __init__(self, shuffle: bool = False) -> None:
        self.limit, self.passes, self.shuffle, self.dataset = N, 0, shuffle, range(N)
        self.notes: dict[str, int] = {}

    def __len__(self) -> int:
        return self.limit

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from torch.randperm(self.limit).tolist() if self.shuffle else range(self.limit)

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
WALKED += [(name, {"order": "scalable"}) for name in ("random", "subset")]


@pytest.mark.parametrize(("name", "options"), WALKED)
def test_all_attributes_of_a_sampler_are_there_after_the_patch(name: str, options: dict[str, Any]) -> None:
    sampler = SAMPLERS[name]()
    before = read(sampler)
    given: Any = DataLoader(Rows(), sampler=sampler, batch_size=4)
    wrapper = patch_dataloader_to_ddp(given, rank=0, num_replicas=2, **options).sampler
    assert told_otherwise(before, wrapper) == []
    assert set_elsewhere(sampler, wrapper) == []


@pytest.mark.parametrize("options", SHARES)
def test_what_nobody_has_yet_is_set_on_the_users_sampler_and_can_be_deleted(options: dict[str, Any]) -> None:
    sampler = Curriculum()
    given: Any = DataLoader(Rows(), sampler=sampler, batch_size=4)
    wrapper: Any = patch_dataloader_to_ddp(given, rank=0, num_replicas=2, **options).sampler
    wrapper.temperature = 2.0
    assert vars(sampler)["temperature"] == wrapper.temperature == 2.0
    del wrapper.temperature
    assert not hasattr(sampler, "temperature")


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


def weights(loader: Any) -> None:
    loader.sampler.weights = torch.tensor([1.0] * 4 + [0.0] * (N - 4), dtype=torch.double)


def indices(loader: Any) -> None:
    loader.sampler.indices = range(8)


def limit(loader: Any) -> None:
    loader.sampler.limit = 8


def easier(loader: Any) -> None:
    assert loader.sampler.easier(by=16) == 2 * loader.sampler.half


def data(loader: Any) -> None:
    loader.sampler.data_source = range(8)


def tokens(loader: Any) -> None:
    loader.batch_sampler.max_tokens = 2


def max_len(loader: Any) -> None:
    loader.dataset.max_len = 12


SET: dict[str, tuple[Callable[[Any], None], dict[str, Any], Callable[[list[int]], bool]]] = {
    "weights": (weights, {"sampler": SAMPLERS["weighted"], "batch_size": 4}, lambda got: set(got) <= set(range(4))),
    "indices": (indices, {"sampler": SAMPLERS["subset"], "batch_size": 2}, lambda got: got == [*range(8)]),
    "weights, whole batches": (
        weights,
        {"sampler": SAMPLERS["weighted"], "batch_size": 4, "share": "batches"},
        lambda got: set(got) <= set(range(4)),
    ),
    "weights, divided batches": (
        weights,
        {"sampler": SAMPLERS["weighted"], "batch_size": 4, "share": "within_batches"},
        lambda got: set(got) <= set(range(4)),
    ),
    "data, scalable": (
        data,
        {"sampler": SAMPLERS["random"], "batch_size": 2, "order": "scalable"},
        lambda got: got == [*range(8)],
    ),
    "a limit": (limit, {"sampler": Curriculum, "batch_size": 2}, lambda got: got == [*range(8)]),
    "a method": (easier, {"sampler": Curriculum, "batch_size": 2}, lambda got: got == [*range(8)]),
    "tokens": (tokens, {"batch_sampler": Tokens}, lambda got: got == [*range(N)]),
    "a dataset's": (max_len, {"dataset": Stream, "batch_size": 2}, lambda got: got == [*range(12)]),
    "a dataset's, workers": (
        max_len,
        {"dataset": Stream, "batch_size": 2, "num_workers": 2},
        lambda got: got == [*range(12)],
    ),
}


@pytest.mark.parametrize("name", SET)
@pytest.mark.parametrize("passes", [0, 1])
def test_what_is_set_after_the_patch_takes_effect_from_the_next_pass_on(name: str, passes: int) -> None:
    change, options, is_right = SET[name]
    ranks = sharded(**options)
    for _ in range(passes):
        given_to(ranks)
    for loader in ranks:
        change(loader)
    for _ in range(2):
        assert is_right(given_to(ranks))
    if "dataset" not in options:
        assert [len(loader) for loader in ranks] == [len(list(loader)) for loader in ranks]


def test_a_counter_that_the_user_sets_through_the_wrapper_goes_on_from_there() -> None:
    (loader, _) = sharded(sampler=Curriculum, batch_size=4)
    list(loader)
    loader.sampler.passes = 7
    list(loader)
    assert loader.sampler.passes == 8


class Growing(Sampler[int]):
    """Yields more in each pass, of what it counts itself."""

    def __init__(self) -> None:
        self.size = 4

    def __iter__(self) -> Iterator[int]:
        size = self.size
        self.size += 4
        yield from range(size)

    def start_over(self) -> None:
        self.size = 4

    @property
    def level(self) -> int:
        return self.size

    @level.setter
    def level(self, level: int) -> None:
        self.size = level


def call(sampler: Any) -> None:
    sampler.start_over()


def assign(sampler: Any) -> None:
    sampler.level = 4


@pytest.mark.parametrize("change", [call, assign])
def test_what_passes_change_can_be_changed_by_methods_and_properties(change: Callable[[Any], None]) -> None:
    ranks = sharded(sampler=Growing, batch_size=2)
    assert [len(given_to(ranks)) for _ in range(3)] == [4, 8, 12]
    for loader in ranks:
        assert [*loader.sampler.sampler]  # a look, which moves nothing
        change(loader.sampler)
    assert [len(given_to(ranks)) for _ in range(2)] == [4, 8]


@pytest.mark.parametrize("share", ["samples", "batches"])
def test_a_samplers_own_shuffle_and_dataset_are_its_own(share: str) -> None:
    ranks = sharded(sampler=lambda: Curriculum(shuffle=True), batch_size=4, share=share)
    shuffled = [[*loader] for loader in ranks]
    for loader in ranks:
        assert loader.sampler.shuffle
        assert loader.sampler.dataset == range(N)
        loader.sampler.shuffle = False
    in_order = [[*loader] for loader in ranks]
    assert in_order != shuffled
    assert in_order == [[*loader] for loader in sharded(sampler=Curriculum, batch_size=4, share=share)]


def test_where_a_sampler_has_no_dataset_it_is_what_is_shared() -> None:
    loader = sharded(sampler=SAMPLERS["weighted"])[0]
    assert loader.sampler.dataset is loader.sampler.sampler


def test_a_wrapper_shuffles_by_the_name_of_torch_where_the_sampler_has_no_such() -> None:
    wrapper = DDPSamplerWrapper([*range(N)], False, rank=0, num_replicas=1)
    assert (wrapper.shuffle, [*wrapper]) == (False, [*range(N)])
    wrapper.shuffle = True
    assert (wrapper.shuffle, sorted(order := [*wrapper])) == (True, [*range(N)])
    assert order != [*range(N)]


def test_what_is_wrapped_cannot_be_exchanged() -> None:
    sampler, stream = sharded(sampler=Curriculum)[0].sampler, sharded(dataset=Stream)[0].dataset
    with raises(InvalidOptionError, ("sampler", "DDPSamplerWrapper", "Curriculum"), ("Set attributes", "patch that")):
        sampler.sampler = Curriculum()
    with raises(InvalidOptionError, ("dataset", "ShardedIterable", "Stream"), ("Set attributes", "patch that")):
        stream.dataset = Stream()


class Own(BatchSampler):
    """A user's batch sampler, with a sampler within it."""


class Outer(IterableDataset[int]):
    """A user's dataset, with a dataset within it."""

    def __init__(self) -> None:
        self.dataset = Stream()

    def __iter__(self) -> Iterator[int]:
        return iter(self.dataset)


@pytest.mark.parametrize("share", ["samples", "batches", "within_batches"])
def test_what_is_within_is_where_one_process_has_it(share: str) -> None:
    ranks = sharded(sampler=SAMPLERS["subset"], batch_size=2, share=share)
    for loader in ranks:
        loader.batch_sampler.sampler.indices = range(8)
    assert given_to(ranks) == [*range(8)]


def test_so_is_what_is_within_a_users_own() -> None:
    batches = sharded(batch_sampler=lambda: Own(SubsetRandomSampler(range(N)), 2, False))
    streams = sharded(dataset=Outer, batch_size=2)
    for loader, stream in zip(batches, streams, strict=True):
        loader.batch_sampler.sampler.indices = range(8)
        stream.dataset.dataset.max_len = 8
    assert given_to(batches) == given_to(streams) == [*range(8)]


def test_a_refusal_says_where_the_samplers_own_is() -> None:
    for share in ("samples", "batches"):
        loader = sharded(sampler=Curriculum, batch_size=2, share=share)[0]
        with raises(InvalidOptionError, ("seed", "Curriculum", "'sampler'"), "Set it there"):
            loader.sampler.seed = 3
        loader.sampler.sampler.seed = 3
    own = sharded(batch_sampler=lambda: Own(SequentialSampler(range(N)), 2, False))[0]
    with raises(InvalidOptionError, ("seed", "Own", "the one you gave it"), "Set it there"):
        own.batch_sampler.seed = 3


class Reads(Curriculum):
    """Its attributes are called as the wrapper's are."""

    def __init__(self) -> None:
        super().__init__()
        self.of = "linear"


def test_what_is_called_as_a_method_of_the_wrapper_is_refused() -> None:
    for share in ("samples", "batches"):
        loader = sharded(sampler=Reads, batch_size=2, share=share)[0]
        with raises(InvalidOptionError, ("of", "Reads", "'sampler'"), "Set it there"):
            loader.sampler.of = "cosine"
        with raises(InvalidOptionError, ("of", "Reads", "'sampler'"), "Set it there"):
            del loader.sampler.of
        loader.sampler.sampler.of = "cosine"
        assert len([*loader]) == len(loader)


def test_what_contradicts_the_share_is_refused() -> None:
    divided = sharded(batch_size=4, share="within_batches")[0]
    for name in ("batch_size", "drop_last"):
        with raises(InvalidOptionError, (name, "within_batches"), ("patch it again", "restore_loader()")):
            setattr(divided.batch_sampler, name, 2)
    loader = sharded(sampler=Curriculum)[0]
    for name in ("num_samples", "rank", "num_replicas", "total_size", "seed"):
        with raises(InvalidOptionError, (name, "DDPSamplerWrapper", "Curriculum", "'sampler'"), "Set it there"):
            setattr(loader.sampler, name, 3)
    whole = sharded(batch_sampler=Tokens)[0]
    whole.batch_sampler.batch_size = 8
    assert whole.batch_sampler.sampler.batch_size == 8


def test_copies_and_pickles_are_transparent_too() -> None:
    wrapper: Any = DDPSamplerWrapper(Curriculum(), False, rank=0, num_replicas=2)
    for clone in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):  # noqa: S301 - our own
        clone.limit = 6
        assert (clone.sampler.limit, wrapper.limit) == (6, N)
        assert len(clone) == 3


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


def test_a_sampler_that_says_it_is_not_sharded_does_not_say_so_for_its_wrapper() -> None:
    class Open(Curriculum):
        is_ddp_aware = False

    loader = sharded(sampler=Open)[0]
    assert patch_dataloader_to_ddp(loader, rank=0, num_replicas=2) is loader


class Rows(Dataset[int]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return index


def test_a_torch_batch_sampler_around_the_wrapper_stays_torchs() -> None:
    loader = sharded(dataset=Rows, batch_size=4, shuffle=True)[0]
    assert type(loader.batch_sampler) is BatchSampler
    assert loader.batch_sampler.sampler is loader.sampler
