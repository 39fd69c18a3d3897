"""What is kept, for how long, and how a journal continues in a new part."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import time
from pathlib import Path
from typing import Any

import sealed
from conftest import BINARY, Room

LOOP = """
import roommate, time
for _ in roommate.steps(lambda size: time.sleep(0.01) or size, batch_size=1): pass
"""


def parts(path: Path) -> list[Path]:
    cut = path.parent.glob(path.name + ".[0-9]*")
    return [*sorted(cut, key=lambda p: int(p.suffix[1:])), path]


def journals(room: Room) -> list[str]:
    return [str(p) for p in parts(room.state / "journal.jsonl")]


def heads(room: Room) -> list[dict[str, Any]]:
    return [json.loads(Path(p).read_text().splitlines()[0])["head"] for p in journals(room)]


def test_a_log_is_rotated_and_followed_across_rotations(room: Room) -> None:
    room.up("--policy", "fifo", "--log-mib", "0.01", "--log-parts", "3")
    lines = 12_000
    talks = f"import time\nfor i in range({lines}):\n"
    talks += "  print(i, flush=True)\n  i % 500 or time.sleep(0.1)"
    name = room.python("talks", talks)
    with subprocess.Popen(
        [BINARY, "logs", "-f", name], env=room.env, stdout=subprocess.PIPE, text=True
    ) as follows:
        assert follows.stdout is not None
        seen = [int(line) for line in follows.stdout]
    assert seen == list(range(lines))
    files = parts(room.state / "jobs/0/out/log")
    assert len(files) == 4 and all(f.stat().st_size <= 10_486 for f in files)
    # Afterwards the last parts exist, without repetitions.
    kept = [int(line) for line in room.ok("logs", name).splitlines()]
    assert kept == list(range(kept[0], lines)) and len(kept) < lines


def test_the_last_output_is_kept_and_orphans_are_not_awaited(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "1")
    leaves = "sleep 1000 & head -c 50000 /dev/zero | tr '\\0' x; echo; echo last; exit 3"
    room.submit("leaves", leaves, retries=0)
    room.until_ended("leaves", within_s=10)
    assert room.ok("logs", "leaves") == "x" * 50_000 + "\nlast\n"
    assert room.state_of("leaves") == "failed: exit 3"


def test_logs_of_ended_jobs_are_removed_above_a_limit(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "1", "--keep-mib", "0.05")
    command = "head -c 30000 /dev/zero; touch $ROOMMATE_CHECKPOINT"
    names = [room.submit(f"j{i}", command) for i in range(3)]
    room.until_ended(*names)
    room.until(lambda: not (room.state / "jobs/1/out/log").exists(), 15)
    assert not (room.state / "jobs/0/out/log").exists() and (room.state / "jobs/2/out/log").exists()
    assert all((room.state / f"jobs/{i}/checkpoint").exists() for i in range(3))
    assert room.ok("logs", "j0") == "" and len(room.jobs()) == 3


def test_an_idle_daemon_begins_a_new_part_and_keeps_jobs(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "2", "--journal-mib", "0.01")
    for batch in range(4):
        command = "echo hello; exit $((RANDOM % 1))"
        names = [room.submit(f"j{batch}-{i}", command) for i in range(12)]
        room.until_ended(*names)
    room.until(lambda: len(journals(room)) >= 3)
    assert len(room.jobs()) == 48 and {j["state"] for j in room.jobs().values()} == {"finished"}
    assert room.ok("logs", "j0-0") == "hello\n"
    assert "ended already" in room.tool("cancel", "j0-0").stderr
    # Names are not reused, and every part replays.
    assert room.submit("j0-0", "true") == "j0-0-2"
    room.until_ended("j0-0-2")
    assert room.replays()
    # Commands read all parts.
    assert "finished" in room.ok("explain", "j0-0") and "finished" in room.ok("explain", "j3-11")
    events = room.ok("events")
    assert events.count("submitted") == 49 and events.count("finished") == 49
    room.kill()
    room.up()
    assert len(room.jobs()) == 49 and room.state_of("j1-3") == "finished"
    # The log holds the present part only.
    assert len((room.state / "journal.jsonl").read_bytes().splitlines()) < 200
    assert (room.state / "log").read_bytes().count(b" j") < 200
    room.ok("report", *journals(room), "-o", str(room.folder / "r.html"))


def test_old_parts_and_their_jobs_are_forgotten(room: Room) -> None:
    limits = ("--journal-mib", "0.002", "--journal-parts", "2", "--keep-days", "0")
    room.up("--policy", "fifo", "--devices", "2", *limits)
    for i in range(12):
        name = room.submit(f"j{i}", "true")
        # It may be forgotten as soon as it has ended.
        room.until(lambda name=name: room.jobs().get(name, {"ended": True})["ended"])
    room.until(lambda: len(journals(room)) == 3 and len(room.jobs()) < 6, 20)
    assert len(list((room.state / "jobs").glob("*/out/log"))) <= 2


def test_running_jobs_continue_in_a_new_part(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "3", "--journal-mib", "0.002")
    room.python("sdk", LOOP, steps=1_000_000)
    room.submit("opaque", "sleep 1000")
    room.submit("held", "sleep 1000")
    room.submit("waits", "sleep 1000", devices=3)
    room.until(lambda: room.jobs()["sdk"]["cooperative"])
    room.ok("suspend", "held")
    before = room.jobs()
    for i in range(20):
        room.submit(f"more{i}", "true", devices=3)
    room.until(lambda: len(journals(room)) >= 2)
    room.until(lambda: room.jobs()["sdk"]["cooperative"])
    after = room.jobs()
    for name in ("sdk", "opaque", "held"):
        assert after[name]["keeper_pid"] == before[name]["keeper_pid"]
        assert after[name]["starts"] == 1
    assert [after[n]["state"] for n in ("sdk", "opaque", "held", "waits")] == [
        "running",
        "running",
        "suspended",
        "pending",
    ]
    done = after["sdk"]["done"]
    assert done >= before["sdk"]["done"] and after["sdk"]["age_s"] > before["sdk"]["age_s"]
    room.until(lambda: room.jobs()["sdk"]["done"] > done)
    # Also after a crash.
    room.kill()
    room.up()
    room.until(lambda: room.jobs()["sdk"]["cooperative"])
    assert room.jobs()["opaque"]["keeper_pid"] == before["opaque"]["keeper_pid"]
    assert room.replays()
    room.ok("cancel", "sdk", "opaque", "held")
    room.until(lambda: room.state_of("waits") == "running")


def decide_differently(room: Room) -> None:
    """Changes decisions in the journal, as if the policy's code had changed since."""

    def swap(text: bytes) -> bytes:
        if not any(b"start" in part for part in text.split(b'"actions":')[1:]):
            return text
        swapped = text.replace(b'"gpus":[0]', b'"gpus":[9]')
        return swapped.replace(b'"gpus":[1]', b'"gpus":[0]').replace(b'"gpus":[9]', b'"gpus":[1]')

    lines = sealed.read(room.state / "log")
    changed = [(kind, swap(text) if kind == "j" else text) for kind, text in lines]
    assert changed != lines
    sealed.write(room.state / "log", changed)
    journal = b"".join(text + b"\n" for kind, text in changed if kind == "j")
    (room.state / "journal.jsonl").write_bytes(journal)


def test_jobs_are_kept_when_the_policy_decides_differently(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "2", "--backoff", "0.05")
    room.submit("past", "echo done")
    room.until_ended("past")
    room.python("runs", LOOP, steps=1_000_000)
    ends = "while [ ! -e go ]; do sleep 0.02; done; echo x >> ended; exit $(cat go)"
    room.submit("ends", ends)
    room.submit("fails", "sleep 0.1; [ -e failed ] || { touch failed; exit 1; }", retries=1)
    room.submit("waits", "echo x >> waited")
    room.until(lambda: room.jobs()["runs"]["cooperative"])
    supervisor = room.jobs()["runs"]["keeper_pid"]
    room.kill()
    (room.folder / "go").write_text("0")
    room.until(lambda: (room.folder / "ended").exists())
    time.sleep(0.2)
    decide_differently(room)
    room.up()
    jobs = room.jobs()
    assert sorted(jobs) == ["ends", "fails", "past", "runs", "waits"]
    assert jobs["runs"]["keeper_pid"] == supervisor and jobs["past"]["state"] == "finished"
    # It finished while no daemon ran, and is not run again.
    assert jobs["ends"]["state"] == "finished"
    room.until_ended("fails", "waits")
    assert room.state_of("fails") == "finished" and room.state_of("waits") == "finished"
    for name in ("ended", "waited"):
        assert (room.folder / name).read_text() == "x\n"
    assert room.jobs()["runs"]["keeper_pid"] == supervisor and room.state_of("runs") == "running"
    assert "decides differently now" in heads(room)[1]["continues"]
    assert "decides differently now" in room.ok("describe")
    assert room.ok("replay", journals(room)[-1]).startswith("same: ")


def test_a_state_of_an_earlier_version_is_read(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "1")
    room.submit("old", "true")
    room.until_ended("old")
    room.submit("held", "sleep 60")
    room.until(lambda: room.state_of("held") == "running")
    supervisor = room.jobs()["held"]["keeper_pid"]
    room.ok("suspend", "held")
    room.ok("down")
    make_old_store(room)
    room.up()
    assert room.state_of("old") == "finished"
    assert room.state_of("held") == "suspended"
    assert room.jobs()["held"]["keeper_pid"] == supervisor
    assert "held by its user" in room.ok("events")
    assert not (room.state / "store.db").exists() and (room.state / "store.db.imported").exists()
    room.ok("cancel", "held")
    assert room.submit("new", "true") == "new"
    room.until_ended("new")
    assert room.jobs()["new"]["idx"] == 2


def make_old_store(room: Room) -> None:
    """Turns the state into one of version 1: a database, with what users set in a table."""
    lines = sealed.read(room.state / "log")
    entries = [json.loads(text) for kind, text in lines if kind == "r"]
    jobs = {e["job"]["id"]: e["job"] for e in entries if "job" in e}
    outcomes = {e["outcome"]["id"]: e["outcome"]["outcome"] for e in entries if "outcome" in e}
    header = next(e["log"] for e in entries if "log" in e)
    with sqlite3.connect(room.state / "store.db") as store:
        store.execute("CREATE TABLE line (seq INTEGER PRIMARY KEY, text BLOB NOT NULL) STRICT")
        store.execute(
            "CREATE TABLE job (idx INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, "
            "name TEXT NOT NULL UNIQUE, row TEXT NOT NULL, checkpoint REAL NOT NULL DEFAULT 0, "
            "outcome TEXT, held INTEGER NOT NULL DEFAULT 0, batch INTEGER NOT NULL DEFAULT 0) STRICT"
        )
        store.execute("CREATE TABLE fact (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT")
        epoch = str(header["epoch_unix_us"])
        store.execute("INSERT INTO fact VALUES ('epoch_unix_us', ?)", (epoch,))
        journal = [text + b"\n" for kind, text in lines if kind == "j" and b'{"held":' not in text]
        store.executemany("INSERT INTO line (text) VALUES (?)", [(line,) for line in journal])
        for number, job in jobs.items():
            submission = (room.state / f"submissions/{number}").read_text().split(" ", 1)[1]
            row = json.dumps(json.loads(submission)["row"])
            store.execute(
                "INSERT INTO job VALUES (?, ?, ?, ?, 0, ?, ?, 0)",
                (number, job["key"], job["name"], row, outcomes.get(number), job["name"] == "held"),
            )
        store.execute("PRAGMA user_version = 1")
    shutil.rmtree(room.state / "submissions")
    (room.state / "log").unlink()
    (room.state / "journal.jsonl").write_bytes(b"".join(journal))


def test_time_slices_continue_across_rollovers_and_crashes(room: Room) -> None:
    flags = ("--journal-mib", "0.001")
    sets = ("--set", "slice_s=0.3", "--set", "pack=false")
    room.up("--policy", "gandiva", "--devices", "1", *sets, *flags)
    names = ("a", "b", "c")
    for name in names:
        room.submit(name, f"for i in $(seq 200); do echo $i >> ticks-{name}; sleep 0.02; done")
    for _ in range(2):
        before = len(journals(room))
        room.until(lambda before=before: len(journals(room)) > before)
        room.kill()
        room.up(*flags)
    room.until_ended(*names)
    for name in names:
        lines = (room.folder / f"ticks-{name}").read_text().split()
        assert lines == [str(i + 1) for i in range(200)] and room.state_of(name) == "finished"
    assert room.replays() and len(journals(room)) >= 3
