"""Roommate's Helm chart in a testbed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from .api import Object
from .plane import ControlPlane
from .programs import ROOT

CHART = ROOT / "packaging/helm/roommate"


def helm(plane: ControlPlane, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs Helm as the administrator; what it keeps is in the folder of the testbed."""
    env = {"HOME": str(plane.folder / "helm"), "KUBECONFIG": str(plane.kubeconfig())}
    return subprocess.run([plane.bin / "helm", *words], env=env, capture_output=True, text=True)


def values(**given: Any) -> list[str]:
    """Flags for values: `agent__enabled=False` is agent.enabled."""
    flags = []
    for name, value in given.items():
        flags += ["--set-json", f"{name.replace('__', '.')}={json.dumps(value)}"]
    return flags


def rendered(plane: ControlPlane, namespace: str, **given: Any) -> list[Object]:
    """The objects of the chart."""
    done = helm(plane, "template", "roommate", CHART, "-n", namespace, *values(**given))
    assert done.returncode == 0, done.stderr
    # Helm speaks YAML, kubectl translates; nothing changes where there is no such annotation.
    words = ["annotate", "--local", "-f", "-", "nothing-", "-o", "json"]
    text, objects = plane.kubectl(*words, stdin=done.stdout).strip(), []
    while text:
        one, end = json.JSONDecoder().raw_decode(text)
        objects.append(one)
        text = text[end:].strip()
    return objects


def arguments(deployment: Object) -> list[str]:
    """The words with which the container of a Deployment or DaemonSet starts the program."""
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return list(container["args"])
