"""A mix of jobs, and what measured profiles say of it. A part of run.sh."""

from __future__ import annotations

import json
from pathlib import Path

import sets

from bench import Bench, run_mix

#: Kind, batch size, and steps that take about 25 s alone. At these sizes the GPU is what they wait for: where it is the CPU, their speed
#: changes by a quarter from one second to the next, and nothing could be predicted.
KINDS = (
    ("resnet50-imagenet", 64, 850),
    ("gpt2-lm", 16, 450),
    ("resnet18-imagenet", 128, 1100),
    ("bert-squad", 32, 600),
    ("lstm-wikitext", 256, 1600),
    ("mobilenetv3l-imagenet", 128, 600),
)
MOST = 2
"""Jobs on the GPU at a time: all pairs of kinds are measured, groups of three are not."""


def mix(bench: Bench) -> None:
    """Twelve jobs of six kinds, submitted one after the other, and what measured profiles say of them."""
    folder = bench.out / "mix"
    folder.mkdir(exist_ok=True)
    names = [task for task, _, _ in KINDS]
    content = sets.plan({task: (task, batch) for task, batch, _ in KINDS}, [[n, n] for n in names] + ["all-pairs"], bench.rehearse)
    profiles = sets.measure(folder, "profiles", content, bench.anew)
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
