"""Policies that tune pods while they run: batch sizes, shares of services. One device, real processes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import ControlPlane, Object, RealNode
from testbed.guests import LABELS, SCHEDULER, front, guest, load, python, reasons, served, until_applied
from testbed.plane import REAL_NODES
from testbed.programs import free_port
from testbed.resources import install_definitions, make, path_of
from testbed.roommate import Agent, Scheduler, assignment, delete_all


@pytest.fixture(scope="module")
def node(plane: ControlPlane) -> Iterator[RealNode]:
    it = RealNode(plane, REAL_NODES[1], labels=LABELS)
    yield it
    it.close()


@pytest.fixture(scope="module")
def agent(plane: ControlPlane, node: RealNode) -> Iterator[Agent]:
    install_definitions(plane)
    it = Agent(plane, node, "--device", "cpu", "--devices", "1")
    it.until_ready()
    yield it
    it.delete()


def scheduler(plane: ControlPlane, policy: str, **params: object) -> Scheduler:
    """A scheduler with a policy and its parameters."""
    words = [word for name, value in params.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    it = Scheduler(
        plane, f"{policy}-scheduler", "--no-leader-election", "--name", SCHEDULER, "--policy", policy, *words
    )
    it.until_ready()
    return it


def notes(of: Scheduler, reason: str) -> dict[str, Object]:
    """What the journal says for this reason, by pod: the last of each."""
    found: dict[str, Object] = {}
    names: list[str] = []
    for line in (of.page("/debug/snapshot") or "").splitlines():
        entry = json.loads(line)
        if "job" in entry:
            names.append(entry["job"]["name"].rsplit("/", 1)[-1])
        for note in entry.get("step", {}).get("notes", []):
            if isinstance(note["why"], dict) and reason in note["why"]:
                found[names[note["job"]]] = note["why"][reason]
    return found


# A step takes a fixed time plus some for each sample; its gradients make large batches worthwhile.
TUNED = """
import roommate, time
ticks = open("/kept/NAME", "a", buffering=1)
steps = roommate.steps(lambda size: size, batch_size=8, min=4, max=64)
for size in steps:
    end = time.process_time() + FIXED + size * EACH
    while time.process_time() < end: pass
    small, large = roommate.noise.split(size)
    steps.report_gradients([(small, 1 + 256.0 / small), (large, 1 + 256.0 / large)])
    ticks.write(f"{size} {time.process_time()}\\n")
"""


def test_iadeep_tunes_batch_sizes_without_a_restart(
    plane: ControlPlane, node: RealNode, agent: Agent, namespace: str
) -> None:
    one = scheduler(plane, "iadeep", admission=False, tune_alone=False, measure_s=4, budget=4)
    allowed = {"roommate.dev/batch": "4..8..64"}
    made = []
    for name, fixed, each in (("a", 0.004, 0.0002), ("b", 0.006, 0.0005)):
        text = TUNED.replace("NAME", name).replace("FIXED", str(fixed)).replace("EACH", str(each))
        made.append(guest(plane, namespace, name, python(text), python=True, annotations=allowed))
    until_applied(plane, *made)
    plane.programs.until(
        one.name, "has settled", lambda: set(notes(one, "batch_settled")) == {"a", "b"}, within_s=150
    )
    settled = notes(one, "batch_settled")
    now = until_applied(plane, *made)
    for pod in now:
        name = pod["metadata"]["name"]
        batch = (assignment(pod) or {})["knobs"]["batch"]
        assert batch == settled[name]["batch"] and 4 <= batch <= 64
        # The SDK runs with what was decided, in the process that was started first.
        kept = node.var / f"lib/kept/{namespace}/{name}"

        def last(kept: Path = kept) -> int:
            return int(kept.read_text().splitlines()[-2].split()[0])

        plane.programs.until(one.name, "is obeyed", lambda: last() == batch)  # noqa: B023
        sizes = {int(line.split()[0]) for line in kept.read_text().splitlines()[:-1]}
        assert len(sizes) > 1 and sizes >= {8, batch}, sizes
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
        assert {"BatchSizeChanged", "CoLocated"} <= set(reasons(plane, pod))
    # Larger batches are worth it for both, and at least one is tuned away from its own size.
    assert any(s["batch"] != 8 for s in settled.values()), settled
    assert not notes(one, "batch_not_applied")
    delete_all(plane, namespace)
    one.stop()


TRAIN = """
import roommate, time
def batch(size):
    time.sleep(0.01)
    return size
for _ in roommate.steps(batch, batch_size=1):
    pass
"""


def test_mudi_gives_a_service_the_share_that_it_needs(
    plane: ControlPlane, node: RealNode, agent: Agent, namespace: str
) -> None:
    one = scheduler(plane, "mudi", batches=[1, 2, 4, 8], calm_s=2.0)
    make(plane, "GpuProfile", "digits", {"stepSeconds": 0.02, "service": {"maxBatch": 8}})
    known = path_of("gpuprofiles", "digits")
    plane.api.until(known, lambda p: bool(p.get("status", {}).get("conditions")))
    port = free_port()
    asked = {
        "roommate.dev/class": "service", "roommate.dev/objective": "p99=250ms",
        "roommate.dev/profile": "digits", "roommate.dev/max-batch": "8", "roommate.dev/expected-rate": "20",
    }  # fmt: skip
    service = guest(plane, namespace, "digits", annotations=asked, **front(port, "p99=250ms"))
    until_applied(plane, service)
    trained = [guest(plane, namespace, f"t{n}", python(TRAIN), python=True) for n in range(2)]
    trained = until_applied(plane, *trained)
    # What was promised is known before the first request: the rate is as its user expects.
    (before,) = until_applied(plane, service)
    knobs = (assignment(before) or {})["knobs"]
    assert 0 < knobs["sm_permille"] < 1000 and knobs["batch"] in (1, 2, 4, 8), knobs
    load(plane, node, f"http://127.0.0.1:{port}", seconds=12)
    found = until_applied(plane, service, *trained)
    shares = [(assignment(p) or {})["knobs"].get("sm_permille", 1000) for p in found]
    assert sum(shares) <= 1000 and shares[0] > 0 and shares[1] == shares[2] > 0, shares
    measured = json.loads(found[0]["metadata"]["annotations"]["roommate.dev/measured"])
    assert measured["load_rps"] > 5, measured
    late, requests = served(agent, namespace)
    assert requests >= 100 and late <= 0.05 * requests, f"{late} of {requests} were late"
    delete_all(plane, namespace)
    time.sleep(1.0)
    one.stop()
