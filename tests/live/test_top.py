"""`roommate top` on a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable

import pytest
from conftest import BINARY, Room

LOOP = """
import roommate, time
for _ in roommate.steps(lambda size: time.sleep(0.01) or size, batch_size=8): pass
"""


class Screen:
    """A terminal on which `roommate top` draws."""

    def __init__(self, room: Room, columns: int = 80, rows: int = 24, every_s: float = 0.2) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        self.seen = ""
        self.process = subprocess.Popen(
            [BINARY, "top", "--every", str(every_s)],
            env={**room.env, "TERM": "xterm-256color"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )

    def read(self) -> str:
        """Everything that was drawn so far; cells that did not change are drawn once."""
        while select.select([self.ours], [], [], 0.05)[0]:
            try:
                self.seen += os.read(self.ours, 65536).decode(errors="replace")
            except OSError:
                break
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", " ", self.seen)

    def until(self, holds: Callable[[str], bool], within_s: float = 20.0) -> None:
        end = time.monotonic() + within_s
        while not holds(self.read()):
            assert time.monotonic() < end, f"never drawn: {self.read()[-3000:]}"

    def press(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def ended(self) -> int:
        end = time.monotonic() + 10
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < end, "it does not end"
        return self.process.returncode

    def is_restored(self) -> bool:
        """Whether modes, screen and cursor of the terminal are restored."""
        self.read()
        shown = self.seen.rfind("\x1b[?25h") > self.seen.rfind("\x1b[?25l")
        left = self.seen.rfind("\x1b[?1049l") > self.seen.rfind("\x1b[?1049h") > -1
        return shown and left and termios.tcgetattr(self.theirs) == self.before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


def test_a_job_is_shown_suspended_and_cancelled(room: Room) -> None:
    room.up("--policy", "fifo", "--devices", "1")
    room.python("trains", LOOP, steps=100_000)
    room.submit("waits", "sleep 1000")
    room.until(lambda: room.jobs()["trains"]["cooperative"])
    screen = Screen(room)
    try:
        screen.until(lambda text: "trains" in text and "running" in text and "waits" in text)
        screen.press("\r")
        screen.until(lambda text: "speaks with the machine through the SDK" in text)
        screen.press("\x1b")
        screen.press("s")
        room.until(lambda: room.state_of("trains") == "suspended")
        screen.press("r")
        room.until(lambda: room.state_of("trains") == "running")
        screen.press("\x1b[B")  # arrow down: the job that waits
        screen.press("c")
        screen.until(lambda text: "cancel waits?" in re.sub(r" +", " ", text))
        assert room.state_of("waits") == "pending"
        screen.press("y")
        room.until(lambda: room.state_of("waits") == "cancelled")
        screen.press("q")
        assert screen.ended() == 0 and screen.is_restored()
    finally:
        screen.close()


@pytest.mark.parametrize("how", ["key", "signal"])
def test_a_lost_daemon_is_shown_until_it_is_back(room: Room, how: str) -> None:
    room.up("--policy", "fifo", "--devices", "1")
    room.submit("sleeps", "sleep 1000")
    screen = Screen(room, 120, 40)
    try:
        screen.until(lambda text: "sleeps" in text)
        room.kill()
        screen.until(lambda text: "no answer, trying again" in text)
        assert screen.process.poll() is None
        room.up()
        screen.until(lambda text: "1 device" in text.rpartition("no answer")[2])
        if how == "key":
            screen.press("\x03")
        else:
            screen.process.send_signal(signal.SIGINT)
        assert screen.ended() == 0 and screen.is_restored()
    finally:
        screen.close()


def test_without_a_terminal_one_frame_is_printed(room: Room) -> None:
    assert "no daemon answers" in room.tool("top").stderr
    room.up("--policy", "fifo", "--devices", "2")
    assert "no jobs" in room.ok("top")
    room.python("trains", LOOP, steps=100_000, share=0.5)
    room.until(lambda: room.jobs()["trains"]["cooperative"])
    text = room.ok("top", "--once", "--size", "80x24")
    assert "1 of 2 in use" in text and "a trains 50%" in text and "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "aaaaaaaaaaaaa·············" in text
