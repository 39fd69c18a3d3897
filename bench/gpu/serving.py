#!/usr/bin/env python3
"""A service beside training on one GPU: latency of requests and speed of training.

usage: serving.py [--out FILE] [--seconds S] [--pairs SERVICE:TASK@BATCH,...]

For each pair: the service alone, under plain MPS (its objective is so long that nobody is held back) and
with its objective, at 20, 50 and 80 % of its capacity, and through a burst of ten times the load.
Requests are Poisson and come whatever the service does; latencies count from when each was due
(crates/roommate-ingress/examples/load.rs). Rows are JSON lines; rows that the file has are not
measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from room import ROOT, Room

LOADS = (0.2, 0.5, 0.8)
OBJECTIVE_MS = 25.0
NONE_MS = 600_000.0
BODY = "{}"


def load_program() -> str:
    for place in (ROOT / "target/release/examples/load", ROOT / "bench/gpu/.bin/load"):
        if os.access(place, os.X_OK):
            return str(place)
    raise SystemExit("no client: cargo build --release -p roommate-ingress --example load")


def load(port: int, way: str, amount: float, seconds: float) -> dict[str, Any]:
    words = [load_program(), f"http://127.0.0.1:{port}/predict", BODY, way, str(amount), str(seconds),
             str(OBJECTIVE_MS)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as it:
        port: int = it.getsockname()[1]
        return port


def submit(room: Room, name: str, **fields: Any) -> None:
    file = room.folder / f"{name}.yaml"
    file.write_text(json.dumps({"name": name, "workdir": str(room.folder), **fields}))
    room.ok("submit", str(file))


def speed(room: Room, began: float, ended: float) -> float:
    """Steps of the training a second between two moments."""
    ticks = [t for t in room.ticks("train") if began <= t.at <= ended]
    return (len(ticks) - 1) / (ticks[-1].at - ticks[0].at) if len(ticks) > 2 else 0.0


class Pair:
    def __init__(self, args: argparse.Namespace, service: str, task: str, batch: int) -> None:
        self.args, self.service, self.task, self.batch = args, service, task, batch
        self.name = f"{service}:{task}@{batch}"
        self.capacity = 0.0
        self.alone_speed = 0.0

    def row(self, **fields: Any) -> None:
        row = {"pair": self.name, **fields}
        print(json.dumps(row), flush=True)
        if self.args.out:
            with self.args.out.open("a") as out:
                out.write(json.dumps(row) + "\n")

    def measure(self) -> None:
        for mode, objective in (("mps", NONE_MS), ("roommate", OBJECTIVE_MS)):
            with Room(f"serving-{self.service}-{mode}", self.args.journals, False) as room:
                room.up("mps")
                self.in_room(room, mode, objective)

    def in_room(self, room: Room, mode: str, objective: float) -> None:
        port = free_port()
        script = ROOT / "examples/serving/gpu_model.py"
        submit(room, "service", command=[sys.executable, str(script), "--model", self.service],
               **{"class": "service"}, sdk=True,
               service={"slo": {"p99": f"{objective:g}ms"}, "port": port, "max_batch": 32,
                        "fill": "4ms", "queue": 4096})
        room.until(lambda: (room.jobs()["service"].get("service") or {}).get("ready"), 150)
        if mode == "mps":
            load(port, "closed", 64, 2)
            self.capacity = load(port, "closed", 128, 4)["requests_per_s"]
            self.row(mode="alone", capacity=round(self.capacity, 1))
            for part in LOADS:
                self.row(mode="alone", load=part,
                         **brief(load(port, "open", part * self.capacity, self.args.seconds)))
        room.submit("train", "train.py", "--task", self.task, "--batch", self.batch, "--steps", 100_000,
                    "--save-s", 0, **{"class": "best-effort"})
        room.until(lambda: len(room.ticks("train")) >= 30, 150)
        if mode == "mps":
            began = time.monotonic()
            time.sleep(4)
            self.alone_speed = speed(room, began, time.monotonic())
        for part in LOADS:
            load(port, "open", part * self.capacity, 1.5)
            began = time.monotonic()
            found = load(port, "open", part * self.capacity, self.args.seconds)
            ended = time.monotonic()
            share = speed(room, began, ended) / self.alone_speed if self.alone_speed else 0.0
            self.row(mode=mode, load=part, training=round(share, 3), **brief(found))
        # A burst: 8 % of the capacity, then 80 %.
        background = threading.Thread(target=load, args=(port, "open", 0.08 * self.capacity, 5.0))
        background.start()
        time.sleep(2)
        found = load(port, "open", 0.72 * self.capacity, 2.5)
        background.join()
        self.row(mode=mode, load="burst", **brief(found))


def brief(found: dict[str, Any]) -> dict[str, Any]:
    kept = ("requests_per_s", "p50_ms", "p90_ms", "p99_ms", "worst_ms", "statuses")
    row = {k: round(found[k], 2) if isinstance(found[k], float) else found[k] for k in kept}
    return row | {"over_share": round(found["over_share"], 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--pairs", default="bert:gpt2-lm@16,resnet50:vit-b16-imagenet@64")
    args = parser.parse_args()
    args.journals = args.out.parent if args.out else Path("/tmp")
    done = args.out.read_text() if args.out and args.out.exists() else ""
    for text in args.pairs.split(","):
        service, _, rest = text.partition(":")
        task, _, batch = rest.partition("@")
        if f'"pair": "{text}", "mode": "roommate", "load": "burst"' in done:
            continue
        try:
            Pair(args, service, task, int(batch)).measure()
        except Exception as failed:  # the next pair is worth its time
            print(json.dumps({"pair": text, "error": repr(failed)}), flush=True)


if __name__ == "__main__":
    main()
