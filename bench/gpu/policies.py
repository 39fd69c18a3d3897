"""Policies on a real GPU: time sharing, packing, interleaved stages, batch sizes, opaque jobs.

Parts of run.sh.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import sets
from bench import FOREVER, Bench, run_mix
from room import Room, Tick, median


def turns(bench: Bench) -> None:
    """Time sharing: the tasks of `sets` run one at a time, swapped out of GPU memory meanwhile."""
    slice_s = bench.seconds(4)
    with bench.room() as room:
        room.up("gandiva", slice_s=slice_s, scan_s=slice_s / 4, pack=False, max_height=8)
        for name, (task, batch) in sets.USUAL.items():
            room.submit(name, "train.py", "--task", task, "--batch", batch, "--steps", FOREVER,
                        "--save-s", 0)
        for name in sets.USUAL:
            room.until(lambda name=name: len(room.ticks(name)) > 20, 150)
        began = time.monotonic()
        room.watch(3.3 * slice_s * len(sets.USUAL))
        work = {}
        for name, (task, batch) in sets.USUAL.items():
            found = works(room.ticks(name), began, len(sets.USUAL))
            work[name] = {"task": task, "batch": batch, **found,
                          "swaps": said(room, name, "Swapped")}
        parts = [w["works"] for w in work.values() if "works" in w]
        bench.row(policy="gandiva", turn_s=slice_s, suspends=room.actions("suspend"), jobs=work,
                  one_at_a_time=sum(parts) / len(parts) if parts else None)


def works(ticks: list[Tick], since: float, jobs: int) -> dict[str, Any]:
    """Share of its time slices in which a job makes progress: its steps per cycle, relative to one
    slice of `jobs` equal slices at its usual speed; empty without a complete slice.
    """
    turns: list[list[float]] = []
    for tick in (t.at for t in ticks if t.at >= since):
        if not turns or tick - turns[-1][-1] > 1.0:
            turns.append([])
        turns[-1].append(tick)
    # The first and the last slice may be incomplete. The first quarter of a slice is left out of
    # the speed, because steps are queued ahead there.
    whole = turns[1:-1]
    late = [[t for t in turn if t > turn[0] + 0.25 * (turn[-1] - turn[0])] for turn in whole]
    speeds = [(len(turn) - 1) / (turn[-1] - turn[0]) for turn in late if len(turn) > 2]
    if not speeds:
        return {}
    cycle_s = (turns[len(whole) + 1][0] - turns[1][0]) / len(whole)
    steps = sum(len(turn) for turn in whole) / len(whole)
    return {"works": steps / median(speeds) * jobs / cycle_s, "turns": len(whole),
            "cycle_s": cycle_s, "steps_s": median(speeds)}


def gandiva(bench: Bench) -> None:
    """Time slices and packing on trial: one pair that is kept and one that is not."""
    pairs = {
        "large": [("vit-b16-imagenet", 128), ("vit-b16-imagenet", 128)],
        "small": [("gpt2-lm", 8), ("bert-squad", 16)],
    }
    # Two tasks that fill the GPU gain 6 % together; sharing must gain more.
    settings = {"keep_gain": 1.1, "slice_s": 8, "scan_s": 2, "trial_s": 4, "trial_steps": 10,
                "cool_s": 0, "pack_util_cap": 3}
    if bench.rehearse:
        settings |= {"slice_s": 1.5, "scan_s": 0.5, "trial_s": 1.2, "trial_steps": 5}
    for label, tasks in pairs.items():
        with bench.room(label) as room:
            room.up("gandiva", **settings)
            names = []
            for n, (task, batch) in enumerate(tasks):
                names.append(f"{task}-{n}")
                room.submit(names[-1], "train.py", "--task", task, "--batch", batch, "--steps",
                            FOREVER, "--save-s", 0)
            for name in names:
                room.until(lambda name=name: len(room.ticks(name)) > 20, 120)
            # A time slice each, and the trial.
            room.watch(bench.seconds(24))
            [a, b] = room.watch(bench.seconds(8), *names)
            tried, refused = room.notes("tried_with"), room.notes("not_worth_sharing")
            states = {n: j["state"] for n, j in room.jobs().items()}
            bench.row(policy="gandiva", pair=label, suspends=room.actions("suspend"),
                      tried=len(tried), refused=refused,
                      packed=bool(tried) and not refused and set(states.values()) == {"running"},
                      states=states,
                      steps_s_at_the_end=[a, b], swaps=[said(room, n, "Swapped") for n in names])


def said(room: Room, name: str, word: str) -> list[str]:
    log = Path(room.jobs()[name]["log"])
    return [line for line in log.read_text(errors="replace").splitlines()
            if word in line][-4:] if log.exists() else []


def muri(bench: Bench) -> None:
    """One job is bound by its loader, the other computes; their stages are interleaved."""
    jobs: dict[str, list[object]] = {"loads": ["--task", "resnet18-imagenet", "--batch", 128,
                                               "--loader", "--workers", 4]}
    stages: dict[str, list[float]] = {}
    with bench.room("stages") as room:
        room.up("fifo")
        for name in ("loads", "computes"):
            if name == "computes":
                # As long as a step of the other, so that interleaving delays neither of them;
                # resnet50 processes 2,200 pictures per second.
                batch = 8 * max(4, min(64, round(2200 * sum(stages["loads"]) / 8)))
                jobs[name] = ["--task", "resnet50-imagenet", "--batch", batch, "--interleave"]
            room.submit(name, "train.py", *jobs[name], "--steps", FOREVER, "--save-s", 0)
            room.until(lambda name=name: len(room.ticks(name)) > 20, 150)
            room.watch(bench.seconds(8))
            stages[name] = room.jobs()[name]["stages_s"]
            room.ok("cancel", name)
            room.until(lambda name=name: room.jobs()[name]["ended"])
    bench.row(policy="muri-s", measured_stages_s=stages)
    runs = {}
    for policy, flags in (("muri-s", ["--versus-exclusive"]), ("mps", [])):
        with bench.room("mix" if policy == "muri-s" else policy) as room:
            mix = []
            for name, words in jobs.items():
                # As long as the other job, so that they overlap for the whole run.
                steps = int(bench.seconds(25) / sum(stages[name]))
                mix.append(room.job(name, "train.py", *words, "--steps", steps, "--save-s", 0,
                                    steps=steps, stages_s=stages[name]))
            runs[policy] = run_mix(bench, room, {"policy": policy, "jobs": mix}, *flags)
            journal = (room.out / f"{room.name}.journal.jsonl").read_text()
            bench.row(policy=policy, interleaved='"stage":' in journal)
    one_by_one, interleaved = runs["muri-s"]
    [plain] = runs["mps"]
    bench.row(policy="muri-s", **ratios(interleaved, one_by_one, "one_by_one"),
              **ratios(interleaved, plain, "mps"))


def ratios(run: dict[str, Any], other: dict[str, Any], name: str) -> dict[str, float]:
    """Makespan and mean completion time of another run, relative to this one."""
    figures = ("makespan_s", "avg_jct_s")
    return {f"{figure[:-2]}_of_{name}": other["metrics"][figure] / run["metrics"][figure]
            for figure in figures}


def iadeep(bench: Bench) -> None:
    """The batch sizes of two roommates are tuned together."""
    # The last value is the step time alone in seconds, the reference of degradation.
    names = {"resnet18": ("resnet18-imagenet", 64, 16, 512, 0.0124),
             "mobilenet": ("mobilenetv3l-imagenet", 64, 16, 256, 0.026)}
    with bench.room() as room:
        room.up("iadeep", admission=False, tune_alone=False, measure_s=1.2 if bench.rehearse else 3,
                budget=6)
        for name, (task, batch, low, high, step_s) in names.items():
            room.submit(name, "train.py", "--task", task, "--batch", batch, "--min", low, "--max",
                        high, "--noise", "--steps", FOREVER,
                        "--save-s", 0, batch={"size": batch, "min": low, "max": high},
                        step_s=step_s)
        for name in names:
            room.until(lambda name=name: len(room.ticks(name)) > 30, 150)
        before = samples(room, names, bench.seconds(4))
        noise = {n: job["noise_scale"] for n, job in room.jobs().items()}
        pd_before = {n: degradation(names[n], before[n], noise[n]) for n in names}
        done = lambda: {n for n, _ in room.notes("batch_settled")} == set(names)
        with contextlib.suppress(TimeoutError):
            room.until(done, 90)
        room.watch(bench.seconds(2))
        after = samples(room, names, bench.seconds(8))
        jobs = room.jobs()
        noise = {n: jobs[n]["noise_scale"] for n in names}
        pd_after = {n: degradation(names[n], after[n], noise[n]) for n in names}
        # Samples of two models cannot be added: the policy minimises the mean degradation.
        bench.row(policy="iadeep", settled=done(), tunes=room.actions("tune"),
                  batch={n: jobs[n]["batch"] for n in names},
                  noise_scale=noise, pd_before=pd_before, pd_after=pd_after,
                  mean_pd_before=mean(pd_before), mean_pd_after=mean(pd_after),
                  samples_s_before={n: rate for n, (rate, _) in before.items()},
                  samples_s_after={n: rate for n, (rate, _) in after.items()},
                  why=room.notes("batch_settled"), not_applied=room.notes("batch_not_applied"))


def degradation(asked: tuple[str, int, int, int, float], measured: tuple[float, float],
                noise: float | None) -> float | None:
    """Goodput alone at the user's batch size ÷ goodput now; `None` if either is not known.

    A sample of another batch size counts (noise + own) / (noise + batch) of one at the user's own.
    """
    _, own, _, _, step_s = asked
    rate, batch = measured
    if not rate or not noise:
        return None
    return own / step_s / (rate * (noise + own) / (noise + batch))


def mean(found: dict[str, float | None]) -> float | None:
    known = [value for value in found.values() if value is not None]
    return sum(known) / len(known) if len(known) == len(found) else None


def samples(room: Room, names: Any, seconds: float) -> dict[str, tuple[float, float]]:
    """Samples per second of each job over the next seconds, and the mean batch size."""
    began = time.monotonic()
    time.sleep(seconds)
    found = {}
    for name in names:
        ticks = [t for t in room.ticks(name) if t.at >= began]
        done = sum(t.batch for t in ticks[1:])
        found[name] = (done / (ticks[-1].at - ticks[0].at),
                       done / (len(ticks) - 1)) if len(ticks) > 1 else (0.0, 0.0)
    return found


def opaque(bench: Bench) -> None:
    """A script without the SDK shares the GPU by time slices with one that uses it."""
    with bench.room() as room:
        room.up("gandiva", slice_s=bench.seconds(6), pack=False)
        room.submit("plain", "plain.py", "--task", "resnet18-imagenet", "--batch", 128, "--steps",
                    400, sdk=False)
        room.submit("knows", "train.py", "--task", "gpt2-lm", "--batch", 8, "--steps", 250,
                    "--save-s", 0)
        took = room.until_ended(min(300, bench.left_s()))
        jobs = room.jobs()
        bench.row(policy="gandiva", what="an opaque tenant", suspends=room.actions("suspend"),
                  took_s=took,
                  jobs={n: {"state": j["state"], "cooperative": j["cooperative"],
                            "starts": j["starts"]} for n, j in jobs.items()})
