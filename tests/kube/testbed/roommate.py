"""Roommate's own programs in a testbed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from .api import ApiError, Object, condition
from .kwok import GPU
from .node import RealNode
from .plane import ControlPlane
from .programs import ROOT, free_port

PROGRAM = Path(os.environ.get("ROOMMATE_BIN") or ROOT / "target/release/roommate")
ASSIGNMENT = "roommate.dev/assignment"
SLOTS = 4
"""Pods that may share a GPU of the fake nodes."""


class Scheduler:
    """`roommate kube scheduler`, as one of several that elect a leader or as the only one."""

    def __init__(
        self, plane: ControlPlane, name: str = "roommate-scheduler", *words: str, account: str | None = None
    ) -> None:
        self.plane, self.name = plane, name
        self.at = f"127.0.0.1:{free_port()}"
        self.command: list[str | Path] = [
            PROGRAM, "kube", "scheduler", "--kubeconfig", plane.kubeconfig(account),
            "--listen", self.at, "--max-tenants", str(SLOTS), *words,
        ]  # fmt: skip
        plane.programs.start(name, self.command)

    def until_ready(self, within_s: float = 30.0) -> None:
        def is_ready() -> bool:
            return "ok" in (self.page("/readyz") or "")

        self.plane.programs.until(self.name, "is ready", is_ready, within_s)

    def leads(self) -> bool:
        return "leads" in (self.page("/readyz") or "") and "another" not in (self.page("/readyz") or "")

    def page(self, path: str) -> str | None:
        """What it answers at a path; None if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{self.at}{path}", timeout=10) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return str(error.read().decode())
        except OSError:
            return None

    def metric(self, name: str) -> float:
        lines = (self.page("/metrics") or "").splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name))

    def kill(self) -> None:
        self.plane.programs.stop(self.name, signal.SIGKILL)

    def start_again(self) -> None:
        self.plane.programs.start_again(self.name)

    def stop(self) -> None:
        self.plane.programs.stop(self.name)

    def log(self) -> str:
        return self.plane.programs.log(self.name).read_text()


def gpu_pod(
    plane: ControlPlane, namespace: str, name: str, gpus: int = 1, *,
    annotations: dict[str, str] | None = None, labels: dict[str, str] | None = None, **spec: Any,
) -> Object:  # fmt: skip
    """Makes a pod for Roommate that asks for this many GPUs."""
    container = {"name": "main", "image": "any", "resources": {"limits": {GPU: str(gpus)}}}
    body = {"schedulerName": "roommate", "containers": [container], **spec}
    return plane.pod(namespace, name, body, annotations=annotations or {}, labels=labels or {})


def assignment(pod: Object) -> dict[str, Any] | None:
    """What the scheduler decided for a pod."""
    text = pod["metadata"].get("annotations", {}).get(ASSIGNMENT)
    return json.loads(text) if text else None


def pods(plane: ControlPlane, namespace: str) -> list[Object]:
    return list(plane.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"])


def bound(plane: ControlPlane, namespace: str) -> list[Object]:
    return [p for p in pods(plane, namespace) if p["spec"].get("nodeName")]


def why_unschedulable(pod: Object) -> str | None:
    """What the pod's condition says while it waits."""
    if condition(pod, "PodScheduled") != "False":
        return None
    conditions = pod["status"]["conditions"]
    return str(next(c["message"] for c in conditions if c["type"] == "PodScheduled"))


def over_allocated(found: list[Object]) -> list[str]:
    """GPUs of which pods hold more than there is, as their assignments say."""
    held: dict[tuple[str, int], list[int]] = {}
    for pod in found:
        what = assignment(pod)
        if not pod["spec"].get("nodeName") or not what or pod["status"]["phase"] in ("Succeeded", "Failed"):
            continue
        share = 0 if what.get("suspended") else what.get("knobs", {}).get("sm_permille", 1000)
        for gpu in what["gpus"]:
            held.setdefault((pod["spec"]["nodeName"], gpu), []).append(share)
    return [f"{at}: {shares}" for at, shares in held.items() if sum(shares) > 1000 or len(shares) > SLOTS]


def delete_all(plane: ControlPlane, namespace: str) -> None:
    for pod in pods(plane, namespace):
        with contextlib.suppress(ApiError):
            path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}"
            plane.api.delete(path, gracePeriodSeconds=0)


class Agent:
    """`roommate kube agent` as a pod of a real node; it starts again when it ends, as in a DaemonSet."""

    ROLE = "roommate-agent-test"

    def __init__(
        self, plane: ControlPlane, node: RealNode, *words: str, files: dict[str, Path] | None = None
    ) -> None:
        """`files` are of this machine, and seen by the agent at other places."""
        self.plane, self.node, self.files = plane, node, files or {}
        self.port = free_port()
        self.space = plane.namespace()
        self.image = node.add_image("roommate-agent", {"/bin/roommate": PROGRAM}, ["/bin/roommate"])
        plane.api.post(f"/api/v1/namespaces/{self.space}/serviceaccounts", {"metadata": {"name": "agent"}})
        rules = [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "patch"]},
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]},
            {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create"]},
        ]
        rbac = "/apis/rbac.authorization.k8s.io/v1"
        plane.api.post(f"{rbac}/clusterroles", {"metadata": {"name": self.ROLE}, "rules": rules})
        plane.api.post(
            f"{rbac}/clusterrolebindings",
            {
                "metadata": {"name": self.ROLE},
                "roleRef": {
                    "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": self.ROLE
                },
                "subjects": [{"kind": "ServiceAccount", "name": "agent", "namespace": self.space}],
            },
        )  # fmt: skip
        self.words = words
        self.pod = plane.pod(self.space, "agent", self._spec())

    def _spec(self) -> Object:
        config = self.plane.kubeconfig(f"{self.space}/agent")
        hosts = {
            "kubelet": "/var/lib/kubelet", "run": "/run/roommate", "state": "/var/lib/roommate",
            "cgroup": "/sys/fs/cgroup", "config": str(config.parent),
        }  # fmt: skip
        files = [(f"file{n}", path, place) for n, (place, path) in enumerate(self.files.items())]
        return {
            "nodeName": self.node.name,
            "hostNetwork": True,
            "hostPID": True,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 5,
            "volumes": [
                {"name": n, "hostPath": {"path": p, "type": "DirectoryOrCreate"}} for n, p in hosts.items()
            ]
            + [{"name": n, "hostPath": {"path": str(path), "type": "File"}} for n, path, _ in files],
            "containers": [
                {
                    "name": "agent",
                    "image": self.image,
                    "imagePullPolicy": "Never",
                    "command": [
                        "/bin/roommate", "kube", "agent", "--node-name", self.node.name,
                        "--kubeconfig", str(config), "--listen", f"127.0.0.1:{self.port}", *self.words,
                    ],
                    # As in the chart.
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL"]},
                        "readOnlyRootFilesystem": True,
                    },
                    "volumeMounts": [
                        {
                            "name": n, "mountPath": p,
                            "mountPropagation": "HostToContainer" if n == "kubelet" else "None",
                        }
                        for n, p in hosts.items()
                    ]
                    + [{"name": n, "mountPath": place, "readOnly": True} for n, _, place in files],
                }
            ],
        }  # fmt: skip

    def page(self, path: str) -> str:
        """What it answers at a path; nothing if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return str(error.read().decode())
        except OSError:
            return ""

    def metric(self, name: str) -> float:
        lines = self.page("/metrics").splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(name)), -1.0)

    def until_ready(self, within_s: float = 60.0) -> None:
        self.plane.programs.until(
            self.node.name, "runs an agent that is ready", lambda: self.page("/readyz") == "ok\n", within_s
        )

    def kill(self) -> None:
        """Ends it like a crash."""
        path = f"/api/v1/namespaces/{self.space}/pods/agent"
        for pid in self.node.pids_of(self.pod):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.plane.api.delete(path, gracePeriodSeconds=0)
        self.plane.api.until_gone(path)

    def start_again(self) -> None:
        """The kubelet waits ever longer before it starts a container again, so the pod is made anew."""
        self.pod = self.plane.pod(self.space, "agent", self._spec())
        self.plane.programs.until(
            self.node.name, "runs an agent", lambda: self.page("/healthz") == "ok\n", within_s=60
        )

    def log(self) -> str:
        return self.node.pod_log(self.pod, "agent")

    def delete(self) -> None:
        """Ends it in order."""
        path = f"/api/v1/namespaces/{self.space}/pods/agent"
        self.plane.api.delete(path)
        self.plane.api.until_gone(path, within_s=30)
        rbac = "/apis/rbac.authorization.k8s.io/v1"
        for kind in ("clusterrolebindings", "clusterroles"):
            self.plane.api.delete(f"{rbac}/{kind}/{self.ROLE}")
