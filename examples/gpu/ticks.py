"""When the GPU ended each step, by its own clock: the CPU only knows when it had asked for one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any


class Ticks:
    """Notes steps as they are asked for and gives them back, in order, when they have ended."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._base = self._event()
        self._base.synchronize()
        self._began = time.monotonic()
        self._asked: deque[tuple[Any, Any]] = deque()

    def _event(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def note(self, what: Any) -> None:
        """All of a step is in the queue of the current stream."""
        self._asked.append((self._event(), what))

    def ended(self) -> Iterator[tuple[float, Any]]:
        """Steps that have ended since the last time: when, on the monotonic clock, and what was noted of them."""
        while self._asked and self._asked[0][0].query():
            event, what = self._asked.popleft()
            yield self._began + 1e-3 * self._base.elapsed_time(event), what
