#!/usr/bin/env python3
"""Stress test of the daemon: random kills, and many jobs.

usage: machine.py [--kills N] [--seed N]

* crash: the daemon and its tenants are killed with `kill -9` at random, N times (default 500),
  while jobs are submitted; every job must end exactly once, and no job may run twice at the same
  time;
* crowd: 1,000 jobs wait and 200 tenants run and report; the daemon must stay below 100 MiB and
  below 5 % of one core, also while `roommate top` is open;
* parts: as crash, with a journal limit so small that new segments are started all the time.

The program is target/release/roommate, or $ROOMMATE_BIN. Exit status: 0 passed, 1 failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/live"))

from conftest import Room  # noqa: E402
from test_crash import crash_loop  # noqa: E402
from test_top import Screen  # noqa: E402

LIMIT_MIB = 100.0
LIMIT_CORE = 0.05
RUNNING, QUEUED = 200, 1000
MEASURE_S = 10.0

LOOP = """
import roommate, time
for _ in roommate.steps(lambda size: time.sleep(0.1) or size, batch_size=1): pass
"""


def crash(what: str, kills: int, seed: int, *flags: str) -> bool:
    room = Room()
    began = time.monotonic()
    try:
        crash_loop(room, kills, seed, *flags)
    except AssertionError as error:
        print(f"FAIL {what}: {error}")
        return False
    finally:
        room.close()
    print(
        f"ok   {what}: {kills} kills in {time.monotonic() - began:.0f} s, "
        "no job lost, none run twice"
    )
    return True


def crowd() -> bool:
    room = Room()
    try:
        room.up("--policy", "fifo", "--devices", str(RUNNING))
        job = room.job("tenant", json.dumps({"command": [sys.executable, "-c", LOOP]}))
        began = time.monotonic()
        room.ok("submit", *[job] * (RUNNING + QUEUED))
        print(f"     crowd: {RUNNING + QUEUED} jobs submitted in {time.monotonic() - began:.1f} s")
        room.until(lambda: sum(j["cooperative"] for j in room.jobs().values()) == RUNNING, 120.0)
        good = measured(room, "crowd")
        screen = Screen(room, every_s=1.0)
        good = measured(room, "watched", screen.read) and good
        screen.close()
    finally:
        room.close()
    return good


def measured(room: Room, what: str,
             meanwhile: Callable[[], object] = lambda: time.sleep(0.1)) -> bool:
    pid = json.loads(room.ok("describe", "-o", "json"))["pid"]
    used, at = cpu_s(pid), time.monotonic()
    while time.monotonic() < at + MEASURE_S:
        meanwhile()
    share = (cpu_s(pid) - used) / (time.monotonic() - at)
    rss = json.loads(room.ok("describe", "-o", "json"))["rss_mib"]
    states = [j["state"] for j in room.jobs().values()]
    running, waiting = states.count("running"), states.count("pending")
    good = rss <= LIMIT_MIB and share <= LIMIT_CORE and (running, waiting) == (RUNNING, QUEUED)
    print(
        f"{'ok  ' if good else 'FAIL'} {what}: {running} running, {waiting} waiting: "
        f"{rss:.1f} MiB (limit {LIMIT_MIB:g}), {share:.1%} of a core (limit {LIMIT_CORE:.0%})"
    )
    return good


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    good = [
        crowd(),
        crash("crash", args.kills, args.seed),
        crash("parts", args.kills // 5, args.seed, "--journal-mib", "0.002"),
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
