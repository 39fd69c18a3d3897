"""The training loop: steps between which batch size, pace and GPU partition may change."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from . import protocol, session
from .noise import NoiseScale
from .source import Source, source_of

T = TypeVar("T")

Rule = Callable[[float, float], float]
"""A rule for the learning rate: its factor for a batch ``times`` as large, at a noise scale given
in batches of the job's own size."""

MOST_OWED_S = 0.1
"""Longest overrun of a pause, in seconds, that shortens later pauses."""

RULES: dict[str, Rule] = {
    "none": lambda times, noise: 1.0,
    "linear": lambda times, noise: times,
    "sqrt": lambda times, noise: math.sqrt(times),
    # AdaScale: the number of steps of the smaller batch that one step of the larger batch is worth.
    "adascale": lambda times, noise: (noise + 1.0) / (noise / times + 1.0),
}


class Steps(Generic[T]):
    """An iterator over batches that handles the daemon's requests between two of them."""

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        min: int | None,
        max: int | None,
        lr: str | Rule,
        optimizer: Any,
        done: float | None,
        interleave: bool,
    ) -> None:
        low, high = (batch_size if v is None else v for v in (min, max))
        if not 1 <= low <= batch_size <= high:
            sizes = f"{low}, {batch_size}, {high}"
            raise ValueError(f"need 1 <= min <= batch_size <= max, found {sizes}")
        if isinstance(lr, str) and lr not in RULES:
            raise ValueError(f"no learning-rate rule {lr!r}: there are {', '.join(RULES)}")
        self._source = source
        self._own = batch_size
        self._rule = RULES[lr] if isinstance(lr, str) else lr
        self._optimizer = optimizer
        self._interleave = interleave
        self._session = session.current()
        self._device = self._session.device
        self._range: protocol.BatchRange | None = None
        if source.resizable and low < high:
            self._range = protocol.BatchRange(batch_size, low, high)
        self._session.open(self._range)
        if done is not None:
            self._session.done = done
        self.batch_size = batch_size
        """Size of the present batch."""
        self.lr_scale = 1.0
        """Factor on the learning rate of the job's own batch size."""
        self.noise = NoiseScale()
        self._given = batch_size
        self._at: float | None = None
        self._loading_s = 0.0
        self._steps = 0
        self._timed = 0
        self._usual = True
        self._busy_s = 0.0
        self._load_s = 0.0
        self._stages_s = [0.0, 0.0, 0.0, 0.0]
        self._step_stages_s = [0.0, 0.0, 0.0, 0.0]
        self._marked = False
        self._whole = interleave
        self._reported = time.perf_counter()
        self._held_at = 1000
        self._owed_s = 0.0

    @property
    def done(self) -> float:
        """Work done in all attempts, in steps of the job's own batch size."""
        return self._session.done

    @property
    def seat(self) -> protocol.SeatRange | None:
        """The partition of the GPU in which the loop runs; None = the whole GPU."""
        return self._device.place

    @property
    def probe(self) -> Callable[[], object] | None:
        """A function that runs a step and discards its result, e.g. forward and backward on a spare
        batch. If set, it tests a GPU partition before use: if it raises a ``RuntimeError`` there,
        the loop stays in its previous partition and reports that to the daemon.
        """
        return self._device.probe

    @probe.setter
    def probe(self, run: Callable[[], object] | None) -> None:
        self._device.probe = run

    def __iter__(self) -> Iterator[T]:
        self._source.begin()
        return self

    def __next__(self) -> T:
        session, device = self._session, self._device
        session.loop = self
        if self._at is not None:
            self._end_step()
        session.boundary()
        self._follow_size()
        if device.memory_due:
            device.keep_memory()
        began = time.perf_counter()
        if self._interleave:
            session.enter("load")
            began = time.perf_counter()
        try:
            batch, self._given = self._source.next(self.batch_size)
        except StopIteration:
            self._at = None
            self._report()
            raise
        finally:
            if self._interleave:
                session.leave("load")
        self._loading_s = time.perf_counter() - began
        self._usual = device.prepare(self._given)
        if self._interleave:
            session.enter("compute")
        self._at = time.perf_counter()
        return batch  # type: ignore[no-any-return]

    def retune(self, still: bool) -> bool:
        """Called by the session: applies the daemon's request and returns whether it is applied."""
        # Steps measured so far must be reported with the settings they ran under.
        self._report()
        self._follow_size()
        return self._device.settle(self.batch_size, still, self._steps > 0)

    def _follow_size(self) -> None:
        size = self._session.batch or self._own
        if size != self.batch_size and self._range is not None:
            self._resize(size)

    def report_gradients(self, points: Iterable[tuple[int, float]]) -> None:
        """Adds squared norms of mean gradients over different numbers of samples of one step; see
        ``roommate.noise``. Two micro-batches and the whole batch make three points.
        """
        self.noise.observe(points)
        if self.batch_size != self._own:
            self._set_lr()

    def checkpoint(self) -> None:
        """Saves a checkpoint now, through the hooks of ``roommate.on_checkpoint``, and reports it
        to the daemon.
        """
        self._session.checkpoint()

    def stage(self, name: str) -> Stage:
        """Marks a stage of the step: ``with steps.stage("compute"):``."""
        if name not in protocol.STAGES:
            raise ValueError(f"no stage {name!r}: there are {', '.join(protocol.STAGES)}")
        return Stage(self, name)

    def _end_step(self) -> None:
        # A stage ends when the GPU has finished it, and a pause begins when the GPU is idle.
        whole = self._whole or self._session.pace_permille < 1000
        usual = self._device.mark(whole) and self._usual
        now = time.perf_counter()
        if self._interleave:
            self._session.leave("compute")
        assert self._at is not None
        compute_s = now - self._at
        busy_s = self._loading_s + compute_s
        self._at = None
        self._steps += 1
        self._session.done += self._given / self._own
        if self._interleave:
            self._add_stage("load", self._loading_s)
            self._add_stage("compute", compute_s)
        if usual:
            self._timed += 1
            self._busy_s += busy_s
            self._load_s += self._loading_s
        if self._marked:
            if usual:
                both = zip(self._stages_s, self._step_stages_s, strict=True)
                self._stages_s = [a + b for a, b in both]
            self._step_stages_s = [0.0, 0.0, 0.0, 0.0]
        if self._device.looked and now - self._reported >= session.REPORT_EVERY_S:
            self._report()
        if self._session.pace_permille < 1000:
            self._hold_back(busy_s)

    def _hold_back(self, busy_s: float) -> None:
        """Pauses as long as the pace requires; a pause that was too long shortens the next one."""
        pace = self._session.pace_permille
        if pace != self._held_at:
            self._held_at, self._owed_s = pace, 0.0
        self._owed_s += busy_s * (1000 / pace - 1) if pace > 0 else 0.0
        began = time.monotonic()
        self._session.pause(self._owed_s)
        self._owed_s = max(self._owed_s - (time.monotonic() - began), -MOST_OWED_S)

    def _report(self) -> None:
        self._reported = time.perf_counter()
        timed, busy_s, load_s, stages_s = self._timed, self._busy_s, self._load_s, self._stages_s
        self._timed, self._busy_s, self._load_s, self._stages_s = 0, 0.0, 0.0, [0.0, 0.0, 0.0, 0.0]
        # Steps without a valid time are counted in ``done`` of the next report.
        if timed == 0 or not self._session.connected:
            return
        self._device.stepped(busy_s / timed)
        message = protocol.Stepped(
            steps=timed,
            done=self._session.done,
            step_s=busy_s / timed,
            batch=self.batch_size,
            load_s=load_s / timed,
            noise_scale=self.noise.value,
            mem_mib=session.resident_mib(),
            gpu_mib=self._device.held_mib(),
            stages_s=[s / timed for s in stages_s] if self._marked else None,
        )
        self._session.send(message)

    def _add_stage(self, name: str, seconds: float) -> None:
        self._marked = True
        self._step_stages_s[protocol.STAGES.index(name)] += seconds

    def _resize(self, size: int) -> None:
        self._report()
        self._device.drain()
        self._device.resized()
        self.batch_size = size
        self._set_lr()

    def _set_lr(self) -> None:
        noise = self.noise.value
        in_batches = noise / self._own if noise is not None else math.inf
        times = self.batch_size / self._own
        # Without a measured noise scale the goodput is assumed proportional to the batch size.
        known = self._rule(times, in_batches) if math.isfinite(in_batches) else math.nan
        scale = known if math.isfinite(known) else self._rule(times, 1e12)
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] *= scale / self.lr_scale
        self.lr_scale = scale


class Stage:
    """A stage of a step; entered one job at a time where jobs interleave."""

    def __init__(self, steps: Steps[Any], name: str) -> None:
        self._steps = steps
        self._name = name
        self._began = 0.0

    def __enter__(self) -> None:
        self._steps._session.enter(self._name)
        self._began = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._name == "compute" and self._steps._device.on:
            # The stage ends when the GPU has finished it; from now on every step is synchronized.
            self._steps._whole = True
            self._steps._device.drain()
        self._steps._add_stage(self._name, time.perf_counter() - self._began)
        self._steps._session.leave(self._name)


def steps(
    loader: Callable[[int], T] | Iterable[T],
    *,
    batch_size: int,
    min: int | None = None,
    max: int | None = None,
    lr: str | Rule = "linear",
    optimizer: Any = None,
    done: float | None = None,
    interleave: bool = False,
) -> Steps[Any]:
    """Iterates over batches of a loader (see ``roommate.source``) and lets the daemon change their
    size between ``min`` and ``max``.

    ``lr`` is the rule by which the learning rate follows the batch size: ``none``, ``linear``,
    ``sqrt``, ``adascale`` or a function; it is applied to a PyTorch ``optimizer`` if one is given
    and is available in ``lr_scale`` otherwise. ``done`` is the work in a restored checkpoint. With
    ``interleave`` the loader counts as the stage ``load`` and the body of the loop as ``compute``.
    """
    return Steps(
        source_of(loader),
        batch_size=batch_size,
        min=min,
        max=max,
        lr=lr,
        optimizer=optimizer,
        done=done,
        interleave=interleave,
    )
