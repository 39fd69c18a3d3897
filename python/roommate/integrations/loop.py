"""A training loop that a framework owns: steps are announced instead of iterated over.

In a job of several processes (DDP), rank 0 alone talks to the daemon. After every step it tells the
others what to do, over a group of its own whose timeout outlasts a suspension::

    rank 0   end of step ── the daemon's requests ── orders ──→ next step
    others   end of step ── wait for orders ────────────────→ next step
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from .. import session
from ..session import Stopped
from ..steps import Rule, Steps

GO, SAVE, STOP, RELEASE = range(4)
"""Orders of rank 0: take the next step, save a checkpoint, stop, free memory."""

LONGEST_SUSPENSION = timedelta(days=3650)


class Sizes:
    """Changes the batch size of loaders of PyTorch where they draw their batches."""

    def __init__(self, loaders: list[Any]) -> None:
        chains = [_chain(getattr(loader, "batch_sampler", None)) for loader in loaders]
        self._samplers = [sampler for chain in chains for sampler in chain]
        self.resizable = bool(chains) and all(chains)

    @property
    def own(self) -> int:
        """The batch size that the user chose."""
        return int(self._samplers[-1].batch_size) if self.resizable else 1

    def set(self, size: int) -> None:
        """Batches have this size from the next one on that is drawn."""
        for sampler in self._samplers if self.resizable else []:
            sampler.batch_size = size

    def begin(self) -> None:
        """As a source of batches: the framework begins by itself."""

    def next(self, size: int) -> tuple[None, int]:
        """As a source of batches: the framework draws them."""
        return None, size


def _chain(sampler: Any) -> list[Any]:
    """A batch sampler and those that it wraps (accelerate's, for several processes), outermost
    first; empty if the innermost has no batch size.
    """
    found = []
    while sampler is not None:
        found.append(sampler)
        sampler = getattr(sampler, "batch_sampler", None)
    sized = [s for s in found if getattr(s, "batch_size", None) is not None]
    return sized if found and found[-1] in sized else []


class Rates:
    """The learning rates of an optimizer and of its schedulers, which would set them back."""

    def __init__(self, optimizers: list[Any], schedulers: list[Any]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        bases = [s.base_lrs for s in schedulers if hasattr(s, "base_lrs")]
        self.param_groups = [*groups, *(_Base(b, i) for b in bases for i in range(len(b)))]


class _Base:
    """One base rate of a scheduler, as a group of parameters."""

    def __init__(self, rates: list[float], index: int) -> None:
        self._rates, self._index = rates, index

    def __getitem__(self, key: str) -> float:
        return self._rates[self._index]

    def __setitem__(self, key: str, value: float) -> None:
        self._rates[self._index] = value


class Loop:
    """Announces the steps of a framework's loop to the daemon, and obeys it between them."""

    def __init__(
        self,
        sizes: Sizes,
        rates: Rates,
        *,
        min: int | None,
        max: int | None,
        lr: str | Rule,
        done: float | None,
        save: Callable[[], object],
    ) -> None:
        self._sizes, self._save = sizes, save
        self._group = _control_group()
        self._leads = self._group is None or _rank() == 0
        if not self._leads:
            session.follow()
        own = sizes.own
        if not sizes.resizable:
            min = max = own
        self._steps = _Announced(
            sizes,
            batch_size=own,
            min=min,
            max=max,
            lr=lr,
            optimizer=rates,
            done=done,
            interleave=False,
        )
        self._session = session.current()
        if self._leads:
            self._session.on_checkpoint.append(self._checkpoint)
            self._session.on_suspend.append(self._release)
        atexit.register(self.close)
        self._boundary()

    @property
    def done(self) -> float:
        """Work done in all attempts, in steps of the user's batch size."""
        return self._session.done

    @property
    def batch_size(self) -> int:
        """The present batch size of each process."""
        return self._steps.batch_size

    def begin_step(self) -> None:
        """The framework has a batch and is about to train on it."""
        self._steps.announce()

    def end_step(self, samples: int) -> None:
        """A step with so many samples per process is over. Raises ``Stopped`` if the job shall end;
        a checkpoint was saved before.
        """
        self._steps.conclude(samples)
        self._boundary()

    def saved(self) -> None:
        """Reports a checkpoint that was saved later than it was asked for."""
        if self._leads:
            self._session.saved()

    def report(self) -> None:
        """Reports the steps of which the daemon does not know yet."""
        self._steps.report()

    def close(self) -> None:
        """The loop is over: no hook of it is called any more. Without effect the second time."""
        self.report()
        for hooks, own in [
            (self._session.on_checkpoint, self._checkpoint),
            (self._session.on_suspend, self._release),
        ]:
            if own in hooks:
                hooks.remove(own)
        if self._group is not None and _distributed().is_initialized():
            _distributed().destroy_process_group(self._group)
        # Its threads would abort a process that ends with them.
        self._group = None

    def _boundary(self) -> None:
        if self._leads:
            try:
                self._steps.boundary()
            except Stopped:
                self._order(STOP)
                raise
            self._order(GO)
        else:
            self._obey()
        self._sizes.set(self._steps.batch_size)

    def _release(self) -> None:
        self._order(RELEASE)

    def _checkpoint(self) -> object:
        self._order(SAVE)
        return self._save()

    def _order(self, order: int) -> None:
        if self._group is not None:
            _broadcast(self._group, order, self._session.batch)

    def _obey(self) -> None:
        while True:
            order, batch = _broadcast(self._group, 0, 0)
            if order == SAVE:
                self._save()
            elif order == RELEASE:
                session.release_memory()
            elif order == STOP:
                raise Stopped
            else:
                self._session.batch = batch
                self._steps.boundary()
                return


class _Announced(Steps[None]):
    """The same accounts as of a loop over batches, with the framework's loop around them."""

    _over: float | None = None

    def announce(self) -> None:
        now = time.perf_counter()
        self._loading_s = 0.0 if self._over is None else now - self._over
        self._usual = self._device.prepare(self.batch_size)
        self._at = time.perf_counter()

    def conclude(self, samples: int) -> None:
        if self._at is None:
            return
        self._given = samples
        self._end_step()

    def boundary(self) -> None:
        self._session.loop = self
        self._session.boundary()
        self._follow_size()
        if self._device.memory_due:
            self._device.keep_memory()
        self._over = time.perf_counter()

    def report(self) -> None:
        self._at = None
        self._report()


def samples_in(batch: Any) -> int | None:
    """The size of dimension 0 of the first tensor in a batch; None if there is no tensor."""
    shape = getattr(batch, "shape", None)
    if shape is not None and len(shape) > 0:
        return int(shape[0])
    parts: Any = batch.values() if hasattr(batch, "values") else batch
    if isinstance(parts, (str, bytes)) or not hasattr(parts, "__iter__"):
        return None
    return next((n for part in parts if (n := samples_in(part)) is not None), None)


def _distributed() -> Any:
    import torch.distributed as distributed

    return distributed


def _rank() -> int:
    return int(_distributed().get_rank())


def _control_group() -> Any:
    """A group of all processes; None in a job of one process."""
    distributed = _distributed()
    usable = distributed.is_available() and distributed.is_initialized()
    if not usable or distributed.get_world_size() == 1:
        return None
    return distributed.new_group(backend="gloo", timeout=LONGEST_SUSPENSION)


def _broadcast(group: Any, order: int, batch: int) -> tuple[int, int]:
    import torch

    words = torch.tensor([order, batch], dtype=torch.int64)
    _distributed().broadcast(words, src=0, group=group)
    return int(words[0]), int(words[1])
