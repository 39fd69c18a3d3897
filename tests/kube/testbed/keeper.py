"""Keeps the programs of one testbed, and removes everything of it once nobody needs it any more.

A process of its own, so that nothing stays when the tests die, even by SIGKILL: it ends when its standard
input closes. All programs die with it. What a SIGKILL of the keeper itself leaves in files, cgroups and
network links is removed when the next keeper starts.

On standard input, one JSON object per line:
    {"start": NAME, "argv": [...], "env": {...}, "log": PATH, "is_init": BOOL}
    {"stop": NAME, "signal": N, "within_s": S}      SIGKILL after S seconds
    {"status": NAME}
Each is answered by a line on standard output: {"pid": N or null, "code": N or null}, or {"error": TEXT}.
The first line of all is {"folder": PATH}: the folder of this testbed, in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

MEMORY = Path("/dev/shm")
PREFIX = "roommate-kube-"
CGROUPS = Path("/sys/fs/cgroup")
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


class Program:
    def __init__(self, order: dict[str, Any]) -> None:
        keeper = os.getpid()

        def die_with_keeper() -> None:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(1)

        # The first process of a PID namespace ends with all that are in it; its parent only
        # starts it.
        self.is_init = bool(order.get("is_init"))
        with open(order["log"], "ab") as log:
            self.process = subprocess.Popen(
                order["argv"],
                env=order["env"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_keeper,
            )

    def targets(self) -> list[int]:
        pid = self.process.pid
        if not self.is_init:
            return [pid]
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return [int(child) for child in children] or [pid]
        return [pid]

    def stop(self, number: int, within_s: float) -> None:
        for how, wait_s in ((number, within_s), (signal.SIGKILL, 30.0)):
            if self.process.poll() is None:
                for pid in self.targets():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, how)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(wait_s)

    def status(self) -> dict[str, Any]:
        code = self.process.poll()
        return {"pid": self.process.pid if code is None else None, "code": code}


class Keeper:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs: dict[str, Program] = {}

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if name := order.get("start"):
            old = self.programs.get(name)
            if old and old.process.poll() is None:
                return {"error": f"{name} runs already"}
            try:
                self.programs[name] = Program(order)
            except OSError as error:
                return {"error": f"{name} does not start: {error}"}
        elif name := order.get("stop"):
            if name in self.programs:
                self.programs[name].stop(order["signal"], order["within_s"])
        else:
            name = order["status"]
        if name not in self.programs:
            return {"error": f"there is no {name}"}
        return self.programs[name].status()

    def serve(self) -> None:
        """Obeys until the input closes or a signal asks for the end."""
        wake, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        rest = b""
        while True:
            ready, _, _ = select.select([0, wake], [], [])
            if wake in ready:
                return
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                say(self.obey(json.loads(line)))

    def end(self) -> None:
        for program in reversed(self.programs.values()):
            program.stop(signal.SIGKILL, 30.0)
        remove(self.folder)


def say(answer: dict[str, Any]) -> None:
    # Whoever asked may be gone; the end of the input tells.
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(answer).encode() + b"\n")


def links(folder: Path) -> list[str]:
    """The network links of a testbed: their names begin like this."""
    prefix = link_prefix(folder)
    return [link.name for link in Path("/sys/class/net").iterdir() if link.name.startswith(prefix)]


def link_prefix(folder: Path) -> str:
    return f"rk{folder.name.removeprefix(PREFIX)}"


def cgroups(folder: Path) -> list[Path]:
    """The cgroups of a testbed; with version 1 there is one in each hierarchy."""
    return [path for path in (CGROUPS / folder.name, *CGROUPS.glob(f"*/{folder.name}")) if path.is_dir()]


def remove(folder: Path) -> None:
    """Removes what a testbed made outside its processes."""
    end = time.monotonic() + 10.0
    while cgroups(folder) and time.monotonic() < end:
        for top in cgroups(folder):
            for path, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    for pid in (Path(path) / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
                with contextlib.suppress(OSError):
                    os.rmdir(path)
        time.sleep(0.02)
    for link in links(folder):
        subprocess.run(["ip", "link", "delete", link], capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def take_folder() -> tuple[Path, int]:
    """Makes a folder that is locked as long as this process lives; removes those that nobody holds."""
    memory = os.open(MEMORY, os.O_RDONLY)
    fcntl.flock(memory, fcntl.LOCK_EX)
    for old in MEMORY.glob(f"{PREFIX}*"):
        lock = os.open(old, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            remove(old)
        finally:
            os.close(lock)
    folder = MEMORY / f"{PREFIX}{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.close(memory)
    return folder, lock


def main() -> None:
    folder, _held = take_folder()
    keeper = Keeper(folder)
    try:
        say({"folder": str(folder)})
        keeper.serve()
    finally:
        keeper.end()


if __name__ == "__main__":
    main()
