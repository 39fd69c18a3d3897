#!/usr/bin/env python3
"""Runs the anchors: results of published simulators that our simulator must reproduce.

usage: anchors.py DIR [--inputs DIR ...] [--binary FILE] [--only POLICY,...]

DIR holds expected.csv; its name is the family (muri, gavel, ...). Every row whose policy exists in
this program for that family is run and compared; the others are counted as skipped. Prints ours,
expected, relative difference, tolerance, and the original's CPU time divided by ours.
Exit status: 0 all within tolerance, 1 a row missed, 2 could not run.
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
from dataclasses import dataclass, field
from pathlib import Path

FIGURES = ("avg_jct_s", "makespan_s", "p99_jct_s")


@dataclass(frozen=True)
class Family:
    """Settings for the rows of one published simulator."""

    cluster: str
    trace_format: str
    #: Factor on the tolerance of p99, since a single job can shift its rank.
    p99_factor: float
    #: The original's policy names with our policy and parameters; other names are the same in both.
    policies: dict[str, tuple[str, dict[str, str]]] = field(default_factory=dict)
    #: Number of seeds over which a row with random draws is averaged.
    seeds: int = 1
    #: Parameter that reproduces the draws of a seed of the original.
    replay: str = ""


def gavel(objective: str, **more: str) -> tuple[str, dict[str, str]]:
    return "gavel", {"objective": objective, **more}


def packed(objective: str) -> tuple[str, dict[str, str]]:
    return "gavel-packed", {"objective": objective}


GAVEL_POLICIES = {
    "allox": ("gavel-allox", {}),
    "fifo": ("gavel-fifo", {"choice": "released"}),
    "fifo_repaired": ("gavel-fifo", {"choice": "repaired"}),
    "fifo_perf": ("gavel-fifo", {}),
    "fifo_packed": packed("fifo"),
    "gandiva": ("gavel-couples", {}),
    "isolated": gavel("isolated"),
    "max_min_fairness": gavel("las", aware="false"),
    "max_min_fairness_perf": gavel("las"),
    "max_min_fairness_packed": packed("las"),
    "max_min_fairness_water_filling": gavel("water_filling", aware="false"),
    "max_min_fairness_water_filling_perf": gavel("water_filling"),
    "max_min_fairness_water_filling_packed": packed("water_filling"),
    "finish_time_fairness": gavel("finish_time", aware="false"),
    "finish_time_fairness_perf": gavel("finish_time"),
    "finish_time_fairness_packed": packed("finish_time"),
    "min_total_duration": gavel("makespan", aware="false"),
    "min_total_duration_perf": gavel("makespan"),
    "min_total_duration_packed": packed("makespan"),
    "max_sum_throughput_perf": gavel("throughput"),
    "max_sum_throughput_normalized_by_cost_perf": gavel("cost"),
    "max_sum_throughput_normalized_by_cost_perf_SLOs": gavel("cost", deadlines="true"),
    "max_sum_throughput_normalized_by_cost_packed_SLOs": ("gavel-packed",
                                                          {"objective": "cost",
                                                           "deadlines": "true"}),
}

SYNERGY_MECHANISMS = {"fair": "proportional", "greedy": "greedy", "tune": "tune", "opt": "opt"}

#: Order + mechanism (+ placement), in the original's names.
SYNERGY_POLICIES = {
    f"{order}+{theirs}{place}": (
        f"synergy-{ours}",
        {"order": order, **({"layout": "consolidated"} if place else {})},
    )
    for order in ("fifo", "srtf", "las", "ftf", "drf", "tetris")
    for theirs, ours in SYNERGY_MECHANISMS.items()
    for place in ("", "+place")
}

FAMILIES = {
    "muri": Family(cluster="8x8", trace_format="muri", p99_factor=2.0),
    "gavel": Family(cluster="", trace_format="gavel", p99_factor=2.0, policies=GAVEL_POLICIES,
                    seeds=10, replay="draws_of"),
    "synergy": Family(cluster="", trace_format="synergy", p99_factor=1.0,
                      policies=SYNERGY_POLICIES),
}


class CannotRun(Exception):
    """An error that prevents the comparison."""


def known_policies(binary: Path, family: str) -> set[str]:
    text = subprocess.run([binary, "policies", "-o", "json"], capture_output=True,
                          check=True).stdout
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
    """Runs a command; returns its JSON and its CPU seconds (user + system)."""
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise CannotRun(f"exit {process.returncode}: {' '.join(command)}")
        out.seek(0)
        return json.load(out), usage.ru_utime + usage.ru_stime


def tolerance_of(text: str, figure: str) -> float:
    """Parses a tolerance such as `5%`, `10% (random draws)` or `makespan 4%; avg 12%`."""
    for part in text.split(";"):
        if figure.split("_")[0] in part:
            text = part
    if text == "exact":
        return 1e-6  # expected.csv is rounded to the millisecond
    found = re.search(r"([\d.]+)%", text)
    if not found:
        raise CannotRun(f"no tolerance in {text!r}")
    return float(found[1]) / 100.0


def window(row: dict[str, str]) -> tuple[int, int] | None:
    """The range of measured jobs of a row such as `window [4000,5000)`."""
    found = re.search(r"\[(\d+),(\d+)\)", row.get("jobs") or "")
    return (int(found[1]), int(found[2])) if found else None


def gavel_options(row: dict[str, str], folder: Path) -> list[str]:
    """Cluster, throughput table and window, from the original's command line."""
    words = row["params"].split()
    counts = words[words.index("-c") + 1].split(":")
    cluster = ",".join(f"{n}x1:{kind}" for n, kind in zip(counts, ("v100", "p100", "k80")))
    table = "physical" if "physical_cluster_throughputs.json" in words else "simulation"
    options = ["--cluster", cluster, "--throughputs", str(folder / f"throughputs_{table}.csv.gz")]
    if jobs := window(row):
        options += ["--measure", f"{jobs[0]}:{jobs[1]}"]
    return options


def synergy_options(row: dict[str, str], folder: Path) -> list[str]:
    servers = 1 if "one server" in row["params"] else 4
    options = ["--cluster", f"{servers}x8:v100:24c:500g"]
    options += ["--throughputs", str(folder / "model_profiles_1gpu.csv")]
    if "--static" in row["params"]:
        options += ["--set", "first_round_s=1"]
    if row["policy"].endswith("+opt"):
        # Only the optimal allocation uses more than two speeds of a model.
        table = folder.parent.parent / "traces/synergy/cpu_mem_sensitivity_1gpu.csv.gz"
        options += ["--sensitivity", str(table)]
    if jobs := window(row):
        options += ["--measure", f"{jobs[0]}:{jobs[1]}"]
    return options


#: Families whose rows each have their own cluster and tables.
OPTIONS = {"gavel": gavel_options, "synergy": synergy_options}


def mapped(family: Family, policy: str) -> tuple[str, dict[str, str]]:
    """Our policy and its parameters for a name of the original; `allox_alpha=0.2` contains one."""
    name, _, alpha = policy.partition("_alpha=")
    ours, params = family.policies.get(name, (policy, {}))
    return ours, {**params, "alpha": alpha} if alpha else params


def command_for(binary: Path, folder: Path, family: Family, row: dict[str, str],
                trace: Path) -> list[str]:
    policy, params = mapped(family, row["policy"])
    command = [str(binary), "sim", str(trace), "--compat", folder.name]
    command += ["--format", family.trace_format, "--policy", policy, "-o", "json"]
    command += ["--cluster", family.cluster] if family.cluster else OPTIONS[folder.name](row,
                                                                                         folder)
    for name, value in params.items():
        command += ["--set", f"{name}={value}"]
    if row.get("autopack") in ("on", "off"):
        command += ["--set", f"autopack={'true' if row['autopack'] == 'on' else 'false'}"]
    return command


def replayed(row: dict[str, str], family: Family) -> list[str]:
    """Options that make a run reproduce the random draws of the original's run of this row."""
    seed = re.search(r"--seed (\d+)", row.get("params") or "")
    return ["--set", f"{family.replay}={seed[1]}"] if family.replay and seed else []


def check_row(
    row: dict[str, str], ours: dict[str, float], family: Family, seeds: list[dict[str, float]]
) -> list[str]:
    """One line for each figure; a line that begins with MISS is outside its tolerance.

    A row with random draws is one draw of the original. `ours` repeats that draw and must be within
    the tolerance; otherwise the mean over our own `seeds` must be. The line states which of the two
    holds. A range of values that merely includes the row is not enough.
    """
    lines = []
    for figure in FIGURES:
        if not row.get(figure):
            continue
        expected = float(row[figure])
        allowed = tolerance_of(row["tolerance"], figure) * (family.p99_factor
                                                            if figure.startswith("p99") else 1.0)

        def off(value: float) -> float:
            return value / expected - 1.0 if expected else value

        verdict = "ok  " if abs(off(ours[figure])) <= allowed else "MISS"
        line = (
            f"{figure:11} ours {ours[figure]:18.6f}  expected {expected:18.6f}  "
            f"difference {off(ours[figure]) * 100:+10.6f} %  tolerance {allowed * 100:g} %"
        )
        if seeds:
            values = [run[figure] for run in seeds]
            mean = sum(values) / len(values)
            by = "same draws"
            if verdict == "MISS" and abs(off(mean)) <= allowed:
                verdict, by = "ok  ", "mean"
            line += (
                f"  by {by}; {len(values)} seeds: mean {off(mean) * 100:+.2f} %, "
                f"{min(values):.0f} to {max(values):.0f}"
            )
        lines.append(f"{verdict} {line}")
    jobs = window(row)
    expected_jobs = jobs[1] - jobs[0] if jobs else int(row.get("jobs") or 0)
    if expected_jobs and expected_jobs != int(ours["finished"]):
        lines.append(f"MISS jobs        ours {ours['finished']}  expected {expected_jobs}")
    return lines


def is_random(row: dict[str, str]) -> bool:
    return any(word in row["tolerance"] + (row.get("why") or "") for word in ("random", "shuffled"))


def is_chosen(row: dict[str, str], family: Family, known: set[str], only: str | None) -> bool:
    """Whether the row's policy exists and is selected."""
    if family.policies:
        built = mapped(family, row["policy"])[0] in known
    else:
        built = row["policy"] in known
    return built and (only is None or row["policy"] in only.split(","))


def run(args: argparse.Namespace) -> int:
    folder = Path(args.dir).resolve()
    expected = folder / "expected.csv"
    if not expected.is_file():
        raise CannotRun(f"{expected} does not exist")
    inputs = [Path(p) for p in args.inputs] or [folder, folder / "more"]
    rows = list(csv.DictReader(expected.open(newline="")))
    family = FAMILIES.get(folder.name)
    known = known_policies(args.binary, folder.name) if family else set()
    chosen = [r for r in rows if is_chosen(r, family, known, args.only)] if family else []
    misses = 0
    ratios = []
    with tempfile.TemporaryDirectory() as scratch:
        for row in chosen:
            name = row.get("trace") or row["input"]
            trace = locate(name, inputs, Path(scratch))
            command = command_for(args.binary, folder, family, row, trace)
            again = replayed(row, family) if is_random(row) else []
            runs = [measure([*command, *again, "--seed", "0"]) for _ in range(args.repeat)]
            cpu_s = min(cpu for _, cpu in runs)
            own = range(family.seeds) if is_random(row) else range(0)
            seeds = [measure([*command, "--seed", str(s)])[0] for s in own]
            theirs = row.get("python_cpu_s") or row.get("cpu_s") or ""
            speed = f"CPU {cpu_s:.3f} s"
            if theirs:
                ratios.append(float(theirs) / max(cpu_s, 1e-3))
                speed += f", original {theirs} s, {ratios[-1]:.0f} times less"
            setting = row.get("autopack")
            label = f"{name} {row['policy']} {row['jobs'] if window(row) else ''}".rstrip()
            label += f" autopack={setting}" if setting not in (None, "na") else ""
            print(f"{label}: {speed}")
            for line in check_row(row, runs[0][0], family, seeds):
                misses += line.startswith("MISS")
                print(f"  {line}")
    skipped = len(rows) - len(chosen)
    if ratios:
        print(f"CPU: {min(ratios):.0f} to {max(ratios):.0f} times less than the original")
    print(
        f"{folder.name}: {len(chosen)} rows run, {skipped} skipped (policy not built yet), "
        f"{misses} figures missed"
    )
    return 1 if misses else 0


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dir", help="folder with expected.csv; its name is the family")
    parser.add_argument("--inputs", nargs="*", default=[],
                        help="folders with inputs (default: DIR and DIR/more)")
    parser.add_argument("--binary", type=Path, default=root / "target/release/roommate")
    parser.add_argument("--only", help="policies, separated by commas")
    parser.add_argument("--repeat", type=int, default=3, help="runs per row; the least CPU counts")
    args = parser.parse_args()
    try:
        return run(args)
    except (CannotRun, OSError, KeyError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
