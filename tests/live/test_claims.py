"""Daemons that use the same cores."""

from __future__ import annotations

import json
import subprocess

from conftest import BINARY, Room


def test_cores_are_shared_unless_a_daemon_claims_them(room: Room) -> None:
    room.env["ROOMMATE_CLAIMS"] = str(room.folder)
    room.up("--claim")
    holder = json.loads(room.ok("describe", "-o", "json"))["pid"]
    beside = {**room.env, "ROOMMATE_STATE": str(room.folder / "t")}
    done = subprocess.run([BINARY, "up", "--claim"], env=beside, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode != 0
    assert f"is claimed by process {holder} of " in done.stderr, done.stderr
    assert "end that daemon" in done.stderr


def test_a_daemon_says_who_else_uses_its_cores(room: Room) -> None:
    room.env["ROOMMATE_CLAIMS"] = str(room.folder)
    room.up()
    first = json.loads(room.ok("describe", "-o", "json"))
    assert "used by" not in first["enforcement"]["what"]
    other = Room()
    try:
        other.env["ROOMMATE_CLAIMS"] = str(room.folder)
        other.up()
        what = json.loads(other.ok("describe", "-o", "json"))["enforcement"]["what"]
    finally:
        other.close()
    assert f"the cores are also used by process {first['pid']} of " in what
