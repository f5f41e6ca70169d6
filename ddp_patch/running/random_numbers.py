"""Random numbers within calls: different on each rank in divided calls, and fixed while calls are compared."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from ddp_patch.compat.private_torch import DispatchMode, argument_names

_APART = 0x9E3779B97F4A7C15  # the distance between the seeds of two ranks


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def torch_states() -> list[torch.Tensor]:
    """Return the states of torch's global generators, on the CPU and on GPUs."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if used else [])]


def put_torch_states(states: list[torch.Tensor]) -> None:
    """Put torch's global generators into these states."""
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(states[1:])


@contextmanager
def own_numbers(rank: int, some_have_drawn: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Let each rank draw different random numbers while entered, and the same ones again afterwards.

    If any rank has drawn, all generators go on one number further. If not, they go on as if nothing had happened.

    Args:
        rank: This rank.
        some_have_drawn: Returns at the end whether any rank has drawn.

    Yields:
        A function that returns whether this rank has drawn.
    """
    before = torch_states()
    seed = (int(torch.randint(2**62, (), device="cpu")) + rank * _APART) % 2**63
    common = torch_states()
    torch.default_generator.manual_seed(seed)
    if before[1:]:
        torch.cuda.manual_seed_all(seed)
    own = torch_states()
    try:
        yield lambda: not all(map(torch.equal, own, torch_states()))
    finally:
        put_torch_states(common if some_have_drawn() else before)


class Still(DispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    """Replaces random numbers by fixed ones that do not depend on the number of rows. No generator moves.

    Args:
        note: Called after each operation: with the operation, its arguments, its result, whether it draws, and whether
            it was given a generator.
    """

    def __init__(self, note: Callable[[Any, Any, Any, bool, bool], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, is_drawn = kwargs or {}, torch.Tag.nondeterministic_seeded in func.tags
        result = _held(func, args, options) if is_drawn else func(*args, **options)
        self._note(func, args, result, is_drawn, options.get("generator") is not None)
        return result


def eager() -> AbstractContextManager[object]:
    """Run compiled functions uncompiled while entered, because compiled code draws past ``Still``."""
    stance: Callable[[str], AbstractContextManager[object]] = getattr(torch.compiler, "set_stance", nullcontext)
    return stance("force_eager")  # of torch 2.6 and newer


def _held(func: Any, args: Any, options: dict[str, Any]) -> Any:
    generator = options.get("generator") or torch.default_generator
    state = generator.get_state()
    try:
        return _drawn(func, args, options)
    finally:
        generator.set_state(state)


def _drawn(func: Any, args: Any, options: dict[str, Any]) -> Any:
    """Return the fixed result of an operation that draws."""
    name, named = func.overloadpacket.__name__, argument_names(func)
    given = {**dict(zip(named, args, strict=False)), **options}
    if name == "native_dropout" and given["train"] is not False:
        mask = torch.ones_like(given["input"], dtype=torch.bool)
        return given["input"] * (1 / (1 - given["p"]) if given["p"] < 1 else 0.0), mask
    if any(given.get(each) for each in ("dropout_p", "dropout")):
        given = {key: 0.0 if key in {"dropout_p", "dropout"} else value for key, value in given.items()}
        return func(*(given.pop(each) for each in named[: len(args)]), **given)
    if name == "multinomial":
        places = torch.arange(given["num_samples"], device=given["self"].device) % given["self"].shape[-1]
        return torch.sort(given["self"], dim=-1, descending=True, stable=True).indices[..., places]
    result = func(*args, **options)
    if name == "randperm":
        return result.copy_(torch.arange(len(result) - 1, -1, -1))
    if isinstance(result, torch.Tensor):
        if "bernoulli" in name:
            result.fill_(1)
        elif result.is_floating_point():
            last = result.shape[-1] if result.dim() > 1 else 1
            low, high = (float(given.get(each) or usual) for each, usual in (("from", 0.0), ("to", 1.0)))
            places = (torch.arange(last, device=result.device) + 0.5) / last
            result.copy_(low + (high - low) * places.view([-1] * min(result.dim(), 1)))
        else:
            result.fill_(int(given.get("low") or given.get("from") or 0))
    return result
