"""Parts of a script that runs as one process, without other ranks."""

import contextlib
import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from messages import raises
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ddp_patch import autopatch
from ddp_patch.compat.private_torch import operations_so_far
from ddp_patch.errors import InvalidOptionError, RankMismatchError, UnsupportedLoaderError, WorldError
from ddp_patch.running.gradients import PassWeights, StepWeight
from ddp_patch.running.launch import ALONE, backend_here
from ddp_patch.running.lockstep import RandomNumbers, Replicas, models_of, seed_all
from ddp_patch.running.losses import MEAN, SUM, UNKNOWN, WEIGHED, Reductions, is_additive

TRAIN, TEST = "train", "test"
BACKWARD, END = "backward", "end"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ([(TRAIN, 1.0), BACKWARD, (TRAIN, 0.8), BACKWARD], [1.0, 0.8]),
        ([BACKWARD], [1.0]),
        ([(TRAIN, 0.8), BACKWARD, BACKWARD, BACKWARD], [0.8, 0.8, 0.8]),  # several losses of a batch
        ([(TRAIN, 0.8), (TRAIN, 0.8), BACKWARD], [0.8]),  # one loss of two batches
        ([(TRAIN, 1.0), (TRAIN, 0.8), BACKWARD], "several batches of train"),
        ([(TEST, 1.2), (TRAIN, 0.8), BACKWARD, (TRAIN, 0.9), BACKWARD], [0.8, 0.9]),  # a look at another loader
        ([(TEST, 1.2), (TRAIN, 0.8), BACKWARD, (TEST, 1.2), (TRAIN, 0.8), BACKWARD], "test and train"),
        ([(TEST, 1.0), (TEST, 1.2), (TEST, END), (TRAIN, 0.8), BACKWARD], [0.8]),  # an evaluation
        ([(TEST, 1.0), (TEST, 1.2), (TRAIN, 0.8), BACKWARD], "test and train"),
        ([(TRAIN, 1.0), (TRAIN, 1.2), (TRAIN, END), BACKWARD], "several batches of train"),
        ([(TRAIN, 1.0), (TRAIN, 1.0), BACKWARD, (TRAIN, 1.0), BACKWARD, (TRAIN, END), BACKWARD], [1.0, 1.0, 1.0]),
    ],
)
def test_the_weight_is_that_of_the_batch_that_was_taken(
    script: list[str | tuple[str, float | str]], expected: list[float] | str
) -> None:
    step = StepWeight()
    passes = {TRAIN: PassWeights(TRAIN), TEST: PassWeights(TEST)}

    def weights() -> list[float]:
        found = []
        for event in script:
            if isinstance(event, str):
                found.append(step.of_backward())
            elif isinstance(event[1], str):
                passes[event[0]].is_over = True
            else:
                step.take(passes[event[0]], event[1], (1, 2))
        return found

    if isinstance(expected, str):
        with pytest.raises(UnsupportedLoaderError, match=expected):
            weights()
    else:
        assert weights() == expected


def test_batches_that_are_kept_are_not_used_again_with_another_weight() -> None:
    batches = [{"x": torch.zeros(2)}, {"x": torch.zeros(1)}]
    for weights, is_kept in (((1.0, 0.8), True), ((0.8, 0.8), True), ((1.0, 0.8), False)):
        step = StepWeight()
        train = PassWeights(TRAIN)
        for weight, batch in zip(weights, batches, strict=True):
            step.take(train, weight, (1, 2), batch if is_kept else copy.deepcopy(batch))
            step.of_backward()
        train.is_over = True
        if is_kept and len(set(weights)) > 1:
            with pytest.raises(UnsupportedLoaderError, match="used again after its pass"):
                step.of_backward()
        else:
            assert step.of_backward() == 0.8  # all data at once


PART, WHOLE, CLASSES = 5, 12, 3
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
LOSSES: dict[str, tuple[Loss, set[str]]] = {
    "mean squared error": (lambda x, y, _: functional.mse_loss(x, y), {MEAN}),
    "its sum": (lambda x, y, _: functional.mse_loss(x, y, reduction="sum"), {SUM}),
    "cross entropy": (lambda x, _, t: functional.cross_entropy(x, t), {MEAN}),
    "its sum, in half": (lambda x, _, t: 0.5 * functional.cross_entropy(x, t, reduction="sum").float(), {SUM}),
    "classes weigh": (lambda x, _, t: functional.cross_entropy(x, t, weight=torch.ones(CLASSES)), {WEIGHED}),
    "a mean by hand": (lambda x, y, _: ((x - y) ** 2).sum() / len(x), {MEAN}),
    "a sum of means": (lambda x, y, _: ((x - y) ** 2).mean(1).sum(), {SUM}),
    "a mean of sums": (lambda x, y, _: ((x - y) ** 2).sum(1).mean(), {MEAN}),
    "by the batch size": (lambda x, y, _: ((x - y) ** 2).sum() / WHOLE, {SUM}),
    "by some number": (lambda x, y, _: ((x - y) ** 2).sum() / 7, {UNKNOWN}),
    "accumulated": (lambda x, y, _: functional.mse_loss(x, y) / 4, {MEAN}),
    "a mean and a penalty": (
        lambda x, y, _: functional.mse_loss(x, y) + 0.1 * torch.ones(9).requires_grad_().sum(),
        {MEAN},
    ),
    "a mean and a sum": (lambda x, y, _: functional.mse_loss(x, y) + (x**2).sum(), {MEAN, SUM}),
    "a norm": (lambda x, y, _: (x - y).norm(), {UNKNOWN}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_is_of_its_samples(name: str) -> None:
    make, expected = LOSSES[name]
    outputs = torch.randn(PART, CLASSES, requires_grad=True)
    loss = make(outputs.log_softmax(1), torch.randn(PART, CLASSES), torch.randint(0, CLASSES, (PART,)))
    assert Reductions(PART, WHOLE).of(loss) == expected


def test_a_loss_of_an_earlier_batch_is_of_no_known_form() -> None:
    outputs = torch.randn(PART, CLASSES, requires_grad=True)
    kept = outputs.mean()
    since, terms = operations_so_far(), set[Any]()
    new = outputs.square().mean()
    assert Reductions(PART, WHOLE, since=since).of(new) == {MEAN}
    assert Reductions(PART, WHOLE, since=since).of(kept + new) == {MEAN, UNKNOWN}
    assert Reductions(PART, WHOLE).of(new + new.mul(2), terms) == {MEAN}
    assert new.grad_fn in terms
    Reductions(PART, WHOLE).of(outputs.sum() / PART, terms)
    assert {type(each).__name__ for each in terms} == {"AddBackward0", "MulBackward0", "MeanBackward0", "DivBackward0"}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        *((make, True) for make, kinds in LOSSES.values() if UNKNOWN not in kinds),
        (lambda x, y, _: (x.softmax(1) * y).sum(1).mean(), True),
        (lambda x, y, _: x.mean(), True),  # it has no second derivative
        (lambda x, y, _: y.mean(), True),  # it is not of the outputs
        (lambda x, y, _: (x - y).norm(), False),
        (lambda x, y, _: functional.mse_loss(x, y).sqrt(), False),
        (lambda x, y, _: functional.cross_entropy(x @ y.T, torch.arange(len(x))), True),  # with what is no output
        (lambda x, y, _: functional.cross_entropy(x @ x.T, torch.arange(len(x))), False),
        (lambda x, y, _: 1 - 2 * (x.sigmoid() * y).sum() / (x.sigmoid() + y).sum(), False),
        (lambda x, y, _: functional.normalize(x, dim=0).pow(4).sum(), False),
    ],
)
def test_whether_a_loss_adds_up_what_its_samples_give(make: Loss, expected: bool) -> None:
    outputs = torch.randn(PART, CLASSES, requires_grad=True)
    loss = make(outputs.log_softmax(1), torch.rand(PART, CLASSES), torch.randint(0, CLASSES, (PART,)))
    before = torch.get_rng_state()
    assert is_additive(loss, outputs, PART) is expected
    assert torch.equal(torch.get_rng_state(), before)


def test_two_outputs_for_a_sample_may_be_compared() -> None:
    outputs = torch.randn(2 * PART, CLASSES, requires_grad=True)
    first, second = outputs[:PART], outputs[PART:]
    assert is_additive(functional.cosine_similarity(first, second).mean(), outputs, PART)
    assert not is_additive((first @ second.T).exp().sum(), outputs, PART)


class Meeting:
    """Stands for two ranks, and says what they have."""

    ranks, done = 2, "after some steps"

    def __init__(self, of_ranks: list[list[int]]) -> None:
        self.of_ranks = of_ranks

    def meet(self, doing: str, usual: object) -> bool:
        return not self.of_ranks

    def meet_alike(self, doing: str, found: object) -> None:
        pass

    def broadcast(self, tensors: object) -> None:
        pass

    def gathered(self, value: object) -> list[list[int]]:
        return self.of_ranks


def test_parameters_that_differ_are_named() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    for sums, told in (([], ""), ([[0], [1], [1]], r"parameter 0, of shape \(1,\), between rank 0")):
        replicas = Replicas(cast(Any, Meeting(sums)), print)
        replicas.add(optimizer, sync_batchnorm=False)
        if told:
            with pytest.raises(RankMismatchError, match=told):
                replicas.meet("ends")
        else:
            replicas.meet("ends")


def test_models_are_found_by_their_parameters_and_evaluated_if_all_are_in_evaluation_mode() -> None:
    first, loss = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.MSELoss()
    second = copy.deepcopy(first)
    wrapped = nn.ModuleDict({"model": second, "loss": loss})
    assert models_of([*second.parameters(), *first.parameters()]) == [wrapped, first]
    assert models_of([nn.Parameter(torch.zeros(1))]) == []
    told: list[str] = []
    replicas = Replicas(cast(Any, Meeting([])), told.append)
    assert not replicas.are_evaluated  # there are none
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    replicas.add(optimizer, sync_batchnorm=False)
    assert told == []
    replicas.tell_of_parts()
    assert told[0].startswith("Batch normalisation sees this rank's part")
    found = []
    for modes in ((True, True), (False, True), (False, False)):
        first.train(modes[0])
        wrapped.train(modes[1])
        found.append(replicas.are_evaluated)
    assert found == [False, False, True]
    first[0].train()
    assert not replicas.are_evaluated
    first[0].eval()
    del optimizer
    assert replicas.are_evaluated  # after the function that trained has returned


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


def test_a_rank_draws_its_own_numbers_in_divided_passes_alone() -> None:
    def drawn() -> tuple[float, float, float]:
        return torch.rand(()).item(), np.random.rand(), random.random()

    found = []
    for rank in range(2):
        seed_all(5)
        numbers = RandomNumbers()
        numbers.seed(5, rank)
        numbers.enter("outer", "own")
        before = drawn()
        numbers.begin_own()
        own = drawn()
        numbers.enter("inner", "common")
        within = drawn()
        numbers.leave("inner")
        later = drawn()
        numbers.leave("outer")
        found.append((before, own, within, later, drawn()))
    for place, is_own in enumerate((False, True, False, True, False)):
        a, b = found[0][place], found[1][place]
        assert (set(a) & set(b) == set()) if is_own else a == b


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
    model = nn.Linear(1, 1)
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
    assert "each batch divided over 1 rank, 3 steps, 2 passes" in " ".join(str(summary).split())
    backward = torch.autograd.backward
    with autopatch():
        assert torch.autograd.backward is backward


# What dynamo says of some versions of Python.
@pytest.mark.filterwarnings("ignore:Guards may run slower")
def test_a_compiled_model_trains_on_divided_batches() -> None:
    model: Any = torch.compile(nn.Linear(1, 1), backend="aot_eager", fullgraph=True)
    with autopatch(as_one_process=True) as summary:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(TensorDataset(torch.ones(6, 1)), batch_size=3):
            model(*batch).mean().backward()
            optimizer.step()
    assert summary.records[0].fate == "divided"


@pytest.mark.parametrize("options", [{"share": "samples"}, {"rank": 0, "num_replicas": 2}])
def test_options_that_one_process_decides_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidOptionError, match=next(iter(options))), autopatch(as_one_process=True, **options):  # type: ignore[arg-type]  # several kinds
        pass


def test_orders_follow_from_a_seed_that_is_given() -> None:
    def order(seed: int | None) -> list[int]:
        loader: Any = DataLoader(range(20), batch_size=4, shuffle=True)  # type: ignore[arg-type]  # a range is one
        with autopatch(as_one_process=True, seed=seed):
            return [int(item) for batch in loader for item in batch]

    found = []
    for manual in (1, 2):
        torch.manual_seed(manual)
        found.append((order(7), order(None)))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]
