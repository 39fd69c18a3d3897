"""Sets of training tasks on one GPU: measured, advised, and the advice measured again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from room import EXAMPLES, REHEARSAL, ROOT, binary

#: A task and its batch size, by a short name.
Tasks = dict[str, tuple[str, int]]

#: Usual batch sizes. Many of these loops are bound by the CPU thread that launches kernels, so the
#: GPU has idle capacity.
USUAL: Tasks = {
    "resnet18": ("resnet18-imagenet", 32),
    "resnet50": ("resnet50-imagenet", 64),
    "gpt2": ("gpt2-lm", 8),
    "bert": ("bert-squad", 16),
    "mobilenet": ("mobilenetv3l-imagenet", 64),
    "vit": ("vit-b16-imagenet", 128),
}
USUAL_SETS = [
    ["resnet18", "resnet18"], ["resnet18", "gpt2"], ["resnet18", "bert"], ["resnet18", "mobilenet"],
    ["resnet50", "bert"],
    ["resnet50", "gpt2"], ["gpt2", "bert"], ["gpt2", "mobilenet"], ["bert", "mobilenet"],
    ["vit", "bert"], ["resnet50", "resnet50"],
    ["vit", "vit"], ["resnet18", "gpt2", "bert"], ["gpt2", "bert", "mobilenet"],
    ["resnet50", "vit", "gpt2"],
]

#: Batch sizes at which most tasks keep the GPU busy alone.
LARGE: Tasks = {
    "resnet18": ("resnet18-imagenet", 64),
    "resnet50": ("resnet50-imagenet", 64),
    "gpt2": ("gpt2-lm", 16),
    "bert": ("bert-squad", 16),
    "mobilenet": ("mobilenetv3l-imagenet", 64),
    "lstm": ("lstm-wikitext", 256),
    "vit": ("vit-b16-imagenet", 128),
}
LARGE_SETS = [
    ["resnet18", "resnet18"], ["resnet18", "gpt2"], ["resnet18", "bert"], ["resnet50", "bert"],
    ["resnet50", "gpt2"], ["gpt2", "bert"],
    ["bert", "mobilenet"], ["gpt2", "mobilenet"], ["lstm", "bert"], ["vit", "bert"],
    ["resnet50", "resnet50"], ["vit", "vit"],
    ["resnet18", "gpt2", "bert"], ["bert", "bert", "mobilenet"], ["resnet50", "vit", "gpt2"],
]
TRIES = 4
ROUNDS = 2
BOUND = 1.5


def plan(tasks: Tasks, sets: list[Any], rehearse: bool, mps: bool = True,
         rounds: int = ROUNDS) -> dict[str, Any]:
    script = [str(REHEARSAL), "train.py"] if rehearse else [str(EXAMPLES / "train.py")]
    listed = []
    for name, (task, batch) in tasks.items():
        words = [sys.executable, *script, "--task", task, "--batch", str(batch), "--steps", "1e12",
                 "--save-s", "0", "--stay"]
        listed.append({"name": name, "kind": "train", "command": words, "batches": [batch],
                       "env": {"OMP_NUM_THREADS": "2"}})
    found = {"tasks": listed, "sets": sets, "bound": BOUND, "tries": TRIES, "seconds": 1.5,
             "settle": 0.5, "rounds": rounds, "starting": 8}
    return {**found, "devices": "cpu"} if rehearse else {**found, "devices": "gpu", "mps": mps}


def measure(folder: Path, label: str, content: dict[str, Any], anew: bool) -> Path:
    """Measures a plan; existing rows are measured again only if `anew`."""
    file, prefix = folder / f"{label}-plan.yaml", folder / label
    file.write_text(json.dumps(content))
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    words = [binary(), "profile", "measure", str(file), "--out", str(prefix),
             *(["--again"] if anew else [])]
    subprocess.run(words, check=False, env=env)
    return prefix


def advice(prefix: Path) -> list[dict[str, Any]]:
    words = [binary(), "profile", "advise", str(prefix), "--bound", str(BOUND), "-o", "json"]
    found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    sets: list[dict[str, Any]] = found["sets"] if isinstance(found, dict) else found
    return sets


Names = tuple[str, ...]


def sums(prefix: Path) -> dict[Names, dict[str, Any]]:
    """The advice for each set, by the names of its tasks in order."""
    return {tuple(one["tasks"]): one for one in advice(prefix)}


def same_way(way: dict[str, Any], sms: list[int] | None, twins: bool) -> bool:
    if way["sms"] is None or sms is None:
        return way["sms"] == sms
    return sorted(way["sms"]) == sorted(sms) if twins else way["sms"] == sms


def sets(bench: Any) -> None:
    """Pairs and triples at usual sizes: one at a time, time-sliced, under MPS, as advised."""
    compare(bench, USUAL, USUAL_SETS)


def large(bench: Any) -> None:
    """The same with batch sizes that keep the GPU busy."""
    compare(bench, LARGE, LARGE_SETS)


def compare(bench: Any, tasks: Tasks, every: list[list[str]]) -> None:
    folder = bench.out / bench.part
    folder.mkdir(exist_ok=True)

    def measured(label: str, sets: list[Any], **how: Any) -> dict[Names, dict[str, Any]]:
        used = {name for one in sets for name in one["tasks"]}
        some = {name: what for name, what in tasks.items() if name in used}
        return sums(measure(folder, label, plan(some, sets, bench.rehearse, **how),
                            bench.anew)) if sets else {}

    splits = [] if bench.rehearse else "search"
    tried = measured("tried", [{"tasks": one, "splits": splits} for one in every])
    slices = measured("slices", [{"tasks": one, "splits": []} for one in every], mps=False,
                      rounds=1)
    # Measured again in new processes, since the best of noisy measurements is biased.
    chosen = {key: one["best"] for key, one in tried.items() if one["best"]}
    parts = lambda best: [best["sms"]] if best["sms"] else []
    again = measured("again", [{"tasks": list(key), "splits": parts(best)} for key,
                               best in chosen.items()])
    alone = turns_of(bench.out)
    for key, one in tried.items():
        best, ours = one["best"], None
        mps = (again if best else tried)[key]["unconfined"]
        if best:
            ours = next((w for w in again[key]["ways"]
                         if same_way(w, best["sms"], len(set(key)) < len(key))), None)
        turns = [alone[tasks[name]] for name in key if tasks[name] in alone]
        bench.row(set=list(key), one_at_a_time=sum(turns) / len(turns) if len(turns) == len(key)
                  else None,
                  time_slices=slices[key]["unconfined"]["sum"], mps=mps["sum"],
                  mps_slowdowns=mps["slowdowns"], mps_error=mps["sum_error"],
                  roommate=ours["sum"] if ours else None, error=ours["sum_error"] if ours else None,
                  way=(best["sms"] or "unconfined") if best else "declined",
                  slowdowns=ours["slowdowns"] if ours else None, reason=one["reason"])


def turns_of(out: Path) -> dict[tuple[str, int], float]:
    """Share of its time slices in which each task makes progress, from the part `turns`."""
    file = out / "turns.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {(job["task"], job["batch"]): job["works"] for row in rows
            for job in row["jobs"].values() if "works" in job}
