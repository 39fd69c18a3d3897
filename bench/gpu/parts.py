#!/usr/bin/env python3
"""What Roommate does on one real GPU, in parts of a few minutes each.

usage: run.sh PART... [--out DIR] [--again] [--rehearse]

A part that is complete (it stands in DIR/parts.jsonl) is skipped unless --again. Each writes its rows to DIR/PART.jsonl and the journals
of its daemons beside it, and prints a table. --rehearse takes pauses for jobs and a core for the GPU, to try the parts themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sets
from room import ROOT, Room, Tick, cpu_s, median, rounded

HERE = Path(__file__).resolve().parent
MINUTES = 9.0
FOREVER = 1_000_000


class Bench:
    """Where a part puts what it finds."""

    def __init__(self, part: str, out: Path, rehearse: bool) -> None:
        self.part, self.out, self.rehearse = part, out, rehearse
        self.rows: list[dict[str, Any]] = []
        self._file = out / f"{part}.new"
        self._file.unlink(missing_ok=True)
        self._ends = time.monotonic() + 60 * MINUTES

    def room(self, name: str = "") -> Room:
        return Room(f"{self.part}-{name}" if name else self.part, self.out, self.rehearse)

    def row(self, **found: Any) -> None:
        self.rows.append(rounded(found))
        with self._file.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")
        print(json.dumps(self.rows[-1]), flush=True)

    def seconds(self, real: float) -> float:
        """How long to look; a rehearsal is in a hurry."""
        return real / 8 if self.rehearse else real

    def left_s(self) -> float:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{self.part} takes longer than {MINUTES:.0f} minutes")
        return left

    def keep(self) -> None:
        if self._file.exists():
            self._file.rename(self.out / f"{self.part}.jsonl")


# ---- the machine ---------------------------------------------------------------------------------------------


def selftest(bench: Bench) -> None:
    """The daemon comes up, says what it can enforce, and goes."""
    with bench.room() as room:
        began = time.monotonic()
        room.up("mps")
        up_s = time.monotonic() - began
        print(room.ok("describe"))
        found = room.machine()
        began = time.monotonic()
        room.down()
        bench.row(up_s=up_s, down_s=time.monotonic() - began, describe={k: v for k, v in found.items() if k != "recent"})


def sdk(bench: Bench) -> None:
    """A training loop under a machine of our own making: parts, plans, memory, suspension bit for bit."""
    for task in ("resnet50-imagenet", "gpt2-lm"):
        with contextlib.nullcontext(dict(os.environ)) if bench.rehearse else mps() as env:
            words = ["--task", task, *(["--rehearse"] if bench.rehearse else [])]
            script(bench, "obeys.py", env, *words)


def overhead(bench: Bench) -> None:
    """The same loop with and without the SDK, and the CPU time of the daemon meanwhile."""
    for task, batch, pairs in (("resnet18-imagenet", 32, 120), ("gpt2-lm", 8, 50)):
        with bench.room(task) as room:
            room.up("fifo")
            found = room.folder / "found.json"
            words = ["--task", task, "--batch", batch, "--pairs", pairs, "--out", found, *(["--rehearse"] if bench.rehearse else [])]
            job = room.job("loop", "train.py", sdk=False)
            job["command"] = [sys.executable, str(HERE / "overhead.py"), *map(str, words)]
            if room.knows_sdk:
                job["sdk"] = True
            file = room.folder / "loop.yaml"
            file.write_text(json.dumps(job))
            room.ok("submit", str(file))
            room.until(lambda: room.jobs()["loop"]["cooperative"])
            pid = room.machine()["pid"]
            used, began = cpu_s(pid), time.monotonic()
            # Asking the daemon costs it something as well; so it is not asked.
            while not found.exists():
                bench.left_s()
                time.sleep(0.25)
            share = (cpu_s(pid) - used) / (time.monotonic() - began)
            bench.row(**json.loads(found.read_text()), daemon_core_share=share)


# ---- promises ------------------------------------------------------------------------------------------------


def guaranteed(bench: Bench) -> None:
    """A guaranteed job beside a best-effort one, and what happens when it grows."""
    long, short = bench.seconds(4), bench.seconds(3)
    with bench.room() as room:
        room.up("antman", eps=0.04)
        room.submit("promised", "train.py", "--task", "resnet50-imagenet", "--batch", 64, "--min", 16, "--max", 256,
                    "--steps", FOREVER, "--save-s", 0, batch={"size": 64, "min": 16, "max": 256})
        room.until_steps("promised", 100)
        [alone] = room.watch(long, "promised")
        room.submit("other", "train.py", "--task", "gpt2-lm", "--batch", 8, "--steps", FOREVER, "--save-s", 0,
                    **{"class": "best-effort"})
        room.until_steps("other", 8, 150)
        # The machine lets it in slowly.
        room.watch(4 * long, "other")
        solo, beside, others = [], [], []
        for _ in range(3):
            room.ok("suspend", "other")
            room.until(lambda: room.jobs()["other"]["state"] == "suspended")
            solo += room.watch(short, "promised")
            room.ok("resume", "other")
            room.until_steps("other", 3, 60)
            both = room.watch(short, "promised", "other")
            beside.append(both[0])
            others.append(both[1])
        bench.row(what="beside", alone_before=alone, alone=median(solo), beside=median(beside),
                  kept=median(beside) / median(solo), spread=max(solo) / min(solo) - 1, other=median(others))
        # Half of the GPU is given away, then taken back; then its batch grows.
        room.ok("resize", "promised", "--share", "0.5")
        growth(bench, room, "share 0.5 to all", lambda: room.ok("resize", "promised", "--share", "0"), long)
        growth(bench, room, "batch 64 to 256", lambda: room.ok("resize", "promised", "--batch", "256"), long)
        room.ok("cancel", "promised")
        room.until(lambda: room.jobs()["promised"]["ended"])
        [free] = room.watch(long, "other")
        other = room.jobs()["other"]
        bench.row(what="other", alone=free, part_beside=median(others) / free if free else None, starts=other["starts"],
                  failures=other["failures"], done=other["done"], steps_noted=len(room.ticks("other")))


def shrink(bench: Bench) -> None:
    """A guaranteed job needs most of the memory; a best-effort one gives some of it away, and has it again afterwards."""
    limit = 8800
    with bench.room() as room:
        room.up("antman")
        whole = max((gpu.get("mem_mib") or 0 for gpu in room.machine().get("gpus", [])), default=0) or 143_771
        room.submit("guest", "train.py", "--task", "gpt2-lm", "--batch", 8, "--optimizer", "adam", "--steps", FOREVER, "--save-s", 0,
                    gpu_mib=16_000, **{"class": "best-effort"})
        room.until_steps("guest", 60, 150)
        phases = [memory(bench, room, "alone")]
        # A tenth more than it says is kept free for it.
        room.submit("promised", "train.py", "--task", "resnet18-imagenet", "--batch", 64, "--steps", FOREVER, "--save-s", 0,
                    gpu_mib=int((whole - limit) / 1.1))
        began = time.monotonic()
        room.until_steps("promised", 20, 150)
        phases.append(memory(bench, room, "beside one that needs the rest") | {"promised_after_s": time.monotonic() - began})
        room.ok("cancel", "promised")
        room.until(lambda: room.jobs()["promised"]["ended"])
        phases.append(memory(bench, room, "alone again"))
        for phase in phases:
            bench.row(**phase, starts=room.jobs()["guest"]["starts"], failures=room.jobs()["guest"]["failures"])


def memory(bench: Bench, room: Room, when: str) -> dict[str, Any]:
    room.watch(bench.seconds(3))
    [rate] = room.watch(bench.seconds(4), "guest")
    guest = room.jobs()["guest"]
    log = Path(guest["log"]).read_text(errors="replace").splitlines()
    limits = [a["tune"][1].get("mem_mib") for step in room.steps() for a in step.get("actions", []) if "tune" in a]
    return {"when": when, "guest_it_s": rate, "limit_mib": limits[-1] if limits else None, "held_mib": guest["gpu_mib"],
            "state": guest["state"], "said": [line for line in log if line.startswith("roommate:")]}


def growth(bench: Bench, room: Room, what: str, grow: Callable[[], object], settle_s: float) -> None:
    """How soon the other has shrunk: its part of the GPU, or its pace."""
    room.watch(settle_s)
    before = room.watch(settle_s, "promised", "other")
    done = room.jobs()["other"]["done"]
    part = last(room.ticks("other"))
    began = time.monotonic()
    grow()
    answered = time.monotonic() - began
    room.watch(settle_s)
    later = [t for t in room.ticks("other") if t.at > began]
    moved = next((t.at - began for t in later if part and (t.first, t.sms) != (part.first, part.sms)), None)
    count = int(4 * min(4.0, settle_s - 0.5))
    windows = [room.rate("other", began + s / 4, began + s / 4 + 0.5) for s in range(count)]
    slower = next((0.25 * n + 0.5 for n, rate in enumerate(windows) if rate < 0.8 * before[1]), None)
    after = room.watch(settle_s, "promised", "other")
    job = room.jobs()["other"]
    bench.row(what=what, answered_s=answered, moved_after_s=moved, slower_within_s=slower, promised=[before[0], after[0]],
              other=[before[1], after[1]], other_by_quarter_seconds=windows, part=[part[2:] if part else None, last_part(later)],
              nothing_lost=job["state"] == "running" and job["failures"] == 0 and job["done"] >= done)


def last(ticks: list[Tick]) -> Tick | None:
    return ticks[-1] if ticks else None


def last_part(ticks: list[Tick]) -> Any:
    return ticks[-1][2:] if ticks else None


# ---- faults --------------------------------------------------------------------------------------------------


def faults(bench: Bench) -> None:
    """Three roommates, one of which is killed, runs out of memory, or writes where it may not."""
    for deed in ("kill", "oom", "illegal"):
        with bench.room(deed) as room:
            room.up("mps", "--backoff", "1")
            lengths = {"resnet18": 2000, "gpt2": 600, "culprit": 500}
            tasks = {"resnet18": ("resnet18-imagenet", 64), "gpt2": ("gpt2-lm", 8), "culprit": ("mobilenetv3l-imagenet", 32)}
            words = {name: ["--task", task, "--batch", batch, "--steps", lengths[name], "--save-s", 3]
                     for name, (task, batch) in tasks.items()}
            for name in ("resnet18", "gpt2"):
                room.submit(name, "train.py", *words[name], retries=3)
            # It comes when the others are under way, so that it does its deed in the middle of their steps.
            for name in ("resnet18", "gpt2"):
                room.until(lambda name=name: len(room.ticks(name)) >= 20, 150)
            wrong = "none" if deed == "kill" else deed
            # An illegal access comes twice: the second is by a suspect, who is apart from the others by then.
            times = 2 if deed == "illegal" else 1
            room.submit("culprit", "faulty.py", wrong, "--after", 100, "--times", times, *words["culprit"], retries=3)
            if deed == "kill":
                room.until(lambda: len(room.ticks("culprit")) >= 100, 150)
                os.kill(room.process("culprit"), signal.SIGKILL)
            else:
                room.until(lambda: room.jobs()["culprit"]["starts"] > 1, 150)
            began = time.monotonic()
            room.until_ended(min(240, bench.left_s()))
            took = time.monotonic() - began
            jobs = room.jobs()
            bench.row(deed=deed, all_finished=all(j["state"] == "finished" for j in jobs.values()), ended_after_s=took,
                      jobs={name: fate(room, name, jobs[name], steps) for name, steps in lengths.items()})


def fate(room: Room, name: str, job: dict[str, Any], steps: int) -> dict[str, Any]:
    ticks = room.ticks(name)
    gap = max((b.at - a.at for a, b in zip(ticks[20:], ticks[21:], strict=False)), default=0.0)
    return {"state": job["state"], "starts": job["starts"], "failures": job["failures"], "longest_halt_s": gap,
            "steps_done_again": max(0, len(ticks) - steps)}


# ---- what policies do ----------------------------------------------------------------------------------------


def turns(bench: Bench) -> None:
    """One at a time: two jobs take turns, each out of memory while the other runs."""
    slice_s = bench.seconds(10)
    with bench.room() as room:
        room.up("gandiva", slice_s=slice_s, scan_s=bench.seconds(2), pack=False)
        names = {"gpt2": ("gpt2-lm", 16), "vit": ("vit-b16-imagenet", 128)}
        for name, (task, batch) in names.items():
            room.submit(name, "train.py", "--task", task, "--batch", batch, "--steps", FOREVER, "--save-s", 0)
        for name in names:
            room.until(lambda name=name: len(room.ticks(name)) > 20, 120)
        # From the middle of a turn to the middle of one of the same job.
        began = time.monotonic()
        room.watch(4 * slice_s)
        end = time.monotonic()
        work = {}
        for name in names:
            at = [t.at for t in room.ticks(name) if began <= t.at < end]
            gaps = [b - a for a, b in zip(at, at[1:], strict=False)]
            work[name] = {"steps": len(at), "step_s": median(gaps), "longest_halt_s": max(gaps, default=0.0)}
        bench.row(policy="gandiva", turn_s=slice_s, seconds=end - began, suspends=room.actions("suspend"), jobs=work,
                  one_at_a_time=sum(w["steps"] * w["step_s"] for w in work.values()) / (end - began),
                  swaps={n: said(room, n, "Swapped") for n in names})


def resize(bench: Bench) -> None:
    """The share of a running job changes through the daemon, again and again."""
    changes = 20 if bench.rehearse else 100
    for task, batch in (("resnet50-imagenet", 64), ("gpt2-lm", 8)):
        with bench.room(task) as room:
            room.up("mps")
            room.submit("job", "train.py", "--task", task, "--batch", batch, "--steps", FOREVER, "--save-s", 0)
            room.until_steps("job", 40, 150)
            dice, shares = random.Random(7), ["0.2", "0.35", "0.5", "0.65", "0.8", "0"]
            held, share = [room.jobs()["job"]["gpu_mib"]], "0"
            for n in range(changes):
                share = dice.choice([s for s in shares if s != share])
                room.ok("resize", "job", "--share", share)
                room.until_steps("job", 6)
                if n == 19:
                    held.append(room.jobs()["job"]["gpu_mib"])
            room.watch(bench.seconds(1))
            job = room.jobs()["job"]
            bench.row(task=task, batch=batch, asked=changes, **pauses(room.ticks("job")), held_mib=[*held, job["gpu_mib"]],
                      starts=job["starts"], failures=job["failures"])


def pauses(ticks: list[Tick]) -> dict[str, Any]:
    """How long steps after a move took beyond the usual there."""
    gaps: dict[tuple[int, int], list[float]] = {}
    for a, b in zip(ticks, ticks[1:], strict=False):
        if (a.first, a.sms) == (b.first, b.sms):
            gaps.setdefault((b.first, b.sms), []).append(b.at - a.at)
    moved = [1e3 * (b.at - a.at - median(gaps.get((b.first, b.sms), [])))
             for a, b in zip(ticks, ticks[1:], strict=False) if (a.first, a.sms) != (b.first, b.sms)]
    moved.sort()
    at = lambda part: moved[min(len(moved) - 1, int(part * len(moved)))] if moved else None
    return {"moves": len(moved), "pause_p50_ms": at(0.5), "pause_p99_ms": at(0.99), "pause_longest_ms": at(1.0),
            "step_ms": {f"{sms} from {first}": 1e3 * median(g) for (first, sms), g in sorted(gaps.items())}}


def gandiva(bench: Bench) -> None:
    """Turns, and packs on trial: a pair that helps and one that may not."""
    pairs = {
        "small": [("gpt2-lm", 8), ("bert-squad", 16)],
        "large": [("resnet50-imagenet", 256), ("resnet50-imagenet", 256)],
    }
    sets = {"slice_s": 8, "scan_s": 2, "trial_s": 4, "trial_steps": 10, "cool_s": 0, "pack_util_cap": 3}
    if bench.rehearse:
        sets |= {"slice_s": 1.5, "scan_s": 0.5, "trial_s": 1.2, "trial_steps": 5}
    for label, tasks in pairs.items():
        with bench.room(label) as room:
            room.up("gandiva", **sets)
            names = []
            for n, (task, batch) in enumerate(tasks):
                names.append(f"{task}-{n}")
                room.submit(names[-1], "train.py", "--task", task, "--batch", batch, "--steps", FOREVER, "--save-s", 0)
            for name in names:
                room.until(lambda name=name: len(room.ticks(name)) > 20, 120)
            room.watch(bench.seconds(45))
            [a, b] = room.watch(bench.seconds(12), *names)
            tried, refused = room.notes("tried_with"), room.notes("not_worth_sharing")
            states = {n: j["state"] for n, j in room.jobs().items()}
            bench.row(policy="gandiva", pair=label, suspends=room.actions("suspend"), tried=len(tried), refused=refused,
                      packed=bool(tried) and not refused and set(states.values()) == {"running"}, states=states,
                      steps_s_at_the_end=[a, b], swaps=[said(room, n, "Swapped") for n in names])


def said(room: Room, name: str, word: str) -> list[str]:
    log = Path(room.jobs()[name]["log"])
    return [line for line in log.read_text(errors="replace").splitlines() if word in line][-4:] if log.exists() else []


def muri(bench: Bench) -> None:
    """One job waits for pictures from its loader, the other computes; their stages take turns."""
    jobs: dict[str, list[object]] = {"loads": ["--task", "resnet18-imagenet", "--batch", 128, "--loader", "--workers", 4]}
    stages: dict[str, list[float]] = {}
    with bench.room("stages") as room:
        room.up("fifo")
        for name in ("loads", "computes"):
            if name == "computes":
                # It has to compute for about as long as the other loads; resnet50 does 2,400 pictures a second.
                batch = 8 * max(4, min(64, round(2400 * stages["loads"][0] / 8)))
                jobs[name] = ["--task", "resnet50-imagenet", "--batch", batch, "--interleave"]
            room.submit(name, "train.py", *jobs[name], "--steps", FOREVER, "--save-s", 0)
            room.until(lambda name=name: len(room.ticks(name)) > 20, 150)
            room.watch(bench.seconds(8))
            stages[name] = room.jobs()[name]["stages_s"]
            room.ok("cancel", name)
            room.until(lambda name=name: room.jobs()[name]["ended"])
    bench.row(policy="muri-s", measured_stages_s=stages)
    with bench.room("mix") as room:
        mix = []
        for name, words in jobs.items():
            # As long as the other, so that they are together for all of it.
            steps = int(bench.seconds(35) / sum(stages[name]))
            mix.append(room.job(name, "train.py", *words, "--steps", steps, "--save-s", 0, steps=steps, stages_s=stages[name]))
        run_mix(bench, room, {"policy": "muri-s", "jobs": mix}, "--versus-alone")
        journal = (room.out / f"{room.name}.journal.jsonl").read_text()
        bench.row(policy="muri-s", interleaved='"stage":' in journal)


def iadeep(bench: Bench) -> None:
    """The batch sizes of two roommates are searched together."""
    names = {"resnet18": ("resnet18-imagenet", 64, 16, 512), "mobilenet": ("mobilenetv3l-imagenet", 64, 16, 256)}
    with bench.room() as room:
        room.up("iadeep", admission=False, tune_alone=False, measure_s=1.2 if bench.rehearse else 3, budget=6)
        for name, (task, batch, low, high) in names.items():
            room.submit(name, "train.py", "--task", task, "--batch", batch, "--min", low, "--max", high, "--noise", "--steps", FOREVER,
                        "--save-s", 0, batch={"size": batch, "min": low, "max": high}, step_s=0.03)
        for name in names:
            room.until(lambda name=name: len(room.ticks(name)) > 30, 150)
        before = samples(room, names, bench.seconds(4))
        done = lambda: {n for n, _ in room.notes("batch_settled")} == set(names)
        with contextlib.suppress(TimeoutError):
            room.until(done, 90)
        room.watch(bench.seconds(2))
        after = samples(room, names, bench.seconds(8))
        jobs = room.jobs()
        bench.row(policy="iadeep", settled=done(), tunes=room.actions("tune"), batch={n: jobs[n]["batch"] for n in names},
                  noise_scale={n: jobs[n]["noise_scale"] for n in names}, samples_s_before=before, samples_s_after=after,
                  why=room.notes("batch_settled"), not_applied=room.notes("batch_not_applied"))


def samples(room: Room, names: Any, seconds: float) -> dict[str, float]:
    """Samples a second of each job over the next seconds."""
    began = time.monotonic()
    time.sleep(seconds)
    found = {}
    for name in names:
        ticks = [t for t in room.ticks(name) if t.at >= began]
        found[name] = sum(t.batch for t in ticks[1:]) / (ticks[-1].at - ticks[0].at) if len(ticks) > 1 else 0.0
    return found


def opaque(bench: Bench) -> None:
    """A script that knows nothing of us takes turns with one that does."""
    with bench.room() as room:
        room.up("gandiva", slice_s=bench.seconds(6), pack=False)
        room.submit("plain", "plain.py", "--task", "resnet18-imagenet", "--batch", 128, "--steps", 400, sdk=False)
        room.submit("knows", "train.py", "--task", "gpt2-lm", "--batch", 8, "--steps", 250, "--save-s", 0)
        took = room.until_ended(min(300, bench.left_s()))
        jobs = room.jobs()
        bench.row(policy="gandiva", what="an opaque tenant", suspends=room.actions("suspend"), took_s=took,
                  jobs={n: {"state": j["state"], "cooperative": j["cooperative"], "starts": j["starts"]} for n, j in jobs.items()})


# ---- a mix for predictions -----------------------------------------------------------------------------------

#: Kind, batch size, and steps that take about 30 s alone. At these sizes the GPU is what they wait for: where it is the CPU, their speed
#: changes by a quarter from one second to the next, and nothing could be predicted.
KINDS = (
    ("resnet50-imagenet", 64, 1000),
    ("gpt2-lm", 16, 530),
    ("resnet18-imagenet", 128, 1300),
    ("bert-squad", 32, 700),
    ("lstm-wikitext", 256, 1900),
    ("mobilenetv3l-imagenet", 128, 700),
)
MOST = 2
"""Jobs on the GPU at a time: all pairs of kinds are measured, groups of three are not."""


def mix(bench: Bench) -> None:
    """Twelve jobs of six kinds, submitted one after the other, and what measured profiles say of them."""
    folder = bench.out / "mix"
    folder.mkdir(exist_ok=True)
    names = [task for task, _, _ in KINDS]
    content = sets.plan_of({task: (task, batch) for task, batch, _ in KINDS}, [[n, n] for n in names] + ["all-pairs"], bench.rehearse)
    profiles = sets.measure(folder, "profiles", content)
    with_starts(profiles, starts(bench))
    with bench.room() as room:
        jobs = []
        for n in range(12):
            task, batch, steps = KINDS[n % len(KINDS)]
            steps = int(steps * (1.0, 0.7)[n // len(KINDS)] / (10 if bench.rehearse else 1))
            job = room.job(f"{task.split('-')[0]}-{n}", "train.py", "--task", task, "--batch", batch, "--steps", steps, "--save-s", 0,
                           steps=steps, profile=f"{task}@{batch}")
            jobs.append({**job, "after": f"{round(bench.seconds(8) * n)}s"})
        run_mix(bench, room, {"policy": "mps", "set": {"max_tasks": MOST}, "jobs": jobs})
        words = ["predict", str(room.out / f"{room.name}.journal.jsonl"), "--profiles", str(profiles)]
        print(room.tool(*words).stdout)
        said = room.tool(*words, "-o", "json")
        bench.row(prediction=json.loads(said.stdout) if said.returncode == 0 else said.stderr)


def starts(bench: Bench) -> dict[str, float]:
    """What a job of each kind takes beside its steps, from its launch to its end, one after the other as in the mix."""
    with bench.room("starts") as room:
        jobs = []
        for n, (task, batch, _) in enumerate(KINDS):
            job = room.job(task, "train.py", "--task", task, "--batch", batch, "--steps", 60, "--save-s", 0, steps=60)
            jobs.append({**job, "after": f"{round(bench.seconds(8) * n)}s"})
        runs = run_mix(bench, room, {"policy": "mps", "jobs": jobs})
        # Nobody waits, so that a job's age is its start and its steps.
        return {job["name"]: job["age_s"] - job["steps"] * (job["step_s"] or 0.0) for job in runs[0]["jobs"]}


def with_starts(profiles: Path, found: dict[str, float]) -> None:
    """Starts as they are under a daemon, the end included, in the place of those of the measuring machine."""
    file = profiles.with_name(profiles.name + ".jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if "start_s" in row and row["name"] in found:
            row["start_s"] = round(found[row["name"]], 2)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


OF_A_RUN = ("name", "state", "submitted_s", "age_s", "done", "steps", "step_s", "stages_s", "starts", "failures")


def run_mix(bench: Bench, room: Room, mix: dict[str, Any], *flags: str) -> list[dict[str, Any]]:
    """Runs it in the foreground; the journal stays, and so does what the program says."""
    file = room.folder / "mix.yaml"
    file.write_text(json.dumps(mix))
    journal = room.out / f"{room.name}.journal.jsonl"
    out = room.ok("run", str(file), *room.device(), *flags, "--journal", str(journal), "-o", "json")
    said = json.loads(out)
    runs = said if isinstance(said, list) else [said]
    for run in runs:
        run["jobs"] = [{k: v for k, v in job.items() if k in OF_A_RUN} for job in run["jobs"]]
        bench.row(**run)
    print(room.ok("replay", str(journal)).strip())
    return runs


# ---- older measurements --------------------------------------------------------------------------------------


def repartition(bench: Bench) -> None:
    """A running job's part of the GPU changes, 200 times."""
    with mps() as env:
        script(bench, "repartition.py", env)


def jitter(bench: Bench) -> None:
    """How steady a loop is that waits for the CPU, by the cores that it may use."""
    script(bench, "jitter.py", dict(os.environ))


def neighbours(bench: Bench) -> None:
    """What a process does to those beside it, without a daemon."""
    script(bench, "faults.py", dict(os.environ))


def script(bench: Bench, name: str, env: dict[str, str], *words: str) -> None:
    """Runs a script beside this one whose lines are rows."""
    path = os.pathsep.join([str(ROOT / "python"), *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, str(HERE / name), *words]
    with subprocess.Popen(command, env=env | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("{"):
                bench.row(**json.loads(line))
    if running.returncode != 0:
        raise RuntimeError(f"{name} ended with status {running.returncode}")


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """An MPS daemon of its own."""
    scratch = Path(tempfile.mkdtemp())
    env = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": f"{scratch}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{scratch}/log"}
    for folder in ("pipe", "log"):
        (scratch / folder).mkdir()
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=True)
    try:
        yield env
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit -t 5\n", text=True, env=env, check=False)


MECHANISMS = (guaranteed, shrink, resize, turns, gandiva, muri, iadeep, opaque)
PARTS = {part.__name__: part for part in (selftest, sdk, overhead, faults, *MECHANISMS, sets.sets, mix, repartition, neighbours, jitter)}


# ---- running them --------------------------------------------------------------------------------------------


def driver() -> str:
    ask = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no GPU"


WARM = "import torch, torchvision; from transformers import BertForQuestionAnswering, GPT2LMHeadModel"


def complete(out: Path) -> set[str]:
    index = out / "parts.jsonl"
    return {json.loads(line)["part"] for line in index.read_text().splitlines()} if index.exists() else set()


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of plain figures under each other; what is nested stays in the file."""
    columns = list(dict.fromkeys(k for row in rows for k, v in row.items() if not isinstance(v, (dict, list))))
    plain = lambda value: "" if value is None or isinstance(value, (dict, list)) else str(value)
    cells = [columns, *[[plain(row.get(c)) for c in columns] for row in rows]]
    widths = [max(len(line[n]) for line in cells) for n in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def play(name: str, out: Path, rehearse: bool) -> bool:
    bench = Bench(name, out, rehearse)
    began = time.monotonic()
    print(f"== {name}: {PARTS[name].__doc__}", flush=True)
    try:
        PARTS[name](bench)
    except Exception:
        traceback.print_exc()
        print(f"== {name} failed after {time.monotonic() - began:.0f} s; what it has is in {out / name}.new", flush=True)
        return False
    bench.keep()
    what = {"part": name, "date": time.strftime("%Y-%m-%d %H:%M:%S"), "gpu": driver(), "command": f"bench/gpu/run.sh {name}",
            "seconds": round(time.monotonic() - began)}
    with (out / "parts.jsonl").open("a") as index:
        index.write(json.dumps(what) + "\n")
    print(f"{table(bench.rows)}\n== {name}: {what['seconds']} s", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; mechanisms = several of them")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/h200")
    parser.add_argument("--again", action="store_true", help="also what is complete")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU; nothing is measured")
    args = parser.parse_args()
    parts: list[str] = []
    for part in args.parts:
        parts += [p.__name__ for p in MECHANISMS] if part == "mechanisms" else [part]
    if not parts or any(part not in PARTS for part in parts):
        for name, part in PARTS.items():
            print(f"{name:12} {part.__doc__}")
        raise SystemExit(0 if not parts else 2)
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.rehearse:
        # Modules that were never compiled would be by the first jobs, while something is measured.
        subprocess.run([sys.executable, "-c", WARM], check=False)
    good = True
    for part in parts:
        if part in complete(args.out) and not args.again:
            print(f"== {part} is complete")
            continue
        good = play(part, args.out, args.rehearse) and good
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
