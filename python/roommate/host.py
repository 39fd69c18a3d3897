"""Offloads a model's memory to the host: all of it while the job is suspended, the optimizer state
while GPU memory is scarce.

Whole storages are moved, so that tensors that share a storage share it again afterwards, bit for
bit. Meanwhile the tensors remain accessible on the host, so that a checkpoint can be written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .pool import drop_spare

TRIES = 40
"""Attempts to allocate memory that a co-located job may be about to free."""

TRY_EVERY_S = 0.25


@dataclass(frozen=True)
class Swapped:
    """Duration and size of the last move of a model."""

    way: str
    """``out`` or ``in``."""
    mib: float
    """Copied memory in MiB."""
    seconds: float
    held_before_mib: int
    """GPU memory of the process before the move, in MiB."""
    held_after_mib: int


_last: Swapped | None = None


def last_swap() -> Swapped | None:
    """Duration and size of the last move of a model to the host or back."""
    return _last


def swap(model: Any, optimizer: Any = None, keep_grads: bool = False) -> None:
    """Moves the parameters, buffers and optimizer state of a PyTorch model to the host while the
    job is suspended, and the optimizer state also while the job's GPU memory limit is too low for
    it.

    Gradients are dropped then, and when the job moves to another partition of the GPU or changes
    its batch size in one; a loop that accumulates them over several steps sets ``keep_grads``.
    Captured CUDA graphs do not survive, because they contain memory addresses.
    """
    from . import session

    owner = Owner(model, optimizer, keep_grads)
    current = session.current()
    current.device.owners.append(owner)
    current.on_suspend.append(owner.leave)
    # The model is restored before the user's hooks run.
    current.on_resume.insert(0, owner.come_back)


class Owner:
    """A model with its optimizer."""

    def __init__(self, model: Any, optimizer: Any, keep_grads: bool) -> None:
        self._model = model
        self._optimizer = optimizer
        self._keep_grads = keep_grads
        self._away: Parked | None = None
        self._state: Parked | None = None
        self._packed = False
        self._hooks: list[Any] = []
        self.state_mib = 0
        """Optimizer state on the host in MiB; 0 while it is on the GPU."""

    def leave(self) -> None:
        """Moves everything to the host."""
        torch = sys.modules.get("torch")
        if torch is None or self._away is not None or not _in_use(torch):
            return
        with _Measured(torch, "out") as measured:
            self.drop_grads()
            parked = Parked(torch, self._tensors())
            drop_spare(torch)
            measured.mib = parked.mib
        self._away = parked

    def come_back(self) -> None:
        """Moves everything back to the GPU."""
        if self._away is None:
            return
        torch = sys.modules["torch"]
        with _Measured(torch, "in") as measured:
            self._away.back()
            measured.mib = self._away.mib
        self._away = None

    def drop_grads(self) -> None:
        """Drops gradients, unless they are to be kept: between two steps they are not needed."""
        if not self._keep_grads:
            for parameter in self._model.parameters():
                parameter.grad = None

    def pack(self) -> None:
        """Copies all persistent tensors into separate storages, once the optimizer has its state:
        that state was allocated during a step, in pieces of large blocks that could otherwise not
        be freed.
        """
        torch = sys.modules.get("torch")
        started = self._optimizer is None or len(self._optimizer.state) > 0
        elsewhere = self._away is not None or self._state is not None
        if self._packed or not started or torch is None or elsewhere:
            return
        self._packed = True
        # In a new stream: the pool of any other may still have space in those large blocks.
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            _move_all(torch, storages(torch, self._tensors()))
        drop_spare(torch)

    def state_to_host(self) -> None:
        """Keeps the optimizer state on the host from now on and loads it for each optimizer step.
        """
        if self._optimizer is None or self._hooks:
            return
        self._hooks = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]
        self._after_step()

    def state_back(self) -> None:
        """Keeps the optimizer state on the GPU again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._before_step()
        self.state_mib = 0

    def _before_step(self, *_: Any) -> None:
        if self._state is not None:
            self._state.back()
        self._state = None

    def _after_step(self, *_: Any) -> None:
        self._state = Parked(sys.modules["torch"], self._states())
        self.state_mib = round(self._state.mib)

    def _states(self) -> Iterator[Any]:
        return _tensors_in(self._optimizer.state) if self._optimizer is not None else iter(())

    def _tensors(self) -> Iterator[Any]:
        for parameter in self._model.parameters():
            yield parameter
            if self._keep_grads and parameter.grad is not None:
                yield parameter.grad
        yield from self._model.buffers()
        yield from self._states()


class Parked:
    """GPU tensors whose memory is on the host; tensors of other devices stay where they are."""

    def __init__(self, torch: Any, tensors: Iterable[Any]) -> None:
        self._torch = torch
        # The copy on the host, the device, and the tensors that are views of it.
        self._blocks: list[tuple[Any, Any, list[Any]]] = []
        with torch.no_grad():
            for whole, members in storages(torch, tensors):
                host = self._host_bytes(whole.numel())
                host.copy_(whole, non_blocking=True)
                self._blocks.append((host, whole.device, members))
            finish(torch)
            for host, _, members in self._blocks:
                for tensor in members:
                    point(torch, tensor, host)
        self.mib = sum(host.numel() for host, _, _ in self._blocks) / 2**20

    def back(self) -> None:
        """Moves the memory back to its device."""
        with self._torch.no_grad():
            for host, device, members in self._blocks:
                there = self._room(host.numel(), device)
                there.copy_(host, non_blocking=True)
                for tensor in members:
                    point(self._torch, tensor, there)
            finish(self._torch)
        self._blocks.clear()

    def _host_bytes(self, count: int) -> Any:
        try:
            return self._torch.empty(count, dtype=self._torch.uint8, pin_memory=True)
        except RuntimeError:
            # Pageable memory is slower, but less scarce than pinned memory.
            return self._torch.empty(count, dtype=self._torch.uint8)

    def _room(self, count: int, device: Any) -> Any:
        # Older versions of PyTorch have the exception elsewhere.
        full = getattr(self._torch, "OutOfMemoryError", None) or self._torch.cuda.OutOfMemoryError
        for _ in range(TRIES):
            try:
                return self._torch.empty(count, dtype=self._torch.uint8, device=device)
            except full:
                time.sleep(TRY_EVERY_S)
        return self._torch.empty(count, dtype=self._torch.uint8, device=device)


class _Measured:
    """Measures a move and records it as the last one."""

    def __init__(self, torch: Any, way: str) -> None:
        self._torch = torch
        self._way = way
        self.mib = 0.0

    def __enter__(self) -> _Measured:
        finish(self._torch)
        self._held = _held_mib(self._torch)
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        global _last
        if kind is None:
            seconds = time.perf_counter() - self._began
            _last = Swapped(self._way, self.mib, seconds, self._held, _held_mib(self._torch))


def storages(torch: Any, tensors: Iterable[Any]) -> list[tuple[Any, list[Any]]]:
    """The storages of GPU tensors, as bytes, and the tensors that are views of each."""
    found: dict[int, tuple[Any, list[Any]]] = {}
    for tensor in tensors:
        if not tensor.is_cuda or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        size, at = storage.nbytes(), storage.data_ptr()
        if size == 0:
            continue
        if at not in found:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            found[at] = whole.set_(storage, 0, (size,), (1,)), []
        members = found[at][1]
        if not any(member is tensor for member in members):
            members.append(tensor)
    return list(found.values())


def _move_all(torch: Any, blocks: list[tuple[Any, list[Any]]]) -> None:
    """Moves storages to other memory of the same device, one at a time, until memory runs out."""
    while blocks:
        whole, members = blocks.pop()
        try:
            there = torch.empty(whole.numel(), dtype=torch.uint8, device=whole.device)
        except RuntimeError:
            break
        there.copy_(whole, non_blocking=True)
        for tensor in members:
            point(torch, tensor, there)
    finish(torch)


def point(torch: Any, tensor: Any, memory: Any) -> None:
    """Makes the tensor a view of this memory, with its offset, size and strides."""
    offset, size, stride = tensor.storage_offset(), tensor.size(), tensor.stride()
    view = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    tensor.data = view.set_(memory.untyped_storage(), offset, size, stride)


def finish(torch: Any) -> None:
    """Waits until the GPU has finished all work of this process, in every stream."""
    torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()


def _held_mib(torch: Any) -> int:
    return int(torch.cuda.memory_reserved()) >> 20


def _in_use(torch: Any) -> bool:
    cuda = getattr(torch, "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def _tensors_in(value: Any) -> Iterator[Any]:
    """Tensors in nested dictionaries and lists."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors_in(one)
