"""``device=`` with the loaders and batches of other packages."""

import warnings
from itertools import islice
from typing import Any

import pytest
import torch
from moving import Streams, pretend_streams
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import BatchEncoding
from zoo import Indices, N

from ddp_patch import iter_with_weights, patch_dataloader_to_ddp
from ddp_patch.integrations.accelerate import prepare_patched

with warnings.catch_warnings():
    # Importing PyTorch Geometric 2.8 calls torch.jit.script, which torch 2.13 deprecates.
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as Graphs

# torchdata 0.11 calls it in the constructor of every loader.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return pretend_streams(monkeypatch)


def patched(loader: Any, device: Any = "meta") -> Any:
    return patch_dataloader_to_ddp(loader, rank=0, num_replicas=2, device=device)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_torchdatas_states_count_what_came_to_the_loop(num_workers: int, streams: Streams) -> None:
    """Its own iterators count what is taken from them, so nothing is taken ahead."""

    def made(device: Any) -> Any:
        return patched(StatefulDataLoader(Indices(), 2, num_workers=num_workers), device)

    whole = [batch.tolist() for batch in made("cpu")]
    stopped, resumed = made("meta"), made("cpu")
    assert [batch.device.type for batch in islice(stopped, 3)] == ["meta"] * 3
    resumed.load_state_dict(stopped.state_dict())
    assert [batch.tolist() for batch in resumed] == whole[3:]


def test_graphs_are_copied_beside_as_a_whole(streams: Streams) -> None:
    graphs = [Data(x=torch.full((3, 1), number), number=number) for number in range(N)]
    for batch in patched(Graphs(graphs, batch_size=4, num_workers=1)):
        assert (batch.x.device.type, batch.number.device.type) == ("meta", "meta")
    assert any("recorded in loop" in call for call in streams.calls)


def test_encodings_of_texts_are_copied_beside(streams: Streams) -> None:
    def collated(items: list[int]) -> Any:
        return BatchEncoding({"input_ids": torch.tensor(items)})

    (first, *_) = patched(DataLoader(Indices(8), 2, collate_fn=collated))
    assert type(first) is BatchEncoding
    assert first["input_ids"].device.type == "meta"
    assert streams.calls[:3] == ["side reaches copy 1", "loop waits for copy 1", "(2,) recorded in loop"]


def test_accelerate_leaves_batches_where_they_are() -> None:
    from accelerate import Accelerator

    accelerator, loader = Accelerator(cpu=True), patched(DataLoader(Indices(8), 2), device="cpu")
    assert accelerator.prepare(loader) is loader
    prepared: Any = prepare_patched(accelerator, loader)
    assert [batch.tolist() for batch in prepared] == [batch.tolist() for batch in loader]
    assert {weights.device.type for _, weights in iter_with_weights(loader)} == {"cpu"}
