#!/usr/bin/env python3
"""A model server on a GPU that knows nothing of Roommate: HTTP, PyTorch, batches of its own.

usage: PORT=9000 http_model.py --model resnet50 [--max-batch 16]

GET /health answers 200 once the model is loaded. POST /predict takes any JSON object, which stands for
one input, and answers {"rows": N}, the size of the batch it was in.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import torch
import zoo

MOST_BYTES = 1 << 20


class Batches(threading.Thread):
    """Answers requests in the batches in which they come."""

    def __init__(self, name: str, most: int) -> None:
        super().__init__(daemon=True)
        self._waiting: queue.SimpleQueue[queue.SimpleQueue[int]] = queue.SimpleQueue()
        self._most = most
        model, make = zoo.build("serve", name)
        self._model = model.cuda().half().eval()
        inputs = make(most)[0]
        self._inputs = inputs.half() if inputs.is_floating_point() else inputs
        # Libraries choose their kernels at the first batch of a size.
        for rows in range(1, most + 1):
            self._predict(rows)

    def ask(self) -> int:
        answer: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._waiting.put(answer)
        return answer.get()

    def _predict(self, rows: int) -> None:
        with torch.inference_mode():
            out = self._model(self._inputs[:rows])
            tensor = out.last_hidden_state if hasattr(out, "last_hidden_state") else out
            tensor.sum().item()  # waits for the GPU

    def run(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while len(batch) < self._most and not self._waiting.empty():
                batch.append(self._waiting.get())
            self._predict(len(batch))
            for answer in batch:
                answer.put(len(batch))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    # The usual five are too few for a burst of connections: the kernel refuses the rest.
    request_queue_size = 1024


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body of an answer leave in one packet; otherwise the second may wait for 40 ms.
    wbufsize = -1
    disable_nagle_algorithm = True
    batches: Batches

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MOST_BYTES:
            self.close_connection = True
            self._answer(411, {"error": "a length of at most 1 MiB"})
            return
        self.rfile.read(int(length))
        self._answer(200, {"rows": self.batches.ask()})

    def _answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, choices=list(zoo.SERVE))
    parser.add_argument("--max-batch", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(7)
    Handler.batches = Batches(args.model, args.max_batch)
    Handler.batches.start()
    Server(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()


if __name__ == "__main__":
    main()
