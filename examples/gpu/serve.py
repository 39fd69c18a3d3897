#!/usr/bin/env python3
"""An inference service on a GPU that it may share: a step is a batch of requests.

usage: serve.py [--model bert] [--rate 60] [--batch 16] [--seconds 60]

Requests arrive at random times, --rate per second on average, wait in a queue, and are answered in
batches of up to --batch. Prints their latency every two seconds, as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

import torch
import zoo

import roommate


class Queue:
    """The queue of unanswered requests."""

    def __init__(self, rate: float, seconds: float) -> None:
        self._dice, self._rate, self._seconds = random.Random(7), rate, seconds
        self._next = self._end = 0.0
        self._idle = 5

    def take(self, size: int) -> list[float] | None:
        """Arrival times of the next requests, at most ``size``; waits for the first. ``None`` when
        the service ends. The first few batches are empty: their warm-up delays no request.
        """
        if self._idle > 0:
            self._idle -= 1
            self._next = time.monotonic()
            self._end = self._next + self._seconds
            return []
        while (wait := self._next - time.monotonic()) > 0:
            if self._next > self._end:
                return None
            time.sleep(min(wait, 0.1))
        came: list[float] = []
        while len(came) < size and self._next <= time.monotonic():
            came.append(self._next)
            self._next += self._dice.expovariate(self._rate)
        return came if self._next < self._end else None


def at(values: list[float], part: float) -> float:
    return round(1e3 * values[min(len(values) - 1, int(part * len(values)))], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="bert", choices=zoo.SERVE)
    parser.add_argument("--rate", type=float, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--max", type=int)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    model, make = zoo.build("serve", args.model)
    model.cuda().eval()
    inputs: dict[int, Any] = {}
    with torch.no_grad():
        queue = Queue(args.rate, args.seconds)
        steps = roommate.steps(queue.take, batch_size=args.batch, min=1 if args.max else None,
                               max=args.max)
        waited: list[float] = []
        told = time.monotonic()
        for came in steps:
            size = steps.batch_size
            # Padded to the batch size, to limit the number of shapes.
            if size not in inputs:
                inputs[size] = make(size)[0]
            with torch.autocast("cuda", torch.bfloat16):
                model(inputs[size])
            torch.cuda.current_stream().synchronize()
            now = time.monotonic()
            waited += [now - then for then in came]
            if now - told >= 2.0 and waited:
                waited.sort()
                rate = round(len(waited) / (now - told), 1)
                print(json.dumps({"rps": rate, "p50_ms": at(waited, 0.5),
                                  "p99_ms": at(waited, 0.99), "batch": size}), flush=True)
                waited, told = [], now


if __name__ == "__main__":
    main()
