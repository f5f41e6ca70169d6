"""Real gloo ranks that share whole batches, choose differently, or would make no step: all are told alike."""

from functools import partial
from typing import Any

from quick import run_ranks, said
from torch.utils.data import DataLoader
from zoo import Bare, Source, as_it_is, loader, seed_ambient

from ddp_patch import patch_dataloader_to_ddp


def lacking(**made: Any) -> DataLoader[Any]:
    """Nine samples: with ``uneven="keep"``, the first of two ranks has a full batch of five."""
    return DataLoader(range(9), batch_size=5, drop_last=True, collate_fn=as_it_is, **made)  # type: ignore[arg-type]  # torch's use


def sharing(rank: int, world_size: int) -> dict[str, Any]:
    seed_ambient(rank)
    whole = patch_dataloader_to_ddp(loader(shuffle=True), share="batches")
    led = patch_dataloader_to_ddp(loader(shuffle=True), share="batches", order="leader")
    hidden = {
        "drawn": patch_dataloader_to_ddp(lacking(sampler=Bare(range(9))), uneven="keep"),
        "led": patch_dataloader_to_ddp(lacking(sampler=Bare(range(9))), uneven="keep", order="leader"),
        "iterable": patch_dataloader_to_ddp(
            DataLoader(Source(9), batch_size=5, drop_last=True, collate_fn=as_it_is), uneven="keep"
        ),
    }
    return {
        "batches": list(whole),
        "led batches": list(led),
        "differing": said(lambda: patch_dataloader_to_ddp(loader(), share="batches" if rank else "auto")),
        "refused": said(lambda: patch_dataloader_to_ddp(lacking(), uneven="keep")),
        **{name: said(partial(next, iter(one))) for name, one in hidden.items()},
    }


def test_ranks_share_whole_batches_and_hear_the_same_of_epochs_without_steps() -> None:
    first, second = run_ranks(sharing, 2)
    for name in ("batches", "led batches"):
        shares = [first.pop(name), second.pop(name)]
        together = [batch for round_ in zip(*shares, strict=True) for batch in round_]
        assert sorted(item for batch in together for item in batch) == list(range(23))
        assert list(map(len, together)) == [4, 4, 4, 4, 4, 3]
    assert first == second
    kind, message = first.pop("differing")
    assert kind == "RankMismatchError"
    assert "share: auto on rank 0; batches on rank 1" in message
    assert {kind for kind, _ in first.values()} == {"NoStepsError"}
