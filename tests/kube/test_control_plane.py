"""The control plane of the testbed is a real and complete one."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from pathlib import Path

import pytest
from testbed import Api, ApiError, ControlPlane, KwokNodes, TestbedError

PENDING = {"schedulerName": "none", "containers": [{"name": "main", "image": "any"}]}
"""A pod that no scheduler takes."""


def test_the_api_server_answers_with_the_version_that_was_built(plane: ControlPlane) -> None:
    assert plane.api.get("/version")["gitVersion"] == "v1.34.9"
    # kubectl checks the server's certificate, with the authority in the kubeconfig.
    assert '"gitVersion": "v1.34.9"' in plane.kubectl("get", "--raw", "/version")


def test_a_binding_carries_annotations_and_happens_once(
    plane: ControlPlane, kwok: KwokNodes, namespace: str
) -> None:
    (name,) = kwok.add(prefix="bound")
    pod = plane.pod(namespace, "p", PENDING)
    with pytest.raises(ApiError) as wrong:
        plane.api.bind(pod, name, uid="00000000-0000-0000-0000-000000000000")
    assert wrong.value.status == 409

    plane.api.bind(pod, name, {"roommate.dev/gpus": "0,3"})
    bound = plane.api.get(f"/api/v1/namespaces/{namespace}/pods/p")
    assert bound["spec"]["nodeName"] == name
    assert bound["metadata"]["annotations"]["roommate.dev/gpus"] == "0,3"

    with pytest.raises(ApiError) as second:
        plane.api.bind(pod, name)
    assert second.value.status == 409
    assert "already assigned" in second.value.message


def test_a_service_account_may_do_only_what_it_was_granted(plane: ControlPlane, namespace: str) -> None:
    account = f"{namespace}/agent"
    plane.api.post(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "agent"}})
    agent = plane.api_of(plane.token(account))
    with pytest.raises(ApiError) as refused:
        agent.get("/api/v1/nodes")
    assert refused.value.status == 403

    plane.api.post(
        "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
        {
            "metadata": {"name": namespace},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": "system:node",
            },
            "subjects": [{"kind": "ServiceAccount", "name": "agent", "namespace": namespace}],
        },
    )
    plane.programs.until("kube-apiserver", "grants", lambda: allowed(agent, "/api/v1/nodes"))
    assert "agent" in plane.kubeconfig(account).read_text()


def allowed(api: Api, path: str) -> bool:
    try:
        api.get(path)
    except ApiError as error:
        if error.status != 403:
            raise
        return False
    return True


def test_a_node_may_not_change_another_node(plane: ControlPlane, kwok: KwokNodes) -> None:
    (other,) = kwok.add(prefix="other")
    node = plane.api_of(plane.node_token("real-1"))
    with pytest.raises(ApiError) as refused:
        node.patch(f"/api/v1/nodes/{other}/status", {"status": {"capacity": {"a.b/c": "1"}}})
    assert refused.value.status == 403
    assert f'"real-1" is not allowed to modify node "{other}"' in refused.value.message


def test_objects_survive_a_crash_of_the_api_server(plane: ControlPlane, namespace: str) -> None:
    plane.pod(namespace, "p", PENDING)
    plane.stop_api_server()
    with pytest.raises(OSError):
        plane.api.get("/version")
    plane.start_api_server()
    assert plane.api.get(f"/api/v1/namespaces/{namespace}/pods/p")["metadata"]["name"] == "p"


def test_the_controllers_work(plane: ControlPlane, namespace: str) -> None:
    template = {"spec": {**PENDING, "restartPolicy": "Never"}}
    job = {"metadata": {"name": "j"}, "spec": {"template": template}}
    plane.api.post(f"/apis/batch/v1/namespaces/{namespace}/jobs", job)
    plane.api.until(f"/api/v1/namespaces/{namespace}/pods", lambda pods: len(pods["items"]) == 1)


def test_it_listens_on_loopback_only(plane: ControlPlane, kwok: KwokNodes, scheduler: None) -> None:
    names = ["etcd", "kube-apiserver", "kube-controller-manager", "kwok", "kube-scheduler"]
    pids = [plane.programs.pid(name) for name in names]
    assert all(pids)
    listening = [address for pid in pids if pid for address in listeners(pid)]
    assert len(listening) >= 3, "etcd has two sockets, the API server one"
    assert [a for a in listening if not ipaddress.ip_address(a).is_loopback] == []


def listeners(pid: int) -> list[str]:
    """The addresses on which a process listens."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
            sockets.add(found[1])
    addresses = []
    for table, family, words in (("tcp", socket.AF_INET, 1), ("tcp6", socket.AF_INET6, 4)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                raw = bytes.fromhex(fields[1].split(":")[0])
                host_order = b"".join(raw[4 * n : 4 * n + 4][::-1] for n in range(words))
                addresses.append(socket.inet_ntop(family, host_order))
    return addresses


def test_a_program_that_ends_is_reported_with_its_log(plane: ControlPlane) -> None:
    plane.programs.start("broken", ["sh", "-c", "echo the reason >&2; exit 1"])
    with pytest.raises(TestbedError, match=r"^broken: works: it ended; its log ends with:\nthe reason$"):
        plane.programs.until("broken", "works", lambda: False)
    with pytest.raises(TestbedError, match="absent does not start"):
        plane.programs.start("absent", ["/no/such/program"])
