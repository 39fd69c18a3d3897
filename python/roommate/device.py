"""The loop's use of its GPU: its SM partition, how far the CPU runs ahead, its memory limit.

All changes happen between two steps and follow the daemon's requests. Nothing happens without
PyTorch, before the process uses CUDA, or without a daemon.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from . import gpu, host
from .protocol import SeatRange

PLAN_STEPS = 2
"""First steps of each batch size run in the smallest partition, so that the chosen kernels fit
it."""

SHORT_S = 0.025
"""Steps shorter than this are synchronized in groups: one synchronization with an H200 costs the
CPU 0.23 ms."""

LOOK_EVERY_S = 0.1
"""Approximate duration of a group of short steps that is synchronized at once."""

MOST_AHEAD = 32
"""Most steps in a group that is synchronized at once."""

SLACK = 1.3
"""Factor on the peak memory of a step, for fragmentation: with 1.1 GPT-2 ran out of memory, a fifth
of which was fragmented."""


class Device:
    """The partition and memory limit that the daemon requested, and those in force."""

    def __init__(self, managed: bool) -> None:
        self.managed = managed
        self.on = False
        """Whether the process uses CUDA."""
        self.owners: list[host.Owner] = []
        self.probe: Callable[[], object] | None = None
        self.place: SeatRange | None = None
        """The partition of the GPU in which steps run; None = the whole GPU."""
        self.memory_due = False
        """Whether a new memory limit is not yet in force."""
        self.looked = True
        """Whether the last step ended a synchronized group."""
        self._torch: Any = None
        self._seat: gpu.Seat | None = None
        self._wish: SeatRange | None = None
        self._priority = False
        # The last requested partition and priority that were tried; the move may have failed.
        self._asked: tuple[SeatRange | None, bool] = (None, False)
        self._plan_sms: int | None = None
        self._plans: dict[int, int] = {}
        self._proved: set[tuple[SeatRange, int]] = set()
        self._size = 0
        self._confined = False
        self._told: set[str] = set()
        self._limit: int | None = None
        self._known = False
        self._state_out = False
        self._all_in = 0
        self._events: list[Any] = []
        self._ahead: Any = None
        self._together = 1
        self._unseen = 0
        self._marks = 0

    def wants(
        self, seat: SeatRange | None, limit_mib: int | None, priority: bool = False
    ) -> None:
        """Sets the partition, the memory limit (MiB) and the priority that the daemon requests."""
        self._wish, self._priority = seat, priority
        if seat is not None or priority:
            self._confined = True
        if limit_mib != self._limit:
            self._limit, self.memory_due = limit_mib, True

    def plans_for(self, sms: int | None) -> None:
        """Sets the SMs of the smallest partition that the job may ever get."""
        self._plan_sms = sms
        if sms is not None:
            self._confined = True

    def look(self) -> bool:
        """Checks whether the process uses CUDA by now."""
        if self.on or not self.managed:
            return self.on
        torch = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        if cuda is None or not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
            return False
        self._torch, self.on = torch, True
        self._new_events()
        return True

    # Time.

    def mark(self, whole: bool) -> bool:
        """Called when the CPU has issued a step. Waits until the GPU has finished the previous step
        (of short steps: the previous group), or with ``whole`` this one. Returns whether the time
        since the last mark is the GPU's time for a step, averaged over a group; ``looked`` tells
        whether a group ends here.
        """
        if not self.on and not self.look():
            return True
        whole = whole or not self._events
        self._unseen += 1
        # The first two steps or groups after a pause only fill the queue, so they seem short.
        usual = self._marks >= 2
        self.looked = whole or self._unseen >= self._together
        if not self.looked:
            return usual
        if whole:
            usual = self._ahead is None
            self._synchronize()
            return usual
        self._unseen, ahead = 0, self._ahead
        first, second = self._events
        event = second if ahead is first else first
        try:
            event.record()
        except RuntimeError:
            # The event cannot be recorded on this stream; after a GPU error this raises as well.
            self._synchronize()
            self._events = []
            return False
        self._ahead = event
        self._marks += 1
        if ahead is not None:
            ahead.synchronize()
        return usual

    def drain(self) -> None:
        """Waits until the GPU has finished all work of this process."""
        if self.on:
            self._synchronize()

    def _synchronize(self) -> None:
        host.finish(self._torch)
        self._rest()

    def _rest(self) -> None:
        self._ahead, self._unseen, self._marks = None, 0, 0

    def _new_events(self) -> None:
        # Blocking events do not spin: co-located jobs need the CPU.
        self._events = [self._torch.cuda.Event(blocking=True) for _ in range(2)]
        self._rest()

    # Place.

    def prepare(self, size: int) -> bool:
        """Moves to the partition of the next step, of this batch size. Returns whether the step is
        one whose time counts.
        """
        if not self._confined or not self.look():
            return True
        self._size = size
        left = self._plans_left(size)
        wanted = self._wish
        if left > 0 and self._plan_sms is not None:
            self._plans[size] = left - 1
            wanted = SeatRange(0, min(self._plan_sms, wanted.sms) if wanted else self._plan_sms)
        if (wanted, self._priority) != self._asked:
            self._go(wanted, None if left > 0 else self.probe)
        return left == 0

    def settle(self, size: int, still: bool, stepped: bool) -> bool:
        """Moves to the requested partition. Returns whether the request is done, as far as
        possible; it is not while first steps in the smallest partition are due. ``still``: the job
        takes no steps now; ``stepped``: it has taken some.
        """
        if not self._confined:
            return True
        if not self.look():
            # A process that has done a step without CUDA needs no partition.
            return stepped or still
        self._size = size
        if self._plans_left(size) > 0 and not still:
            return False
        if (self._wish, self._priority) != self._asked:
            self._go(self._wish, None if still else self.probe)
        return True

    def _plans_left(self, size: int) -> int:
        return 0 if self._plan_sms is None else self._plans.get(size, PLAN_STEPS)

    def _go(self, wanted: SeatRange | None, probe: Callable[[], object] | None) -> None:
        self._asked = wanted, self._priority
        if wanted is None and not self._priority and self._seat is None:
            return
        self.drain()
        for owner in self.owners:
            owner.drop_grads()
            owner.pack()
        try:
            if self._seat is None:
                self._seat = gpu.Seat(self._torch.cuda.current_device())
            if wanted is None or (wanted, self._size) in self._proved:
                probe = None
            part = wanted or SeatRange(0, self._seat.all_sms)
            moved = self._seat.move(part.sms, part.first, probe, self._priority)
        except gpu.Unavailable as error:
            self._tell(f"the GPU cannot be divided: {error}; the job stays where it is")
            if self._seat is None:
                self._confined, self._wish, self._plan_sms = False, None, None
                self._asked = None, False
            return
        if not moved:
            where = f"{part.sms} SMs from {part.first} on"
            self._tell(f"the probe failed in {where}; the job stays where it was")
        elif probe is not None and wanted is not None:
            self._proved.add((wanted, self._size))
        self._torch.cuda.set_stream(self._seat.stream)
        self._new_events()
        # Steps have another length in another partition.
        self._together = 1
        first, sms = self._seat.first, self._seat.sms
        self.place = None if sms == self._seat.all_sms else SeatRange(first, sms)

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            print(f"roommate: {what}", file=sys.stderr, flush=True)

    # Memory.

    def held_mib(self) -> int | None:
        """GPU memory that the process holds in MiB, with the allocator's cache."""
        return int(self._torch.cuda.memory_reserved()) >> 20 if self.on else None

    def resized(self) -> None:
        """Prepares for another batch size, at which a step needs other memory."""
        self._known, self._together = False, 1
        if self._seat is not None:
            # Gradients are in the block that is freed.
            for owner in self.owners:
                owner.drop_grads()
            self._seat.resized()
        if self._limit is not None and self.on:
            self._fraction(1.0)
            self._torch.cuda.empty_cache()
            self._torch.cuda.reset_peak_memory_stats()

    def stepped(self, step_s: float) -> None:
        """Called with the mean time of representative steps: their memory need is now known."""
        together = 1
        if step_s < SHORT_S:
            together = min(MOST_AHEAD, math.ceil(LOOK_EVERY_S / max(step_s, 1e-9)))
        if abs(together - self._together) > 0.25 * self._together:
            # The next group waits for a group of another size, so its time does not count.
            self._together, self._marks = together, 0
        if not self._known:
            self._known, self.memory_due = True, self._limit is not None

    def keep_memory(self) -> None:
        """Enforces the memory limit. It is never set so low that a step would fail, so it is
        deferred until the memory need of a step is known.
        """
        if not self.look():
            return
        self.memory_due = False
        if self._limit is None:
            self.drain()
            self._state_back()
            self._fraction(1.0)
        elif self._known:
            self.drain()
            self._keep_to(self._limit)

    def _keep_to(self, limit: int) -> None:
        cuda = self._torch.cuda
        peak = int(cuda.max_memory_allocated()) >> 20
        if self._state_out and limit >= self._all_in:
            self._state_back()
        elif not self._state_out and min(self.held_mib() or 0, int(SLACK * peak)) > limit:
            self._state_out, self._all_in = True, int(SLACK * peak)
            for owner in self.owners:
                owner.state_to_host()
        cuda.empty_cache()
        state = sum(owner.state_mib for owner in self.owners)
        now = int(cuda.memory_allocated()) >> 20
        # During a step the optimizer state is on the host; at its end it is back, without
        # activations.
        needed = int(SLACK * max(peak - state, now + state))
        if needed > limit:
            self._tell(
                f"a step needs {needed} MiB of the GPU, more than the {limit} MiB that it may hold"
            )
        total = cuda.get_device_properties(cuda.current_device()).total_memory >> 20
        self._fraction(min(1.0, max(limit, needed) / total))

    def _state_back(self) -> None:
        self._state_out = False
        for owner in self.owners:
            owner.state_back()

    def _fraction(self, part: float) -> None:
        self._torch.cuda.set_per_process_memory_fraction(part)
