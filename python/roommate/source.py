"""Where batches come from, and how their size changes while a loop runs.

==========================  ====================================================================
given                       a batch is
==========================  ====================================================================
a callable                  what it returns when called with a size; ``None`` ends the loop
a PyTorch ``DataLoader``    what it collates; it is rebuilt around a sampler whose size changes
a sequence of samples       a slice of it
any other iterable          what it yields; its size cannot be changed
==========================  ====================================================================
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol


class Source(Protocol):
    """A source of batches."""

    resizable: bool

    def begin(self) -> None:
        """Starts from the beginning."""

    def next(self, size: int) -> tuple[Any, int]:
        """The next batch, of this size if possible, and the size that it has."""


def source_of(loader: object) -> Source:
    """The source for the user's loader."""
    if _is_torch_loader(loader):
        return _Torch(loader)
    if hasattr(loader, "__len__") and hasattr(loader, "__getitem__"):
        return _Slices(loader)  # type: ignore[arg-type]
    if callable(loader):
        return _Called(loader)
    if isinstance(loader, Iterable):
        return _Fixed(loader)
    raise TypeError(
        f"cannot take batches from {type(loader).__name__}: "
        "give a function of a size, a DataLoader, a sequence of samples or an iterable of batches"
    )


class _Called:
    resizable = True

    def __init__(self, loader: Callable[[int], Any]) -> None:
        self._loader = loader

    def begin(self) -> None:
        pass

    def next(self, size: int) -> tuple[Any, int]:
        batch = self._loader(size)
        if batch is None:
            raise StopIteration
        return batch, size


class _Slices:
    resizable = True

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples
        self._at = 0

    def begin(self) -> None:
        self._at = 0

    def next(self, size: int) -> tuple[Any, int]:
        end = min(self._at + size, len(self._samples))
        if self._at >= end:
            raise StopIteration
        batch, count = self._samples[self._at : end], end - self._at
        self._at = end
        return batch, count


class _Fixed:
    resizable = False

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self._left: Iterator[Any] = iter(())

    def begin(self) -> None:
        self._left = iter(self._batches)

    def next(self, size: int) -> tuple[Any, int]:
        return next(self._left), size


class _LiveBatches:
    """A batch sampler whose size may change between two batches."""

    def __init__(self, samples: Iterable[int], drop_last: bool) -> None:
        self._samples = samples
        self._drop_last = drop_last
        self.size = 1
        # Workers prefetch, so sizes are queued until their batch arrives.
        self.sizes: deque[int] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.sizes.clear()
        part: list[int] = []
        for sample in self._samples:
            part.append(sample)
            if len(part) >= self.size:
                self.sizes.append(len(part))
                yield part
                part = []
        if part and not self._drop_last:
            self.sizes.append(len(part))
            yield part


_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


class _Torch:
    """With worker processes a change of size takes effect after the prefetched batches."""

    resizable = True

    def __init__(self, loader: Any) -> None:
        self._live = _LiveBatches(loader.sampler, bool(loader.drop_last))
        kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
        self._loader = type(loader)(loader.dataset, batch_sampler=self._live, **kept)
        self._left: Iterator[Any] = iter(())
        self._begun = False

    def begin(self) -> None:
        self._begun = False

    def next(self, size: int) -> tuple[Any, int]:
        self._live.size = size
        if not self._begun:
            self._left = iter(self._loader)
            self._begun = True
        batch = next(self._left)
        return batch, self._live.sizes.popleft()


def _is_torch_loader(loader: object) -> bool:
    data = sys.modules.get("torch.utils.data")
    kind = getattr(data, "DataLoader", None)
    if kind is None or not isinstance(loader, kind):
        return False
    # A loader with the user's own batch sampler, or over a stream, determines its own batch sizes.
    return getattr(loader, "batch_size", None) is not None and hasattr(
        getattr(loader, "dataset", None), "__getitem__"
    )
