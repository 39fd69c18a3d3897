#!/usr/bin/env python3
"""A recording of a terminal session for the README: docs/images/session.svg.

A shell on a pseudo-terminal gets the commands of SESSION, typed; what it shows becomes an animation
in which each row of the screen changes when it changed. The program is target/release/roommate,
or $ROOMMATE_BIN. Its state is /var/lib/roommate, a typical path, which must not exist yet.
"""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import select
import shutil
import signal
import struct
import tempfile
import termios
import time
from html import escape
from pathlib import Path

from terminal import BACK, CELL_H, CELL_W, MARGIN, Terminal

ROOT = Path(__file__).resolve().parent.parent
BINARY = Path(os.environ.get("ROOMMATE_BIN") or ROOT / "target/release/roommate").resolve()
COLUMNS, ROWS = 110, 27
STATE = Path("/var/lib/roommate")
FRAME_S = 0.1
KEY_S = 0.05

SESSION = [
    # What is typed, and how long it is shown.
    ("roommate run examples/mix.yaml\r", 6.5),
    ("clear\r", 0.3),
    ("roommate up --devices 2 2> up.log &\r", 1.2),
    ("roommate submit jobs/*.yaml\r", 1.0),
    ("roommate top\r", 5.0),
    ("\x1b[B", 0.5),
    ("\x1b[B", 0.5),
    ("\r", 3.5),
    ("\x1b", 0.5),
    ("q", 0.8),
    ("roommate explain reads-a\r", 4.0),
]

JOBS = {
    "reads-a": ["--hidden", "8", "--storage-ms", "40"],
    "computes-a": ["--hidden", "60"],
    "computes-b": ["--hidden", "60"],
    "reads-b": ["--hidden", "8", "--storage-ms", "40"],
}

Frames = list[tuple[float, list[str]]]


class Shell:
    """A shell on a pseudo-terminal, and what its screen showed when."""

    def __init__(self, folder: Path) -> None:
        env = {
            **os.environ,
            "PATH": f"{BINARY.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "python"),
            "ROOMMATE_STATE": str(STATE),
            "TERM": "xterm-256color",
            "PS1": "\x1b[38;5;2m$\x1b[39m ",
        }
        self.terminal = Terminal(COLUMNS, ROWS)
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.frames: Frames = []
        self.now = 0.0
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            # Job control off: no message when the daemon ends.
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "+m"], env)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))

    def watch(self, seconds: float) -> None:
        """Takes a picture of the screen after each change, at most one for each frame."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            step = min(FRAME_S, left)
            until = time.monotonic() + step
            while select.select([self.fd], [], [], max(until - time.monotonic(), 0))[0]:
                self.terminal.feed(self.decoder.decode(os.read(self.fd, 1 << 16)))
            self.now += step
            rows = ["".join(self.terminal.row(row, 0)) for row in range(ROWS)]
            if not self.frames or self.frames[-1][1] != rows:
                self.frames.append((self.now, rows))

    def type(self, text: str, seconds: float) -> None:
        keys = [text] if text.startswith("\x1b") else list(text)
        for key in keys:
            os.write(self.fd, key.encode())
            self.watch(KEY_S if key != keys[-1] else seconds)

    def close(self) -> None:
        os.write(self.fd, b"roommate down --stop-jobs\r")
        self.watch(3.0)
        os.kill(self.pid, signal.SIGHUP)
        os.close(self.fd)
        os.waitpid(self.pid, 0)


def record() -> tuple[Frames, float]:
    folder = Path(tempfile.mkdtemp())
    STATE.mkdir()
    try:
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "jobs").mkdir()
        for name, flags in JOBS.items():
            command = ["python3", "train.py", "--steps", "2000", *flags]
            job = {"command": command, "workdir": str(ROOT / "examples"), "steps": 2000}
            (folder / f"jobs/{name}.yaml").write_text(json.dumps(job))
        shell = Shell(folder)
        try:
            shell.watch(1.0)
            for text, seconds in SESSION:
                shell.type(text, seconds)
            frames, seconds = list(shell.frames), shell.now
        finally:
            shell.close()
        return frames, seconds
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(STATE, ignore_errors=True)


def spans(frames: Frames, row: int, end: float) -> list[tuple[str, float, float]]:
    """What a row showed, from when to when."""
    found: list[tuple[str, float, float]] = []
    for index, (start, rows) in enumerate(frames):
        until = frames[index + 1][0] if index + 1 < len(frames) else end
        if found and found[-1][0] == rows[row]:
            found[-1] = (rows[row], found[-1][1], until)
        else:
            found.append((rows[row], start, until))
    return [span for span in found if span[0]]


def shown(start: float, until: float, end: float) -> str:
    """The animation of what is visible in this part of the whole only."""
    at = [0.0, start / end, until / end]
    values = ["hidden", "visible", "hidden"]
    if until >= end:
        at, values = at[:2], values[:2]
    if start <= 0:
        at, values = [0.0, *at[2:]], values[1:]
    times = ";".join(f"{t:.4f}".rstrip("0").rstrip(".") for t in at)
    return (
        f'<animate attributeName="visibility" calcMode="discrete" dur="{end:.1f}s" '
        f'repeatCount="indefinite" values="{";".join(values)}" keyTimes="{times}"/>'
    )


def svg(frames: Frames, end: float) -> str:
    width, height = COLUMNS * CELL_W + 2 * MARGIN, ROWS * CELL_H + 2 * MARGIN
    names: dict[str, str] = {}
    body = []
    for row in range(ROWS):
        for drawn, start, until in spans(frames, row, end):
            name = names.setdefault(drawn, f"r{len(names)}")
            # Where nothing moves, the last picture is shown.
            last = "" if until >= end else ' visibility="hidden"'
            body.append(
                f'<use href="#{name}" y="{MARGIN + row * CELL_H}"{last}>{shown(start, until, end)}</use>'
            )
    rows = [f'<g id="{name}">{drawn}</g>' for drawn, name in names.items()]
    typed = ", ".join(text.strip() for text, _ in SESSION if text.startswith("roommate"))
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-size="13" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, '
        'monospace">',
        f"<title>{escape(typed)}</title>",
        f'<rect width="{width}" height="{height}" rx="6" fill="{BACK}"/>',
        "<defs>", *rows, "</defs>", *body, "</svg>", "",
    ])  # fmt: skip


def main() -> None:
    path = ROOT / "docs/images/session.svg"
    frames, seconds = record()
    path.write_text(svg(frames, seconds))
    print(path.relative_to(ROOT), f"{seconds:.0f} s, {len(frames)} frames, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
