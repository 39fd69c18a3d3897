"""The dashboard of a cluster on a real API server, with fake nodes, in a real Chromium."""

from __future__ import annotations

import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import ControlPlane, KwokNodes
from testbed.programs import ROOT, free_port
from testbed.roommate import PROGRAM, SLOTS, Scheduler, bound, delete_all, gpu_pod

HALF = {"roommate.dev/gpu-share": "50"}
WHOLE = {"roommate.dev/gpu-share": "100", "roommate.dev/max-slowdown": "1"}
RBAC = "rbac.authorization.k8s.io"


class WithPage(Scheduler):
    """A scheduler that serves the page."""

    def __init__(self, plane: ControlPlane) -> None:
        self.page_at = f"127.0.0.1:{free_port()}"
        super().__init__(plane, "scheduler-with-page", "--no-leader-election", "--dashboard", self.page_at)

    def status(self, path: str, token: str | None = None, body: bytes | None = None) -> int:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"http://{self.page_at}{path}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


@pytest.fixture(scope="module")
def one(plane: ControlPlane, kwok: KwokNodes) -> Iterator[WithPage]:
    labels = {
        "roommate.dev/slots": str(SLOTS),
        "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB",
        "nvidia.com/gpu.memory": "81920",
    }
    names = kwok.add(2, prefix="gpu", gpus=2 * SLOTS, labels=labels)
    kwok.until_ready(names)
    scheduler = WithPage(plane)
    scheduler.until_ready()
    yield scheduler
    scheduler.stop()
    kwok.remove(names)


@pytest.fixture
def space(plane: ControlPlane, one: WithPage, namespace: str) -> Iterator[str]:
    """A namespace with two pods that share a GPU, and one that waits."""
    for name in ("one", "two"):
        gpu_pod(plane, namespace, name, annotations=HALF)
    path = f"/api/v1/namespaces/{namespace}/pods"
    plane.api.until(path, lambda found: sum("nodeName" in p["spec"] for p in found["items"]) == 2)
    gpu_pod(plane, namespace, "waits", 2, annotations=WHOLE, nodeSelector={"zone": "nowhere"})
    yield namespace
    delete_all(plane, namespace)


def reader(plane: ControlPlane, space: str) -> str:
    """A token of somebody who may list the pods of all namespaces, and do nothing else."""
    plane.api.post(f"/api/v1/namespaces/{space}/serviceaccounts", {"metadata": {"name": "reader"}})
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    role = {"metadata": {"name": f"reader-{space}"}}
    plane.api.post(f"/apis/{RBAC}/v1/clusterroles", role | {"rules": rules})
    subject = {"kind": "ServiceAccount", "name": "reader", "namespace": space}
    reference = {"kind": "ClusterRole", "name": f"reader-{space}", "apiGroup": RBAC}
    binding = role | {"subjects": [subject], "roleRef": reference}
    plane.api.post(f"/apis/{RBAC}/v1/clusterrolebindings", binding)
    return plane.token(f"{space}/reader")


def look(link: str, space: str, *token: str) -> None:
    """Looks at the page in a browser."""
    folder = ROOT / "tests/browser"
    words = ["node", str(folder / "cluster.mjs"), link, space, *token]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_who_may_list_all_pods_sees_the_page(plane: ControlPlane, one: WithPage, space: str) -> None:
    stream = "/v1/stream"
    assert one.status("/") == 200, "the page itself tells nothing"
    for wrong in (None, "", "wrong", plane.token(f"{space}/default")):
        assert one.status(stream, wrong) == 401, wrong
        assert one.status("/v1/history", wrong, b'{"job": "x"}') == 401, wrong
    token = reader(plane, space)
    assert one.status(stream, token) == 200
    assert one.status("/v1/history", token, f'{{"job": "{space}/one"}}'.encode()) == 200
    # It changes nothing, whoever asks.
    for verb, body in (("cancel", b'{"job": "x"}'), ("down", b'{"stop_jobs": false}')):
        assert one.status(f"/v1/{verb}", plane.admin_token, body) == 422
    # Who may no longer list pods hears no more of them.
    plane.api.delete(f"/apis/{RBAC}/v1/clusterrolebindings/reader-{space}")
    end = time.monotonic() + 20
    while one.status(stream, token) != 401:
        assert time.monotonic() < end, "a right that was taken away still opens the page"
        time.sleep(0.5)


def test_the_page_of_the_scheduler_in_a_browser(plane: ControlPlane, one: WithPage, space: str) -> None:
    look(f"http://{one.page_at}/", space, reader(plane, space))


def test_the_plugin_opens_the_page(
    plane: ControlPlane, kwok: KwokNodes, one: WithPage, space: str, tmp_path: Path
) -> None:
    spec = {"holderIdentity": "one_17_1760000000", "leaseDurationSeconds": 15}
    path = f"/apis/coordination.k8s.io/v1/namespaces/{space}/leases"
    plane.api.post(path, {"metadata": {"name": "leader"}, "spec": spec})
    # In place of a kubelet that forwards the port.
    (tmp_path / "kubectl").write_text(
        f'#!/bin/sh\necho $$ >> {tmp_path}/pids\necho "Forwarding from {one.at} -> 10261"\nexec sleep 600\n'
    )
    (tmp_path / "kubectl").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    words = [PROGRAM, "kube", "ui", "--kubeconfig", str(plane.kubeconfig())]
    missing = subprocess.run([*words, "--lease", f"{space}/none"], capture_output=True, text=True, env=env)
    assert missing.returncode == 2 and "hint: --scheduler ADDRESS" in missing.stderr, missing.stderr
    with subprocess.Popen(
        [*words, "--lease", f"{space}/leader"], stdout=subprocess.PIPE, text=True, env=env
    ) as viewer:
        try:
            assert viewer.stdout is not None
            link = viewer.stdout.readline().strip()
            assert re.fullmatch(r"http://127.0.0.1:\d+/#token=\w+", link), link
            look(link, space)
            # Other nodes: the page goes on with what it knows.
            more = kwok.add(1, prefix="more", gpus=SLOTS, labels={"roommate.dev/slots": str(SLOTS)})
            kwok.until_ready(more)
            look(link, space)
            kwok.remove(more)
            # A forward that ended is made anew.
            pids = (tmp_path / "pids").read_text().split()
            os.kill(int(pids[-1]), 9)
            look(link, space)
        finally:
            viewer.terminate()
    assert len(bound(plane, space)) == 2, "looking changes nothing"
