"""Each remedy of each message works as it is written, on the program that met the message; see ``tests/remedied``."""

import copy
import operator
import os
import random
import re
import warnings
from collections import Counter
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from jobs import ids
from remedied import UNMET, Met, Untried, is_of, left_over, remedies_in, rows
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch documents it
from torch.utils.data import DataLoader
from zoo import Source

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.auditing.commands import _costs
from ddp_patch.auditing.finding import look_up
from ddp_patch.elastic import ElasticLoader
from ddp_patch.errors import AuditError, message_of
from ddp_patch.loaders.copying import warn_of_what_drew_nothing
from ddp_patch.testing import run_ranks

WORLD = 2

# What programs may name.
NAMES: dict[str, Any] = {}
for module in (
    "torch.utils.data",
    "torch.distributed.device_mesh",
    "zoo",
    "ddp_patch",
    "ddp_patch.errors",
    "ddp_patch.samplers",
):
    found = import_module(module)
    NAMES |= vars(found) | {name: getattr(found, name) for name in getattr(found, "__all__", ())}
NAMES |= {
    "np": np,
    "torch": torch,
    "dist": dist,
    "environ": os.environ,
    "copy": copy,
    "random": random,
    "Elastic": ElasticLoader,
}
SHORT = {"Weighted": "WeightedClassSampler", "PK": "PKBatchSampler", "Lengths": "LengthBucketBatchSampler"}
SHORT |= {"Scalable": "ScalableRandomSampler", "Grouped": "GroupedBatchSampler", "Iterations": "IterationBatchSampler"}
NAMES |= {name: NAMES[whole] for name, whole in SHORT.items()} | {"nan": float("nan"), "inf": float("inf")}

NAMES.pop("loader")  # what a program calls the one that it iterates

# Every whole number that a sampler takes: a call, and the least one.
WHOLES = {
    "Weighted([0, 1], [1, 1], {})": 1,
    "Weighted.n_per_class([0, 1], {})": 1,
    "Weighted([0, 1], [1, 1], 3, seed={})": 0,
    "Weighted([0, 1], [1, 1], 3).set_epoch({})": 0,
    "PK(LABELS, {}, 2)": 1,
    "PK(LABELS, 2, {})": 1,
    "PK(LABELS, 2, 2, num_batches={})": 1,
    "Lengths([1], max_tokens={})": 1,
    "Lengths([3], batch_size={})": 1,
    "WindowSampler({}, 1)": 1,
    "WindowSampler(10, {})": 1,
    "WindowSampler(10, 3, {})": 1,
    "Scalable({})": 0,
    "Grouped([0, 1], [0, 0], {})": 1,
    "Iterations([[0]], {})": 1,
    "Iterations([[0]], 5, {})": 0,
    "Iterations([[0]], 5).set_epoch({})": 0,
}
OF_WHOLES = [
    Met(call.format(odd), f"is not a whole number of at least {least}", [("Pass such an int", call.format(least))])
    for call, least in WHOLES.items()
    for odd in (least - 1, "3.0", "True", "torch.tensor(2.5)")
]
HERE = [*chain.from_iterable(map(rows, ("audits", "loaders", "passes", "samplers"))), *OF_WHOLES]
ELSEWHERE = [*rows("ranks"), *rows("packages")]  # tests/ranks and tests/integrations run these


class OneRank(Exception):  # noqa: N818 - no error
    """The program is about a process group, which has one rank here; tests/ranks has several."""


def group(rank: int) -> None:
    if rank > 0:
        raise OneRank
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def over(n: int = 24, **options: Any) -> DataLoader[Any]:
    if not options.keys() & {"batch_size", "batch_sampler"}:
        options["batch_size"] = 4
    return DataLoader(range(n), **options)  # type: ignore[arg-type]  # a dataset


def streamed(n: int = 24, splits: bool = False, **options: Any) -> DataLoader[Any]:
    return DataLoader(Source(n, splits), **{"batch_size": 4} | options)


def tell(report: Any) -> None:
    for problem in report.problems:
        raise AuditError(f"{problem.kind}: {problem.what} {problem.remedy}")


NAMES |= {"look_up": look_up, "_costs": _costs, "run_ranks": run_ranks, "operator": operator, "tell": tell}
NAMES |= {"over": over, "streamed": streamed, "exits": warn_of_what_drew_nothing}


def run(program: str) -> tuple[str, list[int] | None, list[int]]:
    """Run a program on each rank of a world given by hand.

    Return the first message that it meets; else the samples of all ranks' ``loader``, and those that are ``due``.
    """
    given: list[int] | None = None
    for rank in range(WORLD if re.search(r"\bloader\b", program) else 1):
        world = {"rank": rank, "num_replicas": WORLD}
        names = NAMES | world | {"WORLD": world}
        names["group"] = partial(group, rank)
        names["patch"] = lambda loader, world=world, **options: patch_dataloader_to_ddp(loader, **world | options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                exec(program, names)  # noqa: S102 - a table of ours
                if "loader" in names:
                    given = (given or []) + [*ids([*names["loader"]])]
            except OneRank:
                break
            except Exception as error:  # noqa: BLE001 - whatever it is, it is compared with the row
                return message_of(error), None, []
            finally:
                os.environ.pop("WORLD_SIZE", None)
                if rank == 0 and dist.is_initialized():
                    dist.destroy_process_group()
    return "", given, list(names.get("due", range(24)))


@pytest.mark.parametrize("row", HERE, ids=str)
def test_remedies(row: Met) -> None:
    message, _, _ = run(row.program)
    assert message, "the program meets no message"
    assert not left_over(message, row)
    for quote, program in row.remedies:
        if isinstance(program, Untried):
            continue
        again, given, due = run(program)
        assert not again, f"{quote}: {again}"
        assert given is None or Counter(given) == Counter(due), quote


def test_each_remedy_of_the_package_is_in_a_table() -> None:
    forgotten, unmet = {}, {*UNMET}
    for place, facts, begins in remedies_in():
        if begins.strip() in UNMET:
            unmet.discard(begins.strip())
        elif not any(is_of(row, facts, begins) for row in [*HERE, *ELSEWHERE]):
            forgotten[place] = begins
    assert not unmet, "no text begins so"
    assert not forgotten, "\n".join(f"{place}: {begins}" for place, begins in forgotten.items())
