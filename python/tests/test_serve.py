"""The worker of a service against a fake front on a real Unix socket."""

from __future__ import annotations

import array
import ctypes
import json
import socket
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import roommate
from roommate.protocol import ProtocolError

worker = sys.modules["roommate.serve"]

MIB = 2**20
WAIT_S = 20.0


class Front:
    """Listens, and speaks frames with the worker that connects."""

    def __init__(self, path: Path) -> None:
        self.connections = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(WAIT_S)
        self._peer: socket.socket | None = None

    @property
    def peer(self) -> socket.socket:
        if self._peer is None:
            self._peer, _ = self._listener.accept()
            self._peer.settimeout(WAIT_S)
            self.connections += 1
        return self._peer

    def frame(self, message: Any, binary: bytes = b"") -> bytes:
        text = json.dumps(message).encode()
        return struct.pack("<II", len(text), len(binary)) + text + binary

    def say(self, message: Any, binary: bytes = b"") -> None:
        self.peer.sendall(self.frame(message, binary))

    def hear(self) -> tuple[Any, bytes]:
        json_size, binary_size = struct.unpack("<II", self._exactly(8))
        return json.loads(self._exactly(json_size)), self._exactly(binary_size)

    def ask(self, fields: dict[str, Any], binary: bytes = b"") -> tuple[Any, bytes]:
        self.say({"batch": fields}, binary)
        return self.hear()

    def ask_json(self, number: int, *requests: Any) -> Any:
        answer, binary = self.ask({"id": number, "requests": len(requests), "json": requests})
        assert binary == b""
        return answer

    def _exactly(self, size: int) -> bytes:
        got = bytearray()
        while len(got) < size:
            piece = self.peer.recv(min(size - len(got), MIB))
            assert piece, "the worker closed the connection"
            got += piece
        return bytes(got)

    def hang_up(self) -> None:
        self.peer.close()

    def nobody_connects(self, within_s: float) -> bool:
        self._listener.settimeout(within_s)
        try:
            self._listener.accept()
        except TimeoutError:
            return True
        return False

    def close(self) -> None:
        self._listener.close()
        if self._peer is not None:
            self._peer.close()


class Running:
    """A worker in a thread."""

    def __init__(self, predict: Callable[[Any], Any], **options: Any) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(predict, options), daemon=True)
        self._thread.start()

    def _run(self, predict: Callable[[Any], Any], options: dict[str, Any]) -> None:
        try:
            roommate.serve(predict, **options)
        except BaseException as error:
            self.error = error

    def ended(self, within_s: float = WAIT_S) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()


@pytest.fixture
def front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    it = Front(tmp_path / "serve.sock")
    monkeypatch.setenv("ROOMMATE_SERVE", str(tmp_path / "serve.sock"))
    yield it
    it.close()


@pytest.fixture
def no_numpy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "numpy", None)
    worker._numpy.cache_clear()
    yield
    worker._numpy.cache_clear()


def started(front: Front, predict: Callable[[Any], Any], **options: Any) -> Running:
    it = Running(predict, **options)
    kind, _ = front.hear()
    assert set(kind) == {"ready"}
    return it


def drained(front: Front, running: Running) -> None:
    front.say({"drain": {}})
    assert running.ended()
    assert running.error is None


def spec(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


# The connection.


def test_without_a_front_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROOMMATE_SERVE", raising=False)
    with pytest.raises(RuntimeError, match=r"ROOMMATE_SERVE is not set\n.*`class: service`"):
        roommate.serve(list)
    monkeypatch.setenv("ROOMMATE_SERVE", "/nowhere/serve.sock")
    with pytest.raises(RuntimeError, match=r"nothing listens at .*/nowhere/serve\.sock"):
        roommate.serve(list)


def test_ready_is_sent_after_warming_up(front: Front) -> None:
    warmed, go_on = threading.Event(), threading.Event()

    def warm() -> None:
        warmed.set()
        go_on.wait(WAIT_S)

    x, y = spec("x", "FP32", -1, 4), spec("y", "INT64", -1)
    running = Running(list, max_batch=8, inputs=[x], outputs=[y], warm=warm)
    assert warmed.wait(WAIT_S)
    front.peer.settimeout(0.1)
    with pytest.raises(TimeoutError):
        front.hear()
    front.peer.settimeout(WAIT_S)
    go_on.set()
    ready = {"max_batch": 8, "inputs": [x], "outputs": [y], "platform": "python"}
    assert front.hear() == ({"ready": ready}, b"")
    drained(front, running)


def test_by_default_nothing_is_said_about_tensors(front: Front) -> None:
    running = Running(list)
    ready = {"max_batch": 32, "inputs": [], "outputs": [], "platform": "python"}
    assert front.hear() == ({"ready": ready}, b"")
    drained(front, running)


def test_invalid_arguments_are_named(front: Front) -> None:
    with pytest.raises(ValueError, match="max_batch is 0"):
        roommate.serve(list, max_batch=0)
    with pytest.raises(ValueError, match="'x' has the datatype 'BYTES'; known are BOOL, "):
        roommate.serve(list, inputs=[spec("x", "BYTES", -1)])
    with pytest.raises(ValueError, match=r"'x' has the shape \[-2\]"):
        roommate.serve(list, outputs=[spec("x", "FP32", -2)])
    with pytest.raises(ValueError, match="described by name, datatype and shape"):
        roommate.serve(list, inputs=[{"name": "x"}])


@pytest.mark.parametrize("part", [0, 5, 20])
def test_a_broken_connection_ends_it_and_it_does_not_connect_again(front: Front, part: int) -> None:
    running = started(front, list)
    front.peer.sendall(front.frame({"batch": {"id": 1, "requests": 1, "json": [1]}})[:part])
    front.hang_up()
    assert running.ended()
    assert running.error is None
    assert front.nobody_connects(within_s=0.3)
    assert front.connections == 1


def test_a_front_that_goes_during_a_batch_ends_it(front: Front) -> None:
    gone = threading.Event()

    def predict(requests: list[Any]) -> list[Any]:
        gone.wait(WAIT_S)
        return requests

    running = started(front, predict)
    front.say({"batch": {"id": 1, "requests": 1, "json": [1]}})
    front.hang_up()
    gone.set()
    assert running.ended()
    assert running.error is None


def test_a_drain_behind_batches_comes_after_them(front: Front) -> None:
    seen: list[Any] = []
    running = started(front, lambda requests: seen.extend(requests) or requests)
    batches = [{"batch": {"id": n, "requests": 1, "json": [n]}} for n in range(20)]
    # All of them in one piece: frames and reads have no common boundaries.
    front.peer.sendall(b"".join(map(front.frame, [*batches, {"drain": {}}])))
    assert [front.hear()[0]["done"]["id"] for _ in range(20)] == list(range(20))
    assert running.ended()
    assert (running.error, seen) == (None, list(range(20)))


def test_frames_may_arrive_byte_by_byte(front: Front) -> None:
    running = started(front, lambda requests: [r + 1 for r in requests])
    for byte in front.frame({"batch": {"id": 1, "requests": 2, "json": [1, 2]}}):
        front.peer.sendall(bytes([byte]))
    assert front.hear()[0]["done"]["json"] == [2, 3]
    drained(front, running)


def test_tunes_are_kept_and_break_nothing(front: Front, capfd: pytest.CaptureFixture[str]) -> None:
    running = started(front, list)
    front.say({"tune": {"batch": 4, "pace_permille": 1000}})
    front.say({"tune": {"batch": 8, "of_tomorrow": [1]}})
    front.say({"sing": {}}, b"la la")
    front.say({"sing": {}})
    assert front.ask_json(1, "a")["done"]["json"] == ["a"]
    assert worker.last_tune() == {"batch": 8, "of_tomorrow": [1]}
    drained(front, running)
    assert capfd.readouterr().err.count("'sing'") == 1


@pytest.mark.parametrize(
    "head", [(MIB + 1, 0), (2, 64 * MIB + 1), (0xFFFFFFFF, 0xFFFFFFFF)], ids=str
)
def test_oversized_frames_end_it_with_the_reason(front: Front, head: tuple[int, int]) -> None:
    running = started(front, list)
    front.peer.sendall(struct.pack("<II", *head))
    assert running.ended()
    assert isinstance(running.error, ProtocolError)
    assert f"{head[0]} bytes of JSON and {head[1]} of tensors" in str(running.error)


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"a":1,"b":2}', b'{"batch":{}}', b'{"batch":7}'])
def test_invalid_frames_end_it_with_the_reason(front: Front, text: bytes) -> None:
    running = started(front, list)
    front.peer.sendall(struct.pack("<II", len(text), 0) + text)
    assert running.ended()
    assert isinstance(running.error, ProtocolError)


# JSON.


def test_json_requests_are_answered_in_their_order(front: Front) -> None:
    running = started(front, lambda requests: [{"twice": 2 * r["n"]} for r in requests])
    done = front.ask_json(7, {"n": 1}, {"n": 5})["done"]
    assert done["id"] == 7
    assert done["json"] == [{"twice": 2}, {"twice": 10}]
    assert 0.0 <= done["seconds"] < WAIT_S
    assert front.ask_json(8, {"n": 0.5})["done"]["json"] == [{"twice": 1.0}]
    drained(front, running)


def test_seconds_are_those_of_predict(front: Front) -> None:
    running = started(front, lambda requests: threading.Event().wait(0.05) or requests)
    assert 0.05 <= front.ask_json(1, 1)["done"]["seconds"] < 5.0
    drained(front, running)


def test_a_json_answer_may_hold_arrays_and_any_text(front: Front) -> None:
    running = started(front, lambda _: [array.array("d", [0.5, 2.0]), "Grüße"])
    assert front.ask_json(1, 1, 2)["done"]["json"] == [[0.5, 2.0], "Grüße"]
    drained(front, running)


def test_a_predict_that_raises_fails_its_batch_only(
    front: Front, capfd: pytest.CaptureFixture[str]
) -> None:
    def predict(requests: list[Any]) -> list[Any]:
        return [1 / r for r in requests]

    running = started(front, predict)
    for number in (1, 2):
        failed = {"id": number, "what": "ZeroDivisionError: division by zero"}
        assert front.ask_json(number, 1, 0) == {"failed": failed}
    assert front.ask_json(3, 2)["done"]["json"] == [0.5]
    drained(front, running)
    said = capfd.readouterr().err
    assert said.count("Traceback") == 1, "equal errors are logged once"
    assert "in predict" in said


def test_a_connection_error_of_predict_is_not_the_fronts(front: Front) -> None:
    def predict(requests: list[Any]) -> list[Any]:
        raise ConnectionResetError("the database is gone")

    running = started(front, predict)
    for number in (1, 2):
        what = front.ask_json(number, 1)["failed"]["what"]
        assert what == "ConnectionResetError: the database is gone"
    drained(front, running)


def test_a_huge_error_is_cut(front: Front) -> None:
    def predict(requests: list[Any]) -> list[Any]:
        raise ValueError("\ud800" + 2 * MIB * "x")

    running = started(front, predict)
    what = front.ask_json(1, 1)["failed"]["what"]
    assert what.startswith("ValueError: ?xxx")
    assert len(what) <= 2000
    drained(front, running)


@pytest.mark.parametrize(
    ("answers", "what"),
    [
        ([1], "ValueError: predict returned 1 answers to 2 requests"),
        ([1, 2, 3], "ValueError: predict returned 3 answers to 2 requests"),
        ({"a": 1, "b": 2}, "TypeError: predict returned dict; a list with one answer per request"),
        (None, "TypeError: predict returned NoneType; a list"),
        ([float("nan"), 1], "ValueError: Out of range float values"),
        (["\ud800", 1], "UnicodeEncodeError: "),
        ([object(), 1], "TypeError: object cannot be written as JSON"),
        ([2 * MIB * "x", 1], "ValueError: an answer of 2097"),
    ],
    ids=["too few", "too many", "dict", "none", "nan", "surrogate", "object", "large"],
)
def test_invalid_answers_fail_their_batch_only(front: Front, answers: Any, what: str) -> None:
    good = [1, 2]
    results = [answers, good]
    running = started(front, lambda _: results.pop(0))
    assert front.ask_json(1, "a", "b")["failed"]["what"].startswith(what)
    assert front.ask_json(2, "a", "b")["done"]["json"] == good
    drained(front, running)


# Tensors.


def test_without_numpy_tensors_are_memoryviews(front: Front, no_numpy: None) -> None:
    seen: list[Any] = []

    def predict(batch: dict[str, memoryview]) -> dict[str, Any]:
        x, mask = batch["x"], batch["mask"]
        seen.append((x.shape, x.format, x.tolist(), mask.tolist()))
        return {"sum": array.array("f", map(sum, x.tolist())), "mask": mask}

    running = started(front, predict)
    inputs = [spec("mask", "BOOL", 3), spec("x", "FP32", 3, 2)]
    binary = b"\1\0\1" + floats(1, 2, 3, 4, 5, 6)
    answer, got = front.ask({"id": 7, "requests": 3, "inputs": inputs}, binary)
    assert seen == [((3, 2), "f", [[1, 2], [3, 4], [5, 6]], [True, False, True])]
    assert answer["done"]["id"] == 7
    assert answer["done"]["outputs"] == [spec("sum", "FP32", 3), spec("mask", "BOOL", 3)]
    assert got == floats(3, 7, 11) + b"\1\0\1"
    half = [spec("x", "FP16", 1, 1)]
    answer, _ = front.ask({"id": 8, "requests": 1, "inputs": half}, b"\0\0")
    assert "FP16 of shape [1, 1], needs NumPy" in answer["failed"]["what"]
    drained(front, running)


@pytest.mark.parametrize(
    ("inputs", "binary", "what"),
    [
        ([spec("x", "FP32", 2, 2)], bytes(12), "12 bytes of tensors, and describes 16"),
        ([spec("x", "BYTES", 1)], bytes(4), "the datatype 'BYTES'"),
        ([spec("x", "FP32", -1, 4)], bytes(16), r"the shape [-1, 4]"),
        ([{"name": "x"}], bytes(16), "described by name, datatype and shape"),
        (None, bytes(3), "not iterable"),
        ([], b"", "neither inputs nor json"),
    ],
    ids=["size", "datatype", "negative", "fields", "none", "empty"],
)
def test_an_invalid_batch_fails_alone(front: Front, inputs: Any, binary: bytes, what: str) -> None:
    running = started(front, lambda batch: batch)
    answer, _ = front.ask({"id": 1, "requests": 1, "inputs": inputs}, binary)
    assert what in answer["failed"]["what"]
    assert front.ask_json(2, "next")["done"]["json"] == ["next"]
    drained(front, running)


@pytest.mark.parametrize(
    ("outputs", "what"),
    [
        ({"y": array.array("f", [1, 2])}, r"'y' of shape [2] for inputs of 3 rows"),
        ({"y": [1.0, 2.0, 3.0]}, "TypeError: output 'y' is a list; an array or a tensor is needed"),
        ([1, 2, 3], "TypeError: predict returned list; a dict of arrays by name"),
        ({"y": bytearray(64 * MIB + 1)}, "shape [67108865] for inputs of 3 rows"),
        (
            {"y": memoryview(bytearray(66 * MIB)).cast("B", (3, 22 * MIB))},
            "an answer of 69206016 bytes of tensors; at most 67108864",
        ),
        ({"y": (ctypes.c_float * 3).__class__}, "output 'y' is a "),
        ({"y": (ctypes.c_float.__ctype_be__ * 3)()}, "elements of format '>f'"),
    ],
    ids=["rows", "list", "no dict", "long", "oversized", "type", "big endian"],
)
def test_invalid_outputs_fail_their_batch_only(front: Front, outputs: Any, what: str) -> None:
    results = [outputs, {"y": array.array("b", [1, 2, 3])}]
    running = started(front, lambda _: results.pop(0))
    batch = {"requests": 3, "inputs": [spec("x", "INT8", 3)]}
    answer, _ = front.ask({"id": 1, **batch}, b"abc")
    assert what in answer["failed"]["what"]
    answer, binary = front.ask({"id": 2, **batch}, b"abc")
    assert (answer["done"]["outputs"], binary) == ([spec("y", "INT8", 3)], b"\1\2\3")
    drained(front, running)


def test_large_tensors_come_and_go_whole_and_without_copies(front: Front) -> None:
    memory: list[int] = []

    def predict(batch: dict[str, Any]) -> dict[str, Any]:
        x = memoryview(batch["x"]).cast("B")
        memory.append(ctypes.addressof(ctypes.c_char.from_buffer(x)))
        return {"small": memoryview(x[:4]).cast("B", (4, 1)), "x": batch["x"]}

    running = started(front, predict)
    block = bytes(range(256)) * (4 * MIB // 256)
    for number, turn in enumerate((0, 1, 2)):
        binary = b"".join(bytes([turn + row]) + block[1:] for row in range(4))
        inputs = [spec("x", "UINT8", 4, 4 * MIB)]
        answer, got = front.ask({"id": number, "requests": 4, "inputs": inputs}, binary)
        assert answer["done"]["outputs"] == [spec("small", "UINT8", 4, 1), *inputs]
        assert got == binary[:4] + binary
    assert len(set(memory)) == 1, "the buffer is used again"
    drained(front, running)


def test_large_tensors_come_and_go_in_shared_memory(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, outputs = tmp_path / "inputs", tmp_path / "outputs"
    inputs.write_bytes(b"")
    outputs.write_bytes(b"")
    monkeypatch.setenv("ROOMMATE_SERVE_SHARED", str(tmp_path))
    running = Running(lambda batch: {"y": batch["b"], "x": batch["a"]})
    ready, _ = front.hear()
    assert ready["ready"]["shared"] is True
    specs = [spec("a", "UINT8", 1, 3), spec("b", "UINT8", 1, MIB)]
    for turn in (1, 2):
        # The second batch finds the file as the first one left it, and a larger one grows it.
        block = bytes([turn]) * MIB
        inputs.write_bytes(b"abc".ljust(64, b"-") + block)
        answer, binary = front.ask(
            {"id": turn, "requests": 1, "inputs": specs, "shared": True}, b""
        )
        assert binary == b"" and answer["done"]["shared"] is True
        assert [o["name"] for o in answer["done"]["outputs"]] == ["y", "x"]
        assert outputs.read_bytes() == block + b"abc"
    # Small answers come in the frame; a batch that the file does not have fails alone.
    answer, binary = front.ask({"id": 3, "requests": 1, "inputs": specs[:1]}, b"xyz")
    assert "failed" in answer
    wrong = [spec("a", "UINT8", 1, 9 * MIB)]
    answer, _ = front.ask({"id": 4, "requests": 1, "inputs": wrong, "shared": True}, b"")
    assert "shared memory" in answer["failed"]["what"]
    drained(front, running)


def test_a_batch_that_is_kept_does_not_stop_a_larger_one(front: Front) -> None:
    kept: list[Any] = []

    def predict(batch: dict[str, Any]) -> dict[str, Any]:
        kept.append(batch["x"])
        return batch

    running = started(front, predict)
    for number, size in enumerate((10, 100_000, MIB)):
        inputs = [spec("x", "UINT8", size)]
        answer, got = front.ask({"id": number, "requests": 1, "inputs": inputs}, b"z" * size)
        assert answer["done"]["id"] == number
        assert got == b"z" * size
    drained(front, running)


def test_many_outputs_are_more_than_one_call_takes(front: Front) -> None:
    count = 3000
    running = started(front, lambda batch: {f"y{n}": batch["x"] for n in range(count)})
    answer, got = front.ask({"id": 1, "requests": 1, "inputs": [spec("x", "UINT8", 1)]}, b"!")
    assert len(answer["done"]["outputs"]) == count
    assert got == b"!" * count
    drained(front, running)


class Narrow:
    """A socket that takes a few bytes at a time, as one does in which a signal interrupts."""

    def __init__(self, width: int) -> None:
        self.width, self.got = width, b""

    def sendmsg(self, parts: list[memoryview]) -> int:
        taken = b"".join(parts)[: self.width]
        self.got += taken
        return len(taken)


@pytest.mark.parametrize("width", [1, 3, 4, 7, 1000])
def test_a_frame_that_is_sent_in_pieces_arrives_whole(width: int) -> None:
    peer = Narrow(width)
    parts = [memoryview(part) for part in (b"head", b"", b"tensor", b"t", b"another tensor")]
    worker._Wire(peer).send(parts)
    assert peer.got == b"headtensortanother tensor"


def test_empty_tensors_are_sent(front: Front) -> None:
    pytest.importorskip("numpy")
    running = started(front, lambda _: {"y": array.array("f"), "n": array.array("i")})
    batch = {"id": 1, "requests": 1, "inputs": [spec("x", "FP32", 0, 2)]}
    answer, got = front.ask(batch)
    assert answer["done"]["outputs"] == [spec("y", "FP32", 0), spec("n", "INT32", 0)]
    assert got == b""
    drained(front, running)


class FakeTensor:
    """What the SDK uses of a tensor of PyTorch, which lies on a GPU."""

    def __init__(self, values: list[float], dtype: str, where: str = "cuda") -> None:
        self.values, self.dtype, self.where = values, dtype, where
        self.shape = (len(values), 1)
        code = {"torch.float32": "f", "torch.int64": "q", "torch.complex64": "f"}.get(dtype, "h")
        self._memory = array.array(code, [] if dtype == "torch.bfloat16" else values)

    def detach(self) -> FakeTensor:
        return self

    def cpu(self) -> FakeTensor:
        return FakeTensor(self.values, self.dtype, "cpu")

    def float(self) -> FakeTensor:
        return FakeTensor(self.values, "torch.float32", self.where)

    def contiguous(self) -> FakeTensor:
        return self

    def data_ptr(self) -> int:
        assert self.where == "cpu", "the host cannot read the GPU's memory"
        return self._memory.buffer_info()[0]


def test_tensors_of_torch_come_from_any_device(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = types.SimpleNamespace(Tensor=FakeTensor)
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    results = [
        {
            "a": FakeTensor([1.5, 2.5], "torch.float32"),
            "b": FakeTensor([7, -7], "torch.int64", "cpu"),
            "c": FakeTensor([0.5, 4.0], "torch.bfloat16"),
        },
        {"a": FakeTensor([1.5, 2.5], "torch.complex64")},
    ]
    running = started(front, lambda _: results.pop(0))
    batch = {"requests": 2, "inputs": [spec("x", "UINT8", 2)]}
    answer, got = front.ask({"id": 1, **batch}, b"ab")
    expected = [spec("a", "FP32", 2, 1), spec("b", "INT64", 2, 1), spec("c", "FP32", 2, 1)]
    assert answer["done"]["outputs"] == expected
    assert got == floats(1.5, 2.5) + struct.pack("<2q", 7, -7) + floats(0.5, 4.0)
    answer, _ = front.ask({"id": 2, **batch}, b"ab")
    assert "'a' has elements of torch.complex64" in answer["failed"]["what"]
    drained(front, running)


class Wrapped:
    """An array of a library that only NumPy understands."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __array__(self) -> Any:
        return self._inner


def test_arrays_of_numpy_of_all_datatypes(front: Front) -> None:
    numpy = pytest.importorskip("numpy")
    seen: list[Any] = []

    def predict(batch: dict[str, Any]) -> dict[str, Any]:
        (x,) = batch.values()
        seen.append((x.dtype.name, x.shape, bool(x.flags.aligned), bool(x.flags.writeable)))
        return {
            "same": x,
            "wrapped": Wrapped(x + x),
            "fortran": numpy.asfortranarray(x),
            "reversed": x[:, ::-1],
        }

    running = started(front, predict)
    for number, (datatype, name) in enumerate(worker._NAMES.items()):
        x = numpy.array([[0, 1], [1, 1], [1, 0]]).astype(name)
        inputs = [spec("x", datatype, 3, 2)]
        answer, got = front.ask({"id": number, "requests": 3, "inputs": inputs}, x.tobytes())
        names = ("same", "wrapped", "fortran", "reversed")
        assert answer["done"]["outputs"] == [spec(n, datatype, 3, 2) for n in names]
        assert got == x.tobytes() + (x + x).tobytes() + x.tobytes() + x[:, ::-1].tobytes()
        assert seen.pop() == (name, (3, 2), True, True)
    drained(front, running)


def test_inputs_of_numpy_are_aligned_behind_odd_ones(front: Front) -> None:
    numpy = pytest.importorskip("numpy")
    seen: list[Any] = []

    def predict(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append((batch["x"].tolist(), bool(batch["x"].flags.aligned)))
        return {"y": numpy.asarray(batch["x"], dtype=">f8")}

    running = started(front, predict)
    inputs = [spec("odd", "BOOL", 1, 3), spec("x", "FP64", 1, 2)]
    binary = b"\0\1\1" + struct.pack("<2d", 0.25, -3.0)
    answer, _ = front.ask({"id": 1, "requests": 1, "inputs": inputs}, binary)
    assert seen == [([[0.25, -3.0]], True)]
    assert "elements of format '>d'" in answer["failed"]["what"]
    drained(front, running)


def test_the_sdk_itself_imports_neither_numpy_nor_torch() -> None:
    code = "import sys, roommate, roommate.gpu; print({'numpy', 'torch'} & set(sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.stdout == "set()\n", out.stderr
