#!/usr/bin/env python3
"""Measures the overhead of the Python SDK per training step: at most 1 % of a step of 10 ms.

usage: sdk.py

A process acts as the daemon and answers; the loop does nothing, so that all of a step is overhead,
and reports every half second like a real one.

Exit status: 0 within the limit, 1 not.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

LIMIT_US = 100.0
STEPS = 50_000


def machine(server: socket.socket) -> None:
    peer, _ = server.accept()
    welcome = b'{"welcome":{"version":1,"job":"bench","done":0.0,"batch":0,"pace_permille":1000}}\n'
    for line in peer.makefile("rb"):
        if line.startswith(b'{"hello"'):
            peer.sendall(welcome)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/machine.sock"
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(path)
        server.listen()
        if os.fork() == 0:
            machine(server)
            os._exit(0)
        os.environ.update(ROOMMATE_SOCKET=path, ROOMMATE_TOKEN="bench")
        import roommate
        from roommate import session

        steps = iter(roommate.steps(lambda size: size, batch_size=64, min=16, max=512))
        assert session.current().connected, "the benchmark must be connected to its daemon"
        began = time.perf_counter()
        for _ in range(STEPS):
            next(steps)
        each_us = (time.perf_counter() - began) / STEPS * 1e6
        session.forget()
        os.wait()
    good = each_us <= LIMIT_US
    print(
        f"{'ok  ' if good else 'SLOW'} SDK: {each_us:.1f} us a step, "
        f"{each_us / 100:.2f} % of 10 ms (limit 1 %)"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
