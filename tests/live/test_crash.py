"""`kill -9` at any moment loses no job and starts none twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

from conftest import Room

# A job that records when it begins and ends, and notices if it runs twice at the same time.
CAREFUL = """
import fcntl, os, sys, time
lock = open("lock-" + NAME, "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    open("doubled", "a").write(NAME + "\\n")
open("begun-" + NAME, "a").write("x")
time.sleep(LENGTH)
open("ended-" + NAME, "a").write("x")
"""


def careful(name: str, length: float) -> str:
    return CAREFUL.replace("NAME", repr(name)).replace("LENGTH", str(length))


def test_jobs_survive_a_killed_daemon_and_are_found_again(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "2")
    room.python("long", careful("long", 4.0))
    room.python("short", careful("short", 0.3))
    room.python("waits", careful("waits", 0.1))
    begun = [room.folder / f"begun-{name}" for name in ("long", "short")]
    room.until(lambda: all(path.exists() for path in begun))
    supervisor = room.jobs()["long"]["keeper_pid"]
    room.kill()
    room.until(lambda: (room.folder / "ended-short").exists())
    began = time.monotonic()
    room.up()
    jobs = room.jobs()
    took = time.monotonic() - began
    assert jobs["long"]["state"] == "running" and jobs["long"]["keeper_pid"] == supervisor
    assert jobs["short"]["state"] == "finished"
    assert took < 2.0, f"found again after {took:.1f} s"
    room.until_ended("long", "short", "waits")
    for name in ("long", "short", "waits"):
        assert (room.folder / f"begun-{name}").read_text() == "x"
        assert (room.folder / f"ended-{name}").read_text() == "x"
    assert room.replays()


def test_many_ended_jobs_do_not_slow_down_recovery(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "8")
    room.ok("submit", *[room.job("past", "command: ['true']")] * 60)
    room.until(lambda: all(j["ended"] for j in room.jobs().values()))
    room.kill()
    began = time.monotonic()
    room.up()
    assert time.monotonic() - began < 2.0
    assert {j["state"] for j in room.jobs().values()} == {"finished"}


def test_a_tenant_with_the_sdk_reconnects_to_a_new_daemon(room: Room) -> None:
    code = """
import roommate, time
for n, _ in enumerate(roommate.steps(lambda size: time.sleep(0.01) or size, batch_size=1)):
    if n == 400: break
"""
    room.up("--policy", "fifo", "--devices", "1")
    room.python("sdk", code)
    room.until(lambda: room.jobs()["sdk"]["cooperative"])
    room.kill()
    room.up()
    room.until(lambda: room.jobs()["sdk"]["cooperative"], 5.0)
    room.ok("suspend", "sdk")
    room.kill()
    room.up()
    assert room.state_of("sdk") == "suspended"
    done = room.jobs()["sdk"]["done"]
    room.until(lambda: room.jobs()["sdk"]["cooperative"], 5.0)
    time.sleep(0.3)
    room.ok("resume", "sdk")
    room.until_ended("sdk")
    assert room.state_of("sdk") == "finished" and done < 400
    assert room.jobs()["sdk"]["starts"] == 1


def test_a_suspended_job_survives_the_daemon(room: Room) -> None:
    room.up("--policy", "gandiva", "--devices", "1", "--set", "slice_s=0.4", "--set", "pack=false")
    for name in ("a", "b"):
        room.submit(name, f"for i in $(seq 100); do echo $i >> ticks-{name}; sleep 0.02; done")
    room.until(lambda: len(room.actions("suspend")) >= 1)
    room.kill()
    room.up()
    room.until_ended("a", "b")
    for name in ("a", "b"):
        assert len((room.folder / f"ticks-{name}").read_text().splitlines()) == 100
        assert room.state_of(name) == "finished"
    assert room.replays()


def test_checkpoints_survive_a_killed_tenant(room: Room) -> None:
    code = """
import os, roommate, time
path = os.environ["ROOMMATE_CHECKPOINT"]
done = float(open(path).read()) if os.path.exists(path) else 0.0
# It may have been killed after it saved and before it reported it.
assert roommate.start_done() <= done, (roommate.start_done(), done)
it = roommate.steps(lambda size: time.sleep(0.01) or size, batch_size=1, done=done)
@roommate.on_checkpoint
def save():
    open(path, "w").write(str(it.done))
for _ in it:
    if it.done % 10 == 0: it.checkpoint()
    if it.done >= 100: break
"""
    room.up("--policy", "fifo", "--devices", "1", "--backoff", "0.05")
    room.python("saves", code, checkpoint="saved", retries=3)
    room.until(lambda: (room.folder / "saved").exists() and room.jobs()["saves"]["done"] > 30)
    os.killpg(room.jobs()["saves"]["keeper_pid"], signal.SIGKILL)
    room.until_ended("saves")
    assert room.state_of("saves") == "finished"
    assert room.jobs()["saves"]["starts"] == 2
    facts = [fact for step in room.steps() for fact in step.get("facts", [])]
    survived = [fact["failed"]["done"] for fact in facts if "failed" in fact]
    assert len(survived) == 1 and survived[0] >= 30


def kill_one(rng: random.Random, keeper: int) -> None:
    """Kills a job's keeper, its process, or both at once."""
    what = rng.choice(["both", "keeper", "tenant"])
    # It may just have ended by itself.
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        if what == "both":
            os.killpg(keeper, signal.SIGKILL)
        elif what == "keeper":
            os.kill(keeper, signal.SIGKILL)
        else:
            children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
            for child in children:
                os.kill(int(child), signal.SIGKILL)


def crash_loop(room: Room, kills: int, seed: int, *flags: str) -> None:
    """Submits jobs while daemon, keepers and tenants are killed at random."""
    rng = random.Random(seed)
    room.up("--policy", "fifo", "--devices", "4", "--backoff", "0.05", *flags)
    names: list[str] = []
    for _ in range(kills):
        name = f"j{len(names)}"
        names.append(name)
        room.python(name, careful(name, rng.choice([0.05, 0.3])), retries=1000)
        time.sleep(rng.uniform(0.0, 0.2))
        if rng.random() < 0.6:
            room.kill()
            room.up(*flags)
            continue
        pids = [j["keeper_pid"] for j in room.jobs().values() if j["keeper_pid"]]
        if pids:
            kill_one(rng, rng.choice(pids))
    room.until_ended(*names, within_s=120.0)
    jobs = room.jobs()
    assert sorted(jobs) == sorted(names)
    assert {j["state"] for j in jobs.values()} == {"finished"}
    assert not (room.folder / "doubled").exists()
    for name in names:
        begun, ended = ((room.folder / f"{what}-{name}").read_text() for what in ("begun", "ended"))
        failures = jobs[name]["failures"]
        # Each attempt begins at most once; it may have been killed before that.
        assert 1 <= len(ended) <= len(begun) <= failures + 1, (name, begun, ended, failures)
    assert room.replays()


def test_random_kills_lose_no_job_and_start_none_twice(room: Room) -> None:
    crash_loop(room, kills=12, seed=7)


def test_random_kills_during_rollovers(room: Room) -> None:
    crash_loop(room, 25, 8, "--journal-mib", "0.002")
    assert len(list(room.state.glob("journal.jsonl.*"))) >= 2
