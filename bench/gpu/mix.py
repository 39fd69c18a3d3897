"""A mix of jobs, and its prediction from measured profiles. A part of run.sh."""

from __future__ import annotations

import json
from pathlib import Path

import sets

from bench import Bench, run_mix

#: Task, batch size, and steps that take about 25 s alone. At these sizes the tasks are GPU-bound;
#: the speed of CPU-bound tasks varies by a quarter from second to second and cannot be predicted.
KINDS = (
    ("resnet50-imagenet", 64, 850),
    ("gpt2-lm", 16, 450),
    ("resnet18-imagenet", 128, 1100),
    ("bert-squad", 32, 600),
    ("lstm-wikitext", 256, 1600),
    ("mobilenetv3l-imagenet", 128, 600),
)
MOST = 2
"""Jobs on the GPU at a time: all pairs of tasks are measured, groups of three are not."""


def mix(bench: Bench) -> None:
    """Twelve jobs of six tasks, and their prediction from measured profiles."""
    folder = bench.out / "mix"
    folder.mkdir(exist_ok=True)
    names = [task for task, _, _ in KINDS]
    content = sets.plan({task: (task, batch) for task, batch, _ in KINDS},
                        [[n, n] for n in names] + ["all-pairs"], bench.rehearse)
    profiles = sets.measure(folder, "profiles", content, bench.anew)
    with_starts(profiles, starts(bench))
    with bench.room() as room:
        jobs = []
        for n in range(12):
            task, batch, steps = KINDS[n % len(KINDS)]
            steps = int(steps * (1.0, 0.7)[n // len(KINDS)] / (10 if bench.rehearse else 1))
            job = room.job(f"{task.split('-')[0]}-{n}", "train.py", "--task", task, "--batch",
                           batch, "--steps", steps, "--save-s", 0,
                           steps=steps, profile=f"{task}@{batch}")
            jobs.append({**job, "after": f"{round(bench.seconds(8) * n)}s"})
        run_mix(bench, room, {"policy": "mps", "set": {"max_tasks": MOST}, "jobs": jobs})
        words = ["predict", str(room.out / f"{room.name}.journal.jsonl"), "--profiles",
                 str(profiles)]
        print(room.tool(*words).stdout)
        said = room.tool(*words, "-o", "json")
        bench.row(prediction=json.loads(said.stdout) if said.returncode == 0 else said.stderr)


def starts(bench: Bench) -> dict[str, float]:
    """Seconds of a job of each task outside its steps, with arrivals as in the mix."""
    with bench.room("starts") as room:
        jobs = []
        for n, (task, batch, _) in enumerate(KINDS):
            job = room.job(task, "train.py", "--task", task, "--batch", batch, "--steps", 60,
                           "--save-s", 0, steps=60)
            jobs.append({**job, "after": f"{round(bench.seconds(8) * n)}s"})
        runs = run_mix(bench, room, {"policy": "mps", "jobs": jobs})
        # No job waits, so the age of a job is its start-up time plus its steps.
        return {job["name"]: job["age_s"] - job["steps"] * (job["step_s"] or 0.0)
                for job in runs[0]["jobs"]}


def with_starts(profiles: Path, found: dict[str, float]) -> None:
    """Replaces the measured start-up times by those under a daemon, which include the end."""
    file = profiles.with_name(profiles.name + ".jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if "start_s" in row and row["name"] in found:
            row["start_s"] = round(found[row["name"]], 2)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
