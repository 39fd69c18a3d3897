"""Fake nodes: objects of the API that KWOK keeps Ready, and whose pods it lets run without a process."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from .api import Object, condition
from .plane import ControlPlane
from .programs import program_folder

GPU = "roommate.dev/gpu"
SELECTOR = "kwok.x-k8s.io/node=fake"


class KwokNodes:
    """Starts KWOK in a control plane. It moves about 50 pods per second to Running: measurements of a
    scheduler should wait for the binding instead.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        folder = program_folder()
        plane.programs.start(
            "kwok",
            [
                folder / "bin/kwok",
                f"--config={folder / 'share/kwok-stages.yaml'}",
                f"--kubeconfig={plane.kubeconfig()}",
                "--manage-all-nodes=false",
                f"--manage-nodes-with-annotation-selector={SELECTOR}",
                "--node-ip=127.0.0.1",
                "--node-lease-duration-seconds=40",
            ],
        )

    def add(
        self,
        count: int = 1,
        *,
        prefix: str = "fake",
        gpus: int = 8,
        labels: dict[str, str] | None = None,
        resources: dict[str, str] | None = None,
        taints: list[Object] | None = None,
    ) -> list[str]:
        """Makes nodes PREFIX-0, PREFIX-1, ... and returns their names; they become Ready a moment later."""
        names = [f"{prefix}-{n}" for n in range(count)]
        has = {"cpu": "64", "memory": "512Gi", "pods": "110", GPU: str(gpus), **(resources or {})}
        key, value = SELECTOR.split("=")

        def make(name: str) -> None:
            meta = {
                "name": name,
                "annotations": {key: value},
                "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **(labels or {})},
            }
            status = {"capacity": has, "allocatable": has}
            spec = {"taints": taints} if taints else {}
            self.plane.api.post("/api/v1/nodes", {"metadata": meta, "spec": spec, "status": status})

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(make, names))
        return names

    def until_ready(self, names: list[str], within_s: float = 60.0) -> None:
        wanted = set(names)

        def all_ready() -> bool:
            listed = self.plane.api.get("/api/v1/nodes")["items"]
            ready = {n["metadata"]["name"] for n in listed if is_usable(n)}
            # A list of many nodes is work for the API server, which it should spend on making
            # them Ready.
            time.sleep(len(listed) / 1000)
            return wanted <= ready

        self.plane.programs.until("kwok", f"makes {len(names)} nodes Ready", all_ready, within_s)

    def remove(self, names: list[str]) -> None:
        for name in names:
            self.plane.api.delete(f"/api/v1/nodes/{name}")


def is_usable(node: Object) -> bool:
    """Ready, and also without the taint that a node has until the controller manager saw it Ready."""
    taints = node["spec"].get("taints", [])
    not_ready = any(taint["key"] == "node.kubernetes.io/not-ready" for taint in taints)
    return condition(node, "Ready") == "True" and not not_ready
