"""The requests of the socket over loopback HTTP."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
from typing import Any

import pytest
from conftest import BINARY, Room


class Served(Room):
    """A daemon that serves HTTP."""

    server: str
    port: int
    token: str

    def serve(self) -> None:
        self.up("--policy", "fifo", "--devices", "2", "--http", "127.0.0.1:0")
        self.server = json.loads(self.ok("describe", "-o", "json"))["http"]
        self.port = int(self.server.rsplit(":", 1)[1])
        self.token = (self.state / "http-token").read_text().strip()

    def post(
        self, path: str, body: Any = None, method: str = "POST", **headers: str
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        headers = {
            "Authorization": f"Bearer {self.token}",
            **{k.replace("_", "-"): v for k, v in headers.items()},
        }
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if body is None:
            data = b""
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def raw(self, data: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), 15) as peer:
            peer.sendall(data)
            got = b""
            while part := peer.recv(65536):
                got += part
            return got


@pytest.fixture
def served() -> Any:
    it = Served()
    it.serve()
    yield it
    it.close()


def test_verbs_are_those_of_the_socket(served: Served) -> None:
    served.submit("printer", "echo one; echo two; sleep 1000")
    status, jobs = served.post("/v1/ps")
    assert status == 200 and [j["name"] for j in jobs["jobs"]] == ["printer"]
    status, described = served.post("/v1/describe", {"job": "printer"})
    assert status == 200 and described["job"]["class"] == "guaranteed"
    job = {"job": "printer"}
    served.until(lambda: served.post("/v1/logs", job)[1]["piece"]["bytes"] == "one\ntwo\n")
    assert served.post("/v1/suspend", job) == (200, {"done": {"what": "suspended printer"}})
    assert served.state_of("printer") == "suspended"
    status, reply = served.post("/v1/cancel", {"job": "painter"})
    assert status == 422 and reply["error"]["hint"] == 'did you mean "printer"?'


def test_every_client_verb_works_with_a_server(served: Served) -> None:
    token = ["--token-file", str(served.state / "http-token")]
    # Nothing but the address and the token: another folder, no state.
    elsewhere = str(served.folder / "elsewhere")
    env = {**os.environ, "ROOMMATE_STATE": elsewhere, "ROOMMATE_SERVER": served.server}

    def far(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([BINARY, *words], env={**env, **more}, capture_output=True, text=True)

    job = served.job("far", json.dumps({"command": "echo hello; sleep 1000"}))
    assert far("submit", job, *token).stdout == "far\n"
    served.until(lambda: far("logs", "far", *token).stdout == "hello\n")
    for verb, state in (("suspend", "suspended"), ("resume", "running")):
        assert far(verb, "far", *token).returncode == 0
        assert served.state_of("far") == state
    assert "far" in far("ps", *token).stdout and "far" in far("top", *token).stdout
    assert "submitted" in far("events", *token).stdout
    assert "started on" in far("explain", "far", *token).stdout
    assert far("describe", ROOMMATE_HTTP_TOKEN=served.token).returncode == 0
    without = far("ps")
    assert without.returncode == 2 and "could not read the token" in without.stderr
    wrong = far("ps", ROOMMATE_HTTP_TOKEN="wrong")
    assert wrong.returncode == 2 and "token is missing or wrong" in wrong.stderr
    assert far("cancel", "far", *token).returncode == 0
    assert far("down", "--stop-jobs", *token).returncode == 0
    assert served.daemon is not None and served.daemon.wait(10) == 0
    gone = far("ps", *token)
    assert gone.returncode == 2 and "no daemon answers at http://" in gone.stderr


def test_wrong_requests_are_refused_with_a_reason(served: Served) -> None:
    unauthorized = "token is missing or wrong"
    cases: list[tuple[int, str, tuple[int, Any]]] = [
        (401, unauthorized, served.post("/v1/ps", Authorization="Bearer nonsense")),
        (401, unauthorized, served.post("/v1/ps", Authorization=f"Basic {served.token}")),
        (401, unauthorized, served.post("/v1/ps", Authorization=f"Bearer {served.token[:-1]}")),
        (401, unauthorized, served.post("/nothing", Authorization="")),
        (421, "Host", served.post("/v1/ps", Host=f"evil.example:{served.port}")),
        (421, "Host", served.post("/v1/ps", Host="127.0.0.1:1")),
        (404, "no such path", served.post("/v1/nothing")),
        (404, "no such path", served.post("/")),
        (405, "method GET is not supported", served.post("/v1/ps", method="GET")),
        (400, "is not valid", served.post("/v1/describe", {"jab": "x"})),
        (400, "is not valid", served.post("/v1/describe", b"{")),
        (413, "are accepted", served.post("/v1/ps", b"", Content_Length=str(9 << 20))),
    ]
    for status, what, (got, reply) in cases:
        assert got == status and what in reply["error"]["what"], (status, got, reply)
    host = f"Host: 127.0.0.1:{served.port}\r\nAuthorization: Bearer {served.token}\r\n".encode()
    post = b"POST /v1/ps HTTP/1.1\r\n"
    for status, data in [
        (b"400", b"nonsense\r\n\r\n"),
        (b"400", post + host + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n"),
        (b"400", post + host + b"Content-Length: -1\r\n\r\n"),
        (b"411", post + host + b"\r\n"),
        (b"411", post + host + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        (b"431", post + b"X: " + b"x" * (20 << 10) + b"\r\n"),
    ]:
        answer = served.raw(data)
        assert answer.startswith(b"HTTP/1.1 " + status), (status, answer)
    assert served.post("/v1/ps")[0] == 200


def test_a_large_request_is_accepted_beside_slow_clients(served: Served) -> None:
    slow = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(20)]
    for peer in slow:
        peer.sendall(b"POST /v1/ps HT")
    file = {"name": "large", "command": "true", "workdir": str(served.folder)}
    env = {f"LARGE{i}": "x" * 100_000 for i in range(10)} | {"PATH": os.environ["PATH"]}
    submit = {"file": file, "env": env, "key": "k"}
    accepted = {"submitted": {"name": "large"}}
    assert served.post("/v1/submit", submit, Expect="100-continue")[1] == accepted
    assert served.post("/v1/submit", submit)[1] == accepted
    assert len(served.jobs()) == 1
    for peer in slow:
        peer.close()


def test_only_the_owner_can_read_the_token(served: Served) -> None:
    assert (served.state / "http-token").stat().st_mode & 0o777 == 0o600
    assert re.fullmatch("[0-9a-f]{64}", served.token)
    was = served.token
    served.ok("down")
    assert served.daemon is not None and served.daemon.stderr is not None
    printed = served.daemon.stderr.read()
    assert str(served.state / "http-token") in printed and served.server in printed
    assert was not in printed
    served.daemon.stderr.close()
    served.serve()
    assert served.token == was


def test_other_machines_are_admitted_only_on_request(room: Room) -> None:
    refused = room.tool("up", "--http", "0.0.0.0:0")
    assert refused.returncode == 2
    assert "can be reached from other machines" in refused.stderr and "ssh -L" in refused.stderr
    room.up("--http", "0.0.0.0:0", "--http-beyond-loopback")
    assert json.loads(room.ok("describe", "-o", "json"))["http"].startswith("http://0.0.0.0:")
