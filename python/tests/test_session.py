"""Connections that are put off, lost, or to a daemon that hangs or has another version."""

from __future__ import annotations

import os
import signal
import socket
import time
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import Machine

import roommate
from roommate import protocol, session
from roommate.protocol import Enter, Go, Hello, Message, Refused, Stepped, Welcome


def endless(size: int) -> list[int]:
    time.sleep(0.001)
    return [0] * size


def test_a_job_that_is_put_off_tries_again_until_it_is_welcome(machine: Machine) -> None:
    good = machine.welcome
    machine.welcome = Refused("too many connections", 0.01)
    it = roommate.steps(endless, batch_size=1)
    assert roommate.managed() and not session.current().connected
    for n, _ in enumerate(it):
        if len(machine.all(Hello)) == 4:
            machine.welcome = good
        if session.current().connected:
            break
        assert n < 5000
    assert len(machine.all(Hello)) >= 5
    assert machine.all(Stepped) == []


def test_a_refusal_may_say_more_than_this_version_knows(machine: Machine) -> None:
    line = b'{"refused":{"reason":"full","later_s":0.01,"versions":[2,3]}}\n'
    assert protocol.decode(line, protocol.FROM_MACHINE) == Refused("full", 0.01)


def test_attempts_that_are_not_welcome_become_rare(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RETRY_MOST_S", 0.3)
    machine.welcome = Refused("too many connections", 0.0)
    times: list[float] = []

    def react(message: Message) -> list[Message]:
        times.append(time.monotonic())
        return []

    machine.react = react
    for _ in roommate.steps(endless, batch_size=1):
        if len(times) == 8:
            break
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps[0] < 0.1
    assert all(0.25 < gap < 0.6 for gap in gaps[-2:]), gaps


def test_no_step_waits_for_a_daemon_that_hangs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = iter(roommate.steps(endless, batch_size=1))
    next(it)
    # It accepts and reads, but does not answer any more.
    machine.welcome = None
    machine.hang_up()
    longest = 0.0
    while len(machine.all(Hello)) < 2:
        began = time.perf_counter()
        next(it)
        longest = max(longest, time.perf_counter() - began)
    for _ in range(100):
        began = time.perf_counter()
        next(it)
        longest = max(longest, time.perf_counter() - began)
    assert longest < 0.5


def test_a_daemon_that_does_not_accept_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "full.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.connect(str(path))
            full = session.Session(str(path), "7")
            began = time.perf_counter()
            full.open(None)
            assert time.perf_counter() - began < 1.0
            assert full.managed and not full.connected


def test_a_stage_is_entered_without_permission_when_none_comes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "GO_WITHIN_S", 0.1)
    machine.welcome = Welcome(1, "test", 0.0, 0, 1000, interleaved=True)
    it = iter(roommate.steps(lambda size: size, batch_size=1, interleave=True))
    began = time.perf_counter()
    next(it)
    assert 0.1 <= time.perf_counter() - began < 1.0
    # The connection is made anew, and then the daemon answers.
    machine.react = lambda m: [Go(m.stage)] if isinstance(m, Enter) else []
    entered = len(machine.all(Enter))
    while len(machine.all(Enter)) == entered:
        next(it)
    assert len(machine.wait_for(Hello, 2)) >= 2


def test_an_older_machine_is_greeted_in_its_version(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "VERSION", 3)
    session.forget()

    def react(message: Message) -> list[Message]:
        if isinstance(message, Hello):
            if message.version > 1:
                return [Refused("the SDK uses another version")]
            return [Welcome(1, "test", 7.0, 0, 1000)]
        return []

    machine.welcome, machine.react = None, react
    assert roommate.start_done() == 7.0
    assert [hello.version for hello in machine.all(Hello)] == [3, 2, 1]


@pytest.mark.parametrize("version", [0, 4])
def test_a_machine_of_an_unknown_version_is_not_used(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: int,
) -> None:
    monkeypatch.setattr(protocol, "VERSION", 3)
    session.forget()
    machine.welcome = Welcome(version, "test", 0.0, 0, 1000)
    roommate.steps(endless, batch_size=1)
    assert f"answers in protocol version {version}" in capsys.readouterr().err
    assert not roommate.managed()
    assert os.getpid() == machine.wait_for(Hello)[0].pid


def test_the_first_process_of_a_container_saves_on_sigterm(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = os.getpid()
    before = signal.getsignal(signal.SIGTERM)
    saved: list[int] = []
    try:
        monkeypatch.setattr(session.os, "getpid", lambda: 1)
        roommate.on_checkpoint(lambda: saved.append(1))
        it = roommate.steps(endless, batch_size=1)
        with pytest.raises(SystemExit) as ended:
            for n, _ in enumerate(it):
                if n == 3:
                    os.kill(first, signal.SIGTERM)
                assert n < 5000
        assert (ended.value.code, saved) == (session.LEAVES, [1])
    finally:
        signal.signal(signal.SIGTERM, before)
