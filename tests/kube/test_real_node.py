"""Pods on a real node are real processes in containers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from testbed import BUSYBOX, GPU, ControlPlane, Object, RealNode, condition, pod_path

ROOT = Path(__file__).resolve().parent.parent.parent
ROOMMATE = Path(os.environ.get("ROOMMATE_BIN") or ROOT / "target/release/roommate")


def run_pod(
    plane: ControlPlane,
    node: RealNode,
    namespace: str,
    script: str,
    image: str = BUSYBOX,
    pod: dict[str, Any] | None = None,
    **container: Any,
) -> Object:
    """Binds a pod with a shell script to the node."""
    main = {"name": "main", "image": image, "imagePullPolicy": "Never", "command": ["sh", "-c", script]}
    spec = {
        "schedulerName": "none",
        "restartPolicy": "Never",
        "containers": [{**main, **container}],
        **(pod or {}),
    }
    made = plane.pod(namespace, "p", spec)
    plane.api.bind(made, node.name)
    return made


def until_phase(plane: ControlPlane, pod: Object, phase: str) -> Object:
    return plane.api.until(pod_path(pod), lambda p: p["status"]["phase"] == phase, within_s=60)


def test_a_pod_runs_and_reports_how_it_ended(plane: ControlPlane, node: RealNode, namespace: str) -> None:
    pod = run_pod(plane, node, namespace, "echo on $HOSTNAME; exit 3")
    ended = until_phase(plane, pod, "Failed")
    assert ended["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3
    assert ended["status"]["podIP"].startswith("10.88.")
    assert node.pod_log(pod) == "on p\n"


def test_a_deletion_gives_time_for_a_checkpoint(plane: ControlPlane, node: RealNode, namespace: str) -> None:
    script = """
        trap 'echo told >> /checkpoints/log; sleep 1; echo saved >> /checkpoints/log; exit 0' TERM
        echo started >> /checkpoints/log
        while :; do sleep 0.1; done
    """
    folder = f"/var/lib/checkpoints-{namespace}"
    volume = {"name": "kept", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}
    pod = run_pod(
        plane,
        node,
        namespace,
        script,
        pod={"volumes": [volume], "terminationGracePeriodSeconds": 20},
        volumeMounts=[{"name": "kept", "mountPath": "/checkpoints"}],
    )
    until_phase(plane, pod, "Running")
    log = node.var / folder.removeprefix("/var/") / "log"
    plane.programs.until(node.name, "starts the script", lambda: log.exists() and log.read_text())
    assert log.read_text() == "started\n"
    plane.api.delete(pod_path(pod))
    plane.api.until_gone(pod_path(pod), within_s=20)
    assert log.read_text() == "started\ntold\nsaved\n"


def test_a_pod_runs_a_program_of_ours(plane: ControlPlane, node: RealNode, namespace: str) -> None:
    image = node.add_image("roommate", {"/bin/roommate": ROOMMATE}, ["/bin/roommate", "--version"])
    pod = run_pod(plane, node, namespace, "roommate --version", image=image)
    until_phase(plane, pod, "Succeeded")
    assert node.pod_log(pod).startswith("roommate ")


def test_a_pod_gets_what_it_needs_for_the_api(plane: ControlPlane, node: RealNode, namespace: str) -> None:
    secrets = "/var/run/secrets/kubernetes.io/serviceaccount"
    pod = run_pod(plane, node, namespace, f"cat {secrets}/ca.crt; cat {secrets}/token")
    until_phase(plane, pod, "Succeeded")
    said = node.pod_log(pod)
    assert plane.ca.read_text().strip() in said
    token = said.strip().splitlines()[-1]
    who = plane.api_of(token).post(
        "/apis/authentication.k8s.io/v1/selfsubjectreviews",
        {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"},
    )
    assert who["status"]["userInfo"]["username"] == f"system:serviceaccount:{namespace}:default"


def test_pods_take_gpus_that_the_node_advertises(
    plane: ControlPlane, node: RealNode, namespace: str, scheduler: None
) -> None:
    node.advertise(GPU, 2)
    container = {
        "name": "main",
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["sleep", "60"],
        "resources": {"limits": {GPU: "2"}},
    }
    spec = {"nodeSelector": {"roommate.dev/test": "real"}, "containers": [container]}
    first = plane.pod(namespace, "first", spec)
    running = until_phase(plane, first, "Running")
    assert running["spec"]["nodeName"] == node.name
    second = plane.pod(namespace, "second", spec)
    waiting = plane.api.until(pod_path(second), lambda p: condition(p, "PodScheduled") == "False")
    assert "Insufficient roommate.dev/gpu" in str(waiting["status"]["conditions"])


def test_containers_go_on_when_the_kubelet_and_containerd_crash(
    plane: ControlPlane, node: RealNode, namespace: str
) -> None:
    pod = run_pod(plane, node, namespace, "n=0; while :; do n=$((n+1)); echo $n; sleep 0.1; done")
    until_phase(plane, pod, "Running")
    plane.programs.until(node.name, "runs the loop", lambda: len(node.pod_log(pod).split()) > 3)
    before = node.kubelet_pid(), node.containerd_pid()
    node.kill_kubelet()
    node.kill_containerd()
    plane.programs.until(
        node.name,
        "starts kubelet and containerd again",
        lambda: node.kubelet_pid() != before[0] and node.containerd_pid() != before[1],
    )
    # The kubelet that came back obeys.
    second = plane.pod(namespace, "second", plane.api.get(pod_path(pod))["spec"] | {"nodeName": node.name})
    until_phase(plane, second, "Running")
    found = plane.api.get(pod_path(pod))["status"]["containerStatuses"][0]
    assert found["restartCount"] == 0
    counted = node.pod_log(pod).split()
    assert [int(n) for n in counted] == list(range(1, len(counted) + 1))
