"""End times of steps by the GPU's clock: the CPU only knows when it issued them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any


class Ticks:
    """Records issued steps and returns them, in order, once the GPU has finished them."""

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
        """Records a step that is completely in the queue of the current stream."""
        self._asked.append((self._event(), what))

    def ended(self) -> Iterator[tuple[float, Any]]:
        """Steps that ended since the last call: end time on the monotonic clock, and the note."""
        while self._asked and self._asked[0][0].query():
            event, what = self._asked.popleft()
            yield self._began + 1e-3 * self._base.elapsed_time(event), what
