"""Shares are enforced, and guaranteed jobs are not disturbed. Everything is measured."""

from __future__ import annotations

import json
import statistics
import sys
import time

import pytest
from conftest import BackgroundLoad, Room, group_cpu_s

# Computes as fast as it may, in steps of 5 ms.
BUSY = """
import roommate, time
def work(size):
    end = time.process_time() + 0.005
    while time.process_time() < end: pass
    return size
for _ in roommate.steps(work, batch_size=1): pass
"""

TIERS = [[], ["--no-cgroups"]]


def tier_of(room: Room) -> str:
    return str(json.loads(room.ok("describe", "-o", "json"))["enforcement"]["tier"])


WINDOW_S = 2.4
"""CPU time is counted in hundredths of a second, too coarse for small shares in less time."""


def assert_shares(groups: dict[str, int], share: float) -> None:
    """Within 10 %, all groups in one window. With background load all may get less, and only then
    the measurement is repeated. None may ever get more.
    """
    seen: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(4):
        background = BackgroundLoad()
        began, before = time.monotonic(), {n: group_cpu_s(g) for n, g in groups.items()}
        time.sleep(WINDOW_S)
        for name, group in groups.items():
            got = (group_cpu_s(group) - before[name]) / (time.monotonic() - began)
            seen[name].append(got)
            assert got <= 1.1 * share, f"{name} got {got:.3f} instead of {share}"
        if all(got[-1] >= 0.9 * share for got in seen.values()):
            return
        background.assert_high(f"{seen} instead of {share}")
    pytest.skip(f"background load is too high; {seen} instead of {share} is not conclusive")


@pytest.mark.parametrize("flags", TIERS, ids=["usual", "no-cgroups"])
def test_shares_are_exact_and_follow_changes(room: Room, flags: list[str]) -> None:
    room.up("--policy", "fifo", "--devices", "2", *flags)
    if flags:
        assert tier_of(room) == "cooperative"
    room.python("sdk", BUSY, share=0.3)
    room.submit("opaque", [sys.executable, "-c", "while True: pass"], share=0.3)
    room.until(lambda: room.jobs()["sdk"]["cooperative"] and room.state_of("opaque") == "running")
    groups = {name: room.pid_of(name) for name in ("sdk", "opaque")}
    assert_shares(groups, 0.3)
    # Smaller, larger again, and never above the guaranteed share.
    for share, kept in ((0.15, 0.15), (0.25, 0.25), (0.9, 0.3)):
        for name in groups:
            room.ok("resize", name, "--share", str(share))
            assert room.jobs()[name]["share"] == kept
        time.sleep(0.3)  # a step and a slice may still be running
        assert_shares(groups, kept)
    assert room.replays()


def test_the_default_policy_promises_the_share_of_a_job_file(room: Room) -> None:
    room.up("--devices", "1")
    room.submit("third", [sys.executable, "-c", "while True: pass"], share=0.3)
    room.submit("half", [sys.executable, "-c", "while True: pass"], share=0.5)
    room.until(lambda: all(room.state_of(name) == "running" for name in ("third", "half")))
    assert [room.jobs()[name]["share"] for name in ("third", "half")] == [0.3, 0.5]
    # No room for another half: it waits for its turn.
    room.submit("waits", [sys.executable, "-c", "while True: pass"], share=0.5)
    room.until(lambda: room.state_of("waits") == "pending")
    assert_shares({"third": room.pid_of("third")}, 0.3)
    assert room.replays()


def test_a_share_survives_the_daemon_and_is_checked(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "1", "--no-cgroups")
    room.submit("opaque", [sys.executable, "-c", "while True: pass"])
    room.until(lambda: room.state_of("opaque") == "running")
    group = room.pid_of("opaque")
    room.ok("resize", "opaque", "--share", "0.3")
    for share in ("1.5", "-1", "nan"):
        done = room.tool("resize", "opaque", f"--share={share}")
        assert done.returncode == 2 and "a number from 0 to 1" in done.stderr
    room.kill()
    room.up("--no-cgroups")
    assert room.jobs()["opaque"]["share"] == 0.3
    time.sleep(0.3)
    assert_shares({"opaque": group}, 0.3)
    room.ok("resize", "opaque", "--share", "0")
    assert room.jobs()["opaque"]["share"] == 1.0


def test_the_self_test_shows_its_measurement(room: Room) -> None:
    room.up("--no-cgroups")
    tested = json.loads(room.ok("describe", "-o", "json"))["enforcement"]
    assert tested["tier"] == "cooperative"
    assert "held by signals to 20% of a core got" in tested["what"]


# Waits for data in a part of each step and computes in the rest; records every step.
GAPS = """
import roommate, time
ticks = open("ticks", "a", buffering=1)
def wait(size):
    time.sleep(0.004)
    return size
for _ in roommate.steps(wait, batch_size=1):
    end = time.process_time() + 0.006
    while time.process_time() < end: pass
    ticks.write(f"{time.monotonic()}\\n")
"""


def rate(room: Room, window_s: float) -> float:
    """Steps per second of the job that records them, over the next seconds; from step to step."""
    began = time.monotonic()
    time.sleep(window_s)
    at = [float(line) for line in (room.folder / "ticks").read_text().splitlines()[:-1]]
    inside = [t for t in at if t >= began]
    return (len(inside) - 1) / (inside[-1] - inside[0])


@pytest.mark.parametrize("flags", TIERS, ids=["usual", "no-cgroups"])
def test_a_guaranteed_job_keeps_its_speed(room: Room, flags: list[str]) -> None:
    room.up("--policy", "antman", "--devices", "1", "--set", "eps=0.04", *flags)
    room.python("opportunist", BUSY, **{"class": "best-effort"})
    room.until(lambda: room.jobs()["opportunist"]["cooperative"])
    group = room.pid_of("opportunist")
    room.python("promised", GAPS)
    room.until(lambda: (room.folder / "ticks").exists() and room.jobs()["promised"]["cooperative"])
    assert room.jobs()["opportunist"]["devices"] == room.jobs()["promised"]["devices"]
    # It is paused until the solo speed of the guaranteed job is known, and then admitted.
    time.sleep(1.0)
    used = group_cpu_s(group)
    background = BackgroundLoad()
    try:
        room.until(lambda: group_cpu_s(group) > used + 0.1, 15.0)
    except AssertionError as failed:
        background.assert_high(failed)
    kept: list[str] = []
    for _ in range(4):
        background = BackgroundLoad()
        solo, shared, used, lasted = [], [], 0.0, 0.0
        for _ in range(3):
            room.ok("suspend", "opportunist")
            time.sleep(0.1)
            solo.append(rate(room, 0.7))
            room.ok("resume", "opportunist")
            time.sleep(0.1)
            before, began = group_cpu_s(group), time.monotonic()
            shared.append(rate(room, 0.7))
            used += group_cpu_s(group) - before
            lasted += time.monotonic() - began
        ratio = statistics.median(shared) / statistics.median(solo)
        speed = statistics.median(solo)
        kept.append(f"{ratio:.3f} of {speed:.1f}/s, opportunist {used / lasted:.3f} of a core")
        if ratio >= 0.95 and used >= SERVED * lasted:
            return
        background.assert_high(kept)
    # A guard that sees steps vary by more than the tolerated slowdown admits no roommate.
    pytest.skip(f"background load is too high: {kept}")


SERVED = 0.02
"""Least part of a core that the opportunist gets. The guaranteed job waits for two fifths of the
time, and may lose a twenty-fifth of its speed.
"""


# Waits for data, sometimes long and sometimes not at all, and computes for a tenth of the time.
STARVED = """
import random, roommate, time
dice = random.Random(7)
ticks = open("ticks", "a", buffering=1)
def wait(size):
    global pause
    pause = dice.choice([0.0, 0.02, 0.06, 0.08])
    time.sleep(pause)
    return size
for _ in roommate.steps(wait, batch_size=1):
    end = time.process_time() + 0.004
    while time.process_time() < end: pass
    ticks.write(f"{time.monotonic()} {pause}\\n")
"""


def of_a_step(room: Room, window_s: float) -> tuple[float, float]:
    """Seconds per step over the next seconds: the job's own waiting, and the rest."""
    began = time.monotonic()
    time.sleep(window_s)
    lines = (room.folder / "ticks").read_text().splitlines()[:-1]
    noted = [[float(word) for word in line.split()] for line in lines]
    steps = [(at, pause) for at, pause in noted if at >= began]
    waits = statistics.mean(pause for _, pause in steps[1:])
    return waits, (steps[-1][0] - steps[0][0]) / (len(steps) - 1) - waits


def test_irregular_data_does_not_exclude_an_opportunist(room: Room) -> None:
    room.up("--policy", "antman", "--devices", "1", "--set", "eps=0.1")
    room.python("promised", STARVED)
    room.until(lambda: (room.folder / "ticks").exists() and room.jobs()["promised"]["cooperative"])
    _, alone = of_a_step(room, 4.0)
    room.python("opportunist", BUSY, **{"class": "best-effort"})
    room.until(lambda: room.state_of("opportunist") == "running")
    group = room.pid_of("opportunist")
    seen: list[str] = []
    since_start = BackgroundLoad()
    # If the opportunist were charged for waits that the job has anyway, it would be throttled again
    # and again. If it were never throttled, the job would lose more than the tenth that it may
    # lose.
    for _ in range(20):
        background, used, began = BackgroundLoad(), group_cpu_s(group), time.monotonic()
        waits, beside = of_a_step(room, 4.0)
        share = (group_cpu_s(group) - used) / (time.monotonic() - began)
        kept = (waits + alone) / (waits + beside)
        seen.append(f"{share:.2f} of a core, the other at {kept:.2f} of its speed")
        if share > 0.4 and kept > 0.87:
            return
        if kept <= 0.87:
            background.assert_high(seen)
        # It takes a while until the guard knows the job well enough to admit roommates, and it
        # starts again whenever other processes slow the job down.
        if len(seen) > 8:
            since_start.assert_high(seen)
    pytest.skip(f"background load is too high: {seen}")


def test_an_opportunist_takes_little_time_from_a_busy_job(room: Room) -> None:
    """By CPU time, which background load does not disturb; alone the opportunist gets all."""
    room.up("--policy", "antman", "--devices", "1", "--set", "util_max=2")
    room.python("promised", BUSY)
    room.until(lambda: room.jobs()["promised"]["cooperative"])
    room.python("opportunist", BUSY, **{"class": "best-effort"})
    groups = [room.pid_of(name) for name in ("promised", "opportunist")]
    before = [group_cpu_s(g) for g in groups]
    time.sleep(2.5)
    promised, opportunist = (group_cpu_s(g) - b for g, b in zip(groups, before, strict=True))
    assert opportunist / (opportunist + promised) < 0.05, (opportunist, promised)
    room.ok("cancel", "promised")
    before_alone = group_cpu_s(groups[1])
    room.until(lambda: group_cpu_s(groups[1]) - before_alone > 0.3)
    assert room.replays()
