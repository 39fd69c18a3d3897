"""What users of a cluster see: `kubectl roommate` on a real API server, with fake nodes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed import ControlPlane, KwokNodes, Object
from testbed.roommate import PROGRAM, SLOTS, Scheduler, assignment, bound, delete_all, gpu_pod, pods

LENGTH = "roommate.dev/expected-seconds"
SHARE = "roommate.dev/gpu-share"
WHOLE = {SHARE: "100", "roommate.dev/max-slowdown": "1"}
"""Annotations of pods that share with nobody."""


@pytest.fixture(scope="module")
def nodes(plane: ControlPlane, kwok: KwokNodes) -> Iterator[list[str]]:
    """Two nodes with two GPUs each; one of them is for those who select it."""
    gpu = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.memory": "81920"}
    slots = {"roommate.dev/slots": str(SLOTS), **gpu}
    names = kwok.add(1, prefix="west", gpus=2 * SLOTS, labels=slots)
    names += kwok.add(1, prefix="east", gpus=2 * SLOTS, labels={**slots, "zone": "east"})
    kwok.until_ready(names)
    yield names
    kwok.remove(names)


@pytest.fixture(scope="module")
def one(plane: ControlPlane, nodes: list[str]) -> Iterator[Scheduler]:
    scheduler = Scheduler(plane, "scheduler-of-users", "--no-leader-election")
    scheduler.until_ready()
    yield scheduler
    scheduler.stop()


@pytest.fixture
def space(plane: ControlPlane, one: Scheduler, namespace: str) -> Iterator[str]:
    yield namespace
    delete_all(plane, namespace)
    plane.programs.until(one.name, "has no pods", lambda: one.metric("roommate_ledger_pods") == 0)


class Kubectl:
    """The plugin, as kubectl finds it."""

    def __init__(self, plane: ControlPlane, folder: Path, space: str) -> None:
        self.plane, self.folder, self.space = plane, folder, space
        for name in ("kubectl-roommate", "kubectl_complete-roommate"):
            (folder / name).symlink_to(PROGRAM)
        self.path = f"{folder}:{plane.bin}:{os.environ['PATH']}"

    def run(self, *words: str, stdin: str | None = None, status: int = 0) -> subprocess.CompletedProcess[str]:
        return self.kubectl("roommate", *words, stdin=stdin, status=status)

    def complete(self, *words: str) -> list[str]:
        """What kubectl offers a shell in place of the last word."""
        lines = self.kubectl("__complete", "roommate", *words).stdout.splitlines()
        return [line.split("\t")[0] for line in lines]

    def kubectl(
        self, *words: str, stdin: str | None = None, status: int = 0
    ) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PATH": self.path, "KUBECONFIG": str(self.plane.kubeconfig())}
        command = ["kubectl", *words]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=env, timeout=60)
        assert done.returncode == status, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def text(self, *words: str) -> str:
        return self.run(*words, "-n", self.space).stdout

    def json(self, *words: str, stdin: str | None = None, status: int = 0) -> Any:
        return json.loads(self.run(*words, "-n", self.space, "-o", "json", stdin=stdin, status=status).stdout)


@pytest.fixture
def kubectl(plane: ControlPlane, tmp_path: Path, space: str) -> Kubectl:
    return Kubectl(plane, tmp_path, space)


def until_bound(plane: ControlPlane, space: str, n: int) -> list[Object]:
    path = f"/api/v1/namespaces/{space}/pods"
    plane.api.until(path, lambda found: sum("nodeName" in p["spec"] for p in found["items"]) >= n)
    return bound(plane, space)


def a_pod(gpus: int = 1, annotations: dict[str, str] | None = None, **spec: Any) -> Object:
    resources = {"limits": {"roommate.dev/gpu": str(gpus)}}
    container = {"name": "main", "image": "any", "resources": resources}
    body = {"schedulerName": "roommate", "containers": [container], **spec}
    meta = {"name": "asked", "annotations": annotations or {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": body}


def fill(plane: ControlPlane, space: str, seconds: str | None = None) -> None:
    """Whole GPUs for four pods: everything there is."""
    asked = {**WHOLE, LENGTH: seconds} if seconds else WHOLE
    for n in range(4):
        gpu_pod(plane, space, f"full-{n}", annotations=asked)
    until_bound(plane, space, 4)


def test_top_shows_gpus_with_their_tenants(
    plane: ControlPlane, kubectl: Kubectl, nodes: list[str], space: str
) -> None:
    gpu_pod(plane, space, "half", annotations={SHARE: "50"})
    (pod,) = until_bound(plane, space, 1)
    seen = kubectl.json("top")
    (tenant,) = seen["tenants"]
    place = (pod["spec"]["nodeName"], (assignment(pod) or {})["gpus"][0])
    assert (tenant["node"], tenant["gpu"], tenant["pod"]) == (*place, "half")
    assert {n["node"] for n in seen["nodes"]} == set(nodes)
    done = kubectl.run("top")
    assert f"{space}/half" in done.stdout and "idle" in done.stdout
    assert done.stderr == "1 pod on 1 of 4 GPUs, 0 pods wait\n"
    assert "a100" in kubectl.run("top", "-o", "wide").stdout


def test_words_are_completed_as_those_of_kubectl(kubectl: Kubectl) -> None:
    assert kubectl.complete("wh") == ["why", "what-if", ":4"]
    assert kubectl.complete("top", "--output", "w") == ["wide", ":4"]
    assert kubectl.complete("what-if", "") == [":0"], "names of files"


def test_users_with_few_rights_are_told_what_they_lack(
    plane: ControlPlane, kubectl: Kubectl, space: str
) -> None:
    few = ("--kubeconfig", str(plane.kubeconfig(f"{space}/default")))
    refused = kubectl.run("top", *few, status=2).stderr
    assert refused.startswith("error: list of pods: ") and "hint: -n NAMESPACE shows" in refused
    may = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}
    of = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space}"
    plane.api.post(f"{of}/roles", {"metadata": {"name": "reads"}, "rules": [may]})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reads"}
    who = [{"kind": "ServiceAccount", "name": "default", "namespace": space}]
    plane.api.post(f"{of}/rolebindings", {"metadata": {"name": "reads"}, "roleRef": role, "subjects": who})
    gpu_pod(plane, space, "own")
    until_bound(plane, space, 1)
    seen = kubectl.run("top", "-n", space, *few)
    assert f"{space}/own" in seen.stdout and "note: idle GPUs are not shown" in seen.stderr
    assert f"{space}/own" in kubectl.run("why", "own", "-n", space, *few).stdout
    refused = kubectl.run("resize", "own", "50", "-n", space, *few, status=2).stderr
    assert "(403)" in refused and "hint: ask for the right" in refused


def test_queue_and_why_say_what_a_pod_waits_for(plane: ControlPlane, kubectl: Kubectl, space: str) -> None:
    gpu_pod(plane, space, "large", 3, labels={"roommate.dev/queue": "vision"})
    path = f"/api/v1/namespaces/{space}/pods/large"
    plane.api.until(path, lambda p: p.get("status", {}).get("conditions"))
    (waiting,) = kubectl.json("queue")
    assert (waiting["pod"], waiting["queue"], waiting["gpus"]) == ("large", "vision", 3)
    told = kubectl.text("why", "large")
    assert waiting["why"] in told and "FailedScheduling" in told
    missing = kubectl.run("why", "none", "-n", space, status=2)
    assert f"error: pod {space}/none" in missing.stderr and "hint: -n NAMESPACE" in missing.stderr


def test_resize_sets_the_limit_of_a_running_pod(plane: ControlPlane, kubectl: Kubectl, space: str) -> None:
    gpu_pod(plane, space, "sized")
    until_bound(plane, space, 1)
    assert kubectl.text("resize", "sized", "40%") == f"{space}/sized: at most 40 % of each GPU\n"
    (pod,) = pods(plane, space)
    assert pod["metadata"]["annotations"]["roommate.dev/gpu-limit"] == "40"
    assert "expected a number from 1 to 100" in kubectl.run("resize", "sized", "0", status=2).stderr


def test_explain_tells_the_history_with_names_of_nodes(
    plane: ControlPlane, kubectl: Kubectl, one: Scheduler, space: str, tmp_path: Path
) -> None:
    gpu_pod(plane, space, "told")
    (pod,) = until_bound(plane, space, 1)
    told = kubectl.text("explain", "told", "--scheduler", one.at)
    assert f"started on node {pod['spec']['nodeName']}: GPU" in told
    saved = tmp_path / "saved.jsonl"
    saved.write_text(kubectl.run("snapshot", "--scheduler", one.at).stdout)
    assert kubectl.text("explain", "told", "--snapshot", str(saved)) == told
    unknown = kubectl.run("explain", "tol", "-n", space, "--scheduler", one.at, status=1)
    assert f"did you mean {space}/told?" in unknown.stderr
    assert subprocess.run([PROGRAM, "replay", saved]).returncode == 0


def test_the_scheduler_is_found_by_its_lease(
    plane: ControlPlane, kubectl: Kubectl, one: Scheduler, space: str
) -> None:
    lease = f"{space}/leader"
    missing = kubectl.run("snapshot", "--lease", lease, status=2)
    assert (
        f"no scheduler was found: lease {lease}" in missing.stderr and "hint: --scheduler" in missing.stderr
    )
    spec = {"holderIdentity": "the-pod_17_1760000000", "leaseDurationSeconds": 15}
    path = f"/apis/coordination.k8s.io/v1/namespaces/{space}/leases"
    plane.api.post(path, {"metadata": {"name": "leader"}, "spec": spec})
    missing = kubectl.run("snapshot", "--lease", lease, status=2)
    assert "the scheduler that leads, the-pod_17_1760000000, is not a pod" in missing.stderr
    # As the chart makes it.
    told = {"name": "main", "image": "any", "args": [f"--lease-namespace={space}", "--lease-name=leader"]}
    names = {"app.kubernetes.io/name": "roommate", "app.kubernetes.io/component": "scheduler"}
    plane.pod(space, "the-pod", {"schedulerName": "nobody", "containers": [told]}, labels=names)
    gpu_pod(plane, space, "decided")
    until_bound(plane, space, 1)
    # In place of a kubelet that forwards the port.
    stand_in = kubectl.folder / "stand-in"
    stand_in.mkdir()
    (stand_in / "kubectl").write_text(
        f'#!/bin/sh\necho "$@" > {stand_in}/words\necho $$ > {stand_in}/pid\n'
        f'echo "Forwarding from {one.at} -> 10261"\nexec sleep 600\n'
    )
    (stand_in / "kubectl").chmod(0o755)
    env = {**os.environ, "PATH": f"{stand_in}:{kubectl.path}"}
    words = ["kube", "snapshot", "--kubeconfig", str(plane.kubeconfig())]
    done = subprocess.run([PROGRAM, *words], capture_output=True, text=True, env=env, check=True)
    assert f'"name":"{space}/decided"' in done.stdout
    said = (stand_in / "words").read_text()
    assert f"--namespace {space} port-forward pod/the-pod --address 127.0.0.1 :10261" in said
    assert not Path(f"/proc/{(stand_in / 'pid').read_text().strip()}").exists(), "the forward goes on"


@pytest.mark.parametrize(
    "spec", [{}, {"nodeSelector": {"zone": "east"}}, {"nodeSelector": {"kubernetes.io/hostname": "west-0"}}]
)
def test_what_if_foresees_what_happens(
    plane: ControlPlane, kubectl: Kubectl, one: Scheduler, space: str, spec: Object
) -> None:
    gpu_pod(plane, space, "there", annotations={SHARE: "50"})
    until_bound(plane, space, 1)
    wanted = a_pod(annotations={SHARE: "50"}, **spec)
    (verdict,) = kubectl.json("what-if", "-", "--scheduler", one.at, stdin=json.dumps(wanted))["jobs"]
    assert verdict["outcome"] == "starts" and verdict["starts_in_s"] == 0
    plane.api.post(f"/api/v1/namespaces/{space}/pods", wanted)
    (pod,) = [p for p in until_bound(plane, space, 2) if p["metadata"]["name"] == "asked"]
    (place,) = verdict["places"]
    assert (pod["spec"]["nodeName"], (assignment(pod) or {})["gpus"]) == (place["node"], place["gpus"])


def test_what_if_tells_when_a_job_starts_if_that_is_known(
    plane: ControlPlane, kubectl: Kubectl, one: Scheduler, space: str
) -> None:
    fill(plane, space, seconds="120")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "later"}}
    template = {"metadata": {"annotations": WHOLE},
                "spec": {**a_pod()["spec"], "restartPolicy": "Never"}}  # fmt: skip
    manifest = json.dumps({**job, "spec": {"parallelism": 2, "template": template}})
    first, second = kubectl.json("what-if", "-", "--scheduler", one.at, stdin=manifest)["jobs"]
    assert first["outcome"] == second["outcome"] == "waits" and first["why"]
    assert 100 < first["starts_in_s"] <= 121 and 100 < second["starts_in_s"] <= 121
    assert first["job"] == f"{space}/later-0"
    done = kubectl.run("what-if", "-", "--scheduler", one.at, "-n", space, stdin=manifest)
    assert "after about" in done.stdout


def test_what_if_tells_who_makes_room(
    plane: ControlPlane, kubectl: Kubectl, one: Scheduler, space: str
) -> None:
    # Nobody knows when these end, but the policy takes turns.
    fill(plane, space)
    wanted = json.dumps(a_pod(annotations=WHOLE))
    (verdict,) = kubectl.json("what-if", "-", "--scheduler", one.at, stdin=wanted)["jobs"]
    assert verdict["outcome"] == "waits" and verdict["starts_in_s"] > 0
    (other,) = [what for what in verdict["others"] if "is suspended" in what]
    assert other.startswith(f"{space}/full-")


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (a_pod(9), "9"),
        (a_pod(annotations={SHARE: "130"}), "roommate.dev/gpu-share: expected a number from 1 to 100"),
        (a_pod(nodeSelector={"zone": "nowhere"}), "can never run"),
    ],
)
def test_what_if_says_never(kubectl: Kubectl, one: Scheduler, wanted: Object, why: str) -> None:
    words = ("what-if", "-", "--scheduler", one.at)
    (verdict,) = kubectl.json(*words, stdin=json.dumps(wanted), status=1)["jobs"]
    assert verdict["outcome"] == "never" and why in verdict["why"]


def test_what_if_refuses_what_the_api_server_refuses(kubectl: Kubectl, one: Scheduler, space: str) -> None:
    words = ("what-if", "-", "--scheduler", one.at, "-n", space)
    odd = a_pod(restartPolicy="Sometimes")
    assert "the API server refuses such a pod" in kubectl.run(*words, stdin=json.dumps(odd), status=2).stderr
    other = a_pod(schedulerName="other")
    refused = kubectl.run(*words, stdin=json.dumps(other), status=2).stderr
    assert 'its pods name the scheduler "other"' in refused and "hint: set spec.schedulerName" in refused
    assert "it makes no pods" in kubectl.run(*words, stdin="kind: Service", status=2).stderr
    gone = kubectl.run("explain", "x", "--scheduler", "127.0.0.1:1", status=2).stderr
    assert "error: scheduler at 127.0.0.1:1" in gone and "hint: --scheduler ADDRESS" in gone
