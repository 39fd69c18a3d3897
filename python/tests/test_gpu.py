"""SM partitions with a fake driver; bench/gpu/repartition.py tests them on a real GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from fake_torch import Library

from roommate import gpu


def driver(monkeypatch: pytest.MonkeyPatch, library: Any) -> gpu._Driver:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    return gpu._Driver(0)


def test_a_partition_has_the_requested_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    found = driver(monkeypatch, library)
    assert (found.sms, found.groups, found.rest) == (132, 15, 12)
    assert found.stream(2, 3, False, 0) == 4711
    assert found.stream(13, 2, True, -3) == 4712
    # SMs that are in no group belong to the last partition.
    assert library.described == [[2, 3, 4], [13, 14, 15]]


def test_a_driver_error_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(gpu.Unavailable, match="cuDeviceGet: out of luck"):
        driver(monkeypatch, Library(refuse="cuDeviceGet"))


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(gpu.Unavailable, match="no CUDA driver: libcuda"):
        gpu._Driver(0)


def test_an_old_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old = driver(monkeypatch, Library())
    with pytest.raises(gpu.Unavailable, match=r"CUDA 12\.4"):
        old._call("cuMissing")
