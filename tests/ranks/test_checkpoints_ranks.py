"""A loader in a distributed checkpoint beside a sharded model: saved by four ranks, loaded by two and by three."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from quick import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from zoo import seed_ambient

from ddp_patch import patch_dataloader_to_ddp

N, BATCH, DONE = 61, 2, 3


def trained(rank: int, world_size: int, dimensions: dict[str, int], folder: Path, resumes: bool) -> list[Any]:
    """The indices that a rank takes of an epoch, before its checkpoint or after it, and all parameters then."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    seed_ambient(rank + 10 * resumes)
    mesh = init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    data = TensorDataset(torch.arange(N))
    given: DataLoader[Any] = DataLoader(data, BATCH, shuffle=True, num_workers=2)
    loader: Any = patch_dataloader_to_ddp(given, device_mesh=mesh)
    torch.manual_seed(0)  # replicas begin alike
    model = nn.Linear(1, 8)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if resumes:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        states = {"model": of_model, "optimizer": of_optimizer, "loader": loader}
        load(states, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        restored = [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]  # of DTensor
        return [[int(index) for (batch,) in loader for index in batch], restored]
    taken = []
    batches = iter(loader)
    for (indices,) in islice(batches, DONE):
        taken += indices.tolist()
        optimizer.zero_grad()
        model(indices[:, None] / N).sum().backward()
        optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    save({"model": of_model, "optimizer": of_optimizer, "loader": loader}, checkpoint_id=folder)
    return [taken, [parameter.full_tensor().detach() for parameter in model.parameters()]]  # type: ignore[attr-defined]  # as above


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, of its checkpoints
def test_a_sharded_model_and_its_loader_go_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    saved = run_ranks(trained, 4, {"dp_replicate": 2, "dp_shard": 2}, tmp_path, False)
    before = [index for taken, _ in saved for index in taken]
    assert len(set(before)) == len(before) == 4 * BATCH * DONE
    for world_size in (2, 3):
        ranks = run_ranks(trained, world_size, {"dp_shard": world_size}, tmp_path, True)
        rest = [index for taken, _ in ranks for index in taken]
        assert sorted({*before, *rest}) == list(range(N))
        assert len(before) + len(rest) - N == -(N - len(before)) % world_size  # padding alone comes twice
        for _, parameters in ranks:
            torch.testing.assert_close(parameters, saved[0][1], rtol=0, atol=0)
