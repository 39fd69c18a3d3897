#!/usr/bin/env python3
"""Policies over workloads: league.py WORKLOADS.json [-p A,B] [--seeds N] [--blind] [--rows FILE] [--set NAME=VALUE]...

WORKLOADS.json maps the name of a workload to arguments of `roommate sim`. The seeds of an invented workload
(one with --seed) are other traces; of any other they are other truths, each speed beside roommates scattered by
a tenth. Each run adds a row to FILE, and a run that FILE has is not repeated, so that an interrupted table goes
on. Prints for each workload the mean completion time of the first policy against the best of those that know no
durations and the best of all, its p99 against the best p99 of those that know none, each as geometric mean over
the seeds with the half width of its 95 % interval, and the geometric means over workloads.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOMMATE = os.environ.get("ROOMMATE", str(ROOT / "target/release/roommate"))
LIMIT_S = 120
SCATTER = "0.1"
# Two-sided 95 % quantiles of Student's t by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}

Row = dict[str, Any]


def registry() -> dict[str, bool]:
    """Whether each policy knows durations."""
    asked = subprocess.run([ROOMMATE, "policies", "-o", "json"], capture_output=True, text=True, check=True)
    return {p["name"]: p["knows_durations"] for p in json.loads(asked.stdout)}


def seeded(words: list[str], seed: int) -> list[str]:
    if "--seed" in words:
        at = words.index("--seed") + 1
        return [*words[:at], str(int(words[at]) + 100 * seed), *words[at + 1 :]]
    return words if seed == 0 else [*words, "--truth-noise", SCATTER, "--seed", str(seed)]


def measure(key: tuple[str, str, int, bool, tuple[str, ...]], words: list[str]) -> Row:
    name, policy, seed, blind, settings = key
    more = [w for s in settings for w in ("--set", s)] + (["--blind"] if blind else [])
    command = [ROOMMATE, "sim", "-p", policy, *seeded(words, seed), *more, "-o", "json"]
    row: Row = {"workload": name, "policy": policy, "seed": seed, "blind": blind, "settings": list(settings)}
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return row | {"error": f"more than {LIMIT_S} s"}
    if done.returncode:
        return row | {"error": done.stderr.strip().splitlines()[-1][:200]}
    found = json.loads(done.stdout)
    kept = ("avg_jct_s", "p99_jct_s", "makespan_s", "finished")
    return row | {k: found[k] for k in kept} | {"seconds": round(time.monotonic() - began, 1)}


def mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def half_width(ratios: list[float]) -> float:
    """Of the 95 % interval of their geometric mean."""
    n = len(ratios)
    if n < 2:
        return math.nan
    logs = [math.log(r) for r in ratios]
    middle = sum(logs) / n
    deviation = math.sqrt(sum((x - middle) ** 2 for x in logs) / (n - 1))
    return mean(ratios) * STUDENT.get(n - 1, 2.0) * deviation / math.sqrt(n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workloads", type=Path)
    parser.add_argument("-p", "--policies", default="", help="the first is compared with the others; all by default")
    parser.add_argument("--only", default="", help="names of workloads")
    parser.add_argument("--rows", type=Path, default=Path("out/league.jsonl"))
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a parameter of the first policy")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--blind", action="store_true", help="policies learn how long steps take")
    args = parser.parse_args()
    knows = registry()
    first = args.policies.split(",")[0] or "roommate"
    policies = args.policies.split(",") if args.policies else [first, *(p for p in knows if p != first)]
    workloads = json.loads(args.workloads.read_text())
    names = args.only.split(",") if args.only else list(workloads)
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()] if args.rows.exists() else []
    known = {(r["workload"], r["policy"], r["seed"], r["blind"], tuple(r["settings"])): r for r in rows}

    def key(name: str, policy: str, seed: int) -> tuple[str, str, int, bool, tuple[str, ...]]:
        return name, policy, seed, args.blind, tuple(args.settings) if policy == first else ()

    every = [key(n, p, s) for n in names for p in policies for s in range(args.seeds)]
    todo = [k for k in every if k not in known]
    with args.rows.open("a") as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, (k, row) in enumerate(zip(todo, pool.map(lambda k: measure(k, workloads[k[0]]), todo)), 1):
            known[k] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"\r{done} of {len(todo)} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print("workload       mean, s   /best blind                    /best of all                   p99/best blind")
    against: list[list[float]] = []
    for name in names:
        ratios: list[list[float]] = [[], [], []]
        best: list[str] = ["", ""]
        own_s = []
        for seed in range(args.seeds):
            own, *rest = (known[key(name, p, seed)] for p in policies)
            rest = [r for r in rest if "error" not in r and r["finished"] == own.get("finished")]
            blind = [r for r in rest if not knows[r["policy"]]]
            if "error" in own or not blind:
                print(f"{name:10} seed {seed}: {own.get('error', 'nothing to compare with')}")
                continue
            by_mean = min(blind, key=lambda r: r["avg_jct_s"])
            of_all = min(rest, key=lambda r: r["avg_jct_s"])
            p99 = min(r["p99_jct_s"] for r in blind)
            if seed == 0:
                best = [by_mean["policy"], of_all["policy"]]
            own_s.append(own["avg_jct_s"])
            found = [own["avg_jct_s"] / by_mean["avg_jct_s"], own["avg_jct_s"] / of_all["avg_jct_s"],
                     own["p99_jct_s"] / p99]
            for of, ratio in zip(ratios, found, strict=True):
                of.append(ratio)
        if not own_s:
            continue
        against.append([mean(of) for of in ratios])
        cells = [f"{mean(of):.3f} ± {half_width(of):.3f}" for of in ratios]
        middle = sum(own_s) / len(own_s)
        print(f"{name:10} {middle:11.0f}   {cells[0]} {best[0]:16} {cells[1]} {best[1]:16} {cells[2]}")
    over = [mean([row[i] for row in against]) for i in range(3)]
    print(f"{'geometric mean':24}{over[0]:.3f} {'':24} {over[1]:.3f} {'':24} {over[2]:.3f}")


if __name__ == "__main__":
    main()
