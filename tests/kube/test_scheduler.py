"""Roommate's scheduler on a real API server, with fake nodes."""

from __future__ import annotations

import json
import random
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import ControlPlane, KwokNodes, pod_path
from testbed.roommate import (
    PROGRAM,
    SLOTS,
    Scheduler,
    assignment,
    bound,
    delete_all,
    gpu_pod,
    over_allocated,
    pods,
    why_unschedulable,
)

KILLS = 100


@pytest.fixture(scope="module")
def nodes(plane: ControlPlane, kwok: KwokNodes) -> Iterator[list[str]]:
    """Two nodes with two GPUs each."""
    names = kwok.add(2, prefix="gpu", gpus=2 * SLOTS, labels={"roommate.dev/slots": str(SLOTS)})
    kwok.until_ready(names)
    yield names
    kwok.remove(names)


@pytest.fixture(scope="module")
def one(plane: ControlPlane, nodes: list[str]) -> Iterator[Scheduler]:
    scheduler = Scheduler(plane, "scheduler", "--no-leader-election")
    scheduler.until_ready()
    yield scheduler
    scheduler.stop()


@pytest.fixture
def space(plane: ControlPlane, namespace: str) -> Iterator[str]:
    yield namespace
    delete_all(plane, namespace)


def wait_for(plane: ControlPlane, space: str, n: int, within_s: float = 20.0) -> list[dict]:
    path = f"/api/v1/namespaces/{space}/pods"
    plane.api.until(path, lambda found: sum("nodeName" in p["spec"] for p in found["items"]) >= n, within_s)
    return bound(plane, space)


def test_a_pod_is_bound_with_its_assignment_and_told_so(
    plane: ControlPlane, one: Scheduler, nodes: list[str], space: str
) -> None:
    made = gpu_pod(plane, space, "a", 2)
    (pod,) = wait_for(plane, space, 1)
    decided = assignment(pod)
    assert decided and decided["gpus"] == [0, 1] and pod["spec"]["nodeName"] in nodes
    path = f"/apis/events.k8s.io/v1/namespaces/{space}/events"
    events = plane.api.until(path, lambda found: any(e["reason"] == "Scheduled" for e in found["items"]))
    (event,) = [e for e in events["items"] if e["reason"] == "Scheduled"]
    assert event["regarding"]["uid"] == made["metadata"]["uid"]
    assert event["reportingController"] == "roommate"


def test_pods_share_a_gpu_within_what_is_promised(
    plane: ControlPlane, one: Scheduler, nodes: list[str], space: str
) -> None:
    # Six halves and a whole one are as much as the four GPUs have.
    gpu_pod(plane, space, "whole", annotations={"roommate.dev/gpu-share": "100"})
    wait_for(plane, space, 1)
    for n in range(8):
        gpu_pod(plane, space, f"half-{n}", annotations={"roommate.dev/gpu-share": "50"})
    found = wait_for(plane, space, 7)
    time.sleep(1)
    found = bound(plane, space)
    assert len(found) == 7 and not over_allocated(found)
    waiting = [p for p in pods(plane, space) if "nodeName" not in p["spec"]]
    path = pod_path(waiting[0])
    told = plane.api.until(path, lambda p: why_unschedulable(p) is not None)
    assert why_unschedulable(told)


def test_a_gang_starts_as_a_whole_or_not_at_all(
    plane: ControlPlane, one: Scheduler, nodes: list[str], space: str
) -> None:
    def gang(name: str, size: int, made: int) -> None:
        for n in range(made):
            gpu_pod(
                plane, space, f"{name}-{n}", 2, labels={"scheduling.x-k8s.io/pod-group": name},
                annotations={"roommate.dev/pod-group-size": str(size)},
            )  # fmt: skip

    gang("incomplete", 2, 1)
    gang("fits", 2, 2)
    found = wait_for(plane, space, 2)
    assert sorted(p["metadata"]["name"] for p in found) == ["fits-0", "fits-1"]
    assert {p["spec"]["nodeName"] for p in found} == set(nodes)
    began = time.monotonic()
    gang("large", 3, 3)
    path = f"/api/v1/namespaces/{space}/pods/large-2"
    told = plane.api.until(path, lambda p: why_unschedulable(p) is not None)
    assert time.monotonic() - began < 1.5, "the verdict takes too long"
    assert "GPUs" in str(why_unschedulable(told))
    assert len(bound(plane, space)) == 2


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
          "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}]}, "topology spread"),
        ({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
          {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}]}}}, "pod affinity"),
        ({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}, "persistent volume"),
        ({"nodeSelector": {"zone": "nowhere"}}, "node selector"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_with_the_reason(
    plane: ControlPlane, one: Scheduler, space: str, spec: dict, why: str
) -> None:
    pod = gpu_pod(plane, space, "odd", **spec)
    told = plane.api.until(pod_path(pod), lambda p: why_unschedulable(p) is not None)
    assert why in str(why_unschedulable(told)), why_unschedulable(told)
    assert not bound(plane, space)


def test_a_gated_pod_waits_for_its_gates(plane: ControlPlane, one: Scheduler, space: str) -> None:
    pod = gpu_pod(plane, space, "gated", schedulingGates=[{"name": "quota.example.com/ok"}])
    gpu_pod(plane, space, "other")
    wait_for(plane, space, 1)
    assert [p["metadata"]["name"] for p in bound(plane, space)] == ["other"]
    plane.api.patch(pod_path(pod), {"spec": {"schedulingGates": None}})
    wait_for(plane, space, 2)


def test_a_wrong_annotation_is_named(plane: ControlPlane, one: Scheduler, space: str) -> None:
    pod = gpu_pod(plane, space, "wrong", annotations={"roommate.dev/gpu-share": "130"})
    told = plane.api.until(pod_path(pod), lambda p: why_unschedulable(p) is not None)
    assert "roommate.dev/gpu-share: expected a number from 1 to 100" in str(why_unschedulable(told))


def test_a_snapshot_decides_the_same_and_explains(
    plane: ControlPlane, one: Scheduler, space: str, tmp_path: Path
) -> None:
    gpu_pod(plane, space, "seen")
    wait_for(plane, space, 1)
    snapshot = tmp_path / "snapshot.jsonl"
    snapshot.write_text(one.page("/debug/snapshot") or "")
    done = subprocess.run([PROGRAM, "replay", snapshot], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    words = [PROGRAM, "explain", f"{space}/seen", "--journal", snapshot]
    told = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "started on" in told.stdout, told.stdout


def test_metrics_are_counted(plane: ControlPlane, one: Scheduler, space: str) -> None:
    before = one.metric('roommate_schedule_attempts_total{result="scheduled"')
    gpu_pod(plane, space, "counted")
    wait_for(plane, space, 1)
    one.plane.programs.until(
        one.name, "counts a binding",
        lambda: one.metric('roommate_schedule_attempts_total{result="scheduled"') > before,
    )  # fmt: skip
    assert one.metric("roommate_ledger_over_allocated_gpus") == 0
    assert one.page("/healthz") == "ok\n"
    with urllib.request.urlopen(f"http://{one.at}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")


def test_a_lost_api_server_is_found_again(plane: ControlPlane, one: Scheduler, space: str) -> None:
    plane.stop_api_server()
    time.sleep(1)
    plane.start_api_server()
    gpu_pod(plane, space, "after")
    wait_for(plane, space, 1, within_s=60)


def test_another_scheduler_takes_over(
    plane: ControlPlane, nodes: list[str], space: str, one: Scheduler
) -> None:
    one.stop()
    words = ("--lease-seconds", "2", "--lease-namespace", space)
    first = Scheduler(plane, "first", *words)
    first.until_ready()
    plane.programs.until("first", "leads", first.leads)
    second = Scheduler(plane, "second", *words)
    second.until_ready()
    assert not second.leads()
    gpu_pod(plane, space, "a")
    (pod,) = wait_for(plane, space, 1)
    term = (assignment(pod) or {})["term"]
    first.kill()
    gpu_pod(plane, space, "b")
    found = wait_for(plane, space, 2)
    (later,) = [p for p in found if p["metadata"]["name"] == "b"]
    assert (assignment(later) or {})["term"] > term
    assert second.leads() and "leads, term" in second.log()
    # A scheduler that ends in order gives its lease back: nobody has to wait for it to expire.
    first.start_again()
    first.until_ready()
    second.stop()
    plane.programs.until("first", "leads again", first.leads, within_s=1.9)
    first.stop()
    one.start_again()
    one.until_ready()


def test_killed_a_hundred_times_it_gives_nothing_away_twice(
    plane: ControlPlane, nodes: list[str], space: str, one: Scheduler
) -> None:
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    print(f"seed {seed}")
    where: dict[str, str] = {}
    made = 0

    def look() -> list[dict]:
        found = pods(plane, space)
        assert not over_allocated(found), over_allocated(found)
        for pod in found:
            uid, node = pod["metadata"]["uid"], pod["spec"].get("nodeName")
            assert not node or where.setdefault(uid, node) == node, "a pod was bound twice"
        return found

    for _ in range(KILLS):
        for _ in range(chance.randrange(1, 5)):
            share = chance.choice(["25", "50", "100"])
            gpu_pod(plane, space, f"p{made}", annotations={"roommate.dev/gpu-share": share})
            made += 1
        time.sleep(chance.uniform(0.0, 0.4))
        one.kill()
        found = look()
        for pod in chance.sample(found, min(len(found), chance.randrange(0, 6))):
            plane.api.delete(pod_path(pod), gracePeriodSeconds=0)
        one.start_again()
    one.until_ready()
    # Whoever still waits gets its place as others go.
    end = time.monotonic() + 120
    while found := look():
        assert time.monotonic() < end, f"{len(found)} pods are left of {made}"
        for pod in found:
            if pod["spec"].get("nodeName"):
                plane.api.delete(pod_path(pod), gracePeriodSeconds=0)
        time.sleep(0.1)
    assert len(where) > KILLS / 2
    one.plane.programs.until(one.name, "has nothing left", lambda: one.metric("roommate_ledger_pods") == 0)


def test_pods_of_a_node_that_dies_run_elsewhere(
    plane: ControlPlane, kwok: KwokNodes, one: Scheduler, space: str
) -> None:
    (name,) = kwok.add(prefix="dying", gpus=SLOTS, labels={"roommate.dev/slots": str(SLOTS), "pool": space})
    kwok.until_ready([name])
    template = {
        "metadata": {"labels": {"set": space}},
        "spec": {
            "schedulerName": "roommate", "terminationGracePeriodSeconds": 0,
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "pool", "operator": "In", "values": [space]}]}
                ]
            }}},
            "containers": [
                {"name": "main", "image": "any", "resources": {"limits": {"roommate.dev/gpu": "1"}}}
            ],
        },
    }  # fmt: skip
    # Fake nodes complete the pods of Jobs at once.
    spec = {"replicas": 1, "selector": {"matchLabels": {"set": space}}, "template": template}
    sets = f"/apis/apps/v1/namespaces/{space}/replicasets"
    plane.api.post(sets, {"metadata": {"name": "train"}, "spec": spec})
    (pod,) = wait_for(plane, space, 1)
    assert pod["spec"]["nodeName"] == name
    (other,) = kwok.add(prefix="spare", gpus=SLOTS, labels={"roommate.dev/slots": str(SLOTS), "pool": space})
    kwok.until_ready([other])
    kwok.remove([name])
    path = f"/api/v1/namespaces/{space}/pods"
    try:
        # The controller manager gives up pods of a node that is gone after 40 to 80 s.
        plane.api.until(
            path, lambda found: any(p["spec"].get("nodeName") == other for p in found["items"]), within_s=120
        )
    finally:
        plane.api.delete(f"{sets}/train", propagationPolicy="Background")
        kwok.remove([other])


def test_the_bench_counts_bindings_of_both(plane: ControlPlane, one: Scheduler) -> None:
    one.stop()
    words = ["--nodes", "20", "--pods", "60", "--peer", "kube-scheduler", "-o", "json"]
    peer = ["--peer-program", str(plane.bin / "kube-scheduler")]
    command = [PROGRAM, "kube", "bench", "--kubeconfig", plane.kubeconfig(), *words, *peer]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["bound"] == figures["peer"]["bound"] == 60
    assert figures["over_allocations"] == 0 and figures["cpu_s"] > 0
    assert figures["unschedulable_gang_s"] < 1.5
    one.start_again()
