"""A stand-in for a device with streams, which notes what is asked of it, in order."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ddp_patch.loaders import to_device

__all__ = ["Streams", "pretend_streams"]


class Stream:
    def __init__(self, calls: list[str], name: str) -> None:
        self.calls, self.name, self.events = calls, name, 0

    def record_event(self) -> str:
        self.events += 1
        self.calls.append(f"{self.name} reaches copy {self.events}")
        return f"copy {self.events}"

    def wait_event(self, event: str) -> None:
        self.calls.append(f"{self.name} waits for {event}")


class Streams:
    """What of ``torch.cuda`` is used."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.loops = Stream(self.calls, "loop")
        self.now = self.loops
        self.made = 0

    def Stream(self, device: torch.device) -> Any:  # noqa: N802 - torch's name
        self.made += 1
        return Stream(self.calls, "side")

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def current_stream(self, device: torch.device) -> Any:
        return self.now

    def current_device(self) -> int:
        return 0


def pretend_streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Have all devices but the CPU have streams that only note what is asked of them."""
    streams = Streams()

    def streams_of(device: torch.device) -> Any:
        return None if device.type == "cpu" else streams

    def record(tensor: torch.Tensor, stream: Any) -> None:
        streams.calls.append(f"{tuple(tensor.shape)} recorded in {stream.name}")

    monkeypatch.setattr(to_device, "streams_of", streams_of)
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    return streams
