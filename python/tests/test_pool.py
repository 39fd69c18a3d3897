"""What a job that moves gives back, and asks for again."""

from __future__ import annotations

import pytest
from fake_torch import MIB, FakeTorch

from roommate.pool import Pool


@pytest.fixture
def asked(torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """MiB of the blocks that were asked for."""
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


def test_what_a_part_needed_is_asked_for_at_once_in_the_next(torch: FakeTorch, asked: list[int]) -> None:
    model, pool = torch.on_gpu(bytes(50 * MIB)), Pool(torch)
    move(pool)
    assert asked == [], "there was nothing but the model"
    for n in range(3):
        torch.needs(200)
        move(pool)
        assert asked == [200] * (n + 1)
        assert torch.reserved == 250 * MIB, "no more than before"
    del model


def test_a_block_that_something_lies_in_is_the_last_one(torch: FakeTorch, asked: list[int]) -> None:
    pool = Pool(torch)
    torch.needs(200)
    move(pool)
    # A batch that is still looked at: none of the block can be given back.
    torch.cuda.empty_cache = lambda: None
    batch = torch.on_gpu(bytes(MIB))
    move(pool)
    torch.needs(200)
    del batch
    move(pool)
    assert asked == [200]


def test_memory_that_somebody_else_has_by_now_is_not_insisted_on(torch: FakeTorch) -> None:
    pool = Pool(torch)
    torch.needs(200)
    torch.full = 1
    move(pool)
    assert torch.reserved == 0


def test_steps_of_another_size_begin_without_a_block(torch: FakeTorch, asked: list[int]) -> None:
    pool = Pool(torch)
    torch.needs(200)
    move(pool)
    pool.drop_block()
    assert torch.reserved == 0
    torch.needs(90)
    move(pool)
    assert asked == [200, 90]
