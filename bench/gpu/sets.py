"""Which sets of training tasks share a GPU, how, and what it is worth: measured, decided, and measured again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from room import EXAMPLES, REHEARSAL, ROOT, binary

#: Short name: task and batch size.
TASKS = {
    "resnet18": ("resnet18-imagenet", 64),
    "resnet50": ("resnet50-imagenet", 64),
    "gpt2": ("gpt2-lm", 16),
    "bert": ("bert-squad", 16),
    "mobilenet": ("mobilenetv3l-imagenet", 64),
    "lstm": ("lstm-wikitext", 256),
    "vit": ("vit-b16-imagenet", 128),
}
PAIRS = [
    ("resnet18", "resnet18"), ("resnet18", "gpt2"), ("resnet18", "bert"), ("resnet50", "bert"), ("resnet50", "gpt2"), ("gpt2", "bert"),
    ("bert", "mobilenet"), ("gpt2", "mobilenet"), ("lstm", "bert"), ("vit", "bert"), ("resnet50", "resnet50"), ("vit", "vit"),
]
TRIPLES = [("resnet18", "gpt2", "bert"), ("bert", "bert", "mobilenet"), ("resnet50", "vit", "gpt2")]
SPLITS = [48, 88]
ROUNDS = 2
BOUND = 1.5


def plan(sets: list[dict[str, Any]], mps: bool, rehearse: bool, rounds: int) -> dict[str, Any]:
    used = {name for one in sets for name in one["tasks"]}
    return plan_of({name: what for name, what in TASKS.items() if name in used}, sets, rehearse, mps, rounds)


def plan_of(tasks: dict[str, tuple[str, int]], sets: list[Any], rehearse: bool, mps: bool = True, rounds: int = ROUNDS) -> dict[str, Any]:
    script = [str(REHEARSAL), "train.py"] if rehearse else [str(EXAMPLES / "train.py")]
    listed = []
    for name, (task, batch) in tasks.items():
        words = [sys.executable, *script, "--task", task, "--batch", str(batch), "--steps", "1e12", "--save-s", "0", "--stay"]
        listed.append({"name": name, "kind": "train", "command": words, "batches": [batch], "env": {"OMP_NUM_THREADS": "2"}})
    found = {"tasks": listed, "sets": sets, "seconds": 1.5, "settle": 0.5, "rounds": rounds, "starting": 8}
    return {**found, "devices": "cpu"} if rehearse else {**found, "devices": "gpu", "mps": mps}


def measure(folder: Path, label: str, content: dict[str, Any]) -> Path:
    """Rows are appended as they come; what was measured before is not measured again."""
    file, prefix = folder / f"{label}-plan.yaml", folder / label
    file.write_text(json.dumps(content))
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    subprocess.run([binary(), "profile", "measure", str(file), "--out", str(prefix)], check=False, env=env)
    return prefix


def advice(prefix: Path) -> list[dict[str, Any]]:
    words = [binary(), "profile", "advise", str(prefix), "--bound", str(BOUND), "-o", "json"]
    found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    sets: list[dict[str, Any]] = found["sets"] if isinstance(found, dict) else found
    return sets


Names = tuple[str, ...]


def sums(prefix: Path) -> dict[Names, dict[str, Any]]:
    """What is known of each set, by the names of its tasks in order."""
    return {tuple(one["tasks"]): one for one in advice(prefix)}


def written(tasks: list[str], sms: list[int] | None) -> dict[str, Any]:
    """A set as a plan has it, with this split or none."""
    if sms is None:
        return {"tasks": tasks, "splits": []}
    pairs = list(zip(tasks, sms, strict=True))
    for first in pairs:
        others = list(pairs)
        others.remove(first)
        if first[1] % 8 == 0 and len({n for _, n in others}) == 1:
            # One has its part, the others have the rest together.
            return {"tasks": [first[0], *(name for name, _ in others)], "splits": [first[1]]}
    pairs.sort(key=lambda pair: pair[1] % 8)
    return {"tasks": [name for name, _ in pairs], "splits": [[n for _, n in pairs]]}


def same_way(way: dict[str, Any], sms: list[int] | None, twins: bool) -> bool:
    if way["sms"] is None or sms is None:
        return way["sms"] == sms
    return sorted(way["sms"]) == sorted(sms) if twins else way["sms"] == sms


def sets(bench: Any) -> None:
    """Pairs and triples: one at a time, in the driver's time slices, under plain MPS, and as Roommate chooses."""
    # One at a time is the unit of all sums; what suspending and resuming takes away from it is measured by `turns`.
    folder = bench.out / "sets"
    folder.mkdir(exist_ok=True)
    every = [list(one) for one in (*PAIRS, *TRIPLES)]
    splits = [] if bench.rehearse else SPLITS
    tried = sums(measure(folder, "tried", plan([{"tasks": one, "splits": splits} for one in every], True, bench.rehearse, ROUNDS)))
    turns = sums(measure(folder, "slices", plan([{"tasks": one, "splits": []} for one in every], False, bench.rehearse, 1)))
    # Measured again by processes of their own: what was chosen must not win by the luck of the first measurement.
    again = [written(one["tasks"], one["best"]["sms"] if one["best"] else None) for one in tried.values()]
    shown = sums(measure(folder, "again", plan(again, True, bench.rehearse, ROUNDS)))
    for key, one in tried.items():
        best = one["best"]
        ours = None
        if best:
            ours = next((w for w in shown[key]["ways"] if same_way(w, best["sms"], len(set(key)) < len(key))), None)
        mps, slices = shown[key]["unconfined"], turns[key]["unconfined"]
        bench.row(set=list(key), one_at_a_time=1.0, time_slices=slices["sum"], mps=mps["sum"], mps_slowdowns=mps["slowdowns"],
                  mps_error=mps["sum_error"], roommate=ours["sum"] if ours else None, error=ours["sum_error"] if ours else None,
                  way=(best["sms"] or "unconfined") if best else "declined", slowdowns=ours["slowdowns"] if ours else None, reason=one["reason"])
