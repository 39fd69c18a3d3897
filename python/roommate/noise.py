"""The gradient noise scale: the variance of per-sample gradients relative to the squared gradient,
which determines up to which size a larger batch is worth its cost (McCandlish et al., 2018).

The squared norm of a mean gradient over ``b`` samples is on average ``|G|^2 + S / b``. Two
different sizes are needed to separate the two terms; equal halves of a batch do not suffice and are
refused.
"""

from __future__ import annotations

from collections.abc import Iterable

LEAST_PART = 0.01
"""Lower bound of ``|G|^2`` relative to the observed squared norm: below it the gradient cannot be
distinguished from noise. It limits the noise scale to about a hundred batches."""


class NoiseScale:
    """Estimates ``S / |G|^2`` from squared gradient norms, smoothed over steps."""

    def __init__(self, smoothing: float = 0.95) -> None:
        if not 0.0 <= smoothing < 1.0:
            raise ValueError("smoothing has to be at least 0 and below 1")
        self._smoothing = smoothing
        self._square = 0.0
        self._noise = 0.0
        self._seen = 0.0
        self._weight = 0.0

    def observe(self, points: Iterable[tuple[int, float]]) -> None:
        """Adds one step: pairs of a number of samples and the squared norm of the mean gradient
        over them. At least two sizes have to differ.
        """
        points = list(points)
        if any(size < 1 for size, _ in points):
            raise ValueError("a gradient needs at least one sample")
        count = len(points)
        mean_x = sum(1.0 / size for size, _ in points) / max(count, 1)
        spread = sum((1.0 / size - mean_x) ** 2 for size, _ in points)
        if count < 2 or spread <= 1e-9 * mean_x * mean_x:
            raise ValueError(
                "the noise scale needs gradients over two different numbers of samples"
            )
        # The line square = |G|^2 + S / size through the points, by least squares.
        mean_y = sum(square for _, square in points) / count
        slope = sum((1.0 / size - mean_x) * (square - mean_y) for size, square in points) / spread
        keep = self._smoothing
        # Both terms of a single step are very noisy, so they are smoothed before the division.
        self._noise = keep * self._noise + (1.0 - keep) * slope
        self._square = keep * self._square + (1.0 - keep) * (mean_y - slope * mean_x)
        self._seen = keep * self._seen + (1.0 - keep) * min(square for _, square in points)
        self._weight = keep * self._weight + (1.0 - keep)

    @property
    def value(self) -> float | None:
        """The noise scale in samples; ``None`` while there is no valid estimate."""
        square = max(self._square, LEAST_PART * self._seen)
        if self._weight == 0.0 or square <= 0.0 or self._noise < 0.0:
            return None
        return self._noise / square


def split(batch_size: int) -> tuple[int, int]:
    """Sizes of two micro-batches that differ: about a quarter and three quarters of the batch."""
    if batch_size < 3:
        raise ValueError("a batch of fewer than 3 samples has no two parts of different size")
    small = max(1, batch_size // 4)
    return small, batch_size - small
