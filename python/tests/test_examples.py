"""The examples of services: the model, the server without the SDK, and the client that measures."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SERVING = ROOT / "examples/serving"
sys.path.insert(0, str(SERVING))

import digits  # noqa: E402
import flask_like  # noqa: E402
import load  # noqa: E402


class Slow(BaseHTTPRequestHandler):
    """Answers one request at a time, each in 20 ms; every tenth with 503."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    turn = threading.Lock()
    asked = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        with Slow.turn:
            time.sleep(0.02)
            Slow.asked += 1
            status = 503 if Slow.asked % 10 == 0 else 200
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def at(request: pytest.FixtureRequest) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), request.param)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_the_model_knows_its_digits_also_when_they_are_moved() -> None:
    images = [digits.moved(digits.image(n), 1, -1) for n in range(10)]
    answers = digits.predict([{"pixels": image} for image in images])
    assert [a["digit"] for a in answers] == list(range(10))


def test_a_bad_request_does_not_fail_the_others() -> None:
    bad = [3, {}, {"pixels": [1]}, {"pixels": ["a"] * 64}, {"pixels": None}]
    *failed, good = digits.predict([*bad, {"pixels": digits.image(4)}])
    assert all(set(answer) == {"error"} for answer in failed)
    assert good["digit"] == 4


def test_digits_answers_a_front(tmp_path: Path) -> None:
    def exactly(size: int) -> bytes:
        got = b""
        while len(got) < size:
            piece = peer.recv(size - len(got))
            assert piece
            got += piece
        return got

    def hear() -> Any:
        size, _ = struct.unpack("<II", exactly(8))
        return json.loads(exactly(size))

    def say(message: Any) -> None:
        text = json.dumps(message).encode()
        peer.sendall(struct.pack("<II", len(text), 0) + text)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.settimeout(30)
        place = {"ROOMMATE_SERVE": str(tmp_path / "s"), "PYTHONPATH": str(ROOT / "python")}
        command = [sys.executable, str(SERVING / "digits.py")]
        worker = subprocess.Popen(command, env={**os.environ, **place})
        try:
            peer, _ = listener.accept()
            with peer:
                peer.settimeout(30)
                assert hear()["ready"]["platform"] == "python"
                requests = [{"pixels": digits.image(n)} for n in (3, 8)]
                say({"batch": {"id": 1, "requests": 2, "json": requests}})
                assert [a["digit"] for a in hear()["done"]["json"]] == [3, 8]
                say({"drain": {}})
                assert worker.wait(30) == 0
        finally:
            worker.kill()
            worker.wait()


@pytest.mark.parametrize("at", [flask_like.Handler], indirect=True)
def test_the_opaque_server_answers_the_client(at: str) -> None:
    due = [0.01 * n for n in range(20)]
    good = load.Load(f"{at}/predict", load.default_body(), due)
    good.run(4)
    assert (len(good.latencies), dict(good.errors)) == (20, {})
    for path, body, status in (
        ("/predict", b"{", "400"),
        ("/predict", b"{}", "400"),
        ("/", b"", "404"),
    ):
        bad = load.Load(at + path, body, due)
        bad.run(4)
        assert (bad.latencies, dict(bad.errors)) == ([], {status: 20})


def test_arrivals_follow_the_rate_and_the_seed() -> None:
    burst = load.Burst.read("20:5:10")
    times = load.arrivals(100.0, 60.0, [burst], seed=3)
    assert times == sorted(times) == load.arrivals(100.0, 60.0, [burst], seed=3)
    assert times != load.arrivals(100.0, 60.0, [burst], seed=4)
    inside = sum(20.0 <= t < 30.0 for t in times)
    # Five standard deviations of a Poisson process.
    assert abs(inside - 5000) < 5 * 5000**0.5
    assert abs(len(times) - inside - 5000) < 5 * 5000**0.5
    assert times[0] > 0.0
    assert times[-1] < 60.0
    gaps = [b - a for a, b in pairwise(times) if b < 20.0]
    long = sum(gap > 0.01 for gap in gaps) / len(gaps)
    assert abs(long - 0.368) < 0.05, "gaps are exponential"
    assert load.arrivals(100.0, 10.0, [load.Burst(5.0, 0.0, 5.0)], 1)[-1] < 5.0


@pytest.mark.parametrize("at", [Slow], indirect=True)
def test_latencies_count_from_the_intended_time(at: str) -> None:
    Slow.asked = 0
    # All are due at once, and there are two connections: the last waits for all the others.
    busy = load.Load(at, b"{}", [0.0] * 20)
    busy.run(2)
    told = load.summary(busy, 100.0)
    assert (told["sent"], told["ok"], told["errors"]) == (20, 18, {"503": 2})
    assert told["worst_ms"] > 19 * 20 * 0.95
    assert 150 < told["p50_ms"] < told["p99_ms"] == told["worst_ms"]
    assert told["behind_ms"] > 300
    assert 12 <= told["over"] <= 18
    assert told["missed"] == round((told["over"] + 2) / 20, 5)


def test_a_server_that_is_absent_is_an_error_of_each_request() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = load.Load(f"http://127.0.0.1:{unused.getsockname()[1]}/", b"{}", [0.0, 0.0])
        nobody.run(2)
    told = load.summary(nobody, 5.0)
    assert (told["sent"], told["errors"], told["missed"]) == (2, {"connection": 2}, 1.0)
    assert told["p99_ms"] is None


def test_quantiles_are_latencies_that_occurred() -> None:
    hundred = [n / 1000 for n in range(1, 101)]
    assert load.quantile_ms(hundred, 0.5) == 50.0
    assert load.quantile_ms(hundred, 0.99) == 99.0
    assert load.quantile_ms([0.007], 0.99) == 7.0
