"""What docs/guides/kubernetes.md tells people to do, on a real API server."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator

import pytest
from testbed import ControlPlane, KwokNodes, Object
from testbed.chart import CHART
from testbed.programs import ROOT
from testbed.roommate import SLOTS, Scheduler, assignment, bound, delete_all

GUIDE = (ROOT / "docs/guides/kubernetes.md").read_text()


def blocks(heading: str, language: str) -> list[str]:
    """The blocks of code below a heading of the guide."""
    _, found, rest = GUIDE.partition(f"\n## {heading}\n")
    assert found, f"the guide has no heading {heading!r}"
    section = rest.split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def one(plane: ControlPlane) -> Iterator[Scheduler]:
    scheduler = Scheduler(plane, "guide-scheduler", "--no-leader-election")
    scheduler.until_ready()
    yield scheduler
    scheduler.stop()


@pytest.fixture
def with_gpus(kwok: KwokNodes) -> Iterator[Callable[[int], None]]:
    """Makes a node with so many GPUs."""
    made: list[str] = []

    def make(gpus: int) -> None:
        names = kwok.add(1, prefix="guide", gpus=gpus * SLOTS, labels={"roommate.dev/slots": str(SLOTS)})
        made.extend(names)
        kwok.until_ready(names)

    yield make
    kwok.remove(made)


@pytest.fixture
def space(plane: ControlPlane, namespace: str) -> Iterator[str]:
    yield namespace
    plane.kubectl("delete", "deployments,jobs", "--all", "-n", namespace, "--wait=false")
    delete_all(plane, namespace)


def applied(plane: ControlPlane, space: str, heading: str, n: int) -> list[Object]:
    """Applies the objects below a heading; the pods, once so many of them are on nodes."""
    (text,) = blocks(heading, "yaml")
    plane.kubectl("apply", "-n", space, "-f", "-", stdin=text)
    path = f"/api/v1/namespaces/{space}/pods"
    plane.api.until(path, lambda found: sum("nodeName" in p["spec"] for p in found["items"]) >= n)
    return bound(plane, space)


def test_two_pods_share_a_gpu_and_one_is_limited_while_it_runs(
    plane: ControlPlane, one: Scheduler, with_gpus: Callable[[int], None], space: str
) -> None:
    with_gpus(1)
    found = applied(plane, space, "Two pods that share a GPU", 2)
    decided = {p["metadata"]["name"]: assignment(p) or {} for p in found}
    assert {name: what["gpus"] for name, what in decided.items()} == {"train-a": [0], "train-b": [0]}
    assert all(what["knobs"]["mem_mib"] == 16000 for what in decided.values())
    (commands,) = blocks("Change a pod that runs", "bash")
    limits = []
    for command in commands.splitlines():
        words = shlex.split(command, comments=True)
        assert words[0] == "kubectl"
        plane.kubectl("-n", space, *words[1:])
        expected = 300 if "gpu-limit=30" in command else None
        path = f"/api/v1/namespaces/{space}/pods/train-a"
        plane.api.until(
            path,
            lambda p, expected=expected: (assignment(p) or {})["knobs"].get("sm_most_permille") == expected,
        )
        limits.append(expected)
    assert limits == [300, None]


def test_a_job_that_says_its_size_is_a_gang(
    plane: ControlPlane, one: Scheduler, with_gpus: Callable[[int], None], space: str
) -> None:
    with_gpus(4)
    found = applied(plane, space, "Gangs", 2)
    decided = [assignment(p) or {} for p in found]
    assert sorted(gpu for what in decided for gpu in what["gpus"]) == [0, 1, 2, 3]
    assert all(len(what["gang"]["places"]) == 2 for what in decided)


def test_a_service_is_placed_and_has_its_objective_in_the_metrics(
    plane: ControlPlane, one: Scheduler, with_gpus: Callable[[int], None], space: str
) -> None:
    with_gpus(1)
    (pod,) = applied(plane, space, "Services with an objective", 1)
    name = pod["metadata"]["name"]
    one.plane.programs.until(
        one.name, "tells the objective of the service",
        lambda: f'pod="{name}"' in (one.page("/metrics") or ""),
    )  # fmt: skip
    lines = (one.page("/metrics") or "").splitlines()
    (line,) = [x for x in lines if x.startswith("roommate_pod_objective_seconds{") and f'pod="{name}"' in x]
    assert line.endswith(" 0.025"), line


@pytest.mark.parametrize("heading", ["Jobs and services in a few lines", "Queues"])
def test_custom_resources_of_the_guide_are_valid(plane: ControlPlane, space: str, heading: str) -> None:
    for path in sorted((CHART / "crds").glob("*.yaml")):
        plane.kubectl("apply", "--server-side", "-f", str(path))
        plane.kubectl("wait", "--for=condition=Established", "-f", str(path), "--timeout=30s")
    (text,) = blocks(heading, "yaml")
    words = ["-n", space, "--dry-run=server", "--validate=strict", "-f", "-"]
    said = plane.kubectl("create", *words, stdin=text)
    assert said.count("created (server dry run)") == text.count("kind:"), said


def test_the_messages_of_the_guide_are_those_of_the_scheduler() -> None:
    source = "".join(path.read_text() for path in sorted((ROOT / "crates/roommate-kube/src").rglob("*.rs")))
    source = re.sub(r"\s+", " ", source)
    section = GUIDE.split("## Why does my pod wait?")[1].split("\n## ")[0]
    messages = re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)
    assert len(messages) >= 6
    for message in messages:
        pieces = re.split(r"\d+|[…(\"]|roommate\.dev\S*", message)
        piece = max((p.strip(" ;:") for p in pieces), key=len)
        assert len(piece) > 8 and piece in source, f"{message}: {piece!r} is said nowhere"
