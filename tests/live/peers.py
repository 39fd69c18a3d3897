"""Peers that speak to a daemon without its program: users at the control socket, tenants at theirs,
and what the kernel says of the daemon meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from conftest import BINARY, Room

Reply = dict[str, Any]


def connect(path: Path | str, timeout_s: float = 30.0) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(timeout_s)
    peer.connect(str(path))
    return peer


def ask_bytes(state: Path, line: bytes, timeout_s: float = 30.0) -> bytes:
    """The answer to one line at the control socket, whole."""
    with connect(state / "control.sock", timeout_s) as peer:
        peer.sendall(line + b"\n")
        answer = b""
        while part := peer.recv(1 << 20):
            answer += part
        return answer


def ask(state: Path, verb: str, fields: Reply | None = None, timeout_s: float = 30.0) -> Reply:
    """The reply to a request, by the kind of the reply."""
    answer = ask_bytes(state, json.dumps({verb: fields or {}}).encode(), timeout_s)
    reply: Reply = json.loads(answer)
    return reply


def submission(room: Room, key: str, **file: Any) -> Reply:
    """The fields of a submission through the API."""
    file = {"command": ["sleep", "60"], "workdir": str(room.folder), **file}
    return {"file": file, "env": {"PATH": os.environ["PATH"]}, "key": key}


class Tenant:
    """Speaks in the name of a running job, with its token."""

    def __init__(self, state: Path, token: str, **hello: Any) -> None:
        self.peer = connect(state / "tenant.sock")
        self._buffer = b""
        self.say("hello", version=1, token=token, pid=os.getpid(), **hello)
        self.welcome = self.hear("welcome")

    def say(self, kind: str, **fields: Any) -> None:
        self.peer.sendall(json.dumps({kind: fields}).encode() + b"\n")

    def stepped(self, steps: int, done: float, step_s: float = 0.01, **more: Any) -> None:
        self.say("stepped", steps=steps, done=done, step_s=step_s, batch=1, **more)

    def hear(self, kind: str, within_s: float = 30.0) -> Reply:
        """The next message of this kind."""
        end = time.monotonic() + within_s
        while True:
            *lines, self._buffer = self._buffer.split(b"\n")
            for i, line in enumerate(lines):
                message = json.loads(line)
                if kind in message:
                    self._buffer = b"\n".join([*lines[i + 1 :], self._buffer])
                    found: Reply = message[kind]
                    return found
            left = end - time.monotonic()
            assert left > 0, f"no {kind} within {within_s} s"
            if select.select([self.peer], [], [], left)[0]:
                data = self.peer.recv(65536)
                assert data, f"hung up on before a {kind}"
                self._buffer += data

    def close(self) -> None:
        self.peer.close()


def opaque(room: Room, name: str, then: str = "sleep 60", **fields: Any) -> str:
    """Starts a job that leaves its token in the room; returns the token."""
    at = room.folder / f"token-{name}"
    room.submit(name, f'echo "$ROOMMATE_TOKEN" > {at}.new; mv {at}.new {at}; {then}', **fields)
    room.until(at.exists)
    return at.read_text().strip()


def pid_of(room: Room) -> int:
    assert room.daemon is not None
    return room.daemon.pid


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cores_of(pid: int, window_s: float = 2.0) -> float:
    """Cores that a process uses over the next seconds."""
    used, began = cpu_s(pid), time.monotonic()
    time.sleep(window_s)
    return (cpu_s(pid) - used) / (time.monotonic() - began)


def status(pid: int, field: str) -> int:
    """A number in /proc/PID/status: `Threads`, `VmRSS` in KiB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split(f"{field}:", 1)[1].split()[0])


def rss_mib(pid: int) -> float:
    if not alive(pid):
        raise ProcessLookupError(f"process {pid} has ended")
    return status(pid, "VmRSS") / 1024


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be collected by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def plain_http() -> list[str]:
    """Flags for HTTP without encryption at a free port of loopback."""
    known = "--http-plain" in subprocess.run([BINARY, "up", "--help"], capture_output=True, text=True).stdout
    return ["--http", "127.0.0.1:0", *(["--http-plain"] if known else [])]


def many_files() -> None:
    """Raises the limit of open files as far as permitted."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def processes_of_user(uid: int) -> list[int]:
    """The processes of a user."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == uid:
                found.append(int(folder.name))
    return found


JUMP = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
static const char *jumped;
__attribute__((constructor)) static void begin(void) { jumped = getenv("TEST_CLOCK_JUMPED"); }
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, at);
    if (id == CLOCK_REALTIME && jumped && access(jumped, F_OK) == 0) at->tv_sec += 30L * 86400;
    return failed;
}
"""


def clock_that_jumps(folder: Path) -> tuple[Path, dict[str, str]]:
    """A file, and variables for a process whose clock is 30 days ahead while the file exists."""
    source, library, jumped = folder / "jump.c", folder / "jump.so", folder / "jumped"
    source.write_text(JUMP)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return jumped, {"LD_PRELOAD": str(library), "TEST_CLOCK_JUMPED": str(jumped)}
