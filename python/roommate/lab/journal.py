"""What a journal says of each job, and who was on which GPU from when to when."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

US = 1e6


@dataclass
class History:
    """A job in a run."""

    name: str
    gpus: int
    model: str
    team: str
    job_class: str
    submitted_s: float | None = None
    started_s: float | None = None
    """When it got GPUs first."""
    ended_s: float | None = None
    on_gpus_s: float = 0.0
    starts: int = 0
    failures: int = 0
    state: str = "waiting"
    """``finished``, ``failed``, ``rejected`` or ``cancelled``; ``waiting`` or ``running`` at the end."""


@dataclass
class Stay:
    """A time in which a job held the same GPUs in the same way."""

    job: str
    gpus: list[int]
    sm_permille: int
    from_s: float
    to_s: float


@dataclass
class Account:
    """A journal, read."""

    jobs: list[History] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)
    gpus: int = 0


class _Reader:
    def __init__(self) -> None:
        self.account = Account()
        self.teams: list[str] = []
        self.profiles: list[str] = []
        self.open: dict[int, tuple[dict[str, Any], float]] = {}

    def line(self, line: dict[str, Any]) -> None:
        ((kind, of),) = line.items()
        if kind == "team":
            self.teams.append(of["name"])
        elif kind == "profile":
            self.profiles.append(of["name"])
        elif kind == "job":
            self.job(of["name"], of["spec"])
        elif kind == "step":
            for fact in of.get("facts", []):
                self.fact(*_parts(fact), of["at"] / US)
            for action in of.get("actions", []):
                self.action(*_parts(action), of["at"] / US)
        elif kind == "end":
            for job in list(self.open):
                self.close(job, of["at"] / US)

    def job(self, name: str, spec: dict[str, Any]) -> None:
        team, model = self.teams[spec["team"]], self.profiles[spec["profile"]]
        self.account.jobs.append(History(name, spec["gpus"], model, team, spec["class"]))

    def fact(self, kind: str, of: Any, at: float) -> None:
        if kind not in ("submitted", "finished", "cancelled", "withdrawn", "failed"):
            return
        index = of["job"] if kind == "failed" else of
        job = self.account.jobs[index]
        if kind == "submitted":
            job.submitted_s, job.state = at, "waiting"
            return
        self.close(index, at)
        if kind == "failed":
            job.failures += 1
            job.state = "failed"
        else:
            job.state = kind
        job.ended_s = at

    def action(self, kind: str, of: Any, at: float) -> None:
        index = of[0] if isinstance(of, list) else of
        job = self.account.jobs[index]
        before = self.open.get(index)
        self.close(index, at)
        if kind in ("start", "move"):
            self.open[index] = (of[1], at)
            job.started_s = at if job.started_s is None else job.started_s
            job.starts, job.state, job.ended_s = job.starts + 1, "running", None
        elif kind == "tune" and before is not None:
            self.open[index] = ({**before[0], "knobs": of[1]}, at)
        elif kind == "reject":
            job.state, job.ended_s = "rejected", at
        else:
            job.state = "waiting"

    def close(self, index: int, at: float) -> None:
        placement, since = self.open.pop(index, ({}, at))
        if at > since:
            job = self.account.jobs[index]
            job.on_gpus_s += at - since
            share = placement.get("knobs", {}).get("sm_permille", 1000)
            self.account.stays.append(Stay(job.name, placement["gpus"], share, since, at))


def read(lines: Iterable[str]) -> Account:
    """Folds the lines of a journal."""
    reader = _Reader()
    for line in lines:
        parsed = json.loads(line)
        if "head" in parsed:
            reader.account.gpus = _gpus(parsed["head"]["cluster"])
        else:
            reader.line(parsed)
    return reader.account


def _parts(of: dict[str, Any]) -> tuple[str, Any]:
    ((kind, value),) = of.items()
    return kind, value


def _gpus(cluster: str) -> int:
    """GPUs of a cluster as flags write it: ``8x8:v100,4x8:a100``."""
    groups = (group.partition(":")[0].split("x") for group in cluster.split(","))
    return sum(int(count) * int(each) for count, each in groups)
