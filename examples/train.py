#!/usr/bin/env python3
"""A small training job in plain Python: a network with one hidden layer learns a rule from samples.

usage: train.py [--steps N] [--hidden N] [--storage-ms MS]

Runs under `roommate up` and `roommate run`, where it shares devices, and on its own. With
--storage-ms the loader waits for each batch, as if it came from remote storage.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from pathlib import Path

import roommate

INPUTS = 16


class Network:
    """tanh units over the inputs, one logistic output."""

    def __init__(self, hidden: int) -> None:
        rng = random.Random(1)
        self.first = [[rng.gauss(0.0, 0.3) for _ in range(INPUTS)] for _ in range(hidden)]
        self.second = [rng.gauss(0.0, 0.3) for _ in range(hidden)]

    def train(self, batch: list[tuple[list[float], float]], rate: float) -> float:
        """One step of gradient descent; the mean loss before it."""
        loss = 0.0
        step_first = [[0.0] * INPUTS for _ in self.first]
        step_second = [0.0] * len(self.second)
        for x, y in batch:
            units = [math.tanh(sum(w * v for w, v in zip(row, x))) for row in self.first]
            out = 1.0 / (1.0 + math.exp(-sum(w * u for w, u in zip(self.second, units))))
            loss -= math.log(max(out if y else 1.0 - out, 1e-9))
            error = out - y
            for i, unit in enumerate(units):
                step_second[i] += error * unit
                back = error * self.second[i] * (1.0 - unit * unit)
                row = step_first[i]
                for j, v in enumerate(x):
                    row[j] += back * v
        scale = rate / len(batch)
        for i, row in enumerate(step_first):
            self.second[i] -= scale * step_second[i]
            self.first[i] = [w - scale * g for w, g in zip(self.first[i], row)]
        return loss / len(batch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=float, default=300)
    parser.add_argument("--hidden", type=int, default=12)
    parser.add_argument("--storage-ms", type=float, default=0.0)
    args = parser.parse_args()
    rng = random.Random(7)
    network, done = Network(args.hidden), 0.0
    saved = Path(os.environ.get("ROOMMATE_CHECKPOINT", "")) / "network.json"
    if "ROOMMATE_CHECKPOINT" in os.environ and saved.exists():
        state = json.loads(saved.read_text())
        network.first, network.second, done = state["first"], state["second"], state["done"]

    def load(size: int) -> list[tuple[list[float], float]]:
        time.sleep(args.storage_ms / 1000)
        samples = [[rng.uniform(-1.0, 1.0) for _ in range(INPUTS)] for _ in range(size)]
        return [(x, float(x[0] * x[1] + x[2] > 0.0)) for x in samples]

    steps = roommate.steps(load, batch_size=32, min=8, max=128, lr="sqrt", done=done,
                           interleave=True)

    @roommate.on_checkpoint
    def save() -> None:
        if "ROOMMATE_CHECKPOINT" in os.environ:
            saved.parent.mkdir(parents=True, exist_ok=True)
            state = {"first": network.first, "second": network.second, "done": steps.done}
            saved.with_suffix(".new").write_text(json.dumps(state))
            saved.with_suffix(".new").rename(saved)

    loss = math.nan
    for batch in steps:
        if steps.done >= args.steps:
            break
        loss = network.train(batch, 0.5 * steps.lr_scale)
    print(f"{steps.done:.0f} steps, loss {loss:.3f}")


if __name__ == "__main__":
    main()
