#!/usr/bin/env python3
"""Measures training tasks and services beside each other on one NVIDIA GPU.

usage: measure.py PLAN... --out FILE [--minutes N]

Plans: solo (tasks alone over batch sizes), curves (services over batch × SMs beside each task), batches (pairs of
tasks at batch sizes off their usual), triples, slices (pairs without MPS, so that the driver slices time).
Needs PyTorch, torchvision, transformers, nvcc and nvidia-cuda-mps-control; nothing is installed. Rows are written as
they come, so that a run that is cut off keeps what it has. Fields are those of profiles/README.md.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent

sys.path.insert(0, str(HERE.parents[1] / "examples" / "gpu"))
from zoo import SERVE, TRAIN, build, loss as loss_of  # noqa: E402

SERVE_BATCHES = (4, 16, 64)
SPLITS = (8, 16, 24, 40, 64)


# ---- one process with models -------------------------------------------------------------------------------


class Host:
    """A process that holds models and runs one of them when asked."""

    def __init__(self):
        import torch

        self.torch = torch
        torch.backends.cudnn.benchmark = True
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self.lib = ctypes.CDLL(str(HERE / "partition.so"))
        self.streams: dict[tuple[int, bool], tuple[object, int]] = {}
        self.models: dict[tuple[str, str], tuple] = {}
        self.inputs: dict[tuple[str, str, int], tuple] = {}

    def stream(self, sms: int, rest: bool):
        """A stream on `sms` SMs, or on all but them; 0 = the whole GPU. Made once, because each keeps memory."""
        if sms == 0:
            return self.torch.cuda.default_stream(), 132
        if (sms, rest) not in self.streams:
            handle = ctypes.c_void_p()
            got = self.lib.partition(0, sms, int(rest), ctypes.byref(handle))
            if got < 0:
                raise RuntimeError(f"no partition of {sms} SMs")
            self.streams[sms, rest] = (self.torch.cuda.ExternalStream(handle.value), got)
        return self.streams[sms, rest]

    def load(self, kind: str, name: str, batch: int):
        torch = self.torch
        if (kind, name) not in self.models:
            model, make = build(kind, name)
            model = model.cuda()
            if kind == "train":
                model.train()
                optim = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
            else:
                model.eval()
                optim = None
            self.models[kind, name] = (model, make, optim)
        model, make, _ = self.models[kind, name]
        if (kind, name, batch) not in self.inputs:
            self.inputs[kind, name, batch] = make(batch)

    def drop(self, kind: str, keep: list[str] = ()):
        for key in [k for k in self.models if k[0] == kind and k[1] not in keep]:
            del self.models[key]
        self.inputs = {k: v for k, v in self.inputs.items() if k[:2] in self.models}
        self.torch.cuda.empty_cache()

    def step(self, kind: str, name: str, batch: int):
        torch = self.torch
        model, _, optim = self.models[kind, name]
        x, y = self.inputs[kind, name, batch]
        if kind == "serve":
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                model(x)
            return
        optim.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(name, model(x), y)
        loss.backward()
        optim.step()

    def run(self, kind, name, batch, sms, rest, seconds, mark, side):
        """Steps one after the other for so long. Whoever is ready first keeps the GPU busy until all are, and
        whoever has its figures goes on until all have, so that nobody is measured beside an idle roommate."""
        torch = self.torch
        stream, got = self.stream(sms, rest)
        stream.wait_stream(torch.cuda.default_stream())
        times = []

        def until(event: str):
            Path(f"{mark}.{event}.{side}").touch()
            while not os.path.exists(f"{mark}.{event}"):
                self.step(kind, name, batch)
                stream.synchronize()

        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step(kind, name, batch)
            stream.synchronize()
            torch.cuda.reset_peak_memory_stats()
            until("begin")
            cpu, start = time.process_time(), time.perf_counter()
            now = start
            while now - start < seconds or len(times) < 3:
                self.step(kind, name, batch)
                stream.synchronize()
                done = time.perf_counter()
                times.append(done - now)
                now = done
                if now - start > 4 * seconds + 2:
                    break
            cpu = time.process_time() - cpu
            until("end")
        times.sort()
        at = lambda q: round(1e3 * times[min(len(times) - 1, int(q * len(times)))], 3)
        return {
            "it_s": round(len(times) / (now - start), 3), "n": len(times), "p50_ms": at(0.5), "p99_ms": at(0.99),
            "cpu_cores": round(cpu / (now - start), 2), "sms": got,
            "mem_mib": int(torch.cuda.max_memory_reserved() / 2**20),
            "used_mib": int(torch.cuda.max_memory_allocated() / 2**20),
        }


def host() -> None:
    """Reads requests as JSON lines, answers with JSON lines."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serving = Host()
    for line in sys.stdin:
        ask = json.loads(line)
        try:
            what = ask.pop("do")
            reply = getattr(serving, what)(**ask) or {}
        except Exception as error:  # noqa: BLE001 - whatever goes wrong is a row that is missing
            serving.torch.cuda.empty_cache()
            reply = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"}
        answer.write(json.dumps(reply) + "\n")
        answer.flush()


# ---- plans -------------------------------------------------------------------------------------------------


class Tenant:
    def __init__(self, mps: bool, pipe: str):
        env = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": pipe if mps else "/nonexistent", "OMP_NUM_THREADS": "2"}
        command = [sys.executable, str(HERE / "measure.py"), "--host"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, **what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def has_answered(self) -> bool:
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def answer(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": "the process ended"}

    def call(self, **what):
        self.ask(**what)
        return self.answer()

    def end(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)


class Bench:
    def __init__(self, out: Path, minutes: float):
        self.out = out.open("a")
        self.until = time.monotonic() + 60 * minutes
        self.scratch = Path(tempfile.mkdtemp())
        self.marks = itertools.count()

    def left(self) -> bool:
        return time.monotonic() < self.until

    def write(self, **row):
        self.out.write(json.dumps(row) + "\n")
        self.out.flush()

    def together(self, sides: list[tuple[Tenant, dict]], seconds: float = 0.4):
        """Runs all sides at once."""
        mark = self.scratch / str(next(self.marks))
        for i, (tenant, side) in enumerate(sides):
            tenant.ask(do="run", seconds=seconds, mark=str(mark), side=i, **{"sms": 0, "rest": False} | side)
        for event in ("begin", "end"):
            self.wait_for_all(mark, event, sides)
            Path(f"{mark}.{event}").touch()
        return [tenant.answer() for tenant, _ in sides]

    def wait_for_all(self, mark: Path, event: str, sides):
        """A side that failed has answered already and is not waited for."""
        for i, (tenant, _) in enumerate(sides):
            while not os.path.exists(f"{mark}.{event}.{i}") and not tenant.has_answered():
                time.sleep(0.001)


def plan_solo(bench: Bench, new):
    a = new()
    for name, batches in TRAIN.items():
        a.call(do="drop", kind="train")
        for batch in sorted(batches):
            for sms, rest in ((0, False),):
                if not bench.left():
                    return
                a.call(do="load", kind="train", name=name, batch=batch)
                [r] = bench.together([(a, dict(kind="train", name=name, batch=batch, sms=sms, rest=rest))], 0.5)
                bench.write(kind="train", name=name, batch=batch, **r)
    a.call(do="drop", kind="train")
    for name in SERVE:
        a.call(do="drop", kind="serve")
        for batch in (1, 4, 8, 16, 32, 64, 128):
            for sms in (8, 16, 24, 40, 64, 96, 0):
                if not bench.left():
                    return
                a.call(do="load", kind="serve", name=name, batch=batch)
                [r] = bench.together([(a, dict(kind="serve", name=name, batch=batch, sms=sms))], 0.3)
                bench.write(kind="serve", name=name, batch=batch, **r)


def plan_curves(bench: Bench, new):
    a, b = new(), new()
    for service, batch in itertools.product(SERVE, SERVE_BATCHES):
        b.call(do="load", kind="serve", name=service, batch=batch)
    for task, batches in TRAIN.items():
        a.call(do="drop", kind="train")
        a.call(do="load", kind="train", name=task, batch=batches[0])
        for service, batch, sms in itertools.product(SERVE, SERVE_BATCHES, SPLITS):
            if not bench.left():
                return
            train = dict(kind="train", name=task, batch=batches[0], sms=sms, rest=True)
            serve = dict(kind="serve", name=service, batch=batch, sms=sms)
            ra, rb = bench.together([(a, train), (b, serve)], 0.25)
            bench.write(k="tc", a=task, batch_a=batches[0], b=service, batch_b=batch, sms_a=ra.get("sms"),
                        sms_b=rb.get("sms"), ra=ra, rb=rb)


def pair_rows(bench: Bench, new, label: str, pairs):
    a, b = new(), new()
    for (task_a, batch_a), (task_b, batch_b) in pairs:
        if not bench.left():
            return
        a.call(do="drop", kind="train", keep=[task_a])
        b.call(do="drop", kind="train", keep=[task_b])
        a.ask(do="load", kind="train", name=task_a, batch=batch_a)
        b.call(do="load", kind="train", name=task_b, batch=batch_b)
        a.answer()
        sides = [(a, dict(kind="train", name=task_a, batch=batch_a)), (b, dict(kind="train", name=task_b, batch=batch_b))]
        ra, rb = bench.together(sides, 0.6)
        bench.write(k=label, a=task_a, batch_a=batch_a, b=task_b, batch_b=batch_b, ra=ra, rb=rb)


def small_and_large(task: str) -> tuple[int, int]:
    batches = sorted(TRAIN[task])
    usual = TRAIN[task][0]
    return batches[max(0, batches.index(usual) - 2)], batches[min(len(batches) - 1, batches.index(usual) + 1)]


def plan_batches(bench: Bench, new):
    pairs = []
    for a, b in itertools.combinations_with_replacement(TRAIN, 2):
        (small_a, large_a), (small_b, large_b) = small_and_large(a), small_and_large(b)
        pairs += [((a, small_a), (b, small_b)), ((a, large_a), (b, small_b)), ((a, small_a), (b, large_b))]
    pair_rows(bench, new, "tt", pairs)


def plan_slices(bench: Bench, new):
    pairs = [((a, TRAIN[a][0]), (b, TRAIN[b][0])) for a, b in itertools.combinations_with_replacement(TRAIN, 2)]
    pair_rows(bench, new, "slices", pairs)


def plan_triples(bench: Bench, new):
    tenants = [new(), new(), new()]
    names = list(TRAIN)
    triples = [tuple(names[(i + d) % 12] for d in (0, s, 2 * s + 1)) for s in (1, 3) for i in range(12)]
    for triple in triples:
        if not bench.left():
            return
        sides = []
        for tenant, name in zip(tenants, triple):
            tenant.call(do="drop", kind="train", keep=[name])
            tenant.ask(do="load", kind="train", name=name, batch=TRAIN[name][0])
            sides.append((tenant, dict(kind="train", name=name, batch=TRAIN[name][0])))
        for tenant in tenants:
            tenant.answer()
        found = bench.together(sides, 0.6)
        bench.write(k="ttt", tasks=triple, batches=[TRAIN[n][0] for n in triple], r=found)


PLANS = {"solo": plan_solo, "curves": plan_curves, "batches": plan_batches, "triples": plan_triples, "slices": plan_slices}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("plans", nargs="*", choices=list(PLANS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0, help="for each plan")
    parser.add_argument("--tasks", help="only these tasks, separated by commas")
    parser.add_argument("--host", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.host:
        return host()
    if args.tasks:
        for name in [n for n in TRAIN if n not in args.tasks.split(",")]:
            del TRAIN[name]
    library = HERE / "partition.so"
    subprocess.run(["nvcc", "-shared", "-Xcompiler", "-fPIC", "-o", library, HERE / "partition.c", "-lcuda"], check=True)
    scratch = tempfile.mkdtemp()
    mps = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": f"{scratch}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{scratch}/log"}
    for folder in ("pipe", "log"):
        os.mkdir(f"{scratch}/{folder}")
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=mps, check=True)
    try:
        for name in args.plans:
            bench = Bench(args.out, args.minutes)
            began = time.monotonic()
            tenants = []

            def new() -> Tenant:
                tenants.append(Tenant(name != "slices", f"{scratch}/pipe"))
                return tenants[-1]

            try:
                PLANS[name](bench, new)
            finally:
                for tenant in tenants:
                    tenant.end()
                print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=mps, check=False)


if __name__ == "__main__":
    main()
