"""Guarantees of a machine: speed, memory, and shares that change at run time. Parts of run.sh."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pauses import pauses
from room import Room, Tick, median

from bench import FOREVER, Bench

#: A guaranteed task, its batch size, and further options.
Host = tuple[str, int, list[object]]
BUSY: Host = ("resnet50-imagenet", 64, [])
WAITS: Host = ("resnet18-imagenet", 128, ["--loader", "--workers", 4])


#: How much longer a step of the guaranteed job may take: the policy's own value, and four times it.
STRICT, LOOSE = 0.01, 0.04


def guaranteed(bench: Bench) -> None:
    """A guaranteed job beside a best-effort one: speeds, also after the first one grows."""
    with bench.room() as room:
        side_by_side(bench, room, "keeps the GPU busy", BUSY, LOOSE)
        # Half of the GPU is released, then claimed again; then the batch size grows.
        long = bench.seconds(4)
        room.ok("resize", "promised", "--share", "0.5")
        room.watch(bench.seconds(8))
        growth(bench, room, "share 0.5 to all",
               lambda: room.ok("resize", "promised", "--share", "0"), long)
        growth(bench, room, "batch 64 to 256",
               lambda: room.ok("resize", "promised", "--batch", "256"), long)
        other_alone(bench, room)
    with bench.room("waits") as room:
        side_by_side(bench, room, "waits for its loader", WAITS, LOOSE)
        other_alone(bench, room)

def strict(bench: Bench) -> None:
    """The same two pairs with the policy's own tolerance."""
    for name, what, host in (("busy", "keeps the GPU busy", BUSY),
                             ("waits", "waits for its loader", WAITS)):
        with bench.room(name) as room:
            side_by_side(bench, room, what, host, STRICT)


def side_by_side(bench: Bench, room: Room, what: str, host: Host, eps: float) -> None:
    """The speed of a guaranteed job with and without a best-effort job, alternating."""
    task, batch, flags = host
    room.up("antman", eps=eps)
    room.submit("promised", "train.py", "--task", task, "--batch", batch, "--min", 16, "--max", 256,
                "--steps", FOREVER,
                "--save-s", 0, *flags, batch={"size": batch, "min": 16, "max": 256})
    room.until_steps("promised", 100)
    [alone] = room.watch(bench.seconds(4), "promised")
    room.submit("other", "train.py", "--task", "gpt2-lm", "--batch", 8, "--steps", FOREVER,
                "--save-s", 0, **{"class": "best-effort"})
    room.until_steps("other", 8, 150)
    # The throttle raises the pace of the best-effort job slowly.
    room.watch(bench.seconds(20), "other")
    solo, beside, others = [], [], []
    for _ in range(3):
        room.ok("suspend", "other")
        room.until(lambda: room.jobs()["other"]["state"] == "suspended")
        solo += room.watch(bench.seconds(4), "promised")
        room.ok("resume", "other")
        room.until_steps("other", 1, 60)
        began = time.monotonic()
        beside += room.watch(bench.seconds(8), "promised")
        # A step may take seconds, so steps are counted instead of timed.
        others.append(room.count("other", began) / (time.monotonic() - began))
    bench.row(what=what, eps=eps, alone_before=alone, alone=median(solo), beside=median(beside),
              kept=median(beside) / median(solo),
              spread=max(solo) / min(solo) - 1, every=beside, other=sum(others) / len(others),
              others=others)


def other_alone(bench: Bench, room: Room) -> None:
    room.ok("cancel", "promised")
    room.until(lambda: room.jobs()["promised"]["ended"])
    room.watch(bench.seconds(1))
    [free] = room.watch(bench.seconds(4), "other")
    other = room.jobs()["other"]
    bench.row(what="other", alone=free, starts=other["starts"], failures=other["failures"],
              done=other["done"],
              steps_noted=len(room.ticks("other")))


def shrink(bench: Bench) -> None:
    """A guaranteed job needs most of the memory; a best-effort one releases some meanwhile."""
    limit = 8800
    with bench.room() as room:
        room.up("antman")
        whole = max((gpu.get("mem_mib") or 0 for gpu in room.machine().get("gpus", [])),
                    default=0) or 143_771
        room.submit("guest", "train.py", "--task", "gpt2-lm", "--batch", 8, "--optimizer", "adam",
                    "--steps", FOREVER, "--save-s", 0,
                    gpu_mib=16_000, **{"class": "best-effort"})
        room.until_steps("guest", 60, 150)
        phases = [memory(bench, room, "alone")]
        # The policy reserves a tenth more than requested.
        room.submit("promised", "train.py", "--task", "resnet18-imagenet", "--batch", 64, "--steps",
                    FOREVER, "--save-s", 0,
                    gpu_mib=int((whole - limit) / 1.1))
        began = time.monotonic()
        room.until_steps("promised", 20, 150)
        phases.append(memory(bench, room, "beside one that needs the rest")
                      | {"promised_after_s": time.monotonic() - began})
        room.ok("cancel", "promised")
        room.until(lambda: room.jobs()["promised"]["ended"])
        phases.append(memory(bench, room, "alone again"))
        for phase in phases:
            bench.row(**phase, starts=room.jobs()["guest"]["starts"],
                      failures=room.jobs()["guest"]["failures"])


def memory(bench: Bench, room: Room, when: str) -> dict[str, Any]:
    room.watch(bench.seconds(3))
    [rate] = room.watch(bench.seconds(4), "guest")
    guest = room.jobs()["guest"]
    log = Path(guest["log"]).read_text(errors="replace").splitlines()
    limits = [a["tune"][1].get("mem_mib") for step in room.steps() for a in step.get("actions", [])
              if "tune" in a]
    return {"when": when, "guest_it_s": rate, "limit_mib": limits[-1] if limits else None,
            "held_mib": guest["gpu_mib"],
            "state": guest["state"], "said": [line for line in log if line.startswith("roommate:")]}


def growth(bench: Bench, room: Room, what: str, grow: Callable[[], object],
           settle_s: float) -> None:
    """How soon the best-effort job shrinks: its SM range or its speed."""
    room.watch(settle_s)
    before = room.watch(settle_s, "promised", "other")
    done = room.jobs()["other"]["done"]
    part = last(room.ticks("other"))
    began = time.monotonic()
    grow()
    answered = time.monotonic() - began
    room.watch(settle_s)
    later = [t for t in room.ticks("other") if t.at > began]
    moved = next((t.at - began for t in later if part
                  and (t.first, t.sms) != (part.first, part.sms)), None)
    count = int(4 * min(4.0, settle_s - 0.5))
    windows = [room.rate("other", began + s / 4, began + s / 4 + 0.5) for s in range(count)]
    slower = next((0.25 * n + 0.5 for n, rate in enumerate(windows) if rate < 0.8 * before[1]),
                  None)
    after = room.watch(settle_s, "promised", "other")
    job = room.jobs()["other"]
    bench.row(what=what, answered_s=answered, moved_after_s=moved, slower_within_s=slower,
              promised=[before[0], after[0]],
              other=[before[1], after[1]], other_by_quarter_seconds=windows,
              part=[part[2:] if part else None, last_part(later)],
              nothing_lost=job["state"] == "running" and job["failures"] == 0
              and job["done"] >= done)


def last(ticks: list[Tick]) -> Tick | None:
    return ticks[-1] if ticks else None


def last_part(ticks: list[Tick]) -> Any:
    return ticks[-1][2:] if ticks else None


def resize(bench: Bench) -> None:
    """The daemon changes the share of a running job 200 times."""
    changes = 20 if bench.rehearse else 200
    for task, batch in (("resnet50-imagenet", 64), ("gpt2-lm", 8)):
        with bench.room(task) as room:
            room.up("mps")
            room.submit("job", "train.py", "--task", task, "--batch", batch, "--steps", FOREVER,
                        "--save-s", 0)
            room.until_steps("job", 40, 150)
            room.watch(bench.seconds(1))
            dice, shares = random.Random(7), ["0.2", "0.35", "0.5", "0.65", "0.8", "0"]
            held, share = [room.jobs()["job"]["gpu_mib"]], "0"
            for n in range(changes):
                # Memory is compared on the whole GPU, as at the beginning.
                look = n % 20 == 19
                share = "0" if look and share != "0" else dice.choice([s for s in shares
                                                                       if s != share])
                room.ok("resize", "job", "--share", share)
                room.until_steps("job", 6)
                if look:
                    room.watch(bench.seconds(1.2))
                    held.append(room.jobs()["job"]["gpu_mib"])
            job = room.jobs()["job"]
            bench.row(task=task, batch=batch, asked=changes, **pauses(room.ticks("job")),
                      held_mib=held, starts=job["starts"],
                      failures=job["failures"])


#: Promised jobs and their guests: a task, its batch size and further options each.
GUESTS: dict[str, tuple[Host, Host]] = {
    "resnet50+gpt2": (BUSY, ("gpt2-lm", 8, [])),
    "gpt2+resnet50": (("gpt2-lm", 16, []), ("resnet50-imagenet", 128, [])),
    "loader+gpt2": (WAITS, ("gpt2-lm", 8, [])),
}
PROMISES = (0.95, 0.9, 0.8)


#: A run that has taken this long begins nothing new.
STOP_AFTER_S = 440.0


def guests(bench: Bench) -> None:
    """A promised job keeps 0.95, 0.9 or 0.8 of its speed: what it kept and what its guest got."""
    wanted = [one for one in os.environ.get("ROOMMATE_PAIRS", "").split(",") if one] or list(GUESTS)
    kept = bench.out / "guests.rows.jsonl"
    for line in kept.read_text().splitlines() if kept.exists() else []:
        bench.row(**json.loads(line))
    began, left = time.monotonic(), 0
    for name, promise in ((name, promise) for name in wanted for promise in PROMISES):
        if any((row["pair"], row["promise"]) == (name, promise) for row in bench.rows):
            continue
        if time.monotonic() - began > STOP_AFTER_S:
            left += 1
            continue
        guest_row(bench, name, promise)
        kept.write_text("".join(json.dumps(row) + "\n" for row in bench.rows))
    if left:
        raise TimeoutError(f"{left} rows are left; run this part again to go on")
    kept.unlink(missing_ok=True)


def guest_row(bench: Bench, name: str, promise: float) -> None:
    host, guest = GUESTS[name]
    # The speed of the guest alone is measured once for each pair.
    known = [row["guest_alone"] for row in bench.rows if row["pair"] == name]
    with bench.room(f"{name}-{promise}") as room:
        room.up("antman", eps=1 / promise - 1)
        submit_one(room, "promised", host)
        room.until_steps("promised", 40)
        [alone] = room.watch(bench.seconds(3), "promised")
        submit_one(room, "guest", guest, **{"class": "best-effort"})
        room.until_steps("guest", 2, 150)
        # The throttle raises the guest's pace slowly.
        room.watch(bench.seconds(16))
        began = time.monotonic()
        [speed] = room.watch(bench.seconds(6), "promised")
        got = room.count("guest", began) / (time.monotonic() - began)
        seats = {t.sms for t in room.ticks("guest") if t.at >= began}
        if not known:
            room.ok("cancel", "promised")
            room.until(lambda: room.jobs()["promised"]["ended"])
            room.watch(bench.seconds(1))
            known = room.watch(bench.seconds(3), "guest")
    bench.row(pair=name, promise=promise, kept=speed / alone, guest=got / known[0],
              promised_alone=alone, guest_alone=known[0], guest_sms=sorted(seats))


def submit_one(room: Room, name: str, job: Host, **fields: Any) -> None:
    task, batch, flags = job
    room.submit(name, "train.py", "--task", task, "--batch", batch, "--steps", FOREVER, "--save-s", 0,
                *flags, **fields)
