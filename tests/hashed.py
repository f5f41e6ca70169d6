"""Values whose hashes every process must have alike, and what one process says of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ddp_patch.orders.digest import Digest, fingerprint
from ddp_patch.streams.reports import name_of

__all__ = ["KINDS", "digest_of", "told"]


def digest_of(items: Sequence[Any], *parts: int) -> Digest:
    """Return the digest of items that come in parts of these sizes, and then the rest."""
    digest, start = Digest(), 0
    for part in parts:
        digest.add(items[start : start + part])
        start += part
    digest.add(items[start:])
    digest.end()
    return digest


# Items that are alike on every rank, and how they come there: each has a digest of its own.
KINDS: dict[str, list[Any]] = {
    "indices": [3, 1, 2],
    "other indices": [3, 2, 1],
    "batches": [[3, 1], [2]],
    "an empty batch": [[], [3, 1, 2]],
    "pairs": [(3, 1), (2, 0)],
    "indices and names": [(3, "a"), (1, "b")],
    "a name among indices": [3, "a", 2],
    # The first items are hashed one by one, later ones many at once.
    "a name among many indices": [*range(200), "a", *range(20)],
    "a name among many pairs": [*((at, 0) for at in range(200)), (1, "a"), *((at, 0) for at in range(20))],
    "a tensor among many indices": [*range(200), torch.tensor(1), *range(20)],
    "large numpy's": [np.int64(2**62)] * 200,
    "large": [2**70, -(2**70)],
    "tensors": [torch.tensor(3), torch.tensor(1)],
    "other arrays": [np.array([1, 3]), np.array([2])],
    "keys": [{"index": 3}, {"index": 1}],
    "sets": [{"b", "a"}, {"c"}],
    "nothing": [None, None],
}


def told() -> dict[str, object]:
    """Return the digests, a fingerprint and a name, as this process has them."""
    return {
        **{name: digest_of(items).marks for name, items in KINDS.items()},
        "fingerprint": fingerprint([{"a", "b", "c", "d"}, {"x": {"y", "z"}}, "text", (1, 2.5), b""]),
        "name": name_of({key: [key, 1, None] for key in {"some", "names", "of", "fields"}}),
    }
