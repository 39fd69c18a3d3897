#!/usr/bin/env python3
"""Pauses of a running training job at changes of its SM range, and their cost.

usage: repartition.py [--changes 200] [--tasks resnet50,gpt2] [--out FILE]

For each task and each way of choosing convolution plans, in separate processes: step times by
number of SMs; then, over random changes, the number of failures, the pauses, and the reserved
memory.
Needs PyTorch, torchvision and transformers, and runs under MPS if a daemon is reachable.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

PARTS = (24, 40, 64, 88, 104, 132)
SMALLEST = PARTS[0]


def training(name: str):
    import torch
    import torch.nn.functional as functional
    import torchvision
    import transformers

    torch.manual_seed(0)
    if name == "resnet50":
        model = torchvision.models.resnet50().cuda()
        x, y = torch.randn(64, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (64,),
                                                                          device="cuda")
        loss = lambda: functional.cross_entropy(model(x), y)
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).cuda()
        ids = torch.randint(0, 50000, (8, 512), device="cuda")
        loss = lambda: functional.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            value = loss()
        value.backward()
        optimizer.step()

    return step


def one(name: str, cure: str, changes: int) -> dict:
    import torch
    from roommate.gpu import Seat

    torch.backends.cudnn.benchmark = "benchmark" in cure
    seat = Seat()
    step = training(name)

    def timed(n: int = 1) -> float:
        began = time.perf_counter()
        for _ in range(n):
            with seat:
                step()
            seat.synchronize()
        return (time.perf_counter() - began) / n

    began = time.perf_counter()
    if "inside" in cure:
        seat.move(SMALLEST)
    timed(5)
    warm_s = time.perf_counter() - began
    found: dict = {"task": name, "plans": cure, "warm_s": round(warm_s, 2)}
    try:
        alone = {}
        for sms in PARTS:
            seat.move(sms)
            timed(2)
            alone[sms] = statistics.median(timed() for _ in range(10))
        found["step_ms"] = {sms: round(1e3 * s, 2) for sms, s in alone.items()}
    except RuntimeError as error:
        return found | {"failed": str(error).splitlines()[0][:100]}
    reserved = [torch.cuda.memory_reserved() // 2**20]
    draw = random.Random(7)
    pauses, moves, failed = [], [], 0
    for n in range(changes):
        sms = draw.choice([p for p in PARTS if p != seat.sms])
        try:
            began = time.perf_counter()
            seat.move(sms)
            moves.append(time.perf_counter() - began)
            pauses.append(moves[-1] + timed() - alone[sms])
            timed(3)
        except RuntimeError:
            failed += 1
        if n in (19, changes - 1):
            reserved.append(torch.cuda.memory_reserved() // 2**20)
    pauses.sort()
    moves.sort()
    at = lambda v, q: round(1e3 * v[min(len(v) - 1, int(q * len(v)))], 2)
    return found | {
        "changes": changes, "failed_steps": failed, "reserved_mib": reserved,
        "move_ms": {"p50": at(moves, 0.5), "p99": at(moves, 0.99), "max": at(moves, 1.0)},
        "pause_ms": {"p50": at(pauses, 0.5), "p99": at(pauses, 0.99), "max": at(pauses, 1.0)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--tasks", default="resnet50,gpt2")
    parser.add_argument("--cures", default="inside,inside+benchmark,whole,whole+benchmark")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(*args.one, args.changes)))
        return
    for task in args.tasks.split(","):
        for cure in args.cures.split(",") if task == "resnet50" else ["inside"]:
            command = [sys.executable, __file__, "--one", task, cure, "--changes",
                       str(args.changes)]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = ran.stdout.strip().splitlines()
            row = lines[-1] if lines else json.dumps({"task": task, "plans": cure,
                                                      "failed": ran.stderr[-300:]})
            print(row, flush=True)
            if args.out:
                with args.out.open("a") as out:
                    out.write(row + "\n")


if __name__ == "__main__":
    main()
