"""Real gloo ranks that divide batches, sum what their samples count, and gather their outputs in order."""

from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from iterables import ShardPerWorker
from messages import assert_tells
from quick import run_each, run_ranks, said
from torch.utils.data import DataLoader
from zoo import Source, Unequal, as_it_is, loader, seed_ambient

from ddp_patch import gather_in_order, iter_with_weights, patch_dataloader_to_ddp

N = 53


def tokens(batch: list[int]) -> list[int]:
    return [index % 4 for index in batch]


def steps(one: Any, **options: Any) -> list[tuple[list[int], list[float]]]:
    return [(batch, weights.tolist()) for batch, weights in iter_with_weights(one, dtype=torch.float64, **options)]


def weighing(rank: int, world_size: int) -> dict[str, Any]:
    seed_ambient(rank)

    def patched(given: DataLoader[Any], **options: Any) -> Any:
        return patch_dataloader_to_ddp(given, seed=3, timeout=60, **options)

    return {
        "whole batches, drawn": steps(patched(loader(batch_sampler=Unequal(N)))),
        "whole batches, some ranks have one more": steps(
            patched(loader(batch_sampler=[[1, 2], [3]] * 2 + [[4]]), uneven="keep")
        ),
        "fewer batches than ranks": steps(patched(loader(batch_sampler=[[1, 2, 3]]), uneven="keep")),
        "parts of workers, some ranks have one more": steps(
            patched(DataLoader(ShardPerWorker((1, 4)), 1, num_workers=2, collate_fn=as_it_is), uneven="keep")
        ),
        "divided batches": steps(patched(loader(batch_sampler=Unequal(N)), share="within_batches")),
        "tokens": steps(patched(loader(5)), weight_of=tokens),
        "tokens of divided batches": steps(patched(loader(5), share="within_batches"), weight_of=tokens),
        "tokens, some ranks have one more": steps(patched(loader(5), uneven="keep"), weight_of=tokens),
    }


def test_weights_of_a_step_are_one_over_what_its_samples_count() -> None:
    ranks = run_ranks(weighing, 3)
    for name in ranks[0]:
        of_ranks = [found[name] for found in ranks]
        for number in range(max(map(len, of_ranks))):
            step = [of_rank[number] for of_rank in of_ranks if number < len(of_rank)]
            values = {weight for _, weights in step for weight in weights} - {0}
            assert len(values) <= 1, name  # all real samples count alike in the sum of losses
            counted = [
                sum(tokens([item])) if "tokens" in name else 1
                for batch, weights in step
                for item, weight in zip(batch, weights, strict=True)
                if weight
            ]
            assert abs(sum(counted) * max(values, default=0) - 3) < 1e-9 or not sum(counted), (name, step)


def telling(rank: int, world_size: int) -> tuple[str, str]:
    seed_ambient(rank)
    one = patch_dataloader_to_ddp(loader(), timeout=60)

    def counts(batch: list[int]) -> list[int]:
        return [1] * (len(batch) - (rank == 1 and batch[0] > 8))

    return told(one, weight_of=counts)


def told(one: Any, taken: int | None = None, **options: Any) -> tuple[str, str]:
    return said(lambda: list(islice(iter_with_weights(one, **options), taken)))


def leaving_alone(rank: int, world_size: int) -> tuple[str, str]:
    one = patch_dataloader_to_ddp(loader(), timeout=60)
    return told(one, 2 if rank == 1 else None, weight_of=tokens)


def leaving(rank: int, world_size: int) -> list[Any]:
    """Break off on all ranks, and begin the next pass."""
    seed_ambient(rank)
    one = patch_dataloader_to_ddp(loader(), timeout=60)
    first = [batch for batch, _ in islice(iter_with_weights(one, weight_of=tokens), 2)]
    dist.barrier()
    return [first, [batch for batch, _ in iter_with_weights(one, weight_of=tokens)]]


def test_a_rank_that_counts_wrong_or_breaks_off_alone_is_named_to_the_others_and_all_may_break_off() -> None:
    counted, broken, left = run_each(2, telling, leaving_alone, leaving)
    for begun, whole in left:
        assert begun == whole[:2]
        assert len(whole) == 3
    (error, cause), (nothing, _) = broken
    assert (error, nothing) == ("RankMismatchError", "nothing")
    assert_tells(cause, ("Weighing samples", "rank 1", "2 batches"), "break after")
    assert "by_worker" not in cause
    (first, heard), (second, why) = counted
    assert (first, second) == ("RankMismatchError", "InvalidOptionError")
    assert "rank 1" in heard
    assert "weight_of returned 3 numbers for a batch of 4 samples" in why


def gathering(rank: int, world_size: int) -> list[Any]:
    seed_ambient(rank)
    found: list[Any] = []
    for uneven in ("pad", "keep"):
        for given in (
            loader(batch_sampler=Unequal(N)),
            loader(5, shuffle=True),
            DataLoader(Source(N, splits=True), 5, num_workers=2, collate_fn=as_it_is),
        ):
            one: Any = patch_dataloader_to_ddp(given, share="within_batches", seed=3, uneven=uneven)
            outputs = [index for batch in one for index in batch]
            together: Any = gather_in_order({"tensor": torch.tensor(outputs), "list": outputs}, one)
            assert together["tensor"].tolist() == together["list"]
            found.append(together["list"])
    return found


def test_outputs_of_divided_batches_are_gathered_in_one_processs_order() -> None:
    (alone,) = run_ranks(gathering, 1)
    assert sorted(alone[0]) == sorted(alone[2]) == list(range(N))
    assert run_ranks(gathering, 3) == [alone] * 3
