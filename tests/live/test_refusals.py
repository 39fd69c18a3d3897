"""Refusals are explained, and nothing is lost."""

from __future__ import annotations

import os
import resource
import signal

import pytest
import sealed
from conftest import Room


def test_bad_job_files(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "2")
    cases = [
        ("command: [", "not YAML", "--example"),
        ("comand: ls", 'unknown field "comand"', 'did you mean "command"?'),
        (
            "command: [no-such-program]",
            'there is no program "no-such-program" in PATH',
            "give a path",
        ),
        ("command: ls\nworkdir: nowhere", "does not exist", "relative to the job file"),
        (
            "command: ls\ndevices: 99",
            "it needs 99 devices, this machine has 2",
            "ask for less",
        ),
        (
            "command: ls\nmemory_mib: 99000000",
            "can never run: it needs 99000000 MiB",
            "ask for less",
        ),
        ("command: ls\nclass: service", "service: a job of `class: service` needs this section", "--example"),
    ]
    for text, what, hint in cases:
        done = room.tool("submit", room.job("bad", text))
        assert done.returncode == 2
        error, hint_line = done.stderr.splitlines()
        assert what in error and hint_line.startswith("hint: ") and hint in hint_line
    assert room.jobs() == {}
    done = room.tool("submit", str(room.folder / "none.yaml"))
    assert done.returncode == 2 and "could not read" in done.stderr


def test_one_bad_file_of_several_submits_nothing(room: Room) -> None:
    room.up("--policy", "fifo")
    good, bad = room.job("good", "command: ls"), room.job("bad", "comand: ls")
    assert room.tool("submit", good, bad).returncode == 2
    assert room.jobs() == {}


def test_a_dry_run_submits_nothing(room: Room) -> None:
    room.up("--policy", "fifo")
    done = room.ok("submit", "--dry-run", room.job("x", "command: ls"))
    assert done == 'job "x" would be accepted\n'
    assert room.jobs() == {}
    assert room.ok("submit", "--example").startswith("# A job for")


def test_unknown_jobs_are_named(room: Room) -> None:
    room.up("--policy", "fifo")
    room.submit("resnet", "true")
    for verb in ("cancel", "suspend", "resume", "describe", "logs"):
        done = room.tool(verb, "resent")
        assert done.returncode == 2
        assert 'there is no job "resent"' in done.stderr and 'did you mean "resnet"?' in done.stderr
    assert "no journal" not in room.tool("explain", "nobody").stderr


def test_without_a_daemon(room: Room) -> None:
    for words in (["ps"], ["describe"], ["cancel", "x"]):
        done = room.tool(*words)
        assert done.returncode == 2
        assert "no daemon answers" in done.stderr and "roommate up" in done.stderr
    done = room.tool("events")
    assert done.returncode == 2 and "there is no journal" in done.stderr


def test_a_socket_without_permission(room: Room) -> None:
    room.up("--policy", "fifo")
    room.submit("mine", "sleep 1000")

    def another() -> None:
        # Only root can become another user; otherwise the mode of the socket denies access.
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)

    # The test's folder must not be what denies access.
    room.folder.chmod(0o755)
    if os.getuid() != 0:
        (room.state / "control.sock").chmod(0)
    for words in (["ps"], ["cancel", "mine"], ["submit", room.job("x", "command: ls")], ["down"]):
        done = room.tool(*words, preexec_fn=another)
        assert done.returncode == 2
        assert "no daemon answers" in done.stderr and "Permission denied" in done.stderr
        assert "hint: the socket belongs to another user" in done.stderr
    (room.state / "control.sock").chmod(0o600)
    assert {name: j["state"] for name, j in room.jobs().items()} == {"mine": "running"}


def test_a_second_daemon_and_another_policy_are_refused(room: Room) -> None:
    room.up("--policy", "fifo")
    second = room.tool("up")
    assert second.returncode == 2 and "another daemon uses the state" in second.stderr
    assert room.ok("down") == ""
    other = room.tool("up", "--policy", "srtf")
    assert other.returncode == 2 and 'begun with policy "fifo", not "srtf"' in other.stderr
    unknown = room.tool("up", "--policy", "nonsense")
    assert unknown.returncode == 2


def test_a_newer_store_is_left_alone(room: Room) -> None:
    room.up("--policy", "fifo")
    room.ok("down")
    lines = sealed.read(room.state / "log")
    newer = lines[0][1].replace(b'"version":4', b'"version":99')
    sealed.write(room.state / "log", [("r", newer), *lines[1:]])
    done = room.tool("up")
    assert done.returncode == 2 and "has version 99, this program reads up to 4" in done.stderr
    assert "hint: use the program that wrote it" in done.stderr


def test_a_full_disk_ends_the_daemon_and_loses_nothing(room: Room) -> None:
    def little_room() -> None:
        # Larger files fail with an error instead of a signal, as on a full disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    room.up("--policy", "fifo", "--devices", "1", preexec_fn=little_room, restore_signals=False)
    taken = []
    for i in range(200):
        done = room.tool("submit", room.job(f"j{i}", "command: sleep 1000"), timeout=60)
        if done.returncode != 0:
            break
        taken.append(done.stdout.strip())
    assert done.returncode == 2, "the disk was never full"
    assert room.daemon is not None
    assert room.daemon.wait(20) == 2
    assert room.daemon.stderr is not None
    said = room.daemon.stderr.read()
    assert "could not write" in said and str(room.state / "log") in said
    room.up()
    assert set(taken) <= set(room.jobs())
    assert room.state_of(taken[0]) == "running"
    assert len(taken) > 3


@pytest.mark.parametrize("flag", [["--devices", "0"], ["--set", "nonsense=1"], ["--backoff", "-1"]])
def test_bad_flags(room: Room, flag: list[str]) -> None:
    assert room.tool("up", *flag).returncode == 2
