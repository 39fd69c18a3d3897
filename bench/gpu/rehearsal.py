#!/usr/bin/env python3
"""Replaces the jobs of examples/gpu in bench/gpu/run.sh --rehearse, which needs no GPU.

usage: rehearsal.py SCRIPT [OPTIONS of the script]

Steps are pauses. Nothing it reports is a measurement.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import roommate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpu"))
import faulty  # noqa: E402
import train  # noqa: E402
import zoo  # noqa: E402

STEP_S = 0.01
START_S = 1.5
"""As with PyTorch, a start takes longer than the time slices and windows of the policies here."""


def main() -> None:
    script, words = sys.argv[1], sys.argv[2:]
    parser = faulty.arguments() if script == "faulty.py" else train.arguments()
    args = parser.parse_args(words)
    time.sleep(START_S)
    if script == "plain.py":
        for _ in range(int(args.steps)):
            time.sleep(STEP_S)
        return
    deed = getattr(args, "deed", "none")
    own = args.batch or zoo.TRAIN[args.task][0]
    folder = Path(os.environ["ROOMMATE_CHECKPOINT"])
    saved, mark = folder / "done.json", folder / "went-wrong"
    done = json.loads(saved.read_text()) if saved.exists() else 0.0
    times = len(mark.read_text()) if mark.exists() else 0

    def load(size: int) -> list[int]:
        time.sleep(3 * STEP_S if args.loader else 0.0)
        return [0] * size

    staged = args.loader or args.interleave
    steps = roommate.steps(load, batch_size=own, min=args.min, max=args.max, done=done,
                           interleave=staged)

    @roommate.on_checkpoint
    def save() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        saved.write_text(json.dumps(steps.done))

    ticks = args.ticks.open("a", buffering=1) if args.ticks else None
    last = time.monotonic()
    for batch in steps:
        if steps.done >= args.steps:
            break
        if args.save_s and time.monotonic() - last > args.save_s:
            steps.checkpoint()
            last = time.monotonic()
        time.sleep(len(batch) / 2400 if args.interleave
                   else STEP_S * (0.5 + 0.5 * len(batch) / own))
        if args.noise:
            small, large = roommate.noise.split(len(batch))
            steps.report_gradients([(n, 1 + 256 / n) for n in (small, large)])
        if deed != "none" and steps.done >= args.after and times < args.times:
            folder.mkdir(parents=True, exist_ok=True)
            mark.write_text("x" * (times + 1))
            raise SystemExit(1)
        if ticks is not None:
            ticks.write(f"{time.monotonic():.6f} {len(batch)} 0 0\n")


if __name__ == "__main__":
    main()
