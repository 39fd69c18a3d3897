"""The policy `roommate` beside others on mixes of short jobs, each cell once more after all.

A part of run.sh. Every finished cell (mix, policy, round) is a line of OUT/roommate/MIX.jsonl and is
not run again; $ROOMMATE_MIXES=a,b takes some of the mixes, $ROOMMATE_POLICIES=a,b some of the
policies, $ROOMMATE_ROUNDS=1 the first run of each cell only. A call ends before its time is over,
and the next one goes on where it ended.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import sets
from mix import with_starts
from room import Room, rounded

from bench import Bench


class Job(NamedTuple):
    """A job of a mix: alone its steps take about `seconds`, its start 4 to 10 s more."""

    task: str
    batch: int
    seconds: float
    after_s: float = 0.0
    script: str = "train.py"
    job_class: str = ""


PLAIN = "plain.py"
BOUND_KEPT, REST = "guaranteed", "best-effort"

#: Six to eight jobs each. The profiles of the tasks are measured first, alone and in pairs.
MIXES: dict[str, list[Job]] = {
    # Half of the jobs are PyTorch scripts that do not use the SDK.
    "plain": [
        Job("resnet50-imagenet", 64, 10, 0, PLAIN), Job("gpt2-lm", 8, 9), Job("bert-squad", 16, 8, 2),
        Job("lstm-wikitext", 256, 12, 3, PLAIN), Job("resnet50-imagenet", 64, 8, 6),
        Job("gpt2-lm", 8, 8, 8, PLAIN), Job("bert-squad", 16, 10, 10),
    ],
    # vgg16 on small pictures makes steps of others several times as long.
    "bad-pair": [
        Job("bert-squad", 16, 10), Job("vgg16-cifar", 512, 12, 1), Job("resnet50-imagenet", 64, 9, 2),
        Job("gpt2-lm", 8, 8, 4), Job("vgg16-cifar", 512, 8, 8), Job("bert-squad", 16, 8, 10),
        Job("resnet50-imagenet", 64, 8, 12),
    ],
    # Three guaranteed jobs, and five that use what is left. Elsewhere nothing is promised.
    "classes": [
        Job("resnet50-imagenet", 64, 12, 0, job_class=BOUND_KEPT), Job("gpt2-lm", 8, 9, 0, job_class=REST),
        Job("bert-squad", 16, 8, 2, job_class=REST),
        Job("vit-b16-imagenet", 64, 10, 4, job_class=BOUND_KEPT),
        Job("lstm-wikitext", 256, 9, 5, job_class=REST), Job("gpt2-lm", 8, 8, 8, PLAIN, REST),
        Job("resnet50-imagenet", 64, 8, 12, job_class=REST),
        Job("bert-squad", 16, 9, 14, job_class=BOUND_KEPT),
    ],
    # Modules that no library has and no profile knows.
    "own": [
        Job("unet-own", 16, 12), Job("recommender-own", 8192, 9, 0), Job("transformer-own", 16, 10, 1),
        Job("unet-own", 16, 8, 4, PLAIN), Job("transformer-own", 16, 8, 6, PLAIN),
        Job("recommender-own", 8192, 10, 8),
    ],
}

#: One job on the GPU at a time comes first: it says how long each job takes alone.
POLICIES = ("fifo", "time-slicing", "mps", "iadeep", "antman", "roommate")
#: As many jobs at a time as `roommate` may have; both have three by default.
SETS = {"time-slicing": {"max_tasks": 8}, "mps": {"max_tasks": 8}}
ROUNDS = 2
#: A guaranteed job is to take at most this many times as long as alone, from its first start on.
BOUND = 1.5
#: A call ends if less time than this is left, s.
CELL_S = 110.0
#: The longest run of a cell, s.
MOST_S = 180
PROFILES_S = 200.0


def roommate(bench: Bench) -> None:
    """Mixes with plain scripts, bad pairs, classes and own modules under six policies, twice."""
    folder = bench.out / bench.part
    folder.mkdir(exist_ok=True)
    wanted = chosen("ROOMMATE_MIXES", MIXES)
    if bench.anew:
        for name in wanted:
            for file in folder.glob(f"{name}*.jsonl"):
                file.unlink()
    for name in wanted:
        play(bench, folder, name)
    for name in MIXES:
        for row in cells(folder / f"{name}.jsonl"):
            bench.row(**row)
    every = len(MIXES) * len(POLICIES) * ROUNDS
    bench.left = every - sum(len(cells(folder / f"{name}.jsonl")) for name in MIXES)


def chosen(variable: str, names: Iterable[str]) -> list[str]:
    """The names in an environment variable, or all."""
    given = [name for name in os.environ.get(variable, "").split(",") if name]
    if unknown := set(given) - set(names):
        raise ValueError(f"{variable}: there is no {', '.join(sorted(unknown))}")
    return given or list(names)


def cells(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a file; a call that was killed may have left half of one."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def play(bench: Bench, folder: Path, name: str) -> None:
    """The cells of a mix that are missing, as far as time allows."""
    file = folder / f"{name}.jsonl"
    found = cells(file)
    file.write_text("".join(json.dumps(row) + "\n" for row in found))
    have = {(row["policy"], row["round"]) for row in found}
    policies = chosen("ROOMMATE_POLICIES", POLICIES)
    rounds = int(os.environ.get("ROOMMATE_ROUNDS", ROUNDS))
    missing = [(policy, n) for n in range(1, rounds + 1) for policy in policies
               if (policy, n) not in have]
    if not missing:
        return
    if bench.left_s() < PROFILES_S:
        return
    tasks = {job.task: (job.task, job.batch) for job in MIXES[name]}
    plan = sets.plan(tasks, [[n, n] for n in tasks] + ["all-pairs"], bench.rehearse, rounds=1)
    # What was measured before is not measured again.
    profiles = sets.measure(folder, f"{name}-profiles", plan, anew=False)
    step_s = steps_of(profiles.with_name(profiles.name + ".jsonl"))
    for policy, n in missing:
        if bench.left_s() < CELL_S:
            return
        alone = {job: row["ran_s"] for row in reversed(found) if row["policy"] == "fifo"
                 for job, row in row.get("jobs", {}).items() if row["ran_s"] is not None}
        row = cell(bench, profiles, name, policy, n, step_s, alone)
        found.append(row)
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")


def steps_of(file: Path) -> dict[tuple[str, int], float]:
    """Seconds of a step of each task alone."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {(row["name"], row["batch"]): 1.0 / row["it_s"] for row in rows
            if row.get("kind") == "train" and row.get("it_s")}


def cell(bench: Bench, profiles: Path, name: str, policy: str, number: int,
         step_s: dict[tuple[str, int], float], alone: dict[str, float]) -> dict[str, Any]:
    """Runs a mix under a policy."""
    with bench.room(f"{name}-{policy}-{number}") as room:
        jobs = [described(bench, room, n, job, step_s) for n, job in enumerate(MIXES[name])]
        file, journal = room.folder / "mix.yaml", room.out / f"{room.name}.journal.jsonl"
        file.write_text(json.dumps({"policy": policy, "set": SETS.get(policy, {}), "jobs": jobs}))
        words = ["run", str(file), *room.device(), "--journal", str(journal), "-o", "json"]
        # On an interrupt it ends its jobs.
        done = subprocess.run(["timeout", "--signal=INT", str(MOST_S), room.binary, *words],
                              env=room.env, capture_output=True, text=True, check=False)
        if not done.stdout:
            # It would not be otherwise the next time; a job that fails is part of the result, too.
            print(f"{name} under {policy}, round {number} failed: {done.stderr}", flush=True)
            return {"mix": name, "policy": policy, "round": number, "failed": done.stderr[-2000:]}
        found = json.loads(done.stdout)
        [run] = found if isinstance(found, list) else [found]
        print(room.ok("replay", str(journal)).strip())
        ran = running_s(journal)
        # Without a run of one at a time nobody is known to be slower than alone.
        every = {job["name"]: figures(job, ran, alone or (ran if policy == "fifo" else {}))
                 for job in run["jobs"]}
        for told in jobs:
            if told.get("class") == "guaranteed":
                job = every[told["name"]]
                job["kept"] = job["slowdown"] is not None and job["slowdown"] <= BOUND
        metrics = run["metrics"]
        row = {"mix": name, "policy": policy, "round": number,
               "mean_s": metrics["avg_jct_s"], "makespan_s": metrics["makespan_s"],
               "finished": metrics["finished"], "suspended": metrics["preemptions"],
               "kept": sum(job.get("kept", False) for job in every.values()),
               "guaranteed": sum("kept" in job for job in every.values()),
               "worst_slowdown": max((j["slowdown"] or 0.0 for j in every.values()), default=0.0),
               "jobs": every}
        if policy == "roommate" and alone:
            with_starts(profiles, starts(name, jobs, step_s, alone))
            row |= predicted(room, journal, profiles, jobs)
        found = rounded(row)
        assert isinstance(found, dict)
        print(f"{name} under {policy}, round {number}: mean {found['mean_s']} s, makespan "
              f"{found['makespan_s']} s", flush=True)
        return found


def described(bench: Bench, room: Room, n: int, job: Job,
              step_s: dict[tuple[str, int], float]) -> dict[str, Any]:
    """A job of a mix file."""
    steps = max(20, round(bench.seconds(job.seconds) / step_s[job.task, job.batch]))
    words = ["--task", job.task, "--batch", job.batch, "--steps", steps]
    sdk = job.script != PLAIN
    words += ["--save-s", 0] if sdk else []
    file = room.job(f"{job.task.split('-')[0]}-{n}", job.script, *words, sdk=sdk, steps=steps,
                    profile=f"{job.task}@{job.batch}", after=f"{bench.seconds(job.after_s):.2f}s")
    return {**file, **({"class": job.job_class} if job.job_class else {})}


def starts(name: str, jobs: list[dict[str, Any]], step_s: dict[tuple[str, int], float],
           alone: dict[str, float]) -> dict[str, float]:
    """Seconds of a job of each task outside its steps, from when it was alone."""
    found: dict[str, float] = {}
    for job, told in zip(MIXES[name], jobs, strict=True):
        if told["name"] in alone:
            outside = alone[told["name"]] - told["steps"] * step_s[job.task, job.batch]
            found.setdefault(job.task, max(0.0, outside))
    return found


def running_s(journal: Path) -> dict[str, float]:
    """Seconds from the first start of each job to its end."""
    names: dict[int, str] = {}
    began: dict[int, float] = {}
    found: dict[str, float] = {}
    for line in map(json.loads, journal.read_text().splitlines()):
        if job := line.get("job"):
            names[job["idx"]] = job["name"]
        step = line.get("step", {})
        for fact in step.get("facts", []):
            if "finished" in fact:
                idx = fact["finished"]
                found[names[idx]] = (step["at"] - began[idx]) / 1e6
        for action in step.get("actions", []):
            if "start" in action:
                began.setdefault(action["start"][0], step["at"])
    return found


def figures(job: dict[str, Any], ran: dict[str, float], alone: dict[str, float]) -> dict[str, Any]:
    """Times of a job, and how much longer it took than alone, from its first start on."""
    name = job["name"]
    finished = job["state"] == "finished" and name in ran
    slower = ran[name] / alone[name] if finished and name in alone else None
    return {"state": job["state"], "took_s": job["age_s"], "ran_s": ran.get(name),
            "slowdown": slower, "starts": job["starts"], "failures": job["failures"]}


def predicted(room: Room, journal: Path, profiles: Path,
              jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the simulator says of a run, of which its policy knows no more than it did."""
    done = room.tool("predict", str(journal), "--profiles", str(profiles), "-o", "json")
    if done.returncode != 0:
        return {"prediction": done.stderr}
    said = json.loads(done.stdout)
    after = {job["name"]: float(job["after"].rstrip("s")) for job in jobs}
    times = {job["job"]: job["predicted_s"] for job in said["jobs"]}
    if not times:
        return {"prediction": "no job finished"}
    return {"predicted_mean_s": sum(times.values()) / len(times),
            "predicted_makespan_s": max(after[name] + took for name, took in times.items()),
            "mean_error": said["mean_error"], "worst_error": said["worst_error"],
            "predicted_s": times}
