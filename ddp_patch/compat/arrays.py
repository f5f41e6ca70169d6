"""Private facts about tensors and numpy's generator. Seen in torch 2.4.0 to 2.15.0 and numpy 1.26.0 to 2.5.5."""

import numpy as np
import torch

__all__ = [
    "changes_of",
    "may_hold_a_normal",
]


def changes_of(tensor: torch.Tensor) -> object:
    """Return a value that stays equal until the tensor is changed in place; torch has no public name for it.

    If this torch lacks it, the value equals nothing, as if the tensor had changed.
    """
    return getattr(tensor, "_version", object())


class _Stateless:
    """A stub of a bit generator, so that its state is not copied."""

    @property
    def state(self) -> dict[str, object]:
        return {"bit_generator": ""}


def may_hold_a_normal() -> bool:
    """Return whether numpy's global generator holds the second of two normal draws, or may do so.

    It lies beside the bit generator. The public ``np.random.get_state()`` tells, and copies 624 numbers one by one
    before that, which takes longer than all the rest of a swap of random states. So a stub is there meanwhile.
    """
    try:
        numpys = np.random.get_state.__self__  # type: ignore[attr-defined]  # a bound method, in numpy's stubs a function
        bit_generator = numpys._bit_generator
    except AttributeError:
        return True
    try:
        numpys._bit_generator = _Stateless()
        return bool(numpys.get_state(legacy=False)["has_gauss"])
    finally:
        numpys._bit_generator = bit_generator
