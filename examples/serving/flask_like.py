#!/usr/bin/env python3
"""A model server that knows nothing of Roommate: HTTP, a thread per connection, no batches.

usage: PORT=9000 flask_like.py

GET /health answers 200 once the model is loaded; POST /predict takes a request of digits.py and
answers it. Roommate sets $PORT.
"""

from __future__ import annotations

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import digits

MOST_BYTES = 1 << 20


class Server(ThreadingHTTPServer):
    daemon_threads = True
    # The usual five are too few for a burst of connections: the kernel refuses the rest.
    request_queue_size = 1024


class Handler(BaseHTTPRequestHandler):
    # Connections stay open between requests.
    protocol_version = "HTTP/1.1"
    # Head and body of an answer leave in one packet; otherwise the second may wait for 40 ms.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {"status": "ok"})
        else:
            self._answer(404, {"error": f"no {self.path}"})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MOST_BYTES:
            # The body stays unread, so the connection cannot go on.
            self.close_connection = True
            self._answer(413 if length.isdigit() else 411, {"error": "a length of at most 1 MiB"})
            return
        body = self.rfile.read(int(length))
        if self.path != "/predict":
            self._answer(404, {"error": f"no {self.path}"})
            return
        try:
            request = json.loads(body)
        except ValueError:
            self._answer(400, {"error": "not JSON"})
            return
        (answer,) = digits.predict([request])
        self._answer(400 if "error" in answer else 200, answer)

    def _answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A line for each request would cost more than some requests."""


def main() -> None:
    port = int(os.environ.get("PORT", "9000"))
    digits.predict([{"pixels": digits.image(0)}])
    Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
