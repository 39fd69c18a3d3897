"""The pods of docs/start/cluster.md, on a real API server."""

from __future__ import annotations

from testbed import ControlPlane, KwokNodes
from testbed.programs import ROOT
from testbed.roommate import SLOTS, Scheduler, assignment, bound, delete_all


def test_two_pods_share_the_only_gpu(plane: ControlPlane, kwok: KwokNodes, namespace: str) -> None:
    start = (ROOT / "docs/start/cluster.md").read_text()
    assert "kubectl apply -f examples/kubernetes/two-pods.yaml" in start
    names = kwok.add(1, prefix="start", gpus=SLOTS, labels={"roommate.dev/slots": str(SLOTS)})
    kwok.until_ready(names)
    scheduler = Scheduler(plane, "start-scheduler", "--no-leader-election")
    try:
        scheduler.until_ready()
        plane.kubectl("apply", "-n", namespace, "-f", str(ROOT / "examples/kubernetes/two-pods.yaml"))
        path = f"/api/v1/namespaces/{namespace}/pods"
        plane.api.until(path, lambda found: all("nodeName" in pod["spec"] for pod in found["items"]))
        decided = [assignment(pod) or {} for pod in bound(plane, namespace)]
        assert [what["gpus"] for what in decided] == [[0], [0]]
        assert all(what["knobs"]["mem_mib"] == 16000 for what in decided)
    finally:
        scheduler.stop()
        delete_all(plane, namespace)
        kwok.remove(names)
