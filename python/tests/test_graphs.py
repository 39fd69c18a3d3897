"""A model as CUDA graphs, with a fake of PyTorch whose graphs record and repeat what the model does.

The fake cannot tell whether a model can be captured at all; that needs a GPU.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from roommate import gpu


class Stream:
    """A stream that runs everything at once, and remembers for whom it waited."""

    def __init__(self, priority: int = 0, device: Any = None) -> None:
        self.priority, self.device = priority, device
        self.waited: list[Stream] = []
        self.synchronized = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)

    def synchronize(self) -> None:
        self.synchronized += 1


class OldStream(Stream):
    priority_range = None  # type: ignore[assignment]


class Tensor:
    """Rows of numbers; a slice shares its rows with the whole."""

    def __init__(self, torch: Torch, rows: list[list[float]], device: str = "cpu") -> None:
        self.torch, self.rows, self.device = torch, rows, device
        self.dtype = "float32"
        self.streams: list[Stream] = []

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.rows), len(self.rows[0])

    @property
    def is_cuda(self) -> bool:
        return self.device == "gpu"

    def __getitem__(self, part: slice) -> Tensor:
        return Tensor(self.torch, self.rows[part], self.device)

    def clone(self) -> Tensor:
        return Tensor(self.torch, [list(row) for row in self.rows], self.device)

    def copy_(self, other: Tensor, non_blocking: bool = False) -> None:
        assert self.torch.stream is not self.torch.default, "a copy outside of the graph's stream"
        for mine, its in zip(self.rows, other.rows, strict=True):
            mine[:] = its

    def to(self, device: str | None = None, dtype: str | None = None) -> Tensor:
        return Tensor(self.torch, self.rows, device or self.device)

    def record_stream(self, stream: Stream) -> None:
        self.streams.append(stream)


class Graph:
    def __init__(self, torch: Torch) -> None:
        self.torch = torch
        self.work: list[Callable[[], None]] = []
        self.replays = 0

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        assert self.torch.stream is not self.torch.default, "a replay outside of its stream"
        self.replays += 1
        for do in self.work:
            do()


class Torch(types.ModuleType):
    float32 = "float32"

    def __init__(self, has_gpu: bool = True) -> None:
        super().__init__("torch")
        self.default = Stream()
        self.stream = self.default
        self.capturing: Graph | None = None
        self.graphs: list[Graph] = []
        self.pools: list[Any] = []
        self.inference = False
        self.cuda = types.SimpleNamespace(
            is_available=lambda: has_gpu,
            current_device=lambda: 0,
            current_stream=lambda: self.stream,
            device=lambda device: self._during("where", device),
            stream=lambda stream: self._during("stream", stream),
            Stream=Stream,
            CUDAGraph=self._graph,
            graph=self._capture,
        )

    @contextmanager
    def _during(self, name: str, value: Any) -> Any:
        before = getattr(self, name, None)
        setattr(self, name, value)
        yield
        setattr(self, name, before)

    def _graph(self) -> Graph:
        self.graphs.append(Graph(self))
        return self.graphs[-1]

    @contextmanager
    def _capture(self, graph: Graph, pool: Any, stream: Stream) -> Any:
        self.pools.append(pool)
        with self._during("capturing", graph), self._during("stream", stream):
            yield

    def inference_mode(self) -> Any:
        return self._during("inference", True)

    def device(self, kind: str, index: int) -> str:
        return "gpu"

    def zeros(self, shape: tuple[int, ...], dtype: str, device: str) -> Tensor:
        return Tensor(self, [[0.0] * shape[1] for _ in range(shape[0])], device)

    def as_tensor(self, data: Any) -> Tensor:
        return data if isinstance(data, Tensor) else Tensor(self, data)


class Two(NamedTuple):
    twice: Any
    extra: Any


class Model:
    """Doubles its input; while a graph is captured, the graph is to do that, too."""

    def __init__(self, torch: Torch, device: str = "gpu", wrap: Any = lambda out: out) -> None:
        self.torch, self.device, self.wrap = torch, device, wrap
        self.training = True
        self.calls: list[int] = []

    def eval(self) -> None:
        self.training = False

    def parameters(self) -> list[Tensor]:
        return [Tensor(self.torch, [[1.0]], self.device)]

    def __call__(self, x: Tensor) -> Any:
        assert self.torch.inference and not self.training
        assert x.device == self.device, "the input is elsewhere than the model"
        self.calls.append(x.shape[0])
        out = x.clone()

        def compute() -> None:
            for mine, its in zip(out.rows, x.rows, strict=True):
                mine[:] = [2 * v for v in its]

        compute()
        if self.torch.capturing is not None:
            self.torch.capturing.work.append(compute)
        return self.wrap(out)


def made(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Torch, Model, gpu.Graphs]:
    torch = Torch(options.pop("has_gpu", True))
    if options.pop("old", False):
        torch.cuda.Stream = OldStream
    monkeypatch.setitem(sys.modules, "torch", torch)
    model = Model(torch, **options)
    return torch, model, gpu.graphs(model, [(1, 2), (4, 2), (8, 2)])


def rows(count: int, start: float = 1.0) -> list[list[float]]:
    return [[start + n, -start - n] for n in range(count)]


def doubled(values: list[list[float]]) -> list[list[float]]:
    return [[2 * v for v in row] for row in values]


def test_each_size_is_captured_once_the_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, model, run = made(monkeypatch)
    assert run.captured
    assert run.sizes == [1, 4, 8]
    assert model.calls == [8, 8, 8, 8, 4, 4, 4, 4, 1, 1, 1, 1], "three to warm up, one captured"
    assert torch.pools == [None, "pool", "pool"], "all graphs share their memory"
    assert run._stream.priority == -5
    assert not model.training


def test_an_old_torch_has_one_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, run = made(monkeypatch, old=True)
    assert run._stream.priority == -1


def test_a_batch_is_padded_to_the_next_size(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, model, run = made(monkeypatch)
    model.calls.clear()
    by_size = dict(zip((8, 4, 1), torch.graphs, strict=True))
    for count, size in ((1, 1), (2, 4), (4, 4), (5, 8), (8, 8)):
        before = by_size[size].replays
        assert run(rows(count)).rows == doubled(rows(count))
        assert by_size[size].replays == before + 1
    assert model.calls == [], "replays do not call the model"


def test_a_result_survives_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, run = made(monkeypatch)
    first = run(rows(3))
    run(rows(4, start=100.0))
    assert first.rows == doubled(rows(3))


def test_the_two_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, _, run = made(monkeypatch)
    run._stream.waited.clear()
    batch = Tensor(torch, rows(2), "gpu")
    result = run(batch)
    assert run._stream.waited == [torch.default]
    assert torch.default.waited == [run._stream]
    assert (batch.streams, result.streams) == ([run._stream], [torch.default])
    assert torch.stream is torch.default


def test_other_shapes_are_computed_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, model, run = made(monkeypatch)
    model.calls.clear()
    assert run(rows(9)).rows == doubled(rows(9))
    wide = [[1.0, 2.0, 3.0]]
    assert run(wide).rows == doubled(wide)
    assert model.calls == [9, 1]
    assert sum(graph.replays for graph in torch.graphs) == 0


@pytest.mark.parametrize(
    "wrap",
    [lambda out: [out], lambda out: {"y": (out, None)}, lambda out: Two(out, "kept")],
    ids=["list", "dict", "named"],
)
def test_results_keep_their_structure(monkeypatch: pytest.MonkeyPatch, wrap: Any) -> None:
    _, _, run = made(monkeypatch, wrap=wrap)
    result = run(rows(3))
    expected = wrap("tensor")
    found = gpu.graphs.__globals__["_each"](result, lambda tensor: tensor.rows)
    assert type(found) is type(expected)
    assert found == wrap(doubled(rows(3)))


@pytest.mark.parametrize("options", [{"has_gpu": False}, {}], ids=["no gpu", "model on the host"])
def test_without_cuda_the_model_is_called(monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    torch, model, run = made(monkeypatch, device="cpu", **options)
    assert not run.captured
    assert torch.graphs == []
    assert run(rows(3)).rows == doubled(rows(3))
    assert model.calls == [3]
    assert not model.training


@pytest.mark.parametrize("shapes", [[], [(0, 2)], [(1, 2), (4, 3)]])
def test_invalid_shapes_are_named(monkeypatch: pytest.MonkeyPatch, shapes: Any) -> None:
    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(ValueError, match="shapes of one input"):
        gpu.graphs(Model(torch), shapes)
