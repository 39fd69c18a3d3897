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
    "resnet18": ("resnet18-imagenet", 32),
    "resnet50": ("resnet50-imagenet", 64),
    "gpt2": ("gpt2-lm", 8),
    "bert": ("bert-squad", 16),
    "mobilenet": ("mobilenetv3l-imagenet", 64),
    "lstm": ("lstm-wikitext", 256),
    "vit": ("vit-b16-imagenet", 128),
}
PAIRS = [
    ("resnet18", "resnet18"), ("resnet18", "resnet50"), ("resnet18", "gpt2"), ("resnet18", "bert"), ("resnet50", "gpt2"),
    ("resnet50", "bert"), ("gpt2", "bert"), ("gpt2", "mobilenet"), ("bert", "mobilenet"), ("lstm", "bert"),
    ("vit", "bert"), ("resnet50", "resnet50"), ("vit", "vit"),
]
TRIPLES = [("resnet18", "gpt2", "bert"), ("mobilenet", "bert", "lstm"), ("resnet50", "vit", "gpt2")]
SPLITS = [40, 64, 88]
BOUND = 1.5


def plan(sets: list[dict[str, Any]], mps: bool, rehearse: bool) -> dict[str, Any]:
    used = {name for one in sets for name in one["tasks"]}
    return plan_of({name: what for name, what in TASKS.items() if name in used}, sets, rehearse, mps)


def plan_of(tasks: dict[str, tuple[str, int]], sets: list[Any], rehearse: bool, mps: bool = True) -> dict[str, Any]:
    script = [str(REHEARSAL), "train.py"] if rehearse else [str(EXAMPLES / "train.py")]
    listed = []
    for name, (task, batch) in tasks.items():
        words = [sys.executable, *script, "--task", task, "--batch", str(batch), "--steps", "1e12", "--save-s", "0"]
        listed.append({"name": name, "kind": "train", "command": words, "batches": [batch], "env": {"OMP_NUM_THREADS": "2"}})
    found = {"tasks": listed, "sets": sets, "seconds": 1.5, "settle": 0.5, "starting": 8}
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


def sums(prefix: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    return {tuple(one["tasks"]): one for one in advice(prefix)}


def sets(bench: Any) -> None:
    """Pairs and triples: one at a time, in the driver's time slices, under plain MPS, and as Roommate chooses."""
    folder = bench.out / "sets"
    folder.mkdir(exist_ok=True)
    every = [list(one) for one in (*PAIRS, *TRIPLES)]
    splits = [] if bench.rehearse else SPLITS
    tried = measure(folder, "tried", plan([{"tasks": one, "splits": splits} for one in every], True, bench.rehearse))
    slices = measure(folder, "slices", plan([{"tasks": one, "splits": []} for one in every], False, bench.rehearse))
    chosen = sums(tried)
    # Measured again by processes of their own: what was chosen must not win by the luck of the first measurement.
    again = []
    for one in every:
        best = chosen[tuple(one)]["best"]
        again.append({"tasks": one, "splits": [best["sms"]] if best and best["sms"] else []})
    shown = sums(measure(folder, "again", plan(again, True, bench.rehearse)))
    turns = sums(slices)
    for one in every:
        key = tuple(one)
        best = chosen[key]["best"]
        sms = best["sms"] if best else None
        ways = {json.dumps(way["sms"]): way for way in shown[key]["ways"]}
        ours = ways.get(json.dumps(sms)) if best else None
        mps = shown[key]["unconfined"]
        bench.row(set=one, one_at_a_time=1.0, time_slices=turns[key]["unconfined"]["sum"], mps=mps["sum"], mps_slowdowns=mps["slowdowns"],
                  roommate=ours["sum"] if ours else None, way=sms or "unconfined" if best else "declined",
                  slowdowns=ours["slowdowns"] if ours else None, reason=chosen[key]["reason"])
