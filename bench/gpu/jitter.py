#!/usr/bin/env python3
"""Variation of the speed of a CPU-bound training loop, by the cores that its threads may use.

usage: jitter.py [--task bert-squad] [--batch 16] [--windows 20]

Prints a line of JSON for each placement: steps per second in windows of half a second. Needs
PyTorch and a GPU; no daemon, no SDK.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder)
                for folder in ("python", "examples/gpu")]

WINDOW_S = 0.5


def siblings(core: int) -> list[int]:
    """The hardware threads of the same core."""
    try:
        topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
        text = (topology / "thread_siblings_list").read_text().strip()
    except OSError:
        return [core]
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def placements(cores: list[int]) -> dict[str, list[int]]:
    own = [c for c in siblings(cores[0]) if c in cores]
    apart = [c for c in cores if siblings(c)[0] == c]
    return {"anywhere": cores, "one core": own, "one thread": own[:1], "two cores": apart[:2],
            "four cores": apart[:4], "anywhere again": cores}


def move(cores: list[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", default="bert-squad")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--windows", type=int, default=20)
    args = parser.parse_args()
    import torch
    import train

    job = train.Job(train.arguments().parse_args(["--task", args.task]))
    x, y = job.make(args.batch)
    for _ in range(20):
        job.step(x, y)
    torch.cuda.synchronize()
    for label, cores in placements(sorted(os.sched_getaffinity(0))).items():
        move(cores)
        rates = []
        for _ in range(args.windows):
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < WINDOW_S:
                job.step(x, y)
                torch.cuda.synchronize()
                count += 1
            rates.append(count / (time.perf_counter() - began))
        row = {"task": args.task, "cores": label, "which": cores,
               "it_s": round(statistics.median(rates), 2),
               "least": round(min(rates), 2), "most": round(max(rates), 2),
               "windows": [round(r, 1) for r in rates]}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
