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
#: Priorities and splits that are tried for a set: about 3 s each.
TRIES = 6
ROUNDS = 2
BOUND = 1.5
#: Part of plain MPS's sum that keeping the bound may cost.
LOSS = 0.05


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
    words = [binary(), "profile", "advise", str(prefix), "--bound", str(BOUND), "--loss",
             str(LOSS), "-o", "json"]
    found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    sets: list[dict[str, Any]] = found["sets"] if isinstance(found, dict) else found
    return sets


Names = tuple[str, ...]


def sums(prefix: Path) -> dict[Names, dict[str, Any]]:
    """The advice for each set, by the names of its tasks in order."""
    return {tuple(one["tasks"]): one for one in advice(prefix)}


def same_way(way: dict[str, Any], best: dict[str, Any]) -> bool:
    """The order of equal tasks is the same in both: the program sorts them."""
    return (way["sms"], way["first"]) == (best["sms"], best["first"])


def as_split(best: dict[str, Any]) -> list[Any]:
    """A way as a plan has it, beside plain MPS, which is always measured."""
    if best["first"] is not None:
        held = {"sms": best["sms"]} if best["sms"] else {}
        return [{"first": best["first"], **held}]
    return [best["sms"]] if best["sms"] else []


def named(key: tuple[str, ...], best: dict[str, Any]) -> str:
    """A way in words."""
    first = [] if best["first"] is None else [f"{key[best['first']]} first"]
    parts = ["+".join(map(str, best["sms"])) + " SMs"] if best["sms"] else []
    return ", ".join(first + parts) or "unconfined"


def chosen_sets(every: list[list[str]]) -> list[list[str]]:
    """The sets of $ROOMMATE_SETS (`gpt2+resnet18,bert+vit`, in any order of tasks), or all."""
    given = [one for one in os.environ.get("ROOMMATE_SETS", "").split(",") if one]
    known = {tuple(sorted(one)): one for one in every}
    if unknown := [one for one in given if tuple(sorted(one.split("+"))) not in known]:
        raise ValueError(f"ROOMMATE_SETS: no set {', '.join(unknown)}")
    return [known[tuple(sorted(one.split("+")))] for one in given] or every


def sets(bench: Any) -> None:
    """Pairs and triples at usual sizes: one at a time, time-sliced, under MPS, as advised."""
    compare(bench, USUAL, USUAL_SETS)


def large(bench: Any) -> None:
    """The same with batch sizes that keep the GPU busy."""
    compare(bench, LARGE, LARGE_SETS)


#: The usual sets for which no way was found without priority, on 2026-11-16.
DECLINED = [["bert", "gpt2", "mobilenet"], ["resnet18", "gpt2", "bert"], ["vit", "bert"],
            ["gpt2", "mobilenet"], ["resnet18", "gpt2"], ["resnet50", "gpt2"],
            ["resnet50", "vit", "gpt2"], ["resnet50", "resnet50"], ["vit", "vit"]]


def declined(bench: Any) -> None:
    """The nine usual sets that were declined without priority, with it: rows of their own."""
    compare(bench, USUAL, DECLINED)


def compare(bench: Any, tasks: Tasks, every: list[list[str]]) -> None:
    every = chosen_sets(every)
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
    again = measured("again", [{"tasks": list(key), "splits": as_split(best)} for key,
                               best in chosen.items()])
    alone = turns_of(bench.out)
    for key, one in tried.items():
        best, ours = one["best"], None
        mps = (again if best else tried)[key]["unconfined"]
        if best:
            ours = next((w for w in again[key]["ways"] if same_way(w, best)), None)
        turns = [alone[tasks[name]] for name in key if tasks[name] in alone]
        bench.row(set=list(key), one_at_a_time=sum(turns) / len(turns) if len(turns) == len(key)
                  else None,
                  time_slices=slices[key]["unconfined"]["sum"], mps=mps["sum"],
                  mps_slowdowns=mps["slowdowns"], mps_error=mps["sum_error"],
                  roommate=ours["sum"] if ours else None, error=ours["sum_error"] if ours else None,
                  way=named(key, best) if best else "declined",
                  slowdowns=ours["slowdowns"] if ours else None, reason=one["reason"])


def turns_of(out: Path) -> dict[tuple[str, int], float]:
    """Share of its time slices in which each task makes progress, from the part `turns`."""
    file = out / "turns.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {(job["task"], job["batch"]): job["works"] for row in rows
            for job in row["jobs"].values() if "works" in job}
