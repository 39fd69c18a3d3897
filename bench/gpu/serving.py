"""Services beside training on one GPU: latency of requests and speed of training. A part of run.sh.

Three services (two with CUDA graphs, one HTTP server that knows nothing of Roommate) beside three training
tasks, at 20, 50 and 80 % of the service's capacity, under a bursty public request trace, and through a burst
of ten times the load:

| mode | what it is |
|---|---|
| alone | the service without training |
| slices | no MPS: the driver's time slices |
| mps | plain MPS |
| split | MPS with a fixed part of the SMs for either: of three splits the one with the most training |
| | that keeps the objective, or if none does, the one with the fewest late requests |
| roommate | priority, filled batches and the gate on kernel launches |

$ROOMMATE_PAIRS (`bert:gpt2,resnet50:vit`) restricts a run to some pairs. $ROOMMATE_MODES=roommate with
--again measures only these modes again and keeps all other rows that the file has.

Requests come whatever the service does; latencies count from when each was due
(crates/roommate-ingress/examples/load.rs). Rows that the file has are not measured again: a run ends after
about eight minutes, and the next one goes on.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench import FOREVER, Bench
from room import ROOT, Room, rounded

#: Objectives in ms: about two and a half times the p99 alone at 80 % load.
SERVICES = {"bert": 25.0, "resnet50": 25.0, "http-roberta": 60.0}
TASKS = {"gpt2": ("gpt2-lm", 16), "vit": ("vit-b16-imagenet", 64), "resnet50": ("resnet50-imagenet", 64)}
#: Modes with training, apart from `alone`, which belongs to the baselines.
MODES = ("mps", "split", "slices", "roommate")
LOADS: tuple[float | str, ...] = (0.2, 0.5, 0.8, "trace", "burst")
#: Parts of the SMs that the service and training have, in the order in which they are tried.
SPLITS = ((0.3, 0.7), (0.5, 0.5), (0.75, 0.25))
#: Mean of the trace, as a part of the capacity.
TRACE_LOAD = 0.35
TRACE_S = 8.0
SECONDS = 3.0
NONE_MS = 600_000.0
MAY_BE_LATE = 0.01
#: A run that has taken this long begins nothing new.
STOP_AFTER_S = 400.0

Row = dict[str, Any]


def rates() -> Path | None:
    given = Path(os.environ.get("ROOMMATE_RATES", ROOT / "bench/gpu/.bin/rates.txt"))
    return given if given.exists() else None


def load_program() -> str:
    for place in (ROOT / "target/release/examples/load", ROOT / "bench/gpu/.bin/load"):
        if os.access(place, os.X_OK):
            return str(place)
    raise SystemExit("no client: cargo build --release -p roommate-ingress --example load")


def load(port: int, way: str, amount: float, seconds: float, objective_ms: float) -> Row:
    words = [load_program(), f"http://127.0.0.1:{port}/predict", "{}", way, str(amount), str(seconds),
             str(objective_ms)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: Row = json.loads(done.stdout)
    return found


def modes() -> list[str]:
    """The modes that are measured: $ROOMMATE_MODES, or all."""
    given = [one for one in os.environ.get("ROOMMATE_MODES", "").split(",") if one]
    if unknown := set(given) - set(MODES):
        raise ValueError(f"ROOMMATE_MODES: no mode {', '.join(sorted(unknown))}")
    return given or list(MODES)


def pairs() -> list[tuple[str, str]]:
    """The pairs of a service and a task that are measured: $ROOMMATE_PAIRS, or all."""
    given = [one for one in os.environ.get("ROOMMATE_PAIRS", "").split(",") if one]
    return [(s, t) for s in SERVICES for t in TASKS if not given or f"{s}:{t}" in given]


def held_s(port: int) -> float:
    """For how long the gate was closed so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/roommate/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith("roommate_service_held_seconds_total{")]
    return float(found[0].split()[-1]) if found else 0.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as it:
        port: int = it.getsockname()[1]
        return port


class Pair:
    """A service and a training task."""

    def __init__(self, bench: Bench, rows: list[Row], service: str, task: str) -> None:
        self.bench, self.service, self.task = bench, service, task
        self.objective = SERVICES[service]
        self.rows = [r for r in rows if r["service"] == service]
        self.ports: dict[float, int] = {}

    def known(self, mode: str, at: float | str, task: str | None = None) -> Row | None:
        task = self.task if task is None else task
        same = (r for r in self.rows if (r["mode"], r["task"], r["load"]) == (mode, task, at))
        return next(same, None)

    def row(self, mode: str, at: float | str, found: Row, task: str | None = None) -> None:
        row = {"service": self.service, "task": self.task if task is None else task, "mode": mode, "load": at,
               "objective_ms": self.objective, **found}
        self.rows.append(rounded(row))
        self.bench.row(**row)

    @property
    def capacity(self) -> float:
        row = self.known("alone", "capacity", "")
        return float(row["requests_per_s"]) if row else 0.0

    def lacks(self, mode: str) -> list[float | str]:
        return [] if mode not in modes() else [at for at in LOADS if self.known(mode, at) is None]

    # ---- rooms ----

    def serve(self, room: Room, name: str, objective: float, share: float = 1.0) -> int:
        port = free_port()
        opaque = self.service.startswith("http-")
        script = "http_model.py" if opaque else "gpu_model.py"
        command = [sys.executable, str(ROOT / "examples/serving" / script), "--model",
                   self.service.removeprefix("http-")]
        if room.rehearse:
            words = ["--http"] if opaque else []
            command = [sys.executable, str(ROOT / "bench/gpu/rehearsal_service.py"), *words]
        section: Row = {"slo": {"p99": f"{objective:g}ms"}, "port": port, "queue": 4096}
        section |= {"server": "http"} if opaque else {"max_batch": 32}
        if objective == NONE_MS and not opaque:
            section["fill"] = "2ms"
        job = {"name": name, "workdir": str(room.folder), "command": command, "class": "service",
               "sdk": not opaque, "service": section}
        if share < 1.0:
            # As people do it: the variable of MPS, read when the process connects.
            job["command"] = ["env", f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={100 * share:g}", *command]
        file = room.folder / f"{name}.yaml"
        file.write_text(json.dumps(job))
        room.ok("submit", str(file))
        return port

    def until_ready(self, room: Room, *names: str) -> None:
        ready = lambda: all((room.jobs()[name].get("service") or {}).get("ready") for name in names)
        room.until(ready, 150)

    def train(self, room: Room, name: str = "train", **fields: Any) -> None:
        task, batch = TASKS[self.task]
        room.submit(name, "train.py", "--task", task, "--batch", batch, "--steps", FOREVER, "--save-s", 0,
                    **{"class": "best-effort"}, **fields)
        room.until(lambda: len(room.ticks(name)) >= 20, 150)

    # ---- rows ----

    def ask(self, port: int, at: float | str, seconds: float = SECONDS) -> Row:
        if at == "trace":
            given = rates()
            if given is None and self.bench.rehearse:
                return {}
            if given is None:
                raise SystemExit("no request rates: bench/gpu/rates.py writes bench/gpu/.bin/rates.txt")
            found = load(port, f"rates:{given}", TRACE_LOAD * self.capacity, TRACE_S, self.objective)
        elif at == "burst":
            # 8 % of the capacity, then 80 %.
            calm = threading.Thread(target=load, args=(port, "open", 0.08 * self.capacity, 4.0,
                                                       self.objective))
            calm.start()
            time.sleep(1.0)
            found = load(port, "open", 0.72 * self.capacity, 2.5, self.objective)
            calm.join()
        else:
            found = load(port, "open", float(at) * self.capacity, seconds, self.objective)
        kept = ("requests_per_s", "p50_ms", "p99_ms", "worst_ms", "over_share", "restored_s", "statuses")
        return {k: found[k] for k in kept if found[k] is not None}

    def beside(self, room: Room, port: int, at: float | str, settle: float = 1.0) -> Row:
        """The service and training at the same time."""
        if isinstance(at, float):
            load(port, "open", at * self.capacity, settle, self.objective)
        began = time.monotonic()
        found = self.ask(port, at)
        took = time.monotonic() - began
        speed = room.rate("train", began, began + took)
        return {**found, "training": speed / self.alone_speed(), "took_s": took}

    def held(self, room: Room, port: int, at: float | str) -> Row:
        """The same, with the part of the time for which the gate was closed."""
        before = held_s(port)
        found = self.beside(room, port, at, 3.0 if at == LOADS[0] else 1.5)
        # Closed while the load settles included, which is not in the time.
        settles = {LOADS[0]: 3.0}.get(at, 1.5) if isinstance(at, float) else 0.0
        return {**found, "closed": (held_s(port) - before) / (found["took_s"] + settles)}

    def alone_speed(self) -> float:
        row = self.known("alone", "training")
        return float(row["steps_per_s"]) if row else 1.0

    def measure(self) -> None:
        if self.lacks("mps") or self.lacks("split") or not self.capacity:
            self.baselines()
        if self.lacks("slices"):
            with self.bench.room("slices") as room:
                room.up("time-slicing")
                port = self.serve(room, "service", NONE_MS)
                self.train(room)
                self.until_ready(room, "service")
                for at in self.lacks("slices"):
                    self.row("slices", at, self.beside(room, port, at))
        if self.lacks("roommate"):
            with self.bench.room(f"{self.service}-{self.task}") as room:
                room.up("mps")
                port = self.serve(room, "service", self.objective)
                self.train(room)
                self.until_ready(room, "service")
                for at in self.lacks("roommate"):
                    # The margin of the gate is learned in the first seconds.
                    self.row("roommate", at, self.held(room, port, at))

    def baselines(self) -> None:
        """Alone, plain MPS and fixed splits, all without priority and gate."""
        with self.bench.room("mps") as room:
            room.up("mps", "--without", "priority,gate", max_tasks=8)
            # Services that nobody asks do not disturb; a GPU has four tenants at most.
            shares = [1.0, *(share for share, _ in SPLITS)]
            ports = {share: self.serve(room, f"s{100 * share:.0f}", NONE_MS, share)
                     for share in shares[:3]}
            self.until_ready(room, *(f"s{100 * share:.0f}" for share in shares[:3]))
            whole = ports[1.0]
            if not self.capacity:
                # A server without graphs is slow at each size of batch that it meets first.
                load(whole, "closed", 64, 4.0, self.objective)
                self.row("alone", "capacity", load(whole, "closed", 128, 3, self.objective), "")
            for at in LOADS:
                if self.known("alone", at, "") is None:
                    self.row("alone", at, self.ask(whole, at), "")
            self.train(room)
            if self.known("alone", "training") is None:
                [speed] = room.watch(3.0, "train")
                self.row("alone", "training", {"steps_per_s": speed})
            for at in self.lacks("mps"):
                self.row("mps", at, self.beside(room, whole, at))
            wanted = self.lacks("split")
            best: dict[float | str, Row] = {}
            room.ok("cancel", "s100")
            room.until(lambda: room.jobs()["s100"]["ended"])
            last = shares[3]
            ports[last] = self.serve(room, f"s{100 * last:.0f}", NONE_MS, last)
            self.until_ready(room, f"s{100 * last:.0f}")
            for share, rest in SPLITS:
                room.ok("resize", "train", "--share", f"{rest:g}")
                room.watch(1.0)
                for at in wanted:
                    if keeps(best.get(at)):
                        continue
                    found = self.beside(room, ports[share], at) | {"service_share": share}
                    if at not in best or keeps(found) or found["over_share"] < best[at]["over_share"]:
                        best[at] = found
            for at, found in best.items():
                self.row("split", at, found)


def keeps(row: Row | None) -> bool:
    return row is not None and float(row.get("over_share", 1.0)) <= MAY_BE_LATE


def serving(bench: Bench) -> None:
    """Services beside training: requests over the objective and speed of training, in five modes."""
    kept = bench.out / "serving.rows.jsonl"
    for row in kept_rows(bench, kept):
        bench.row(**row)
    began, left = time.monotonic(), 0
    for service, task in pairs():
        pair = Pair(bench, bench.rows, service, task)
        if not any(pair.lacks(mode) for mode in MODES):
            continue
        if time.monotonic() - began > STOP_AFTER_S:
            left += 1
            continue
        try:
            pair.measure()
        finally:
            kept.write_text("".join(json.dumps(row) + "\n" for row in bench.rows))
    if left:
        raise TimeoutError(f"{left} pairs are left; run this part again to go on")
    kept.unlink(missing_ok=True)


def kept_rows(bench: Bench, kept: Path) -> list[Row]:
    """Rows of an interrupted run; or, if only some modes are measured again, all others."""
    if kept.exists():
        return read(kept)
    found = bench.out / f"{bench.part}.jsonl"
    if not os.environ.get("ROOMMATE_MODES") or not found.exists():
        return []
    again = [(service, task, mode) for service, task in pairs() for mode in modes()]
    return [row for row in read(found) if (row["service"], row["task"], row["mode"]) not in again]


def read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]
