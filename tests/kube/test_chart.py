"""Roommate's Helm chart on a real API server: what it installs is enough, and no more than that."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from testbed import Api, ApiError, ControlPlane, KwokNodes, Object, RealNode, condition, pod_path
from testbed.chart import CHART, arguments, helm, rendered, values
from testbed.programs import ROOT, free_port
from testbed.roommate import (
    PROGRAM,
    SLOTS,
    Scheduler,
    assignment,
    bound,
    delete_all,
    gpu_pod,
    why_unschedulable,
)

EVERYTHING = {
    "webhook__enabled": True,
    "webhook__certManager__enabled": True,
    "metrics__serviceMonitor__enabled": True,
    "metrics__annotations": True,
    "dashboard__enabled": True,
    "agent__runtimeClassName": "nvidia",
    "scheduler__parameters": {"push": 0.5},
}
CLUSTER_WIDE = {
    "clusterroles": "rbac.authorization.k8s.io/v1",
    "clusterrolebindings": "rbac.authorization.k8s.io/v1",
    "validatingadmissionpolicies": "admissionregistration.k8s.io/v1",
    "validatingadmissionpolicybindings": "admissionregistration.k8s.io/v1",
    "mutatingwebhookconfigurations": "admissionregistration.k8s.io/v1",
}


@pytest.fixture(scope="module")
def installed(plane: ControlPlane) -> Iterator[str]:
    """The namespace of an installed chart, without a pod of its own: no image exists here."""
    space = plane.namespace()
    given = values(scheduler__replicas=0, webhook__enabled=True, webhook__failurePolicy="Ignore")
    done = helm(plane, "install", "roommate", CHART, "-n", space, *given)
    assert done.returncode == 0, done.stderr
    yield space
    done = helm(plane, "uninstall", "roommate", "-n", space)
    assert done.returncode == 0, done.stderr
    for kind, version in CLUSTER_WIDE.items():
        left = plane.api.get(f"/apis/{version}/{kind}", labelSelector="app.kubernetes.io/instance=roommate")
        assert not left["items"], f"{kind} stay"


@pytest.fixture(scope="module")
def nodes(kwok: KwokNodes) -> Iterator[list[str]]:
    names = kwok.add(2, prefix="chart", gpus=SLOTS, labels={"roommate.dev/slots": str(SLOTS)})
    kwok.until_ready(names)
    yield names
    kwok.remove(names)


@pytest.fixture(scope="module")
def one(plane: ControlPlane, installed: str, nodes: list[str]) -> Iterator[Scheduler]:
    """The scheduler, as the Deployment of the chart starts it and with its service account."""
    path = f"/apis/apps/v1/namespaces/{installed}/deployments/roommate-scheduler"
    words = arguments(plane.api.get(path))
    assert words[:2] == ["kube", "scheduler"]
    words = [word for word in words[2:] if not word.startswith(("--listen", "--max-tenants", "--dashboard"))]
    words.append(f"--dashboard=127.0.0.1:{free_port()}")
    scheduler = Scheduler(plane, "chart-scheduler", *words, account=f"{installed}/roommate-scheduler")
    plane.programs.until(scheduler.name, "leads", scheduler.leads, within_s=60)
    yield scheduler
    scheduler.stop()


@pytest.fixture
def space(plane: ControlPlane, namespace: str) -> Iterator[str]:
    yield namespace
    delete_all(plane, namespace)


def api_of(plane: ControlPlane, account: str) -> Api:
    return plane.api_of(plane.token(account))


def until_bound(plane: ControlPlane, space: str, n: int) -> list[Object]:
    path = f"/api/v1/namespaces/{space}/pods"
    plane.api.until(path, lambda found: sum("nodeName" in p["spec"] for p in found["items"]) >= n, 20.0)
    return bound(plane, space)


def refused(what: Callable[[], Any]) -> str:
    with pytest.raises(ApiError) as caught:
        what()
    assert caught.value.status in (403, 422), caught.value
    return caught.value.message


def test_the_chart_has_no_faults(plane: ControlPlane) -> None:
    for given in ({}, EVERYTHING):
        done = helm(plane, "lint", "--strict", CHART, *values(**given))
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_manifest_of_krew_is_whole(plane: ControlPlane) -> None:
    text = (CHART.parent.parent / "krew/roommate.yaml").read_text()
    manifest = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for name, value in (("VERSION", "1.2.3"), ("URL", "https://example.com/x.tar.gz"), ("SHA256", "0" * 64)):
        assert manifest.count(f"@{name}@") == 1
        manifest = manifest.replace(f"@{name}@", value)
    assert "@" not in manifest
    read = json.loads(
        plane.kubectl("annotate", "--local", "-f", "-", "nothing-", "-o", "json", stdin=manifest)
    )
    assert read["spec"]["version"] == "v1.2.3"
    (platform,) = read["spec"]["platforms"]
    assert platform["bin"] in [file["from"] for file in platform["files"]]


def test_the_recipe_of_the_image_copies_what_there_is() -> None:
    folder = CHART.parent.parent / "container"
    lines = (folder / "Containerfile").read_text().splitlines()
    ignored = (folder / "Containerfile.dockerignore").read_text().splitlines()
    own = [line for line in lines if line.startswith(("COPY", "ADD")) and "--from" not in line]
    copied = [line.split()[1:-1] for line in own]
    sources = [word for words in copied for word in words if not word.startswith("--")]
    assert {"Cargo.toml", "Cargo.lock", "crates", "profiles"} <= set(sources)
    for source in sources:
        assert f"!{source}" in ignored, f"{source} is not sent to the builder"
        assert source.startswith("dist/") or (ROOT / source).exists(), source


def test_all_values_render_to_objects_that_fit_each_other(plane: ControlPlane) -> None:
    objects = rendered(plane, "gpu", **EVERYTHING)
    kinds = {o["kind"] for o in objects}
    assert {"DaemonSet", "MutatingWebhookConfiguration", "ServiceMonitor", "Certificate"} <= kinds
    accounts = {o["metadata"]["name"] for o in objects if o["kind"] == "ServiceAccount"}
    services = [o for o in objects if o["kind"] == "Service"]
    workloads = [o for o in objects if o["kind"] in ("Deployment", "DaemonSet")]
    assert len(workloads) == len(services) == 3
    for workload in workloads:
        pod = workload["spec"]["template"]
        assert pod["spec"]["serviceAccountName"] in accounts
        labels = pod["metadata"]["labels"]
        fits = [s for s in services if s["spec"]["selector"].items() <= labels.items()]
        assert len(fits) == 1, "each part has one Service"
        (port,) = fits[0]["spec"]["ports"]
        (container,) = pod["spec"]["containers"]
        assert port["targetPort"] in [p["name"] for p in container["ports"]]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        is_agent = workload["kind"] == "DaemonSet"
        assert container["securityContext"].get("runAsNonRoot") is (None if is_agent else True)
        assert pod["spec"].get("hostPID") is (True if is_agent else None)
        assert "hostNetwork" not in pod["spec"]


@pytest.mark.parametrize("part", ["scheduler", "agent", "webhook"])
def test_the_program_takes_the_flags_of_the_chart(plane: ControlPlane, part: str) -> None:
    given = EVERYTHING | {"agent__devices": 2}
    flags = set()
    for more in ({}, {"leaderElection__enabled": False, "scheduler__replicas": 1},
                 {"webhook__certManager__enabled": False}):  # fmt: skip
        workloads = [
            o for o in rendered(plane, "gpu", **given | more) if o["kind"] in ("Deployment", "DaemonSet")
        ]
        (workload,) = [w for w in workloads if w["metadata"]["name"] == f"roommate-{part}"]
        words = arguments(workload)
        assert words[:2] == ["kube", part]
        flags |= {word.split("=")[0] for word in words[2:]}
    done = subprocess.run([PROGRAM, "kube", part, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    known = set(re.findall(r"--[a-z-]+", done.stdout))
    assert flags <= known, f"not known: {flags - known}"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"scheduler__replica": 2}, "additional properties 'replica' not allowed"),
        ({"agent__device": "gpu"}, "agent.device"),
        ({"leaderElection__enabled": False}, "two schedulers would bind the same pods"),
        ({"scheduler__serviceAccount__create": False}, "scheduler.serviceAccount.name is needed"),
    ],
)
def test_wrong_values_are_refused(plane: ControlPlane, given: dict[str, Any], why: str) -> None:
    done = helm(plane, "template", "roommate", CHART, *values(**given))
    assert done.returncode != 0
    assert why.replace("'", "") in done.stderr.replace("'", "").replace("/", "."), done.stderr


def test_an_upgrade_changes_what_its_values_say(plane: ControlPlane) -> None:
    space = plane.namespace()
    own = {"fullnameOverride": "second", "scheduler__replicas": 0, "agent__enabled": False}
    done = helm(plane, "install", "second", CHART, "-n", space, *values(**own))
    assert done.returncode == 0, done.stderr
    try:
        done = helm(plane, "upgrade", "second", CHART, "-n", space, *values(**own, schedulerName="other"))
        assert done.returncode == 0, done.stderr
        found = plane.api.get(f"/apis/apps/v1/namespaces/{space}/deployments/second-scheduler")
        assert "--name=other" in arguments(found)
    finally:
        helm(plane, "uninstall", "second", "-n", space)


def test_its_service_account_is_enough_for_the_scheduler(
    plane: ControlPlane, installed: str, one: Scheduler, space: str
) -> None:
    # It was elected, ...
    lease = plane.api.get(f"/apis/coordination.k8s.io/v1/namespaces/{installed}/leases/roommate-scheduler")
    assert lease["spec"]["holderIdentity"]
    # ... binds a gang, and tells a pod that it was bound, ...
    for n in range(2):
        gpu_pod(
            plane, space, f"gang-{n}", labels={"scheduling.x-k8s.io/pod-group": "gang"},
            annotations={"roommate.dev/pod-group-size": "2", "roommate.dev/gpu-share": "100"},
        )  # fmt: skip
    found = until_bound(plane, space, 2)
    assert all(assignment(pod) for pod in found)
    path = f"/apis/events.k8s.io/v1/namespaces/{space}/events"
    plane.api.until(path, lambda all: sum(e["reason"] == "Scheduled" for e in all["items"]) == 2)
    # ... explains why another waits, ...
    waits = gpu_pod(plane, space, "waits", nodeSelector={"zone": "nowhere"})
    told = plane.api.until(pod_path(waits), lambda p: why_unschedulable(p) is not None)
    assert why_unschedulable(told)
    # ... changes the assignment of a pod that runs, ...
    limited = {"metadata": {"annotations": {"roommate.dev/gpu-limit": "70"}}}
    for pod in found:
        plane.api.patch(pod_path(pod), limited)
    for pod in found:
        plane.api.until(
            pod_path(pod),
            lambda p: (assignment(p) or {}).get("knobs", {}).get("sm_most_permille") == 700,
        )
    # ... and evicts what is left of a gang that is not whole any more.
    plane.api.delete(pod_path(found[0]), gracePeriodSeconds=0)
    plane.api.until_gone(pod_path(found[1]))
    events = plane.api.until(path, lambda all: any(e["reason"] == "Preempted" for e in all["items"]))
    (evicted,) = [e for e in events["items"] if e["reason"] == "Preempted"]
    assert evicted["regarding"]["name"] == found[1]["metadata"]["name"]
    assert "orbidden" not in one.log(), one.log()


def test_the_pod_of_the_scheduler_runs_confined_on_a_real_node(
    plane: ControlPlane, installed: str, node: RealNode
) -> None:
    path = f"/apis/apps/v1/namespaces/{installed}/deployments/roommate-scheduler"
    spec = plane.api.get(path)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    port, server = free_port(), urlsplit(plane.server)
    container |= {
        "image": node.add_image("scheduler", {"/bin/roommate": PROGRAM}, ["/bin/roommate"]),
        "imagePullPolicy": "Never",
        "command": ["/bin/roommate"],
        "args": [word.replace(":10261", f":{port}").replace(":10263", ":0") for word in container["args"]],
        "ports": [{"name": "metrics", "containerPort": port}],
        # There is no kube-proxy, which would give the API server its address in the cluster.
        "env": [
            {"name": "KUBERNETES_SERVICE_HOST", "value": str(server.hostname)},
            {"name": "KUBERNETES_SERVICE_PORT", "value": str(server.port)},
        ],
    }
    made = plane.pod(installed, "confined", spec | {"hostNetwork": True, "schedulerName": "none"})
    plane.api.bind(made, node.name)
    try:
        plane.api.until(pod_path(made), lambda p: condition(p, "Ready") == "True", within_s=60)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
            assert answer.read().startswith(b"ok")
        said = node.pod_log(made, "scheduler")
        assert "leads, term" in said or "waits: " in said, said
    finally:
        plane.api.delete(pod_path(made))
        plane.api.until_gone(pod_path(made))


def test_its_service_account_is_enough_for_the_page(plane: ControlPlane, one: Scheduler) -> None:
    page = next(word for word in one.command if str(word).startswith("--dashboard="))
    url = f"http://{str(page).split('=')[1]}/v1/stream"

    def status(token: str) -> int:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    space = plane.namespace()
    assert status(plane.token(f"{space}/default")) == 401, "it may not list pods"
    assert status("wrong") == 401
    assert status(plane.admin_token) == 200
    assert "orbidden" not in one.log(), one.log()


def test_its_service_account_is_enough_for_custom_resources(
    plane: ControlPlane, one: Scheduler, space: str
) -> None:
    group = "/apis/roommate.dev/v1alpha1"
    names = {"queue": f"team-{space}", "job": "train", "service": "serve"}
    base = {"apiVersion": "roommate.dev/v1alpha1"}
    queue = base | {"kind": "Queue", "metadata": {"name": names["queue"]}, "spec": {"quota": 2}}
    job = {"image": "any", "queue": names["queue"], "sharePercent": 50}
    service = {"image": "any", "objective": "p99=25ms"}
    plane.api.post(f"{group}/queues", queue)
    for kind, spec in (("Job", job), ("Service", service)):
        body = base | {"kind": f"Gpu{kind}", "metadata": {"name": names[kind.lower()]}, "spec": spec}
        plane.api.post(f"{group}/namespaces/{space}/gpu{kind.lower()}s", body)
    try:
        until_bound(plane, space, 2)
        for path in (
            f"{group}/queues/{names['queue']}",
            f"{group}/namespaces/{space}/gpujobs/train",
            f"{group}/namespaces/{space}/gpuservices/serve",
        ):
            plane.api.until(path, lambda found: found.get("status", {}).get("conditions"))
        plane.api.get(f"/apis/batch/v1/namespaces/{space}/jobs/train")
        plane.api.get(f"/apis/apps/v1/namespaces/{space}/deployments/serve")
        plane.api.get(f"/api/v1/namespaces/{space}/services/serve")
        assert "orbidden" not in one.log(), one.log()
    finally:
        plane.api.delete(f"{group}/queues/{names['queue']}")
        for kind in ("job", "service"):
            plane.api.delete(f"{group}/namespaces/{space}/gpu{kind}s/{names[kind]}")


def test_its_service_account_is_enough_for_the_webhook(plane: ControlPlane, installed: str) -> None:
    path = f"/apis/apps/v1/namespaces/{installed}/deployments/roommate-webhook"
    words = [word for word in arguments(plane.api.get(path)) if not word.startswith("--listen")]
    own = ["--kubeconfig", plane.kubeconfig(f"{installed}/roommate-webhook"), "--listen", "127.0.0.1:0"]
    plane.programs.start("chart-webhook", [PROGRAM, *words, *own])
    try:
        path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/roommate-webhook"
        plane.api.until(path, lambda found: found["webhooks"][0]["clientConfig"].get("caBundle"))
    finally:
        plane.programs.stop("chart-webhook")


@pytest.mark.parametrize("part", ["scheduler", "agent", "webhook"])
def test_no_service_account_may_do_more(plane: ControlPlane, installed: str, space: str, part: str) -> None:
    api = api_of(plane, f"{installed}/roommate-{part}")
    for path in (
        "/api/v1/secrets",
        f"/api/v1/namespaces/{installed}/secrets",
        "/api/v1/configmaps",
        f"/api/v1/namespaces/{space}/serviceaccounts",
        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    ):
        assert "cannot" in refused(lambda path=path: api.get(path))
    pod = {"metadata": {"name": "own"}, "spec": {"containers": [{"name": "x", "image": "any"}]}}
    refused(lambda: api.post(f"/api/v1/namespaces/{space}/pods", pod))
    made = gpu_pod(plane, space, "victim")
    refused(lambda: api.delete(pod_path(made)))
    refused(lambda: api.post(f"{pod_path(made)}/exec", {}))
    lease = {"metadata": {"name": "kube-scheduler"}, "spec": {"holderIdentity": "me"}}
    refused(lambda: api.post("/apis/coordination.k8s.io/v1/namespaces/kube-system/leases", lease))
    if part != "scheduler":
        refused(lambda: api.bind(made, "anywhere"))
        eviction = {"metadata": {"name": "victim", "namespace": space}}
        refused(lambda: api.post(f"{pod_path(made)}/eviction", eviction))


def test_the_scheduler_makes_only_what_our_resources_own(
    plane: ControlPlane, installed: str, space: str
) -> None:
    api = api_of(plane, f"{installed}/roommate-scheduler")
    path = f"/api/v1/namespaces/{space}/services"
    own = {
        "apiVersion": "roommate.dev/v1alpha1",
        "kind": "GpuService",
        "name": "a",
        "uid": "u",
        "controller": True,
    }
    theirs = own | {"apiVersion": "apps/v1"}

    def service(name: str, *owners: Object) -> Object:
        return {
            "metadata": {"name": name, "ownerReferences": list(owners)},
            "spec": {"ports": [{"port": 80}], "selector": {"app": "a"}},
        }

    def is_refused() -> bool:
        try:
            api.post(path, service("bare"))
        except ApiError as error:
            return "owns only" in error.message
        plane.api.delete(f"{path}/bare")
        return False

    plane.programs.until("kube-apiserver", "applies the admission policy", is_refused)
    assert "owns only" in refused(lambda: api.post(path, service("theirs", theirs)))
    plane.api.post(path, service("somebodys"))
    taken = {"metadata": {"ownerReferences": [own]}}
    assert "owns only" in refused(lambda: api.patch(f"{path}/somebodys", taken))
    api.post(path, service("ours", own))


def test_who_may_edit_a_namespace_may_make_our_jobs_there(
    plane: ControlPlane, installed: str, space: str
) -> None:
    group = "rbac.authorization.k8s.io"
    for role in ("view", "edit"):
        subject = {"kind": "User", "name": f"{role}er", "apiGroup": group}
        reference = {"kind": "ClusterRole", "name": role, "apiGroup": group}
        body = {"metadata": {"name": role}, "subjects": [subject], "roleRef": reference}
        plane.api.post(f"/apis/{group}/v1/namespaces/{space}/rolebindings", body)

    def may(user: str, verb: str, resource: str) -> bool:
        asked = {"namespace": space, "verb": verb, "group": "roommate.dev", "resource": resource}
        review = {"spec": {"user": user, "resourceAttributes": asked}}
        answer = plane.api.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    plane.programs.until(
        "kube-controller-manager", "adds our roles to its own", lambda: may("editer", "create", "gpujobs")
    )
    assert may("viewer", "list", "gpuservices") and not may("viewer", "create", "gpujobs")
    assert may("editer", "patch", "gpuservices") and not may("editer", "create", "queues")


def until_admission_works(api: Api, pod: Object) -> None:
    """The API server takes new admission policies a moment later."""
    end = time.monotonic() + 30
    while True:
        try:
            api.patch(pod_path(pod), {"metadata": {"annotations": {"other.example.com/x": str(time.time())}}})
        except ApiError as error:
            assert error.status == 422, error
            return
        assert time.monotonic() < end, "the admission policy has no effect"
        time.sleep(0.2)


def test_the_scheduler_changes_nothing_of_pods_but_our_annotations(
    plane: ControlPlane, installed: str, space: str
) -> None:
    api = api_of(plane, f"{installed}/roommate-scheduler")
    pod = plane.pod(
        space, "a", {"schedulerName": "nobody", "containers": [{"name": "x", "image": "good"}]},
        labels={"app": "a"}, annotations={"theirs": "1"},
    )  # fmt: skip
    until_admission_works(api, pod)
    for change in (
        {"metadata": {"labels": {"app": "b"}}},
        {"metadata": {"annotations": {"theirs": None}}},
        {"metadata": {"finalizers": ["roommate.dev/stay"]}},
        {"spec": {"containers": [{"name": "x", "image": "evil"}]}},
    ):
        kind = "strategic" if "spec" in change else "merge"
        message = refused(lambda change=change, kind=kind: api.patch(pod_path(pod), change, kind))
        assert "may" in message, message
    ours = {"roommate.dev/assignment": "x", "roommate.dev/other": "y"}
    now = api.patch(pod_path(pod), {"metadata": {"annotations": ours}})
    assert now["metadata"]["annotations"] == {"theirs": "1", **ours}


def test_nobody_writes_the_decision_for_a_pod_but_the_scheduler(
    plane: ControlPlane, installed: str, space: str
) -> None:
    spec = {"schedulerName": "nobody", "containers": [{"name": "x", "image": "any"}]}
    forged = {"roommate.dev/assignment": '{"gpus":[0],"term":9,"decision":9}'}
    pod = plane.pod(space, "a", spec)

    def is_refused() -> bool:
        try:
            plane.api.patch(pod_path(pod), {"metadata": {"annotations": forged}})
        except ApiError as error:
            return "by Roommate only" in error.message
        return False

    plane.programs.until("kube-apiserver", "applies the admission policy", is_refused)
    assert "by Roommate only" in refused(lambda: plane.pod(space, "b", spec, annotations=forged))
    scheduler = api_of(plane, f"{installed}/roommate-scheduler")
    scheduler.patch(pod_path(pod), {"metadata": {"annotations": {"roommate.dev/assignment": "x"}}})
    gone = {"metadata": {"annotations": {"roommate.dev/assignment": None}}}
    assert "by Roommate only" in refused(lambda: plane.api.patch(pod_path(pod), gone))
    allowed = {"roommate.dev/gpu-limit": "30", "other.example.com/x": "y"}
    plane.api.patch(pod_path(pod), {"metadata": {"annotations": allowed}})
    plane.api.delete(pod_path(pod), gracePeriodSeconds=0)


def test_an_agent_changes_its_own_node_and_the_pods_there_only(
    plane: ControlPlane, installed: str, nodes: list[str], space: str
) -> None:
    here, there = nodes
    plane.pod(installed, "agent-here", {
        "nodeName": here, "serviceAccountName": "roommate-agent",
        "containers": [{"name": "x", "image": "any"}],
    })  # fmt: skip
    uid = plane.api.get(f"/api/v1/namespaces/{installed}/pods/agent-here")["metadata"]["uid"]
    asked = {
        "spec": {"boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": "agent-here", "uid": uid}}
    }
    path = f"/api/v1/namespaces/{installed}/serviceaccounts/roommate-agent/token"
    api = plane.api_of(plane.api.post(path, asked)["status"]["token"])
    spec = {"containers": [{"name": "x", "image": "any"}]}
    mine = plane.pod(space, "mine", {**spec, "nodeName": here})
    other = plane.pod(space, "other", {**spec, "nodeName": there})
    until_admission_works(api, mine)
    ours = {"metadata": {"annotations": {"roommate.dev/applied": "x"}, "labels": {"roommate.dev/x": "y"}}}
    assert api.patch(pod_path(mine), ours)["metadata"]["annotations"]["roommate.dev/applied"] == "x"
    assert "its own node" in refused(lambda: api.patch(pod_path(other), ours))
    assert api.patch(f"/api/v1/nodes/{here}", ours)["metadata"]["labels"]["roommate.dev/x"] == "y"
    assert "its own node" in refused(lambda: api.patch(f"/api/v1/nodes/{there}", ours))
    for change in ({"spec": {"unschedulable": True}}, {"metadata": {"labels": {"pool": "mine"}}}):
        refused(lambda change=change: api.patch(f"/api/v1/nodes/{here}", change))
    # What it tells of its pods, and of its node where kubelets tell of theirs.
    of_pod = {"apiVersion": "v1", "kind": "Pod", "name": "mine", "namespace": space}
    of_node = {"apiVersion": "v1", "kind": "Node", "name": here, "uid": here}
    for name, regarding in ((space, of_pod), ("default", of_node)):
        api.post(f"/apis/events.k8s.io/v1/namespaces/{name}/events", {
            "metadata": {"name": "told.by-the-agent"}, "eventTime": "2026-01-01T00:00:00.000000Z",
            "type": "Normal", "reason": "CoLocated", "action": "Sharing", "note": "x",
            "reportingController": "roommate-agent", "reportingInstance": here, "regarding": regarding,
        })  # fmt: skip
    # A token that was not made for a pod names no node.
    unbound = api_of(plane, f"{installed}/roommate-agent")
    assert "its own node" in refused(lambda: unbound.patch(pod_path(mine), ours | {}))
    plane.api.patch(f"/api/v1/nodes/{here}", {"metadata": {"annotations": {"roommate.dev/applied": None},
                                                          "labels": {"roommate.dev/x": None}}})  # fmt: skip
