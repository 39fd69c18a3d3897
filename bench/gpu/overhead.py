#!/usr/bin/env python3
"""Overhead of `roommate.steps`: the same steps with and without it, in alternating short blocks.

usage: overhead.py --task resnet18-imagenet --batch 32 --out FILE [--pairs 120] [--steps 8]

Must be started by a daemon (`run.sh overhead` does); writes one JSON object. It has two figures,
because speed that varies by a tenth from second to second hides an overhead of a hundredth: by how
much steps are longer, with the error of the mean, and the CPU time inside the SDK as a share of a
step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import roommate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpu"))
import train  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--pairs", type=int, default=120,
                        help="of blocks, one with and one without")
    parser.add_argument("--steps", type=int, default=8, help="of a block")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    if args.rehearse:
        step, wait, batch = lambda x, y: time.sleep(0.002), lambda: None, (0, 0)
    else:
        import torch

        job = train.Job(train.arguments().parse_args(["--task", args.task]))
        step, wait, batch = job.step, torch.cuda.synchronize, job.make(args.batch)

    def plain(count: int) -> None:
        for _ in range(count):
            step(*batch)

    loop: Any = iter(roommate.steps(lambda size: batch, batch_size=args.batch))
    inside: list[float] = []

    def with_sdk(count: int) -> None:
        for _ in range(count):
            began = time.thread_time()
            given = next(loop)
            inside.append(time.thread_time() - began)
            step(*given)

    def seconds(run: Callable[[int], None]) -> float:
        began = time.perf_counter()
        run(args.steps)
        wait()
        return (time.perf_counter() - began) / args.steps

    for run in (with_sdk, plain, with_sdk, plain):
        seconds(run)
    inside.clear()
    without, within = [], []
    for n in range(args.pairs):
        for run in (plain, with_sdk) if n % 2 == 0 else (with_sdk, plain):
            (without if run is plain else within).append(seconds(run))
    usual = statistics.fmean(without)
    differences = [b - a for a, b in zip(without, within, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    found = {
        "task": args.task, "batch": args.batch, "managed": roommate.managed(), "pairs": args.pairs,
        "steps": args.steps,
        "plain_ms": 1e3 * usual, "sdk_ms": 1e3 * statistics.fmean(within),
        "longer": statistics.fmean(differences) / usual,
        "error": error / usual, "inside_us": 1e6 * statistics.fmean(inside),
        "inside": statistics.fmean(inside) / usual,
    }
    if not args.rehearse:
        found |= calls(loop, torch)
    args.out.write_text(json.dumps(found))


def calls(loop: Any, torch: Any) -> dict[str, float]:
    """Microseconds of each call that the SDK makes."""
    event, session = torch.cuda.Event(blocking=True), loop._session

    def once(run: Callable[[], object], count: int = 200) -> float:
        torch.cuda.synchronize()
        began = time.thread_time()
        for _ in range(count):
            run()
        return 1e6 * (time.thread_time() - began) / count

    def report() -> None:
        loop._timed, loop._busy_s = 1, 0.01
        loop._report()

    return {"record_us": once(event.record), "wait_us": once(event.synchronize),
            "listen_us": once(session.boundary),
            "report_us": once(report, 20), "clock_us": once(time.thread_time)}


if __name__ == "__main__":
    main()
