"""Train a tagger of texts of any length: on any number of GPUs, or of processes on a CPU, the same one.

A batch has texts of about the same length, and up to 400 tokens. How many batches there are is not known before. A step
takes four of them, in which each token counts alike: one rank takes all four, two ranks two each, four ranks one each.

Start it, and start it again, with ``torchrun --standalone --nproc-per-node 2 text.py checkpoint.pt``.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler
from torchmetrics.functional.classification import binary_f1_score

from ddp_patch import gather_in_order, iter_with_mask, loader_state, patch_dataloader_to_ddp, restore_loader

EPOCHS, TOKENS_PER_BATCH, BATCHES_PER_STEP, STEPS_PER_CHECKPOINT = 3, 400, 4, 5
WORDS, NO_TAG = 50, -100  # cross_entropy leaves out the tag -100
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Text = tuple[Tensor, Tensor]  # the ids of its tokens, and their tags


class TokenBatches(Sampler[list[int]]):
    """Batches of texts of about the same length, each of at most so many tokens, in another order in each epoch."""

    def __init__(self, lengths: Sequence[int], most_tokens: int) -> None:
        self.lengths, self.most_tokens = lengths, most_tokens

    def __iter__(self) -> Iterator[list[int]]:
        shuffled = torch.randperm(len(self.lengths)).tolist()
        batches: list[list[int]] = [[]]
        for index in sorted(shuffled, key=lambda index: self.lengths[index]):
            # The text is the longest so far, and the others are filled up to its length.
            if (len(batches[-1]) + 1) * self.lengths[index] > self.most_tokens:
                batches.append([])
            batches[-1].append(index)
        yield from (batches[place] for place in torch.randperm(len(batches)).tolist())


def make_texts(number: int, seed: int) -> list[Text]:
    """Return texts whose tokens have the tag 1 where they are larger than the one before: yours go here."""
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 40, (number,), generator=drawn).tolist()
    ids = [torch.randint(1, WORDS, (length,), generator=drawn) for length in lengths]
    return [(text, (text.diff(prepend=text[:1]) > 0).long()) for text in ids]


def padded(texts: list[Text]) -> tuple[Tensor, Tensor]:
    """Return the texts' tokens and tags, filled up to the longest text."""
    ids, tags = map(list, zip(*texts, strict=True))
    return pad_sequence(ids, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=NO_TAG)


def make_loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return a loader for training and one for validation, as for one process."""
    training: Any = make_texts(1020, seed=0)
    validation: Any = make_texts(203, seed=1)
    batches = TokenBatches([len(ids) for ids, _ in training], TOKENS_PER_BATCH)
    return (
        DataLoader(training, batch_sampler=batches, collate_fn=padded, num_workers=2),
        DataLoader(validation, batch_size=32, collate_fn=padded),
    )


class Network(nn.Module):
    """Tags each token: yours goes here."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.reader = nn.GRU(16, 32, batch_first=True)
        self.tagger = nn.Linear(32, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """Return each token's scores."""
        scores: Tensor = self.tagger(self.reader(self.embedding(ids))[0])
        return scores


def main(file: Path) -> None:
    """Train from the checkpoint on, or from the beginning."""
    # Every rank reads it before the patch, where all meet: so no rank has written the next one yet.
    checkpoint = torch.load(file, map_location=DEVICE, weights_only=True) if file.exists() else None
    torch.manual_seed(0)  # the order and the parameters are those of rank 0, which this seeds
    training, validation = patch_dataloader_to_ddp(make_loaders())
    network = Network().to(DEVICE)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    first_epoch = 0
    if checkpoint:
        network.load_state_dict(checkpoint["network"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        restore_loader(training, checkpoint["training"])
        first_epoch = checkpoint["training"]["epoch"]

    ranks = dist.get_world_size()
    for epoch in range(first_epoch, EPOCHS):  # the first pass after a restore gives the rest of its epoch
        batches, steps = iter_with_mask(training), 0
        while group := list(islice(batches, BATCHES_PER_STEP // ranks)):  # the last step may have fewer
            take_step(model, optimizer, group)
            steps += 1
            if dist.get_rank() == 0 and steps % STEPS_PER_CHECKPOINT == 0:
                states = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
                save({**states, "training": loader_state(training)}, file)
        f1 = validate(network, validation)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: F1 {f1:.3f}")


def take_step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, group: list[Any]) -> None:
    """Take a step by the mean loss of all tokens in a rank's batches and in those of all other ranks."""
    # A batch may be padding, which comes again so that all ranks have equally many: its mask is False.
    batches = [(ids.to(DEVICE), tags.masked_fill(~mask[:, None], NO_TAG).to(DEVICE)) for (ids, tags), mask in group]
    tokens = torch.stack([(tags != NO_TAG).sum() for _, tags in batches]).sum()
    dist.all_reduce(tokens)
    optimizer.zero_grad()
    for place, (ids, tags) in enumerate(batches, start=1):
        with nullcontext() if place == len(batches) else model.no_sync():  # ranks send each other the sum alone
            loss = cross_entropy(model(ids).flatten(0, 1), tags.flatten(), ignore_index=NO_TAG, reduction="sum")
            (loss * dist.get_world_size() / tokens).backward()  # the model takes the mean over the ranks
    optimizer.step()


@torch.no_grad()
def validate(network: nn.Module, loader: DataLoader[Any]) -> float:
    """Return the F1 score of all tokens, each counted once, on every rank."""
    network.eval()
    tagged: list[Tensor] = []
    true: list[Tensor] = []
    for ids, tags in loader:  # a tensor for each text: they are of different lengths
        is_token = tags != NO_TAG
        tagged += [text[keep] for text, keep in zip(network(ids.to(DEVICE)).argmax(dim=2).cpu(), is_token, strict=True)]
        true += [text[keep] for text, keep in zip(tags, is_token, strict=True)]
    network.train()
    tagged, true = gather_in_order((tagged, true), loader)
    return float(binary_f1_score(torch.cat(tagged), torch.cat(true)))


def save(checkpoint: dict[str, Any], file: Path) -> None:
    """Write a file of which, whenever this process is killed, either the old or the new one is there."""
    torch.save(checkpoint, file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)


if __name__ == "__main__":
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # this rank's GPU
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
