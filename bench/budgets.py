#!/usr/bin/env python3
"""Counts the instructions of fixed runs with callgrind and compares them with bench/budgets.toml.

usage: budgets.py [--update]

Exit status: 0 all inside their budget, 1 a budget exceeded, 2 could not run.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = ROOT / "target/dist/roommate"
ROUNDS = ROOT / "target/dist/examples/rounds"
BUDGETS = ROOT / "bench/budgets.toml"
#: Margin for other compiler versions; a real regression on a hot path is larger.
MARGIN = 1.10


def instructions(command: list[str]) -> int:
    tool = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", *command]
    done = subprocess.run(tool, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    found = re.search(r"Collected : (\d+)", done.stderr)
    if not found:
        raise RuntimeError(f"callgrind printed no count:\n{done.stderr[-2000:]}")
    return int(found.group(1))


def measure(config: dict, scratch: Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, trace in config["trace"].items():
        file = scratch / f"{name}.csv"
        synth = [str(BINARY), "trace", "synth", "-n", str(trace["jobs"]), "--mix", trace["mix"]]
        synth += ["--load", str(trace["load"]), "--seed", str(trace["seed"])]
        synth += ["--cluster", trace["cluster"], "-o", str(file)]
        subprocess.run(synth, check=True)
        if trace.get("describe"):
            words = [str(BINARY), "trace", "stats", str(file)]
            counts["read-and-describe"] = instructions(words)
        sim = [str(BINARY), "sim", str(file), "--cluster", trace["cluster"], "-o", "json", "--policy"]
        for policy in trace["policies"]:
            counts[policy] = instructions([*sim, policy])
    crowd = config["crowd"]
    for policy in crowd["policies"]:
        sizes = [crowd["cluster"], str(crowd["jobs"]), str(crowd["rounds"])]
        counts[f"{policy}-crowd"] = instructions([str(ROUNDS), policy, *sizes])
    return counts


def update(config: dict, counts: dict[str, int]) -> None:
    text = BUDGETS.read_text().split("\n[run.")[0].rstrip() + "\n"
    for name, count in counts.items():
        text += f"\n[run.{name}]\nmeasured = {count}\nbudget = {int(count * MARGIN)}\n"
    BUDGETS.write_text(text)


def main() -> int:
    config = tomllib.loads(BUDGETS.read_text())
    try:
        with tempfile.TemporaryDirectory() as scratch:
            counts = measure(config, Path(scratch))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if "--update" in sys.argv[1:]:
        update(config, counts)
        return 0
    over = 0
    for name, count in counts.items():
        budget = config["run"][name]["budget"]
        exceeded = count > budget
        over += exceeded
        verdict = "OVER" if exceeded else "ok  "
        print(
            f"{verdict} {name:18} {count / 1e6:10.1f} M instructions, "
            f"budget {budget / 1e6:10.1f} M"
        )
    print(f"budgets: {len(counts) - over} passed, {over} failed")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
