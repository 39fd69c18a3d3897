"""Loops that use a GPU, with a fake PyTorch; bench/gpu has tests on real GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest
from conftest import Machine
from fake_torch import MIB, FakeTorch, Library, Model, Optimizer

import roommate
from roommate import device, gpu, host, session
from roommate.protocol import (
    Message,
    Resume,
    SeatRange,
    Stepped,
    Suspend,
    Suspended,
    Tune,
    Tuned,
    Welcome,
)

pytestmark = pytest.mark.usefixtures("torch")

WHOLE, LEFT, RIGHT = None, SeatRange(0, 40), SeatRange(64, 68)


def places(
    torch: FakeTorch,
    machine: Machine,
    steps: int,
    script: dict[int, Callable[[], None]],
    **given: Any,
) -> list[str]:
    """The partition of each step; the script has the messages to send during a step."""
    it = roommate.steps(lambda size: size, batch_size=8, min=4, max=16, **given)
    seen = []
    for n, _ in enumerate(it):
        if n == steps:
            break
        torch.kernel(0.03)
        seen.append(torch.current.name)
        # So that the messages have arrived at the boundary.
        if n in script:
            script[n]()
            time.sleep(0.02)
    return seen


def test_a_loop_moves_to_the_requested_partition_and_reports_it(
    torch: FakeTorch, machine: Machine, library: Library
) -> None:
    machine.welcome = Welcome(1, "test", 0.0, 0, 1000, seat=LEFT)
    seen = places(
        torch,
        machine,
        6,
        {1: lambda: machine.say(Tune(0, 1000, seat=RIGHT)), 3: lambda: machine.say(Tune(0, 1000))},
    )
    assert seen == ["part-4711"] * 2 + ["part-4712"] * 2 + ["whole"] * 2
    assert library.described == [list(range(5)), list(range(8, 16))]
    assert [m.seat for m in machine.wait_for(Tuned, 3)] == [LEFT, RIGHT, WHOLE]


def test_a_loop_gets_priority_and_loses_it(
    torch: FakeTorch, machine: Machine, library: Library
) -> None:
    machine.welcome = Welcome(1, "test", 0.0, 0, 1000)
    seen = places(
        torch,
        machine,
        7,
        {
            1: lambda: machine.say(Tune(0, 1000, priority=True)),
            3: lambda: machine.say(Tune(0, 1000, seat=LEFT, priority=True)),
            5: lambda: machine.say(Tune(0, 1000)),
        },
    )
    assert seen == ["whole"] * 2 + ["first"] * 2 + ["part-4711"] * 2 + ["whole"]
    assert [m.seat for m in machine.wait_for(Tuned, 3)] == [WHOLE, LEFT, WHOLE]


def test_pending_work_is_finished_before_the_loop_moves(
    torch: FakeTorch, machine: Machine, library: Library
) -> None:
    ends: list[float] = []

    def ask() -> None:
        torch.kernel(0.2)
        ends.append(torch.current.busy_until)
        machine.say(Tune(0, 1000, seat=LEFT))

    it = roommate.steps(lambda size: size, batch_size=8)
    for n, _ in enumerate(it):
        if n == 1:
            ask()
            time.sleep(0.02)
        if n == 2:
            assert time.perf_counter() >= ends[0]
            assert torch.current.name == "part-4711"
            break


@pytest.mark.parametrize("kept", [False, True])
def test_gradients_are_dropped_on_a_move_unless_kept(
    torch: FakeTorch, machine: Machine, library: Library, kept: bool
) -> None:
    model = Model(torch)
    gpu.swap(model, keep_grads=kept)

    def ask() -> None:
        model.weights[0].grad = torch.on_gpu(b"g")
        machine.say(Tune(0, 1000, seat=LEFT))

    assert places(torch, machine, 3, {1: ask})[-1] == "part-4711"
    grad = model.weights[0].grad
    assert (grad is not None and grad.bytes() == b"g") == kept


def test_gradients_are_dropped_when_the_batch_size_changes(
    torch: FakeTorch, machine: Machine, library: Library
) -> None:
    model = Model(torch)
    gpu.swap(model)

    def ask() -> None:
        model.weights[0].grad = torch.on_gpu(b"g")
        machine.say(Tune(16, 1000, seat=LEFT))

    places(torch, machine, 6, {1: lambda: machine.say(Tune(8, 1000, seat=LEFT)), 4: ask})
    assert model.weights[0].grad is None


@pytest.mark.parametrize("rooms", [0, 1])
def test_persistent_tensors_are_packed_at_the_first_move(
    torch: FakeTorch, machine: Machine, library: Library, rooms: int
) -> None:
    model = Model(torch)
    optimizer = Optimizer(model.weights, torch)
    gpu.swap(model, optimizer)
    momenta = [s["momentum"] for s in optimizer.state.values()]
    tensors = [*model.weights, *model.statistics, *momenta]
    seen = []

    def look() -> None:
        seen.append([(id(t.memory), t.bytes()) for t in tensors])

    def ask(seat: SeatRange | None) -> None:
        # Without enough memory, some tensors stay where they are.
        torch.full = rooms
        machine.say(Tune(0, 1000, seat=seat))
        look()

    places(torch, machine, 6, {1: lambda: ask(LEFT), 3: lambda: ask(RIGHT), 5: look})
    before, first, second = seen
    assert [content for _, content in before] == [content for _, content in second]
    assert first == second
    moved = [a[0] != b[0] for a, b in zip(before, first, strict=True)]
    assert any(moved) == (rooms == 0) and (all(moved) or rooms > 0)
    assert model.weights[2].memory is model.weights[0].memory


def test_a_process_without_a_context_moves_once_it_has_one(
    torch: FakeTorch, machine: Machine, library: Library
) -> None:
    torch.initialized = False
    machine.welcome = Welcome(1, "test", 0.0, 0, 1000, seat=LEFT)

    def begin() -> None:
        assert machine.all(Tuned) == []
        torch.initialized = True

    assert places(torch, machine, 3, {0: begin}) == ["whole", "part-4711", "part-4711"]
    assert machine.wait_for(Tuned) == [Tuned(8, 1000, LEFT)]


def test_a_process_that_never_uses_cuda_answers_too(torch: FakeTorch, machine: Machine) -> None:
    torch.initialized = False
    machine.welcome = Welcome(1, "test", 0.0, 0, 1000, seat=LEFT)
    assert places(torch, machine, 3, {}) == ["whole"] * 3
    assert machine.wait_for(Tuned) == [Tuned(8, 1000)]


def test_first_steps_of_a_size_use_the_smallest_part_untimed(
    torch: FakeTorch, machine: Machine, library: Library
) -> None:
    machine.welcome = Welcome(1, "test", 0.0, 0, 1000, seat=RIGHT, plan_sms=24)
    seen = places(
        torch,
        machine,
        13,
        {
            4: lambda: machine.say(Tune(16, 1000, seat=RIGHT)),
            9: lambda: machine.say(Tune(8, 1000, seat=RIGHT)),
        },
    )
    small, seat = "part-4711", "part-4712"
    assert seen == [small] * 2 + [seat] * 3 + [small] * 2 + [seat] * 6
    assert library.described == [[0, 1, 2], list(range(8, 16))]
    # The answer comes after the steps in the smallest partition; a size needs them only once.
    answers = [(m.batch, m.seat) for m in machine.wait_for(Tuned, 3)]
    assert answers == [(8, RIGHT), (16, RIGHT), (8, RIGHT)]
    end = time.monotonic() + 10
    while machine.wait_for(Stepped)[-1].done < 5 + 2 * 5 + 3:
        assert time.monotonic() < end, machine.heard
        time.sleep(0.01)
    reports = machine.wait_for(Stepped)
    assert {m.batch for m in reports} == {8, 16}
    # Steps in the smallest partition count as work, but are not timed.
    assert reports[0].done >= 3.0
    # The first two steps after each move and change of size are not timed either: the queue fills.
    assert sum(m.steps for m in reports) == 13 - 4 - 6


def test_a_partition_that_fails_the_probe_is_not_used(
    torch: FakeTorch, machine: Machine, library: Library, capsys: pytest.CaptureFixture[str]
) -> None:
    it = roommate.steps(lambda size: size, batch_size=8)
    tried = []

    def probe() -> None:
        tried.append(torch.current.name)
        if torch.current.name == "part-4712":
            raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")

    it.probe = probe
    asks = {1: LEFT, 3: RIGHT, 5: LEFT}
    seen = []
    for n, _ in enumerate(it):
        seen.append(torch.current.name)
        if n in asks:
            machine.say(Tune(0, 1000, seat=asks[n]))
            time.sleep(0.02)
        if n == 6:
            break
    assert seen == ["whole"] * 2 + ["part-4711"] * 5
    assert [m.seat for m in machine.wait_for(Tuned, 3)] == [LEFT, LEFT, LEFT]
    assert tried == ["part-4711", "part-4712"]  # a partition is probed only once
    assert "probe failed in 68 SMs from 64 on" in capsys.readouterr().err


def test_a_gpu_that_cannot_be_partitioned_is_reported_once(
    torch: FakeTorch, machine: Machine, library: Library, capsys: pytest.CaptureFixture[str]
) -> None:
    library.refuse = "cuDeviceGetDevResource"
    machine.welcome = Welcome(1, "test", 0.0, 0, 1000, seat=LEFT, plan_sms=24)
    script = {1: lambda: machine.say(Tune(0, 1000, seat=RIGHT))}
    assert places(torch, machine, 4, script) == ["whole"] * 4
    assert [m.seat for m in machine.wait_for(Tuned, 2)] == [None, None]
    assert capsys.readouterr().err.count("cannot be divided") == 1


def test_without_the_daemon_the_loop_uses_the_whole_gpu(
    torch: FakeTorch, machine: Machine, library: Library
) -> None:
    machine.welcome = Welcome(1, "test", 0.0, 0, 1000, seat=LEFT, plan_sms=24)
    assert places(torch, machine, 5, {3: lambda: machine.say_raw(b"what?\n")})[-1] == "whole"


def test_steps_that_fill_the_queue_are_not_timed(torch: FakeTorch, machine: Machine) -> None:
    for n, _ in enumerate(roommate.steps(lambda size: size, batch_size=8)):
        torch.kernel(0.03)
        # The CPU needs half of the GPU's time for a step.
        time.sleep(0.015)
        if n == 14:
            break
    # Of the mean: where the loop wakes late, one step seems long and the next one short.
    assert mean(m.step_s for m in machine.wait_for(Stepped, 6)) > 0.027


@pytest.mark.parametrize(("pace", "low", "high"), [(1000, 0.027, 0.04), (500, 0.029, 0.04)])
def test_step_time_is_the_gpus_time(
    torch: FakeTorch, machine: Machine, pace: int, low: float, high: float
) -> None:
    machine.welcome = Welcome(1, "test", 0.0, 0, pace)
    means = []
    for attempt in range(5):
        for n, _ in enumerate(roommate.steps(lambda size: size, batch_size=8)):
            torch.kernel(0.03)
            if n == 20:
                break
        mine = machine.wait_for(Stepped, 8 * (attempt + 1))[-8:]
        means.append(mean(m.step_s for m in mine))
        if low < means[-1] < high:
            return
    raise AssertionError(f"means of steps {means}")


def test_the_cpu_runs_at_most_one_step_ahead(torch: FakeTorch, machine: Machine) -> None:
    # A loop that wakes late finds an empty queue, so it is tried several times.
    for _ in range(5):
        queued = []
        for n, _ in enumerate(roommate.steps(lambda size: size, batch_size=8)):
            queued.append(torch.current.busy_until - time.perf_counter())
            torch.kernel(0.03)
            if n == 6:
                break
        assert max(queued[3:]) < 0.04
        if min(queued[3:]) > 0.0:
            return
    raise AssertionError(f"the queue was empty: {queued}")


def test_short_steps_are_synchronized_in_groups(
    torch: FakeTorch, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "REPORT_EVERY_S", 0.1)
    seen = []
    # A busy machine wakes the loop late, so it is tried several times.
    for attempt in range(4):
        queued = []
        for n, _ in enumerate(roommate.steps(lambda size: size, batch_size=8)):
            torch.kernel(0.005)
            queued.append(torch.current.busy_until - time.perf_counter())
            if n == 240:
                break
        times = [m.step_s for m in machine.wait_for(Stepped, 4 * (attempt + 1))[-4:]]
        seen.append((max(queued), max(queued[120:]), min(times)))
        # Twenty steps take 0.1 s: at most this group and the previous one are queued. Neither
        # filling the queue nor the position of a report in a group makes steps seem short.
        if seen[-1][0] < 0.22 and seen[-1][1] > 0.08 and min(times) == pytest.approx(0.005, rel=0.1):
            return
    raise AssertionError(f"queued at most, then, shortest step: {seen}")


def test_after_a_move_each_step_is_synchronized_until_timed(
    torch: FakeTorch, machine: Machine, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "REPORT_EVERY_S", 0.1)
    queued = []
    for n, _ in enumerate(roommate.steps(lambda size: size, batch_size=8)):
        confined = torch.current.name != "whole"
        torch.kernel(0.1 if confined else 0.005)
        if confined:
            queued.append(torch.current.busy_until - time.perf_counter())
            if len(queued) == 6:
                break
        if n == 80:
            machine.say(Tune(0, 1000, seat=LEFT))
        assert n < 200
    assert max(queued) < 0.25


def test_the_gpu_is_idle_at_a_checkpoint_and_a_suspension(
    torch: FakeTorch, machine: Machine
) -> None:
    rests = []
    roommate.on_checkpoint(lambda: rests.append(torch.current.busy_until - time.perf_counter()))
    roommate.on_suspend(lambda: rests.append(torch.current.busy_until - time.perf_counter()))
    machine.react = lambda m: [Resume()] if isinstance(m, Suspended) else []
    it = roommate.steps(lambda size: size, batch_size=8)
    for n, _ in enumerate(it):
        torch.kernel(0.03)
        if n == 2:
            it.checkpoint()
        if n == 4:
            machine.say(Suspend())
            time.sleep(0.02)
        if n == 6:
            break
    assert len(rests) == 2 and max(rests) <= 0.0


def test_held_memory_is_reported(torch: FakeTorch, machine: Machine) -> None:
    torch.reserved = 77 * MIB
    places(torch, machine, 4, {})
    assert machine.wait_for(Stepped)[-1].gpu_mib == 77


def test_a_model_is_offloaded_while_its_job_is_suspended(
    torch: FakeTorch, machine: Machine
) -> None:
    model = Model(torch)
    optimizer = Optimizer(model.parameters(), torch)
    model.weights[0].grad = torch.on_gpu(bytes(3 * MIB))
    before = [t.bytes() for t in [*model.weights, *model.statistics]]
    state = [s["momentum"].bytes() for s in optimizer.state.values()]
    held = torch.allocated
    gpu.swap(model, optimizer)
    meanwhile: list[tuple[int, int, list[bytes]]] = []

    def react(message: Message) -> list[Message]:
        if isinstance(message, Suspended):
            out = [t.bytes() for t in [*model.weights, *model.statistics]]
            meanwhile.append((torch.allocated, torch.reserved, out))
            torch.full = 2  # a roommate is slow to leave
            return [Resume()]
        return []

    host_every, host.TRY_EVERY_S = host.TRY_EVERY_S, 0.01
    machine.react = react
    places(torch, machine, 4, {1: lambda: machine.say(Suspend())})
    host.TRY_EVERY_S = host_every
    assert meanwhile == [(0, 0, before)]  # nothing is on the GPU, and all of it can be saved
    assert [t.bytes() for t in [*model.weights, *model.statistics]] == before
    assert [s["momentum"].bytes() for s in optimizer.state.values()] == state
    assert all(t.is_cuda for t in [*model.weights, *model.statistics])
    assert model.weights[2].memory is model.weights[3].memory is model.weights[0].memory
    assert model.weights[3].at == MIB
    assert model.weights[0].grad is None
    assert torch.allocated == held - 3 * MIB  # the gradients
    last = gpu.last_swap()
    assert last is not None and last.way == "in" and last.mib == pytest.approx(held / MIB - 3)
    assert last.seconds > 0.0 and last.held_before_mib == 0


def test_accumulated_gradients_are_kept(torch: FakeTorch) -> None:
    model = Model(torch)
    model.weights[1].grad = torch.on_gpu(b"g" * 100)
    owner = host.Owner(model, None, True)
    owner.leave()
    assert torch.allocated == 0
    owner.come_back()
    assert model.weights[1].grad.bytes() == b"g" * 100 and model.weights[1].grad.is_cuda


def test_swap_does_nothing_without_a_gpu(torch: FakeTorch, machine: Machine) -> None:
    torch.initialized = False
    model = Model(torch)
    gpu.swap(model)
    machine.react = lambda m: [Resume()] if isinstance(m, Suspended) else []
    places(torch, machine, 3, {1: lambda: machine.say(Suspend())})
    assert all(t.is_cuda for t in model.weights)


def test_a_low_limit_offloads_the_optimizer_state(
    torch: FakeTorch, machine: Machine
) -> None:
    model = Model(torch, (20 * MIB, 20 * MIB))
    optimizer = Optimizer(model.parameters()[:2], torch)
    gpu.swap(model, optimizer)
    it = roommate.steps(lambda size: size, batch_size=8)
    limits = {4: 100, 8: 200}
    fractions, states = [], []
    for n, _ in enumerate(it):
        torch.needs(60)  # 20 + 20 for the weights, as much for the state, 60 for activations
        states.append(torch.allocated >> 20)
        optimizer.step()
        fractions.append(torch.fraction)
        if n in limits:
            machine.say(Tune(0, 1000, gpu_mib=limits[n]))
            time.sleep(0.02)
        if n == 12:
            machine.say(Tune(0, 1000))
            time.sleep(0.02)
        if n == 14:
            break
    assert states == [80] * 5 + [40] * 4 + [80] * 6
    assert set(optimizer.state_was_on) == {"cuda"}
    assert fractions[4] == 1.0 and fractions[14] == 1.0
    # 140 in all minus 40 of state, times 1.3; 100 are not enough, and the limit must not fail a
    # step.
    assert fractions[8] == pytest.approx(0.130, abs=0.001)
    assert fractions[12] == pytest.approx(0.2)
    # Every step wrote the state once, on the host or on the GPU.
    assert optimizer.state[0]["momentum"].bytes()[0] == ord("m") + 15
    assert optimizer.before == [] and optimizer.after == []


def test_a_limit_is_deferred_until_a_step_is_measured(torch: FakeTorch, machine: Machine) -> None:
    machine.welcome = Welcome(1, "test", 0.0, 0, 1000, gpu_mib=50)
    fractions = []
    for n, _ in enumerate(roommate.steps(lambda size: size, batch_size=8, min=4, max=16)):
        fractions.append(torch.fraction)
        torch.needs(80 if n < 6 else 20)
        if n == 5:
            machine.say(Tune(4, 1000, gpu_mib=50))
            time.sleep(0.02)
        if n == 12:
            break
    assert fractions[0] == 1.0
    assert fractions[5] == pytest.approx(0.104)
    assert fractions[6] == 1.0  # the new size has not been seen yet
    assert fractions[-1] == pytest.approx(0.05)


def test_without_a_daemon_the_gpu_is_left_alone(
    torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, library: Library
) -> None:
    monkeypatch.delenv("ROOMMATE_SOCKET", raising=False)
    session.forget()
    it = roommate.steps(lambda size: size, batch_size=8)
    began = time.perf_counter()
    for n, _ in enumerate(it):
        torch.kernel(0.1)
        if n == 9:
            break
    assert time.perf_counter() - began < 0.2  # the loop never waited for the GPU
    assert torch.log == []
    session.forget()


def test_the_overhead_per_gpu_step_is_small(
    torch: FakeTorch, machine: Machine, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "REPORT_EVERY_S", 0.5)
    machine.welcome = Welcome(1, "test", 0.0, 0, 1000, seat=LEFT, plan_sms=24)

    def microseconds(count: int) -> float:
        it = iter(roommate.steps(lambda size: size, batch_size=1))
        for _ in range(device.PLAN_STEPS + 1):
            next(it)
        began = time.perf_counter()
        for _ in range(count):
            next(it)
        return (time.perf_counter() - began) / count * 1e6

    assert min(microseconds(2000) for _ in range(5)) < 100.0
