#!/usr/bin/env python3
"""The ingress beside LitServe, Ray Serve and BentoML: the same model, client and machine, one run.

usage: ingress.py [-o table|json] [--seconds S] [--rate R] [--connections N] [SERVER...]

Servers: roommate, litserve, ray, bentoml (default: all). The model doubles a number, so what is
measured is what the server adds. `requests_per_s`: N connections, each asks again when it is answered.
`added_p99_ms`: at R requests a second that come whatever the server does (Poisson, the same seed),
counted from when each was due. `held_mib`: memory of the front with 10,000 open connections.

Every server batches up to 32 requests, filled for at most 2 ms. The packages are installed into
target/ingress-venv; the client is `examples/load.rs` of crates/roommate-ingress.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / "target/ingress-venv"
PACKAGES = ["litserve", "ray[serve]", "bentoml", "numpy"]
BODY = '{"x": 21}'

ROOMMATE = """
import roommate
roommate.serve(lambda batch: [{"twice": 2 * item["x"]} for item in batch], max_batch=32)
"""

LITSERVE = """
import sys, litserve as ls
class Twice(ls.LitAPI):
    def setup(self, device): pass
    def decode_request(self, request): return request["x"]
    def batch(self, inputs): return inputs
    def predict(self, xs): return [2 * x for x in xs]
    def unbatch(self, outputs): return outputs
    def encode_response(self, y): return {"twice": y}
if __name__ == "__main__":
    api = Twice(max_batch_size=32, batch_timeout=0.002)
    ls.LitServer(api, accelerator="cpu").run(port=int(sys.argv[1]), generate_client_file=False,
                                             num_api_servers=1, log_level="error")
"""

RAY = """
import logging, sys, time, ray
from ray import serve
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
@serve.deployment(max_ongoing_requests=1000)
class Twice:
    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.002)
    async def many(self, xs): return [2 * x for x in xs]
    async def __call__(self, request):
        return {"twice": await self.many((await request.json())["x"])}
serve.start(http_options={"port": int(sys.argv[1]), "access_log": False})
serve.run(Twice.bind(), route_prefix="/predict")
while True: time.sleep(3600)
"""

BENTOML = """
import bentoml
@bentoml.service(workers=1, traffic={"max_concurrency": 1000}, logging={"access": {"enabled": False}})
class Twice:
    @bentoml.api(batchable=True, batch_dim=0, max_batch_size=32, max_latency_ms=1000)
    def predict(self, x: list[int]) -> list[int]:
        return [2 * v for v in x]
"""


def log(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as it:
        port: int = it.getsockname()[1]
        return port


def setup() -> None:
    """Installs the packages once."""
    if not (VENV / "done").exists():
        log(f"installing {', '.join(PACKAGES)} into {VENV}")
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        subprocess.run([VENV / "bin/pip", "install", "-q", *PACKAGES], check=True)
        (VENV / "done").touch()
    build = ["cargo", "build", "--release", "--quiet"]
    subprocess.run([*build, "-p", "roommate"], cwd=ROOT, check=True)
    subprocess.run([*build, "-p", "roommate-ingress", "--example", "load"], cwd=ROOT, check=True)


@contextlib.contextmanager
def server(name: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """A server that answers, where to ask, and what."""
    port, body, path = free_port(), BODY, "/predict"
    python = str(VENV / "bin/python")
    script = folder / f"{name}_app.py"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "BENTOML_DO_NOT_TRACK": "True",
           "RAY_USAGE_STATS_ENABLED": "0"}
    text = {"roommate": ROOMMATE, "litserve": LITSERVE, "ray": RAY, "bentoml": BENTOML}[name]
    script.write_text(text)
    if name == "roommate":
        spec = {"name": "s", "model": "s", "listen": f"127.0.0.1:{port}", "max_batch": 32,
                "objective": {"quantile": 0.99, "ms": 100.0}, "fill_ms": 2.0, "queue": 20_000,
                "server": {"sdk": {}}}
        program = str(ROOT / "target/release/roommate")
        words = [program, "front", "--spec", json.dumps(spec), "--", python, str(script)]
    elif name == "bentoml":
        words = [str(VENV / "bin/bentoml"), "serve", f"{script.stem}:Twice", "-p", str(port)]
        body = '{"x": [21]}'
    else:
        words = [python, str(script), str(port)]
    out = (folder / f"{name}.log").open("wb")
    process = subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=out,
                               start_new_session=True)
    url = f"http://127.0.0.1:{port}{path}"
    try:
        end = time.monotonic() + 120
        while not answers(url, body):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{name}: {(folder / f'{name}.log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield process, url, body
    finally:
        for end_by in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, end_by)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(8)
        if name == "ray":
            subprocess.run([VENV / "bin/ray", "stop", "--force"], capture_output=True, check=False)
        out.close()


def answers(url: str, body: str) -> bool:
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return b"42" in answer.read()
    except OSError:
        return False


def load(url: str, body: str, way: str, amount: float, seconds: float) -> dict[str, Any]:
    words = [ROOT / "target/release/examples/load", url, body, way, str(amount), str(seconds)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def measured(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    log(f"{name} ...")
    with server(name, folder) as (process, url, body):
        load(url, body, "closed", 8, 2)  # warm
        closed = load(url, body, "closed", args.connections, args.seconds)
        opened = load(url, body, "open", args.rate, args.seconds)
        found = {
            "server": name,
            "requests_per_s": round(closed["requests_per_s"]),
            "added_p50_ms": opened["p50_ms"],
            "added_p99_ms": opened["p99_ms"],
            "busy_p99_ms": closed["p99_ms"],
            "statuses": {"closed": closed["statuses"], "open": opened["statuses"]},
        }
        if name == "roommate":
            found |= held(process.pid, url, body)
        return found


def held(pid: int, url: str, body: str) -> dict[str, Any]:
    """Memory of the front while 10,000 connections are open."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    many = min(10_000, most - 100)
    words = [str(ROOT / "target/release/examples/load"), url, body, "hold", str(many), "20"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as client:
        peak = 0.0
        while client.poll() is None:
            peak = max(peak, rss_mib(pid))
            time.sleep(0.2)
        assert client.stdout is not None
        return {"held": json.loads(client.stdout.read())["open"], "held_mib": round(peak, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("servers", nargs="*", default=["roommate", "litserve", "ray", "bentoml"])
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--connections", type=int, default=64)
    args = parser.parse_args()
    setup()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.servers:
            try:
                rows.append(measured(name, args, Path(folder)))
            except (RuntimeError, subprocess.CalledProcessError) as failed:
                rows.append({"server": name, "error": str(failed)})
    if args.output == "json":
        print(json.dumps({"rate": args.rate, "connections": args.connections, "rows": rows}, indent=1))
        return 0
    print(f"{'server':10} {'requests/s':>10} {'added p50':>10} {'added p99':>10}  ms at {args.rate:g}/s")
    for row in rows:
        if "error" in row:
            print(f"{row['server']:10} failed: {row['error'].splitlines()[-1][:80]}")
            continue
        print(f"{row['server']:10} {row['requests_per_s']:>10,} {row['added_p50_ms']:>10.2f} "
              f"{row['added_p99_ms']:>10.2f}")
        if "held" in row:
            print(f"{'':10} {row['held']:,} open connections: {row['held_mib']} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
