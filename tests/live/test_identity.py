"""Who asks: users who see only their own jobs, quotas, and limits of the socket."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import BINARY, Room


class Shared(Room):
    """A daemon for all users of the machine, and two of them."""

    USERS = ("rm-test-a", "rm-test-b")

    def __init__(self) -> None:
        super().__init__()
        for user in self.USERS:
            subprocess.run(["useradd", "--no-create-home", user], check=True)
        # The program is where other users can read it.
        self.folder.chmod(0o755)
        self.program = str(self.folder / "roommate")
        shutil.copy(BINARY, self.program)

    def as_user(self, user: str, *words: str, **run: Any) -> subprocess.CompletedProcess[str]:
        account = pwd.getpwnam(user)
        return subprocess.run(
            [self.program, *words],
            env={**self.env, "HOME": str(self.folder)},
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=[],
            capture_output=True,
            text=True,
            cwd="/",
            **run,
        )

    def a(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.as_user(self.USERS[0], *words)

    def b(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.as_user(self.USERS[1], *words)

    def up(self, *flags: str, **popen: Any) -> None:
        super().up("--system", *flags, **popen)

    def close(self) -> None:
        super().close()
        for user in self.USERS:
            subprocess.run(["userdel", user], check=False)


@pytest.fixture
def shared() -> Iterator[Shared]:
    if os.geteuid() != 0 or not shutil.which("useradd"):
        pytest.skip("users can only be created by root, with useradd")
    it = Shared()
    try:
        yield it
    finally:
        it.close()


def submitted(shared: Shared, user: str, name: str, command: str, **fields: Any) -> str:
    text = json.dumps({"command": command, "workdir": "/", **fields})
    file = shared.job(name, text)
    Path(file).chmod(0o644)
    done = shared.as_user(user, "submit", file)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_jobs_of_others_do_not_exist(shared: Shared) -> None:
    shared.up("--policy", "fifo", "--devices", "1")
    a, b = shared.USERS
    first = submitted(shared, a, "secret-project", "echo confidential; sleep 1000")
    shared.until(lambda: shared.jobs()[first]["state"] == "running")
    assert shared.jobs()[first]["owner"]["name"] == a
    submitted(shared, a, "secret-second", "sleep 1000")
    own = submitted(shared, b, "own", "sleep 1000")
    # B sees the own job, and that it waits for somebody, not for whom.
    seen = json.loads(shared.b("ps", "-o", "json").stdout)
    assert [j["name"] for j in seen] == [own]
    for words in (["describe", own], ["describe"], ["ps", "-o", "wide"], ["top"]):
        text = shared.b(*words).stdout
        assert text and "secret" not in text and a not in text, (words, text)
    assert "waits behind job of another user" in shared.b("describe", own).stdout
    assert "waits behind job secret-second" in shared.ok("describe", own)
    # Neither can B name it, and it is no different from a job that there is not.
    for words in (
        ["describe"],
        ["logs"],
        ["cancel"],
        ["suspend"],
        ["resume"],
        ["resize", "--share", "0.5"],
    ):
        refused = shared.b(*words, first)
        missing = shared.b(*words, "secret-projecx")
        assert refused.returncode == missing.returncode == 2
        assert refused.stderr.replace(first, "") == missing.stderr.replace("secret-projecx", "")
        assert f'there is no job "{first}"' in refused.stderr
    assert "confidential" in shared.a("logs", first).stdout
    assert "confidential" in shared.tool("logs", first).stdout
    assert shared.jobs()[first]["state"] == "running"
    # A name that is taken gets a number, for strangers as well.
    assert submitted(shared, b, "secret-project", "sleep 1000") == "secret-project-2"
    assert shared.a("cancel", "secret-project-2").returncode == 2


def test_only_administrators_end_the_daemon_and_read_all(shared: Shared) -> None:
    shared.up("--policy", "fifo", "--devices", "1")
    a = shared.USERS[0]
    job = submitted(shared, a, "job", "sleep 1000")
    for words in (["down"], ["down", "--stop-jobs"]):
        refused = shared.b(*words)
        assert refused.returncode == 2 and "only an administrator" in refused.stderr
    # Of the journal a user reads what concerns the own jobs.
    for words in (["events"], ["explain", job]):
        assert "submitted by" in shared.a(*words).stdout
    assert shared.b("events").stdout == ""
    refused = shared.b("explain", job)
    assert refused.returncode == 2 and "only an administrator" in refused.stderr
    assert shared.a("suspend", job).returncode == 0
    assert shared.tool("cancel", job).returncode == 0
    told = shared.ok("explain", job)
    assert f"submitted by {a}" in told and f"held by {a}" in told
    assert "cancelled by root" in told
    assert f"held by {a}" in shared.ok("events")
    steps = [s for s in shared.steps() if "by" in s]
    assert [s["by"] for s in steps] == [a, a, "root"]
    assert shared.replays()
    # Owners are known after a restart and in a new part of the journal.
    shared.kill()
    shared.up()
    assert json.loads(shared.b("ps", "-o", "json").stdout) == []
    assert [j["owner"]["name"] for j in json.loads(shared.a("ps", "-o", "json").stdout)] == [a]


def test_a_group_has_the_socket_and_another_administers(shared: Shared) -> None:
    a = shared.USERS[0]
    # useradd gives each user a group of the same name.
    shared.up("--devices", "1", "--group", a, "--admins", a)
    control = shared.state / "control.sock"
    assert control.stat().st_mode & 0o777 == 0o660
    assert shared.b("ps").returncode == 2
    shared.submit("of-root", "sleep 1000")
    assert "of-root" in shared.a("ps").stdout
    assert "of-root" in shared.a("events").stdout
    assert shared.a("cancel", "of-root").returncode == 0
    assert shared.a("down").returncode == 0


def test_users_have_quotas_of_their_own(shared: Shared) -> None:
    shared.up("--devices", "1", "--quota", "jobs=2", "--quota", "share=0.5")
    a = shared.USERS[0]
    for n in range(2):
        submitted(shared, a, f"job{n}", "sleep 1000", share=0.5)
    text = json.dumps({"command": "true", "workdir": "/", "share": 0.5})
    file = shared.job("third", text)
    Path(file).chmod(0o644)
    refused = shared.a("submit", file)
    assert refused.returncode == 2
    assert "you have 2 jobs that have not ended; 2 is the most" in refused.stderr
    assert "hint: " in refused.stderr
    assert shared.b("submit", file).returncode == 0
    refused = shared.a("resize", "--share", "0.9", "job0")
    assert refused.returncode == 2 and "0.5 is the most" in refused.stderr
    assert shared.a("cancel", "job0").returncode == 0
    assert shared.a("submit", file).returncode == 0


def test_a_key_of_another_user_is_another_key(shared: Shared) -> None:
    shared.up("--devices", "1")
    file = {"name": "job", "command": "sleep 1000", "workdir": "/"}
    request = json.dumps({"submit": {"file": file, "env": {}, "key": "k"}})
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "s.sendall(sys.argv[2].encode() + b'\\n'); print(s.makefile().read())"
    )

    def ask(user: str) -> Any:
        words = ["python3", "-c", code, str(shared.state / "control.sock"), request]
        account = pwd.getpwnam(user)
        done = subprocess.run(
            words, user=account.pw_uid, group=account.pw_gid, capture_output=True, text=True
        )
        return json.loads(done.stdout)

    a, b = shared.USERS
    assert ask(a) == ask(a) == {"submitted": {"name": "job"}}
    assert ask(b) == {"submitted": {"name": "job-2"}}


def test_a_user_does_not_learn_what_files_others_have(shared: Shared) -> None:
    shared.up("--devices", "1")
    hidden = shared.folder / "hidden"
    hidden.mkdir(mode=0o700)
    (hidden / "there").mkdir()
    for name in ("there", "not-there"):
        file = shared.job(name, json.dumps({"command": "true", "workdir": str(hidden / name)}))
        Path(file).chmod(0o644)
        assert shared.b("submit", "--dry-run", file).returncode == 0


def open_control(room: Room) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(20)
    peer.connect(str(room.state / "control.sock"))
    return peer


def test_many_connections_of_one_user_are_refused_for_a_moment(room: Room) -> None:
    room.up("--devices", "1")
    assert room.daemon is not None
    threads = Path(f"/proc/{room.daemon.pid}/task")
    peers = []
    for _ in range(200):
        with contextlib.suppress(OSError):
            peers.append(open_control(room))
            peers[-1].sendall(b"{")
    time.sleep(0.5)
    assert len(list(threads.iterdir())) < 60
    reply = peers[-1].recv(1000)
    assert b"busy" in reply and b"busy with 32 connections of yours" in reply
    # A client asks again until there is room.
    waiting = subprocess.Popen([BINARY, "ps"], env=room.env, stdout=subprocess.PIPE)
    time.sleep(0.5)
    for peer in peers:
        peer.close()
    assert waiting.wait(10) == 0
    waiting.communicate()


def test_a_slow_request_has_a_limited_time_as_a_whole(room: Room) -> None:
    room.up("--devices", "1")
    began = time.monotonic()
    with open_control(room) as peer:
        with contextlib.suppress(OSError):
            while time.monotonic() < began + 15:
                peer.sendall(b" ")
                time.sleep(0.1)
        assert time.monotonic() < began + 13
        assert b"did not arrive within 10 s" in peer.recv(1000)


def test_large_requests_take_a_limited_memory(room: Room) -> None:
    room.up("--devices", "1")
    peers = [open_control(room) for _ in range(5)]
    for peer in peers:
        peer.sendall(b"x" * (100 << 10))
        time.sleep(0.1)
    assert b"busy with 4 large requests of yours" in peers[-1].recv(1000)
    assert room.tool("ps").returncode == 0
    for peer in peers:
        peer.close()


def test_a_long_request_is_refused_with_the_limit(room: Room) -> None:
    room.up("--devices", "1")
    job = room.job("long", json.dumps({"command": ["true", "x" * (9 << 20)]}))
    began = time.monotonic()
    refused = room.tool("submit", job)
    assert refused.returncode == 2 and time.monotonic() < began + 8
    assert "more than 1048576 bytes, the most of a job file" in refused.stderr
    with open_control(room) as peer:
        peer.sendall(b'{"describe": {"job": "' + b"x" * (9 << 20) + b'"}}\n')
        assert b"at most 8388608 are accepted" in peer.recv(1000)


def test_long_commands_do_not_make_lists_long(room: Room) -> None:
    room.up("--devices", "1")
    env = {"PATH": os.environ["PATH"]}
    for n in range(5):
        file = {"name": f"j{n}", "command": ["sleep", "1000", *["x" * 130_000] * 7],
                "workdir": "/"}
        with open_control(room) as peer:
            request = {"submit": {"file": file, "env": env, "key": str(n)}}
            peer.sendall(json.dumps(request).encode() + b"\n")
            assert b"submitted" in peer.recv(1000)
    assert len(room.ok("ps", "-o", "json")) < 50_000


def test_a_stopped_daemon_is_told_from_one_that_is_gone(room: Room) -> None:
    room.up("--devices", "1")
    assert room.daemon is not None
    room.daemon.send_signal(19)
    began = time.monotonic()
    silent = room.tool("ps")
    room.daemon.send_signal(18)
    assert silent.returncode == 2 and "did not answer within 30 s" in silent.stderr
    assert time.monotonic() < began + 45


def test_control_characters_do_not_reach_a_terminal(room: Room) -> None:
    room.up("--devices", "1")
    job = room.submit("job", ["sleep", "1000", "\x1b[2J"], workdir="/")
    wide = room.ok("ps", "-o", "wide")
    described = room.ok("describe", job)
    assert "\x1b" not in wide + described and "\\u{1b}[2J" in described
    missing = room.tool("describe", "\x1b[2J")
    assert missing.returncode == 2 and "\x1b" not in missing.stderr


def test_logs_follow_no_links_and_wait_for_no_pipe(room: Room) -> None:
    room.up("--devices", "1")
    job = room.submit("job", "echo hello; sleep 1000")
    room.until(lambda: room.ok("logs", job) == "hello\n")
    folder = room.state / "jobs/0/out"
    (folder / "log.1").symlink_to("/nonexistent")
    os.mkfifo(folder / "log.2")
    (folder / "log.3").symlink_to("/etc/passwd")
    assert room.daemon is not None
    began = time.monotonic()
    assert room.ok("logs", job) == "hello\n"
    assert time.monotonic() < began + 5
    (folder / "log").unlink()
    (folder / "log").symlink_to("/etc/passwd")
    assert room.ok("logs", job) == ""
