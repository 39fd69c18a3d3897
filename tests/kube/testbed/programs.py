"""The programs of a testbed, and the keeper that runs them."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent.parent.parent
T = TypeVar("T")


class TestbedError(Exception):
    """Something of the testbed itself does not work: what, where, and what to do."""

    __test__ = False


@functools.cache
def program_folder() -> Path:
    """The folder of the programs; fails if one is missing or was changed. Verified once for a run of tests:
    whoever did it tells the processes that it starts by $ROOMMATE_KUBE_PROGRAMS.
    """
    if told := os.environ.get("ROOMMATE_KUBE_PROGRAMS"):
        return Path(told)
    done = subprocess.run([str(ROOT / "scripts/kube-programs"), "--check"], capture_output=True, text=True)
    if done.returncode:
        raise TestbedError(done.stderr.strip())
    os.environ["ROOMMATE_KUBE_PROGRAMS"] = done.stdout.strip()
    return Path(done.stdout.strip())


class Programs:
    """Runs programs that end with this object, and also when this process dies in whatever way."""

    def __init__(self) -> None:
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).parent / "keeper.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A Ctrl-C is for the tests; they close this then.
            start_new_session=True,
        )
        self._one_at_a_time = threading.Lock()
        self.folder = Path(self._answer()["folder"])
        self._orders: dict[str, dict[str, Any]] = {}
        (self.folder / "logs").mkdir()

    def start(
        self, name: str, argv: list[str | Path], *, env: dict[str, str] | None = None, is_init: bool = False
    ) -> None:
        order = {
            "start": name,
            "argv": [str(word) for word in argv],
            "env": {**os.environ, **(env or {})},
            "log": str(self.log(name)),
            "is_init": is_init,
        }
        self._orders[name] = order
        self._ask(order)

    def stop(self, name: str, number: int = signal.SIGTERM, within_s: float = 10.0) -> None:
        """Sends a signal and waits for the end; SIGKILL if it does not come in time."""
        self._ask({"stop": name, "signal": int(number), "within_s": within_s})

    def start_again(self, name: str) -> None:
        """Starts a program that was stopped, as before."""
        self._ask(self._orders[name])

    def pid(self, name: str) -> int | None:
        """The process of a program; none if it ended."""
        found: int | None = self._ask({"status": name})["pid"]
        return found

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def until(self, name: str, what: str, holds: Callable[[], T], within_s: float = 60.0) -> T:
        """Waits for something that a program has to bring about; fails at once if the program ends."""
        end = time.monotonic() + within_s
        while not (found := holds()):
            gone, late = self.pid(name) is None, time.monotonic() > end
            if gone or late:
                why = "it ended" if gone else f"not within {within_s:.0f} s"
                tail = "\n".join(self.log(name).read_text(errors="replace").splitlines()[-20:])
                raise TestbedError(f"{name}: {what}: {why}; its log ends with:\n{tail}")
            time.sleep(0.05)
        return found

    def close(self) -> None:
        """Ends everything; returns when nothing is left."""
        if self._keeper.stdin:
            self._keeper.stdin.close()
        try:
            self._keeper.wait(60)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            raise TestbedError(f"the testbed in {self.folder} does not end; its keeper was killed") from None
        finally:
            if self._keeper.stdout:
                self._keeper.stdout.close()

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        with self._one_at_a_time:
            assert self._keeper.stdin
            try:
                self._keeper.stdin.write(json.dumps(order) + "\n")
                self._keeper.stdin.flush()
            except (BrokenPipeError, ValueError):
                raise TestbedError(f"the keeper of the testbed in {self.folder} is gone") from None
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._keeper.stdout
        line = self._keeper.stdout.readline()
        if not line:
            raise TestbedError("the keeper of the testbed ended; its message is above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise TestbedError(answer["error"])
        return answer


def free_port() -> int:
    """A free port of loopback, below the range from which the kernel gives ports to clients."""
    for port in random.SystemRandom().sample(range(20000, 32000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise TestbedError("no free port on 127.0.0.1 between 20000 and 32000: end what listens there")
