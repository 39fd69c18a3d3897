"""The custom resources of Roommate in a testbed."""

from __future__ import annotations

import subprocess

from .api import ApiError, Object, condition
from .plane import ControlPlane
from .roommate import PROGRAM

GROUP = "/apis/roommate.dev/v1alpha1"
PLURALS = ("queues", "gpuprofiles", "gpuservices", "gpujobs")


def definitions() -> str:
    done = subprocess.run([PROGRAM, "kube", "crds"], capture_output=True, text=True, check=True)
    return done.stdout


def path_of(plural: str, name: str = "", namespace: str | None = None) -> str:
    where = f"/namespaces/{namespace}" if namespace else ""
    return f"{GROUP}{where}/{plural}" + (f"/{name}" if name else "")


def make(plane: ControlPlane, kind: str, name: str, spec: Object, namespace: str | None = None) -> Object:
    body = {"apiVersion": "roommate.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    return plane.api.post(path_of(f"{kind.lower()}s", namespace=namespace), body)


def install_definitions(plane: ControlPlane) -> list[str]:
    """Installs them as the program prints them; returns their paths once they are served."""
    base = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    paths = [f"{base}/{plural}.roommate.dev" for plural in PLURALS]
    for path, text in zip(paths, definitions().split("---\n")[1:], strict=True):
        plane.api.apply_yaml(path, text, fieldManager="test")
    for path in paths:
        plane.api.until(path, lambda found: condition(found, "Established") == "True")

    def are_served() -> bool:
        try:
            for plural in PLURALS:
                plane.api.get(path_of(plural))
            return {r["name"] for r in plane.api.get(GROUP)["resources"]} >= set(PLURALS)
        except ApiError:
            # Not found, or "storage is (re)initializing".
            return False

    plane.programs.until("kube-apiserver", "serves the custom resources", are_served)
    return paths
