"""The cache of PyTorch's allocator. There is one per stream, so a job that moves to another
partition of the GPU, which is another stream, cannot use the old cache.
"""

from __future__ import annotations

from typing import Any

WORTH = 64 << 20
"""Bytes below which no block is allocated in advance."""


def drop_spare(torch: Any) -> None:
    """Frees cached memory that no tensor uses."""
    # Matrix products keep a workspace for each stream they ran in.
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    torch.cuda.empty_cache()


class Pool:
    """Allocates, after a move to another partition, the memory freed in the previous one as a
    single block that the allocator then splits: otherwise it would request hundreds of pieces one
    by one while the GPU is idle.

    A tensor in such a block that outlives a step prevents the whole block from being freed. Where
    that happens, no further blocks are allocated.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._in_one = True
        # Bytes held at the last move, and how many of them were unused; the size of the block
        # allocated then, and of the next one.
        self._base = self._stuck = self._given = self._next = 0

    def leave(self) -> None:
        """Called when the job is idle and about to move to another partition."""
        before, _ = self._large()
        drop_spare(self._torch)
        now, used = self._large()
        if self._given > 0 and now - used - self._stuck > max(WORTH, self._given // 8):
            self._in_one = False
        self._next = max(0, min(before - self._base, before - now))
        self._base, self._stuck, self._given = now, now - used, 0

    def arrive(self) -> None:
        """Called after the move: the current stream is that of the new partition."""
        if not self._in_one or self._next < WORTH:
            return
        try:
            self._torch.empty(self._next, dtype=self._torch.uint8, device="cuda")
        except RuntimeError:
            # Another process has the memory by now. The allocator requests what a step needs.
            return
        self._given = self._next

    def drop_block(self) -> None:
        """Frees the block when the memory need of steps changes; the allocator then requests
        pieces.
        """
        if self._given > 0:
            drop_spare(self._torch)
            self._given, (self._base, _) = 0, self._large()

    def _large(self) -> tuple[int, int]:
        """Bytes of pieces over 1 MiB: held, and in use."""
        stats = self._torch.cuda.memory_stats()
        names = (f"{what}_bytes.large_pool.current" for what in ("reserved", "allocated"))
        held, used = (stats.get(name, 0) for name in names)
        return int(held), int(used)
