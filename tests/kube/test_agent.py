"""The agent of a node: pods that share devices on a real kubelet with containerd. The devices are cores."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import GPU, ControlPlane, Object, RealNode, pod_path
from testbed.guests import SCHEDULER, applied, front, guest, load, python, reasons, served, until_applied
from testbed.plane import REAL_NODES
from testbed.programs import free_port
from testbed.roommate import (
    Agent,
    Scheduler,
    assignment,
    bound,
    delete_all,
    over_allocated,
    pods,
    why_unschedulable,
)

ROOT = Path(__file__).resolve().parent.parent.parent
KILLS = 100
ONLINE = "/sys/devices/system/cpu/online"
BUSY = ["sh", "-c", "while :; do :; done"]


@pytest.fixture(scope="module")
def node(plane: ControlPlane) -> Iterator[RealNode]:
    """A real node of its own: what it offers comes from the agent."""
    it = RealNode(plane, REAL_NODES[1], labels={"roommate.dev/test": "agent"})
    yield it
    it.close()
    plane.api.delete(f"/api/v1/nodes/{it.name}")


@pytest.fixture(scope="module")
def online(plane: ControlPlane) -> Path:
    """What the agent sees as the list of cores that are online."""
    file = plane.folder / "cores-online"
    file.write_text(Path(ONLINE).read_text())
    return file


@pytest.fixture(scope="module")
def agent(plane: ControlPlane, node: RealNode, online: Path) -> Iterator[Agent]:
    it = Agent(plane, node, "--device", "cpu", "--devices", "2", files={ONLINE: online})
    it.until_ready()
    yield it
    it.delete()


@pytest.fixture(scope="module")
def scheduler(plane: ControlPlane, agent: Agent) -> Iterator[Scheduler]:
    it = Scheduler(plane, "agent-scheduler", "--no-leader-election", "--name", SCHEDULER)
    it.until_ready()
    yield it
    it.stop()


@pytest.fixture
def space(plane: ControlPlane, namespace: str, scheduler: Scheduler) -> Iterator[str]:
    yield namespace
    delete_all(plane, namespace)


def cpu_s(pod: Object) -> float:
    """CPU time of the pod's main container so far."""
    (container,) = pod["status"]["containerStatuses"]
    name = container["containerID"].rsplit("/", 1)[1]
    for file, unit in (("cpuacct.usage", 1e9), ("cpu.stat", 1e6)):
        for path in Path("/sys/fs/cgroup").glob(f"**/pod*{pod['metadata']['uid']}*/{name}/{file}"):
            words = path.read_text().split()
            return int(words[0] if len(words) == 1 else words[words.index("usage_usec") + 1]) / unit
    raise AssertionError(f"no cgroup of {name}")


def idle_s() -> float:
    """Seconds in which a core of this machine had nothing to do."""
    fields = Path("/proc/stat").read_text().split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


def assert_shares(found: list[Object], *shares: float) -> None:
    """The pods use these parts of a core. Never more; less only where the machine is busy elsewhere, and
    then it is measured again.
    """
    for _ in range(4):
        began, idle, before = time.monotonic(), idle_s(), [cpu_s(p) for p in found]
        time.sleep(3.0)
        passed = time.monotonic() - began
        got = [(cpu_s(p) - b) / passed for p, b in zip(found, before, strict=True)]
        seen = f"{got} instead of {shares}"
        assert all(g <= 1.1 * s + 0.01 for g, s in zip(got, shares, strict=True)), seen
        if all(g >= 0.85 * s for g, s in zip(got, shares, strict=True)):
            return
        assert (idle_s() - idle) / passed < 0.2, f"{seen}, and the machine was idle"
    pytest.skip(f"the machine is too busy: {seen}")


def test_the_node_offers_places_and_says_what_its_devices_are(
    plane: ControlPlane, node: RealNode, agent: Agent
) -> None:
    seen = plane.api.until(
        f"/api/v1/nodes/{node.name}", lambda n: n["status"]["allocatable"].get(GPU) == "16"
    )
    inventory = json.loads(seen["metadata"]["annotations"]["roommate.dev/inventory"])
    assert (inventory["gpus"], inventory["model"], inventory["slots"]) == (2, "cpu", 8)
    assert "cgroup" in inventory["tier"]
    assert "roommate_node_gpus" in agent.page("/metrics")


def test_two_pods_share_a_device_within_their_shares(
    plane: ControlPlane, node: RealNode, space: str
) -> None:
    # With both devices taken for the most part, the two small ones are on one of them.
    made = [guest(plane, space, name, BUSY, share=share) for name, share in (("a", 30), ("b", 60), ("c", 60))]
    found = until_applied(plane, *made)
    beside = [set(reasons(plane, pod)) & {"CoLocated"} for pod in found]
    assert sum(map(len, beside)) == 2, "two of them share a device, and are told so"
    on = [tuple((assignment(p) or {})["gpus"]) for p in found]
    assert len(set(on)) == 2, on
    assert_shares(found, 0.3, 0.6, 0.6)


def test_a_limit_changes_while_the_pod_runs(plane: ControlPlane, node: RealNode, space: str) -> None:
    (pod,) = until_applied(plane, guest(plane, space, "a", BUSY))
    plane.api.patch(pod_path(pod), {"metadata": {"annotations": {"roommate.dev/gpu-limit": "20"}}})
    limited = plane.api.until(
        pod_path(pod),
        lambda p: applied(p) and (assignment(p) or {}).get("knobs", {}).get("sm_most_permille") == 200,
        within_s=30,
    )
    assert_shares([limited], 0.2)
    assert "ShareResized" in reasons(plane, pod)
    assert limited["status"]["containerStatuses"][0]["restartCount"] == 0


STEPS = """
import roommate, time
def batch(size):
    time.sleep(0.01)
    return size
for _ in roommate.steps(batch, batch_size=1):
    pass
"""


def test_steps_are_measured_and_reach_the_scheduler(plane: ControlPlane, node: RealNode, space: str) -> None:
    pod = guest(plane, space, "a", python(STEPS), python=True)
    until_applied(plane, pod)
    seen = plane.api.until(
        pod_path(pod), lambda p: "roommate.dev/measured" in p["metadata"]["annotations"], within_s=30
    )
    sample = json.loads(seen["metadata"]["annotations"]["roommate.dev/measured"])
    assert 0.01 <= sample["step_s"] < 0.05 and sample["done"] > 0


def test_a_pod_cannot_speak_for_another(plane: ControlPlane, node: RealNode, space: str) -> None:
    (victim,) = until_applied(plane, guest(plane, space, "a", BUSY))
    token = node.environment(victim)["ROOMMATE_TOKEN"]
    thief = """
import json, socket, sys
for token in (sys.argv[1], "wrong"):
    s = socket.socket(socket.AF_UNIX); s.connect("/run/roommate/tenant.sock")
    s.sendall(json.dumps({"hello": {"version": 1, "token": token, "pid": 1}}).encode() + b"\\n")
    print(s.makefile().readline().strip())
"""
    pod = guest(plane, space, "b", [*python(thief), token], python=True)
    plane.api.until(pod_path(pod), lambda p: p["status"]["phase"] == "Succeeded", within_s=60)
    answers = node.pod_log(pod).splitlines()
    assert len(answers) == 2 and all("refused" in a for a in answers), answers


def test_a_pod_that_roommate_did_not_place_does_not_start(
    plane: ControlPlane, node: RealNode, space: str
) -> None:
    pod = guest(plane, space, "a", BUSY, schedulerName="none")
    plane.api.bind(pod, node.name)

    def is_told(events: Object) -> bool:
        return any("was not assigned GPUs by Roommate" in e["note"] for e in events["items"])

    plane.api.until(f"/apis/events.k8s.io/v1/namespaces/{space}/events", is_told, within_s=60)
    assert plane.api.get(pod_path(pod))["status"]["phase"] == "Pending"


TRAIN = """
import os, roommate, time
place = "/kept/steps"
done = int(open(place).read()) if os.path.exists(place) else 0
print("begins at", done)
def batch(size):
    time.sleep(0.01)
    return size
roommate.on_checkpoint(lambda: open(place, "w").write(str(done)))
for _ in roommate.steps(batch, batch_size=1):
    done += 1
"""


def test_preempted_training_saves_and_goes_on(plane: ControlPlane, node: RealNode, space: str) -> None:
    first = guest(plane, space, "a", python(TRAIN), python=True)
    until_applied(plane, first)
    plane.api.until(pod_path(first), lambda p: "roommate.dev/measured" in p["metadata"]["annotations"])
    kept = node.var / f"lib/kept/{space}/steps"
    assert not kept.exists()
    evict = {"metadata": {"name": "a", "namespace": space}}
    plane.api.post(f"{pod_path(first)}/eviction", evict)
    plane.api.until_gone(pod_path(first), within_s=25)
    saved = int(kept.read_text())
    assert saved > 0
    second = guest(plane, space, "b", python(TRAIN), python=True)
    until_applied(plane, second)
    plane.programs.until(node.name, "goes on", lambda: f"begins at {saved}" in node.pod_log(second))


def test_a_gang_runs_on_both_devices(plane: ControlPlane, node: RealNode, space: str) -> None:
    label = {"scheduling.x-k8s.io/pod-group": "g"}
    size = {"roommate.dev/pod-group-size": "2"}
    made = [guest(plane, space, f"g{n}", BUSY, labels=label, annotations=size, share=100) for n in range(2)]
    found = until_applied(plane, *made)
    assert sorted((assignment(p) or {})["gpus"] for p in found) == [[0], [1]]
    late = guest(plane, space, "late", BUSY, share=50)
    told = plane.api.until(pod_path(late), lambda p: why_unschedulable(p) is not None)
    assert why_unschedulable(told)


def test_a_service_keeps_its_objective_beside_training(
    plane: ControlPlane, node: RealNode, agent: Agent, space: str
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    notes = {"roommate.dev/class": "service", "roommate.dev/objective": "p99=250ms"}
    service = guest(plane, space, "digits", annotations=notes, **front(port, "p99=250ms"))
    best = {"roommate.dev/class": "best-effort"}
    until_applied(plane, service)
    # One on each device: one of them is beside the service.
    trained = until_applied(
        plane, *(guest(plane, space, f"t{n}", python(STEPS), python=True, annotations=best) for n in range(2))
    )
    own = (assignment(plane.api.get(pod_path(service))) or {})["gpus"]
    assert own in [(assignment(p) or {})["gpus"] for p in trained]
    load(plane, node, url, seconds=8)
    plane.programs.until(node.name, "counts the requests", lambda: served(agent, space)[1] >= 100)
    late, requests = served(agent, space)
    assert late <= 0.05 * requests, f"{late} of {requests} were late"
    notes = plane.api.get(pod_path(service))["metadata"]["annotations"]
    measured = json.loads(notes["roommate.dev/measured"])
    assert measured["p99_us"] > 0 and measured["load_rps"] > 5
    for pod in trained:
        now = plane.api.get(pod_path(pod))["metadata"]["annotations"]
        assert json.loads(now["roommate.dev/measured"])["done"] > 50


def test_a_kubelet_that_comes_back_is_registered_at(
    plane: ControlPlane, node: RealNode, agent: Agent, space: str
) -> None:
    (pod,) = until_applied(plane, guest(plane, space, "a", BUSY, share=40))
    before = agent.metric("roommate_registrations_total")
    node.kill_kubelet()
    plane.programs.until(
        node.name, "is registered at again",
        lambda: agent.metric("roommate_registrations_total") > before, within_s=60,
    )  # fmt: skip
    (second,) = until_applied(plane, guest(plane, space, "b", BUSY, share=40))
    now = plane.api.get(pod_path(pod))
    assert now["status"]["containerStatuses"][0]["restartCount"] == 0
    assert_shares([now, second], 0.4, 0.4)


def test_a_device_that_is_lost_gets_no_new_pods(
    plane: ControlPlane, node: RealNode, agent: Agent, online: Path, space: str
) -> None:
    at = f"/api/v1/nodes/{node.name}"

    def places(count: int) -> Object:
        return plane.api.until(at, lambda n: n["status"]["allocatable"].get(GPU) == str(count), within_s=60)

    def told(reason: str) -> None:
        def is_told(events: Object) -> bool:
            its = [e for e in events["items"] if e["regarding"].get("name") == node.name]
            return any(e["reason"] == reason and e["note"].startswith("GPU 1 ") for e in its)

        plane.api.until("/apis/events.k8s.io/v1/namespaces/default/events", is_told)

    made = until_applied(plane, *(guest(plane, space, name, BUSY, share=100) for name in ("a", "b")))
    (ill,) = (pod for pod in made if (assignment(pod) or {})["gpus"] == [1])
    before = online.read_text()
    online.write_text(f"{min(os.sched_getaffinity(0))}\n")
    try:
        inventory = json.loads(places(8)["metadata"]["annotations"]["roommate.dev/inventory"])
        assert list(inventory["unhealthy"]) == ["1"] and "is offline" in inventory["unhealthy"]["1"]
        told("GpuUnhealthy")
        assert agent.metric("roommate_node_unhealthy_gpus") == 1
        for pod in made:
            (container,) = plane.api.get(pod_path(pod))["status"]["containerStatuses"]
            assert "running" in container["state"] and container["restartCount"] == 0
        plane.api.delete(pod_path(ill))
        plane.api.until_gone(pod_path(ill))
        late = guest(plane, space, "late", BUSY, share=100)
        plane.api.until(pod_path(late), lambda p: why_unschedulable(p) is not None)
    finally:
        online.write_text(before)
    places(16)
    told("GpuRecovered")
    (late,) = until_applied(plane, late)
    assert (assignment(late) or {})["gpus"] == [1]


def test_killed_agents_and_schedulers_lose_nothing(
    plane: ControlPlane, node: RealNode, agent: Agent, scheduler: Scheduler, space: str
) -> None:
    """They are killed a hundred times in all, while pods come and go."""
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    print(f"seed {seed}")
    where: dict[str, str] = {}
    made = 0

    def fill() -> None:
        """Does what a controller of pods does."""
        nonlocal made
        for pod in pods(plane, space):
            # While no agent offers devices, a kubelet refuses pods for good.
            if pod["status"]["phase"] == "Failed":
                assert pod["status"]["reason"] == "UnexpectedAdmissionError", pod["status"]
                plane.api.delete(pod_path(pod), gracePeriodSeconds=0)
        for _ in range(8 - len(pods(plane, space))):
            share = chance.choice([20, 30, 50])
            guest(plane, space, f"p{made}", BUSY, share=share, terminationGracePeriodSeconds=0)
            made += 1

    for _ in range(KILLS):
        fill()
        time.sleep(chance.uniform(0.0, 0.3))
        victim = chance.choice([agent, scheduler, scheduler, scheduler])
        victim.kill()
        found = pods(plane, space)
        assert not over_allocated(found), over_allocated(found)
        for pod in found:
            uid, at = pod["metadata"]["uid"], pod["spec"].get("nodeName")
            assert not at or where.setdefault(uid, at) == at, "a pod was bound twice"
        for pod in chance.sample(found, min(len(found), chance.randrange(0, 3))):
            plane.api.delete(pod_path(pod), gracePeriodSeconds=0)
        victim.start_again()
    scheduler.until_ready()
    agent.until_ready()
    fill()
    path = f"/api/v1/namespaces/{space}/pods"
    plane.api.until(path, lambda found: sum("nodeName" in p["spec"] for p in found["items"]) >= 4, 60)

    def not_in_force() -> list[str]:
        """Pods that are bound and do not run as it was decided for them."""
        return [
            f"{p['metadata']['name']}: {p['status']}, {p['metadata']['annotations']}"
            for p in bound(plane, space)
            if not (applied(p) and p["status"]["phase"] == "Running")
        ]

    end = time.monotonic() + 120
    while late := not_in_force():
        fill()
        assert time.monotonic() < end, f"{late}; the agent says: {agent.log()}"
        time.sleep(0.5)
    found = bound(plane, space)
    assert len(found) >= 4 and len(where) > 10 and not over_allocated(found)
    promised = [(assignment(p) or {})["knobs"]["sm_permille"] / 1000 for p in found]
    assert_shares(found, *promised)
