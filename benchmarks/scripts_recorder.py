"""Is what Python imports as a script of the survey starts: records its parameters, and may hold still what ranks vary.

``scripts.py`` copies it, as ``sitecustomize.py``, beside each script. What starts the ranks, which has no rank, is let
be. ``RECORD_TO`` names the folder for the parameters, ``STOP_AFTER`` the optimizer step that ends the script (0: none).
``STILL`` says that dropout passes all, noise is 0, and transforms of a sample draw from its own seed; ``DOUBLE``, that
all is then in double precision.
"""

import atexit
import os
import pathlib
import random


def record() -> None:
    """Record the parameters of all optimizers, and end the script after some steps."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    stop, write = int(os.environ["STOP_AFTER"]), torch.save
    target = pathlib.Path(os.environ["RECORD_TO"]) / f"{os.environ['RANK']}.pt"
    optimizers: dict[int, torch.optim.Optimizer] = {}
    steps = [0]

    def count(optimizer: torch.optim.Optimizer, *_: object) -> None:
        optimizers[id(optimizer)] = optimizer
        steps[0] += 1
        if steps[0] == stop:
            raise SystemExit(0)

    def save() -> None:
        groups = [group["params"] for optimizer in optimizers.values() for group in optimizer.param_groups]
        write({"steps": steps[0], "parameters": [each.detach() for group in groups for each in group]}, target)

    register_optimizer_step_post_hook(count)
    atexit.register(save)


def hold_still() -> None:
    """Hold still what N ranks may draw otherwise than one process."""
    import torch
    from torch.nn import functional

    attend = functional.scaled_dot_product_attention

    def attending(query, key, value, attn_mask=None, dropout_p=0.0, *args, **options):
        return attend(query, key, value, attn_mask, 0.0, *args, **options)

    def passing(given, *args, **options):
        return given

    functional.dropout = functional.dropout2d = passing
    functional.scaled_dot_product_attention, torch.randn_like = attending, torch.zeros_like
    seed_samples()


def compute_in_double() -> None:
    """Let all be in double precision."""
    import torch

    double, to = {torch.float32: torch.float64}, torch.Tensor.to

    def moved(tensor, *args, **options):
        args = [double.get(one, one) if isinstance(one, torch.dtype) else one for one in args]
        options |= {"dtype": double.get(options["dtype"], options["dtype"])} if "dtype" in options else {}
        return to(tensor, *args, **options)

    torch.set_default_dtype(torch.float64)
    torch.Tensor.to = moved
    torch.Tensor.float, torch.nn.Module.float = torch.Tensor.double, torch.nn.Module.double
    torch.FloatTensor = torch.DoubleTensor


def seed_samples() -> None:
    """Let transforms of a sample draw from the sample's own seed, and tensors of samples be in double precision."""
    import numpy
    import torch
    from torch.utils._pytree import tree_map
    from torch.utils.data._utils.fetch import _MapDatasetFetcher as Fetcher

    fetch = Fetcher.fetch

    def fetching(self, index):
        if not isinstance(index, (list, tuple)):
            return fetch(self, index)
        samples = [sample(self.dataset, one) for one in index]
        return tree_map(doubled, self.collate_fn(tree_map(doubled, samples)))

    def sample(dataset, index):
        kept = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        number = int(index) if str(index).isdecimal() else 0
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(number)
        if hasattr(dataset, "set_random_state"):  # as MONAI's have it
            dataset.set_random_state(seed=number)
        try:
            return dataset[index]
        finally:
            for restore, state in zip(
                (random.setstate, numpy.random.set_state, torch.set_rng_state), kept, strict=True
            ):
                restore(state)

    def doubled(value):
        if hasattr(value, "edge_index"):  # a graph of torch_geometric
            return value.apply(doubled)
        is_single = os.environ["DOUBLE"] == "True" and isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.double() if is_single else value

    Fetcher.fetch = fetching


if "RECORD_TO" in os.environ and "RANK" in os.environ:
    record()
    if os.environ["STILL"] == "True":
        hold_still()
        if os.environ["DOUBLE"] == "True":
            compute_in_double()
