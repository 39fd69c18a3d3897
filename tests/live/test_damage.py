"""Damaged, lost and foreign files of a state: nothing is lost in silence, nobody else is hurt."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from conftest import Room


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def line_with(path: Path, text: bytes) -> int:
    """Where a text is in a file."""
    return path.read_bytes().index(text)


def filled(room: Room) -> dict[str, int]:
    """A killed daemon with two running jobs, three that wait and one that has ended."""
    room.up("--policy", "fifo", "--devices", "2")
    room.submit("past", "true")
    room.until_ended("past")
    for name in ("runs", "also"):
        room.submit(name, "sleep 1000")
    for i in range(3):
        room.submit(f"waits{i}", "sleep 1000")
    room.until(lambda: [room.state_of(n) for n in ("runs", "also")] == ["running"] * 2)
    keepers = {name: room.jobs()[name]["keeper_pid"] for name in ("runs", "also")}
    room.kill()
    return keepers


ALL = {"past", "runs", "also", "waits0", "waits1", "waits2"}


def check(room: Room, keepers: dict[str, int]) -> None:
    jobs = room.jobs()
    assert set(jobs) == ALL and "policy   fifo" in room.ok("describe")
    assert {n: jobs[n]["keeper_pid"] for n in keepers} == keepers
    assert jobs["past"]["state"] == "finished" and jobs["waits0"]["state"] == "pending"
    assert room.submit("new", "sleep 1000") == "new"
    assert room.jobs()["new"]["idx"] == 6


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_of_the_log_loses_no_job(room: Room, seed: int) -> None:
    keepers = filled(room)
    log = room.state / "log"
    flip(log, random.Random(seed).randrange(log.stat().st_size))
    room.up()
    assert "notice" in room.ok("describe") and (room.state / "notices").exists()
    assert list(room.state.glob("log.damaged-*"))
    check(room, keepers)
    room.kill()
    room.up()
    assert "notice" not in room.ok("describe")


def test_a_step_lost_from_log_and_copy_begins_a_new_part(room: Room) -> None:
    keepers = filled(room)
    for file in ("log", "journal.jsonl"):
        flip(room.state / file, line_with(room.state / file, b'{"submitted":3}'))
    room.up()
    assert "part 2" in room.ok("describe") and "1 line of it" in room.ok("describe")
    check(room, keepers)


def test_a_lost_log_is_an_alarm_until_the_doctor_rebuilds_it(room: Room) -> None:
    keepers = filled(room)
    (room.state / "log").write_bytes(b"")
    done = room.tool("up")
    assert done.returncode == 2 and "has lost its log" in done.stderr
    assert "files of 6 jobs" in done.stderr and "hint: `roommate doctor --repair`" in done.stderr
    found = room.tool("doctor")
    assert found.returncode == 1 and "the log is missing" in found.stdout
    done = room.tool("doctor", "--repair")
    assert done.returncode == 0 and "the state is sound" in done.stdout
    assert room.tool("doctor").returncode == 0
    room.up()
    assert room.tool("doctor").returncode == 2
    check(room, keepers)


def test_without_any_head_no_policy_is_made_up(room: Room) -> None:
    filled(room)
    for file in ("log", "journal.jsonl"):
        flip(room.state / file, line_with(room.state / file, b'"policy":"fifo"'))
    done = room.tool("up")
    assert done.returncode == 2 and "the head of its journal" in done.stderr
    assert "hint: `roommate doctor`" in done.stderr


def test_a_job_whose_submission_is_damaged_is_quarantined(room: Room) -> None:
    keepers = filled(room)
    runs, waits = room.state / "submissions/1", room.state / "submissions/3"
    for file in (runs, waits):
        flip(file, 100)
    room.up()
    jobs = room.jobs()
    assert set(jobs) == ALL and jobs["also"]["keeper_pid"] == keepers["also"]
    for name in ("runs", "waits0"):
        assert jobs[name]["state"].startswith("quarantined: its submission is unreadable")
        assert "is quarantined" in room.tool("cancel", name).stderr
    assert f"keeper {keepers['runs']} runs on" in jobs["runs"]["state"]
    assert room.submit("waits0", "sleep 1000") == "waits0-2"
    # One is put back and goes on with its process; the other is given up.
    room.ok("down")
    flip(runs, 100)
    waits.unlink()
    shutil.rmtree(room.state / "jobs/3", ignore_errors=True)
    room.up()
    jobs = room.jobs()
    assert jobs["runs"]["keeper_pid"] == keepers["runs"] and "waits0" not in jobs
    room.until(lambda: room.state_of("runs") in ("running", "waits in memory"))


def test_environments_do_not_outlive_their_jobs(room: Room) -> None:
    room.up("--policy", "fifo")
    room.submit("ends", "echo $HIDDEN", env={"HIDDEN": "a-secret-of-the-user"})
    room.submit("runs", "sleep 1000", env={"HIDDEN": "a-secret-of-the-user"})
    room.until_ended("ends")
    assert "a-secret" in room.ok("logs", "ends")
    of = {i: (room.state / f"submissions/{i}").read_text() for i in range(2)}
    assert "a-secret" not in of[0] and "PATH" not in of[0]
    assert "a-secret" in of[1] and "PATH" in of[1]
    for file in ("log", "journal.jsonl"):
        assert "a-secret" not in (room.state / file).read_text()


def test_a_daemon_whose_state_is_taken_away_ends(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "1")
    room.submit("runs", "sleep 1000")
    first, before = room.daemon, (room.state / "log").read_bytes()
    assert first is not None and first.stderr is not None
    (room.state / "lock").unlink()
    assert first.wait(20) == 2
    assert "is not its own any more: it was removed" in first.stderr.read()
    assert (room.state / "log").read_bytes() == before
    room.up()
    assert room.state_of("runs") == "running"
    second = room.daemon
    assert second is not None and second.stderr is not None
    aside = room.folder / "aside"
    room.state.rename(aside)
    assert second.wait(20) == 2
    assert "it was removed" in second.stderr.read()
    aside.rename(room.state)
    room.up()
    assert room.state_of("runs") == "running"
