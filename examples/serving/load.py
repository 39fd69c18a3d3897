#!/usr/bin/env python3
"""Sends requests at random times, whether or not earlier ones are answered, and measures latencies.

usage: load.py --url http://127.0.0.1:8000/v2/models/digits/infer --rate 100 --seconds 30
               [--burst 10:4:5] [--objective-ms 25] [--body JSON|@FILE] [--seed 7]

Arrivals are a Poisson process of --rate requests per second; --burst AT:FACTOR:SECONDS multiplies
the rate for a while, and may be repeated. The same seed gives the same arrivals. A latency counts
from the time at which the request was to be sent: one that waited for a free connection because
the server was slow is not flattered. Prints one JSON object:

  sent, ok           requests, and those answered with 200
  errors             the others, by status, or "timeout", "connection"
  p50_ms, p99_ms, worst_ms   latencies of those that are ok
  over               ok, but later than the objective
  missed             over and errors, as a fraction of all
  behind_ms          the largest delay of a request before it was sent; if it is large, there were
                     too few --connections for an open loop, or the client itself was too slow
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

TIMEOUT_S = 30.0


class Burst(NamedTuple):
    at: float
    factor: float
    seconds: float

    @classmethod
    def read(cls, text: str) -> Burst:
        try:
            at, factor, seconds = map(float, text.split(":"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not AT:FACTOR:SECONDS") from None
        if not (at >= 0 and factor >= 0 and seconds > 0):
            raise argparse.ArgumentTypeError(f"{text!r} has a negative number")
        return cls(at, factor, seconds)


def arrivals(rate: float, seconds: float, bursts: list[Burst], seed: int) -> list[float]:
    """Times of a Poisson process in seconds, with the rate multiplied during bursts."""
    dice = random.Random(seed)
    ends = {b.at for b in bursts} | {b.at + b.seconds for b in bursts} | {seconds}
    times, start = [], 0.0
    # Each stretch of constant rate is a process of its own, since arrivals have no memory.
    for end in sorted(e for e in ends if 0.0 < e <= seconds):
        now = rate
        for burst in bursts:
            if burst.at <= start < burst.at + burst.seconds:
                now *= burst.factor
        at = start
        while now > 0 and (at := at + dice.expovariate(now)) < end:
            times.append(at)
        start = end
    return times


class Load:
    """Threads with a connection each, that send the requests in their order."""

    def __init__(self, url: str, body: bytes, due: list[float]) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._path = parts.path + (f"?{parts.query}" if parts.query else "") or "/"
        self._body, self._due = body, due
        self._next = 0
        self._lock = threading.Lock()
        self.latencies: list[float] = []
        """Seconds, of answers with 200."""
        self.errors: Counter[str] = Counter()
        self.behind = 0.0
        """Seconds that a request was sent too late, at most."""

    def run(self, connections: int) -> None:
        self._began = time.monotonic() + 0.1
        threads = [threading.Thread(target=self._work) for _ in range(connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        while True:
            with self._lock:
                if self._next == len(self._due):
                    break
                due = self._began + self._due[self._next]
                self._next += 1
            if (wait := due - time.monotonic()) > 0:
                time.sleep(wait)
            behind = time.monotonic() - due
            status = self._ask(connection)
            took = time.monotonic() - due
            with self._lock:
                self.behind = max(self.behind, behind)
                if status == "200":
                    self.latencies.append(took)
                else:
                    self.errors[status] += 1
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection) -> str:
        # A lost connection is an error and not tried again: it may be a crash of the server.
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", self._path, self._body, headers)
            answer = connection.getresponse()
            answer.read()
            return str(answer.status)
        except TimeoutError:
            connection.close()
            return "timeout"
        except (OSError, http.client.HTTPException):
            connection.close()
            return "connection"


def quantile_ms(latencies: list[float], part: float) -> float | None:
    """The latency that this part of all does not exceed, in ms; ``latencies`` are sorted."""
    if not latencies:
        return None
    return round(1e3 * latencies[max(0, math.ceil(part * len(latencies)) - 1)], 3)


def summary(load: Load, objective_ms: float | None) -> dict[str, Any]:
    latencies = sorted(load.latencies)
    failed = sum(load.errors.values())
    sent = len(latencies) + failed
    result = {
        "sent": sent,
        "ok": len(latencies),
        "errors": dict(sorted(load.errors.items())),
        "p50_ms": quantile_ms(latencies, 0.5),
        "p99_ms": quantile_ms(latencies, 0.99),
        "worst_ms": quantile_ms(latencies, 1.0),
        "behind_ms": round(1e3 * load.behind, 3),
    }
    if objective_ms is not None:
        over = sum(1e3 * latency > objective_ms for latency in latencies)
        missed = round((over + failed) / sent, 5) if sent else 0.0
        result |= {"objective_ms": objective_ms, "over": over, "missed": missed}
    return result


def default_body() -> bytes:
    import digits

    return json.dumps({"pixels": digits.image(7)}).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--rate", type=float, required=True, help="requests per second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--burst", type=Burst.read, action="append", default=[])
    parser.add_argument("--objective-ms", type=float)
    parser.add_argument("--body", help="JSON of a request, or @FILE; else an image of a 7")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    if urlsplit(args.url).scheme != "http":
        parser.error("--url must start with http://")
    if args.body is None:
        body = default_body()
    elif args.body.startswith("@"):
        body = Path(args.body[1:]).read_bytes()
    else:
        body = args.body.encode()
    load = Load(args.url, body, arrivals(args.rate, args.seconds, args.burst, args.seed))
    load.run(args.connections)
    print(json.dumps(summary(load, args.objective_ms)))


if __name__ == "__main__":
    main()
