"""The worker of a service: answers the batches that Roommate's front forms from requests.

The front owns the port, the queue and the clock; the worker connects once to the Unix socket that
``$ROOMMATE_SERVE`` names and answers one batch after the other. A frame is ``u32 json length | u32
binary length | json | binary``, little endian; the binary part holds tensors one after another, in
C order. Large tensors are in files in shared memory instead, in the folder that
``$ROOMMATE_SERVE_SHARED`` names, at multiples of 64 bytes: ``inputs`` of a batch and ``outputs`` of
its answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import mmap
import os
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from .graphs import first_of_all
from .protocol import ProtocolError

MOST_JSON = 1 << 20
"""Most bytes of JSON in a frame."""

MOST_BINARY = 64 << 20
"""Most bytes of tensors in a frame."""

_HEAD = struct.Struct("<II")

_CODES = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
"""The format of an element in the buffer protocol, by datatype."""

_NAMES = {datatype: datatype.lower().replace("fp", "float") for datatype in _CODES}
"""What NumPy and PyTorch call a datatype."""

_LARGE = 256 << 10
"""Bytes of outputs from which on shared memory is used."""

_SHARED_ALIGN = 64
"""Tensors in shared memory start at multiples of this."""

_ALIGN = 16
"""Every tensor starts at a multiple of this, though in a frame they follow each other without gaps:
kernels of NumPy and PyTorch are slow, or wrong, on tensors that are not aligned."""

_FIRST_ROOM = 1 << 16

_MOST_PARTS = 256
"""Buffers in one call of sendmsg; Linux takes at most 1024."""

_LONGEST_WHAT = 2000
"""Characters of an error that are sent; messages of libraries may hold whole tensors."""

_tune: dict[str, Any] | None = None


def last_tune() -> dict[str, Any] | None:
    """The last request of the machine on how to run: fields of the tenant protocol's ``tune``."""
    return _tune


def serve(
    predict: Callable[[Any], Any],
    *,
    max_batch: int = 32,
    inputs: Sequence[Mapping[str, Any]] = (),
    outputs: Sequence[Mapping[str, Any]] = (),
    warm: Callable[[], object] | None = None,
) -> None:
    """Answers batches of requests with ``predict`` until the service is to end.

    For tensors, ``predict`` gets a dict of NumPy arrays by name, whose dimension 0 runs over all
    rows of the batch, and returns such a dict: arrays of NumPy, tensors of PyTorch on any device,
    or whatever has ``__array__`` or the buffer protocol. The arrays are views of a buffer that the
    next batch overwrites; copy what is to be kept. Without NumPy they are memoryviews.

    For JSON, ``predict`` gets a list with one object per request and returns a list of as many
    answers.

    An exception of ``predict`` fails the requests of its batch, and the service goes on. ``warm``
    runs before the first request. ``inputs`` and ``outputs`` tell clients about the model, e.g.
    ``[{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]``.
    """
    path = os.environ.get("ROOMMATE_SERVE")
    if not path:
        raise RuntimeError(
            "nothing sends requests to this process: $ROOMMATE_SERVE is not set\n"
            "hint: submit it to Roommate as a job with `class: service` and `server: sdk`"
        )
    if max_batch < 1:
        raise ValueError(f"max_batch is {max_batch}, less than 1")
    ready = {
        "max_batch": max_batch,
        "inputs": [_Spec.read(i, lowest=-1).fields() for i in inputs],
        "outputs": [_Spec.read(o, lowest=-1).fields() for o in outputs],
        "platform": "python",
    }
    shared = _Shared.given()
    if shared is not None:
        ready["shared"] = True
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        try:
            peer.connect(path)
        except OSError as error:
            raise RuntimeError(f"nothing listens at $ROOMMATE_SERVE, {path}: {error}") from error
        if inputs:
            # The import takes longer than many an objective; the first request should not pay it.
            _numpy()
        if warm is not None:
            warm()
        worker = _Worker(_Wire(peer), predict, shared)
        try:
            worker.wire.send(_frame({"ready": ready}))
            worker.run()
        except (_Gone, ConnectionError):
            # The front is gone, and its requests with it; whoever runs the service starts anew.
            return


class _Gone(Exception):
    """The front closed the connection."""


class _Spec(NamedTuple):
    """The description of a tensor."""

    name: str
    datatype: str
    shape: list[int]

    @classmethod
    def read(cls, fields: Any, lowest: int = 0) -> _Spec:
        """Checks a description; ``lowest`` is the smallest dimension, -1 if any size goes."""
        if not isinstance(fields, Mapping) or not {"name", "datatype", "shape"} <= set(fields):
            raise ValueError(f"a tensor is described by name, datatype and shape, not {fields!r}")
        name, datatype = str(fields["name"]), fields["datatype"]
        if datatype not in _CODES:
            known = ", ".join(_CODES)
            raise ValueError(f"tensor {name!r} has the datatype {datatype!r}; known are {known}")
        shape = list(fields["shape"])
        if not all(isinstance(d, int) and d >= lowest for d in shape):
            raise ValueError(f"tensor {name!r} has the shape {shape}")
        return cls(name, datatype, shape)

    def fields(self) -> dict[str, Any]:
        return self._asdict()

    @property
    def size(self) -> int:
        return prod(self.shape) * struct.calcsize("=" + _CODES[self.datatype])


class _Tensor(NamedTuple):
    """A tensor in memory: ``data`` has elements of one byte."""

    spec: _Spec
    data: memoryview
    owner: object = None
    """Keeps the memory alive where ``data`` does not."""


class _Wire:
    """Frames over a socket. Received tensors lie in one buffer that is used again and again."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._room = memoryview(bytearray(_FIRST_ROOM))

    def head(self) -> tuple[Any, int]:
        """The JSON of the next frame, and how many bytes of tensors follow, which the caller
        takes.
        """
        json_size, binary_size = _HEAD.unpack(self.take([_HEAD.size])[0])
        if json_size > MOST_JSON or binary_size > MOST_BINARY:
            # What follows cannot be skipped in a reasonable time, and is most likely no frame.
            raise ProtocolError(
                f"a frame of {json_size} bytes of JSON and {binary_size} of tensors; "
                f"at most {MOST_JSON} and {MOST_BINARY} are valid"
            )
        text = bytes(self.take([json_size])[0])
        try:
            return json.loads(text), binary_size
        except ValueError as error:
            raise ProtocolError(f"not JSON: {error}") from None

    def take(self, sizes: list[int]) -> list[memoryview]:
        """The next bytes, in pieces of these sizes. The next call overwrites them."""
        ends = _ends(sizes, _ALIGN)
        end = ends[-1] if ends else 0
        if end > len(self._room):
            # A new buffer: arrays may still refer to the old one, which then cannot grow.
            self._room = memoryview(bytearray(1 << (end - 1).bit_length()))
        pieces = [self._room[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        for piece in pieces:
            at = 0
            while at < len(piece):
                got = self._peer.recv_into(piece[at:])
                if got == 0:
                    raise _Gone
                at += got
        return pieces

    def send(self, parts: list[memoryview]) -> None:
        """Sends the parts of a frame, without a copy of the tensors."""
        parts = [part for part in parts if len(part) > 0]
        while parts:
            sent = self._peer.sendmsg(parts[:_MOST_PARTS])
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent > 0:
                parts[0] = parts[0][sent:]


class _Shared:
    """Files in shared memory for large tensors. The inputs are mapped, so nothing is copied."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._room = memoryview(b"")

    @classmethod
    def given(cls) -> _Shared | None:
        folder = os.environ.get("ROOMMATE_SERVE_SHARED")
        if not folder:
            return None
        try:
            files = [os.open(os.path.join(folder, name), os.O_RDWR) for name in ("inputs", "outputs")]
        except OSError:
            return None  # the front sees that it is not used
        return cls(*files)

    def take(self, sizes: list[int]) -> list[memoryview]:
        """The tensors of the batch. The next batch overwrites them."""
        ends = _ends(sizes, _SHARED_ALIGN)
        end = ends[-1] if ends else 0
        if end > len(self._room):
            size = os.fstat(self._inputs).st_size
            if end > size:
                raise ValueError(f"a batch of {end} bytes in shared memory that has {size}")
            # A new mapping: arrays may still refer to the old one.
            self._room = memoryview(mmap.mmap(self._inputs, size))
        return [self._room[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def put(self, tensors: Sequence[memoryview]) -> None:
        sizes = [len(t) for t in tensors]
        for tensor, end in zip(tensors, _ends(sizes, _SHARED_ALIGN), strict=True):
            at, left = end - len(tensor), tensor
            while len(left) > 0:
                done = os.pwrite(self._outputs, left, at)
                at, left = at + done, left[done:]


def _ends(sizes: list[int], align: int) -> list[int]:
    """Where pieces of these sizes end that start at multiples of ``align``."""
    ends, end = [], 0
    for size in sizes:
        end = -(-end // align) * align + size
        ends.append(end)
    return ends


def _frame(message: dict[str, Any], tensors: Sequence[memoryview] = ()) -> list[memoryview]:
    """The parts of a frame."""
    # Neither NaN nor half a surrogate pair is JSON for the front: better an error here.
    plain = json.dumps(
        message, separators=(",", ":"), allow_nan=False, ensure_ascii=False, default=_plain
    )
    text = plain.encode()
    size = sum(len(t) for t in tensors)
    if len(text) > MOST_JSON:
        raise ValueError(f"an answer of {len(text)} bytes of JSON; at most {MOST_JSON} are sent")
    if size > MOST_BINARY:
        raise ValueError(f"an answer of {size} bytes of tensors; at most {MOST_BINARY} are sent")
    return [memoryview(_HEAD.pack(len(text), size) + text), *tensors]


def _plain(value: Any) -> Any:
    """Lists and numbers instead of arrays and their elements."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


class _Worker:
    """The loop over batches."""

    def __init__(
        self, wire: _Wire, predict: Callable[[Any], Any], shared: _Shared | None = None
    ) -> None:
        self.wire = wire
        self._predict = predict
        self._shared = shared
        self._last_what = ""
        self._unknown: set[str] = set()

    def run(self) -> None:
        global _tune
        while True:
            message, size = self.wire.head()
            if not isinstance(message, dict) or len(message) != 1:
                raise ProtocolError("a message is an object with one member")
            ((kind, fields),) = message.items()
            if kind == "batch":
                self._batch(fields, size)
                continue
            self.wire.take([size])
            if kind == "drain":
                return
            if kind == "tune":
                _tune = fields
            elif kind not in self._unknown:
                # The front may be newer than this SDK.
                self._unknown.add(kind)
                _say(f"a message {kind!r} is not known to this version of the SDK")

    def _batch(self, fields: Any, size: int) -> None:
        if not isinstance(fields, dict) or not isinstance(fields.get("id"), int):
            raise ProtocolError("a batch without an id")
        number = fields["id"]
        # The bytes are taken whatever is wrong with the batch: the next frame starts behind them.
        try:
            specs = [_Spec.read(i) for i in fields.get("inputs", [])]
            sizes = [s.size for s in specs]
            elsewhere = self._shared if fields.get("shared") else None
            if elsewhere is None and sum(sizes) != size:
                raise ValueError(f"a batch has {size} bytes of tensors, and describes {sum(sizes)}")
        except (TypeError, ValueError) as error:
            self.wire.take([size])
            self._failed(number, error)
            return
        if elsewhere is None:
            pieces = self.wire.take(sizes)
        try:
            if elsewhere is not None:
                pieces = elsewhere.take(sizes)
            with _first():
                parts, kept = self._done(fields, specs, pieces)
        except Exception as error:
            self._failed(number, error)
            return
        self.wire.send(parts)
        del kept

    def _done(
        self, fields: dict[str, Any], specs: list[_Spec], pieces: list[memoryview]
    ) -> tuple[list[memoryview], list[_Tensor]]:
        """The answer to a batch as a frame, and what has to live until it is sent."""
        began = time.perf_counter()
        answer: dict[str, Any] = {"id": fields["id"]}
        tensors: list[_Tensor] = []
        if "json" in fields:
            answer["json"] = self._answers(fields["json"])
        elif specs:
            tensors = self._outputs(specs, pieces)
            answer["outputs"] = [t.spec.fields() for t in tensors]
        else:
            raise ValueError("a batch has neither inputs nor json")
        answer["seconds"] = round(time.perf_counter() - began, 6)
        data = [t.data for t in tensors]
        if self._shared is not None and _LARGE <= sum(len(d) for d in data) <= MOST_BINARY:
            self._shared.put(data)
            answer["shared"], data = True, []
        return _frame({"done": answer}, data), tensors

    def _answers(self, requests: list[Any]) -> list[Any]:
        answers = self._predict(requests)
        if not isinstance(answers, (list, tuple)):
            kind = type(answers).__name__
            raise TypeError(
                f"predict returned {kind}; a list with one answer per request is needed"
            )
        if len(answers) != len(requests):
            raise ValueError(f"predict returned {len(answers)} answers to {len(requests)} requests")
        return list(answers)

    def _outputs(self, specs: list[_Spec], pieces: list[memoryview]) -> list[_Tensor]:
        outputs = self._predict(
            {spec.name: _array(spec, piece) for spec, piece in zip(specs, pieces, strict=True)}
        )
        if not isinstance(outputs, Mapping):
            kind = type(outputs).__name__
            raise TypeError(f"predict returned {kind}; a dict of arrays by name is needed")
        tensors = [_tensor(str(name), value) for name, value in outputs.items()]
        rows = specs[0].shape[:1]
        for spec, _, _ in tensors:
            if spec.shape[:1] != rows:
                raise ValueError(
                    f"predict returned {spec.name!r} of shape {spec.shape} for inputs of "
                    f"{rows[0] if rows else 'no'} rows; dimension 0 must be the same"
                )
        return tensors

    def _failed(self, number: int, error: Exception) -> None:
        what = f"{type(error).__name__}: {error}"[:_LONGEST_WHAT]
        if what != self._last_what:
            # Once for a series of equal ones, which would fill the log.
            self._last_what = what
            traceback.print_exception(error)
            sys.stderr.flush()
        what = what.encode(errors="replace").decode()
        self.wire.send(_frame({"failed": {"id": number, "what": what}}))


def _first() -> contextlib.AbstractContextManager[Any]:
    """Runs what it encloses on a stream of the highest priority, if the process uses CUDA: what
    comes before and after a graph should not wait for the kernels of training jobs either.
    """
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = cuda.stream(_first_stream())
    return context


@functools.cache
def _first_stream() -> Any:
    torch: Any = sys.modules["torch"]
    # Work that was queued before, such as the copy of a model, must be over.
    torch.cuda.synchronize()
    return torch.cuda.Stream(priority=first_of_all(torch))


@functools.cache
def _numpy() -> Any:
    """NumPy, or ``None``. The SDK does not depend on it."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


def _array(spec: _Spec, piece: memoryview) -> Any:
    """Received bytes as an array, without a copy. It is writable: PyTorch warns of others."""
    numpy = _numpy()
    if numpy is not None:
        return numpy.frombuffer(piece, dtype=_NAMES[spec.datatype]).reshape(spec.shape)
    try:
        code: Any = _CODES[spec.datatype]
        return piece.cast(code, spec.shape)
    except (TypeError, ValueError) as error:
        what = f"{spec.datatype} of shape {spec.shape}"
        raise TypeError(f"input {spec.name!r}, {what}, needs NumPy: {error}") from None


def _tensor(name: str, value: Any) -> _Tensor:
    """An output as bytes, without a copy where it is contiguous on the host."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(name, value)
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        if not hasattr(value, "__array__"):
            kind = type(value).__name__
            raise TypeError(
                f"output {name!r} is a {kind}; an array or a tensor is needed"
            ) from None
        view = memoryview(value.__array__())
    spec = _Spec(name, _datatype(name, view), list(view.shape or ()))
    if view.nbytes == 0:
        return _Tensor(spec, memoryview(b""))
    if not view.c_contiguous:
        return _Tensor(spec, memoryview(view.tobytes()))
    # Formats with a byte order cannot be cast.
    flat = view.cast("B") if len(view.format) == 1 else memoryview(view.tobytes())
    return _Tensor(spec, flat)


def _datatype(name: str, view: memoryview) -> str:
    order, code = view.format[:-1], view.format[-1:]
    foreign = order not in ("", "@", "=", "<")
    if code in "bhilqn":
        code = {1: "b", 2: "h", 4: "i", 8: "q"}[view.itemsize]
    elif code in "BHILQN":
        code = {1: "B", 2: "H", 4: "I", 8: "Q"}[view.itemsize]
    for datatype, known in _CODES.items():
        if code == known and not foreign:
            return datatype
    raise TypeError(
        f"output {name!r} has elements of format {view.format!r}; sent are {', '.join(_CODES)}"
    )


def _of_torch(name: str, tensor: Any) -> _Tensor:
    # Not by way of NumPy, which may be absent. The copy to the host waits for the GPU.
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    tensor = tensor.contiguous()
    for datatype, known in _NAMES.items():
        if str(tensor.dtype) == f"torch.{known}":
            spec = _Spec(name, datatype, [int(d) for d in tensor.shape])
            break
    else:
        raise TypeError(
            f"output {name!r} has elements of {tensor.dtype}; sent are {', '.join(_CODES)}"
        )
    if spec.size == 0:
        return _Tensor(spec, memoryview(b""))
    memory = (ctypes.c_char * spec.size).from_address(tensor.data_ptr())
    return _Tensor(spec, memoryview(memory), tensor)


def _say(what: str) -> None:
    print(f"roommate: {what}", file=sys.stderr, flush=True)
