"""Fake nodes look like nodes with GPUs, and their pods run."""

from __future__ import annotations

import itertools

from testbed import GPU, ApiError, ControlPlane, KwokNodes, condition, pod_path

ONE_GPU = {"name": "main", "image": "any", "resources": {"limits": {GPU: "1"}}}


def test_nodes_become_ready_with_their_gpus_and_labels(plane: ControlPlane, kwok: KwokNodes) -> None:
    names = kwok.add(3, prefix="labelled", gpus=4, labels={"nvidia.com/gpu.product": "H200"})
    kwok.until_ready(names)
    for name in names:
        node = plane.api.get(f"/api/v1/nodes/{name}")
        assert condition(node, "Ready") == "True"
        assert node["status"]["allocatable"][GPU] == "4"
        assert node["metadata"]["labels"]["nvidia.com/gpu.product"] == "H200"
        lease = plane.api.get(f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}")
        assert lease["spec"]["renewTime"]
    kwok.remove(names)


def test_a_bound_pod_runs_and_goes_when_deleted(plane: ControlPlane, kwok: KwokNodes, namespace: str) -> None:
    (name,) = kwok.add(prefix="running")
    kwok.until_ready([name])
    pod = plane.pod(namespace, "p", {"schedulerName": "none", "containers": [ONE_GPU]})
    plane.api.bind(pod, name)
    plane.api.until(pod_path(pod), lambda p: p["status"]["phase"] == "Running")
    plane.api.delete(pod_path(pod))
    plane.api.until_gone(pod_path(pod))


def test_the_scheduler_of_kubernetes_counts_the_gpus(
    plane: ControlPlane, kwok: KwokNodes, scheduler: None, namespace: str
) -> None:
    names = kwok.add(2, prefix="scheduled", gpus=2, labels={"pool": namespace})
    kwok.until_ready(names)
    spec = {"nodeSelector": {"pool": namespace}, "containers": [ONE_GPU]}
    for n in range(5):
        plane.pod(namespace, f"p{n}", spec)
    pods = plane.api.until(
        f"/api/v1/namespaces/{namespace}/pods",
        lambda found: sum(condition(p, "PodScheduled") is not None for p in found["items"]) == 5
        and sum("nodeName" in p["spec"] for p in found["items"]) >= 4,
    )["items"]
    placed = sorted(p["spec"]["nodeName"] for p in pods if "nodeName" in p["spec"])
    assert placed == [names[0], names[0], names[1], names[1]]
    (waiting,) = [p for p in pods if "nodeName" not in p["spec"]]
    assert condition(waiting, "PodScheduled") == "False"


def test_a_watch_shows_bindings(plane: ControlPlane, kwok: KwokNodes, namespace: str) -> None:
    (name,) = kwok.add(prefix="watched")
    changes = plane.api.watch(f"/api/v1/namespaces/{namespace}/pods", within_s=20)
    pod = plane.pod(namespace, "p", {"schedulerName": "none", "containers": [ONE_GPU]})
    plane.api.bind(pod, name)
    seen = [(kind, found["spec"].get("nodeName")) for kind, found in itertools.islice(changes, 2)]
    assert seen == [("ADDED", None), ("MODIFIED", name)]


def test_a_removed_node_is_gone(plane: ControlPlane, kwok: KwokNodes) -> None:
    names = kwok.add(prefix="removed")
    kwok.remove(names)
    try:
        plane.api.get(f"/api/v1/nodes/{names[0]}")
    except ApiError as error:
        assert error.status == 404
    else:
        raise AssertionError("the node is still there")
