#!/usr/bin/env python3
"""Tests every request of the SDK's protocol on a training loop, with a daemon in the same process.

usage: obeys.py --task resnet50-imagenet [--moves 30]

Prints as JSON lines whether the loop did what was requested, how long it paused, and how much
memory it held. Needs PyTorch; best under MPS. Exit status: 1 if a request was not carried out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "python"), str(HERE.parents[1] / "examples" / "gpu")]

from pauses import pauses  # noqa: E402
from room import Tick, rounded  # noqa: E402
from ticks import Ticks  # noqa: E402

from roommate import protocol  # noqa: E402
from roommate.device import PLAN_STEPS  # noqa: E402
from roommate.protocol import SeatRange, Stepped, Suspended, Tune, Tuned  # noqa: E402

PARTS = [SeatRange(0, 24), SeatRange(24, 64), SeatRange(64, 68), SeatRange(0, 104), None]


class Machine(threading.Thread):
    """Stands in for the daemon: answers a hello, sends messages, and records those it receives."""

    def __init__(self, welcome: protocol.Welcome) -> None:
        super().__init__(daemon=True)
        self.welcome, self.heard = welcome, []
        self.on_suspended: Callable[[], None] = lambda: None
        path = Path(tempfile.mkdtemp()) / "m.sock"
        os.environ["ROOMMATE_SOCKET"], os.environ["ROOMMATE_TOKEN"] = str(path), "0"
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        self._peer: Any = None
        self.start()

    def run(self) -> None:
        self._peer, _ = self._server.accept()
        for line in self._peer.makefile("rb"):
            message = protocol.decode(line, protocol.FROM_TENANT)
            self.heard.append(message)
            if isinstance(message, protocol.Hello):
                self.say(self.welcome)
            if isinstance(message, Suspended):
                self.on_suspended()
                time.sleep(0.5)
                self.say(protocol.Resume())

    def say(self, message: protocol.Message) -> None:
        self._peer.sendall(protocol.encode(message))

    def last(self, kind: type) -> Any:
        return next((m for m in reversed(self.heard) if isinstance(m, kind)), None)

    def wait_for(self, kind: type) -> Any:
        """The last message of this type; waits up to a second for the first."""
        end = time.monotonic() + 1.0
        while self.last(kind) is None and time.monotonic() < end:
            time.sleep(0.01)
        return self.last(kind)

    def count(self, kind: type) -> int:
        return sum(isinstance(m, kind) for m in self.heard)


class Loop:
    """The training loop, one step at a time."""

    def __init__(self, job: Any, batch: int, machine: Machine) -> None:
        import roommate
        from roommate import gpu

        self.job, self.machine = job, machine
        made: dict[int, Any] = {}

        def data(size: int) -> Any:
            if size not in made:
                made[size] = job.make(size)
            return made[size]

        self.steps = roommate.steps(data, batch_size=batch, min=batch // 2, max=2 * batch,
                                    optimizer=job.optimizer)
        gpu.swap(job.model, job.optimizer)
        self._next = iter(self.steps)
        self.batch = batch
        self._ticks = Ticks(sys.modules["torch"])
        self.ticks: list[Tick] = []

    def run(self, count: int) -> list[float]:
        """Seconds of each of the next steps, from boundary to boundary."""
        times = []
        for _ in range(count):
            began = time.perf_counter()
            self.job.step(*next(self._next))
            times.append(time.perf_counter() - began)
            part = self.steps.seat or SeatRange(0, 0)
            self._ticks.note((self.steps.batch_size, part.first, part.sms))
            self.ticks += [Tick(at, *what) for at, what in self._ticks.ended()]
        return times

    def ask(self, limit: int = 100, **how: Any) -> bool:
        """Sends a request and runs steps until it is answered; returns whether it was."""
        tuned = self.machine.count(Tuned)
        how = {"batch": 0, "pace_permille": 1000} | how
        self.machine.say(Tune(**how))
        time.sleep(0.01)
        for _ in range(limit):
            self.run(1)
            if self.machine.count(Tuned) > tuned:
                return True
        return False


def bits(job: Any) -> list[Any]:
    """A copy of all bits of the model and of its optimizer's state."""
    if hasattr(job, "digest"):
        return list(job.digest())
    import torch

    states = [t for s in job.optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    tensors = [*job.model.parameters(), *job.model.buffers(), *states]
    return [t.detach().cpu().clone().reshape(-1).view(torch.uint8) for t in tensors]


def same(before: list[Any], after: list[Any]) -> bool:
    equal = lambda a, b: a == b if isinstance(a, bytes) else bool((a == b).all())
    return len(before) == len(after) and all(equal(a, b) for a,
                                             b in zip(before, after, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", required=True)
    parser.add_argument("--moves", type=int, default=30)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    machine = Machine(protocol.Welcome(1, args.task, 0.0, 0, 1000, seat=PARTS[2], plan_sms=24))
    if args.rehearse:
        import rehearsal_torch

        job = rehearsal_torch.Job()
    else:
        import train

        job = train.Job(train.arguments().parse_args(["--task", args.task, "--optimizer", "adam"]))
    import torch
    import zoo

    loop = Loop(job, zoo.TRAIN[args.task][0], machine)
    good = True

    def say(what: str, obeyed: bool, **found: Any) -> None:
        nonlocal good
        good = good and obeyed
        row = {"task": args.task, "what": what, "obeyed": obeyed}
        print(json.dumps(row | {k: round(v, 4) if isinstance(v, float) else v for k,
                                v in found.items()}), flush=True)

    places = []
    for _ in range(5):
        loop.run(1)
        places.append(loop.steps.seat and (loop.steps.seat.first, loop.steps.seat.sms))
    say("first steps in the smallest part, then in its own",
        places == [(0, 24)] * PLAN_STEPS + [(64, 68)] * (5 - PLAN_STEPS), places=places)
    answer = machine.wait_for(Tuned)
    say("says where it is", answer is not None and answer.seat == PARTS[2])

    torch.cuda.synchronize()
    began = time.perf_counter()
    loop.run(30)
    torch.cuda.synchronize()
    steady = (time.perf_counter() - began) / 30
    loop.run(int(1.2 / steady))
    reported = machine.wait_for(Stepped)
    say("steps as long as the GPU takes", reported is not None
        and abs(reported.step_s / steady - 1) < 0.1,
        step_ms=1e3 * steady, reported_ms=1e3 * reported.step_s if reported else None,
        gpu_mib=reported.gpu_mib if reported else None)

    dice, wrong = random.Random(7), 0
    held = int(torch.cuda.memory_reserved()) >> 20
    for part in PARTS:
        loop.ask(seat=part)
        loop.run(8)
    loop.ticks.clear()
    for _ in range(args.moves):
        part = dice.choice([p for p in PARTS if p != loop.steps.seat])
        wrong += not loop.ask(seat=part) or loop.steps.seat != part
        loop.run(8)
    # Memory is compared in the SM range of the beginning.
    loop.ask(seat=PARTS[2])
    loop.run(3)
    say("moves", wrong == 0, **rounded(pauses(loop.ticks)),
        held_mib=[held, int(torch.cuda.memory_reserved()) >> 20])

    answered = loop.ask(batch=loop.batch // 2, seat=PARTS[2])
    say("another batch size", answered and loop.steps.batch_size == loop.batch // 2
        and loop.steps.seat == PARTS[2])
    loop.ask(seat=None)

    from roommate import gpu

    swaps: list[Any] = []
    free: list[Any] = []
    machine.on_suspended = lambda: (swaps.append(gpu.last_swap()),
                                    free.append(int(torch.cuda.memory_reserved()) >> 20))
    loop.run(2)
    next(loop._next)
    torch.cuda.synchronize()
    before = bits(job)
    machine.say(protocol.Suspend())
    time.sleep(0.05)
    next(loop._next)
    swaps.append(gpu.last_swap())
    after = bits(job)
    say("suspended and back, bit for bit", same(before, after) and machine.count(Suspended) == 1
        and [s.way for s in swaps] == ["out", "in"],
        tensors=len(before), moved_mib=swaps[0].mib, out_s=swaps[0].seconds, in_s=swaps[1].seconds,
        held_before_mib=swaps[0].held_before_mib, held_meanwhile_mib=free[0])
    loop.run(5)
    usual = statistics.median(loop.run(8))

    peak = int(torch.cuda.max_memory_allocated()) >> 20
    where = lambda: {str(t.device).split(":")[0] for s in job.optimizer.state.values() for k,
                     t in s.items() if k != "step"}
    answered = loop.ask(seat=None, gpu_mib=int(0.8 * peak))
    loop.run(max(5, int(1.2 / steady)))
    away, held = where(), int(torch.cuda.memory_reserved()) >> 20
    slower = statistics.median(loop.run(8))
    loop.ask(seat=None)
    loop.run(3)
    say("little memory", answered and away == {"cpu"} and where() == {"cuda"}, peak_mib=peak,
        limit_mib=int(0.8 * peak), held_mib=held,
        step_ms=[round(1e3 * usual, 2), round(1e3 * slower, 2)])

    full = statistics.median(loop.run(20))
    answered = loop.ask(seat=None, pace_permille=500)
    began, count = time.perf_counter(), max(10, int(1.5 / full))
    loop.run(count)
    paced, step_s = (time.perf_counter() - began) / count, machine.last(Stepped).step_s
    # With a pace the loop waits for each step, so steps do not overlap and may take longer.
    say("half the pace", answered and 1.8 < paced / step_s < 2.2, of_a_step=paced / step_s,
        of_full_speed=full / paced)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
