"""Simulations and comparisons, and their results."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import charts, policy
from .journal import Account, read
from .policy import PythonPolicy
from .program import flags, optional, output, start

Policy = str | PythonPolicy
"""A policy: the name of a built-in one, or one in Python."""

Parameters = Mapping[str, object]


@dataclass
class Run:
    """A policy on a trace."""

    policy: str
    metrics: dict[str, Any]
    """Figures, named as in the program's JSON (docs/reference/metrics.md)."""
    account: Account = field(repr=False)
    """The journal, read."""

    @property
    def jobs(self) -> Any:
        """A pandas frame with a row for each job."""
        pandas = optional("pandas")
        frame = pandas.DataFrame([asdict(job) for job in self.account.jobs])
        if frame.empty:
            return frame
        frame = frame.rename(columns={"name": "job", "job_class": "class"}).set_index("job")
        done = frame.state == "finished"
        frame["jct_s"] = (frame.ended_s - frame.submitted_s).where(done)
        frame["queue_s"] = (frame.jct_s - frame.on_gpus_s).where(done)
        return frame

    @property
    def stays(self) -> Any:
        """A pandas frame: who was on which GPU from when to when."""
        frame = optional("pandas").DataFrame([asdict(stay) for stay in self.account.stays])
        return frame.explode("gpus", ignore_index=True).rename(columns={"gpus": "gpu"})

    def completion_times_s(self) -> list[float]:
        """Of the jobs that were finished."""
        done = (job for job in self.account.jobs if job.state == "finished")
        return [(job.ended_s or 0.0) - (job.submitted_s or 0.0) for job in done]

    def plot(self, kind: str = "gantt", ax: Any = None) -> Any:
        """Draws a Gantt chart of the GPUs, or with ``cdf`` the distribution of completion times."""
        if kind == "gantt":
            return charts.gantt(self.account, self.policy, ax)
        if kind == "cdf":
            return charts.cdf({self.policy: self.completion_times_s()}, self.policy, ax)
        raise ValueError(f"no chart {kind!r}: there are gantt and cdf")


@dataclass
class Comparison:
    """Several policies on the same trace."""

    runs: dict[str, Run]
    bound_s: float | None
    """A mean completion time that no policy can beat; None where that is not known."""

    def __getitem__(self, policy: str) -> Run:
        return self.runs[policy]

    @property
    def metrics(self) -> Any:
        """A pandas frame with a row for each policy, the best mean completion time first."""
        rows = {name: run.metrics for name, run in self.runs.items()}
        frame = optional("pandas").DataFrame.from_dict(rows, orient="index")
        return frame.rename_axis("policy").sort_values("avg_jct_s")

    def plot(self, ax: Any = None) -> Any:
        """Draws the distribution of completion times of each policy."""
        times = {name: run.completion_times_s() for name, run in self.runs.items()}
        return charts.cdf(times, "completion times", ax)


def simulate(
    policy: Policy = "tiresias",
    *,
    trace: Any = None,
    params: Parameters | None = None,
    journal: str | os.PathLike[str] | None = None,
    **settings: object,
) -> Run:
    """Runs a trace through one policy in virtual time.

    ``policy`` is a name (``roommate policies`` lists them) or a policy in Python. ``trace`` is a
    path, a pandas frame with the columns of docs/reference/trace-format.md, or None for a small
    invented one. ``params`` are parameters of the policy. ``journal`` is a file for the journal,
    for ``roommate explain`` and ``report``. ``settings`` are the flags of ``roommate sim``:
    ``cluster="4x8"``, ``seed=7``, ``restart_cost=30``, ``blind=True``.
    """
    with _folder() as folder:
        words = ["sim", *_trace(trace, folder), *flags(settings), *_params("", params)]
        return _one(policy, words, folder, Path(journal) if journal else None)


def compare(
    policies: Sequence[Policy] | None = None,
    *,
    trace: Any = None,
    params: Mapping[str, Parameters] | None = None,
    **settings: object,
) -> Comparison:
    """Runs a trace through several policies; by default, through one of each family.

    ``params`` are parameters by policy: ``{"tiresias": {"promote_knob": 8}}``. The rest is as in
    ``simulate``.
    """
    chosen = list(policies or [])
    names = [p for p in chosen if isinstance(p, str)]
    _refuse_twice([policy.name_of(p) for p in chosen])
    with _folder() as folder:
        words = [*_trace(trace, folder), *flags(settings)]
        sets = [w for name, of in (params or {}).items() for w in _params(f"{name}.", of)]
        runs, bound_s = _built_in(names, [*words, *sets], folder) if names or not chosen else ({}, None)
        for own in chosen:
            if not isinstance(own, str):
                runs[policy.name_of(own)] = _one(own, ["sim", *words], folder)
    order = [policy.name_of(p) for p in chosen] or list(runs)
    return Comparison({name: runs[name] for name in order if name in runs}, bound_s)


def _built_in(
    names: list[str], words: list[str], folder: Path
) -> tuple[dict[str, Run], float | None]:
    journals = folder / "journals"
    chosen = ["-p", ",".join(names)] if names else []
    text = output(start(["compare", *words, *chosen, f"--journals={journals}", "-o", "json"]))
    whole = json.loads(text)
    runs = {}
    for metrics in whole["results"]:
        name = metrics.pop("policy")
        runs[name] = Run(name, metrics, _read(journals / f"{name}.jsonl"))
    return runs, whole["bound_s"]


def _one(chosen: Policy, words: list[str], folder: Path, journal: Path | None = None) -> Run:
    journal = journal or folder / "journal.jsonl"
    words = [*words, f"--journal={journal}", "-o", "json"]
    if isinstance(chosen, str):
        text = output(start([*words, f"--policy={chosen}"]))
    elif policy.is_own(chosen):
        text = _with_own(chosen, words, folder)
    else:
        raise TypeError(f"no policy: {chosen!r}; give a name, a function, or an object with schedule")
    metrics = json.loads(text)
    del metrics["policy"]
    return Run(policy.name_of(chosen), metrics, _read(journal))


def _with_own(own: PythonPolicy, words: list[str], folder: Path) -> str:
    path = folder / "policy.sock"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(path))
        door.listen()
        child = start([*words, f"--policy-socket={path}"])
        try:
            policy.answer(own, door, child)
        except BaseException:
            child.kill()
            child.communicate()
            raise
        return output(child)


def _read(journal: Path) -> Account:
    with journal.open() as lines:
        return read(lines)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="roommate-lab-") as folder:
        yield Path(folder)


def _trace(trace: Any, folder: Path) -> list[str]:
    if trace is None:
        return []
    if hasattr(trace, "to_csv"):
        trace.to_csv(folder / "trace.csv", index=False)
        return [str(folder / "trace.csv")]
    return [os.fspath(trace)]


def _params(prefix: str, params: Parameters | None) -> list[str]:
    given = (params or {}).items()
    return [f"--set={prefix}{name}={json.dumps(value)}" for name, value in given]


def _refuse_twice(names: list[str]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        hint = "give policies of your own an attribute `name`"
        raise ValueError(f"two policies are named {sorted(twice)[0]!r}: {hint}")
