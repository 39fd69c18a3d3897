"""A real daemon with real processes, in a temporary folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BINARY = os.environ.get("ROOMMATE_BIN") or str(ROOT / "target/release/roommate")


class Room:
    """A folder with the state and job files, and the program to work with them."""

    def __init__(self) -> None:
        # Not pytest's own folder, whose path is too long for a socket.
        self.folder = Path(tempfile.mkdtemp(prefix="rm-"))
        self.state = self.folder / "s"
        self.daemon: subprocess.Popen[str] | None = None
        # Variables of the environment that jobs get besides the usual ones.
        self.passed: list[str] = []
        python = str(ROOT / "python")
        self.env = {**os.environ, "ROOMMATE_STATE": str(self.state), "PYTHONPATH": python}

    def up(self, *flags: str, **popen: Any) -> None:
        popen = {"stderr": subprocess.PIPE, **popen}
        self.daemon = subprocess.Popen([BINARY, "up", *flags], env=self.env, text=True, **popen)
        daemon = self.daemon
        self.until(lambda: self.tool("describe").returncode == 0 or daemon.poll() is not None)
        if daemon.poll() is not None:
            raise AssertionError(f"the daemon does not start: {daemon.communicate()[1]}")

    def kill(self) -> None:
        """Kills the daemon with SIGKILL."""
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait()
        if self.daemon.stderr:
            self.daemon.stderr.close()

    def tool(self, *words: str, **run: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run([BINARY, *words], env=self.env, capture_output=True, text=True, **run)

    def ok(self, *words: str) -> str:
        done = self.tool(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def job(self, name: str, text: str) -> str:
        path = self.folder / f"{name}.yaml"
        path.write_text(text)
        return str(path)

    def submit(self, name: str, command: list[str] | str, **fields: Any) -> str:
        # What of the environment reaches a job is the daemon's decision; the mark always has to.
        env = {**dict([MARK.split("=")]), **fields.pop("env", {})}
        file = self.job(name, json.dumps({"command": command, "env": env, **fields}))
        passed = [word for name in self.passed for word in ("--env", name)]
        return self.ok("submit", *passed, file).strip()

    def python(self, name: str, code: str, **fields: Any) -> str:
        return self.submit(name, [sys.executable, "-c", code], **fields)

    def jobs(self) -> dict[str, dict[str, Any]]:
        return {j["name"]: j for j in json.loads(self.ok("ps", "-o", "json"))}

    def state_of(self, job: str) -> str:
        return str(self.jobs()[job]["state"])

    def pid_of(self, job: str) -> int:
        """The process of a job's command; a job counts as running a moment before it is known."""
        return int(self.until(lambda: self.jobs()[job]["pid"]))

    def steps(self) -> list[dict[str, Any]]:
        lines = (self.state / "journal.jsonl").read_text().splitlines()
        return [step for line in lines if (step := json.loads(line).get("step"))]

    def actions(self, kind: str) -> list[Any]:
        return [a[kind] for s in self.steps() for a in s.get("actions", []) if kind in a]

    def until(self, holds: Callable[[], Any], within_s: float = 30.0) -> Any:
        end = time.monotonic() + within_s
        while not (found := holds()):
            late = f"condition not met after {within_s} s"
            assert time.monotonic() < end, f"{late}: {self.tool('ps').stdout}"
            time.sleep(0.02)
        return found

    def until_ended(self, *jobs: str, within_s: float = 60.0) -> None:
        self.until(lambda: all(self.jobs()[j]["ended"] for j in jobs), within_s)

    def replays(self) -> bool:
        """Whether every part of the journal replays with the same decisions."""
        parts = [str(p) for p in self.state.glob("journal.jsonl*")]
        return all(line.startswith("same: ") for line in self.ok("replay", *parts).splitlines())

    def close(self) -> None:
        if self.daemon is not None:
            if self.daemon.poll() is not None and (self.state / "log").exists():
                # Only a daemon finds the jobs of its predecessor; if it cannot start, there are
                # none.
                with contextlib.suppress(AssertionError):
                    self.up()
            if self.daemon.poll() is None:
                self.tool("down", "--stop-jobs")
                try:
                    self.daemon.wait(20)
                except subprocess.TimeoutExpired:
                    self.daemon.send_signal(signal.SIGKILL)
                    self.daemon.wait()
            if self.daemon.stderr:
                self.daemon.stderr.close()
        self.end_leftovers()
        shutil.rmtree(self.folder, ignore_errors=True)

    def end_leftovers(self) -> None:
        """Kills what a daemon that lost its state left behind: keepers, and jobs by their socket."""
        ours = f"{self.state}/".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
                if ours in words and int(folder.name) != os.getpid():
                    os.kill(int(folder.name), signal.SIGKILL)


class BackgroundLoad:
    """CPU use of processes outside the tests, from the creation of this object on."""

    MUCH = 0.1
    """Cores in use by other processes from which on they disturb measurements."""

    def __init__(self) -> None:
        self._began, self._busy_s, self._own_s = time.monotonic(), machine_cpu_s(), own_cpu_s()

    def cores(self) -> float:
        busy_s, own_s = machine_cpu_s() - self._busy_s, own_cpu_s() - self._own_s
        return max(0.0, busy_s - own_s) / (time.monotonic() - self._began)

    def assert_high(self, seen: object) -> float:
        """Fails with what was seen unless the background load was high: only then may a
        measurement be repeated.
        """
        cores = self.cores()
        assert cores > self.MUCH, f"{seen}, and other processes used only {cores:.2f} cores"
        return cores


def machine_cpu_s() -> float:
    """CPU time of all processes so far, including time stolen by a hypervisor."""
    times = map(int, Path("/proc/stat").read_text().split()[1:9])
    user, nice, system, _, _, irq, softirq, steal = times
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    """CPU time of this process and all processes with the tests' mark, including children that
    they waited for.
    """
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environ = (folder / "environ").read_bytes()
            if int(folder.name) == os.getpid() or MARK.encode() in environ:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


MARK = f"ROOMMATE_TESTS={os.getpid()}"
"""Is in the environment of every process that a test starts, and of their children."""
os.environ.update([MARK.split("=")])


@pytest.fixture(autouse=True, scope="session")
def quiet() -> None:
    """Raises the priority of the tests where permitted, against other load on the machine."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)


@pytest.fixture
def room() -> Iterator[Room]:
    it = Room()
    yield it
    it.close()


def group_stats(group: int) -> Iterator[list[str]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group:
                yield fields


def group_cpu_s(group: int) -> float:
    """CPU time of a process group."""
    return sum(int(f[11]) + int(f[12]) for f in group_stats(group)) / 100


def group_rss_mib(group: int) -> float:
    """Resident memory of a process group."""
    return sum(int(f[21]) for f in group_stats(group)) * os.sysconf("SC_PAGE_SIZE") / 2**20
