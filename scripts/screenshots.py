#!/usr/bin/env python3
"""Pictures of the terminal for the docs: docs/images/{top,detail,ps,describe}.svg.

A daemon runs jobs of examples/, more than there are devices; each picture shows what the program
draws on a pseudo-terminal, cell by cell. The program is target/release/roommate, or $ROOMMATE_BIN.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/live"))

from conftest import BINARY, Room  # noqa: E402
from terminal import Terminal  # noqa: E402


def shoot(
    room: Room, name: str, words: list[str], columns: int, rows: int, keys: str = "",
    seconds: float = 2.0
) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {**room.env, "TERM": "xterm-256color"}
    with subprocess.Popen([BINARY, *words], env=env, stdin=theirs, stdout=theirs,
                          stderr=theirs) as process:
        terminal, end, pressed = Terminal(columns, rows), time.monotonic() + seconds, False
        decoder = codecs.getincrementaldecoder("utf-8")()
        while time.monotonic() < end:
            if time.monotonic() > end - seconds / 2 and not pressed:
                os.write(ours, keys.encode())
                pressed = True
            if select.select([ours], [], [], 0.1)[0]:
                terminal.feed(decoder.decode(os.read(ours, 1 << 20)))
        if process.poll() is None:
            process.kill()
    os.close(ours)
    os.close(theirs)
    used = max((row for (row, _), (letter, _) in terminal.cells.items() if letter != " "),
               default=0)
    terminal.rows = used + 1
    path = ROOT / "docs/images" / f"{name}.svg"
    path.parent.mkdir(exist_ok=True)
    path.write_text(terminal.svg(" ".join(["roommate", *words])))
    print(path.relative_to(ROOT), f"{path.stat().st_size} bytes")


def main() -> None:
    room = Room()
    # A typical path for the pictures; it must not exist yet.
    room.state = Path("/var/lib/roommate")
    room.state.mkdir()
    room.env["ROOMMATE_STATE"] = str(room.state)
    try:
        room.up("--policy", "mps-split", "--devices", "2")

        def submit(name: str, steps: int, *flags: str, **fields: object) -> None:
            command = ["python3", "train.py", "--steps", str(steps), *flags]
            room.submit(name, command, steps=steps, workdir=str(ROOT / "examples"), **fields)

        best_effort = {"class": "best-effort"}
        submit("warm-up", 20, "--hidden", "8")
        room.until_ended("warm-up")
        submit("reads-a", 2000, "--hidden", "8", "--storage-ms", "40", team="vision")
        submit("computes-a", 2000, "--hidden", "60", team="vision")
        submit("computes-b", 2000, "--hidden", "60", **best_effort)
        submit("reads-b", 2000, "--hidden", "8", "--storage-ms", "40", **best_effort)
        submit("computes-c", 2000, "--hidden", "60", team="speech")
        room.submit("unmodified", "sleep 600")
        time.sleep(12)
        shoot(room, "top", ["top"], 100, 26)
        shoot(room, "detail", ["top"], 100, 26, keys="\x1b[B\r")
        shoot(room, "ps", ["ps"], 100, 20)
        shoot(room, "describe", ["describe", "reads-a"], 100, 26)
    finally:
        room.close()
        shutil.rmtree(room.state, ignore_errors=True)


if __name__ == "__main__":
    main()
