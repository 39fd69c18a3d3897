"""Pods with real processes on a real node, whose devices an agent offers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from .api import Object, pod_path
from .kwok import GPU
from .node import BUSYBOX, RealNode
from .plane import ControlPlane
from .programs import ROOT
from .roommate import PROGRAM, Agent, assignment

SCHEDULER = "agent-test"
"""The scheduler that these pods name."""
LABELS = {"roommate.dev/test": "agent"}
"""The labels of their node."""


def guest(
    plane: ControlPlane,
    space: str,
    name: str,
    command: list[str],
    gpus: int = 1,
    share: int | None = None,
    annotations: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    env: dict[str, str] | None = None,
    python: bool = False,
    places: list[Path] | None = None,
    **spec: Any,
) -> Object:
    """A pod for the node of these tests. With `python` this machine's Python and the SDK are in it, and
    these places of this machine.
    """
    container: dict[str, Any] = {
        "name": "main",
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": command,
        "resources": {"limits": {GPU: str(gpus)}},
        "env": [{"name": k, "value": v} for k, v in (env or {}).items()],
    }
    volumes: list[Object] = []
    if python:
        # Python's own folder, its libraries, and the SDK.
        shared = [Path(sys.base_prefix), Path("/usr"), ROOT / "python", *(places or [])]
        links = {p: Path(p).resolve() for p in ("/lib", "/lib64") if Path(p).exists()}
        mounts = {str(p): str(p) for p in shared} | {k: str(v) for k, v in links.items()}
        for n, (place, source) in enumerate(mounts.items()):
            volumes.append({"name": f"v{n}", "hostPath": {"path": source, "type": "Directory"}})
            container.setdefault("volumeMounts", []).append(
                {"name": f"v{n}", "mountPath": place, "readOnly": True}
            )
        container["env"].append({"name": "PYTHONPATH", "value": str(ROOT / "python")})
        container["env"].append({"name": "PYTHONUNBUFFERED", "value": "1"})
    folder = {"name": "kept", "hostPath": {"path": f"/var/lib/kept/{space}", "type": "DirectoryOrCreate"}}
    volumes.append(folder)
    container.setdefault("volumeMounts", []).append({"name": "kept", "mountPath": "/kept"})
    notes = dict(annotations or {})
    if share is not None:
        notes["roommate.dev/gpu-share"] = str(share)
    body = {
        "schedulerName": SCHEDULER, "restartPolicy": "Never", "terminationGracePeriodSeconds": 20,
        "nodeSelector": LABELS, "containers": [container], "volumes": volumes, **spec,
    }  # fmt: skip
    return plane.pod(space, name, body, annotations=notes, labels=labels or {})


def front(port: int, objective: str) -> dict[str, Any]:
    """What a pod is that answers requests at a port of this machine, behind its front."""
    # Nothing of the SDK is in Python's own folder, and the front is this program.
    words = [str(PROGRAM), "kube", "front", "--listen", f"127.0.0.1:{port}", "--objective", objective]
    words += ["--model", "digits", "--", *python("")[:1], str(ROOT / "examples/serving/digits.py")]
    places = [PROGRAM.resolve().parent, ROOT / "examples"]
    return {"command": words, "python": True, "places": places, "hostNetwork": True}


def load(plane: ControlPlane, node: RealNode, url: str, seconds: int) -> None:
    """Sends 20 requests a second to the service at an address, once it is ready."""

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=2) as found:
                return bool(found.status == 200)
        except OSError:
            return False

    plane.programs.until(node.name, "answers requests", answers, within_s=60)
    serving = ROOT / "examples/serving"
    words = [sys.executable, str(serving / "load.py"), "--url", f"{url}/predict", "--rate", "20"]
    words += ["--seconds", str(seconds), "--objective-ms", "250", "--body", f"@{serving / 'seven.json'}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=seconds + 60)
    assert done.returncode == 0, done.stdout + done.stderr


def served(agent: Agent, space: str, pod: str = "digits") -> tuple[float, float]:
    """Late requests and all requests of a service, as its agent counts them."""

    def metric(name: str) -> float:
        lines = agent.page("/metrics").splitlines()
        label = f'namespace="{space}",pod="{pod}"'
        its = [line for line in lines if line.startswith(f"roommate_{name}{{") and label in line]
        return float(its[0].split()[-1]) if its else 0.0

    return metric("service_late_requests_total"), metric("service_requests_total")


def python(code: str) -> list[str]:
    return [str(Path(sys.base_prefix) / "bin/python3"), "-c", code]


def reasons(plane: ControlPlane, pod: Object) -> list[str]:
    """What the events of a pod say, as far as they were written within a moment."""
    time.sleep(1.0)
    space = pod["metadata"]["namespace"]
    events = plane.api.get(f"/apis/events.k8s.io/v1/namespaces/{space}/events")["items"]
    return [e["reason"] for e in events if e["regarding"].get("uid") == pod["metadata"]["uid"]]


def applied(pod: Object) -> bool:
    """Whether the newest decision for the pod is in force."""
    notes = pod["metadata"].get("annotations", {})
    decided, done = assignment(pod), json.loads(notes.get("roommate.dev/applied", "null"))
    return bool(decided and done and all(done[k] == decided[k] for k in ("term", "decision")))


def until_applied(plane: ControlPlane, *made: Object) -> list[Object]:
    def is_so(p: Object) -> bool:
        return str(p["status"]["phase"]) == "Running" and applied(p)

    return [plane.api.until(pod_path(pod), is_so, within_s=60) for pod in made]
