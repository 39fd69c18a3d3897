"""Memory that a moving job frees and allocates again."""

from __future__ import annotations

import pytest
from fake_torch import MIB, FakeTorch

from roommate.pool import Pool


@pytest.fixture
def asked(torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes in MiB of the allocated blocks."""
    found: list[int] = []
    empty = torch.empty

    def listen(count: int, dtype: str, device: str) -> object:
        found.append(count // MIB)
        return empty(count, dtype, device)

    monkeypatch.setattr(torch, "empty", listen)
    return found


def move(pool: Pool) -> None:
    pool.leave()
    pool.arrive()


def test_after_a_move_the_memory_is_allocated_as_one_block(
    torch: FakeTorch, asked: list[int]
) -> None:
    model, pool = torch.on_gpu(bytes(50 * MIB)), Pool(torch)
    move(pool)
    assert asked == [], "there was no memory beside the model"
    for n in range(3):
        torch.needs(200)
        move(pool)
        assert asked == [200] * (n + 1)
        assert torch.reserved == 250 * MIB, "not more than before"
    del model


def test_a_block_that_cannot_be_freed_is_the_last_one(torch: FakeTorch, asked: list[int]) -> None:
    pool = Pool(torch)
    torch.needs(200)
    move(pool)
    # A batch that is still referenced: the block cannot be freed.
    torch.cuda.empty_cache = lambda: None
    batch = torch.on_gpu(bytes(MIB))
    move(pool)
    torch.needs(200)
    del batch
    move(pool)
    assert asked == [200]


def test_a_failed_block_allocation_is_not_an_error(torch: FakeTorch) -> None:
    pool = Pool(torch)
    torch.needs(200)
    torch.full = 1
    move(pool)
    assert torch.reserved == 0


def test_another_batch_size_starts_without_a_block(torch: FakeTorch, asked: list[int]) -> None:
    pool = Pool(torch)
    torch.needs(200)
    move(pool)
    pool.drop_block()
    assert torch.reserved == 0
    torch.needs(90)
    move(pool)
    assert asked == [200, 90]
