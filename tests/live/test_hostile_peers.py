"""Hostile processes and connections: floods, silence, and jobs that do not want to be held.

Each test is named after a finding of the security review, as in `test_hostile.py`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import BINARY, Room, group_cpu_s
from peers import (
    Tenant,
    alive,
    ask,
    ask_bytes,
    clock_that_jumps,
    connect,
    cores_of,
    many_files,
    opaque,
    pid_of,
    plain_http,
    rss_mib,
    status,
    submission,
)

LOOP = """
import roommate, time
for _ in roommate.steps(lambda size: time.sleep(0.01) or size, batch_size=1): pass
"""


def tier_of(room: Room) -> str:
    return str(json.loads(room.ok("describe", "-o", "json"))["enforcement"]["tier"])


def needs_cgroups(room: Room) -> None:
    if not tier_of(room).startswith("cgroup"):
        pytest.skip("cgroups cannot be used here, so nothing holds a process that leaves")


# --- D2: floods

FLOOD = """
import os, socket, time
end = time.monotonic() + 12
lines = LINE.encode() * 2000
hello = '{"hello":{"version":1,"token":"%s","pid":%d}}' % (os.environ["ROOMMATE_TOKEN"], os.getpid())
while time.monotonic() < end:
    try:
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(os.environ["ROOMMATE_SOCKET"])
        peer.sendall(hello.encode() + b"\\n")
        open("flooding-" + os.environ["ROOMMATE_JOB"], "w").close()
        while time.monotonic() < end:
            peer.sendall(lines)
            try: peer.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError: pass
    except OSError:
        time.sleep(0.05)
time.sleep(60)
"""
LINES = {
    "checkpointed": '{"checkpointed":{"done":1.0}}\n',
    "stepped": '{"stepped":{"steps":1,"done":1.0,"step_s":0.01,"batch":1}}\n',
    "enter": '{"enter":{"stage":"load"}}\n',
}


def little_memory() -> None:
    """A daemon that grows without end ends, before the machine does."""
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize("loud", [1, 4])
def test_d02_tenants_that_flood_stop_nobody(room: Room, kind: str, loud: int) -> None:
    """D2: while tenants send all that they can, users are answered and memory stays small."""
    room.up("--policy", "fifo", "--devices", str(loud + 1), preexec_fn=little_memory)
    room.submit("before", "sleep 60")
    # At low priority: a flood must not win by taking the cores of a small machine.
    code = FLOOD.replace("LINE", repr(LINES[kind]))
    floods = [f"floods{i}" for i in range(loud)]
    for name in floods:
        room.submit(name, ["nice", "-n", "19", sys.executable, "-c", code])
    room.until(lambda: len(list(room.folder.glob("flooding-*"))) == loud)
    pid, longest, most, end = pid_of(room), 0.0, 0.0, time.monotonic() + 6.0
    while time.monotonic() < end:
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            ask(room.state, "ps", timeout_s=10.0)
        longest = max(longest, time.monotonic() - began)
        most = max(most, rss_mib(pid))
        time.sleep(0.05)
    if longest >= 3.0 or most >= 150.0:
        room.kill()
        pytest.fail(f"an answer after {longest:.1f} s, {most:.0f} MiB")
    # Decisions are made as well.
    room.ok("cancel", "before")
    room.submit("after", "true")
    room.until_ended("before", "after", within_s=15)
    room.ok("cancel", *floods)
    room.until_ended(*floods, within_s=25)


# --- D5, D15: processes stay where they belong

ESCAPES = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open("escaped.new", "w") as to: to.write(str(os.getpid()))
        os.rename("escaped.new", "escaped")
        # With another environment, so that nothing but the kernel knows where it belongs.
        os.execve("/bin/sh", ["sh", "-c", "n=0; while [ $n -lt 120 ]; do sleep 0.5; n=$((n+1)); done"], {})
    os._exit(0)
time.sleep(60)
"""


def escaped_from(room: Room) -> int:
    room.python("escapes", ESCAPES)
    room.until((room.folder / "escaped").exists)
    return int((room.folder / "escaped").read_text())


@pytest.fixture
def ends(room: Room) -> Iterator[list[int]]:
    """Processes that a test must not leave behind."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_d05_a_job_that_calls_setsid_ends_with_its_cancel(room: Room, ends: list[int]) -> None:
    """D5: a child in a session of its own ends with its job, before its device is given away."""
    room.up("--policy", "fifo", "--devices", "1")
    needs_cgroups(room)
    pid = escaped_from(room)
    ends.append(pid)
    look = f"cat /proc/{pid}/stat > seen 2> /dev/null || echo gone > seen"
    room.submit("next", look)
    room.ok("cancel", "escapes")
    room.until_ended("escapes", "next")
    assert not alive(pid)
    seen = (room.folder / "seen").read_text()
    assert seen == "gone\n" or ") Z " in seen, "the next job began beside a process of the last"


def test_d05_down_with_stop_jobs_ends_every_process(room: Room, ends: list[int]) -> None:
    """D5: `down --stop-jobs` leaves nothing running."""
    room.up("--policy", "fifo", "--devices", "1")
    needs_cgroups(room)
    ends.append(escaped_from(room))
    room.ok("down", "--stop-jobs")
    room.until(lambda: not alive(ends[0]), 5)


LEAVES = """
import os, pathlib, time
for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
    _, kinds, path = line.split(":", 2)
    for root in (*kinds.split(","), "unified", "."):
        try: pathlib.Path("/sys/fs/cgroup", root, "cgroup.procs").write_text(str(os.getpid()))
        except OSError: pass
open("left", "w").close()
end = time.monotonic() + 60
while time.monotonic() < end: pass
"""


def test_d15_a_job_outside_its_cgroup_is_held_or_told(room: Room) -> None:
    """D15: `describe` does not call a job confined that is not."""
    if os.getuid() != 0:
        pytest.skip("only root can leave its cgroup")
    room.up("--policy", "fifo", "--devices", "1")
    needs_cgroups(room)
    room.python("leaves", LEAVES, share=0.2)
    room.until(lambda: (room.folder / "left").exists())
    group = room.jobs()["leaves"]["keeper_pid"]

    def held_or_told() -> bool:
        if not room.jobs()["leaves"]["ended"]:
            used, began = group_cpu_s(group), time.monotonic()
            time.sleep(1.5)
            if (group_cpu_s(group) - used) / (time.monotonic() - began) > 0.35:
                words = room.ok("describe", "leaves") + room.ok("events")
                return any(word in words for word in ("outside", "left its", "unconfined"))
        return True

    room.until(held_or_told, 20)


# --- D8: nothing is left frozen


def ticks(room: Room, name: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (room.folder / f"ticks-{name}").stat().st_size
    return 0


TICKS = 'n=0; while [ $n -lt 3000 ]; do printf x >> "ticks-$ROOMMATE_JOB"; sleep 0.02; n=$((n+1)); done'
HELD: list[tuple[list[str], dict[str, Any]]] = [
    (["--no-cgroups", "--policy", "fifo", "--devices", "2"], {"share": 0.1}),
    (["--policy", "gandiva", "--devices", "1", "--set", "slice_s=1", "--set", "pack=false"], {}),
]


@pytest.mark.parametrize("flags, fields", HELD, ids=["held by signals", "in turns"])
def test_d08_down_leaves_no_job_frozen(
    room: Room, flags: list[str], fields: dict[str, Any]
) -> None:
    """D8: "jobs go on" is true, however they were held."""
    room.up(*flags)
    names = ("a", "b")
    for name in names:
        room.submit(name, TICKS, **fields)
    room.until(lambda: all(ticks(room, name) for name in names))
    room.ok("down")
    assert room.daemon is not None
    room.daemon.wait(20)
    for _ in range(3):
        before = {name: ticks(room, name) for name in names}
        # The keeper may take a while to see that there is no daemon.
        room.until(lambda before=before: all(ticks(room, n) > before[n] + 9 for n in names), 15)
    room.up()
    assert not any(j["ended"] for j in room.jobs().values())


# --- D9, D10, D11, D21: connections


def served(room: Room, *flags: str) -> str:
    """Starts a daemon that serves HTTP; returns its address."""
    room.up("--policy", "fifo", "--devices", "1", *(flags or ("--http", "127.0.0.1:0")))
    return str(json.loads(room.ok("describe", "-o", "json"))["http"])


def port_of(server: str) -> int:
    found = re.search(r":(\d+)", server)
    assert found is not None
    return int(found.group(1))


def half_a_request(port: int) -> bytes:
    """Its answer is 401; what follows would have to be read to its end."""
    head = f"POST /v1/ps HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 1000000\r\n\r\n"
    return head.encode()


def half_a_handshake(_: int) -> bytes:
    """The beginning of a TLS record of 16 KiB."""
    return b"\x16\x03\x01\x40\x00\x01\x00"


@pytest.mark.parametrize("half", [half_a_request, half_a_handshake], ids=lambda it: it.__name__)
def test_d09_peers_without_a_token_do_not_shut_http(
    room: Room, half: Callable[[int], bytes]
) -> None:
    """D9: whoever has no token and drips bytes loses the connection."""
    server = served(room, *(plain_http() if half is half_a_request else ()))
    port = port_of(server)
    drips = [socket.create_connection(("127.0.0.1", port)) for _ in range(64)]
    for peer in drips:
        peer.sendall(half(port))
    ends = threading.Event()

    def drip() -> None:
        while not ends.wait(0.1):
            for peer in drips:
                with contextlib.suppress(OSError):
                    peer.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    time.sleep(1.0)
    token = room.state / "http-token"

    def served_again() -> bool:
        if half is half_a_handshake:
            words = ["ps", "--server", server, "--token-file", str(token)]
            return room.tool(*words).returncode == 0
        headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
        polite = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.suppress(OSError, http.client.HTTPException):
            polite.request("POST", "/v1/ps", b"", headers)
            return polite.getresponse().status == 200
        return False

    try:
        # Longer than the ten seconds for a head.
        room.until(served_again, 20)
    finally:
        ends.set()
        thread.join()
        for peer in drips:
            peer.close()


def test_d10_silent_connections_do_not_keep_tenants_out(room: Room) -> None:
    """D10: peers without a hello lose their place; refused for want of room means later."""
    many_files()
    room.up("--policy", "fifo", "--devices", "1")
    silent = [connect(room.state / "tenant.sock") for _ in range(1000)]
    time.sleep(0.5)
    room.python("sdk", LOOP)
    try:
        room.until(lambda: room.jobs()["sdk"]["cooperative"], 30)
    finally:
        for peer in silent:
            peer.close()


def test_d11_without_file_descriptors_nothing_spins(room: Room) -> None:
    """D11: out of descriptors the daemon waits, and no job is charged for it."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))  # noqa: E731
    room.up("--policy", "fifo", "--devices", "1", "--backoff", "0.1", preexec_fn=limit)
    room.submit("first", "sleep 4")
    room.submit("second", "true", retries=0)
    room.until(lambda: room.state_of("first") == "running")
    peers: list[socket.socket] = []

    def hold(path: Path) -> None:
        # Beyond its backlog a listener that does not accept refuses.
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.connect(str(path))
        peers.append(peer)

    for _ in range(100):
        hold(room.state / "control.sock")
        hold(room.state / "tenant.sock")
    time.sleep(1.0)
    cores = cores_of(pid_of(room), 2.0)
    time.sleep(3.0)  # the first ends, the second may not be able to start
    for peer in peers:
        peer.close()
    room.until_ended("first", "second")
    assert {j["state"] for j in room.jobs().values()} == {"finished"}
    assert [j["failures"] for j in room.jobs().values()] == [0, 0]
    assert cores < 0.5, f"{cores:.2f} of a core"


def test_d21_half_requests_do_not_become_threads(room: Room) -> None:
    """D21: the number of users at a time is bounded, and the next one is served."""
    many_files()
    room.up("--policy", "fifo", "--devices", "1")
    half = []
    for _ in range(600):
        with contextlib.suppress(OSError):
            peer = connect(room.state / "control.sock", 2.0)
            half.append(peer)
            peer.sendall(b'{"ps":')
    time.sleep(0.5)
    threads = status(pid_of(room), "Threads")
    try:
        assert threads < 400, f"{threads} threads"
        room.until(lambda: room.tool("ps").returncode == 0, 45)
    finally:
        for peer in half:
            peer.close()


def test_d21_those_who_never_read_do_not_stay_for_ever(room: Room) -> None:
    """D21: a write that nobody reads has a time limit."""
    room.up("--policy", "fifo", "--devices", "1")
    # More than a socket holds.
    room.submit("talks", "head -c 400000 /dev/zero | tr '\\0' x")
    room.until_ended("talks")
    before = status(pid_of(room), "Threads")
    deaf = []
    for _ in range(60):
        with contextlib.suppress(OSError):  # beyond a limit they are refused
            deaf.append(connect(room.state / "control.sock"))
            deaf[-1].sendall(b'{"logs":{"job":"talks"}}\n')
    time.sleep(0.5)
    try:
        room.until(lambda: status(pid_of(room), "Threads") <= before + 5, 40)
    finally:
        for peer in deaf:
            peer.close()


def test_d21_long_commands_do_not_make_every_ps_long(room: Room) -> None:
    """D21: what `ps` answers does not grow with the commands of others."""
    room.up("--policy", "fifo", "--devices", "1")
    for i in range(4):
        words = ["echo", *["x" * 100_000] * 15]
        ask(room.state, "submit", submission(room, f"k{i}", command=words))
    assert len(ask_bytes(room.state, b'{"ps":{}}')) < 500_000


# --- D13, D14: programs and folders that move


def up_from(room: Room, program: Path, *flags: str, **popen: Any) -> None:
    """As `Room.up`, with another program."""
    words = [str(program), "up", *flags]
    room.daemon = subprocess.Popen(words, env=room.env, stderr=subprocess.PIPE, text=True, **popen)
    room.until(lambda: room.tool("describe").returncode == 0)


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_d13_the_programs_file_may_go_while_it_runs(room: Room, how: str) -> None:
    """D13: keepers start from the program that is open, not from its path."""
    program = room.folder / "roommate"
    shutil.copy(BINARY, program)
    up_from(room, program, "--policy", "fifo", "--devices", "1", "--backoff", "0.1")
    room.submit("before", "true")
    room.until_ended("before")
    program.unlink()
    if how == "replaced":
        program.write_text(f"#!/bin/sh\ntouch {room.folder}/other-program\nexit 1\n")
        program.chmod(0o755)
    room.submit("after", "echo ran")
    room.until_ended("after")
    assert room.state_of("after") == "finished" and room.jobs()["after"]["starts"] == 1
    assert not (room.folder / "other-program").exists()


def cgroups_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def test_d14_a_relative_state_folder_works_from_anywhere(room: Room) -> None:
    """D14: sockets and checkpoints are absolute; two states named alike do not share groups."""
    elsewhere = room.folder / "elsewhere"
    elsewhere.mkdir()
    groups = []
    for name in ("one", "two"):
        home = room.folder / name
        home.mkdir()
        room.state = home / "s"
        room.env["ROOMMATE_STATE"] = str(room.state)
        flags = ("--policy", "fifo", "--devices", "1", "--state", "s")
        up_from(room, Path(BINARY), *flags, cwd=home)
        room.python("sdk", LOOP, workdir=str(elsewhere))
        room.until(lambda: room.jobs()["sdk"]["cooperative"], 15)
        environ = Path(f"/proc/{child_of(room, 'sdk')}/environ").read_bytes().split(b"\0")
        variables = dict(v.decode().split("=", 1) for v in environ if v)
        assert variables["ROOMMATE_SOCKET"] == str(room.state / "tenant.sock")
        assert variables["ROOMMATE_CHECKPOINT"].startswith(str(room.state))
        groups.append(cgroups_of(child_of(room, "sdk")))
        room.ok("down", "--stop-jobs")
        assert room.daemon is not None
        room.daemon.wait(20)
    if any("roommate" in group for group in groups):
        assert groups[0] != groups[1]


def child_of(room: Room, name: str) -> int:
    """The process of a job, below its keeper."""
    keeper = room.jobs()[name]["keeper_pid"]
    children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    return int(children[-1])


# --- D16: nobody waits for a stranger for ever

SHORT_STAGES = """
import roommate, time
for n, _ in enumerate(roommate.steps(lambda size: time.sleep(0.005) or size, batch_size=1, interleave=True)):
    time.sleep(0.005)
    if n == HANGS: time.sleep(1000)
"""


def test_d16_a_roommate_that_hangs_in_a_stage_is_passed(room: Room) -> None:
    """D16: who hangs inside a stage costs its partner a stated time, then its turn."""
    room.up("--policy", "muri-s", "--devices", "1")
    for name, hangs in (("works", -1), ("hangs", 200)):
        code, stages = SHORT_STAGES.replace("HANGS", str(hangs)), [0.005, 0.0, 0.005, 0.0]
        room.python(name, code, steps=100_000, step_s=0.01, stages_s=stages)
    room.until(lambda: all(j["cooperative"] for j in room.jobs().values()))
    room.until(lambda: room.jobs()["hangs"]["done"] >= 50, 60)
    time.sleep(5.0)
    done = room.jobs()["works"]["done"]
    room.until(lambda: room.jobs()["works"]["done"] > done + 50, 45)


def test_d16_a_silent_guaranteed_job_holds_nobody_for_ever(room: Room) -> None:
    """D16: a guaranteed tenant that reports once and falls silent does not starve others."""
    room.up("--policy", "antman", "--devices", "1", "--set", "util_max=2")
    tenant = Tenant(room.state, opaque(room, "promised", "sleep 300"))
    tenant.stepped(10, 1.0)
    room.submit("opportunist", TICKS, **{"class": "best-effort"})
    room.until(lambda: room.state_of("opportunist") == "running")
    time.sleep(3.0)
    before = ticks(room, "opportunist")
    room.until(lambda: ticks(room, "opportunist") > before + 20, 60)
    tenant.close()


# --- D18, G2: tokens

LISTENS = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
listener.settimeout(20)
got = b""
try:
    while True:
        peer, _ = listener.accept()
        peer.settimeout(2)
        try:
            while data := peer.recv(65536): got += data
        except OSError: pass
        peer.close()
        sys.stdout.buffer.write(got); sys.stdout.flush()
except OSError: pass
"""


def test_d18_a_token_is_not_sent_to_another_listener(room: Room) -> None:
    """D18: another user who listens at the daemon's port does not learn the token."""
    if os.getuid() != 0:
        pytest.skip("only root can listen as another user")
    server = served(room)
    token = room.state / "http-token"
    secret = token.read_bytes().strip()
    room.ok("down")
    words = [sys.executable, "-c", LISTENS]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as listener:
        assert listener.stdout is not None
        port = int(listener.stdout.readline())
        there = re.sub(r":\d+", f":{port}", server)
        done = room.tool("ps", "--server", there, "--token-file", str(token))
        listener.terminate()
        got = listener.stdout.read()
    assert done.returncode == 2 and secret not in got


def test_g02_tokens_have_scope_and_expiry_and_are_revoked(room: Room) -> None:
    """G2: a token is for somebody, for some verbs, for some time, and can be taken back."""
    usual, (jumped, clock) = room.env, clock_that_jumps(room.folder)
    room.env = {**usual, **clock}
    server = ("--server", served(room))
    room.env = usual
    room.submit("job", "sleep 60")

    def as_bearer(token: str, *words: str) -> int:
        env = {**room.env, "ROOMMATE_HTTP_TOKEN": token}
        done = subprocess.run([BINARY, *words, *server], env=env, capture_output=True, text=True)
        return done.returncode

    reads = room.ok("token", "create", "--scope", "read").strip()
    assert as_bearer(reads, "ps") == 0 and as_bearer(reads, "cancel", "job") == 2
    short = room.ok("token", "create", "--expires", "1d").strip()
    assert as_bearer(short, "ps") == 0
    jumped.touch()  # 30 days later
    room.until(lambda: as_bearer(short, "ps") == 2, 10)
    jumped.unlink()
    assert reads not in room.ok("token", "list")
    assert not [p for p in room.state.rglob("*") if p.is_file() and reads.encode() in p.read_bytes()]
    listed = json.loads(room.ok("token", "list", "-o", "json"))
    found = [t for t in listed if t["scope"] == "read"]
    room.ok("token", "revoke", str(found[0]["id"]))
    assert as_bearer(reads, "ps") == 2


# --- G3, G6: what a job and a daemon may take


def test_g06_memory_mib_is_a_limit(room: Room) -> None:
    """G6: a job that takes more memory than it asked for is ended, others are not."""
    room.up("--policy", "fifo", "--devices", "2", "--backoff", "0.1")
    needs_cgroups(room)
    grows = "import time; kept = bytearray(400 << 20); print('has it all', flush=True); time.sleep(60)"
    room.python("grows", grows, memory_mib=64, retries=0)
    room.until(lambda: room.jobs()["grows"]["ended"] or "has it all" in room.ok("logs", "grows"))
    assert room.jobs()["grows"]["ended"] and room.state_of("grows") != "finished"


PIDS = """
import pathlib
for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
    _, kinds, path = line.split(":", 2)
    for root in ("pids", "unified", "."):
        limit = pathlib.Path("/sys/fs/cgroup", root, path.lstrip("/"), "pids.max")
        if (kinds == "pids" or kinds == "") and limit.exists(): print(limit.read_text())
"""


def test_g06_the_number_of_processes_is_limited(room: Room) -> None:
    """G6: a job cannot start processes without end."""
    room.up("--policy", "fifo", "--devices", "1")
    needs_cgroups(room)
    room.python("asks", PIDS)
    room.until_ended("asks")
    limits = room.ok("logs", "asks").split()
    assert limits and any(limit.isdigit() for limit in limits), limits
