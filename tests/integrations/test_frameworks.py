"""Callbacks with the real PyTorch, Lightning and transformers, on the CPU; the test is the daemon."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jobs
import pytest
from sdk_conftest import Machine

from roommate import session
from roommate.protocol import (
    Checkpoint,
    Checkpointed,
    Hello,
    Message,
    Resume,
    Resumed,
    Stepped,
    Stop,
    Suspend,
    Suspended,
    Tune,
    Tuned,
)

FRAMEWORKS = [jobs.lightning, jobs.transformers]
PER_EPOCH = jobs.SAMPLES // jobs.BATCH

each = pytest.mark.parametrize("train", FRAMEWORKS, ids=lambda train: train.__name__)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ROOMMATE_CHECKPOINT", str(tmp_path / "kept"))
    return str(tmp_path / "kept")


def once(machine: Machine, kind: type[Message], *answers: Message, after: int = 1) -> None:
    """Sends the answers when so many messages of a kind were received."""
    before, count = machine.react, [0]

    def react(message: Message) -> list[Message]:
        count[0] += isinstance(message, kind)
        mine = list(answers) if isinstance(message, kind) and count[0] == after else []
        return mine + before(message)

    machine.react = react


def reported(machine: Machine, done: float, within_s: float = 10.0) -> None:
    """Waits until the job has reported this much work, and no more."""
    end = time.monotonic() + within_s
    while machine.all(Stepped)[-1].done < done - 1e-9 and time.monotonic() < end:
        time.sleep(0.01)
    assert machine.all(Stepped)[-1].done == pytest.approx(done)


def rate_of(trainer: Any) -> float:
    optimizer = trainer.optimizers[0] if hasattr(trainer, "optimizers") else trainer.optimizer
    return float(optimizer.param_groups[0]["lr"])


@each
def test_steps_are_reported(train: Any, machine: Machine, folder: str) -> None:
    _, net, _ = train(folder, 2)
    reported(machine, 2 * PER_EPOCH)
    reports = machine.all(Stepped)
    assert len(net.sizes) == 2 * PER_EPOCH
    assert sum(report.steps for report in reports) == 2 * PER_EPOCH
    assert all(0 < r.step_s < 5 and r.load_s is not None and r.batch == 4 for r in reports)
    (hello,) = machine.all(Hello)
    assert hello.batch is None, "without a range the batch size is the user's"


@each
def test_the_batch_size_and_the_rate_follow(train: Any, machine: Machine, folder: str) -> None:
    once(machine, Stepped, Tune(12, 1000), after=3)
    trainer, net, _ = train(folder, 2, min=2, max=16)
    assert machine.all(Hello)[0].batch.size == 4
    assert machine.wait_for(Tuned)[-1].batch == 12
    assert set(net.sizes) <= {4, 12, 8}, "8 are left at the end of an epoch"
    assert net.sizes[0] == 4 and net.sizes[-1] == 12
    reported(machine, 2 * PER_EPOCH)
    assert rate_of(trainer) == pytest.approx(3 * jobs.RATE), "the linear rule"


@each
def test_a_suspended_job_waits_between_steps(train: Any, machine: Machine, folder: str) -> None:
    once(machine, Stepped, Suspend(), after=2)
    once(machine, Suspended, Resume())
    train(folder, 1)
    kinds = [type(m) for m in machine.heard]
    assert kinds[kinds.index(Suspended) + 1] is Resumed, "nothing in between"
    reported(machine, PER_EPOCH)


@each
def test_the_pace_is_kept(train: Any, machine: Machine, folder: str) -> None:
    """At half its pace a job pauses as long as it runs."""
    once(machine, Hello, Tune(0, 500))
    began = time.monotonic()
    train(folder, 4)
    took_s = time.monotonic() - began
    reported(machine, 4 * PER_EPOCH)
    reports = machine.all(Stepped)
    busy_s = sum(r.step_s * r.steps for r in reports)
    # Its own set-up is in the time as well: the pauses alone are as long as the steps.
    assert took_s >= 1.9 * busy_s


@each
def test_a_checkpoint_is_saved_while_it_runs(train: Any, machine: Machine, folder: str) -> None:
    once(machine, Stepped, Checkpoint(), after=5)
    _, _, callback = train(folder, 1)
    (saved,) = machine.all(Checkpointed)
    assert 0 < saved.done < PER_EPOCH
    assert callback.checkpoint() is not None


@each
def test_a_stopped_job_goes_on_where_it_was(train: Any, machine: Machine, folder: str) -> None:
    once(machine, Stepped, Stop(), after=5)
    with pytest.raises(session.Stopped) as stopped:
        train(folder, 2)
    assert stopped.value.code == 75
    (saved,) = machine.all(Checkpointed)
    assert 5 <= saved.done < 2 * PER_EPOCH
    session.forget()
    machine.heard.clear()
    machine.react = lambda message: []
    _, net, _ = train(folder, 2)
    assert len(net.sizes) == 2 * PER_EPOCH - saved.done
    assert machine.all(Stepped)[0].done == saved.done + 1
    reported(machine, 2 * PER_EPOCH)


@each
def test_without_a_daemon_nothing_changes(
    train: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROOMMATE_SOCKET", raising=False)
    session.forget()
    _, net, _ = train(folder, 1, min=2, max=16)
    assert net.sizes == [4] * PER_EPOCH
    session.forget()


def start_two(kind: str, folder: str) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("jobs.py")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "PYTHONPATH": str(script.parents[2] / "python"), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*run, script, kind, folder], env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("kind", ["lightning", "transformers", "ddp"])
def test_processes_of_a_job_act_as_one(kind: str, machine: Machine, folder: str) -> None:
    """DDP with two processes: one of them talks, all of them obey."""
    once(machine, Stepped, Tune(8, 1000), after=1)
    once(machine, Tuned, Suspend())
    once(machine, Suspended, Resume(), Checkpoint())
    before = machine.react
    grown = lambda m: isinstance(m, Stepped) and m.batch == 8  # noqa: E731
    machine.react = lambda m: [Stop()] if grown(m) else before(m)
    job = start_two(kind, folder)
    said, _ = job.communicate(timeout=240)
    assert job.returncode != 0 and "exitcode  : 75" in said, said
    assert len(machine.all(Hello)) == 1, "rank 0 alone talks to the daemon"
    assert len(machine.all(Checkpointed)) == 2, said
    kinds = [type(m) for m in machine.heard]
    assert kinds.index(Suspended) < kinds.index(Checkpointed)
    kept = machine.all(Checkpointed)[-1].done
    machine.heard.clear()
    machine.react = lambda message: []
    job = start_two(kind, folder)
    said, _ = job.communicate(timeout=240)
    assert job.returncode == 0, said
    assert said.count("trained") == 2, said
    assert machine.all(Stepped)[0].done > kept
    assert len(machine.all(Hello)) == 1
