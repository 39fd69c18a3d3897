"""The webhook on a real API server: what users of other products write is admitted as ours."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed import ApiError, ControlPlane, Object, pod_path
from testbed.chart import rendered
from testbed.programs import free_port
from testbed.roommate import PROGRAM, delete_all, gpu_pod

CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
OURS = "roommate.dev/gpu"


class Webhook:
    def __init__(self, plane: ControlPlane) -> None:
        self.plane, self.name = plane, "webhook"
        self.at = f"127.0.0.1:{free_port()}"
        objects = rendered(plane, "roommate", webhook__enabled=True)
        made: Object = next(o for o in objects if o["kind"] == "MutatingWebhookConfiguration")
        made["metadata"]["name"] = "roommate"
        made["webhooks"][0]["clientConfig"] = {"url": f"https://{self.at}/mutate"}
        # A webhook that does not answer would pass unnoticed otherwise.
        made["webhooks"][0]["failurePolicy"] = "Fail"
        plane.api.post(CONFIGURATION, made)
        self.start()

    def start(self) -> None:
        words: list[str | Path] = [PROGRAM, "kube", "webhook", "--listen", self.at]
        words += ["--kubeconfig", self.plane.kubeconfig()]
        before = self.told("/mutate")
        self.plane.programs.start(self.name, words)
        self.plane.programs.until(self.name, "answers", lambda: self.told("/mutate") > before)

    def told(self, what: str) -> int:
        """How often it has said this."""
        log = self.plane.programs.log(self.name)
        return log.read_text().count(what) if log.exists() else 0

    def end(self) -> None:
        self.plane.api.delete(f"{CONFIGURATION}/roommate")
        self.plane.programs.stop(self.name)


@pytest.fixture(scope="module")
def webhook(plane: ControlPlane) -> Iterator[Webhook]:
    it = Webhook(plane)
    yield it
    it.end()


@pytest.fixture
def space(plane: ControlPlane, namespace: str) -> Iterator[str]:
    yield namespace
    # The next scheduler would find them.
    delete_all(plane, namespace)


def made(
    plane: ControlPlane, space: str, name: str, limits: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None, **more: Any,
) -> Object:  # fmt: skip
    container = {
        "name": "main",
        "image": "any",
        "resources": {"limits": limits or {}},
        **more.pop("container", {}),
    }
    spec = {"containers": [container], **more.pop("spec", {})}
    return plane.pod(space, name, spec, annotations=annotations or {}, **more)


def asks(pod: Object) -> tuple[dict[str, str], dict[str, str], str]:
    resources = pod["spec"]["containers"][0]["resources"]
    assert resources.get("limits") == resources.get("requests"), "the API server wants both to be equal"
    ours = {
        k: v for k, v in pod["metadata"].get("annotations", {}).items() if k.startswith("roommate.dev/gpu")
    }
    return resources["limits"], ours, pod["spec"]["schedulerName"]


@pytest.mark.parametrize(
    ("limits", "annotations", "gpus", "ours"),
    [
        ({"nvidia.com/gpu": "2", "nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30"}, {}, "2",
         {"roommate.dev/gpu-mem": "3000", "roommate.dev/gpu-share": "30"}),
        ({"nvidia.com/gpumem-percentage": "50"}, {}, "1", {"roommate.dev/gpu-share": "50"}),
        ({"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "2000"}, {}, "1",
         {"roommate.dev/gpu-mem": "2000"}),
        ({}, {"gpu-fraction": "0.25", "gpu-fraction-num-devices": "2"}, "2",
         {"roommate.dev/gpu-share": "25"}),
        ({}, {"gpu-memory": "4000"}, "1", {"roommate.dev/gpu-mem": "4000"}),
        ({OURS: "1"}, {"roommate.dev/gpu-share": "40"}, "1", {"roommate.dev/gpu-share": "40"}),
    ],
)  # fmt: skip
def test_spellings_of_others_are_admitted_as_ours(
    plane: ControlPlane, webhook: Webhook, space: str,
    limits: dict[str, str], annotations: dict[str, str], gpus: str, ours: dict[str, str],
) -> None:  # fmt: skip
    pod = made(plane, space, "p", limits, annotations)
    assert asks(pod) == ({OURS: gpus}, ours, "roommate")
    note = pod["metadata"]["annotations"].get("roommate.dev/translated-from", "")
    assert bool(note) == (OURS not in limits)
    # A second admission, of a copy, changes nothing.
    again = made(plane, space, "q", {OURS: gpus}, pod["metadata"]["annotations"])
    assert asks(again) == asks(pod)


@pytest.mark.parametrize(
    ("limits", "annotations", "env", "why"),
    [
        (
            {"nvidia.com/gpumem": "8Gi"},
            {},
            None,
            "nvidia.com/gpumem: expected a whole number from 0",
        ),
        ({}, {"gpu-fraction": "2"}, None, "annotation gpu-fraction: expected a number from 0.01 to 1"),
        ({"nvidia.com/gpu": "1"}, {"gpu-fraction": "0.5"}, None, "use one of them"),
        ({OURS: "1"}, {}, "NVIDIA_VISIBLE_DEVICES", "would override its part of the GPU"),
        ({"nvidia.com/gpucores": "30"}, {}, "CUDA_MPS_PIPE_DIRECTORY", "would override its part of the GPU"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(
    plane: ControlPlane, webhook: Webhook, space: str,
    limits: dict[str, str], annotations: dict[str, str], env: str | None, why: str,
) -> None:  # fmt: skip
    container = {"env": [{"name": env, "value": "x"}]} if env else {}
    with pytest.raises(ApiError) as refused:
        made(plane, space, "p", limits, annotations, container=container)
    assert 400 <= refused.value.status < 500
    assert 'admission webhook "pods.roommate.dev" denied the request' in refused.value.message
    assert why in refused.value.message


def test_other_pods_are_left_alone(plane: ControlPlane, webhook: Webhook, space: str) -> None:
    whole = made(plane, space, "whole", {"nvidia.com/gpu": "1"})
    assert asks(whole) == ({"nvidia.com/gpu": "1"}, {}, "default-scheduler")
    hami = {"nvidia.com/gpumem": "3333"}
    other = made(plane, space, "other", hami, spec={"schedulerName": "hami-scheduler"})
    assert asks(other) == (hami, {}, "hami-scheduler")
    ignored = made(plane, space, "ignored", hami, labels={"roommate.dev/webhook": "ignore"})
    assert asks(ignored) == (hami, {}, "default-scheduler")
    system = made(plane, "kube-system", "system", hami)
    assert asks(system) == (hami, {}, "default-scheduler")
    plane.api.delete(pod_path(system), gracePeriodSeconds=0)


def kubectl_told(plane: ControlPlane, *words: str) -> str:
    """What kubectl says besides its output."""
    command = [str(plane.bin / "kubectl"), f"--kubeconfig={plane.kubeconfig()}", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def test_a_user_is_warned_of_what_was_not_translated(
    plane: ControlPlane, webhook: Webhook, space: str, tmp_path: Path
) -> None:
    manifest = tmp_path / "pod.yaml"
    manifest.write_text(
        "{apiVersion: v1, kind: Pod, metadata: {name: warned}, spec: {containers: [{name: x, image: any,"
        ' resources: {limits: {nvidia.com/gpumem-percentage: "50"}}}]}}'
    )
    told = kubectl_told(plane, "apply", "-n", space, "-f", str(manifest))
    assert "Warning: nvidia.com/gpumem-percentage: became roommate.dev/gpu-share" in told


def test_what_the_api_server_trusts_is_added_again(plane: ControlPlane, webhook: Webhook, space: str) -> None:
    path = f"{CONFIGURATION}/roommate"
    before = plane.api.get(path)["webhooks"][0]["clientConfig"]["caBundle"]
    # Another replica, with a certificate of its own: both are trusted.
    plane.programs.stop(webhook.name)
    webhook.start()
    after = plane.api.get(path)["webhooks"][0]["clientConfig"]["caBundle"]
    assert after.startswith(before[:400]) and len(after) > len(before)
    # Somebody applied the manifest again.
    plane.api.patch(path, [{"op": "remove", "path": "/webhooks/0/clientConfig/caBundle"}], "json")
    plane.programs.until(webhook.name, "is trusted again", lambda: webhook.told("told roommate again"))
    pod = gpu_pod(plane, space, "p", schedulerName="default-scheduler")
    assert pod["spec"]["schedulerName"] == "roommate"


def test_pods_are_created_while_it_does_not_answer(plane: ControlPlane, webhook: Webhook, space: str) -> None:
    path = f"{CONFIGURATION}/roommate"
    ignore = [{"op": "replace", "path": "/webhooks/0/failurePolicy", "value": "Ignore"}]
    plane.api.patch(path, ignore, "json")
    plane.programs.stop(webhook.name)
    try:
        # The API server takes a moment to notice the change.
        def is_created() -> bool:
            try:
                made(plane, space, "p", {"nvidia.com/gpumem": "3000"})
            except ApiError:
                return False
            return True

        plane.programs.until("kube-apiserver", "creates a pod without the webhook", is_created, 20)
    finally:
        webhook.start()
