#!/usr/bin/env python3
"""Replaces the services in bench/gpu/run.sh serving --rehearse, which needs no GPU.

usage: rehearsal_service.py [--http]. Answers are pauses. Nothing it reports is a measurement.
"""

from __future__ import annotations

import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REQUEST_S = 0.01


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        time.sleep(REQUEST_S)
        self.answer()

    def answer(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: Any) -> None:
        pass


def predict(batch: list[Any]) -> list[Any]:
    time.sleep(REQUEST_S)
    return [{"rows": len(batch)}] * len(batch)


def main() -> None:
    if "--http" in sys.argv:
        ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
    import roommate

    roommate.serve(predict, max_batch=32)


if __name__ == "__main__":
    main()
