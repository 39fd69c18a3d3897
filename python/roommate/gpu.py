"""SM partitions of a GPU: a running PyTorch process moves between groups of multiprocessors (SMs)
without a restart.

The driver's green contexts give a stream that is confined to a set of SMs. ``Seat.move`` changes
the partition between two steps. Loops over ``roommate.steps`` do so on the daemon's request; other
loops run each step ``with seat:``. Needs PyTorch and a driver of CUDA 12.4 or newer; otherwise
``Seat`` raises ``Unavailable`` with the reason. ``swap`` moves a model's memory to the host while
its job is suspended. ``graphs`` captures the model of a service.

Run the first steps in the smallest partition that will ever be used: convolution plans that were
chosen on the whole GPU fail in a partition.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from .graphs import Graphs, first_of_all, graphs
from .host import Swapped, last_swap, swap
from .pool import Pool

__all__ = ["GRAIN", "Graphs", "Seat", "Swapped", "Unavailable", "graphs", "last_swap", "swap"]

GRAIN = 8
"""SMs per group: Hopper and newer GPUs partition SMs in groups of eight."""

_RESOURCE_BYTES = 144
_COUNT_AT = 96
_SM_RESOURCE = 1
_DEFAULT_STREAM = 1
_NON_BLOCKING = 1


class Unavailable(RuntimeError):
    """The GPU cannot be partitioned here, or not in this way."""


class _Driver:
    """The calls of the CUDA driver API that PyTorch does not offer."""

    def __init__(self, device: int) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unavailable(f"no CUDA driver: {error}") from error
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), device)
        whole = (ctypes.c_ubyte * _RESOURCE_BYTES)()
        self._call("cuDeviceGetDevResource", self._device, whole, _SM_RESOURCE)
        self.sms = _count(whole)
        groups = ctypes.c_uint(self.sms // GRAIN)
        self._groups = (ctypes.c_ubyte * (_RESOURCE_BYTES * (groups.value + 1)))()
        rest = (ctypes.c_ubyte * _RESOURCE_BYTES)()
        count = ctypes.byref(groups)
        self._call("cuDevSmResourceSplitByCount", self._groups, count, whole, rest, 0, GRAIN)
        self.groups = groups.value
        self.rest = _count(rest)
        """SMs that are in no group; they belong to the last partition."""
        end = self.groups * _RESOURCE_BYTES
        ctypes.memmove(ctypes.byref(self._groups, end), rest, _RESOURCE_BYTES)

    def stream(self, first: int, groups: int, rest: bool, priority: int) -> int:
        """A stream on ``groups`` groups of SMs from group ``first`` on, and with ``rest`` on the
        SMs that are in no group.
        """
        parts = groups + (1 if rest else 0)
        size = ctypes.c_ubyte * (_RESOURCE_BYTES * parts)
        part = size.from_buffer(self._groups, first * _RESOURCE_BYTES)
        description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDevResourceGenerateDesc", ctypes.byref(description), part, parts)
        created = ctypes.byref(context)
        self._call("cuGreenCtxCreate", created, description, self._device, _DEFAULT_STREAM)
        created = ctypes.byref(stream)
        self._call("cuGreenCtxStreamCreate", created, context, _NON_BLOCKING, priority)
        assert stream.value is not None
        return stream.value

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._lib, name, None)
        if function is None:
            raise Unavailable(f"the driver has no {name}: CUDA 12.4 or newer is needed")
        status = function(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorString(status, ctypes.byref(text))
            raise Unavailable(f"{name}: {(text.value or b'error %d' % status).decode()}")


def _count(resource: Any) -> int:
    return int.from_bytes(bytes(resource[_COUNT_AT : _COUNT_AT + 4]), sys.byteorder)


class Seat:
    """The SM partition in which this process runs; use ``with seat:`` around each step."""

    def __init__(self, device: int = 0) -> None:
        import torch  # type: ignore[import-not-found, unused-ignore]

        self._torch = torch
        torch.cuda.init()
        torch.zeros(1, device=f"cuda:{device}")
        self._device = device
        self._driver = _Driver(device)
        self._whole = torch.cuda.default_stream(device)
        # One stream per partition, reused: the allocator keeps a cache for every stream it has
        # seen.
        self._streams: dict[tuple[int, int, bool, bool], Any] = {}
        self._stream: Any = self._whole
        self._pool = Pool(torch)
        self._inside: list[Any] = []
        self.sms = self._driver.sms
        """SMs of the present partition."""
        self.first = 0
        """Number of its first SM."""

    @property
    def all_sms(self) -> int:
        return self._driver.sms

    @property
    def stream(self) -> Any:
        """The stream that runs in the present partition."""
        return self._stream

    def move(
        self,
        sms: int,
        first: int = 0,
        probe: Callable[[], object] | None = None,
        priority: bool = False,
    ) -> bool:
        """Moves to ``sms`` SMs (rounded down to whole groups), starting with number ``first``; to
        the whole GPU if it has no more. A partition that reaches the end also has the SMs that are
        in no group. With ``priority`` its kernels go before those of other processes. Call it
        between two steps.

        ``probe`` runs a test step in the new partition: if it fails, the process returns to the
        previous partition, and the result is ``False``.
        """
        before = self._stream, self.sms, self.first
        self._go(*self._part(sms, first), priority)
        if probe is None:
            return True
        try:
            with self:
                probe()
            self._stream.synchronize()
        except RuntimeError:
            self._stream, self.sms, self.first = before
            self._torch.cuda.empty_cache()
            return False
        return True

    def _part(self, sms: int, first: int) -> tuple[int, int, bool]:
        """The first group, the number of groups, and whether the SMs in no group are included."""
        at, groups, all_groups = first // GRAIN, max(1, sms // GRAIN), self._driver.groups
        if sms >= self._driver.sms or groups >= all_groups:
            return 0, 0, False
        if first + sms >= self._driver.sms and at < all_groups:
            return at, all_groups - at, self._driver.rest > 0
        return min(at, all_groups - groups), groups, False

    def _go(self, first: int, groups: int, rest: bool, priority: bool) -> None:
        sms = groups * GRAIN + (self._driver.rest if rest else 0)
        if groups == 0:
            sms = self._driver.sms
        stream = self._stream_of(first, groups, rest, priority)
        if stream is not self._stream:
            # The work of the old stream must be finished before the new one reads its results; then
            # its cached memory is freed, or each partition would keep its own pool.
            self._stream.synchronize()
            self._pool.leave()
            with self._torch.cuda.stream(stream):
                self._pool.arrive()
        self._stream, self.sms, self.first = stream, sms, first * GRAIN

    def _stream_of(self, first: int, groups: int, rest: bool, priority: bool) -> Any:
        if groups == 0 and not priority:
            return self._whole
        level = first_of_all(self._torch) if priority else 0
        key = first, groups, rest, priority
        if key not in self._streams:
            if groups == 0:
                made = self._torch.cuda.Stream(self._device, priority=level)
            else:
                handle = self._driver.stream(first, groups, rest, level)
                made = self._torch.cuda.ExternalStream(handle)
            self._streams[key] = made
        return self._streams[key]

    def resized(self) -> None:
        """Prepares for another batch size, at which a step needs other memory."""
        self._pool.drop_block()

    def __enter__(self) -> None:
        context = self._torch.cuda.stream(self._stream)
        context.__enter__()
        self._inside.append(context)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inside.pop().__exit__(kind, error, trace)

    def synchronize(self) -> None:
        """Waits until all work in this partition is finished."""
        self._stream.synchronize()
