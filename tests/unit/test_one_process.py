"""Parts of a script that runs as one process, without other ranks."""

import contextlib
import gc
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from messages import raises
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ddp_patch import autopatch
from ddp_patch.errors import InvalidOptionError, WorldError
from ddp_patch.running.divided import Layout, slots_of, substituted
from ddp_patch.running.launch import ALONE, backend_here
from ddp_patch.running.random_numbers import Still
from ddp_patch.running.trees import apart, leaves_of, mapped, tensors_in

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Held:
    """Holds a tensor."""

    rows: Any
    word: str = "a"


class Cache:
    """Holds tensors in a list, as caches of keys and values do."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.layers = [*tensors]


def test_tensors_are_found_and_replaced_in_all_that_may_hold_them() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    for value in ([one, {"a": (two, 3)}], Pair(one, [two]), Held({"b": [one, two]}), OrderedDict(a=one, b=two)):
        assert [id(each) for each in tensors_in(value)] == [id(one), id(two)]
        changed = mapped(value, lambda tensor: tensor + 1)
        assert type(changed) is type(value)
        assert [each.item() for each in tensors_in(changed)] == [2.0, 1.0]
        assert mapped(value, lambda tensor: tensor) is value
    cache = Cache(one, two)
    assert tensors_in(cache) == []
    assert [
        each.item() for each in tensors_in(mapped(cache, lambda tensor: tensor + 1, objects=True), objects=True)
    ] == [2, 1]
    assert leaves_of({"a": [one, "b"]}) == [one, "b"]


@pytest.mark.parametrize("layout", [Layout("rows", 1), Layout("rows", 0), Layout("inner rows", 0)])
def test_parts_of_any_layout_make_up_the_whole(layout: Layout) -> None:
    whole = torch.arange(84).view(14, 6) if layout.dim else torch.arange(84).view(42, 2)
    n = 6 if layout.dim else 14
    sizes, at, parts = (n // 2, n // 2 - 1, n - n // 2 - (n // 2 - 1)), 0, []
    for size in sizes:
        parts.append(layout.cut(whole, at, at + size, n))
        at += size
    assert torch.equal(layout.joined(parts, sizes), whole)


def test_how_far_tensors_are_apart() -> None:
    a = torch.tensor([3.0, 4.0, float("nan")])
    assert apart(a, a.clone()) == 0
    assert apart(a, torch.tensor([3.0, 4.5, float("nan")])) == pytest.approx(0.1)
    assert apart(a, torch.tensor([3.0, 4.0, 1.0])) == float("inf")
    assert apart(a, a[:2]) == float("inf")


def test_a_module_has_its_parameters_again_and_a_recurrent_one_its_list_of_weights() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    model.append(model[0])
    modules, slots = slots_of(model)
    assert len(slots) == 6
    before, flat = [each for _, _, each in slots], list(model[1]._flat_weights)
    with substituted(modules, slots, {each: each + 1 for each in before}):
        assert model[0].weight.grad_fn is not None
        model[1](torch.ones(3, 2))
    assert all(a is b for a, b in zip(before, [each for _, _, each in slots_of(model)[1]], strict=True))
    assert all(a is b for a, b in zip(flat, model[1]._flat_weights, strict=True))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: nn.functional.dropout(x, 0.3),
        lambda x: x + torch.randn_like(x),
        lambda x: x * torch.rand(len(x), 5),
        lambda x: x * torch.empty(len(x), 1).bernoulli_(0.8),
        lambda x: x + torch.empty(len(x), 5).uniform_(2, 3),
        lambda x: x.gather(1, torch.rand(len(x), 5).argsort(1)),
        lambda x: x + torch.randint(3, 9, (len(x), 1)),
        lambda x: x.gather(1, torch.multinomial(x.exp(), 2)),
        lambda x: x + torch.normal(x, 1.0) + torch.rand(()),
        lambda x: nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.4),
    ],
)
def test_random_numbers_that_are_held_still_do_not_depend_on_the_rows(draw: Any) -> None:
    x = torch.randn(8, 5)
    with Still(lambda *_: None):
        whole, parts = draw(x), torch.cat([draw(x[:3]), draw(x[3:])])
    torch.testing.assert_close(whole, parts)


def test_an_order_that_is_drawn_over_rows_is_seen() -> None:
    x = torch.randn(8, 5)
    with Still(lambda *_: None):
        whole, parts = x[torch.randperm(8)], torch.cat([x[:4][torch.randperm(4)], x[4:][torch.randperm(4)]])
    assert not torch.equal(whole, parts)


def test_a_loader_that_is_dropped_keeps_no_data() -> None:
    def used() -> Any:
        loader = DataLoader(TensorDataset(torch.randn(6, 1)), batch_size=2)
        list(loader)
        with torch.no_grad():
            list(loader)
        return weakref.ref(loader.dataset)

    with autopatch(as_one_process=True):
        data = used()
        gc.collect()
        assert data() is None


@pytest.mark.parametrize(
    ("count", "local_rank", "taken"),
    [
        (0, "1", []),
        (1, "3", [0]),  # a launcher may show each rank its own one
        (4, "3", [3]),
        *((4, wrong, None) for wrong in ("", "4", "x", "-1")),
    ],
)
def test_a_rank_takes_its_own_gpu_and_does_not_guess_which_that_is(
    monkeypatch: pytest.MonkeyPatch, count: int, local_rank: str, taken: list[int] | None
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    if taken is None:
        with raises(WorldError, ("4 GPUs", f"LOCAL_RANK={local_rank or None}", "from 0 to 3"), "torchrun"):
            backend_here()
        return
    assert backend_here() == ("cpu:gloo,cuda:nccl" if count else "gloo")
    assert chosen == taken


def test_more_ranks_than_gpus_share_these_where_the_command_has_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name, text in {**ALONE, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "DDP_PATCH_STARTED": "1"}.items():
        monkeypatch.setenv(name, text)
    assert backend_here() == "gloo"
    assert chosen == [1]


class Broken(Dataset[float]):
    """One of its samples cannot be read."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> float:
        if index == 2:
            raise LookupError("of a sample")
        return float(index)


@pytest.mark.parametrize("is_training", [False, True])
def test_a_pass_goes_on_after_an_error_that_the_script_catches(is_training: bool) -> None:
    model, found = nn.Linear(1, 1, dtype=torch.float64), []
    with autopatch(as_one_process=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = iter(DataLoader(Broken()))
        for _ in range(6):
            with contextlib.suppress(LookupError):
                found.append(next(batches))
                if is_training:
                    model(found[-1].reshape(1, 1)).mean().backward()
                    optimizer.step()
        assert next(batches, None) is None
    assert [int(batch) for batch in found] == [0, 1, 3, 4, 5]


def test_one_rank_runs_without_a_process_group() -> None:
    model, call = nn.Linear(1, 1), nn.Module.__call__
    batches = torch.arange(7.0).reshape(7, 1)
    loader: DataLoader[torch.Tensor] = DataLoader(list(batches), batch_size=3)  # type: ignore[arg-type]  # a list is one
    with autopatch(as_one_process=True) as summary:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in loader:
            model(batch).mean().backward()
            optimizer.step()
        with torch.no_grad():
            assert [len(batch) for batch in loader] == [3, 3, 1]
    assert "1 rank trained as one process: 3 optimizer steps." in str(summary)
    assert nn.Module.__call__ is call


@pytest.mark.parametrize("options", [{"share": "samples"}, {"rank": 0, "num_replicas": 2}, {"only": "a.py"}])
def test_options_that_one_process_decides_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidOptionError, match=next(iter(options))), autopatch(as_one_process=True, **options):  # type: ignore[arg-type]  # several kinds
        pass
