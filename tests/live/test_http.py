"""The requests of the socket over HTTPS."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import ssl
import subprocess
import threading
import time
from typing import Any

import pytest
from conftest import BINARY, Room


class Served(Room):
    """A daemon that serves HTTPS."""

    server: str
    port: int
    token: str

    def serve(self, *flags: str) -> None:
        self.up("--policy", "fifo", "--devices", "2", "--http", "127.0.0.1:0", *flags)
        self.server = json.loads(self.ok("describe", "-o", "json"))["http"]
        self.port = int(self.server.split("#")[0].rsplit(":", 1)[1])
        self.token = (self.state / "http-token").read_text().strip()

    def connect(self) -> socket.socket:
        """An encrypted connection, to the daemon whose certificate is in the state."""
        context = ssl.create_default_context(cafile=str(self.state / "http-cert.pem"))
        peer = socket.create_connection(("127.0.0.1", self.port), 15)
        return context.wrap_socket(peer, server_hostname="127.0.0.1")

    def post(
        self, path: str, body: Any = None, method: str = "POST", **headers: str
    ) -> tuple[int, Any]:
        context = ssl.create_default_context(cafile=str(self.state / "http-cert.pem"))
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=10, context=context
        )
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
        with self.connect() as peer:
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
    # Nothing but the address, which has the fingerprint, and the token: another folder, no state.
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
    assert wrong.returncode == 2 and "token is missing, wrong" in wrong.stderr
    assert far("cancel", "far", *token).returncode == 0
    assert far("down", "--stop-jobs", *token).returncode == 0
    assert served.daemon is not None and served.daemon.wait(10) == 0
    gone = far("ps", *token)
    assert gone.returncode == 2 and "no daemon answers at https://" in gone.stderr


def test_wrong_requests_are_refused_with_a_reason(served: Served) -> None:
    unauthorized = "token is missing, wrong, expired or revoked"
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


def test_other_machines_get_only_encrypted_connections(room: Room) -> None:
    refused = room.tool("up", "--http", "0.0.0.0:0", "--http-plain")
    assert refused.returncode == 2
    assert "can be reached from other machines" in refused.stderr
    room.up("--http", "0.0.0.0:0")
    assert json.loads(room.ok("describe", "-o", "json"))["http"].startswith("https://0.0.0.0:")


def test_plain_http_is_for_programs_on_this_machine(room: Room) -> None:
    room.up("--http", "127.0.0.1:0", "--http-plain")
    server = json.loads(room.ok("describe", "-o", "json"))["http"]
    token = (room.state / "http-token").read_text().strip()
    connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=10)
    connection.request("POST", "/v1/ps", b"", {"Authorization": f"Bearer {token}"})
    assert connection.getresponse().status == 200
    refused = room.tool("ps", "--server", server)
    assert refused.returncode == 2 and "would get the token" in refused.stderr


def test_a_token_is_sent_to_the_daemon_or_to_nobody(served: Served) -> None:
    """Somebody else takes the port of a daemon that is down."""
    heard: list[bytes] = []

    def listen(at: socket.socket, context: ssl.SSLContext | None) -> None:
        peer, _ = at.accept()
        peer.settimeout(5)
        with contextlib.suppress(OSError):
            if context:
                peer = context.wrap_socket(peer, server_side=True)
            while part := peer.recv(65536):
                heard.append(part)
        peer.close()

    served.ok("down")
    other = Served()
    other.up("--http", "127.0.0.1:0")
    other.ok("down")
    strange = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    strange.load_cert_chain(other.state / "http-cert.pem", other.state / "http-key.pem")
    other.close()
    for context in (None, strange):
        heard.clear()
        with socket.create_server(("127.0.0.1", 0)) as at:
            taken = f"https://127.0.0.1:{at.getsockname()[1]}#{served.server.split('#')[1]}"
            thread = threading.Thread(target=listen, args=(at, context))
            thread.start()
            env = {**served.env, "ROOMMATE_HTTP_TOKEN": served.token}
            done = subprocess.Popen(
                [BINARY, "ps", "--server", taken], env=env, stderr=subprocess.PIPE, text=True
            )
            if context:
                assert "another certificate" in done.communicate()[1]
            else:
                # It waits for an encrypted answer.
                served.until(lambda: heard)
                time.sleep(0.5)
                done.kill()
                done.communicate()
            thread.join()
        assert served.token.encode() not in b"".join(heard)


def test_peers_that_drip_do_not_keep_others_out(served: Served) -> None:
    """64 peers without a token, each with a byte every 100 ms after its answer."""
    peers = [served.connect() for _ in range(64)]
    for peer in peers:
        peer.sendall(b"POST /v1/ps HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    end = time.monotonic() + 20
    while time.monotonic() < end:
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall(b"x")
        time.sleep(0.1)
        if served.tool("ps", "--server", served.server).returncode == 0:
            break
    assert time.monotonic() < end - 10, "others have to wait for those who drip"
    for peer in peers:
        peer.close()


def test_tokens_have_a_scope_and_can_be_revoked(served: Served) -> None:
    served.submit("job", "sleep 1000")
    created = served.tool("token", "create", "--scope", "read", "--expires", "1h", "--name", "ci")
    reader = created.stdout.strip()
    assert re.fullmatch("[0-9a-f]{64}", reader) and "not shown again" in created.stderr
    assert reader not in (served.state / "tokens").read_text()
    assert (served.state / "tokens").stat().st_mode & 0o777 == 0o600
    [listed] = json.loads(served.ok("token", "list", "-o", "json"))
    assert listed["name"] == "ci" and listed["scope"] == "read"
    bearer = f"Bearer {reader}"
    assert served.post("/v1/ps", Authorization=bearer)[0] == 200
    for verb, body in (("cancel", {"job": "job"}), ("down", {"stop_jobs": False}), ("token_list", {})):
        status, reply = served.post(f"/v1/{verb}", body, Authorization=bearer)
        assert status == 403 and "scope `read`" in reply["error"]["what"], reply
    operator = served.ok("token", "create", "--scope", "operate").strip()
    status, _ = served.post("/v1/suspend", {"job": "job"}, Authorization=f"Bearer {operator}")
    assert status == 200
    served.ok("token", "revoke", listed["id"])
    assert served.post("/v1/ps", Authorization=bearer)[0] == 401
    assert served.tool("token", "revoke", listed["id"]).returncode == 2
    # Also after a restart.
    served.ok("down")
    served.serve()
    assert served.post("/v1/ps", Authorization=bearer)[0] == 401
    assert served.post("/v1/ps", Authorization=f"Bearer {operator}")[0] == 200
    assert served.tool("token", "create", "--expires", "soon").returncode == 2
