"""Jobs as processes: they run, fail, are held, share and are time-sliced."""

from __future__ import annotations

import json
import os
import socket
import sys
import time

from conftest import Room, group_rss_mib

# A loop that uses the SDK and records each step in the file `ticks`.
LOOP = """
import time, roommate
ticks = open("ticks-" + NAME, "a", buffering=1)
for n, batch in enumerate(roommate.steps(lambda size: size, batch_size=8, min=4, max=16)):
    if n == STEPS: break
    time.sleep(0.01)
    ticks.write(f"{n} {batch} {time.time()}\\n")
"""


def loop(name: str, steps: int) -> str:
    return LOOP.replace("NAME", repr(name)).replace("STEPS", str(steps))


def ticks(room: Room, name: str) -> int:
    path = room.folder / f"ticks-{name}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_jobs_run_to_their_end_and_the_journal_replays(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "1")
    room.submit("hello", "echo hello from $ROOMMATE_JOB; echo problem >&2")
    room.submit("second", ["sh", "-c", "exit 0"])
    room.until_ended("hello", "second")
    assert room.state_of("hello") == room.state_of("second") == "finished"
    assert room.ok("logs", "hello") == "hello from hello\nproblem\n"
    assert "finished" in room.ok("events") and "finished" in room.ok("explain", "second")
    assert room.replays()


def test_failures_are_retried_by_class_with_pauses(room: Room) -> None:
    room.up("--policy", "fifo", "--backoff", "0.1")
    room.submit("crashes", "echo try; exit 1", retries=2)
    room.submit("wrong", "echo try; exit 2", retries={"user": 0, "infra": 5, "unknown": 5})
    room.submit(
        "killed",
        "[ -e tried ] || { touch tried; kill -9 $$; }",
        retries={"user": 0, "infra": 1, "unknown": 0},
    )
    room.until_ended("crashes", "wrong", "killed")
    jobs = room.jobs()
    assert jobs["crashes"]["state"] == "failed: exit 1" and jobs["crashes"]["starts"] == 3
    assert jobs["wrong"]["state"] == "failed: exit 2" and jobs["wrong"]["starts"] == 1
    assert jobs["killed"]["state"] == "finished" and jobs["killed"]["starts"] == 2
    assert room.ok("logs", "crashes") == "try\n" * 3
    pauses = [n["why"] for s in room.steps() for n in s.get("notes", []) if "backs_off" in str(n)]
    assert {"backs_off": 100_000} in pauses and {"backs_off": 200_000} in pauses


def test_a_suspended_job_makes_no_progress_until_resumed(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "2")
    room.python("sdk", loop("sdk", 100_000))
    room.submit("opaque", "i=0; while :; do i=$((i+1)); echo $i > ticks-opaque; sleep 0.01; done")

    def count(name: str) -> int:
        path = room.folder / f"ticks-{name}"
        text = path.read_text().strip() if path.exists() else ""
        return ticks(room, "sdk") if name == "sdk" else int(text or 0)

    for name in ("sdk", "opaque"):
        room.until(lambda name=name: count(name) > 5)
        room.ok("suspend", name)
        assert room.state_of(name) == "suspended"
        time.sleep(0.2)  # one step may still be under way
        before = count(name)
        time.sleep(0.3)
        assert count(name) == before
        assert "already" in room.tool("suspend", name).stderr
        room.ok("resume", name)
        room.until(lambda name=name, before=before: count(name) > before)
    room.ok("cancel", "sdk", "opaque")
    room.until(lambda: room.jobs()["sdk"]["keeper_pid"] is None)
    assert room.state_of("sdk") == "cancelled"
    assert room.replays()


def test_a_new_batch_size_applies_at_the_next_step(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "1")
    room.python("loop", loop("loop", 100_000))
    room.until(lambda: ticks(room, "loop") > 5)
    asked = time.time()
    room.ok("resize", "loop", "--batch", "16")
    answered = time.time()
    room.until(lambda: room.jobs()["loop"]["batch"] == 16)
    lines = [line.split() for line in (room.folder / "ticks-loop").read_text().splitlines()]
    first = next(i for i, (_, batch, _) in enumerate(lines) if batch == "16")
    # At most the step that was running at the time of the request has the old size.
    late = [at for _, batch, at in lines[:first] if float(at) > answered]
    assert len(late) <= 1 and float(lines[first][2]) > asked
    assert {batch for _, batch, _ in lines[first:]} == {"16"}
    too_much = room.tool("resize", "loop", "--batch", "64")
    assert too_much.returncode == 2 and "works with batches of 4 to 16, not 64" in too_much.stderr
    room.kill()
    room.up()
    room.until(lambda: room.jobs()["loop"]["cooperative"] and room.jobs()["loop"]["batch"] == 16)


def test_suspension_frees_memory(room: Room) -> None:
    code = """
import roommate, time
held = [bytearray(64 << 20)]
roommate.on_suspend(held.clear)
roommate.on_resume(lambda: held.append(bytearray(64 << 20)))
for _ in roommate.steps(lambda size: time.sleep(0.01) or size, batch_size=1): pass
"""
    room.up("--policy", "fifo", "--devices", "1")
    room.python("large", code)
    room.until(lambda: (room.jobs()["large"]["mem_mib"] or 0) > 64)
    group = room.pid_of("large")
    assert group_rss_mib(group) > 64
    room.ok("suspend", "large")
    room.until(lambda: group_rss_mib(group) < 64)
    room.ok("resume", "large")
    room.until(lambda: group_rss_mib(group) > 64)


def test_gandiva_time_slices_jobs_by_suspension(room: Room) -> None:
    room.up("--policy", "gandiva", "--devices", "1", "--set", "slice_s=0.4", "--set", "pack=false")
    names = [room.python(n, loop(n, 120)) for n in ("a", "b", "c")]
    room.until_ended(*names)
    assert {room.state_of(n) for n in names} == {"finished"}
    # No job was started twice: waiting jobs were suspended in memory.
    assert [ticks(room, n) for n in names] == [120] * 3
    assert len(room.actions("suspend")) >= 3
    assert all(len(list((room.state / "jobs" / str(i)).glob("*.*"))) == 1 for i in range(3))
    assert room.replays()


def test_a_job_without_the_sdk_is_time_sliced_as_well(room: Room) -> None:
    room.up("--policy", "gandiva", "--devices", "1", "--set", "slice_s=0.3", "--set", "pack=false")
    for name in ("a", "b"):
        room.submit(name, f"for i in $(seq 80); do echo $i >> ticks-{name}; sleep 0.01; done")
    room.until_ended("a", "b")
    assert ticks(room, "a") == ticks(room, "b") == 80
    assert len(room.actions("suspend")) >= 1


def test_an_invalid_tenant_does_not_disturb_other_tenants(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "2")
    room.python("good", loop("good", 60))
    room.until(lambda: room.jobs()["good"]["cooperative"])
    for line, why in (
        (b"nonsense\n", "line 1: expected value"),
        (
            b'{"hello":{"version":1,"token":"0.1.stolen","pid":1}}\n',
            "the token is not that of a job",
        ),
        (b'{"hello":{"version":9,"token":"","pid":1}}\n', "the SDK uses protocol version 9"),
    ):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(room.state / "tenant.sock"))
            peer.sendall(line)
            reply = json.loads(peer.makefile().readline())
            assert reply["refused"]["reason"].startswith(why)
    room.until_ended("good")
    assert room.state_of("good") == "finished"


def test_only_the_owner_can_access_sockets_and_state(room: Room) -> None:
    room.up()
    for name, mode in ((".", 0o700), ("control.sock", 0o600), ("tenant.sock", 0o600)):
        assert os.stat(room.state / name).st_mode & 0o777 == mode


def test_a_mix_runs_in_the_foreground_and_writes_a_report(room: Room) -> None:
    jobs = [
        {"name": "one", "command": [sys.executable, "-c", loop("one", 30)]},
        {"name": "two", "command": "sleep 0.2", "after": "0.1s"},
    ]
    mix = room.job("mix", json.dumps({"policy": "fifo", "devices": 2, "jobs": jobs}))
    report, journal = room.folder / "r.html", room.folder / "j.jsonl"
    files = ("--report", str(report), "--journal", str(journal))
    out = room.ok("run", mix, "--versus-exclusive", *files)
    assert "one job per device" in out and "times as fast" in out
    assert "one at a time" not in out
    assert "<html" in report.read_text()
    assert room.ok("replay", str(journal)).startswith("same: ")
    bad = room.job("bad", json.dumps({"jobs": [{"name": "x", "command": "echo oh; exit 3"}]}))
    done = room.tool("run", bad, "--backoff", "0")
    assert done.returncode == 1 and "failed: exit 3" in done.stdout and "  oh" in done.stderr
    assert "hint:" not in done.stderr
    # -I: a Python that does not see the SDK, wherever it is installed for this test.
    lacks = {"name": "x", "command": [sys.executable, "-I", "-S", "-c", "import roommate"]}
    done = room.tool("run", room.job("lacks", json.dumps({"jobs": [lacks]})), "--backoff", "0")
    assert done.returncode == 1 and "pip install ./python" in done.stderr
