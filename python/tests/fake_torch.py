"""Fakes of the parts of PyTorch and the CUDA driver that the SDK uses: streams, memory counts."""

from __future__ import annotations

import sys
import time
import types
from typing import Any

import pytest

MIB = 2**20


class Library:
    """A driver of 132 SMs that records the contexts created."""

    def __init__(self, refuse: str = "") -> None:
        self.refuse = refuse
        self.described: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name == "cuMissing":
            raise AttributeError(name)
        return lambda *arguments: self.call(name, *arguments)

    def call(self, name: str, *arguments: Any) -> int:
        if name == self.refuse:
            return 1
        if name == "cuDeviceGetDevResource":
            arguments[1][96:100] = list((132).to_bytes(4, "little"))
        elif name == "cuDevSmResourceSplitByCount":
            # 132 SMs are not a multiple of eight: fifteen groups fit, as on an H200.
            arguments[1]._obj.value = 15
            for n in range(15):
                arguments[0][n * 144] = n
            arguments[3][0], arguments[3][96] = 15, 12
        elif name == "cuDevResourceGenerateDesc":
            self.described.append([arguments[1][n * 144] for n in range(arguments[2])])
        elif name == "cuGreenCtxStreamCreate":
            arguments[0]._obj.value = 4710 + len(self.described)
        elif name == "cuGetErrorString":
            arguments[1]._obj.value = b"out of luck"
        return 0


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.busy_until = 0.0

    def synchronize(self) -> None:
        wait_until(self.busy_until)

    def __repr__(self) -> str:
        return self.name


def wait_until(at: float) -> None:
    while (left := at - time.perf_counter()) > 0:
        time.sleep(left)


class Memory:
    """A block of bytes on a device."""

    def __init__(self, torch: FakeTorch, content: bytes, device: str) -> None:
        self.torch, self.content, self.device = torch, bytearray(content), device
        if device == "cuda":
            torch.allocated += len(content)
            torch.peak = max(torch.peak, torch.allocated)
            torch.reserved = max(torch.reserved, torch.allocated)

    def __del__(self) -> None:
        if self.device == "cuda":
            self.torch.allocated -= len(self.content)

    def nbytes(self) -> int:
        return len(self.content)

    def data_ptr(self) -> int:
        return id(self)


class Tensor:
    """A view of memory as bytes."""

    layout = "strided"
    dtype = "uint8"

    def __init__(self, memory: Memory, at: int = 0, count: int | None = None) -> None:
        self.memory, self.at = memory, at
        self.count = memory.nbytes() if count is None else count
        self.grad: Tensor | None = None

    @property
    def is_cuda(self) -> bool:
        return self.memory.device == "cuda"

    @property
    def device(self) -> str:
        return self.memory.device

    def untyped_storage(self) -> Memory:
        return self.memory

    def storage_offset(self) -> int:
        return self.at

    def size(self) -> tuple[int]:
        return (self.count,)

    def stride(self) -> tuple[int]:
        return (1,)

    def numel(self) -> int:
        return self.count

    def set_(self, memory: Memory, at: int, size: tuple[int], stride: tuple[int]) -> Tensor:
        self.memory, self.at, self.count = memory, at, size[0]
        return self

    def copy_(self, other: Tensor, non_blocking: bool = False) -> None:
        self.memory.content[self.at : self.at + self.count] = other.bytes()

    def bytes(self) -> bytes:
        return bytes(self.memory.content[self.at : self.at + self.count])

    @property
    def data(self) -> Tensor:
        return self

    @data.setter
    def data(self, other: Tensor) -> None:
        self.memory, self.at, self.count = other.memory, other.at, other.count


class Optimizer:
    """An optimizer whose step reads and writes its state, which must be on the GPU then."""

    def __init__(self, parameters: list[Tensor], torch: FakeTorch) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.1}]
        states = [torch.on_gpu(b"m" * p.count) for p in parameters]
        self.state = {n: {"momentum": state} for n, state in enumerate(states)}
        self.before: list[Any] = []
        self.after: list[Any] = []
        self.state_was_on: list[str] = []

    def register_step_pre_hook(self, hook: Any) -> Any:
        self.before.append(hook)
        return types.SimpleNamespace(remove=lambda: self.before.remove(hook))

    def register_step_post_hook(self, hook: Any) -> Any:
        self.after.append(hook)
        return types.SimpleNamespace(remove=lambda: self.after.remove(hook))

    def step(self) -> None:
        for hook in list(self.before):
            hook(self, (), {})
        for state in self.state.values():
            momentum = state["momentum"]
            self.state_was_on.append(momentum.device)
            at, content = momentum.at, momentum.memory.content
            content[at] = (content[at] + 1) % 256
        for hook in list(self.after):
            hook(self, (), {})


class Model:
    def __init__(self, torch: FakeTorch, sizes: tuple[int, ...] = (3 * MIB, 5 * MIB)) -> None:
        self.weights = [torch.on_gpu(bytes([n + 1]) * size) for n, size in enumerate(sizes)]
        # Two views of the memory of the first, like weights of recurrent layers.
        first = self.weights[0].memory
        self.weights += [Tensor(first, 0, MIB), Tensor(first, MIB, MIB)]
        self.statistics = [torch.on_gpu(b"running")]

    def parameters(self) -> list[Tensor]:
        return self.weights

    def buffers(self) -> list[Tensor]:
        return self.statistics


class FakeTorch(types.ModuleType):
    """A GPU with 1000 MiB."""

    uint8 = "uint8"
    strided = "strided"

    class OutOfMemoryError(RuntimeError):
        pass

    def __init__(self) -> None:
        super().__init__("torch")
        self._C = types.SimpleNamespace()
        self.initialized = True
        self.allocated = self.peak = self.reserved = 0
        self.fraction = 1.0
        self.log: list[str] = []
        self.default = Stream("whole")
        self.current = self.default
        self.full = 0
        self.cuda = types.SimpleNamespace(
            init=lambda: None,
            is_available=lambda: True,
            is_initialized=lambda: self.initialized,
            current_device=lambda: 0,
            default_stream=lambda device=0: self.default,
            current_stream=lambda: self.current,
            set_stream=self._set_stream,
            stream=self._stream,
            synchronize=self._synchronize,
            Event=lambda blocking=False, enable_timing=False: Event(self),
            Stream=lambda device=0, priority=0: Stream("first" if priority < 0 else "another"),
            ExternalStream=lambda handle: Stream(f"part-{handle}"),
            empty_cache=self._empty_cache,
            memory_reserved=lambda: self.reserved,
            memory_stats=self._memory_stats,
            memory_allocated=lambda: self.allocated,
            max_memory_allocated=lambda: self.peak,
            reset_peak_memory_stats=self._reset_peak,
            set_per_process_memory_fraction=self._set_fraction,
            get_device_properties=lambda device: types.SimpleNamespace(total_memory=1000 * MIB),
        )

    def _set_stream(self, stream: Stream) -> None:
        self.log.append(f"in {stream}")
        self.current = stream

    def _stream(self, stream: Stream) -> Any:
        torch = self

        class Inside:
            def __enter__(self) -> None:
                self.before, torch.current = torch.current, stream

            def __exit__(self, *_: object) -> None:
                torch.current = self.before

        return Inside()

    def _synchronize(self) -> None:
        self.current.synchronize()
        self.default.synchronize()

    def _empty_cache(self) -> None:
        self.reserved = self.allocated

    def _memory_stats(self) -> dict[str, int]:
        return {
            "reserved_bytes.large_pool.current": self.reserved,
            "allocated_bytes.large_pool.current": self.allocated,
        }

    def _reset_peak(self) -> None:
        self.peak = self.allocated

    def _set_fraction(self, part: float) -> None:
        self.fraction = part

    def no_grad(self) -> Any:
        return self._stream(self.current)

    def zeros(self, count: int, device: str) -> Tensor:
        return Tensor(Memory(self, bytes(count), "cuda"))

    def empty(
        self, count: int, dtype: str, device: str = "cpu", pin_memory: bool = False
    ) -> Tensor:
        if device == "cuda" and count > 0 and self.full > 0:
            self.full -= 1
            raise self.OutOfMemoryError("no room")
        return Tensor(Memory(self, bytes(count), device))

    def on_gpu(self, content: bytes) -> Tensor:
        return Tensor(Memory(self, content, "cuda"))

    def kernel(self, seconds: float) -> None:
        """Starts work on the current stream and returns at once."""
        now = time.perf_counter()
        self.current.busy_until = max(now, self.current.busy_until) + seconds

    def needs(self, mib: int) -> None:
        """A step that allocates this much memory temporarily."""
        self.on_gpu(bytes(mib * MIB))


class Event:
    def __init__(self, torch: FakeTorch) -> None:
        self.torch, self.at = torch, 0.0

    def record(self) -> None:
        self.at = max(time.perf_counter(), self.torch.current.busy_until)

    def synchronize(self) -> None:
        wait_until(self.at)

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    import ctypes

    fake = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    return fake
