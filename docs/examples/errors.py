"""Let two ranks raise what takes several ranks, and print each message with the ranks that got it."""

import textwrap

from torch.utils.data import DataLoader, Dataset

from ddp_patch import DDPPatchError, patch_dataloader_to_ddp
from ddp_patch.testing import run_ranks


class Numbers(Dataset[int]):
    """0, 1, 2 and so on."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def ranks_have_other_data(rank: int) -> None:
    """Rank 1 has four samples less."""
    patch_dataloader_to_ddp(DataLoader(Numbers(100 - 4 * rank)))


def one_rank_is_missing(rank: int) -> None:
    """Rank 1 does something else."""
    if rank == 0:
        patch_dataloader_to_ddp(DataLoader(Numbers(8)), timeout=0.5)


CASES = [ranks_have_other_data, one_rank_is_missing]


def messages(rank: int, world_size: int) -> list[str]:
    """Return what this rank raises in each case."""
    found = []
    for case in CASES:
        text = "nothing"
        try:
            case(rank)
        except (DDPPatchError, LookupError) as error:
            text = f"{type(error).__name__}: {error}"
        found.append(text)
    return found


if __name__ == "__main__":
    for case, found in zip(CASES, zip(*run_ranks(messages, 2), strict=True), strict=True):
        print(f"{case.__name__}:")
        for text in dict.fromkeys(found):
            who = " and ".join(f"rank {rank}" for rank, other in enumerate(found) if other == text)
            for line in f"{who}: {text}".splitlines():
                print(textwrap.fill(line, 76, initial_indent="  ", subsequent_indent="    "))
