"""The front of a service by itself: real workers, real clients, no daemon."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from conftest import BINARY, ROOT
from tritonclient.utils import InferenceServerException

# Answers with the sum of each row; odd inputs make it misbehave.
WORKER = """
import os, sys, time, roommate
def predict(batch):
    if isinstance(batch, dict):
        x = batch["x"]
        return {"sum": x.sum(axis=1, keepdims=True, dtype="float32")}
    answers = []
    for item in batch:
        what = item.get("do")
        if what == "crash": os._exit(3)
        if what == "hang": time.sleep(3600)
        if what == "raise": raise ValueError("odd")
        time.sleep(item.get("sleep", 0))
        answers.append({"twice": 2 * item.get("x", 0), "batch": len(batch), "pid": os.getpid()})
    return answers
roommate.serve(predict, max_batch=8)
"""


class Service:
    """A front with its worker."""

    def __init__(self, folder: Path, worker: list[str], **fields: Any) -> None:
        self.port = free_port()
        spec = {
            "name": "s",
            "model": "s",
            "listen": f"127.0.0.1:{self.port}",
            "objective": {"quantile": 0.99, "ms": 200.0},
            "max_batch": 8,
            "fill_ms": 5.0,
            "server": {"sdk": {}},
            **fields,
        }
        env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
        env = {k: v for k, v in env.items() if k not in ("ROOMMATE_SOCKET", "ROOMMATE_TOKEN")}
        self.log = folder / "log"
        with self.log.open("wb") as log:
            words = [BINARY, "front", "--spec", json.dumps(spec), "--", *worker]
            self.process = subprocess.Popen(words, env=env, stderr=log, stdout=log)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        peer = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            peer.request(method, path, data, headers or {})
            answer = peer.getresponse()
            content = answer.read()
        finally:
            peer.close()
        known = {name.lower(): value for name, value in answer.getheaders()}
        is_json = known.get("content-type") == "application/json"
        return answer.status, json.loads(content) if is_json else content, known

    def predict(self, **fields: Any) -> tuple[int, Any]:
        return self.ask("POST", "/predict", fields)[:2]

    def is_ready(self) -> bool:
        try:
            return self.ask("GET", "/v2/health/ready")[0] == 200
        except OSError:
            return False

    def until(self, holds: Callable[[], Any], within_s: float = 20.0) -> None:
        end = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < end, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def metric(self, name: str) -> float:
        text = self.ask("GET", "/roommate/metrics")[1].decode()
        lines = [line for line in text.splitlines() if line.startswith(f"roommate_service_{name}")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as it:
        port: int = it.getsockname()[1]
        return port


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    begun: list[Service] = []

    def start(worker: str | list[str] = WORKER, wait: bool = True, **fields: Any) -> Service:
        words = [sys.executable, "-c", worker] if isinstance(worker, str) else worker
        service = Service(tmp_path, words, **fields)
        begun.append(service)
        if wait:
            service.until(service.is_ready)
        return service

    yield start
    for service in begun:
        service.close()


def together(n: int, one: Callable[[int], Any]) -> list[Any]:
    """Runs `one` in n threads at the same time."""
    results: list[Any] = [None] * n
    gate = threading.Barrier(n)

    def run(i: int) -> None:
        gate.wait()
        results[i] = one(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_requests_at_one_time_are_answered_together(
    begin: Callable[..., Service],
) -> None:
    service = begin(fill_ms=50.0)
    # The first ones tell the front that more are to be expected.
    together(4, lambda i: service.predict(x=i))
    answers = together(8, lambda i: service.predict(x=i, sleep=0.01))
    assert [a[0] for a in answers] == [200] * 8
    assert [a[1]["twice"] for a in answers] == [2 * i for i in range(8)]
    assert max(a[1]["batch"] for a in answers) > 1
    assert service.metric('requests_total{model="s",code="200"}') == 12
    assert service.metric("batches_total") < 12


def test_tensors_as_json_and_as_binary_data(begin: Callable[..., Service]) -> None:
    service = begin()
    path = "/v2/models/s/infer"
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [[1, 2, 3], [4, 5, 6.5]]}
    status, answer, headers = service.ask("POST", path, {"id": "7", "inputs": [tensor]})
    assert status == 200, answer
    assert answer["id"] == "7" and answer["model_name"] == "s"
    output = {"name": "sum", "datatype": "FP32", "shape": [2, 1], "data": [6.0, 15.5]}
    assert answer["outputs"] == [output]
    assert headers["traceparent"].startswith("00-")
    head = {**tensor, "parameters": {"binary_data_size": 24}}
    del head["data"]
    text = json.dumps({"inputs": [head], "parameters": {"binary_data_output": True}}).encode()
    data = struct.pack("<6f", 1, 2, 3, 4, 5, 6.5)
    length = {"Inference-Header-Content-Length": str(len(text))}
    status, content, headers = service.ask("POST", path, text + data, length)
    at = int(headers["inference-header-content-length"])
    assert status == 200 and struct.unpack("<2f", content[at:]) == (6.0, 15.5)
    # Nine rows do not fit into a batch of eight.
    many = {**tensor, "shape": [9, 1], "data": list(range(9))}
    status, answer, _ = service.ask("POST", path, {"inputs": [many]})
    assert status == 400 and "the largest batch is 8" in answer["error"]


def test_the_client_of_triton_works_as_it_is(begin: Callable[..., Service]) -> None:
    service = begin()
    client = triton.InferenceServerClient(f"127.0.0.1:{service.port}", concurrency=4)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("s")
    assert client.get_model_metadata("s")["name"] == "s"
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    for binary in (True, False):
        given = triton.InferInput("x", data.shape, "FP32")
        given.set_data_from_numpy(data, binary_data=binary)
        wanted = [triton.InferRequestedOutput("sum", binary_data=binary)]
        answers = [client.async_infer("s", [given], outputs=wanted) for _ in range(8)]
        for answer in answers:
            assert answer.get_result().as_numpy("sum").tolist() == [[3.0], [12.0]]
    # A large input reaches the worker through shared memory.
    large = np.ones((8, 20_000), dtype=np.float32)
    given = triton.InferInput("x", large.shape, "FP32")
    given.set_data_from_numpy(large)
    assert client.infer("s", [given]).as_numpy("sum").tolist() == [[20_000.0]] * 8
    with pytest.raises(InferenceServerException, match="no output"):
        client.infer("s", [given], outputs=[triton.InferRequestedOutput("other")])
    client.close()


def test_curl_speaks_both_versions_of_http(begin: Callable[..., Service]) -> None:
    service = begin()
    url = f"http://127.0.0.1:{service.port}/predict"
    for flag, version in (("--http1.1", "1.1"), ("--http2-prior-knowledge", "2")):
        words = ["curl", "-s", flag, "-w", " %{http_version}", "-d", '{"x": 21}', url]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20)
        answer, _, spoken = done.stdout.rpartition(" ")
        assert (json.loads(answer)["twice"], spoken) == (42, version)


def test_what_a_client_may_ask_and_what_not(begin: Callable[..., Service]) -> None:
    service = begin()
    assert service.ask("GET", "/v2")[1]["name"] == "roommate"
    assert service.ask("GET", "/v2/health/live")[0] == 200
    assert service.ask("GET", "/v2/models/s")[1]["versions"] == ["1"]
    assert service.ask("GET", "/v2/models/s/ready")[0] == 200
    assert service.ask("GET", "/v2/models/other")[0] == 404
    assert service.ask("GET", "/v2/models/s/infer")[0] == 405
    assert service.ask("GET", "/nothing")[0] == 404
    assert service.ask("POST", "/predict", b"{")[0] == 400
    assert service.ask("POST", "/v2/models/s/infer", {"inputs": []})[0] == 400
    assert service.ask("POST", "/v2/models/s/infer", b"\xff")[0] == 400
    large = {"Content-Length": str(1 << 30)}
    assert service.ask("POST", "/v2/models/s/infer", b"x", large)[0] == 413
    assert service.predict(do="raise")[0] == 500
    assert "ValueError: odd" in service.predict(do="raise")[1]["error"]
    assert service.predict(x=1)[0] == 200
    # JSON without tensors goes to the function as it is, at either path.
    assert service.ask("POST", "/v2/models/s/infer", {"x": 4})[1]["twice"] == 8


def test_a_worker_that_crashes_is_replaced_and_no_request_is_lost(
    begin: Callable[..., Service],
) -> None:
    service = begin(fill_ms=50.0, objective={"quantile": 0.99, "ms": 2000.0})
    first = service.predict(x=1)[1]["pid"]
    together(4, lambda i: service.predict(x=i))

    def one(i: int) -> tuple[int, Any]:
        return service.predict(do="crash") if i == 0 else service.predict(x=i, sleep=0.01)

    answers = together(6, one)
    # Who was in the same batch is asked again, alone; who makes workers crash is refused.
    assert answers[0][0] == 503 and "died" in answers[0][1]["error"]
    assert [a[0] for a in answers[1:]] == [200] * 5, answers
    assert [a[1]["twice"] for a in answers[1:]] == [2 * i for i in range(1, 6)]
    assert all(a[1]["pid"] != first for a in answers[1:])
    assert service.metric("restarts_total") >= 1


def test_a_worker_that_hangs_is_killed_and_its_client_answered(
    begin: Callable[..., Service],
) -> None:
    service = begin(objective={"quantile": 0.99, "ms": 50.0})
    began = time.monotonic()
    status, answer = service.predict(do="hang")
    assert status == 503 and time.monotonic() - began < 3, answer
    service.until(lambda: service.metric("restarts_total") == 1)
    service.until(service.is_ready)
    assert service.predict(x=4) == (200, {"twice": 8, "batch": 1, "pid": service.predict()[1]["pid"]})


def test_a_full_queue_refuses_and_says_when(begin: Callable[..., Service]) -> None:
    service = begin(queue=4, max_batch=1)
    answers = together(12, lambda _: service.ask("POST", "/predict", {"sleep": 0.1}))
    refused = [a for a in answers if a[0] == 429]
    assert len(refused) >= 6 and all(int(a[2]["retry-after"]) >= 1 for a in refused)
    assert sum(a[0] == 200 for a in answers) >= 4


def test_who_cannot_be_answered_in_time_is_told(begin: Callable[..., Service]) -> None:
    service = begin(max_batch=1, objective={"quantile": 0.99, "ms": 50.0})
    began = time.monotonic()
    answers = together(8, lambda _: (service.predict(sleep=0.4)[0], time.monotonic() - began))
    late = [took for status, took in answers if status == 503]
    assert late and max(late) < 1.5, answers
    assert any(status == 200 for status, _ in answers)


def test_draining_answers_what_was_asked(begin: Callable[..., Service]) -> None:
    service = begin()
    asked = threading.Thread(target=lambda: answers.append(service.predict(x=3, sleep=0.5)))
    answers: list[tuple[int, Any]] = []
    asked.start()
    time.sleep(0.2)
    service.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert service.predict(x=1)[0] == 503
    asked.join()
    assert answers[0][0] == 200
    assert service.process.wait(10) == 0


def test_a_worker_that_never_starts_ends_the_front(begin: Callable[..., Service]) -> None:
    service = begin("raise SystemExit(1)", wait=False)
    assert service.process.wait(30) == 75
    assert "crashes within a minute" in service.log.read_text()
    wrong = begin(wait=False, max_batch=0)
    assert wrong.process.wait(10) != 0 and "max_batch" in wrong.log.read_text()


OPAQUE = """
import json, os, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def reply(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.reply(200, {"path": self.path, "trace": self.headers.get("traceparent")})
    def do_POST(self):
        item = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if item.get("do") == "crash": os._exit(1)
        if item.get("do") == "fail": return self.reply(500, {})
        time.sleep(item.get("sleep", 0))
        self.reply(200, {"echo": item})
    def log_message(self, *_): pass
time.sleep(0.3)
ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


def test_any_server_behind_the_front(begin: Callable[..., Service]) -> None:
    server = {"http": {"health": "/healthy"}}
    service = begin(OPAQUE, wait=False, server=server)
    service.until(lambda: answers(service) == 200)
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    status, answer, headers = service.ask("GET", "/a?b=c", None, {"traceparent": trace})
    assert (status, answer["path"]) == (200, "/a?b=c")
    assert answer["trace"].split("-")[1] == trace.split("-")[1] == headers["traceparent"].split("-")[1]
    assert service.ask("POST", "/x", {"q": [1, 2]})[1] == {"echo": {"q": [1, 2]}}
    assert service.ask("POST", "/x", {"do": "fail"})[0] == 500
    assert service.ask("POST", "/x", {"do": "crash"})[0] == 503
    assert service.ask("GET", "/a")[0] == 503
    service.until(lambda: answers(service) == 200)
    assert service.metric("restarts_total") == 1
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(10) == 0


def answers(service: Service) -> int:
    try:
        return service.ask("GET", "/a")[0]
    except OSError:
        return 0


def test_slow_and_broken_clients_disturb_nobody(begin: Callable[..., Service]) -> None:
    service = begin()
    held = []
    for i in range(200):
        peer = socket.create_connection(("127.0.0.1", service.port))
        peer.sendall(
            [b"", b"POST /predict HTTP/1.1\r\nContent-Le", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"][i % 4]
        )
        held.append(peer)
    part = socket.create_connection(("127.0.0.1", service.port))
    part.sendall(b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
    began = time.monotonic()
    assert all(service.predict(x=i)[0] == 200 for i in range(20))
    assert time.monotonic() - began < 5
    for peer in held:
        peer.close()
    part.close()
    assert service.predict(x=1)[0] == 200
