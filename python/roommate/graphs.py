"""A model of a service as CUDA graphs, one for each batch size.

A small batch is over before the CPU has launched the next one's kernels; a graph launches all of
them at once. Its stream has the highest priority, so that the kernels of a request go before those
of training jobs on the same GPU that are still waiting.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

WARM_CALLS = 3
"""Calls before a capture: libraries choose their kernels and allocate workspaces in the first ones,
which a graph cannot hold."""


def graphs(model: Any, shapes: Iterable[Sequence[int]], *, dtype: Any = None) -> Graphs:
    """Captures ``model`` for inputs of these shapes, which differ in dimension 0, the batch size.
    Returns a function of one input that gives what the model gives.

    The input is a tensor on any device or an array of NumPy; it is converted to ``dtype``, which is
    ``torch.float32`` unless given. A batch between two sizes is padded to the larger one, so the
    rows of a batch must not depend on each other. Inputs of another shape and batches larger than
    all captured ones are computed without a graph. The result is ready for the current stream; an
    input in pinned memory must not change before that.

    Without CUDA, or if the model is not on a GPU, the function calls the model, in inference mode.
    Graphs contain memory addresses: the model must stay where it is, so ``gpu.swap`` is not for it.
    """
    return Graphs(model, shapes, dtype)


class Graphs:
    """A captured model; call it with a batch."""

    def __init__(self, model: Any, shapes: Iterable[Sequence[int]], dtype: Any) -> None:
        import torch  # type: ignore[import-not-found, unused-ignore]

        by_size = {int(shape[0]): tuple(int(d) for d in shape) for shape in shapes}
        if not by_size or min(by_size) < 1 or len({s[1:] for s in by_size.values()}) > 1:
            raise ValueError(
                "shapes of one input with different batch sizes of at least 1 are needed, "
                f"not {list(by_size.values())}"
            )
        self._torch = torch
        self._model = model
        self._dtype = torch.float32 if dtype is None else dtype
        self._row = next(iter(by_size.values()))[1:]
        self._captured: dict[int, _Captured] = {}
        # All graphs share their memory: two threads must not interleave a copy and a replay.
        self._lock = threading.Lock()
        self.sizes = sorted(by_size)
        """Batch sizes that have a graph, or would have one on a GPU."""
        if hasattr(model, "eval"):
            model.eval()
        self._device = _device(torch, model)
        self.captured = self._device is not None
        """Whether there are graphs; otherwise the model is called."""
        if self.captured:
            self._stream = torch.cuda.Stream(device=self._device, priority=first_of_all(torch))
            self._capture(by_size)

    def _capture(self, by_size: dict[int, tuple[int, ...]]) -> None:
        torch, pool = self._torch, None
        with torch.inference_mode(), torch.cuda.device(self._device):
            # The largest first: the others then find room in its memory.
            for size in reversed(self.sizes):
                static = torch.zeros(by_size[size], dtype=self._dtype, device=self._device)
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    for _ in range(WARM_CALLS):
                        self._model(static)
                self._stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                    result = self._model(static)
                pool = graph.pool()
                self._captured[size] = _Captured(graph, static, result)

    def __call__(self, batch: Any) -> Any:
        torch = self._torch
        with torch.inference_mode():
            batch = torch.as_tensor(batch)
            at = bisect_left(self.sizes, batch.shape[0])
            if not self.captured:
                return self._model(batch.to(dtype=self._dtype))
            if at == len(self.sizes) or tuple(batch.shape[1:]) != self._row:
                return self._model(batch.to(device=self._device, dtype=self._dtype))
            with self._lock, torch.cuda.device(self._device):
                return self._replay(batch, self._captured[self.sizes[at]])

    def _replay(self, batch: Any, captured: _Captured) -> Any:
        torch, rows = self._torch, batch.shape[0]
        outer = torch.cuda.current_stream()
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            # The rows behind it keep those of an earlier batch, whose results nobody reads.
            captured.static[:rows].copy_(batch, non_blocking=True)
            captured.graph.replay()
            # The next replay overwrites the result, also that of another size.
            result = _each(captured.result, lambda tensor: tensor[:rows].clone())
        outer.wait_stream(self._stream)
        # The allocator must not reuse memory that the other stream still reads.
        if batch.is_cuda:
            batch.record_stream(self._stream)
        _each(result, lambda tensor: tensor.record_stream(outer))
        return result


class _Captured:
    """A graph with the tensors that it reads and writes."""

    def __init__(self, graph: Any, static: Any, result: Any) -> None:
        self.graph, self.static, self.result = graph, static, result


def _device(torch: Any, model: Any) -> Any:
    """The GPU that the model is on, or ``None``."""
    if not torch.cuda.is_available():
        return None
    for what in ("parameters", "buffers"):
        for tensor in getattr(model, what, tuple)():
            return tensor.device if tensor.is_cuda else None
    return torch.device("cuda", torch.cuda.current_device())


def first_of_all(torch: Any) -> int:
    """The highest priority of a stream, which is the lowest number. Old versions of PyTorch have
    only -1 and do not tell. Normal where the daemon does not want any priority.
    """
    if os.environ.get("ROOMMATE_PRIORITY") == "0":
        return 0
    known = getattr(torch.cuda.Stream, "priority_range", None)
    return -1 if known is None else min(known())


def _each(result: Any, do: Callable[[Any], Any]) -> Any:
    """Applies ``do`` to the tensors of a result, which may be in dicts, lists and tuples."""
    if isinstance(result, dict):
        return {name: _each(value, do) for name, value in result.items()}
    if isinstance(result, (list, tuple)):
        values = [_each(value, do) for value in result]
        return result._make(values) if hasattr(result, "_make") else type(result)(values)
    return do(result) if hasattr(result, "record_stream") else result
