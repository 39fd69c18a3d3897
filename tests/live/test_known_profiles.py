"""Earlier measurements reach a live policy: `--profiles`."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import Room

STEPS = """
import roommate, time
for _ in roommate.steps(lambda size: time.sleep(0.01) or size, batch_size=1): pass
"""

SOLO = {"kind": "train", "batch": 1, "sms": 132, "mem_mib": 10, "it_s": 100.0, "n": 50}
PAIR = {"k": "tt", "a": "a", "batch_a": 1, "b": "b", "batch_b": 1}
RATE = {"it_s": 90.0, "n": 50}


def measured(folder: Path) -> str:
    """Two tasks that keep nine tenths of their speed beside each other."""
    rows = [SOLO | {"name": "a"}, SOLO | {"name": "b"}, PAIR | {"ra": RATE, "rb": RATE}]
    path = folder / "measured.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# Gavel solves again after `reset_s` at the earliest: with the published 32 minutes, a pair that
# arrives one after the other takes turns until then.
PACKED = ("--devices", "1", "--policy", "gavel-packed", "--set", "round_s=1", "--set", "reset_s=1")


def submit_both(room: Room) -> None:
    for name in ("a", "b"):
        room.python(name, STEPS, profile=f"{name}@1", steps=100_000)


def test_measured_pairs_and_profiles_are_in_the_journal(room: Room) -> None:
    room.up(*PACKED, "--profiles", measured(room.folder))
    submit_both(room)
    room.until(lambda: any(j["state"] == "running" for j in room.jobs().values()))
    lines = [json.loads(line) for line in (room.state / "journal.jsonl").read_text().splitlines()]
    [head] = [line["head"] for line in lines if "head" in line]
    [[_, first, second, speeds]] = head["known_pairs"]["pairs"]
    assert (first, second) == (0, 1) and all(abs(speed - 0.9) < 1e-6 for speed in speeds)
    assert [line["profile"]["name"] for line in lines if "profile" in line] == ["a@1", "b@1"]
    # The measurements are in the journal, so a restarted daemon decides the same.
    room.kill()
    room.up()
    assert len(room.jobs()) == 2 and room.replays()


def running(room: Room) -> list[str]:
    return [name for name, job in room.jobs().items() if job["state"] == "running"]


def test_a_measured_pair_shares_one_device(room: Room) -> None:
    room.up(*PACKED, "--profiles", measured(room.folder))
    submit_both(room)
    room.until(lambda: running(room) == ["a", "b"])
    assert room.actions("stop") == []


def test_an_unknown_pair_takes_turns(room: Room) -> None:
    room.up(*PACKED)
    submit_both(room)
    turns: set[str] = set()
    while len(turns) < 2:
        room.until(lambda: len(running(room)) > 0)
        now = running(room)
        assert len(now) <= 1, "gavel-packed packs a pair that nobody measured"
        turns.update(now)


def test_profiles_other_than_those_of_the_state_are_refused(room: Room) -> None:
    room.up("--devices", "1")
    room.kill()
    done = room.tool("up", "--profiles", measured(room.folder))
    assert done.returncode == 2
    assert "the state was begun with other profiles, or none" in done.stderr
