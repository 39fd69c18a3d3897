#!/usr/bin/env python3
"""Follows a page word by word: scripts/follow.py PAGE [--skip PREFIX]... [--update].

The commands of its `sh` blocks run in one shell, in the working directory, as a reader would type
them. A `text` block that comes next is what they print; numbers may differ from run to run, words
may not, and a line `...` stands for any lines. Prints how long each block took. `--update` writes
what was printed into the page.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Step:
    """Commands of a page, what it says that they print, and where it says so."""

    commands: str
    expected: str | None = None
    at: tuple[int, int] = (0, 0)


def steps(page: str) -> list[Step]:
    found: list[Step] = []
    before = ""
    for block in BLOCK.finditer(page):
        language, text = block.groups()
        if language == "sh":
            found.append(Step(text))
        elif language == "text" and before == "sh":
            found[-1].expected, found[-1].at = text, block.span(2)
        before = language
    return found


def shape(line: str) -> str:
    """A line without its figures, and without the width of its columns."""
    line = re.sub(r"-{2,}", "-", re.sub(r"\d+([.,]\d+)*", "0", line))
    return re.sub(r"0\*", "0", re.sub(r"\s+", " ", line)).strip()


def agrees(expected: str, printed: str) -> bool:
    lines = [shape(line) for line in expected.splitlines()]
    pattern = "".join(r"(.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in lines)
    text = "".join(shape(line) + "\n" for line in printed.splitlines())
    return re.fullmatch(pattern, text) is not None


class Shell:
    """One shell for all steps, so that what one exports is there for the next."""

    def __init__(self, limit_s: float) -> None:
        self.mark = f"end-of-step-{os.getpid()}"
        self.bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "COLUMNS": "100"}, start_new_session=True,
        )  # fmt: skip
        self.end_of_time = threading.Timer(limit_s, self.kill)
        self.end_of_time.daemon = True
        self.end_of_time.start()

    def run(self, commands: str) -> tuple[int, str]:
        assert self.bash.stdin and self.bash.stdout
        self.bash.stdin.write(f"{commands}\necho {self.mark} $?\n")
        self.bash.stdin.flush()
        printed = ""
        for line in self.bash.stdout:
            head, found, status = line.partition(self.mark)
            printed += head
            if found:
                return int(status), printed
        return self.bash.wait(), f"{printed}(the shell ended, or the time was over)\n"

    def close(self) -> None:
        assert self.bash.stdin
        self.bash.stdin.close()
        self.end_of_time.cancel()
        self.bash.wait()

    def kill(self) -> None:
        os.killpg(self.bash.pid, signal.SIGKILL)


def follow(page: Path, skip: list[str], update: bool, limit_s: float) -> int:
    text = page.read_text()
    shell, wrong, total, printed_at = Shell(limit_s), 0, 0.0, []
    try:
        for step in steps(text):
            kept = [line for line in step.commands.splitlines() if not line.startswith(tuple(skip))]
            if not kept:
                continue
            start = time.monotonic()
            status, printed = shell.run("\n".join(kept))
            took = time.monotonic() - start
            total += took
            print(f"{took:7.1f} s  {kept[0]}{' …' if len(kept) > 1 else ''}", flush=True)
            if step.expected is not None:
                printed_at.append((step, printed))
            differs = step.expected is not None and not agrees(step.expected, printed)
            if status or (differs and not update):
                wrong += 1
                print(f"{page}: exit {status}, the page says:\n{step.expected}\nprinted:\n{printed}")
            if shell.bash.poll() is not None:
                break
    finally:
        shell.close()
    print(f"{total:7.1f} s  in all")
    if update:
        for step, printed in reversed(printed_at):
            if "\n...\n" not in f"\n{step.expected}":
                text = text[: step.at[0]] + printed + text[step.at[1] :]
        page.write_text(text)
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument(
        "--skip", metavar="PREFIX", action="append", default=[], help="leave out lines that begin so"
    )
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="end it after so long")
    parser.add_argument("--update", action="store_true", help="write what is printed into the page")
    arguments = parser.parse_args()
    return follow(arguments.page, arguments.skip, arguments.update, arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
