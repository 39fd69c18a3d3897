"""The custom resources on a real API server: their schemas, queues with quotas, jobs and services."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from testbed import ApiError, ControlPlane, KwokNodes, pod_path
from testbed.api import Object
from testbed.resources import GROUP, PLURALS, install_definitions, make, path_of
from testbed.roommate import (
    SLOTS,
    Scheduler,
    assignment,
    bound,
    delete_all,
    gpu_pod,
    pods,
    why_unschedulable,
)


def told(found: Object, kind: str) -> tuple[str, str, str]:
    """Status, reason and message of a condition."""
    for c in found.get("status", {}).get("conditions", []):
        if c["type"] == kind:
            return c["status"], c["reason"], c["message"]
    return "", "", ""


@pytest.fixture(scope="module")
def crds(plane: ControlPlane) -> Iterator[None]:
    """The definitions, installed as the program prints them. Tests of a scheduler without them run in
    other files.
    """
    names = install_definitions(plane)
    yield
    for name in names:
        plane.api.delete(name)
        plane.api.until_gone(name)


@pytest.fixture(scope="module")
def nodes(plane: ControlPlane, kwok: KwokNodes) -> Iterator[list[str]]:
    """Two nodes with two GPUs each, of 16000 MiB."""
    labels = {"roommate.dev/slots": str(SLOTS), "nvidia.com/gpu.memory": "16000"}
    names = kwok.add(2, prefix="quota", gpus=2 * SLOTS, labels=labels)
    kwok.until_ready(names)
    yield names
    kwok.remove(names)


@pytest.fixture(scope="module")
def one(plane: ControlPlane, crds: None, nodes: list[str]) -> Iterator[Scheduler]:
    scheduler = Scheduler(plane, "scheduler-crds", "--no-leader-election")
    scheduler.until_ready()
    yield scheduler
    scheduler.stop()


@pytest.fixture
def space(plane: ControlPlane, crds: None, namespace: str) -> Iterator[str]:
    yield namespace
    for plural in ("gpujobs", "gpuservices"):
        for found in plane.api.get(path_of(plural, namespace=namespace))["items"]:
            plane.api.delete(path_of(plural, found["metadata"]["name"], namespace))
    end = time.monotonic() + 30
    while pods(plane, namespace) and time.monotonic() < end:
        delete_all(plane, namespace)
        time.sleep(0.1)
    for plural in ("queues", "gpuprofiles"):
        for found in plane.api.get(path_of(plural))["items"]:
            plane.api.delete(path_of(plural, found["metadata"]["name"]))


def until_bound(plane: ControlPlane, space: str, n: int, within_s: float = 20.0) -> list[Object]:
    path = f"/api/v1/namespaces/{space}/pods"
    plane.api.until(path, lambda found: sum("nodeName" in p["spec"] for p in found["items"]) >= n, within_s)
    return bound(plane, space)


def names_of(found: list[Object]) -> list[str]:
    return sorted(p["metadata"]["name"] for p in found)


def queued(
    plane: ControlPlane, space: str, name: str, queue: str, share: int = 100, memory: int = 1000, **more: Any
) -> Object:
    annotations = {"roommate.dev/gpu-share": str(share), "roommate.dev/gpu-mem": str(memory)}
    return gpu_pod(plane, space, name, labels={"roommate.dev/queue": queue}, annotations=annotations, **more)


def test_without_them_the_scheduler_says_so_once(
    plane: ControlPlane, nodes: list[str], namespace: str
) -> None:
    with pytest.raises(ApiError) as missing:
        plane.api.get(GROUP)
    assert missing.value.status == 404, "another test left the definitions"
    bare = Scheduler(plane, "scheduler-bare", "--no-leader-election")
    bare.until_ready()
    queued(plane, namespace, "alone", "nobody")
    until_bound(plane, namespace, 1)
    bare.stop()
    assert bare.log().count("are not installed") == 1, bare.log()
    delete_all(plane, namespace)


@pytest.mark.parametrize(
    ("kind", "spec", "why"),
    [
        ("Queue", {"mayBorrow": True}, "mayBorrow needs a quota"),
        ("Queue", {"quota": -1}, "spec.quota"),
        ("Queue", {"quota": 8, "weight": 0}, "expected a weight above 0"),
        ("GpuProfile", {"stepSeconds": 0}, "expected seconds above 0"),
        ("GpuProfile", {"batch": {"usual": 8, "least": 9, "most": 16}}, "expected least <= usual <= most"),
        ("GpuProfile", {"batch": {"usual": 8, "least": 8, "most": 8}, "service": {"maxBatch": 1}},
         "batch is for training and service for services"),
        ("GpuService", {"objective": "25ms", "image": "x"}, "expected an objective such as p99=25ms"),
        ("GpuService", {"objective": "p99=25ms"}, "give either image (with command) or template"),
        ("GpuJob", {}, "give either image (with command) or template"),
        ("GpuJob", {"image": "x", "template": {"spec": {}}}, "give either image (with command) or template"),
        ("GpuJob", {"template": {"spec": {}}, "command": ["x"]}, "command, args and env belong to image"),
        ("GpuJob", {"image": "x", "class": "gold"}, "Unsupported value"),
        ("GpuJob", {"image": "x", "class": "best-effort", "maxSlowdown": 2}, "only for class guaranteed"),
        ("GpuJob", {"image": "x", "gpus": 65}, "spec.gpus"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_words(
    plane: ControlPlane, space: str, kind: str, spec: Object, why: str
) -> None:
    namespace = space if kind in ("GpuJob", "GpuService") else None
    with pytest.raises(ApiError) as refused:
        make(plane, kind, "wrong", spec, namespace)
    assert refused.value.status == 422 and why in refused.value.message, refused.value.message


def test_a_name_that_no_pod_could_have_is_refused(plane: ControlPlane, space: str) -> None:
    with pytest.raises(ApiError, match="at most 50 letters"):
        make(plane, "GpuJob", "x" * 51, {"image": "x"}, space)
    with pytest.raises(ApiError, match="a letter first"):
        make(plane, "GpuService", "7b", {"image": "x", "objective": "p99=25ms"}, space)


def test_a_template_alone_is_enough(plane: ControlPlane, space: str) -> None:
    template = {"spec": {"containers": [{"name": "main", "image": "any"}]}}
    made = make(plane, "GpuJob", "plain", {"template": template}, space)
    assert made["spec"]["template"] == template and made["spec"]["class"] == "guaranteed"
    with pytest.raises(ApiError, match="a GpuJob cannot be changed"):
        plane.api.patch(path_of("gpujobs", "plain", space), {"spec": {"gpus": 2}})


def test_fields_are_explained(plane: ControlPlane, crds: None) -> None:
    expect = {
        "queues.spec.quota": "GPUs that the pods of the queue may use together",
        "gpujobs.spec.pods": "Several are a gang",
        "gpuservices.spec.objective": "The latency to keep",
        "gpuprofiles.spec.stepSeconds": "Seconds of one step alone",
        "queues.status.conditions.reason": "Why, in one word",
    }
    end = time.monotonic() + 30
    for field, text in expect.items():
        while True:
            try:
                assert text in " ".join(plane.kubectl("explain", field).split())
                break
            except AssertionError:
                # The API server publishes the schemas a moment after it serves the resources.
                if time.monotonic() > end:
                    raise
            time.sleep(0.5)


def test_kubectl_prints_what_matters_in_columns(plane: ControlPlane, space: str) -> None:
    make(plane, "Queue", "columns", {"quota": 7.5, "mayBorrow": True})
    table = plane.api.table(path_of("queues"))
    columns = [c["name"] for c in table["columnDefinitions"]]
    assert columns[:5] == ["Name", "Quota", "Used", "Waiting", "Borrows"]
    (row,) = [r["cells"] for r in table["rows"] if r["cells"][0] == "columns"]
    assert row[1] == 7.5 and row[4] is True
    resources = {r["name"]: r for r in plane.api.get(GROUP)["resources"]}
    assert all(resources[plural]["categories"] == ["roommate"] for plural in PLURALS)
    assert resources["queues"]["shortNames"] == ["gpuq"] and "queues/status" in resources


def test_a_quota_holds_back_and_releases_in_order(plane: ControlPlane, one: Scheduler, space: str) -> None:
    make(plane, "Queue", "team-a", {"quota": 1.5})
    queued(plane, space, "a-0", "team-a")
    until_bound(plane, space, 1)
    queued(plane, space, "a-1", "team-a", share=50)
    until_bound(plane, space, 2)
    third = queued(plane, space, "a-2", "team-a")
    waits = plane.api.until(pod_path(third), lambda p: why_unschedulable(p) is not None)
    assert why_unschedulable(waits) == "queue team-a uses 1.5 of its 1.5 GPUs; this needs 1"
    queued(plane, space, "a-3", "team-a", share=50)
    # Pods of no queue are not concerned.
    gpu_pod(plane, space, "other")
    assert names_of(until_bound(plane, space, 3)) == ["a-0", "a-1", "other"]
    status = plane.api.until(
        path_of("queues", "team-a"), lambda q: q.get("status", {}).get("waiting") == 2
    )["status"]  # fmt: skip
    assert (status["used"], status["running"], status["heldBack"]) == (1.5, 2, 2)
    found = plane.api.get(path_of("queues", "team-a"))
    expect = ("False", "QuotaUsed", "uses 1.5 of its 1.5 GPUs; 2 wait for its quota")
    assert told(found, "Admits") == expect
    assert status["observedGeneration"] == found["metadata"]["generation"] == 1
    # A half is too little for the one that came first; the one behind it may not overtake it.
    plane.api.delete(f"/api/v1/namespaces/{space}/pods/a-1", gracePeriodSeconds=0)
    time.sleep(1.5)
    assert names_of(bound(plane, space)) == ["a-0", "other"]
    plane.api.delete(f"/api/v1/namespaces/{space}/pods/a-0", gracePeriodSeconds=0)
    assert names_of(until_bound(plane, space, 3)) == ["a-2", "a-3", "other"]


def test_a_changed_quota_counts_at_once(plane: ControlPlane, one: Scheduler, space: str) -> None:
    make(plane, "Queue", "team-b", {"quota": 0})
    pod = queued(plane, space, "b-0", "team-b")
    waits = plane.api.until(pod_path(pod), lambda p: why_unschedulable(p) is not None)
    expect = "needs 1 GPU, more than the quota of its queue; queue team-b uses 0 of its 0 GPUs"
    assert why_unschedulable(waits) == expect
    plane.api.patch(path_of("queues", "team-b"), {"spec": {"quota": 1}})
    until_bound(plane, space, 1)
    other = queued(plane, space, "b-1", "team-b")
    plane.api.until(pod_path(other), lambda p: why_unschedulable(p) is not None)
    plane.api.delete(path_of("queues", "team-b"))
    until_bound(plane, space, 2)


def test_a_restarted_scheduler_keeps_the_quota(plane: ControlPlane, one: Scheduler, space: str) -> None:
    make(plane, "Queue", "team-c", {"quota": 2})
    for n in range(4):
        queued(plane, space, f"c-{n}", "team-c")
    until_bound(plane, space, 2)
    before = names_of(bound(plane, space))
    one.kill()
    one.start_again()
    one.until_ready()
    time.sleep(2)
    assert names_of(bound(plane, space)) == before


def test_what_was_borrowed_is_given_back(plane: ControlPlane, one: Scheduler, space: str) -> None:
    make(plane, "Queue", "rich", {"quota": 3})
    make(plane, "Queue", "poor", {"quota": 1, "mayBorrow": True})
    # None fits beside another.
    for n in range(4):
        queued(plane, space, f"poor-{n}", "poor", memory=9000, terminationGracePeriodSeconds=0)
    until_bound(plane, space, 4)
    found = plane.api.until(path_of("queues", "poor"), lambda q: told(q, "Admits")[1] == "Borrows")
    assert told(found, "Admits")[2] == "uses 4 of its 1 GPUs"
    for n in range(2):
        queued(plane, space, f"rich-{n}", "rich", memory=9000)
    path = f"/api/v1/namespaces/{space}/pods"

    def rich_run(found: Object) -> bool:
        there = [p for p in found["items"] if p["metadata"]["name"].startswith("rich")]
        return all("nodeName" in p["spec"] for p in there)

    plane.api.until(path, rich_run, within_s=40)
    # Only as much as was needed, the newest first.
    assert names_of(bound(plane, space)) == ["poor-0", "poor-1", "rich-0", "rich-1"]


def test_a_profile_says_what_pods_need(plane: ControlPlane, one: Scheduler, space: str) -> None:
    make(plane, "GpuProfile", "bert", {"stepSeconds": 0.2, "memoryMiB": 3000})
    found = plane.api.until(path_of("gpuprofiles", "bert"), lambda p: told(p, "Known")[0] == "True")
    assert found["status"]["observedGeneration"] == 1
    gpu_pod(plane, space, "known", annotations={"roommate.dev/profile": "bert"})
    gpu_pod(
        plane, space, "own", annotations={"roommate.dev/profile": "bert", "roommate.dev/gpu-mem": "500"}
    )  # fmt: skip
    memory = {
        p["metadata"]["name"]: (assignment(p) or {})["knobs"]["mem_mib"] for p in until_bound(plane, space, 2)
    }
    assert memory == {"known": 3000, "own": 500}


def test_a_gpu_job_runs_as_a_gang(plane: ControlPlane, one: Scheduler, space: str) -> None:
    spec = {"image": "any", "pods": 2, "gpus": 2, "class": "best-effort", "queue": "default"}
    made = make(plane, "GpuJob", "train", spec, space)
    found = until_bound(plane, space, 2)
    assert len({p["spec"]["nodeName"] for p in found}) == 2
    assert all((assignment(p) or {})["gang"] for p in found)
    job = plane.api.get(f"/apis/batch/v1/namespaces/{space}/jobs/train")
    (owner,) = job["metadata"]["ownerReferences"]
    assert owner["uid"] == made["metadata"]["uid"] and owner["controller"]
    path = path_of("gpujobs", "train", space)
    # KWOK lets pods of a Job run, and end well a moment later.
    ended = plane.api.until(path, lambda j: j.get("status", {}).get("phase") == "Succeeded", within_s=60)
    assert ended["status"]["succeeded"] == 2 and told(ended, "Complete")[:2] == ("True", "Succeeded")
    assert told(ended, "Accepted")[0] == "True" and ended["status"]["observedGeneration"] == 1
    plane.api.delete(path)
    plane.api.until_gone(f"/apis/batch/v1/namespaces/{space}/jobs/train")
    plane.api.until_gone(f"/api/v1/namespaces/{space}/services/train")


def test_a_gpu_job_says_why_it_waits(plane: ControlPlane, one: Scheduler, space: str) -> None:
    make(plane, "Queue", "empty", {"quota": 0.5})
    make(plane, "GpuJob", "waits", {"image": "any", "queue": "empty"}, space)
    path = path_of("gpujobs", "waits", space)
    found = plane.api.until(path, lambda j: "quota" in told(j, "Running")[2], within_s=40)
    expect = "needs 1 GPU, more than the quota of its queue; queue empty uses 0 of its 0.5 GPUs"
    assert told(found, "Running") == ("False", "Waits", expect)
    assert found["status"]["phase"] == "Pending"


def test_what_others_made_is_left_alone(plane: ControlPlane, one: Scheduler, space: str) -> None:
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "any"}]}}
    theirs = {"metadata": {"name": "taken"}, "spec": {"suspend": True, "template": template}}
    plane.api.post(f"/apis/batch/v1/namespaces/{space}/jobs", theirs)
    make(plane, "GpuJob", "taken", {"image": "any"}, space)
    path = path_of("gpujobs", "taken", space)
    found = plane.api.until(path, lambda j: told(j, "Accepted")[0] == "False")
    assert told(found, "Accepted")[1] == "NameTaken"
    job = plane.api.get(f"/apis/batch/v1/namespaces/{space}/jobs/taken")
    assert "ownerReferences" not in job["metadata"] and job["spec"]["suspend"]


def test_a_template_that_is_no_pod_is_told_so(plane: ControlPlane, one: Scheduler, space: str) -> None:
    template = {"spec": {"containers": [{"name": "NO", "image": "any"}]}}
    make(plane, "GpuJob", "odd", {"template": template}, space)
    found = plane.api.until(
        path_of("gpujobs", "odd", space), lambda j: told(j, "Accepted")[0] == "False"
    )  # fmt: skip
    _, reason, message = told(found, "Accepted")
    assert reason == "Refused" and "containers[0].name" in message, message


def test_a_gpu_service_makes_its_objects(plane: ControlPlane, one: Scheduler, space: str) -> None:
    spec = {"objective": "p99=25ms", "model": "bert", "image": "any", "port": 9000, "sharePercent": 50}
    make(plane, "GpuService", "front", spec, space)
    path = path_of("gpuservices", "front", space)
    found = plane.api.until(path, lambda s: told(s, "Available")[0] == "True", within_s=60)
    assert found["status"]["readyReplicas"] == 1
    assert found["status"]["address"] == f"front.{space}.svc:9000"
    (pod,) = bound(plane, space)
    assert pod["metadata"]["annotations"]["roommate.dev/objective"] == "p99=25ms"
    service = plane.api.get(f"/api/v1/namespaces/{space}/services/front")
    assert service["spec"]["selector"] == {"roommate.dev/service": "front"}
    # An autoscaler changes the number of replicas through the subresource.
    plane.api.patch(f"{path}/scale", {"spec": {"replicas": 2}})
    deployment = f"/apis/apps/v1/namespaces/{space}/deployments/front"
    plane.api.until(deployment, lambda d: d["spec"]["replicas"] == 2)
    plane.api.until(path, lambda s: s["status"]["readyReplicas"] == 2, within_s=60)
    # What somebody else changes of what we said is put right when it is seen.
    plane.api.patch(deployment, {"spec": {"replicas": 3}})
    plane.api.until(deployment, lambda d: d["spec"]["replicas"] == 2)
    plane.api.delete(path)
    plane.api.until_gone(deployment)


def test_the_controller_comes_to_rest(plane: ControlPlane, one: Scheduler, space: str) -> None:
    make(plane, "GpuService", "calm", {"objective": "p99=1s", "image": "any"}, space)
    path = path_of("gpuservices", "calm", space)
    plane.api.until(path, lambda s: told(s, "Available")[0] == "True", within_s=60)
    time.sleep(2)
    deployment = f"/apis/apps/v1/namespaces/{space}/deployments/calm"
    before = [plane.api.get(p)["metadata"]["resourceVersion"] for p in (path, deployment)]
    time.sleep(5)
    after = [plane.api.get(p)["metadata"]["resourceVersion"] for p in (path, deployment)]
    assert before == after
