#!/usr/bin/env python3
"""Measures Roommate on one real GPU, in parts of a few minutes each.

usage: run.sh PART... [--out DIR] [--again] [--rehearse]

A complete part (listed in DIR/parts.jsonl) is skipped unless --again is given. Each part writes its
rows to DIR/PART.jsonl and the journals of its daemons to DIR, and prints a table. --rehearse uses
pauses instead of jobs and a core instead of the GPU, to test the parts themselves.

What services and their mechanisms still need on one H200, in this order (minutes of the GPU are
estimates; a part that says that something is left is started again with the same words):

    run.sh gate                                      about 5: cost and delays of the gate
    ROOMMATE_MODES=roommate run.sh serving --again   about 9, in two calls: only Roommate's column
    run.sh guests                                    about 10, in two calls: promises and guests
    run.sh declined                                  about 8: the sets that `sets` declined, with
                                                     priority

`ROOMMATE_PAIRS=bert:gpt2,resnet50:gpt2` restricts `serving` to the pairs beside gpt2 (about 2
minutes with one mode), `ROOMMATE_PAIRS=resnet50+gpt2` restricts `guests`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gates
import mix
import mixes
import policies
import promises
import serving
import sets
from bench import Bench
from room import ROOT, Room, cpu_s

HERE = Path(__file__).resolve().parent


# ---- the machine ---------------------------------------------------------------------


def selftest(bench: Bench) -> None:
    """The daemon starts, reports what it can enforce, and stops."""
    with bench.room() as room:
        began = time.monotonic()
        room.up("mps")
        up_s = time.monotonic() - began
        print(room.ok("describe"))
        found = room.machine()
        began = time.monotonic()
        room.down()
        bench.row(up_s=up_s, down_s=time.monotonic() - began,
                  describe={k: v for k, v in found.items() if k != "recent"})


def sdk(bench: Bench) -> None:
    """The SDK's protocol on a training loop: SM ranges, plans, memory, suspension bit for bit."""
    for task in ("resnet50-imagenet", "gpt2-lm"):
        with contextlib.nullcontext(dict(os.environ)) if bench.rehearse else mps() as env:
            words = ["--task", task, *(["--rehearse"] if bench.rehearse else [])]
            script(bench, "obeys.py", env, *words)


def overhead(bench: Bench) -> None:
    """The same loop with and without the SDK, and the CPU time of the daemon meanwhile."""
    # Blocks are several times as long as the longest wait of the SDK.
    for task, batch, pairs, steps in (("resnet18-imagenet", 32, 80, 24), ("gpt2-lm", 8, 50, 8)):
        with bench.room(task) as room:
            room.up("fifo")
            found = room.folder / "found.json"
            words = ["--task", task, "--batch", batch, "--pairs", pairs, "--steps", steps, "--out",
                     found]
            words += ["--rehearse"] if bench.rehearse else []
            job = room.job("loop", "train.py", sdk=False)
            job["command"] = [sys.executable, str(HERE / "overhead.py"), *map(str, words)]
            if room.knows_sdk:
                job["sdk"] = True
            file = room.folder / "loop.yaml"
            file.write_text(json.dumps(job))
            room.ok("submit", str(file))
            room.until(lambda: room.jobs()["loop"]["cooperative"])
            pid = room.machine()["pid"]
            used, began = cpu_s(pid), time.monotonic()
            # Requests cost the daemon CPU time, so none are sent meanwhile.
            while not found.exists():
                bench.left_s()
                time.sleep(0.25)
            share = (cpu_s(pid) - used) / (time.monotonic() - began)
            bench.row(**json.loads(found.read_text()), daemon_core_share=share)


# ---- faults --------------------------------------------------------------------------


def faults(bench: Bench) -> None:
    """Three roommates, one of which is killed, runs out of memory, or makes an illegal access."""
    for deed in ("kill", "oom", "illegal"):
        with bench.room(deed) as room:
            room.up("mps", "--backoff", "1")
            lengths = {"resnet18": 2000, "gpt2": 600, "culprit": 500}
            tasks = {"resnet18": ("resnet18-imagenet", 64), "gpt2": ("gpt2-lm", 8),
                     "culprit": ("mobilenetv3l-imagenet", 32)}
            words = {name: ["--task", task, "--batch", batch, "--steps", lengths[name], "--save-s",
                            3]
                     for name, (task, batch) in tasks.items()}
            for name in ("resnet18", "gpt2"):
                room.submit(name, "train.py", *words[name], retries=3)
            # Submitted while the others are running, so that it fails in the middle of their steps.
            for name in ("resnet18", "gpt2"):
                room.until(lambda name=name: len(room.ticks(name)) >= 20, 150)
            wrong = "none" if deed == "kill" else deed
            # Two illegal accesses: before the second one the suspect is separated from the others.
            times = 2 if deed == "illegal" else 1
            room.submit("culprit", "faulty.py", wrong, "--after", 100, "--times", times,
                        *words["culprit"], retries=3)
            if deed == "kill":
                room.until(lambda: len(room.ticks("culprit")) >= 100, 150)
                os.kill(room.process("culprit"), signal.SIGKILL)
            else:
                room.until(lambda: room.jobs()["culprit"]["starts"] > 1, 150)
            began = time.monotonic()
            room.until_ended(min(240, bench.left_s()))
            took = time.monotonic() - began
            jobs = room.jobs()
            bench.row(deed=deed, all_finished=all(j["state"] == "finished" for j in jobs.values()),
                      ended_after_s=took,
                      jobs={name: fate(room, name, jobs[name], steps) for name,
                            steps in lengths.items()})


def fate(room: Room, name: str, job: dict[str, Any], steps: int) -> dict[str, Any]:
    ticks = room.ticks(name)
    gap = max((b.at - a.at for a, b in zip(ticks[20:], ticks[21:], strict=False)), default=0.0)
    return {"state": job["state"], "starts": job["starts"], "failures": job["failures"],
            "longest_halt_s": gap,
            "steps_done_again": max(0, len(ticks) - steps)}


# ---- older measurements --------------------------------------------------------------


def repartition(bench: Bench) -> None:
    """The SM range of a running job changes 200 times."""
    with mps() as env:
        script(bench, "repartition.py", env)


def jitter(bench: Bench) -> None:
    """Variation of the speed of a CPU-bound loop, by the cores that it may use."""
    script(bench, "jitter.py", dict(os.environ))


def neighbours(bench: Bench) -> None:
    """Effect of a failing process on its neighbours, without a daemon."""
    script(bench, "faults.py", dict(os.environ))


def script(bench: Bench, name: str, env: dict[str, str], *words: str) -> None:
    """Runs a script of this folder that prints rows."""
    path = os.pathsep.join([str(ROOT / "python"), *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, str(HERE / name), *words]
    with subprocess.Popen(command, env=env | {"PYTHONPATH": path}, stdout=subprocess.PIPE,
                          text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("{"):
                bench.row(**json.loads(line))
    if running.returncode != 0:
        raise RuntimeError(f"{name} ended with status {running.returncode}")


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Environment with a separate MPS daemon."""
    scratch = Path(tempfile.mkdtemp())
    env = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": f"{scratch}/pipe",
                        "CUDA_MPS_LOG_DIRECTORY": f"{scratch}/log"}
    for folder in ("pipe", "log"):
        (scratch / folder).mkdir()
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=True)
    try:
        yield env
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit -t 5\n", text=True, env=env,
                       check=False)


MECHANISMS = (
    promises.guaranteed, promises.strict, promises.guests, promises.shrink, promises.resize,
    policies.turns, policies.gandiva, policies.muri, policies.iadeep, policies.opaque,
)
ALL = (selftest, sdk, overhead, faults, *MECHANISMS, sets.sets, sets.large, sets.declined, mix.mix,
       mixes.roommate, serving.serving, gates.gate, repartition, neighbours, jitter)
PARTS = {part.__name__: part for part in ALL}


# ---- running them --------------------------------------------------------------------


def driver() -> str:
    ask = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no GPU"


def commit() -> str:
    """The measured commit, with `-dirty` if files differ from it; $ROOMMATE_COMMIT overrides it."""
    if given := os.environ.get("ROOMMATE_COMMIT"):
        return given
    ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


WARM = (
    "import torch, torchvision; "
    "from transformers import BertForQuestionAnswering, GPT2LMHeadModel"
)


def complete(out: Path) -> set[str]:
    index = out / "parts.jsonl"
    return {json.loads(line)["part"]
            for line in index.read_text().splitlines()} if index.exists() else set()


def table(rows: list[dict[str, Any]]) -> str:
    """The plain values of the rows as a table, without nested values."""
    columns = list(dict.fromkeys(k for row in rows for k, v in row.items()
                                 if not isinstance(v, (dict, list))))
    plain = lambda value: "" if value is None or isinstance(value, (dict, list)) else str(value)
    cells = [columns, *[[plain(row.get(c)) for c in columns] for row in rows]]
    widths = [max(len(line[n]) for line in cells) for n in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
                     for line in cells)


def play(name: str, out: Path, rehearse: bool) -> bool:
    bench = Bench(name, out, rehearse, anew=name in complete(out))
    began = time.monotonic()
    print(f"== {name}: {PARTS[name].__doc__}", flush=True)
    try:
        PARTS[name](bench)
    except Exception:
        traceback.print_exc()
        print(
            f"== {name} failed after {time.monotonic() - began:.0f} s; "
            f"its rows are in {out / name}.new",
            flush=True,
        )
        return False
    bench.keep()
    if bench.left:
        print(f"{table(bench.rows)}\n== {name}: {bench.left} cells are left; run it again", flush=True)
        return True
    what = {"part": name, "date": time.strftime("%Y-%m-%d %H:%M:%S"), "commit": commit(),
            "gpu": driver(), "command": f"bench/gpu/run.sh {name}",
            "seconds": round(time.monotonic() - began)}
    with (out / "parts.jsonl").open("a") as index:
        index.write(json.dumps(what) + "\n")
    print(f"{table(bench.rows)}\n== {name}: {what['seconds']} s", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART",
                        help=f"{', '.join(PARTS)}; mechanisms = several of them")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/h200")
    parser.add_argument("--again", action="store_true", help="repeat complete parts")
    parser.add_argument("--rehearse", action="store_true",
                        help="without a GPU; nothing is measured")
    args = parser.parse_args()
    parts: list[str] = []
    for part in args.parts:
        parts += [p.__name__ for p in MECHANISMS] if part == "mechanisms" else [part]
    if not parts or any(part not in PARTS for part in parts):
        for name, part in PARTS.items():
            print(f"{name:12} {part.__doc__}")
        raise SystemExit(0 if not parts else 2)
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.rehearse:
        # Compiles the Python modules, so that the first jobs do not do it during a measurement.
        subprocess.run([sys.executable, "-c", WARM], check=False)
    good = True
    for part in parts:
        if part in complete(args.out) and not args.again:
            print(f"== {part} is complete")
            continue
        good = play(part, args.out, args.rehearse) and good
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
