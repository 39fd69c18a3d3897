"""The laboratory: simulations from Python, policies in Python, and the notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from conftest import BINARY, ROOT
from nbclient import NotebookClient

from roommate import lab
from roommate.lab import Job, LabError, Plan, Refused


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOMMATE", BINARY)
    monkeypatch.setenv("MPLBACKEND", "agg")


def fifo(plan: Plan) -> None:
    for job in plan.pending:
        gpus = plan.find(job)
        if gpus is None:
            break
        plan.place(job, gpus)


def backfill(plan: Plan) -> None:
    for job in plan.pending:
        gpus = plan.find(job)
        if gpus is not None:
            plan.place(job, gpus)


class LeastAttained:
    """Preempts for the jobs that had least, in rounds; keeps books of its own."""

    def schedule(self, plan: Plan) -> None:
        def had(job: Job) -> tuple[float, int]:
            return (job.attained_gpu_s, job.index)

        for job in list(plan.placed):
            plan.release(job)
        for job in sorted(plan.pending, key=had):
            gpus = plan.find(job, "count")
            if gpus is not None:
                plan.place(job, gpus)
        if plan.pending:
            plan.wake(plan.now_s + 600)


@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("cluster", ["2x4", "5x2", "1x8:v100,2x4:a100"])
def test_fifo_in_python_decides_as_the_built_in_one(seed: int, cluster: str) -> None:
    for own, name in [(fifo, "fifo"), (backfill, "fifo-backfill")]:
        world = {"cluster": cluster, "seed": seed, "crash": 0.1, "node_mtbf": 100}
        mine, built_in = lab.simulate(own, **world), lab.simulate(name, **world)
        assert mine.account == built_in.account, "the same jobs on the same GPUs at the same times"
        assert mine.account.stays and mine.metrics["failures"] > 0
        same = set(mine.metrics) - {"wall_s", "peak_rss_mib"}
        assert {k: mine.metrics[k] for k in same} == {k: built_in.metrics[k] for k in same}


def test_the_journal_of_a_policy_in_python_is_told(tmp_path: Path) -> None:
    """It can be explained and shown, but there is nothing to replay it with."""
    journal = tmp_path / "own.jsonl"
    run = lab.simulate(fifo, cluster="2x4", seed=1, journal=journal)
    assert len(run.jobs) == 500

    def tool(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([BINARY, *words], capture_output=True, text=True)

    assert "finished" in tool("explain", "17", "--journal", str(journal)).stdout
    assert tool("report", str(journal), "-o", str(tmp_path / "own.html")).returncode == 0
    replayed = tool("replay", str(journal))
    assert replayed.returncode == 2 and 'there is no policy "external"' in replayed.stderr


def test_a_policy_that_preempts_finishes_all_jobs() -> None:
    run = lab.simulate(LeastAttained(), cluster="2x4", seed=3)
    assert run.metrics["finished"] == run.metrics["jobs"] == 500
    assert run.metrics["preemptions"] > 0
    assert run.policy == "LeastAttained"


def test_gpus_are_never_given_twice() -> None:
    """Every job on a GPU of its own: stays on a GPU do not overlap."""
    stays = lab.simulate(LeastAttained(), cluster="2x4", seed=5).stays
    for _, on in stays.sort_values("from_s").groupby("gpu"):
        assert (on.from_s.iloc[1:].values >= on.to_s.iloc[:-1].values - 1e-6).all()


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda plan, job: plan.place(job, range(job.gpus + 1)), "fewer or more GPUs"),
        (lambda plan, job: plan.place(job, [99] * job.gpus), "does not exist"),
        (lambda plan, job: plan.release(job), "the job holds no GPUs"),
        (lambda plan, job: plan.tune(job, {"batch": 2}), "the job holds no GPUs"),
        (lambda plan, job: plan.wake(plan.now_s), "a wake-up must be in the future"),
        (
            lambda plan, job: plan.place(job, range(job.gpus), {"sm_permille": 1001}),
            "a knob is outside its range",
        ),
    ],
)
def test_an_illegal_edit_is_refused(edit: Callable[[Plan, Job], None], why: str) -> None:
    with pytest.raises(Refused, match=why):
        lab.simulate(lambda plan: edit(plan, plan.pending[0]), cluster="2x4")

    def goes_on(plan: Plan) -> None:
        before = [*plan.pending], [*plan.placed], [*plan.idle]
        if plan.pending:
            try:
                edit(plan, plan.pending[0])
            except Refused:
                assert (plan.pending, plan.placed, plan.idle) == before
        fifo(plan)

    run = lab.simulate(goes_on, cluster="2x4", seed=2)
    assert run.account == lab.simulate("fifo", cluster="2x4", seed=2).account


def test_a_gang_larger_than_its_place_does_not_share() -> None:
    def crowd(plan: Plan) -> None:
        for job in plan.pending:
            plan.place(job, range(job.gpus))

    with pytest.raises(Refused, match=r"place .*: a GPU has not enough of its multiprocessors left"):
        lab.simulate(crowd, cluster="2x4")


def test_what_a_policy_raises_is_raised() -> None:
    def wrong(plan: Plan) -> None:
        raise KeyError(plan.jobs[0].name)

    with pytest.raises(KeyError, match="0"):
        lab.simulate(wrong)


def test_a_policy_that_starts_nothing_is_stuck() -> None:
    with pytest.raises(LabError, match="the simulation is stuck"):
        lab.simulate(lambda plan: None, cluster="2x4")


def test_frames_agree_with_the_figures() -> None:
    run = lab.simulate("gandiva", cluster="2x4", seed=4)
    jobs, figures = run.jobs, run.metrics
    assert len(jobs) == figures["jobs"] == 500
    assert jobs.jct_s.mean() == pytest.approx(figures["avg_jct_s"])
    assert jobs.queue_s.mean() == pytest.approx(figures["avg_queue_s"])
    assert jobs.ended_s.max() == pytest.approx(figures["makespan_s"])
    assert set(run.stays.gpu) == set(range(8))


def test_policies_of_both_kinds_are_compared() -> None:
    both = lab.compare(["fifo", backfill], cluster="2x4", seed=1)
    assert list(both.metrics.index) == ["backfill", "fifo"]
    assert both.bound_s is not None and both.bound_s < both["backfill"].metrics["avg_jct_s"]
    own = lab.simulate("fifo-backfill", cluster="2x4", seed=1)
    assert both["backfill"].metrics["avg_jct_s"] == own.metrics["avg_jct_s"]
    with pytest.raises(ValueError, match="two policies are named 'fifo'"):
        lab.compare(["fifo", fifo])


def test_parameters_and_flags_reach_the_program() -> None:
    plain = lab.simulate("fifo", cluster="2x4", seed=1)
    params = lab.simulate("fifo", params={"backfill": True}, cluster="2x4", seed=1)
    assert params.metrics["avg_jct_s"] < plain.metrics["avg_jct_s"]
    several = lab.compare(["fifo"], params={"fifo": {"backfill": True}}, cluster="2x4", seed=1)
    assert several["fifo"].metrics["avg_jct_s"] == params.metrics["avg_jct_s"]
    with pytest.raises(LabError, match="there is no policy"):
        lab.simulate("nope")


def test_a_frame_is_a_trace() -> None:
    columns = {"id": ["a", "b"], "submit_s": [0, 5], "gpus": [2, 1], "duration_s": [100, 10]}
    run = lab.simulate("fifo", trace=pd.DataFrame(columns), cluster="1x2", truth="none")
    assert list(run.jobs.jct_s) == [100, 105]
    assert list(run.jobs.index) == ["a", "b"]


def test_charts_are_drawn(tmp_path: Path) -> None:
    both = lab.compare(["fifo", "mps"], cluster="1x4", seed=1)
    for name, chart in [("gantt", both["mps"].plot()), ("cdf", both.plot())]:
        chart.figure.savefig(tmp_path / name)
    bars = both["mps"].plot().patches
    assert len(bars) == len(both["mps"].stays), "a bar for each stay on each GPU"
    with pytest.raises(ValueError, match="no chart 'pie'"):
        both["fifo"].plot("pie")


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(LabError, match=r"pip install 'roommate-gpu\[lab\]'"):
        _ = lab.simulate("fifo", cluster="1x8").jobs
    monkeypatch.setenv("ROOMMATE", str(tmp_path / "none"))
    with pytest.raises(LabError, match="there is no such program"):
        lab.simulate("fifo")


def test_the_sdk_alone_imports_neither_pandas_nor_matplotlib() -> None:
    code = "import roommate.lab, sys; print({'pandas', 'matplotlib', 'numpy'} & set(sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True) == "set()\n"


def test_the_notebook_runs(tmp_path: Path) -> None:
    path = ROOT / "examples/lab.ipynb"
    assert all(not cell.get("outputs") for cell in json.loads(path.read_text())["cells"])
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert "multiprocessors" in outputs[-1]["text"]
    if keep := os.environ.get("ROOMMATE_KEEP_NOTEBOOK"):
        nbformat.write(notebook, keep)
