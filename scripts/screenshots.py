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
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/live"))

from conftest import BINARY, Room  # noqa: E402

BASIC = ["#1d1f21", "#cc6666", "#8fbf6b", "#e6c07b", "#6ca6d9", "#b48ead", "#6fc3c3", "#c5c8c6"]
BRIGHT = ["#767b80", "#d98080", "#a6d67f", "#f0d294", "#8abbe6", "#c9a7c4", "#8ed8d8", "#ffffff"]
FRONT, BACK = "#c5c8c6", "#16181a"
CELL_W, CELL_H, MARGIN = 8, 17, 10


@dataclass(frozen=True)
class Style:
    front: str = FRONT
    back: str = BACK
    bold: bool = False


@dataclass
class Terminal:
    """Emulates the control sequences that the program uses."""

    columns: int
    rows: int
    at: tuple[int, int] = (0, 0)
    front: str = FRONT
    back: str = BACK
    bold: bool = False
    reverse: bool = False
    rest: str = ""
    cells: dict[tuple[int, int], tuple[str, Style]] = field(default_factory=dict)

    def feed(self, text: str) -> None:
        # A control sequence may be split between two reads.
        text = self.rest + text
        whole = re.sub(r"\x1b(\[[0-9;?]*)?$", "", text)
        self.rest, text = text[len(whole) :], whole
        for piece in re.finditer(r"\x1b\[([0-9;?]*)([a-zA-Z])|\x1b[()=>78].?|[\r\n\b]|.", text,
                                 re.DOTALL):
            whole, arguments, what = piece.group(0), piece.group(1), piece.group(2)
            if what:
                self.control(arguments, what)
            elif whole == "\r":
                self.at = (self.at[0], 0)
            elif whole == "\n":
                self.at = (self.at[0] + 1, self.at[1])
            elif whole[0] not in "\x1b\b":
                self.put(whole)

    def control(self, arguments: str, what: str) -> None:
        numbers = [int(n or 0) for n in arguments.split(";")] if "?" not in arguments else []
        if what == "H":
            row, column = [*numbers, 1, 1][:2] if arguments else (1, 1)
            self.at = (max(row, 1) - 1, max(column, 1) - 1)
        elif what == "J":
            self.cells.clear()
        elif what == "m":
            self.paint(numbers)

    def paint(self, numbers: list[int]) -> None:
        it = iter(numbers or [0])
        for n in it:
            if n == 0:
                self.front, self.back, self.bold, self.reverse = FRONT, BACK, False, False
            elif n in (1, 22):
                self.bold = n == 1
            elif n in (7, 27):
                self.reverse = n == 7
            elif n in (38, 48):
                kind, colour = next(it), next(it)
                assert kind == 5 and colour < 16, f"colour {kind};{colour}"
                value = (BASIC + BRIGHT)[colour]
                self.front, self.back = (value, self.back) if n == 38 else (self.front, value)
            elif n in (39, 49):
                self.front, self.back = (FRONT, self.back) if n == 39 else (self.front, BACK)

    def put(self, letter: str) -> None:
        row, column = self.at
        colours = (self.back, self.front) if self.reverse else (self.front, self.back)
        if row < self.rows and column < self.columns:
            self.cells[self.at] = (letter, Style(*colours, self.bold))
        self.at = (row, column + 1)

    def svg(self, command: str) -> str:
        width, height = self.columns * CELL_W + 2 * MARGIN, (self.rows + 2) * CELL_H + 2 * MARGIN
        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-size="13" '
            'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, '
            'monospace">',
            f'<rect width="{width}" height="{height}" rx="6" fill="{BACK}"/>',
            f'<text x="{MARGIN}" y="{MARGIN + 13}" fill="{BRIGHT[0]}">$ {escape(command)}</text>',
        ]
        for row in range(self.rows):
            column = 0
            while column < self.columns:
                _, style = self.cells.get((row, column), (" ", Style()))
                text = ""
                while column + len(text) < self.columns:
                    letter, other = self.cells.get((row, column + len(text)), (" ", Style()))
                    if other != style:
                        break
                    text += letter
                out.extend(self.run(row, column, text, style))
                column += len(text)
        return "\n".join([*out, "</svg>", ""])

    def run(self, row: int, column: int, text: str, style: Style) -> list[str]:
        x, y = MARGIN + column * CELL_W, MARGIN + (row + 2) * CELL_H - 8
        out = []
        if style.back != BACK:
            out.append(
                f'<rect x="{x}" y="{y}" width="{len(text) * CELL_W}" height="{CELL_H}" '
                f'fill="{style.back}"/>'
            )
        if shown := text.rstrip():
            bold = ' font-weight="bold"' if style.bold else ""
            # SVG collapses spaces; textLength keeps every cell in its column with any font.
            shown = escape(shown).replace(" ", "\u00a0")
            length = len(text.rstrip()) * CELL_W
            out.append(
                f'<text x="{x}" y="{y + 13}" fill="{style.front}"{bold} textLength="{length}" '
                f'lengthAdjust="spacingAndGlyphs">{shown}</text>'
            )
        return out


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
