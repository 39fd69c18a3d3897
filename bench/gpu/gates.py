"""The gate on kernel launches alone, without a daemon: its cost, how soon it holds, what it survives.

A part of run.sh. Training processes get the library and a lease file as the daemon would give them;
this script is the holder. Processes take turns of 2 s for the cost.

| row | what is measured | goal |
|---|---|---|
| cost | speed of training with the library, and with a holder that attends, of that without it | 0.98 |
| held | time from closing to the last launch that passes, from opening to the first | 1 ms |
| killed | time from SIGKILL of a holder that keeps the gate closed to the next launch | 100 ms |
| gang | launches of two processes with one file while it is closed | 0 |
| capture | CUDA graphs captured and replayed while the gate closes and opens, and their results | equal |
| forks | training with forked data loaders while the gate closes and opens | all steps |
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from room import EXAMPLES, ROOT, binary, median

from bench import Bench

HERE = Path(__file__).resolve().parent
STAND_IN = ROOT / "crates/roommate-gate/tests/stand-in"
TASKS = (("gpt2-lm", 16), ("resnet50-imagenet", 64), ("vit-b16-imagenet", 64))

# The layout of a lease file: crates/roommate-lease/src/page.rs.
MAGIC, BYTES, LINE, HOLDERS, ENTRIES = b"rmLease\x01", 4096, 64, 16, 47


class Leases:
    """A lease file, of which this process is the holder 0."""

    def __init__(self, file: Path) -> None:
        if not file.exists():
            file.write_bytes(MAGIC.ljust(BYTES, b"\0"))
        with file.open("r+b") as opened:
            self.page = mmap.mmap(opened.fileno(), BYTES)
        self.closed = ctypes.c_uint64.from_buffer(self.page, LINE)
        self.attended = ctypes.c_uint64.from_buffer(self.page, LINE + 8)

    def close(self, seconds: float) -> None:
        self.closed.value = time.monotonic_ns() + int(seconds * 1e9)

    def open(self) -> None:
        self.closed.value = 0

    def attend(self, seconds: float) -> None:
        self.attended.value = time.monotonic_ns() + int(seconds * 1e9) if seconds else 0

    def launches(self, pid: int) -> ctypes.c_uint64:
        """The count of a process's launches, which changes as it launches."""
        for n in range(ENTRIES):
            at = LINE * (1 + HOLDERS + n)
            if struct.unpack_from("I", self.page, at)[0] == pid:
                return ctypes.c_uint64.from_buffer(self.page, at + 8)
        raise RuntimeError(f"{pid} has not launched anything")

    def pids(self) -> list[int]:
        found = [struct.unpack_from("I", self.page, LINE * (1 + HOLDERS + n))[0] for n in range(ENTRIES)]
        return [pid for pid in found if pid]


class Place:
    """A folder with a lease file, and the processes that use it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.folder = Path(tempfile.mkdtemp(prefix="rm-"))
        self.leases = Leases(self.folder / "gate")
        self.started: list[subprocess.Popen[bytes]] = []
        if bench.rehearse:
            self.build()

    def build(self) -> None:
        """The invented driver of the gate's tests, and a program that launches."""
        shared = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        for to, source, flags in (("libcuda.so.1", "cuda.c", shared),
                                  ("launcher", "launcher.c", ["-pthread", "-ldl"])):
            words = ["cc", "-O2", "-o", str(self.folder / to), str(STAND_IN / source), *flags]
            subprocess.run(words, check=True)

    def env(self, name: str, gated: bool) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2"}
        if self.bench.rehearse:
            env |= {"LD_LIBRARY_PATH": str(self.folder), "STANDIN_KERNEL_US": "100",
                    "STANDIN_LOG": str(self.folder / f"{name}.log")}
        if gated:
            env |= {"LD_PRELOAD": str(library()), "ROOMMATE_GATE": str(self.folder / "gate")}
        return env

    def start(self, name: str, words: list[str], gated: bool = True) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("wb") as out:
            one = subprocess.Popen(words, env=self.env(name, gated), stdout=out, stderr=out)
        self.started.append(one)
        return one

    def train(self, name: str, task: str, batch: int, *words: str,
              gated: bool = True, steps: str = "1e12") -> subprocess.Popen[bytes]:
        """Training that goes on until it is ended, once it steps."""
        ticks = self.folder / f"{name}.ticks"
        command = [sys.executable, str(EXAMPLES / "train.py"), "--task", task, "--batch", str(batch),
                   "--steps", steps, "--save-s", "0", "--ticks", str(ticks), *words]
        if self.bench.rehearse:
            what, limit = ("fork", "600") if "--loader" in words else ("kernel", "600000")
            command = [str(self.folder / "launcher"), "v2", what, limit]
        one = self.start(name, command, gated)
        ends = time.monotonic() + 120
        while self.done(name) < 20 and one.poll() is None:
            if time.monotonic() > ends:
                raise TimeoutError(f"{name} does not start: {self.said(name)}")
            time.sleep(0.05)
        return one

    def times(self, name: str) -> list[float]:
        file = self.folder / f"{name}.ticks"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [float(line.split()[0]) for line in lines]

    def done(self, name: str) -> int:
        """Steps so far; in a rehearsal launches."""
        if not self.bench.rehearse:
            return len(self.times(name))
        log = self.folder / f"{name}.log"
        return int(struct.unpack("Q", log.read_bytes()[:8])[0]) if log.exists() else 0

    def speed(self, name: str, seconds: float) -> float:
        """Steps per second in the next seconds, after a third of a second in which it gets going."""
        time.sleep(0.3)
        began, before = time.monotonic(), self.done(name)
        time.sleep(seconds)
        if self.bench.rehearse:
            return (self.done(name) - before) / (time.monotonic() - began)
        at = [t for t in self.times(name) if t >= began]
        return (len(at) - 1) / (at[-1] - at[0]) if len(at) > 1 else 0.0

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text(errors="replace")[-1500:]

    def end(self) -> None:
        self.leases.open()
        for one in self.started:
            with contextlib.suppress(ProcessLookupError):
                one.send_signal(signal.SIGCONT)
                one.kill()
            one.wait()
        self.started.clear()


def library() -> Path:
    given = os.environ.get("ROOMMATE_GATE_LIBRARY")
    place = Path(given) if given else Path(binary()).resolve().parent / "libroommate_gate.so"
    if not place.is_file():
        raise SystemExit(f"no library at {place}: cargo build --release")
    return place


@contextlib.contextmanager
def place(bench: Bench) -> Iterator[Place]:
    made = Place(bench)
    try:
        yield made
    finally:
        made.end()
        shutil.rmtree(made.folder, ignore_errors=True)


@contextlib.contextmanager
def toggled(leases: Leases) -> Iterator[None]:
    """The gate is closed for 5 of every 20 ms, and attended."""
    over = threading.Event()

    def toggle() -> None:
        dice = random.Random(7)
        while not over.is_set():
            leases.attend(3.0)
            leases.close(0.05)
            time.sleep(0.005)
            leases.open()
            time.sleep(dice.uniform(0.005, 0.025))
        leases.attend(0.0)

    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# ---- rows ----------------------------------------------------------------------------


def cost(bench: Bench, at: Place) -> None:
    """The same training without the library, with it, and attended, in turns of 2 s."""
    for task, batch in TASKS[:1] if bench.rehearse else TASKS:
        bench.left_s()
        plain = at.train("plain", task, batch, gated=False)
        plain.send_signal(signal.SIGSTOP)
        gated = at.train("gated", task, batch)
        gated.send_signal(signal.SIGSTOP)
        speeds: dict[str, list[float]] = {"plain": [], "library": [], "attended": []}
        for _ in range(2 if bench.rehearse else 6):
            for way, found in speeds.items():
                one, name = (plain, "plain") if way == "plain" else (gated, "gated")
                at.leases.attend(10.0 if way == "attended" else 0.0)
                one.send_signal(signal.SIGCONT)
                found.append(at.speed(name, bench.seconds(2.0)))
                one.send_signal(signal.SIGSTOP)
                # What was launched runs to its end.
                time.sleep(0.2)
        at.leases.attend(0.0)
        at.end()
        base = median(speeds["plain"]) or 1.0
        bench.row(what="cost", task=task, batch=batch, steps_per_s=base,
                  library=median(speeds["library"]) / base,
                  attended=median(speeds["attended"]) / base,
                  spread=statistics.pstdev(speeds["plain"]) / base)


def held(bench: Bench, at: Place) -> None:
    """How soon launches stop and go on, 60 times."""
    one = at.train("train", "gpt2-lm", 16)
    at.leases.attend(10.0)
    time.sleep(bench.seconds(3.0))
    count, dice = at.leases.launches(one.pid), random.Random(7)
    last, first = [], []
    for _ in range(10 if bench.rehearse else 60):
        at.leases.attend(10.0)
        time.sleep(dice.uniform(0.02, 0.08))
        at.leases.close(0.2)
        last.append(last_change(count, 0.03))
        at.leases.open()
        first.append(first_change(count, 1.0))
    at.leases.attend(0.0)
    at.end()
    bench.row(what="held", times=len(last), held_within_ms=1e3 * max(last), held_p50_ms=1e3 * median(last),
              open_within_ms=1e3 * max(first), open_p50_ms=1e3 * median(first))


def last_change(count: ctypes.c_uint64, seconds: float) -> float:
    """When the count changed last in the next seconds, after their beginning."""
    began = time.perf_counter()
    known, changed = count.value, 0.0
    while (passed := time.perf_counter() - began) < seconds:
        if count.value != known:
            known, changed = count.value, passed
    return changed


def first_change(count: ctypes.c_uint64, seconds: float) -> float:
    began, known = time.perf_counter(), count.value
    while (passed := time.perf_counter() - began) < seconds:
        if count.value != known:
            break
    return passed


HOLD = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from gates import Leases
leases = Leases(Path(sys.argv[2]))
while True:
    leases.close(0.05)
    time.sleep(0.01)
"""


def killed(bench: Bench, at: Place) -> None:
    """A holder that renews the lease like a front is killed."""
    one = at.train("train", "gpt2-lm", 16)
    count, after = at.leases.launches(one.pid), []
    for _ in range(3 if bench.rehearse else 10):
        words = [sys.executable, "-c", HOLD, str(HERE), str(at.folder / "gate")]
        holder = subprocess.Popen(words)
        while last_change(count, 0.1) > 0.0:
            bench.left_s()
        holder.send_signal(signal.SIGKILL)
        after.append(first_change(count, 2.0))
        holder.wait()
        time.sleep(0.3)
    at.end()
    bench.row(what="killed", times=len(after), open_within_ms=1e3 * max(after),
              open_p50_ms=1e3 * median(after))


def gang(bench: Bench, at: Place) -> None:
    """Two processes with one file are held together and go on together."""
    ranks = [at.train(f"rank{n}", "resnet50-imagenet", 64) for n in range(2)]
    counts = [at.leases.launches(one.pid) for one in ranks]
    passed, resumed = [0, 0], [0, 0]
    for _ in range(5):
        at.leases.close(0.2)
        time.sleep(0.01)
        before = [count.value for count in counts]
        time.sleep(0.1)
        between = [count.value for count in counts]
        at.leases.open()
        time.sleep(bench.seconds(1.6))
        passed = [p + b - a for p, a, b in zip(passed, before, between, strict=True)]
        resumed = [r + (c.value > b) for r, c, b in zip(resumed, counts, between, strict=True)]
    at.end()
    bench.row(what="gang", launches_while_closed=passed, went_on=resumed, of=5)


def survivors(bench: Bench, at: Place) -> None:
    """Capture of graphs, and forked data loaders, while the gate closes and opens."""
    command = [sys.executable, str(HERE / "captures.py")]
    if bench.rehearse:
        command = [str(at.folder / "launcher"), "v2", "capture", "1000", "1", "2000"]
    with toggled(at.leases):
        one = at.start("capture", command)
        status = one.wait(150)
    said = at.said("capture").strip().splitlines()
    bench.row(what="capture", status=status, said=said[-1] if said else "")
    with toggled(at.leases):
        one = at.train("forks", "resnet18-imagenet", 128, "--loader", "--workers", "4", steps="150")
        status = one.wait(150)
    bench.row(what="forks", status=status, done=at.done("forks"), of=None if bench.rehearse else 150)
    at.end()


def gate(bench: Bench) -> None:
    """The gate alone: cost, delays, a killed holder, gangs, capture of graphs, forked data loaders."""
    for row in (cost, held, killed, gang, survivors):
        bench.left_s()
        with place(bench) as at:
            row(bench, at)
