"""Shares are kept, by the kernel or by us, and guaranteed jobs are not disturbed. Everything is measured."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time

import pytest
from conftest import Room, group_cpu_s

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
"""CPU time is counted in hundredths of a second; in a shorter window one more is much of a small share."""


def assert_shares(groups: dict[str, int], share: float) -> None:
    """Within 10 %. Others may keep the machine busy, and then everybody gets less: that is measured again.
    Nobody ever gets more.
    """
    seen: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(4):
        began, before = time.monotonic(), {n: group_cpu_s(g) for n, g in groups.items()}
        time.sleep(WINDOW_S)
        for name, group in groups.items():
            got = (group_cpu_s(group) - before[name]) / (time.monotonic() - began)
            seen[name].append(got)
            assert got <= 1.1 * share, f"{name} got {got:.3f} instead of {share}"
        if all(max(got) >= 0.9 * share for got in seen.values()):
            return
    if (free := free_share()) < 0.9:
        pytest.skip(f"others leave {free:.2f} of a core here; {seen} instead of {share} says nothing")
    raise AssertionError(f"{seen} instead of {share}")


def free_share() -> float:
    """What a busy process gets on the first core now."""
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as busy:
        time.sleep(0.2)
        began, before = time.monotonic(), group_cpu_s(busy.pid)
        time.sleep(1.0)
        got = (group_cpu_s(busy.pid) - before) / (time.monotonic() - began)
        busy.kill()
    return got


@pytest.mark.parametrize("flags", TIERS, ids=["usual", "no-cgroups"])
def test_shares_are_kept_within_a_tenth_and_follow_while_jobs_run(room: Room, flags: list[str]) -> None:
    room.up("--policy", "fifo", "--devices", "2", *flags)
    if flags:
        assert tier_of(room) == "cooperative"
    room.python("sdk", BUSY, share=0.3)
    room.submit("opaque", [sys.executable, "-c", "while True: pass"], share=0.3)
    room.until(lambda: room.jobs()["sdk"]["cooperative"] and room.state_of("opaque") == "running")
    groups = {name: room.jobs()[name]["keeper_pid"] for name in ("sdk", "opaque")}
    assert_shares(groups, 0.3)
    # Smaller, larger again, and never beyond what was promised.
    for share, kept in ((0.15, 0.15), (0.25, 0.25), (0.9, 0.3)):
        for name in groups:
            room.ok("resize", name, "--share", str(share))
            assert room.jobs()[name]["share"] == kept
        time.sleep(0.3)  # a step and a slice may still be under way
        assert_shares(groups, kept)
    assert room.replays()


def test_a_share_survives_the_daemon_and_nonsense_is_refused(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "1", "--no-cgroups")
    room.submit("opaque", [sys.executable, "-c", "while True: pass"])
    room.until(lambda: room.state_of("opaque") == "running")
    group = room.jobs()["opaque"]["keeper_pid"]
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


def test_the_self_test_says_what_it_measured(room: Room) -> None:
    room.up("--no-cgroups")
    said = json.loads(room.ok("describe", "-o", "json"))["enforcement"]
    assert said["tier"] == "cooperative"
    assert "held by signals to 20% of a core got" in said["what"]


# Waits for data in a part of each step and computes in the rest; notes every step.
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
    """Steps a second of the job that notes them, over the next seconds; from step to step."""
    began = time.monotonic()
    time.sleep(window_s)
    at = [float(line) for line in (room.folder / "ticks").read_text().splitlines()[:-1]]
    inside = [t for t in at if t >= began]
    return (len(inside) - 1) / (inside[-1] - inside[0])


@pytest.mark.parametrize("flags", TIERS, ids=["usual", "no-cgroups"])
def test_a_guaranteed_job_keeps_its_speed_beside_an_opportunist(room: Room, flags: list[str]) -> None:
    room.up("--policy", "antman", "--devices", "1", "--set", "eps=0.04", *flags)
    room.python("opportunist", BUSY, **{"class": "best-effort"})
    room.until(lambda: room.jobs()["opportunist"]["cooperative"])
    group = room.jobs()["opportunist"]["keeper_pid"]
    room.python("promised", GAPS)
    room.until(lambda: (room.folder / "ticks").exists() and room.jobs()["promised"]["cooperative"])
    assert room.jobs()["opportunist"]["devices"] == room.jobs()["promised"]["devices"]
    # It is held until the other's own pace is known, and then let in.
    time.sleep(1.0)
    used = group_cpu_s(group)
    with contextlib.suppress(AssertionError):
        room.until(lambda: group_cpu_s(group) > used + 0.02, 15.0)
    kept: list[str] = []
    for _ in range(4):
        solo, shared, used = [], [], 0.0
        for _ in range(3):
            room.ok("suspend", "opportunist")
            time.sleep(0.1)
            solo.append(rate(room, 0.7))
            room.ok("resume", "opportunist")
            time.sleep(0.1)
            before = group_cpu_s(group)
            shared.append(rate(room, 0.7))
            used += group_cpu_s(group) - before
        ratio = statistics.median(shared) / statistics.median(solo)
        spread = max(solo) / min(solo) - 1.0
        median = statistics.median(solo)
        kept.append(f"{ratio:.3f} of {median:.1f}/s, spread {spread:.3f}, opportunist {used:.2f} s")
        if ratio >= 0.95 and used > 0.0:
            return
        # Only a machine on which the solo phases differ among themselves may be asked again.
        assert ratio >= 0.95 or spread > 0.03, kept
    # A guard that sees steps vary by more than was promised lets nobody in.
    assert free_share() < 0.9, kept
    pytest.skip(f"others keep the machine too busy: {kept}")


# Waits for data, sometimes long and sometimes not at all, and computes for a tenth of the time.
STARVED = """
import random, roommate, time
dice = random.Random(7)
def wait(size):
    time.sleep(dice.choice([0.0, 0.02, 0.06, 0.08]))
    return size
for _ in roommate.steps(wait, batch_size=1):
    end = time.process_time() + 0.004
    while time.process_time() < end: pass
"""


def test_an_opportunist_is_let_in_beside_a_job_whose_data_comes_irregularly(room: Room) -> None:
    room.up("--policy", "antman", "--devices", "1", "--set", "eps=0.1")
    room.python("promised", STARVED)
    room.until(lambda: room.jobs()["promised"]["cooperative"])
    room.python("opportunist", BUSY, **{"class": "best-effort"})
    room.until(lambda: room.state_of("opportunist") == "running")
    group = room.jobs()["opportunist"]["keeper_pid"]
    shares: list[float] = []
    # Were it held to account for what the other waits anyway, it would be pushed back again and again.
    for _ in range(20):
        used, began = group_cpu_s(group), time.monotonic()
        time.sleep(2.0)
        shares.append((group_cpu_s(group) - used) / (time.monotonic() - began))
        if shares[-1] > 0.4:
            return
    for name in ("promised", "opportunist"):
        room.ok("cancel", name)
        room.until(lambda name=name: room.state_of(name) == "cancelled")  # type: ignore[misc]
    # Where others keep the machine busy, what the job computes takes longer as well.
    assert free_share() < 0.9, shares
    pytest.skip(f"others keep the machine too busy: {shares}")


def test_an_opportunist_hardly_takes_time_from_a_busy_guaranteed_job(room: Room) -> None:
    """By CPU time, which others on the machine do not disturb; the opportunist gets all once it is alone."""
    room.up("--policy", "antman", "--devices", "1", "--set", "util_max=2")
    room.python("promised", BUSY)
    room.until(lambda: room.jobs()["promised"]["cooperative"])
    room.python("opportunist", BUSY, **{"class": "best-effort"})
    room.until(lambda: room.state_of("opportunist") == "running")
    groups = [room.jobs()[n]["keeper_pid"] for n in ("promised", "opportunist")]
    before = [group_cpu_s(g) for g in groups]
    time.sleep(2.5)
    promised, opportunist = (group_cpu_s(g) - b for g, b in zip(groups, before, strict=True))
    assert opportunist / (opportunist + promised) < 0.05, (opportunist, promised)
    room.ok("cancel", "promised")
    before_alone = group_cpu_s(groups[1])
    room.until(lambda: group_cpu_s(groups[1]) - before_alone > 0.3)
    assert room.replays()
