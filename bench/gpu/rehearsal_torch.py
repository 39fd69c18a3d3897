"""A job for `obeys.py --rehearse`, with the fake PyTorch of the SDK's tests."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python" / "tests"))

from fake_torch import MIB, FakeTorch, Library, Model, Optimizer  # noqa: E402


class Job:
    """Weights of 4 MiB, as much state, 6 MiB of activations, steps of 10 ms."""

    def __init__(self) -> None:
        self.torch = FakeTorch()
        sys.modules["torch"] = self.torch
        driver = Library()
        ctypes.CDLL = lambda name: driver  # type: ignore[misc, assignment]
        self.model = Model(self.torch, (2 * MIB, 2 * MIB))
        self.optimizer = Optimizer(self.model.parameters()[:2], self.torch)

    def make(self, size: int) -> tuple[Any, Any]:
        return (size, size)

    def step(self, x: Any, y: Any) -> None:
        self.torch.needs(6)
        self.torch.kernel(0.03)
        self.optimizer.step()

    def digest(self) -> list[bytes]:
        states = [s["momentum"] for s in self.optimizer.state.values()]
        return [t.bytes() for t in [*self.model.parameters(), *self.model.buffers(), *states]]
