#!/usr/bin/env python3
"""What `roommate.steps` costs a training loop: the same steps with and without it, in one process, in blocks by turns.

usage: overhead.py --task resnet18-imagenet --batch 32 --out FILE [--blocks 12] [--steps 60]

Meant to be started by a daemon (`run.sh overhead` does); writes one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import roommate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpu"))
import train  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60, help="of a block")
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

    def with_sdk(count: int) -> None:
        for _ in range(count):
            step(*next(loop))

    def seconds(run: Any) -> float:
        wait()
        began = time.perf_counter()
        run(args.steps)
        wait()
        return (time.perf_counter() - began) / args.steps

    for run in (with_sdk, plain):
        seconds(run)
    without, within = [], []
    for n in range(args.blocks):
        pair = (plain, with_sdk) if n % 2 == 0 else (with_sdk, plain)
        for run in pair:
            (without if run is plain else within).append(seconds(run))
    ratios = [b / a for a, b in zip(without, within, strict=True)]
    found = {
        "task": args.task, "batch": args.batch, "managed": roommate.managed(), "blocks": args.blocks, "steps": args.steps,
        "plain_ms": 1e3 * statistics.median(without), "sdk_ms": 1e3 * statistics.median(within),
        "overhead": statistics.median(ratios) - 1.0, "overhead_of_medians": statistics.median(within) / statistics.median(without) - 1.0,
    }
    args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
