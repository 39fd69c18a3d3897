"""The policy `roommate` on a real machine, and what it learns across runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from conftest import Room

# Steps that compute, and steps that wait.
BUSY = """
import time, roommate
for n, _ in enumerate(roommate.steps(lambda size: size, batch_size=8)):
    if n == STEPS: break
    end = time.process_time() + 0.01
    while time.process_time() < end: pass
"""
SLEEPY = BUSY.replace("end = time.process_time() + 0.01", "time.sleep(0.01)").replace(
    "while time.process_time() < end: pass", "pass")


def python(code: str, steps: int = 60) -> list[str]:
    return [sys.executable, "-c", code.replace("STEPS", str(steps))]


def head(journal: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(journal.read_text().splitlines()[0])["head"]
    return found


def test_up_and_run_decide_by_roommate_unless_told_otherwise(room: Room) -> None:
    room.up("--devices", "2")
    assert json.loads(room.ok("describe", "-o", "json"))["policy"] == "roommate"
    jobs = [
        {"name": "busy", "command": python(BUSY)},
        {"name": "sleepy", "command": python(SLEEPY), "after": "0.1s"},
        {"name": "opaque", "command": "sleep 0.5", "after": "0.2s"},
        {"name": "opaque-busy", "command": "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"},
        {"name": "late", "command": python(BUSY), "class": "best-effort", "after": "0.4s"},
    ]
    mix = room.job("mix", json.dumps({"devices": 1, "jobs": jobs}))
    journal = room.folder / "mix.jsonl"
    [run] = json.loads(room.ok("run", mix, "--journal", str(journal), "-o", "json"))
    assert [job["state"] for job in run["jobs"]] == ["finished"] * 5
    assert head(journal)["policy"] == "roommate"
    assert room.ok("replay", str(journal)).startswith("same: ")


def test_a_job_that_the_policy_suspends_comes_back(room: Room) -> None:
    # One job at a time, and an old one makes room for a young one soon.
    sets = ["max_tasks=1", "typical_s=1", "push_ratio=1", "victim=0.1", "min_run_s=0.5", "scan_s=1"]
    room.up("--devices", "1", *[word for one in sets for word in ("--set", one)])
    room.python("old", python(SLEEPY, 400)[2])
    room.submit("old-opaque", "sleep 3")
    room.until(lambda: room.jobs()["old"]["done"] > 50)
    for n in range(2):
        room.python(f"young-{n}", python(SLEEPY, 30)[2])
        room.until_ended(f"young-{n}")
    room.until_ended("old", "old-opaque", within_s=30)
    assert {job["state"] for job in room.jobs().values()} == {"finished"}
    assert len(room.actions("suspend")) >= 1
    assert all(job["starts"] >= 1 and job["failures"] == 0 for job in room.jobs().values())
    assert room.replays()


def test_who_begins_beside_a_promised_job_is_measured_alone(room: Room) -> None:
    room.up("--devices", "1")
    # As if each were work of its own: what is known of a profile is not measured again.
    room.submit("promised", python(BUSY, 300), profile="a", **{"class": "guaranteed"})
    room.submit("guest", python(BUSY, 300), profile="b", **{"class": "best-effort"})
    room.until_ended("promised", "guest", within_s=60)
    steps = [json.loads(line).get("step", {}) for line in
             (room.state / "journal.jsonl").read_text().splitlines()]
    samples = [fact["sampled"] for step in steps for fact in step.get("facts", [])
               if "sampled" in fact]
    alone = [s["sample"]["step_s"] for s in samples if s["sample"].get("alone")]
    beside = [s["sample"]["step_s"] for s in samples
              if not s["sample"].get("alone") and "step_s" in s["sample"]]
    # A step computes for 10 ms, and takes longer beside another.
    assert alone and all(0.0095 < s < 0.016 for s in alone), alone
    assert max(beside) > 1.3 * max(alone), beside
    assert {job["state"] for job in room.jobs().values()} == {"finished"}
    assert all(job["failures"] == 0 for job in room.jobs().values())
    assert room.replays()


def learned(room: Room, *words: str) -> Any:
    return json.loads(room.ok("learned", "-o", "json", *words))


def work(room: Room) -> None:
    """Two kinds of work alone, then beside each other."""
    for turn in range(2):
        for name, code in (("busy", BUSY), ("sleepy", SLEEPY)):
            room.submit(f"{name}-{turn}", python(code), profile=name)
            if turn == 0:
                room.until_ended(f"{name}-{turn}")
        room.until_ended(f"busy-{turn}", f"sleepy-{turn}")


def test_what_was_learned_survives_restarts_and_begins_new_states(room: Room) -> None:
    room.up("--devices", "1")
    work(room)
    room.ok("down")
    assert room.daemon is not None
    room.daemon.wait()
    found = learned(room)
    kinds = {kind["name"]: kind for kind in found["kinds"]}
    assert set(kinds) == {"busy", "sleepy"} and all(k["jobs"] == 2 for k in kinds.values())
    assert sum(jobs for _, jobs in found["lengths"]) == 4
    for kind in kinds.values():
        [step] = kind["steps"]
        assert 0.009 < step["step_s"] < 0.05 and step["samples"] >= 1, step
    table = room.ok("learned")
    assert "kind of work" in table and "sleepy" in table
    # The same state goes on; another one begins with it.
    file = room.state / "learned.jsonl"
    room.up("--devices", "1")
    assert len(learned(room)["kinds"]) == 2
    refused = room.tool("learned", "--forget")
    assert refused.returncode != 0 and file.exists()
    room.kill()
    copy = room.folder / "copy.jsonl"
    copy.write_bytes(file.read_bytes())
    room.env["ROOMMATE_STATE"] = str(room.folder / "t")
    room.state = room.folder / "t"
    room.up("--devices", "1", "--learned", str(copy))
    begun = head(room.state / "journal.jsonl")["learned"]
    assert len(begun["steps"]) == 2 and sum(jobs for _, jobs in begun["lengths"]) == 4
    room.submit("again", python(SLEEPY), profile="sleepy")
    room.until_ended("again")
    assert room.replays()
    room.ok("down")
    room.daemon.wait()
    assert {k["name"]: k["jobs"] for k in learned(room, "--file", str(copy))["kinds"]} == {
        "busy": 2, "sleepy": 3}
    room.ok("learned", "--forget", "--file", str(copy))
    assert not copy.exists()


def test_damage_of_what_was_learned_prevents_nothing(room: Room) -> None:
    room.up("--devices", "1")
    room.submit("a", "true")
    room.submit("b", "sleep 0.1")
    room.until_ended("a", "b")
    room.ok("down")
    assert room.daemon is not None
    room.daemon.wait()
    file = room.state / "learned.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:-1], lines[-1].replace("name", "nome"), "noise"]) + "\n")
    assert "2 damaged lines" in room.tool("learned").stderr
    room.up("--devices", "1")
    assert "damaged lines" in room.ok("describe")
    assert len(learned(room)["kinds"]) == 1
    room.submit("c", "true")
    room.until_ended("c")
    assert room.state_of("c") == "finished"
