#!/usr/bin/env python3
"""Trains a model on one GPU that it may share.

usage: train.py --task resnet50-imagenet [--batch 64] [--min 16] [--max 256] [--steps 500]
[--loader] [--noise]

Runs under `roommate up --device cuda` and `roommate run`, where it shares the GPU, and on its own.
The data is generated on the GPU; with --loader worker processes prepare pictures on the CPU.
Checkpoints are written to $ROOMMATE_CHECKPOINT.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zoo
from ticks import Ticks

import roommate
from roommate import gpu


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", required=True, choices=list(zoo.TRAIN))
    parser.add_argument("--batch", type=int, help="batch size (default: the task's usual one)")
    parser.add_argument("--min", type=int, help="smallest batch size that the policy may choose")
    parser.add_argument("--max", type=int, help="largest batch size that the policy may choose")
    parser.add_argument("--steps", type=float, default=500,
                        help="work, in steps of its own batch size")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--loader", action="store_true", help="load pictures in worker processes")
    parser.add_argument("--workers", type=int, default=4, help="worker processes of --loader")
    parser.add_argument("--interleave", action="store_true",
                        help="mark the stages of a step; implied by --loader")
    parser.add_argument("--noise", action="store_true", help="report the gradient noise scale")
    parser.add_argument("--stay", action="store_true",
                        help="keep the model on the GPU while suspended")
    parser.add_argument("--save-s", type=float, default=30,
                        help="seconds between checkpoints; 0 = on request only")
    parser.add_argument("--ticks", type=Path,
                        help="write a line per step: end time, batch, first SM, SMs")
    return parser


class Job:
    """A model in training."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        self.torch = torch
        torch.manual_seed(7)
        self.task = args.task
        # Created on the GPU: initialising the weights on the CPU takes seconds.
        with torch.device("cuda"):
            self.model, self.make = zoo.build("train", args.task)
        self.model.cuda().train()
        kinds: dict[str, Callable[[], Any]] = {
            "sgd": lambda: torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9),
            "adam": lambda: torch.optim.Adam(self.model.parameters(), lr=args.lr),
        }
        self.optimizer = kinds[args.optimizer]()
        self.done = 0.0
        folder = os.environ.get("ROOMMATE_CHECKPOINT")
        self.saved = Path(folder) / "model.pt" if folder else None
        if self.saved is not None and self.saved.exists():
            state = torch.load(self.saved, map_location="cuda", weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.done = state["done"]
            print(f"resumes after {self.done:.0f} steps", flush=True)

    def save(self, done: float) -> None:
        if self.saved is None:
            return
        self.saved.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                 "done": done}
        self.torch.save(state, self.saved.with_suffix(".new"))
        self.saved.with_suffix(".new").rename(self.saved)

    def gradient(self, x: Any, y: Any, weight: float = 1.0) -> Any:
        with self.torch.autocast("cuda", self.torch.bfloat16):
            loss = zoo.loss(self.task, self.model(x), y)
        (loss * weight if weight != 1.0 else loss).backward()
        return loss.detach()

    def step(self, x: Any, y: Any) -> Any:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.gradient(x, y)
        self.optimizer.step()
        return loss

    def noisy_step(self, x: Any, y: Any) -> tuple[Any, list[tuple[int, float]]]:
        """A step in two micro-batches of different size, and the squared norms of the gradients
        over the first and over both.
        """
        small, large = roommate.noise.split(len(x))
        part = small / (small + large)
        self.optimizer.zero_grad(set_to_none=True)
        self.gradient(x[:small], y[:small], part)
        first = self.square() / part**2
        loss = self.gradient(x[small:], y[small:], 1.0 - part)
        both = self.square()
        self.optimizer.step()
        return loss, [(small, first), (small + large, both)]

    def square(self) -> float:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(sum(g.float().square().sum() for g in grads))


class Photos:
    """Pictures with CPU-heavy preprocessing: crop, resize, flip, normalise."""

    def __init__(self, side: int, classes: int) -> None:
        self.side, self.classes = side, classes

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import torch
        from torch.nn import functional

        dice = torch.Generator().manual_seed(index)
        number = lambda low, high: int(torch.randint(low, high, (1,), generator=dice))
        side = self.side * 5 // 4
        photo = torch.randint(0, 256, (3, side, side), dtype=torch.uint8, generator=dice).float()
        size = number(self.side // 2, side)
        top, left = number(0, side - size + 1), number(0, side - size + 1)
        crop = photo[None, :, top : top + size, left : left + size]
        picture = functional.interpolate(crop, (self.side, self.side), mode="bilinear",
                                         antialias=True)[0]
        if number(0, 2):
            picture = picture.flip(-1)
        return (picture - 127.5) / 64, index % self.classes


def loader(args: argparse.Namespace, batch: int) -> Any:
    import torch
    from torch.utils.data import DataLoader

    if args.task not in zoo.PICTURES:
        raise SystemExit(f"--loader: {args.task} does not look at pictures")
    return DataLoader(
        Photos(*zoo.PICTURES[args.task]), batch_size=batch, drop_last=True,
        num_workers=args.workers, pin_memory=True,
        # One thread per worker, or workers would compete for cores.
        worker_init_fn=lambda _: torch.set_num_threads(1),
    )


def synthetic(job: Job) -> Callable[[int], tuple[Any, Any]]:
    """Yields one batch, generated again when the size changes."""
    made: dict[int, tuple[Any, Any]] = {}

    def batch(size: int) -> tuple[Any, Any]:
        if size not in made:
            made.clear()
            made[size] = job.make(size)
        return made[size]

    return batch


def since_start_s() -> float:
    """Seconds since this process was started."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - began


def epochs(steps: Any) -> Iterator[Any]:
    while True:
        yield from steps


def train(args: argparse.Namespace, during: Callable[[float], None] = lambda done: None) -> None:
    """Trains; ``during`` is called in each step with the steps done so far."""
    job = Job(args)
    batch = args.batch or zoo.TRAIN[args.task][0]
    data = loader(args, batch) if args.loader else synthetic(job)
    steps = roommate.steps(
        data, batch_size=batch, min=args.min, max=args.max, lr="sqrt", optimizer=job.optimizer,
        done=job.done,
        interleave=args.loader or args.interleave,
    )
    if not args.stay:
        gpu.swap(job.model, job.optimizer)
        roommate.on_suspend(lambda: print(gpu.last_swap(), flush=True))
        roommate.on_resume(lambda: print(gpu.last_swap(), flush=True))
    roommate.on_checkpoint(lambda: job.save(steps.done))
    noted = (Ticks(job.torch), args.ticks.open("a", buffering=1)) if args.ticks else None
    print(f"first step {since_start_s():.1f} s after the start", flush=True)
    began, count, saved, size, at_size = time.monotonic(), 0, time.monotonic(), 0, 0
    loss: Any = None
    for x, y in epochs(steps):
        if steps.done >= args.steps:
            break
        if args.save_s and time.monotonic() - saved > args.save_s:
            steps.checkpoint()
            saved = time.monotonic()
        if args.loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        at_size = at_size + 1 if len(x) == size else 0
        size = len(x)
        # Also early at each size: micro-batches have sizes of their own, for which kernels are
        # chosen.
        if args.noise and at_size % 10 == 1 and size >= 8:
            loss, points = job.noisy_step(x, y)
            steps.report_gradients(points)
        else:
            loss = job.step(x, y)
        during(steps.done)
        count += 1
        if noted is not None:
            part, (ticks, file) = steps.seat, noted
            ticks.note(f"{size} {part.first if part else 0} {part.sms if part else 0}")
            file.writelines(f"{at:.6f} {what}\n" for at, what in ticks.ended())
    value = float(loss) if loss is not None else float("nan")
    seconds = time.monotonic() - began
    rate = count / seconds
    print(
        f"{steps.done:.0f} steps, loss {value:.3f}, {rate:.2f} steps/s in this process", flush=True
    )


if __name__ == "__main__":
    train(arguments().parse_args())
