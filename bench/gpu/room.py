"""A daemon in a temporary folder, its jobs, and the recorded ends of their steps, for bench/gpu.

Needs only the standard library.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "gpu"
REHEARSAL = Path(__file__).resolve().parent / "rehearsal.py"


def binary() -> str:
    """Path of the program: $ROOMMATE, the release build, or bench/gpu/.bin."""
    places = [os.environ.get("ROOMMATE"), ROOT / "target/release/roommate",
              ROOT / "bench/gpu/.bin/roommate"]
    for place in places:
        if place and os.access(place, os.X_OK):
            return str(place)
    raise SystemExit("no program: build it with `cargo build --release`, or set $ROOMMATE")


class Tick(NamedTuple):
    """The end of a step."""

    at: float
    batch: int
    first: int
    sms: int


class Room:
    """Context of a daemon; at its end the daemon and its jobs are stopped, the journal is kept."""

    def __init__(self, name: str, out: Path, rehearse: bool) -> None:
        self.name, self.out, self.rehearse = name, out, rehearse
        self.binary = binary()
        # A short path: the length of socket paths is limited.
        self.folder = Path(tempfile.mkdtemp(prefix="rm-"))
        self.state = self.folder / "s"
        self.daemon: subprocess.Popen[bytes] | None = None
        path = os.pathsep.join([str(ROOT / "python"),
                                *filter(None, [os.environ.get("PYTHONPATH")])])
        self.env = {**os.environ, "ROOMMATE_STATE": str(self.state), "PYTHONPATH": path}
        self.knows_sdk = "sdk:" in self.tool("submit", "--example").stdout

    def __enter__(self) -> Room:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # Prints the logs of a failed part, which are deleted below.
            print(self.tool("ps", "-o", "wide").stdout, file=sys.stderr)
            print((self.folder / "daemon.log").read_text()[-2000:] if self.daemon else "",
                  file=sys.stderr)
            for log in sorted(self.state.glob("jobs/*/log")):
                print(f"-- {log}\n{log.read_text(errors='replace')[-1500:]}", file=sys.stderr)
        self.down()
        journal = self.state / "journal.jsonl"
        if journal.exists():
            shutil.copy(journal, self.out / f"{self.name}.journal.jsonl")
        shutil.rmtree(self.folder, ignore_errors=True)

    def device(self) -> list[str]:
        """Flags for the shared device; in a rehearsal it is a core."""
        return ["--devices", "1"] if self.rehearse else ["--device", "cuda"]

    def up(self, policy: str, *flags: str, **sets: Any) -> None:
        words = [word for name, value in sets.items()
                 for word in ("--set", f"{name}={json.dumps(value)}")]
        command = [self.binary, "up", "--policy", policy, *self.device(), *words, *flags]
        with (self.folder / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(command, env=self.env, stderr=log, stdout=log)
        daemon = self.daemon
        self.until(lambda: self.tool("describe").returncode == 0 or daemon.poll() is not None, 120)
        if daemon.poll() is not None:
            log_text = (self.folder / "daemon.log").read_text()
            raise SystemExit(f"the daemon does not start: {log_text}")

    def down(self) -> None:
        if self.daemon is None or self.daemon.poll() is not None:
            return
        self.tool("down", "--stop-jobs")
        try:
            self.daemon.wait(60)
        except subprocess.TimeoutExpired:
            self.daemon.send_signal(signal.SIGKILL)
            self.daemon.wait()

    def tool(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.binary, *words], env=self.env, capture_output=True, text=True,
                              check=False)

    def ok(self, *words: str) -> str:
        done = self.tool(*words)
        if done.returncode != 0:
            raise RuntimeError(f"roommate {' '.join(words)}: {done.stderr}")
        return done.stdout

    def job(self, name: str, script: str, *words: object, sdk: bool = True,
            **fields: Any) -> dict[str, Any]:
        """A job file for one of the examples."""
        program = [str(REHEARSAL), script] if self.rehearse else [str(EXAMPLES / script)]
        command = [sys.executable, *program, *[str(w) for w in words]]
        if sdk:
            command += ["--ticks", str(self.folder / f"{name}.ticks")]
        known = {"sdk": True} if sdk and self.knows_sdk else {}
        # As in the measured profiles: loops are bound by the thread that launches kernels.
        env = {"OMP_NUM_THREADS": "2"}
        return {"name": name, "command": command, "workdir": str(self.folder), "env": env, **known,
                **fields}

    def submit(self, name: str, script: str, *words: object, **fields: Any) -> None:
        file = self.folder / f"{name}.yaml"
        file.write_text(json.dumps(self.job(name, script, *words, **fields)))
        self.ok("submit", str(file))

    def jobs(self) -> dict[str, dict[str, Any]]:
        return {job["name"]: job for job in json.loads(self.ok("ps", "-o", "json"))}

    def machine(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ok("describe", "-o", "json"))
        return found

    def steps(self) -> list[dict[str, Any]]:
        lines = (self.state / "journal.jsonl").read_text().splitlines()
        return [step for line in lines if (step := json.loads(line).get("step"))]

    def actions(self, kind: str) -> int:
        return sum(kind in action for step in self.steps() for action in step.get("actions", []))

    def notes(self, kind: str) -> list[tuple[str, Any]]:
        """Reasons of one type in the journal, with the names of their jobs."""
        names = {job["idx"]: name for name, job in self.jobs().items()}
        every = [(note["job"], note["why"]) for step in self.steps()
                 for note in step.get("notes", [])]
        return [(names[job], why[kind]) for job, why in every if isinstance(why, dict)
                and kind in why]

    def ticks(self, name: str) -> list[Tick]:
        file = self.folder / f"{name}.ticks"
        if not file.exists():
            return []
        found = []
        # The last line may be incomplete.
        for line in file.read_text().split("\n")[:-1]:
            at, batch, first, sms = line.split()
            found.append(Tick(float(at), int(batch), int(first), int(sms)))
        return found

    def rate(self, name: str, since: float, until: float) -> float:
        """Steps per second, from the first to the last step of the interval."""
        at = [t.at for t in self.ticks(name) if since <= t.at < until]
        return (len(at) - 1) / (at[-1] - at[0]) if len(at) > 1 else 0.0

    def count(self, name: str, since: float) -> int:
        return sum(t.at >= since for t in self.ticks(name))

    def watch(self, seconds: float, *names: str) -> list[float]:
        """Steps per second of these jobs over the next seconds."""
        began = time.monotonic()
        time.sleep(seconds)
        return [self.rate(name, began, time.monotonic()) for name in names]

    def until(self, holds: Callable[[], Any], within_s: float = 120.0) -> Any:
        end = time.monotonic() + within_s
        while not (found := holds()):
            if time.monotonic() > end:
                raise TimeoutError(f"condition not met after {within_s:.0f} s")
            time.sleep(0.05)
        return found

    def until_steps(self, name: str, count: int, within_s: float = 120.0) -> None:
        """Waits until the job has done this many further steps."""
        before = len(self.ticks(name))
        self.until(lambda: len(self.ticks(name)) >= before + count, within_s)

    def until_ended(self, within_s: float) -> float:
        began = time.monotonic()
        self.until(lambda: all(job["ended"] for job in self.jobs().values()), within_s)
        return time.monotonic() - began

    def process(self, name: str) -> int:
        """The process of the job, a child of its supervisor."""
        keeper = self.jobs()[name]["keeper_pid"]
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == keeper:
                    return int(stat.parent.name)
            except OSError:
                continue
        raise RuntimeError(f"{name} has no process")


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def rounded(value: Any) -> Any:
    """Rounds all floats to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(one) for one in value]
    return value
