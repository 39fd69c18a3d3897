"""Loops with a daemon that sends requests."""

from __future__ import annotations

import os
import time

import pytest
from conftest import Machine

import roommate
from roommate import protocol, session
from roommate.protocol import (
    Checkpoint,
    Checkpointed,
    Enter,
    Go,
    Hello,
    Leave,
    Message,
    Refused,
    Resume,
    Resumed,
    Stepped,
    Stop,
    Suspend,
    Suspended,
    Tune,
    Tuned,
    Welcome,
)


def endless(size: int) -> list[int]:
    time.sleep(0.001)
    return [0] * size


class Optimizer:
    def __init__(self) -> None:
        self.param_groups = [{"lr": 0.1}, {"lr": 0.01}]


def test_hello_has_the_token_and_the_batch_range(machine: Machine) -> None:
    machine.welcome = Welcome(1, "test", 41.0, 0, 1000)
    assert roommate.start_done() == 41.0
    roommate.steps([1], batch_size=64, min=16, max=512)
    first, second = machine.wait_for(Hello, 2)
    assert (first.version, first.token, first.pid, first.batch) == (1, "7", os.getpid(), None)
    assert second.batch == protocol.BatchRange(64, 16, 512)


def test_a_batch_change_applies_at_the_next_step(machine: Machine) -> None:
    optimizer = Optimizer()
    it = roommate.steps(endless, batch_size=64, min=16, max=512, optimizer=optimizer)
    sizes = []
    for batch in it:
        sizes.append(len(batch))
        if len(sizes) == 3:
            machine.say(Tune(256, 1000))
        if len(sizes) == 5:
            break
    assert sizes == [64, 64, 64, 256, 256]
    assert it.lr_scale == 4.0
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.4, 0.04])
    assert machine.wait_for(Tuned) == [Tuned(256, 1000)]
    assert it.done == 3 + 4  # the fifth has not ended


@pytest.mark.parametrize(("asked", "got"), [(4, 16), (4096, 512), (0, 64)])
def test_a_size_out_of_range_is_clamped(machine: Machine, asked: int, got: int) -> None:
    machine.welcome = Welcome(1, "test", 0.0, asked, 1000)
    it = roommate.steps(endless, batch_size=64, min=16, max=512)
    assert len(next(iter(it))) == got


@pytest.mark.parametrize(
    ("rule", "expected"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0), ("adascale", 4.0)]
)
def test_learning_rate_rules(machine: Machine, rule: str, expected: float) -> None:
    machine.welcome = Welcome(1, "test", 0.0, 256, 1000)
    it = roommate.steps(endless, batch_size=64, min=16, max=512, lr=rule)
    next(iter(it))
    assert it.lr_scale == pytest.approx(expected)


def test_adascale_follows_the_measured_noise(machine: Machine) -> None:
    machine.welcome = Welcome(1, "test", 0.0, 256, 1000)
    it = roommate.steps(endless, batch_size=64, min=16, max=512, lr="adascale")
    next(iter(it))
    # |G|^2 = 1 and S = 64, so at the job's own batch size noise and signal are equal.
    it.report_gradients([(64, 2.0), (256, 1.25)])
    assert it.noise.value == pytest.approx(64.0)
    assert it.lr_scale == pytest.approx(2.0 / 1.25)


def test_steps_are_reported_with_time_noise_and_stages(machine: Machine) -> None:
    def load(size: int) -> int:
        time.sleep(0.005)
        return size

    it = roommate.steps(load, batch_size=8)
    for n, _ in enumerate(it):
        with it.stage("compute"):
            time.sleep(0.02)
        it.report_gradients([(2, 3.0), (8, 1.5)])
        if n == 2:
            break
    report = machine.wait_for(Stepped, 2)[-1]
    assert report.batch == 8 and report.done == 2.0
    assert 0.025 <= report.step_s < 0.2
    assert report.load_s is not None and 0.005 <= report.load_s <= report.step_s - 0.02
    assert report.noise_scale == pytest.approx(4.0)
    assert report.stages_s is not None and 0.02 <= report.stages_s[2] < 0.2
    assert report.mem_mib is not None and report.mem_mib > 1


def test_a_suspended_job_pauses_and_frees_memory(machine: Machine) -> None:
    held = bytearray(200 << 20)
    before = session.resident_mib()
    assert before is not None
    while_suspended: list[int | None] = []

    @roommate.on_suspend
    def release() -> None:
        nonlocal held
        held = bytearray()

    @roommate.on_resume
    def restore() -> None:
        nonlocal held
        held = bytearray(200 << 20)

    def react(message: Message) -> list[Message]:
        if isinstance(message, Suspended):
            while_suspended.append(session.resident_mib())
            time.sleep(0.1)
            return [Resume()]
        return []

    machine.react = react
    it = roommate.steps(endless, batch_size=1)
    began = 0.0
    for n, _ in enumerate(it):
        if n == 2:
            began = time.perf_counter()
            machine.say(Suspend())
        if n == 3:
            assert time.perf_counter() - began >= 0.1
            break
    assert machine.wait_for(Suspended) == [Suspended(3.0)]
    machine.wait_for(Resumed)
    assert while_suspended[0] is not None and while_suspended[0] < before - 150
    assert len(held) == 200 << 20


def test_stop_saves_a_checkpoint_and_exits_with_status_75(machine: Machine) -> None:
    saved = []
    roommate.on_checkpoint(lambda: saved.append(True))
    it = roommate.steps(endless, batch_size=1)
    with pytest.raises(SystemExit) as left:
        for n, _ in enumerate(it):
            if n == 1:
                machine.say(Stop())
            assert n < 500
    assert left.value.code == session.LEAVES
    assert saved == [True]
    assert machine.wait_for(Checkpointed) == [Checkpointed(it.done)]


def test_a_checkpoint_on_request_does_not_end_the_loop(machine: Machine) -> None:
    saved = []
    roommate.on_checkpoint(lambda: saved.append(True))
    for n, _ in enumerate(roommate.steps(endless, batch_size=1)):
        if n == 1:
            machine.say(Checkpoint())
        if n == 5:
            break
    assert saved == [True]


def test_pace_throttles_the_loop(machine: Machine) -> None:
    def rate(pace: int) -> float:
        machine.say(Tune(0, pace))
        began, count = time.perf_counter(), 0
        for _ in it:
            time.sleep(0.005)
            count += 1
            if time.perf_counter() - began > 0.5:
                break
        return count / (time.perf_counter() - began)

    it = roommate.steps(lambda size: size, batch_size=1)
    ratios = []
    for _ in range(3):
        full, before = rate(1000), longest_pause()
        half, after = rate(500), longest_pause()
        ratios.append(half / full)
        if 0.4 < ratios[-1] < 0.6:
            return
        # A repetition is allowed only on a machine on which plain pauses take too long.
        assert max(before, after) > 0.008, (ratios, before, after)
    pytest.skip(f"other processes keep the machine busy; {ratios} is not conclusive")


def longest_pause() -> float:
    """The longest of fifty pauses of 5 ms."""
    taken = []
    for _ in range(50):
        began = time.perf_counter()
        time.sleep(0.005)
        taken.append(time.perf_counter() - began)
    return max(taken)


def test_pace_zero_waits_until_it_is_raised(machine: Machine) -> None:
    def react(message: Message) -> list[Message]:
        if isinstance(message, Tuned) and message.pace_permille == 0:
            time.sleep(0.15)
            return [Tune(0, 1000)]
        return []

    machine.react = react
    began = 0.0
    for n, _ in enumerate(roommate.steps(endless, batch_size=1)):
        if n == 2:
            began = time.perf_counter()
            machine.say(Tune(0, 0))
        if n == 4:
            assert time.perf_counter() - began >= 0.15
            break


def test_stages_are_entered_with_permission(machine: Machine) -> None:
    machine.welcome = Welcome(1, "test", 0.0, 0, 1000, interleaved=True)
    machine.react = lambda m: [Go(m.stage)] if isinstance(m, Enter) else []
    for n, _ in enumerate(roommate.steps(lambda size: size, batch_size=1, interleave=True)):
        if n == 1:
            break
    stages = [(m.kind, m.stage) for m in machine.heard if isinstance(m, (Enter, Leave))]
    assert stages[:6] == [
        ("enter", "load"),
        ("leave", "load"),
        ("enter", "compute"),
        ("leave", "compute"),
        ("enter", "load"),
        ("leave", "load"),
    ]


def test_the_loop_reconnects_to_a_restarted_daemon(machine: Machine) -> None:
    for n, _ in enumerate(roommate.steps(endless, batch_size=1)):
        if n == 2:
            machine.hang_up()
        if len(machine.all(Hello)) == 2:
            break
        assert n < 2000
    machine.wait_for(Hello, 2)


def test_a_suspended_job_waits_for_a_lost_daemon(machine: Machine) -> None:
    def react(message: Message) -> list[Message]:
        if isinstance(message, Suspended):
            if len(machine.all(Suspended)) == 1:
                machine.welcome = Welcome(1, "test", 0.0, 0, 1000, suspended=True)
                machine.hang_up()
                return []
            return [Resume()]
        return []

    machine.react = react
    for n, _ in enumerate(roommate.steps(endless, batch_size=1)):
        if n == 1:
            machine.say(Suspend())
        if n == 3:
            break
    assert len(machine.wait_for(Suspended, 2)) == 2


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"what?\n", "invalid message from the machine: not JSON"),
        (
            b'{"suspend":{"now":1}}\n',
            "invalid message from the machine: suspend: unknown field 'now'",
        ),
        (protocol.encode(Refused("you are not mine")), "refused: you are not mine"),
    ],
)
def test_an_invalid_message_ends_the_connection(
    machine: Machine, capsys: pytest.CaptureFixture[str], line: bytes, expected: str
) -> None:
    it = roommate.steps(endless, batch_size=4, min=1, max=8)
    for n, _ in enumerate(it):
        if n == 1:
            machine.say(Tune(8, 1000))
        if n == 3:
            machine.say_raw(line)
        if n == 6:
            break
    assert expected in capsys.readouterr().err
    assert not roommate.managed()
    assert it.batch_size == 4


def test_a_forked_child_does_not_use_the_connection(machine: Machine) -> None:
    it = roommate.steps(endless, batch_size=1)
    next(iter(it))
    child = os.fork()
    if child == 0:
        os._exit(0 if not roommate.managed() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_overhead_per_step_is_below_100_us(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "REPORT_EVERY_S", 0.5)

    def microseconds(count: int) -> float:
        it = iter(roommate.steps(lambda size: size, batch_size=1))
        began = time.perf_counter()
        for _ in range(count):
            next(it)
        return (time.perf_counter() - began) / count * 1e6

    # The best of several: other processes may disturb any of them.
    assert min(microseconds(2000) for _ in range(5)) < 100.0
