#!/usr/bin/env python3
"""A seeded fuzzer of a real daemon: both of its sockets, HTTP and job files.

usage: fuzz.py [--seed N] [--requests N] [--seconds S] [--policy P,...] [--kill-every S]
               [--crew KIND,...]

Golden messages of tenants (python/tests/protocol.jsonl) and requests of users are changed at the
level of bytes, of tokens and of structure, and sent: one by one, several at once, in halves, slowly.
The daemon is killed every few seconds. After every restart it must come up, have every job that it
acknowledged and that did not end, answer within seconds and stay small. Each policy has its turn,
with a state of its own.

What a worker sends follows from the seed and from what the daemon answered. After a failure the
seed, the end of the daemon's output and the last messages of every worker are printed. The program
is target/release/roommate, or $ROOMMATE_BIN. Exit status: 0 passed, 1 failed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import multiprocessing as mp
import os
import random
import re
import resource
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from queue import Empty
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from conftest import ROOT, Room
from peers import plain_http, rss_mib

POLICIES = ["gandiva", "antman", "muri-s", "iadeep", "fifo"]
ANSWER_S = 10.0
"""Longest wait for an answer while the daemon runs; many connections wait beside it."""
UP_S = 30.0
"""Longest start of a daemon on a busy machine."""
MOST_MIB = 300.0
VICTIMS = [f"v{i}" for i in range(6)]
"""Names of jobs that messages speak of. Other jobs must never be lost."""
ALIVE = 150
"""Jobs beyond which the oldest are cancelled."""

# --- Mutation

NUMBERS = [
    "0", "-0.0", "-1", "1", "2", "0.5", "1e308", "-1e308", "1e-320", "5e-324", "1e400", "-1e400", "1e15",
    "9.99e14", "1e300", "0.1e1", "1E5", "9223372036854775807", "9223372036854775808",
    "-9223372036854775808", "18446744073709551615", "18446744073709551616", "4294967295", "4294967296",
    "65535", "65536", "2147483648", "1e-7", "0.001", "00", "+1", ".5", "1.", "NaN", "Infinity", "null",
    "true", "false",
]  # fmt: skip
TEXTS = [
    "", " ", "a", "v0", "v1", "../x", "/", ".", "a/b", "x" * 300, "y" * 70_000, "\0", "a\0b", "\x1b[2J",
    "\n", "a\nb", "\r", "\u202e", "é", "\U0001f600", "\ud800", "load", "sync", "guaranteed", "0", "90s",
    "1e308d", "99999999999999h", "=", "A=B", "%s%n", "$(true)", "'", '"', "\\", "{}", "[]", "null",
]  # fmt: skip
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null|[\[\]{}:,]')
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63),
    0.0, -0.0, 1e308, -1e308, 1e-320, 5e-324, 1e15, 9.9e14, 0.5, 1.5, [], {}, [[]], [0], ["a"], {"a": 0},
    *TEXTS,
]  # fmt: skip


def nested(rng: random.Random) -> str:
    depth = rng.choice([2, 50, 127, 128, 129, 1000, 20_000])
    left, right = rng.choice([("[", "]"), ('{"a":', "}"), ('{"hello":', "}")])
    return left * depth + "0" + right * (depth if rng.random() < 0.7 else rng.randrange(depth + 1))


def by_bytes(rng: random.Random, line: bytes) -> bytes:
    data = bytearray(line)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = bytes([rng.choice([0, 27, 10, 13, 34, 92, 0x80, 0xFF, 0xC3, 0xED])])
        elif kind == 2:
            del data[at : at + rng.choice([1, 1, 3, 20])]
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            end = min(len(data), at + rng.randrange(1, 30))
            data[at:at] = data[at:end]
        else:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 6)))
    return bytes(data)


def by_tokens(rng: random.Random, line: bytes) -> bytes:
    text = line.decode(errors="replace")
    found = list(TOKEN.finditer(text))
    if not found:
        return by_bytes(rng, line)
    for _ in range(rng.choice([1, 1, 2, 3])):
        token = rng.choice(found)
        word = token.group()
        if word[0].isdigit() or word[0] == "-":
            new = rng.choice(NUMBERS)
        elif word[0] == '"':
            new = json.dumps(rng.choice(TEXTS)) if rng.random() < 0.8 else rng.choice(NUMBERS)
        else:
            new = rng.choice(["", ",", ":", "{", "}", "[", "]", "null", nested(rng)])
        text = text[: token.start()] + new + text[token.end() :]
        found = list(TOKEN.finditer(text)) if len(text) < 5000 else []
        if not found:
            break
    return text.encode(errors="surrogatepass")


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every member of every object and list within, as its holder and its key."""
    keys: Any = ()
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = range(len(value))
    found = [(value, key) for key in keys]
    return found + [place for key in keys for place in places(value[key])]


def odd_value(rng: random.Random) -> Any:
    value = rng.choice(VALUES)
    return copy.deepcopy(value) if isinstance(value, (list, dict)) else value


def by_structure(rng: random.Random, value: Any) -> bytes:
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        found = places(value)
        if not found:
            break
        holder, key = rng.choice(found)
        kind = rng.randrange(8)
        if kind < 4:
            holder[key] = odd_value(rng)
        elif kind == 4:
            del holder[key]
        elif kind == 5 and isinstance(holder, dict):
            holder[rng.choice(["x", "name", "job", "steps", "done", ""])] = odd_value(rng)
        elif kind == 6:
            other, other_key = rng.choice(found)
            holder[key] = json.loads(json.dumps(other[other_key]))
        else:
            text = json.dumps(holder[key])
            holder[key] = [json.loads(text) for _ in range(rng.choice([1, 2, 50]))]
    text = json.dumps(value, ensure_ascii=rng.random() < 0.9)
    if rng.random() < 0.05:
        # The same key twice, which an object here cannot hold.
        pair = re.search(r'"[a-z_]+": ?[^,{}\[\]]+', text)
        text = text.replace(pair.group(), f"{pair.group()},{pair.group()}", 1) if pair else text
    return text.encode(errors="surrogatepass")


def mutated(rng: random.Random, value: Any) -> bytes:
    kind = rng.random()
    if kind < 0.5:
        return by_structure(rng, value)
    line = json.dumps(value).encode()
    if kind < 0.8:
        return by_tokens(rng, line)
    return by_bytes(rng, line) if kind < 0.99 else nested(rng).encode()


# --- What is sent


def golden() -> list[dict[str, Any]]:
    """Messages of tenants other than the hello."""
    lines = (ROOT / "python/tests/protocol.jsonl").read_text().splitlines()
    kinds = {"stepped", "tuned", "suspended", "resumed", "checkpointed", "enter", "leave"}
    return [m for line in lines if kinds & (m := json.loads(line)).keys()]


def job_files(folder: str) -> list[dict[str, Any]]:
    """Job files with every field, of short and of long jobs."""
    usual: dict[str, Any] = {"command": ["sleep", "300"], "workdir": folder}
    every = {
        "name": "v0",
        "command": ["sleep", "0.05"],
        "workdir": folder,
        "env": {"OMP_NUM_THREADS": "1"},
        "devices": 1,
        "share": 0.5,
        "batch": {"size": 64, "min": 16, "max": 512},
        "class": "guaranteed",
        "deadline": "2h",
        "team": "vision",
        "retries": {"user": 0, "infra": 3, "unknown": 1},
        "checkpoint": f"{folder}/saved",
        "steps": 10000.0,
        "step_s": 0.05,
        "stages_s": [0.01, 0.01, 0.03, 0.0],
        "profile": "resnet50-64",
        "sdk": True,
        "gpu_mib": 8192,
        "memory_mib": 64,
        "cpus": 1.0,
    }
    return [
        usual,
        every,
        {**usual, "command": "sleep 300", "class": "best-effort", "share": 0.0},
        {**usual, "steps": 1000.0, "step_s": 0.01, "stages_s": [0.001, 0.0, 0.009, 0.0]},
        {**usual, "devices": 2, "team": "a", "retries": 2},
        {**usual, "command": "true", "deadline": 90, "batch": {"size": 8, "min": 8, "max": 8}},
    ]


def requests_about(rng: random.Random, folder: str) -> dict[str, Any]:
    """A request of a user, whole."""
    job = rng.choice([*VICTIMS, "v0-2", "nobody"])
    place = {"part": rng.randrange(3), "at": rng.choice([0, 10, 2**63, 2**64 - 1])}
    dice = rng.random()
    if dice < 0.35:
        env = {"PATH": os.environ["PATH"]}
        file = rng.choice(job_files(folder))
        fields = {"file": file, "env": env, "key": f"{rng.getrandbits(60):x}"}
        return {"submit": {**fields, "dry_run": True} if rng.random() < 0.6 else fields}
    choices: list[dict[str, Any]] = [
        {"describe": {"job": job}},
        {"cancel": {"job": job}},
        {"suspend": {"job": job}},
        {"resume": {"job": job}},
        {"resize": {"job": job, "batch": 32}},
        {"resize": {"job": job, "share": 0.25}},
        {"logs": {"job": job, "from": place}},
        {"logs": {"job": job}},
        {"machine": {}},
        {"journal": {"from": place}},
    ]
    if dice < 0.37:
        choices = [{"ps": {}}]
    if dice > 0.9998:
        choices = [{"down": {"stop_jobs": False}}]
    return rng.choice(choices)


# --- Workers


class Worker(ABC):
    """Sends messages of one kind until it is told to end."""

    def __init__(self, seed: str, state: Path, shared: Shared, count: Synchronized[int]) -> None:
        self.rng, self.state, self.shared, self.count = random.Random(seed), state, shared, count
        self.name = seed.replace("/", "-")
        self.last: deque[bytes] = deque(maxlen=60)
        self.half: deque[tuple[socket.socket, bytes]] = deque()

    def run(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            while not self.shared.ends.is_set():
                try:
                    self.some()
                except TimeoutError:
                    if self.running():
                        self.shared.wrong.put(f"no answer within {ANSWER_S} s: {self.last[-1]!r:.300}")
                        break
                except OSError:
                    # The daemon was killed, or hung up.
                    if not self.running():
                        time.sleep(0.02)
        shown = [f"{len(line):7} {line[:300]!r}" for line in self.last]
        (self.state.parent / f"last-{self.name}").write_text("\n".join(shown))

    def running(self) -> bool:
        return self.shared.up.is_set()

    @abstractmethod
    def some(self) -> None:
        """Sends a few messages and reads what is answered."""

    def connect(self, name: str) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(ANSWER_S)
        peer.connect(str(self.state / name))
        return peer

    def send(self, peer: socket.socket, data: bytes) -> None:
        """Sends all of it: mostly at once, sometimes in pieces with pauses."""
        if self.rng.random() < 0.995:
            peer.sendall(data)
            return
        cuts = sorted(self.rng.randrange(len(data) + 1) for _ in range(3))
        for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True):
            peer.sendall(data[a:b])
            time.sleep(0.005)

    def keep_half(self, peer: socket.socket, rest: bytes) -> None:
        """Keeps a connection whose line is not complete; completes or drops an old one."""
        self.half.append((peer, rest))
        if len(self.half) > 20:
            peer, rest = self.half.popleft()
            with contextlib.suppress(OSError):
                if self.rng.random() < 0.5:
                    peer.sendall(rest)
            peer.close()


class Users(Worker):
    """Requests at the control socket, a connection each, several at a time."""

    def some(self) -> None:
        rng, folder = self.rng, str(self.state.parent / "work")
        peers: list[socket.socket] = []
        lines: list[bytes] = []
        life = self.shared.lives.value
        try:
            for _ in range(rng.randrange(1, 8)):
                request = requests_about(rng, folder)
                line = json.dumps(request).encode() if rng.random() < 0.25 else mutated(rng, request)
                if rng.random() < 0.01:
                    line += b"\n" + json.dumps(requests_about(rng, folder)).encode()
                self.last.append(line)
                peer = self.connect("control.sock")
                if rng.random() < 0.005:
                    cut = rng.randrange(len(line) + 1)
                    peer.sendall(line[:cut])
                    self.keep_half(peer, line[cut:] + b"\n")
                    continue
                peers.append(peer)
                lines.append(line)
                with contextlib.suppress(BrokenPipeError):
                    self.send(peer, line + b"\n")
            for peer, line in zip(peers, lines, strict=True):
                if rng.random() > 0.002:  # some never read
                    self.answered(line, read_all(peer), life)
                self.count.value += 1
        finally:
            for peer in peers:
                peer.close()

    def answered(self, line: bytes, answer: bytes, life: int) -> None:
        if not answer:
            return
        if not answer.endswith(b"\n"):
            # A daemon that was killed, or told to end, did not finish it.
            end = time.monotonic() + 2.0
            while self.shared.lives.value == life and time.monotonic() < end:
                time.sleep(0.05)
            if self.shared.lives.value != life:
                return
        try:
            reply = json.loads(answer)
        except ValueError:
            said = f"{answer[:200]!r}...{answer[-50:]!r} ({len(answer):,} bytes)"
            self.shared.wrong.put(f"an answer is not JSON: {said} to {line!r:.300}")
            return
        if "submitted" in reply:
            self.shared.accepted.put(reply["submitted"]["name"])


def read_all(peer: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := peer.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


class Tenants(Worker):
    """Messages in the name of running jobs, many to a connection."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.golden = golden()

    def token(self) -> str:
        tokens = list((self.state.parent / "work").glob("token-*"))
        if not tokens or self.rng.random() < 0.02:
            return self.rng.choice(["", "0.1.0", "x" * 1000, "0.0.", "4294967295.1.a"])
        with contextlib.suppress(OSError):
            return self.rng.choice(tokens).read_text().strip()
        return ""

    def some(self) -> None:
        rng = self.rng
        hello: dict[str, Any] = {"version": 1, "token": self.token(), "pid": os.getpid()}
        if rng.random() < 0.3:
            hello["batch"] = {"size": 64, "min": 16, "max": 512}
        lines = [json.dumps({"hello": hello}).encode()]
        if rng.random() < 0.05:
            lines = [mutated(rng, {"hello": hello})]
        whole = rng.choice([10, 100, 400])
        for n in range(whole):
            message = rng.choice(self.golden)
            # Most change a number to one that is accepted: what is refused ends the connection.
            if rng.random() < 0.9 and n < whole - 1:
                lines.append(json.dumps(self.odd(message)).encode())
            elif rng.random() < 0.1 or n == whole - 1:
                lines.append(mutated(rng, message))
        data = b"\n".join(lines) + b"\n"
        self.last.extend(lines[-15:])
        peer = self.connect("tenant.sock")
        if rng.random() < 0.005:
            cut = rng.randrange(len(data))
            peer.sendall(data[:cut])
            self.keep_half(peer, data[cut:])
            return
        with peer:
            # The last line is nonsense: the refusal says how many lines were read.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.send(peer, data + b"end\n")
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while b'"refused"' not in answer[-2000:] or not answer.endswith(b"\n"):
                    part = peer.recv(65536)
                    if not part:
                        break
                    answer += part
            read = re.search(rb'"refused":{"reason":"line (\d+)', answer)
            self.count.value += int(read.group(1)) if read else 1

    def odd(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with other numbers, which are mostly within what is accepted."""
        rng = self.rng
        (kind, fields), odd = next(iter(message.items())), {}
        for name, value in fields.items():
            if isinstance(value, float):
                value = rng.choice([value, 0.0, 1.0, 1e-9, 1e-300, 1e6, 9e14, value * rng.random()])
            elif name == "pace_permille":
                value = rng.choice([0, 1, 500, 999, 1000])
            elif isinstance(value, int):
                value = rng.choice([value, 0, 1, 2, 1000, 2**16, 2**32 - 1, rng.randrange(1 << 20)])
            odd[name] = value
        return {kind: odd}


class Http(Worker):
    """Requests over HTTP, with the token and without, whole and broken."""

    def some(self) -> None:
        rng = self.rng
        port = int((self.state.parent / "port").read_text() or 0)
        token = (self.state / "http-token").read_text().strip()
        request = requests_about(rng, str(self.state.parent / "work"))
        (verb, fields) = next(iter(request.items()))
        body = json.dumps(fields).encode() if rng.random() < 0.3 else mutated(rng, fields)
        length = str(len(body)) if rng.random() < 0.98 else rng.choice(NUMBERS)
        head = (
            f"POST /v1/{verb} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Length: {length}\r\n\r\n"
        ).encode()
        if rng.random() < 0.3:
            head = by_bytes(rng, head)
        self.last.append(head + body)
        with socket.create_connection(("127.0.0.1", port), ANSWER_S + 5) as peer:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.send(peer, head + body)
                peer.shutdown(socket.SHUT_WR)
            answer = read_all(peer)
            if verb == "submit" and (found := re.search(rb'{"submitted":{"name":"([^"]+)"', answer)):
                self.shared.accepted.put(found.group(1).decode())
            self.count.value += 1


# --- The run


class Shared:
    """What workers and the run tell each other."""

    def __init__(self) -> None:
        self.ends: Event = mp.Event()
        self.up: Event = mp.Event()
        # Counts the daemons that ended.
        self.lives: Synchronized[int] = mp.Value("q", 0)
        self.accepted: mp.Queue[str] = mp.Queue()
        self.wrong: mp.Queue[str] = mp.Queue()


def limited() -> None:
    """A daemon that grows without end ends, before the machine does."""
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))


class Failure(Exception):
    """What must not happen happened."""


KINDS: dict[str, type[Worker]] = {"tenants": Tenants, "users": Users, "http": Http}
CREW = ["tenants", "users", "tenants", "users", "http"]


class Run:
    """One policy, one state, until enough was sent."""

    def __init__(self, seed: int, policy: str, kill_every_s: float, crew: list[str]) -> None:
        self.room, self.policy, self.kill_every_s = Room(), policy, kill_every_s
        (self.room.folder / "work").mkdir()
        self.rng, self.shared = random.Random(f"{seed}/{policy}/run"), Shared()
        self.alive: dict[str, None] = {}
        """Acknowledged jobs that did not end as far as known, oldest first."""
        self.acknowledged = self.kills = 0
        self.slowest_s = self.slowest_up_s = self.most_mib = 0.0
        self.counts = [mp.Value("q", 0, lock=False) for _ in crew]
        self.crew = []
        for i, (kind, count) in enumerate(zip(crew, self.counts, strict=True)):
            worker = KINDS[kind](f"{seed}/{policy}/{i}-{kind}", self.room.state, self.shared, count)
            self.crew.append(mp.Process(target=worker.run, daemon=True))

    def sent(self) -> int:
        return sum(count.value for count in self.counts)

    def up(self, *flags: str) -> None:
        said = (self.room.folder / "said").open("ab")
        began = time.monotonic()
        try:
            self.room.up(*flags, *plain_http(), stderr=said, preexec_fn=limited)
        except AssertionError as failed:
            raise Failure(f"does not come up: {failed} {self.said()}") from failed
        finally:
            said.close()
        took = time.monotonic() - began
        self.slowest_up_s = max(self.slowest_up_s, took)
        if took > UP_S:
            raise Failure(f"came up after {took:.1f} s")
        http = json.loads(self.room.ok("describe", "-o", "json"))["http"]
        (self.room.folder / "port").write_text(http.rsplit(":", 1)[1])
        self.shared.up.set()

    def said(self) -> str:
        return (self.room.folder / "said").read_text(errors="replace")[-2000:]

    def begin(self) -> None:
        policy = ["--policy", self.policy]
        self.up(*policy, "--devices", "2", "--backoff", "0.1", "--journal-mib", "0.5")
        for process in self.crew:
            process.start()

    def restart(self) -> None:
        daemon = self.room.daemon
        assert daemon is not None
        self.shared.lives.value += 1
        if daemon.poll() is None:
            self.shared.up.clear()
            self.room.kill()
            self.kills += 1
        # Whatever was answered before is in the queue after a moment.
        time.sleep(0.1)
        self.hear_accepted()
        must = list(self.alive)
        self.up()
        there = self.listed()
        lost = [name for name in must if name not in there]
        if lost:
            raise Failure(f"{len(lost)} of {len(must)} acknowledged jobs are lost: {lost[:5]}")

    def hear_accepted(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self.alive[self.shared.accepted.get_nowait()] = None
                self.acknowledged += 1

    def listed(self) -> dict[str, Any]:
        """All jobs; those that ended are no longer awaited."""
        began = time.monotonic()
        reply = self.ask({"ps": {}})
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        there = {job["name"]: job for job in reply["jobs"]}
        for name, job in there.items():
            if job["ended"]:
                self.alive.pop(name, None)
        return there

    def ask(self, request: dict[str, Any]) -> Any:
        """Refused for want of room means later."""
        end = time.monotonic() + ANSWER_S
        while True:
            with contextlib.suppress(OSError, ValueError):
                peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                peer.settimeout(ANSWER_S)
                with peer:
                    peer.connect(str(self.room.state / "control.sock"))
                    peer.sendall(json.dumps(request).encode() + b"\n")
                    reply = json.loads(read_all(peer))
                    if "jobs" in reply or "ps" not in request:
                        return reply
            self.check_running()
            if time.monotonic() > end:
                raise Failure(f"no answer to {json.dumps(request)[:200]} within {ANSWER_S} s")
            time.sleep(0.1)

    def check_running(self) -> None:
        assert self.room.daemon is not None
        code = self.room.daemon.poll()
        if code == 0:  # a worker said `down`
            self.shared.up.clear()
            self.restart()
        elif code is not None:
            raise Failure(f"the daemon ended with {code}: {self.said()}")
        with contextlib.suppress(Empty):
            raise Failure(self.shared.wrong.get_nowait())

    def look(self) -> None:
        """Between two kills: bounded jobs and memory, victims that run."""
        self.check_running()
        self.hear_accepted()
        there = self.listed()
        for name in list(self.alive)[: min(20, max(0, len(self.alive) - ALIVE))]:
            del self.alive[name]
            self.ask({"cancel": {"job": name}})
        work = self.room.folder / "work"
        for name in VICTIMS:
            if name in there and not there[name]["ended"]:
                continue
            (work / f"token-{name}").unlink(missing_ok=True)
            command = 'echo "$ROOMMATE_TOKEN" > "token-$ROOMMATE_JOB.new"; '
            command += 'mv "token-$ROOMMATE_JOB.new" "token-$ROOMMATE_JOB"; sleep 300'
            file = {"name": name, "command": command, "workdir": str(work), "share": 0.1}
            env = {"PATH": os.environ["PATH"]}
            key = f"{name}-{self.rng.getrandbits(60):x}"
            self.ask({"submit": {"file": file, "env": env, "key": key}})
        mib = 0.0
        with contextlib.suppress(OSError):  # it may just have ended
            mib = rss_mib(self.room.daemon.pid) if self.room.daemon else 0.0
        self.most_mib = max(self.most_mib, mib)
        if mib > MOST_MIB:
            raise Failure(f"the daemon has {mib:.0f} MiB")

    def go(self, enough: Callable[[], bool]) -> None:
        self.begin()
        killed_at = time.monotonic()
        while not enough():
            self.look()
            time.sleep(0.3)
            if time.monotonic() > killed_at + self.kill_every_s * self.rng.uniform(0.5, 1.5):
                self.restart()
                killed_at = time.monotonic()
        self.restart()
        self.look()

    def close(self) -> list[str]:
        """Ends everything; returns the last messages of each worker."""
        self.shared.ends.set()
        for process in self.crew:
            if process.pid is not None:
                process.join(ANSWER_S + 10)
                if process.is_alive():
                    process.terminate()
        last = [f"{p.name}:\n{p.read_text()}" for p in sorted(self.room.folder.glob("last-*"))]
        self.room.close()
        return last


def fuzz(
    seed: int, requests: int, seconds: float, policies: list[str], kill_every_s: float, crew: list[str]
) -> list[str]:
    """Runs all policies in turn; returns what went wrong."""
    wrong: list[str] = []
    began, total = time.monotonic(), 0
    for i, policy in enumerate(policies):
        share = requests * (i + 1) // len(policies) - requests * i // len(policies)
        until = time.monotonic() + seconds / len(policies)
        run = Run(seed, policy, kill_every_s, crew)
        start = time.monotonic()

        def enough(run: Run = run, share: int = share, until: float = until) -> bool:
            return run.sent() >= share or time.monotonic() > until

        try:
            run.go(enough)
        except Failure as failure:
            wrong.append(f"seed {seed}, policy {policy}: {failure}")
        took, sent = time.monotonic() - start, run.sent()
        by_kind = dict.fromkeys(crew, 0)
        for kind, count in zip(crew, run.counts, strict=True):
            by_kind[kind] += count.value
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in by_kind.items())
        total += sent
        last = run.close()
        print(
            f"{'FAIL' if wrong else 'ok  '} {policy}: {sent:,} messages in {took:.0f} s ({kinds}), "
            f"{run.kills} kills, {run.acknowledged:,} jobs acknowledged, slowest ps "
            f"{run.slowest_s:.2f} s, slowest start {run.slowest_up_s:.1f} s, {run.most_mib:.0f} MiB",
            flush=True,
        )
        if wrong:
            print(*last, wrong[-1], sep="\n")
            break
    print(f"     seed {seed}: {total:,} messages in {time.monotonic() - began:.0f} s")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--policy", default=",".join(POLICIES))
    parser.add_argument("--kill-every", type=float, default=10.0)
    parser.add_argument("--crew", default=",".join(CREW), help="workers: " + ", ".join(KINDS))
    args = parser.parse_args()
    policies, crew = args.policy.split(","), args.crew.split(",")
    wrong = fuzz(args.seed, args.requests, args.seconds, policies, args.kill_every, crew)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
