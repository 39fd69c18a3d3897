from __future__ import annotations

import random

import pytest

from roommate.noise import NoiseScale, split


def measured(
    rng: random.Random, true: list[float], std: float, small: int, big: int
) -> list[tuple[int, float]]:
    """Squared norms over two micro-batches and over both, drawn from known gradient and noise."""
    means = [[rng.gauss(g, std / size**0.5) for g in true] for size in (small, big)]
    whole = [(small * a + big * b) / (small + big) for a, b in zip(*means, strict=True)]
    sizes = (small, big, small + big)
    return [(n, sum(v * v for v in g)) for n, g in zip(sizes, (*means, whole), strict=True)]


def test_the_scale_follows_from_unequal_micro_batches() -> None:
    rng = random.Random(7)
    true, std = [0.3] * 50, 2.0
    expected = 50 * std**2 / sum(g * g for g in true)
    noise = NoiseScale(smoothing=0.995)
    small, big = split(64)
    for _ in range(4000):
        noise.observe(measured(rng, true, std, small, big))
    assert noise.value == pytest.approx(expected, rel=0.15)


def test_equal_micro_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="two different numbers"):
        NoiseScale().observe([(32, 1.0), (32, 1.2)])
    with pytest.raises(ValueError, match="two different numbers"):
        NoiseScale().observe([(32, 1.0)])
    with pytest.raises(ValueError, match="at least one sample"):
        NoiseScale().observe([(0, 1.0), (4, 1.0)])


def test_without_measurements_there_is_no_value() -> None:
    noise = NoiseScale()
    assert noise.value is None
    # A larger batch with a longer gradient: chance, not noise.
    noise.observe([(16, 1.0), (64, 2.0)])
    assert noise.value is None


@pytest.mark.parametrize("size", [3, 4, 5, 16, 64, 1000])
def test_parts_of_a_batch_differ_and_add_up(size: int) -> None:
    small, big = split(size)
    assert 1 <= small < big and small + big == size


def test_two_samples_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="fewer than 3"):
        split(2)


def test_pure_noise_gives_a_large_scale_instead_of_none() -> None:
    noise = NoiseScale()
    # A quarter of the samples, but more than four times the square: the fit of |G|^2 would be
    # negative.
    noise.observe([(16, 4.5), (64, 1.0)])
    assert noise.value is not None and 50 * 64 < noise.value < 150 * 64
