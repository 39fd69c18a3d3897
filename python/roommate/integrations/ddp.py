"""Loops of one's own in jobs of several processes (``DistributedDataParallel``).

    batches = ddp.steps(loader, optimizer=optimizer, min=16, max=256, save=save)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in batches:
            train(x, y)

Every process runs the same lines after ``init_process_group``; rank 0 talks to the daemon for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed

from ..session import LATER, Stopped
from ..steps import Rule
from .loop import Loop, Rates, Sizes, samples_in


class Batches:
    """The batches of a loader, an epoch each time, with the daemon's requests between two steps."""

    def __init__(self, loader: Any, loop: Loop) -> None:
        self._loader, self._loop = loader, loop

    @property
    def done(self) -> float:
        """Work done in all attempts, in steps of the user's batch size."""
        return self._loop.done

    @property
    def batch_size(self) -> int:
        """The present batch size of each process."""
        return self._loop.batch_size

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._loop.begin_step()
            yield batch
            try:
                self._loop.end_step(samples_in(batch) or self._loop.batch_size)
            except Stopped:
                # Its threads would abort a process that ends without this.
                torch.distributed.destroy_process_group()
                raise
        self._loop.report()


def steps(
    loader: Any,
    *,
    optimizer: Any = None,
    min: int | None = None,
    max: int | None = None,
    lr: str | Rule = "linear",
    done: float | None = None,
    save: Callable[[], object] | None = None,
) -> Batches:
    """The batches of a ``DataLoader`` in each process of a job.

    ``min`` and ``max`` are batch sizes of each process, ``lr`` and ``done`` are as in
    ``roommate.steps``. ``save`` saves a checkpoint; it is called in every process.
    """
    optimizers = [] if optimizer is None else [optimizer]
    rates, hook = Rates(optimizers, []), save or (lambda: LATER)
    loop = Loop(Sizes([loader]), rates, min=min, max=max, lr=lr, done=done, save=hook)
    return Batches(loader, loop)
