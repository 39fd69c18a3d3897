#!/usr/bin/env python3
"""Runs the anchors: results of published simulators that ours has to reproduce.

usage: anchors.py DIR [--inputs DIR ...] [--binary FILE] [--only POLICY,...]

DIR holds expected.csv; its name is the family (muri, gavel, ...). Every row whose policy exists in
this program for that family is run and compared; the others are counted as skipped. Prints ours,
expected, relative difference, tolerance, and how many times less CPU we need than the original did.
Exit status: 0 all inside their tolerance, 1 a row missed, 2 could not run.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FIGURES = ("avg_jct_s", "makespan_s", "p99_jct_s")


@dataclass(frozen=True)
class Family:
    """How the rows of one published simulator are run."""

    cluster: str
    trace_format: str
    #: Factor on the tolerance of p99, whose rank moves with a single job.
    p99_factor: float
    #: Our name for the policy of a row.
    policy: Callable[[dict[str, str]], str] = lambda row: row["policy"]
    #: What else a row needs on the command line;.
    options: Callable[[dict[str, str], Path], list[str]] = lambda row, folder: []


def synergy_policy(row: dict[str, str]) -> str:
    mechanism = row["policy"].split("+")[1]
    return "synergy-" + {"fair": "proportional"}.get(mechanism, mechanism)


def synergy_options(row: dict[str, str], folder: Path) -> list[str]:
    order, mechanism, *place = row["policy"].split("+")
    servers = 1 if "one server" in row["params"] else 4
    options = ["--cluster", f"{servers}x8:v100:24c:500g", "--set", f"order={order}"]
    options += ["--throughputs", str(folder / "model_profiles_1gpu.csv")]
    if place:
        options += ["--set", "layout=consolidated"]
    if "--static" in row["params"]:
        options += ["--set", "first_round_s=1"]
    if mechanism == "opt":
        # Only the optimum knows more than two speeds of a model.
        table = folder.parent.parent / "traces/synergy/cpu_mem_sensitivity_1gpu.csv.gz"
        options += ["--sensitivity", str(table)]
    window = re.fullmatch(r"window \[(\d+),(\d+)\)", row["jobs"])
    if window:
        options += ["--measure", f"{window[1]}:{window[2]}"]
    return options


FAMILIES = {
    "muri": Family(cluster="8x8", trace_format="muri", p99_factor=2.0),
    "synergy": Family(
        cluster="4x8:v100:24c:500g",
        trace_format="synergy",
        p99_factor=1.0,
        policy=synergy_policy,
        options=synergy_options,
    ),
}


class CannotRun(Exception):
    """Something that is not a miss but keeps us from comparing."""


def known_policies(binary: Path, family: str) -> set[str]:
    text = subprocess.run([binary, "policies", "-o", "json"], capture_output=True, check=True).stdout
    return {p["name"] for p in json.loads(text) if family in p["compat"]}


def find_input(name: str, folders: list[Path]) -> Path | None:
    for folder in folders:
        for candidate in (folder / name, folder / f"{name}.gz"):
            if candidate.is_file():
                return candidate
    return None


def at_zero(base: Path, into: Path) -> Path:
    """A copy of a trace with every submission at 0."""
    opener = gzip.open if base.suffix == ".gz" else open
    target = into / f"{base.name.removesuffix('.gz')}.at-zero.csv"
    with opener(base, "rt", newline="") as source, open(target, "w", newline="") as out:
        rows = csv.DictReader(source)
        if not rows.fieldnames or "submit_time" not in rows.fieldnames:
            raise CannotRun(f"{base}: no column submit_time to set to 0")
        writer = csv.DictWriter(out, rows.fieldnames, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({**row, "submit_time": "0"})
    return target


def locate(name: str, folders: list[Path], scratch: Path) -> Path:
    """The input of a row; `x_pr.csv` is `x.csv` with every submission at 0."""
    found = find_input(name, folders)
    if found:
        return found
    stem = name.removesuffix(".gz").removesuffix(".csv")
    if stem.endswith("_pr"):
        base = find_input(f"{stem.removesuffix('_pr')}.csv", folders)
        if base:
            return at_zero(base, scratch)
    looked = ", ".join(str(f) for f in folders)
    raise CannotRun(f"input {name!r} is in none of: {looked}")


def measure(command: list[str]) -> tuple[dict[str, float], float]:
    """Runs a command; its JSON and the CPU seconds (user + system) it took."""
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise CannotRun(f"exit {process.returncode}: {' '.join(command)}")
        out.seek(0)
        return json.load(out), usage.ru_utime + usage.ru_stime


def parse_tolerance(text: str) -> float:
    if text == "exact":
        return 1e-6  # expected.csv is rounded to the millisecond
    return float(text.split("%")[0]) / 100.0


def command_for(binary: Path, folder: Path, family: Family, row: dict[str, str], trace: Path):
    command = [str(binary), "sim", str(trace), "--compat", folder.name]
    command += ["--format", family.trace_format, "--policy", family.policy(row), "-o", "json"]
    options = family.options(row, folder)
    if "--cluster" not in options:
        command += ["--cluster", family.cluster]
    command += options
    if row.get("autopack") in ("on", "off"):
        command += ["--set", f"autopack={'true' if row['autopack'] == 'on' else 'false'}"]
    return command


def check_row(row: dict[str, str], ours: dict[str, float], family: Family) -> list[str]:
    """One line for each figure; a line that begins with MISS is outside its tolerance."""
    lines = []
    tolerance = parse_tolerance(row["tolerance"])
    for figure in FIGURES:
        if not row.get(figure):
            continue
        expected = float(row[figure])
        allowed = tolerance * (family.p99_factor if figure.startswith("p99") else 1.0)
        difference = ours[figure] / expected - 1.0 if expected else ours[figure]
        verdict = "ok  " if abs(difference) <= allowed else "MISS"
        lines.append(
            f"{verdict} {figure:11} ours {ours[figure]:18.6f}  expected {expected:18.6f}  "
            f"difference {difference * 100:+10.6f} %  tolerance {allowed * 100:g} %"
        )
    jobs = row.get("jobs") or ""
    if jobs.isdigit() and int(jobs) != int(ours["finished"]):
        lines.append(f"MISS jobs        ours {ours['finished']}  expected {row['jobs']}")
    return lines


def run(args: argparse.Namespace) -> int:
    folder = Path(args.dir).resolve()
    expected = folder / "expected.csv"
    if not expected.is_file():
        raise CannotRun(f"{expected} does not exist")
    inputs = [Path(p) for p in args.inputs] or [folder, folder / "more"]
    rows = list(csv.DictReader(expected.open(newline="")))
    family = FAMILIES.get(folder.name)
    known = known_policies(args.binary, folder.name) if family else set()
    chosen = [r for r in rows if family and family.policy(r) in known]
    misses = 0
    ratios = []
    with tempfile.TemporaryDirectory() as scratch:
        for row in chosen:
            name = row.get("trace") or row["input"]
            trace = locate(name, inputs, Path(scratch))
            command = command_for(args.binary, folder, family, row, trace)
            runs = [measure(command) for _ in range(args.repeat)]
            ours, cpu_s = runs[0][0], min(cpu for _, cpu in runs)
            theirs = row.get("python_cpu_s") or row.get("cpu_s") or ""
            speed = f"CPU {cpu_s:.3f} s"
            if theirs:
                ratios.append(float(theirs) / max(cpu_s, 1e-3))
                speed += f", original {theirs} s, {ratios[-1]:.0f} times less"
            setting = row.get("autopack")
            label = f"{name} {row['policy']}" + (f" autopack={setting}" if setting not in (None, "na") else "")
            print(f"{label}: {speed}")
            for line in check_row(row, ours, family):
                misses += line.startswith("MISS")
                print(f"  {line}")
    skipped = len(rows) - len(chosen)
    if ratios:
        print(f"CPU: {min(ratios):.0f} to {max(ratios):.0f} times less than the original")
    print(f"{folder.name}: {len(chosen)} rows run, {skipped} skipped (policy not built yet), {misses} figures missed")
    return 1 if misses else 0


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dir", help="folder with expected.csv; its name is the family")
    parser.add_argument("--inputs", nargs="*", default=[], help="folders with inputs (default: DIR and DIR/more)")
    parser.add_argument("--binary", type=Path, default=root / "target/release/roommate")
    parser.add_argument("--repeat", type=int, default=3, help="runs per row; the least CPU counts")
    args = parser.parse_args()
    try:
        return run(args)
    except (CannotRun, OSError, KeyError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
