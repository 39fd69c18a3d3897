"""What policies do on a real GPU: turns, packs on trial, stages that interleave, batch sizes, scripts that know nothing of us. Parts of run.sh."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from bench import FOREVER, Bench, run_mix
from room import Room, median


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
