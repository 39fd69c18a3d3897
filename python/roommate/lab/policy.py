"""Policies in Python, behind the same trait as the built-in ones: for a first try, not for speed.

A policy is a function of a plan, or an object with a method ``schedule``. It is called whenever
something happened that could change a decision, reads the plan and edits it::

    def first_come_first_served(plan):
        for job in plan.pending:            # in the order of their submission
            gpus = plan.find(job)           # idle GPUs for the whole gang, or None
            if gpus is None:
                break
            plan.place(job, gpus)

The simulator checks every edit as it checks those of its own policies. An edit that is not possible
raises ``Refused`` and leaves the plan as it was.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .program import LabError

VERSION = 1

Knobs = Mapping[str, Any]


class Refused(Exception):
    """An edit that is not possible; the plan is as it was."""


class Scheduler(Protocol):
    """A policy with a memory of its own."""

    def schedule(self, plan: Plan) -> None:
        """Edits the plan."""


PythonPolicy = Callable[["Plan"], None] | Scheduler


@dataclass(eq=False)
class Job:
    """A job: what its user asked for, and where it is now."""

    index: int
    name: str
    model: str
    """The kind of work, its profile."""
    gpus: int
    """GPUs that it needs to start, all or nothing."""
    gpus_max: int
    submitted_s: float
    length_s: float | None
    """Seconds that it takes alone, as declared. Policies that may not know lengths do not read it."""
    spec: dict[str, Any]
    """All that its user asked for, as in a journal."""
    on: list[int] = field(default_factory=list)
    """The GPUs that it holds."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """How it runs on them."""
    attained_gpu_s: float = 0.0
    """GPU seconds that it has had so far."""
    done: float = 0.0
    """Steps that it has done, as believed."""
    starts: int = 0

    def __repr__(self) -> str:
        return f"<job {self.name!r}: {self.gpus} GPUs{f', on {self.on}' if self.on else ''}>"


@dataclass(frozen=True)
class Node:
    """A node and the indices of its GPUs."""

    gpus: range
    gpu_model: str
    mem_mib: int
    """Memory of each GPU; 0 = not known."""


class Plan:
    """What a policy reads and edits."""

    def __init__(self, peer: Peer, begin: dict[str, Any]) -> None:
        self._peer = peer
        models = begin["gpu_models"]
        self.nodes = [_node(node, models[node["gpu_model"]]) for node in begin["nodes"]]
        self.max_tenants: int = begin["max_tenants"]
        """Most jobs that a GPU may have."""
        self.jobs: list[Job] = []
        """All jobs ever submitted, in that order."""
        self.now_s = 0.0
        self.pending: list[Job] = []
        """Jobs that wait, in the order of their submission."""
        self.placed: list[Job] = []
        """Jobs that hold GPUs, in the same order."""
        self.idle: list[int] = []
        """GPUs without a job."""
        self.ready: list[Job] = []
        """Jobs that may be placed since the last call."""
        self.left: list[Job] = []
        """Jobs that lost their GPUs since the last call without the policy asking for it."""
        self.nodes_down: list[int] = []

    def find(self, job: Job, rule: str = "consolidated") -> list[int] | None:
        """Idle GPUs for the whole gang, or None. The rule says which: ``consolidated`` (as few nodes
        as possible, or none), ``first_fit``, ``spread`` or ``count`` (any).
        """
        answer = self._peer.asks({"find": {"job": job.index, "rule": rule}})
        return answer["found"]  # type: ignore[no-any-return]

    def place(self, job: Job, gpus: Sequence[int], knobs: Knobs | None = None) -> None:
        """Places a waiting job on these GPUs, with its own knobs or with these."""
        words = {"job": job.index, "gpus": sorted(gpus)}
        self._peer.asks({"place": words if knobs is None else {**words, "knobs": dict(knobs)}})
        job.on, job.knobs = list(words["gpus"]), dict(knobs or job.spec["knobs"])  # type: ignore[call-overload]
        self._set([j for j in self.pending if j is not job], [*self.placed, job])

    def release(self, job: Job) -> None:
        """Takes a job off its GPUs. It can be placed elsewhere at once, and then moves."""
        self._peer.asks({"release": {"job": job.index}})
        self._takes_off(job)

    def suspend(self, job: Job) -> None:
        """Takes a job off its GPUs, with its process in host memory: it resumes cheaply there."""
        self._peer.asks({"suspend": {"job": job.index}})
        self._takes_off(job)

    def tune(self, job: Job, knobs: Knobs) -> None:
        """Changes how a placed job runs: ``{"sm_permille": 500}``."""
        self._peer.asks({"tune": {"job": job.index, "knobs": dict(knobs)}})
        job.knobs = dict(knobs)

    def wake(self, at_s: float) -> None:
        """Asks to be called at this time at the latest; valid until the next call."""
        self._peer.asks({"wake": {"at_us": round(at_s * 1e6)}})

    def tenants(self, gpu: int) -> list[Job]:
        """The jobs on a GPU."""
        return [job for job in self.placed if gpu in job.on]

    def _takes_off(self, job: Job) -> None:
        job.on, job.knobs = [], {}
        self._set([*self.pending, job], [j for j in self.placed if j is not job])

    def _set(self, pending: list[Job], placed: list[Job]) -> None:
        """New lists: a policy may be walking over the old ones."""
        self.pending = sorted(pending, key=lambda job: job.index)
        self.placed = sorted(placed, key=lambda job: job.index)
        up = {g for n, node in enumerate(self.nodes) if n not in self.nodes_down for g in node.gpus}
        self.idle = sorted(up.difference(*(job.on for job in placed)))

    def _take(self, asked: dict[str, Any]) -> None:
        self.jobs += [_job(new) for new in asked["new"]]
        self.now_s = asked["at_us"] / 1e6
        for state in [*asked["pending"], *asked["placed"]]:
            job = self.jobs[state["job"]]
            job.attained_gpu_s = state["attained_gpu_us"] / 1e6
            job.done, job.starts = state["done"], state["starts"]
            job.on, job.knobs = state.get("gpus", []), state.get("knobs", {})
        self.pending = [self.jobs[state["job"]] for state in asked["pending"]]
        self.placed = [self.jobs[state["job"]] for state in asked["placed"]]
        self.ready = [self.jobs[i] for i in asked["ready"]]
        self.left = [self.jobs[i] for i in asked["left"]]
        for job in self.left:
            job.on, job.knobs = [], {}
        self.idle, self.nodes_down = asked["idle"], asked["nodes_down"]


class Peer:
    """The connection to the simulator."""

    def __init__(self, connection: socket.socket) -> None:
        self._to = connection.makefile("w")
        self._from = connection.makefile("r")

    def hear(self) -> dict[str, Any] | None:
        """The next message; None once the simulator has ended."""
        line = self._from.readline()
        return json.loads(line) if line else None

    def say(self, message: dict[str, Any]) -> None:
        """Sends a message."""
        self._to.write(json.dumps(message) + "\n")
        self._to.flush()

    def asks(self, message: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and returns the answer."""
        self.say(message)
        answer = self.hear()
        if answer is None:
            raise LabError("the simulator ended while the policy decided")
        if "refused" in answer:
            ((what, words),) = message.items()
            raise Refused(f"{what} {json.dumps(words)}: {answer['refused']['why']}")
        return answer


def is_own(policy: object) -> bool:
    """Whether it is a policy in Python."""
    return callable(policy) or hasattr(policy, "schedule")


def name_of(policy: object) -> str:
    """The name of a policy in results."""
    if isinstance(policy, str):
        return policy
    own = getattr(policy, "name", None) or getattr(policy, "__name__", None)
    return str(own or type(policy).__name__)


def answer(policy: PythonPolicy, door: socket.socket, child: subprocess.Popen[str]) -> None:
    """Decides for a simulator until it has ended. What the policy raises ends both."""
    connection = _admit(door, child)
    if connection is None:
        return
    decide = policy.schedule if hasattr(policy, "schedule") else policy
    peer = Peer(connection)
    with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        begin = peer.hear()
        if begin is None:
            return
        if begin["begin"]["version"] != VERSION:
            raise LabError("the program and this package are of different versions")
        plan = Plan(peer, begin["begin"])
        while (asked := peer.hear()) is not None:
            plan._take(asked["asked"])
            decide(plan)
            peer.say({"decided": {}})


def _admit(door: socket.socket, child: subprocess.Popen[str]) -> socket.socket | None:
    """The simulator's connection; None if it ended before, e.g. because a trace is invalid."""
    door.settimeout(0.1)
    while True:
        try:
            connection, _ = door.accept()
        except TimeoutError:
            if child.poll() is not None:
                return None
        else:
            connection.settimeout(None)
            return connection


def _node(node: dict[str, Any], model: dict[str, Any]) -> Node:
    gpus = range(node["first_gpu"], node["first_gpu"] + node["gpus"])
    return Node(gpus, model["name"], model["mem_mib"])


def _job(new: dict[str, Any]) -> Job:
    own = {"job", "name", "profile_name", "submitted_us", "length_s"}
    return Job(
        index=new["job"],
        name=new["name"],
        model=new["profile_name"],
        gpus=new["gpus"],
        gpus_max=new["gpus_max"],
        submitted_s=new["submitted_us"] / 1e6,
        length_s=new["length_s"],
        spec={key: value for key, value in new.items() if key not in own},
    )
