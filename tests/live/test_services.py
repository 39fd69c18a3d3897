"""Services: a front takes requests for them, and training beside them is held back."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import Room

# An HTTP server of its own, which needs WORK seconds of CPU time for an answer.
SERVER = """
import os, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        length = int(self.headers.get("content-length") or 0)
        self.rfile.read(length)
        end = time.process_time() + (0 if self.path == "/health" else WORK)
        while time.process_time() < end:
            pass
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")
    do_GET = do_POST = answer
    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""

# Training that uses the SDK, and whose steps keep its core busy.
TRAINING = """
import time, roommate
for n, _ in enumerate(roommate.steps(lambda size: size, batch_size=8)):
    if n == STEPS: break
    end = time.process_time() + 0.005
    while time.process_time() < end: pass
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def fields(port: int, slo: str = "50ms", **more: Any) -> dict[str, Any]:
    service = {"slo": {"p99": slo}, "port": port, "server": "http", **more}
    return {"class": "service", "service": service}


def serve(room: Room, name: str, port: int, work_s: float = 0.002, **more: Any) -> None:
    room.python(name, SERVER.replace("WORK", str(work_s)), **fields(port, **more))


def ask(port: int) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/x", data=b"{}")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@contextmanager
def asking(port: int, every_s: float) -> Iterator[list[int]]:
    """Asks again and again meanwhile, from four threads."""
    over, statuses = threading.Event(), list[int]()

    def run() -> None:
        while not over.wait(every_s):
            statuses.append(ask(port))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        over.set()
        for thread in threads:
            thread.join()


def service(room: Room, name: str) -> dict[str, Any]:
    view = room.jobs()[name]["service"]
    assert isinstance(view, dict)
    return view


def until_ready(room: Room, name: str) -> None:
    room.until(lambda: service(room, name)["ready"])
    assert room.state_of(name) == "running"


def test_a_service_answers_is_counted_and_drains(room: Room) -> None:
    port = free_port()
    room.up("--policy", "fifo", "--devices", "2")
    serve(room, "web", port)
    until_ready(room, "web")
    assert [ask(port) for _ in range(20)] == [200] * 20
    room.until(lambda: service(room, "web")["requests"] >= 20)
    seen = service(room, "web")
    assert seen["objective_ms"] == 50 and seen["quantile"] == 0.99 and seen["port"] == port
    assert 0 < seen["p50_ms"] <= seen["p99_ms"]
    assert "p99" in room.ok("describe", "web") and "to keep p99 50 ms" in room.ok("ps", "-o", "wide")
    room.ok("cancel", "web")
    room.until(lambda: room.jobs()["web"]["keeper_pid"] is None)
    assert room.state_of("web") == "cancelled" and ask(port) == 0
    served = [f["served"] for s in room.steps() for f in s.get("facts", []) if "served" in f]
    assert sum(f["served"]["requests"] for f in served) >= 20
    assert room.replays()


def test_a_restarted_daemon_finds_the_service_and_its_counts(room: Room) -> None:
    port = free_port()
    room.up("--policy", "fifo")
    serve(room, "web", port)
    until_ready(room, "web")
    with asking(port, 0.01) as statuses:
        room.until(lambda: any("served" in f for s in room.steps() for f in s.get("facts", [])))
        before = service(room, "web")["requests"]
        room.kill()
        room.up()
        until_ready(room, "web")
    assert set(statuses) == {200}, "the front went on"
    assert service(room, "web")["requests"] >= before * 0.5
    assert room.jobs()["web"]["starts"] == 1


def test_training_is_held_back_under_pressure_and_explain_says_so(room: Room) -> None:
    port = free_port()
    # All cores are one device, so that the jobs really disturb each other.
    room.up("--policy", "mps", "--devices", "1")
    serve(room, "web", port, work_s=0.01, slo="40ms")
    room.python("train", TRAINING.replace("STEPS", "1000000"), sdk=True, share=0)
    room.submit("opaque", ["sh", "-c", "while :; do :; done"], share=0)
    until_ready(room, "web")
    with asking(port, 0.001):
        room.until(lambda: room.jobs()["train"]["pace"] < 1)
        room.until(lambda: room.jobs()["opaque"]["pace"] < 1)
    for job in ("train", "opaque"):
        assert "held back: job web, a service" in room.ok("explain", job)
    room.until(lambda: all(room.jobs()[j]["pace"] == 1 for j in ("train", "opaque")), 15)
    assert "runs at full pace again" in room.ok("explain", "train")
    assert room.replays()


def test_a_front_that_ends_by_itself_is_a_failure(room: Room) -> None:
    port = free_port()
    room.up("--policy", "fifo", "--backoff", "0.1")
    room.submit("broken", ["false"], **fields(port), retries=0)
    room.until_ended("broken", within_s=90)
    assert room.state_of("broken").startswith("failed")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"service": None}, "needs this section"),
        ({"class": "guaranteed"}, "only for a job of `class: service`"),
        ({"steps": 5}, "a service has no steps"),
        ({"deadline": "2h"}, "a service has no steps"),
    ],
)
def test_mistakes_are_named(room: Room, change: dict[str, Any], why: str) -> None:
    job = {"command": "true", **fields(8000), **change}
    file = room.job("bad", json.dumps({k: v for k, v in job.items() if v is not None}))
    done = room.tool("submit", file)
    assert done.returncode == 2 and why in done.stderr


def test_what_cannot_serve_is_refused(room: Room) -> None:
    port = free_port()
    room.up("--policy", "srtf")
    file = room.job("web", json.dumps({"command": "true", **fields(port)}))
    refused = room.tool("submit", file).stderr
    assert "would take its devices away" in refused and "gandiva, fifo" in refused


def test_two_services_do_not_share_a_port(room: Room) -> None:
    port = free_port()
    room.up("--policy", "fifo")
    serve(room, "one", port)
    file = room.job("two", json.dumps({"command": "true", **fields(port)}))
    assert "another service takes requests at" in room.tool("submit", file).stderr


def test_a_mix_ends_with_its_training(room: Room) -> None:
    port = free_port()
    web = {"name": "web", "command": ["python3", "-c", SERVER.replace("WORK", "0.001")]}
    train = {"name": "train", "command": "sleep 4"}
    mix = {"policy": "mps", "devices": 2, "jobs": [{**web, **fields(port)}, train]}
    file = room.job("mix", json.dumps(mix))
    with asking(port, 0.01):
        began = time.monotonic()
        (run,) = json.loads(room.ok("run", file, "-o", "json"))
    assert time.monotonic() - began < 30
    states = {j["name"]: j["state"] for j in run["jobs"]}
    assert states == {"web": "cancelled", "train": "finished"}
    (figures,) = run["services"]
    assert figures["name"] == "web" and figures["requests"] > 0 and figures["slo_ms"] == 50
    assert 0 <= figures["over_share"] <= 1 and figures["p99_ms"] > 0
