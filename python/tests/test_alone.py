"""Without a daemon a loop runs unchanged."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

import roommate

pytestmark = pytest.mark.usefixtures("alone")


def test_a_sequence_is_sliced_and_starts_again_each_epoch() -> None:
    it = roommate.steps([1, 2, 3, 4, 5], batch_size=2)
    assert list(it) == [[1, 2], [3, 4], [5]]
    assert list(it) == [[1, 2], [3, 4], [5]]
    assert it.done == 5.0  # five steps' worth of two samples, the short ones counted as half


def test_a_function_is_called_with_the_size_until_none() -> None:
    left = [8, 8]
    it = roommate.steps(lambda size: left.pop() * size if left else None, batch_size=4)
    assert list(it) == [32, 32]


def test_an_iterable_of_batches_is_passed_through() -> None:
    assert list(roommate.steps(iter("ab"), batch_size=4, min=1, max=8)) == ["a", "b"]


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="cannot take batches from int"):
        roommate.steps(3, batch_size=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="need 1 <= min <= batch_size <= max"):
        roommate.steps([1], batch_size=4, min=8)
    with pytest.raises(ValueError, match="no learning-rate rule 'cubic'"):
        roommate.steps([1], batch_size=4, lr="cubic")
    with pytest.raises(ValueError, match="no stage 'lunch'"):
        roommate.steps([1], batch_size=4).stage("lunch")


def test_without_a_daemon_a_step_never_waits() -> None:
    assert not roommate.managed()
    assert roommate.start_done() == 0.0
    it = roommate.steps([1, 2], batch_size=1, interleave=True)
    for _ in it:
        with it.stage("preprocess"):
            pass


class FakeLoader:
    """A fake of PyTorch's DataLoader."""

    def __init__(
        self,
        dataset: list[int],
        batch_size: int | None = None,
        batch_sampler: Any = None,
        collate_fn: Any = list,
        num_workers: int = 0,
    ) -> None:
        self.dataset, self.batch_size, self.collate_fn = dataset, batch_size, collate_fn
        self.num_workers, self.drop_last = num_workers, False
        self.sampler = range(len(dataset))
        self.batch_sampler = batch_sampler

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        for indices in self.batch_sampler:
            yield self.collate_fn([self.dataset[i] for i in indices])


def test_a_torch_loader_keeps_its_settings_and_changes_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = types.ModuleType("torch.utils.data")
    data.DataLoader = FakeLoader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.data", data)
    loader = FakeLoader(list(range(10)), batch_size=2, collate_fn=tuple)
    it = roommate.steps(loader, batch_size=2, min=1, max=4)
    got = []
    for batch in it:
        got.append(batch)
        it._session.batch = 4
    assert got == [(0, 1), (2, 3, 4, 5), (6, 7, 8, 9)]
    assert it.done == 5.0
