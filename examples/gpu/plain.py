#!/usr/bin/env python3
"""A plain PyTorch training script. It does not use the SDK and does not know that it shares the
GPU.

usage: plain.py [--task resnet18-imagenet] [--batch 128] [--steps 300]
"""

from __future__ import annotations

import argparse
import time

import torch
import zoo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", default="resnet18-imagenet", choices=list(zoo.TRAIN))
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    model, make = zoo.build("train", args.task)
    model.cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    x, y = make(args.batch or zoo.TRAIN[args.task][0])
    began = time.monotonic()
    for step in range(1, args.steps + 1):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = zoo.loss(args.task, model(x), y)
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == args.steps:
            rate = step / (time.monotonic() - began)
            print(f"step {step}, loss {loss.item():.3f}, {rate:.2f} steps/s", flush=True)


if __name__ == "__main__":
    main()
