#!/usr/bin/env python3
"""Effect of a failing process on its roommates.

usage: faults.py [--out FILE]

Two neighbours train beside one process that is killed or stopped, runs out of memory, or makes an
illegal access, with and without MPS. Prints for each neighbour whether it continued, its longest
step or its error, and after how long a new process could run a kernel.
Needs PyTorch, nvcc and nvidia-cuda-mps-control.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEEDS = ("killed", "terminated", "let go, then killed", "stopped for 3 s", "out of memory",
         "illegal access", "illegal access outside")
ENDLESS = DEEDS[:4]
KERNEL = """
extern "C" __global__ void wild(int *p) { p[1ull << 40] = 1; }
extern "C" int deed() {
    wild<<<1, 1>>>((int *)16);
    return (int)cudaDeviceSynchronize();
}
"""


def neighbour() -> None:
    import torch

    a = torch.randn(4096, 4096, device="cuda")
    last = time.monotonic()
    longest, steps = 0.0, 0
    print("ready", flush=True)
    until = time.monotonic() + 9
    try:
        while time.monotonic() < until:
            for _ in range(8):
                a = (a @ a).clamp(-1, 1)
            torch.cuda.synchronize()
            now = time.monotonic()
            longest, last, steps = max(longest, now - last), now, steps + 1
        print(json.dumps({"went_on": True, "steps": steps,
                          "longest_step_ms": round(1e3 * longest, 1)}), flush=True)
    except RuntimeError as error:
        what = str(error).splitlines()[0][:120]
        print(json.dumps({"went_on": False, "steps": steps, "died_of": what}), flush=True)
        os._exit(1)


def culprit(deed: str) -> None:
    import torch

    a = torch.randn(4096, 4096, device="cuda")
    print("ready", flush=True)
    until = time.monotonic() + 2
    while deed in ENDLESS or time.monotonic() < until:
        a = (a @ a).clamp(-1, 1)
    if deed == "out of memory":
        try:
            keep = [torch.empty(8 << 30, dtype=torch.uint8, device="cuda") for _ in range(100)]
        except torch.OutOfMemoryError:
            keep = []
            torch.cuda.empty_cache()
            a = (a @ a).clamp(-1, 1)
            torch.cuda.synchronize()
            print("went on after it", flush=True)
    else:
        import ctypes

        print(f"status {ctypes.CDLL(os.environ['WILD']).deed()}", flush=True)


def probe(env: dict[str, str]) -> tuple[bool, float]:
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", "import torch; torch.ones(8, device='cuda').sum().item()"], env=env,
        capture_output=True, check=False
    )
    return ran.returncode == 0, time.monotonic() - began


def control(env: dict[str, str], command: str) -> str:
    ran = subprocess.run(["nvidia-cuda-mps-control"], input=command + "\n", env=env,
                         capture_output=True, text=True, check=False, timeout=20)
    return ran.stdout.strip()


def let_go(env: dict[str, str], pid: int) -> str:
    """Makes the MPS server terminate the GPU work of a client."""
    answers = []
    for server in control(env, "get_server_list").split():
        clients = control(env, f"get_client_list {server}").split()
        answer = control(env, f"terminate_client {server} {pid}")
        answers.append(f"clients {clients}, {pid}: {answer!r}")
    return "; ".join(answers)


def server_faults(log: Path, before: int) -> list[str]:
    """Lines about faults in the log of the MPS server."""
    words = ("fault", "exception", "fatal", "terminat", "error")
    return [line for line in log.read_text()[before:].splitlines()
            if any(w in line.lower() for w in words)][:8]


def play(deed: str, env: dict[str, str]) -> dict:
    me = [sys.executable, __file__]

    def start(*words: str, env: dict[str, str] = env) -> subprocess.Popen:
        return subprocess.Popen([*me, *words], env=env, stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL, text=True)

    ours = [start("--neighbour"), start("--neighbour")]
    # Without a daemon at this path the process runs without MPS beside clients of MPS.
    outside = env | {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
    theirs = start("--culprit", deed, env=outside if deed.endswith("outside") else env)
    for process in (theirs, *ours):
        process.stdout.readline()
    time.sleep(1.5)
    asked = ""
    if deed == "let go, then killed":
        asked = let_go(env, theirs.pid)
    if deed == "stopped for 3 s":
        theirs.send_signal(signal.SIGSTOP)
        time.sleep(3)
        theirs.send_signal(signal.SIGCONT)
        time.sleep(5)
    if deed in ENDLESS:
        theirs.send_signal(signal.SIGTERM if deed == "terminated" else signal.SIGKILL)
    said = (asked + " " + theirs.stdout.read()).strip()
    theirs.wait()
    new, new_s = probe(env)
    results = []
    for process in ours:
        lines = process.stdout.read().strip().splitlines()
        process.wait()
        results.append(json.loads(lines[-1]) if lines
                    else {"went_on": False, "died_of": f"status {process.returncode}"})
    later, later_s = probe(env)
    return {"culprit_said": said, "neighbours": results, "new_process_beside_them": new,
            "new_process_s": round(new_s, 1),
            "new_process_after": later, "after_s": round(later_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--neighbour", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--culprit", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.neighbour:
        return neighbour()
    if args.culprit:
        return culprit(args.culprit)
    scratch = Path(tempfile.mkdtemp())
    (scratch / "wild.cu").write_text(KERNEL)
    library = scratch / "wild.so"
    subprocess.run(["nvcc", "-shared", "-Xcompiler", "-fPIC", "-o", library, scratch / "wild.cu"],
                   check=True)
    for mps in (True, False):
        env = os.environ | {"WILD": str(library), "CUDA_MPS_PIPE_DIRECTORY": str(scratch / "pipe"),
                            "CUDA_MPS_LOG_DIRECTORY": str(scratch / "log")}
        if mps:
            for folder in ("pipe", "log"):
                (scratch / folder).mkdir()
            subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=True)
        for deed in DEEDS if mps else DEEDS[:-1]:
            log = scratch / "log" / "server.log"
            before = len(log.read_text()) if log.exists() else 0
            row = json.dumps({"deed": deed, "mps": mps} | play(deed, env)
                             | {"server_log": server_faults(log, before) if mps else []})
            print(row, flush=True)
            if args.out:
                with args.out.open("a") as out:
                    out.write(row + "\n")
        if mps:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit -t 5\n", text=True, env=env,
                           check=False)
            time.sleep(2)
            env.pop("CUDA_MPS_PIPE_DIRECTORY")


if __name__ == "__main__":
    main()
