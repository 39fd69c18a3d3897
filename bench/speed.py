#!/usr/bin/env python3
"""Large runs with limits on time and memory.

usage: speed.py [--venus FILE]

* one million synthetic jobs on 100,000 GPUs (`fifo`, `tiresias`): once at a load that leaves GPUs
  idle and once at four times the cluster's capacity: 120 s and 4 GiB each;
* with --venus, the 125,303 jobs of the Helios cluster Venus on its 133 nodes of 8 GPUs (`fifo`,
  `srtf`, `tiresias`): 10 s each, and the same on 50 nodes, where jobs queue.

Exit status: 0 all within their limits, 1 a limit exceeded, 2 could not run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = ROOT / "target/release/roommate"


def run(trace: Path, cluster: str, policy: str, limit_s: float, limit_mib: float) -> bool:
    command = [str(BINARY), "sim", str(trace), "--cluster", cluster, "--policy", policy, "-o",
               "json"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=4 * limit_s)
    except subprocess.TimeoutExpired:
        print(f"SLOW {policy:10} on {cluster:8}: still running after {4 * limit_s:.0f} s")
        return False
    result = json.loads(done.stdout)
    wall_s, rss = result["wall_s"], result["peak_rss_mib"]
    good = wall_s <= limit_s and rss <= limit_mib and result["finished"] == result["jobs"]
    print(
        f"{'ok  ' if good else 'SLOW'} {policy:10} on {cluster:8}: {result['jobs']} jobs, "
        f"{result['events']} events, {result['preemptions']} preemptions, "
        f"{wall_s:.2f} s (limit {limit_s:g}), {rss:.0f} MiB (limit {limit_mib:g})",
        flush=True,
    )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--venus", type=Path)
    args = parser.parse_args()
    good = True
    try:
        if args.venus:
            for cluster in ("133x8", "50x8"):
                for policy in ("fifo", "srtf", "tiresias"):
                    good &= run(args.venus, cluster, policy, 10, 4096)
        for load in ("0.9", "4"):
            with tempfile.TemporaryDirectory() as scratch:
                trace = Path(scratch) / "million.csv.gz"
                synth = ["trace", "synth", "-n", "1000000", "--cluster", "12500x8", "--load", load]
                subprocess.run([str(BINARY), *synth, "-o", str(trace)], check=True)
                print(f"one million jobs at load {load}:")
                for policy in ("fifo", "tiresias"):
                    good &= run(trace, "12500x8", policy, 120, 4096)
    except (OSError, subprocess.CalledProcessError, json.JSONDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
